"""Every way to the data of a placeholder raises PlaceholderError, and leaves real tensors as they were."""

from __future__ import annotations

import copy
import io
import math
import operator
import pickle
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch.nn import functional as F
from torch.utils.dlpack import to_dlpack

import torch_remat as remat
from tests.handle_ops import RECOMPUTE, SAVE, Inner, Trace, call
from tests.helpers import CountOps, leaf
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
    "storage": lambda x: x.storage(),
    "_typed_storage": lambda x: x._typed_storage(),
    "numpy": lambda x: x.numpy(),
    "numpy ": lambda x: x.numpy(force=True),
    "__array__": lambda x: x.__array__(),
    "tolist": lambda x: x.tolist(),
    "__dlpack__": lambda x: x.__dlpack__(),
    "__reduce_ex__": lambda x: pickle.dumps(x),
    "__reduce_ex__ ": lambda x: pickle.dumps({"a": [x]}),
    "__reduce_ex__  ": lambda x: ForkingPickler.dumps(x),
    "__reduce_ex__   ": lambda x: torch.save(x, io.BytesIO()),
    "__deepcopy__": lambda x: copy.deepcopy(x),
    "__deepcopy__ ": lambda x: copy.deepcopy({"a": [x]}),
    "share_memory_": lambda x: x.share_memory_(),
}


@pytest.mark.parametrize(("name", "access"), MEMORY.items(), ids=MEMORY)
def test_access_to_memory_raises(name, access):
    assert_refused(access, matrix(), name.strip())


@pytest.mark.parametrize(("name", "access"), MEMORY.items(), ids=MEMORY)
def test_access_to_the_memory_of_a_view_raises(name, access):
    assert_refused(access, matrix().t()[1:].detach(), name.strip())


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol_raises(protocol):
    assert_refused(lambda x: pickle.dumps(x, protocol), matrix(), "__reduce_ex__")


def test_dlpack_consumer_raises():
    assert_refused(torch.from_dlpack, matrix(), "")


def test_numpy_array_of_it_raises():
    numpy = pytest.importorskip("numpy")
    assert_refused(lambda x: numpy.asarray(x), matrix(), "__array__")
    assert_refused(lambda x: numpy.add(x, 1), matrix(), "__array")


SCALARS = {
    "item": lambda x: x.item(),
    "bool": lambda x: bool(x),
    "int": lambda x: int(x),
    "float": lambda x: float(x),
    "complex": lambda x: complex(x),
    "index": lambda x: operator.index(x),
    "list index": lambda x: [1, 2, 3][x],
    "range": lambda x: range(x),
    "branch": lambda x: 1 if x else 2,
    "not": lambda x: not x,
    "while": lambda x: next(iter([1]) if x else iter([2])),
    "tolist": lambda x: x.tolist(),
    "math": lambda x: math.sqrt(x),
    "format": lambda x: f"{x:.2f}",
    "full": lambda x: torch.full((2,), x),
    "is_nonzero": lambda x: torch.is_nonzero(x),
    "size": lambda x: torch.zeros(x),
    "select": lambda x: torch.arange(3).select(0, x),
    "slice": lambda x: torch.arange(3)[: x + 0],
}


@pytest.mark.parametrize("read", SCALARS.values(), ids=SCALARS)
def test_python_scalar_of_it_raises(read):
    assert_refused(read, scalar(torch.int64), "")


