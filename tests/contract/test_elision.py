"""A SAVE op keeps nothing that replay has anyway, and backward sees exactly the same values all the same."""

from __future__ import annotations

import pytest
import torch

import torch_remat as remat
from tests.handle_ops import RECOMPUTE, SAVE, STYLES, Affine, Kernel, Trace, call
from tests.helpers import (
    assert_same,
    assert_same_program,
    checkpointed,
    leaf,
    name_of,
    pairwise,
    plain,
)

VIEWS = {
    "itself": lambda t: t,
    "detached": lambda t: t.detach(),
    "transposed": lambda t: t.t(),
    "expanded": lambda t: t[0].expand(5, 4),
    "unfolded": lambda t: t.view(16).unfold(0, 3, 2),
    "as strided": lambda t: t.as_strided((2, 3), (5, 1), 2),
    "smaller dtype": lambda t: t.view(torch.float16),
    "of complex": lambda t: t,
    "conjugate": lambda t: t.conj(),
    "negative": lambda t: t.conj().imag,
}
OF_COMPLEX = ("of complex", "conjugate", "negative")


def description(tensor):
    """Return all that tells how a tensor shows its storage."""
    how = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
    return (*how, tensor.is_conj(), tensor.is_neg())


PRODUCER = Kernel("producer", (), lambda ctx, x: (x * 2 + 1, {}), lambda ctx, saved, grad: grad * 2)


def numbers(tensor):
    """Return the tensor's values as bounded doubles that autograd does not follow."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().nan_to_num().tanh()


def keeper_kernel(make, seen):
    """Return a kernel that saves what `make` makes of its input, and notes what backward sees of it."""

    def forward(ctx, x):
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return numbers(x).sum(), {"v": make(x)}

    def backward(ctx, saved, grad):
        seen.append((description(saved[0]), numbers(saved[0])))
        return (grad * numbers(saved[0]).sum()).to(ctx.dtype).expand(ctx.shape)

    return Kernel("keeper", ("v",), forward, backward)


def run_keeper(style, wrap, producer, view, where, seen, dtype):
    """Run a region with a producer and a SAVE op that saves a view of what it made.

    Returns:
        The trace, what was alive after forward, and the tensors to compare.
    """
    keeper = keeper_kernel(view if where == "body" else VIEWS["itself"], seen)
    trace = Trace()

    def block(x):
        if producer == "op":
            x = call(style, PRODUCER, trace, "producer", RECOMPUTE, x)
        elif producer == "native":
            x = x * 2 + 1
            trace.ran("producer", (), (x,))
        return call(style, keeper, trace, "keeper", SAVE, view(x) if where == "caller" else x)

    x = torch.randn(4, 4, dtype=dtype, requires_grad=True)
    if where == "caller" and not view(x).requires_grad:
        pytest.skip("plain autograd saves nothing")
    y = wrap(block)(x * 1)
    alive = trace.alive()
    y.sum().backward()
    return trace, alive, [y, x.grad]


def check_keeper(style, producer, view, where, dtype=torch.float32):
    results, seen = [], []
    for wrap in (plain, checkpointed):
        torch.manual_seed(4)
        trace, alive, result = run_keeper(style, wrap, producer, view, where, seen, dtype)
        results.append(result)
        if wrap is checkpointed:
            assert alive <= {"keeper.out"}
            assert trace.runs["keeper"] == 1
    assert_same(*results)
    (how, values), (how_region, values_region) = seen
    assert how == how_region
    assert_same(values, values_region)


@pairwise(
    name=VIEWS,
    style=STYLES,
    producer=["input", "op", "native"],
    where=["caller", "body"],
    possible=lambda style, producer, **_: producer != "native" or style == "auto",  # where the arguments are known
)
def test_saved_view_of_what_replay_has_keeps_nothing_and_is_exact(name, style, producer, where):
    check_keeper(style, producer, VIEWS[name], where, torch.complex64 if name in OF_COMPLEX else torch.float32)


OTHER = {
    "dtype": lambda h: h.double(),
    "producer": lambda h: h.flip(0),
    "shape": lambda h: h[:2].clone(),
    "device": lambda h: h.to("meta"),
    "no tensor": lambda h: None,
}


@pairwise(
    name=OTHER, style=["auto"], check=["default", "bitwise", "none", torch.sum], where=["caller", "body"], ids=name_of
)
def test_saved_input_that_differs_in_replay_is_an_error_of_the_op_that_saved_it(name, style, check, where):
    keeper = Kernel(
        "keeper",
        ("x",),
        lambda ctx, x: (x.exp(), {"x": x if where == "caller" else x.view(2, 2).t()}),
        lambda ctx, saved, grad: grad * saved[0].reshape(4).exp(),
    )

    def block(x):
        h = x.sin()
        return call(style, keeper, Trace(), "keeper", SAVE, OTHER[name](h) if remat.is_recomputing() else h)

    x = leaf(4)
    loss = checkpointed(block, region_name="block", determinism_check=check)(x).sum()
    if name == "producer" and check in ("none", torch.sum):
        loss.backward()  # nothing but what was asked for is compared
        return
    with pytest.raises(remat.MismatchError) as caught:
        loss.backward()
    assert x.grad is None
    assert (caught.value.region, caught.value.op, caught.value.tensor) == ("block", "keeper", "x")


def halve_data(h):
    h.data.mul_(0.5)


def halve_in_numpy(h):
    h.detach().numpy()[...] *= 0.5


def replace_data(h):
    h.data = h.data * 0.5


@pytest.mark.parametrize("policy", [None, remat.policies.save_matmuls], ids=["", "policy"])
@pairwise(style=STYLES, write=[halve_data, halve_in_numpy, replace_data], early_stop=[True, False])
def test_write_that_no_version_counts_before_a_saved_op_saves_the_tensor_gives_equal_gradients(
    style, write, early_stop, policy
):
    """Replay makes the tensor at its producer, but has to go on to the op that saved it."""

    def program(wrap):
        x = leaf(4)

        def block(x):
            h = call(style, PRODUCER, Trace(), "producer", RECOMPUTE, x)
            write(h)
            return call(style, Affine, Trace(), "keeper", SAVE, h, x)

        y = wrap(block)(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program, early_stop=early_stop, policy=policy)
