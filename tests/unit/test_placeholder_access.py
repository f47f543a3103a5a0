"""Every way to the data of a placeholder raises PlaceholderError, and leaves real tensors as they were."""

from __future__ import annotations

import copy
import io
import operator
import pickle
import sys

import numpy
import pytest
import torch
from torch.nn import functional as F
from torch.utils.dlpack import to_dlpack

import torch_remat as remat
from tests.handle_ops import RECOMPUTE, SAVE, Inner, Trace, call
from tests.helpers import leaf
from torch_remat.dispatch.ops.schema import effects_of
from torch_remat.dispatch.placeholder import Source, make_placeholder

SOURCE = Source("block", "op", "out")


def placeholder_of(like):
    """Return the placeholder of a tensor; it asks for gradients if the tensor does."""
    return make_placeholder(like.detach(), SOURCE).requires_grad_(like.requires_grad)


def matrix(dtype=torch.float32):
    return placeholder_of(torch.ones(2, 3, dtype=dtype))


def scalar(dtype=torch.float32):
    return placeholder_of(torch.ones((), dtype=dtype))


def assert_refused(consume, given, consumer):
    """Assert that a call on a placeholder is refused by an error that names what was placed and what consumed it."""
    with pytest.raises(remat.PlaceholderError) as caught:
        consume(given)
    error = caught.value
    assert (error.region, error.op, error.tensor) == SOURCE[:3]
    assert consumer in error.consumer
    assert error.line.startswith("test_placeholder_access.py:")


# What reaches the memory without an aten op; the name of the access is a part of `consumer`.
MEMORY = {
    "data_ptr": lambda x: x.data_ptr(),
    "untyped_storage": lambda x: x.untyped_storage(),
    "numpy": lambda x: x.numpy(),
    "tolist": lambda x: x.tolist(),
    "__dlpack__": lambda x: x.__dlpack__(),
    "__reduce_ex__": lambda x: pickle.dumps(x),
    "__reduce_ex__   ": lambda x: torch.save(x, io.BytesIO()),
    "__deepcopy__": lambda x: copy.deepcopy(x),
    "__array__ ": lambda x: numpy.add(x, 1),
}


@pytest.mark.parametrize(("name", "access"), MEMORY.items(), ids=MEMORY)
def test_access_to_memory_raises(name, access):
    for given in (matrix(), matrix().t()[1:].detach()):
        assert_refused(access, given, name.strip())


SCALARS = {
    "bool": lambda x: bool(x),
    "float": lambda x: float(x),
    "index": lambda x: operator.index(x),
    "format": lambda x: f"{x:.2f}",
}


OTHER = torch.arange(6.0).view(2, 3)
# Ops beside those that `test_placeholder_sweep.py` has of torch's database, by way of operators and Python.
AS_VALUE = {
    "add": lambda x, y: x + 1,
    "equal itself": lambda x, y: torch.equal(x, x),
    "<": lambda x, y: y < x,
    "stack its own": lambda x, y: torch.stack([x, x]),
    "reshape that copies": lambda x, y: x.t().reshape(6),
    "vmap": lambda x, y: torch.func.vmap(torch.sin)(x),
    "grad transform": lambda x, y: torch.func.grad(lambda z: z.sin().sum())(x),
    "autograd weight": lambda x, y: torch.autograd.grad(y.requires_grad_().sin(), y, x),
    "index by numbers": lambda x, y: x[[0, 1]],
}
AS_TARGET = {
    "copy_ from it": lambda x, y: y.copy_(x),
    "+=": lambda x, y: operator.iadd(x, y),
    "fill_ with it": lambda x, y: y.fill_(x.sum()),
    "setitem of a real one": lambda x, y: operator.setitem(y, 0, x[0]),
    "setitem where it says": lambda x, y: operator.setitem(y, x.detach().view(torch.int32) > 0, 1.0),
    "out= real": lambda x, y: torch.sin(x, out=y),
    "resize_": lambda x, y: x.resize_(1),
    "set_": lambda x, y: x.set_(y),
    "apply_": lambda x, y: x.apply_(lambda v: v),
}


@pytest.mark.parametrize("consume", AS_TARGET.values(), ids=AS_TARGET)
def test_write_to_it_or_from_it_raises_and_changes_no_real_tensor(consume):
    other = OTHER.clone()
    assert_refused(lambda x: consume(x, other), matrix(), "")
    assert torch.equal(other, OTHER)
    assert type(other) is torch.Tensor


def test_value_of_it_raises():
    index = placeholder_of(torch.zeros(2, dtype=torch.int64))
    for read in SCALARS.values():
        assert_refused(read, scalar(torch.int64), "")
    for consume in AS_VALUE.values():
        assert_refused(lambda x, consume=consume: consume(x, OTHER.clone()), matrix(), "")
    for consume in (lambda i: OTHER[i], lambda i: OTHER[:, i], lambda i: F.embedding(i, OTHER)):
        assert_refused(consume, index, "")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_error_of_a_read_past_every_hook_says_what_the_data_may_have_been():
    def block(x):
        h = call("auto", Inner, Trace(), "it", SAVE, x)
        to_dlpack(h.detach())
        return call("auto", Inner, Trace(), "reader", RECOMPUTE, h).sin()

    y = remat.checkpoint(region_name="block")(block)(leaf(3))
    with pytest.raises(RuntimeError, match="data pointer") as caught:
        y.sum().backward()
    (note,) = caught.value.__notes__
    assert "region 'block'" in note
    assert "output of a SAVE op" in note
    assert "RECOMPUTE" in note


# --- Custom ops


DEFINE = {
    "value": "(Tensor x) -> Tensor",
    "view": "(Tensor(a) x) -> Tensor(a)",
    "write": "(Tensor(a!) x) -> ()",
    "number": "(Tensor x) -> float",
    "many": "(Tensor[] x) -> Tensor",
}


@pytest.fixture(scope="module")
def library():
    """Define ops with a CPU kernel that reads memory; the view has no other kernel."""
    library = torch.library.Library("remat_placeholder", "DEF")
    for name, schema in DEFINE.items():
        library.define(name + schema)
        library.impl(name, lambda *args, **kwargs: pytest.fail("the kernel ran"), "CPU")
    yield torch.ops.remat_placeholder
    library._destroy()


@pytest.mark.parametrize("name", DEFINE)
@pytest.mark.filterwarnings("ignore")  # an op without autograd kernel warns
def test_custom_op_of_a_library_raises(library, name):
    op = getattr(library, name)
    assert_refused(lambda x: op([OTHER, x] if name == "many" else x), matrix(), f"remat_placeholder.{name}")


def test_op_that_takes_the_place_of_one_of_a_library_that_is_gone_is_taken_for_what_it_is():
    """By their addresses ops are told apart faster than by their hashes."""

    def define(name, schema):
        library = torch.library.Library("remat_short_lived", "FRAGMENT")
        library.define(name + schema)
        return library, getattr(torch.ops.remat_short_lived, name).default

    for round in range(50):
        library, op = define(f"view{round}", "(Tensor(a) x) -> Tensor(a)")
        assert effects_of(op).viewed == (0, "x")
        del op
        library._destroy()
        library, op = define(f"value{round}", "(Tensor x) -> Tensor")
        assert effects_of(op).viewed is None
        del op
        library._destroy()