OTHER = torch.arange(6.0).view(2, 3)
AS_VALUE = {
    "add": lambda x, y: x + 1,
    "add real": lambda x, y: y + x,
    "matmul": lambda x, y: y @ x.t(),
    "neg": lambda x, y: -x,
    "clone": lambda x, y: x.clone(),
    "copy": lambda x, y: copy.copy(x),
    "sum": lambda x, y: x.sum(),
    "equal": lambda x, y: torch.equal(x, y),
    "equal real": lambda x, y: torch.equal(y, x),
    "equal itself": lambda x, y: torch.equal(x, x),
    "allclose": lambda x, y: torch.allclose(x, y),
    "==": lambda x, y: x == y,
    "!=": lambda x, y: x != 3,
    "<": lambda x, y: y < x,
    "in": lambda x, y: 3 in x,
    "cat": lambda x, y: torch.cat([y, x]),
    "stack": lambda x, y: torch.stack([x, y]),
    "stack its own": lambda x, y: torch.stack([x, x]),
    "where": lambda x, y: torch.where(y > 0, y, x),
    "einsum": lambda x, y: torch.einsum("ij,ij->", x, y),
    "foreach": lambda x, y: torch._foreach_add([y, x], 1),
    "to dtype": lambda x, y: x.to(torch.float64),
    "to copy": lambda x, y: x.to(torch.float32, copy=True),
    "double": lambda x, y: x.double(),
    "type": lambda x, y: x.type(torch.int32),
    "cpu with another dtype": lambda x, y: x.to("cpu", torch.float16),
    "new memory format": lambda x, y: x.t().contiguous(),
    "reshape that copies": lambda x, y: x.t().reshape(6),
    "linear": lambda x, y: F.linear(x, y),
    "layer norm": lambda x, y: F.layer_norm(x, (3,)),
    "dropout": lambda x, y: F.dropout(x, 0.5),
    "embedding": lambda x, y: F.embedding(torch.tensor([0]), x),
    "attention": lambda x, y: F.scaled_dot_product_attention(x, y, y),
    "module": lambda x, y: torch.nn.Linear(3, 1)(x),
    "vmap": lambda x, y: torch.func.vmap(torch.sin)(x),
    "grad transform": lambda x, y: torch.func.grad(lambda z: z.sin().sum())(x),
    "autograd weight": lambda x, y: torch.autograd.grad(y.requires_grad_().sin(), y, x),
    "index by numbers": lambda x, y: x[[0, 1]],
    "index by mask": lambda x, y: x[y > 1],
    "index with a tensor": lambda x, y: x[torch.tensor([0])],
    "gather": lambda x, y: x.gather(0, torch.zeros(1, 1, dtype=torch.int64)),
    "nonzero": lambda x, y: x.nonzero(),
    "unique": lambda x, y: x.unique(),
    "sparse": lambda x, y: x.to_sparse(),
    "multinomial": lambda x, y: x.multinomial(1),
    "bernoulli": lambda x, y: torch.bernoulli(x),
    "tensor": lambda x, y: torch.stack(list(x)),
}
AS_TARGET = {
    "copy_ from it": lambda x, y: y.copy_(x),
    "copy_ into it": lambda x, y: x.copy_(y),
    "add_": lambda x, y: x.add_(1),
    "add_ to a real one": lambda x, y: y.add_(x),
    "+=": lambda x, y: operator.iadd(x, y),
    "zero_": lambda x, y: x.zero_(),
    "fill_": lambda x, y: x.fill_(3),
    "fill_ with it": lambda x, y: y.fill_(x.sum()),
    "normal_": lambda x, y: x.normal_(),
    "uniform init": lambda x, y: torch.nn.init.uniform_(x),
    "setitem": lambda x, y: operator.setitem(x, 0, 1.0),
    "setitem of a real one": lambda x, y: operator.setitem(y, 0, x[0]),
    "setitem where it says": lambda x, y: operator.setitem(y, x.detach().view(torch.int32) > 0, 1.0),
    "out=": lambda x, y: torch.sin(y, out=x),
    "out= real": lambda x, y: torch.sin(x, out=y),
    "set_": lambda x, y: y.set_(x),
    "set_ it": lambda x, y: x.set_(y),
    "index_add_": lambda x, y: y.index_add_(0, torch.tensor([0, 1]), x),
    "masked_fill_": lambda x, y: y.masked_fill_(x.detach().view(torch.int32) > 0, 1.0),
    "foreach in place": lambda x, y: torch._foreach_add_([y], [x]),
    "addcmul_": lambda x, y: y.addcmul_(x, y),
    "resize": lambda x, y: x.resize_(100),
    "apply_": lambda x, y: x.apply_(lambda v: v),
    "map_": lambda x, y: y.map_(x, lambda v, w: w),
}


@pytest.mark.parametrize("consume", AS_VALUE.values(), ids=AS_VALUE)
def test_value_of_it_raises(consume):
    assert_refused(lambda x: consume(x, OTHER.clone()), matrix(), "")


@pytest.mark.parametrize("consume", AS_TARGET.values(), ids=AS_TARGET)
def test_write_to_it_or_from_it_raises_and_changes_no_real_tensor(consume):
    other = OTHER.clone()
    assert_refused(lambda x: consume(x, other), matrix(), "")
    assert torch.equal(other, OTHER)
    assert type(other) is torch.Tensor


def test_index_tensor_without_data_raises():
    index = placeholder_of(torch.zeros(2, dtype=torch.int64))
    for consume in (
        lambda i: OTHER[i],
        lambda i: OTHER[:, i],
        lambda i: OTHER[[0, 1], i],
        lambda i: OTHER.index_select(0, i),
        lambda i: OTHER.tensor_split(i),
        lambda i: OTHER.repeat_interleave(i, 0),
        lambda i: OTHER.clone().index_fill_(0, i, 1),
        lambda i: F.embedding(i, OTHER),
        lambda i: F.one_hot(i),
        lambda i: torch.bincount(i),
    ):
        assert_refused(consume, index, "")


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32),
        *(torch.int64, torch.uint16, torch.uint32, torch.uint64),
    ],
    ids=str,
)
def test_data_of_every_dtype_is_refused(dtype):
    given = placeholder_of(torch.empty(1, dtype=dtype))
    for consume in (torch.clone, torch.zero_, lambda x: x.tolist(), lambda x: x.data_ptr(), lambda x: x.item()):
        assert_refused(consume, given, "")


def test_data_of_no_elements_is_refused_too():
    assert_refused(torch.clone, placeholder_of(torch.empty(0, 3)), "clone")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_consumption_inside_a_mode_raises(mode):
    with mode():
        assert_refused(lambda x: F.linear(x, OTHER), matrix(), "")


def test_consumption_under_a_dispatch_mode_raises():
    given = matrix()
    with CountOps() as mode, pytest.raises(remat.PlaceholderError):
        given.t().sin()
    assert mode.counts == {"t": 1, "sin": 1}


UNBOUND = ("data_ptr", "untyped_storage", "tolist", "numpy", "__reduce_ex__", "__deepcopy__", "__dlpack__")


@pytest.mark.parametrize("name", UNBOUND)
def test_unbound_method_raises_as_the_bound_one_does(name):
    arguments = {"__reduce_ex__": (2,), "__deepcopy__": ({},)}.get(name, ())
    assert_refused(lambda x: getattr(torch.Tensor, name)(x, *arguments), matrix(), "")


def test_autocast_cache_does_not_hold_a_refused_placeholder():
    given = matrix().requires_grad_()
    with torch.autocast("cpu"):
        for _ in range(2):
            assert_refused(lambda x: x @ OTHER.t(), given, "")


def test_placeholder_that_is_given_data_still_refuses():
    given = matrix()
    try:
        given.data = torch.ones(2, 3)
    except remat.PlaceholderError:
        return
    assert remat.is_placeholder(given)
    assert_refused(torch.clone, given, "clone")
    assert_refused(lambda x: x.data_ptr(), given, "data_ptr")


@pytest.mark.parametrize("read", [to_dlpack, lambda x: torch.tensor([x[0, 0]])], ids=["to_dlpack", "tensor of list"])
def test_read_inside_torch_past_every_hook_raises(read):
    with pytest.raises(RuntimeError):  # no code of ours runs, so that torch's own error has to do
        read(matrix())


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
