"""A region modifies a tensor in place: its own, one that a call made, or one created outside after it has read it.

`test_outside.py` has the matrix of who modifies what outside the region, and when it is read; here are the views of
what was modified, shapes that change in place, and tensor subclasses.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import torch_remat as remat
from tests.helpers import assert_same, assert_same_program, leaf, pairwise, plain
from tests.native_programs import aten, full, keep, on_cpu, region
from tests.ways import everything, nothing

# What a call, or code after it, modifies of the region's own tensors has the call run whole, with a warning.
pytestmark = pytest.mark.filterwarnings("ignore:.*replay recomputes this call:torch_remat.RematWarning")


POLICIES = {"matmuls": [aten.mm.default], "nothing": nothing, "everything": everything}


# --- It reads a tensor created outside, and modifies it afterwards


def reading_before(run, x, w, state):
    h = x @ w - state
    run("update", lambda: state.add_(1))
    return h.sin()


def reading_a_number_before(run, x, w, state):
    h = x @ w * state.sum().item()
    run("update", lambda: state.add_(1))
    return h.sin()


def stateful_program(function, run, how, wrap):
    """Return the output, the gradients and the tensor that the function changed."""
    torch.manual_seed(3)
    x, w, state = leaf(4, 4), leaf(4, 4), torch.rand(4, 4)
    if how == "args":
        y = wrap(lambda x, state: function(run, x, w, state))(x, state)
    else:
        y = wrap(lambda x: function(run, x, w, state))(x)
    gradients = torch.autograd.grad(y.sum(), [x, w], retain_graph=True)
    return y, gradients, torch.autograd.grad(y.sum(), [x, w]), state


@pairwise(function=[reading_before, reading_a_number_before], how=["args", "closure"])
def test_read_of_what_a_native_region_changes_later_is_refused_by_name(function, how):
    by_closure = r"(?=.*shape \(4, 4\)).* at test_mutation_in_region.py:\d+"
    what = by_closure if how == "closure" else "the region itself modified this input in place"
    with pytest.raises(remat.MutationError, match=what) as caught:
        stateful_program(function, keep, how, region(region_name="block"))
    assert caught.value.region == "block"
    assert caught.value.tensor == ("variable 'state'" if how == "closure" else "args[1]")


@pytest.mark.parametrize("inner", [None, nothing], ids=["plain", "policy"])
def test_inner_region_that_reads_what_the_outer_one_changes_later_is_refused(inner):
    """Its own replay, which comes after that of the outer one, would read the tensor as it is then."""
    w, state, wrap = leaf(4, 4), torch.rand(4, 4), region(inner)

    def function(x):
        h = wrap(lambda h: (h.sin() - state).exp())(x @ w)
        state.add_(1)
        return h.sin()

    y = region([aten.mm.default])(function)(leaf(4, 4))
    with pytest.raises(remat.MutationError, match=r"add_.* reads a tensor created outside the region"):
        y.sum().backward()


@pytest.mark.parametrize("keeps", [False, True])
def test_write_to_a_wrapper_subclass_after_a_read_is_an_error_where_the_read_is_repeated(keeps):
    """It has no storage that could be copied."""

    def gradient(wrap):
        torch.manual_seed(0)
        x, state = (TwoTensor(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(2))
        x.requires_grad_()

        def block(x):
            y = x - state
            state.view(2, 8).view(4, 4).add_(y.detach())
            return (y * x).sin()

        (grad,) = torch.autograd.grad(wrap(block)(x * 1).sum(), x)
        return grad

    wrap = remat.checkpoint(region_name="r", policy=everything if keeps else nothing)
    if keeps:
        assert_same(gradient(plain), gradient(wrap))
    else:
        with pytest.raises(
            remat.MutationError, match=r"r::add_.* at test_mutation_in_region.py:\d+, but this op modifies it"
        ):
            gradient(wrap)


# --- It modifies its own tensors, and what calls made


def force(x):
    z = x.detach().requires_grad_()
    return torch.autograd.grad(z.sin().exp().sum(), z)[0]


@pytest.mark.parametrize("by_policy", [False, True])
@pytest.mark.filterwarnings("ignore:CpuOffloader moves")
def test_gradient_taken_inside_of_what_is_offloaded(by_policy):
    def program(wrap):
        call = force if by_policy or wrap is plain else remat.op(force, "force", policy=remat.CheckpointPolicy.OFFLOAD)
        x = leaf(300, 300)
        return torch.autograd.grad(wrap(lambda x: x.sin() + call(x))(x).sum(), x)

    assert_same_program(program, policy=remat.offload_names("*") if by_policy else None)


# --- Shapes that change in place


def test_read_of_a_tensor_from_outside_that_a_region_with_a_policy_reshapes_is_refused():
    table = torch.arange(12.0).view(4, 3)

    def block(x):
        table.t_()
        return (x * table).sin()

    with pytest.raises(remat.MutationError, match="variable 'table'"):
        region(nothing)(block)(leaf(3, 4)).sum().backward()


@pytest.mark.parametrize("inside", [True, False])
def test_tensor_that_a_region_with_a_policy_has_overwritten_must_keep_its_shape(inside):
    """The copy from before the change would be seen in another shape than the op saw it in."""
    table = torch.arange(9.0).view(3, 3)

    def block(x):
        y = x + table
        table.mul_(2)
        if inside:
            table.t_()
        return y.sin()

    y = region(nothing)(block)(leaf(3, 3))
    if not inside:
        table.t_()
    with pytest.raises(remat.MutationError, match=r"reads (a tensor|variable 'table').* created outside the region"):
        y.sum().backward()


@pytest.mark.parametrize("saves", ["_to_copy", "mm"])
def test_what_an_inner_region_keeps_under_autocast_does_not_depend_on_addresses(saves):
    """Casts of weights are no entries of the log; they may lie where something lay that was one."""
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(8, 2, 12, batch_first=True)
    x, z = leaf(3, 4, 8), leaf(3, 4, 8)

    def run(inner):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            y = remat.checkpoint()(lambda x, z: inner(x, z))(x, z)
        return torch.autograd.grad(y.float().square().sum(), [x, z, *layer.parameters()])

    expected = run(layer)
    held = []
    for size in range(20):
        inner = remat.checkpoint(policy=lambda ctx, *_, **__: saves in ctx.name)(lambda x, z: layer(x, z))
        assert_same(expected, run(inner))
        held.append(torch.randn(size + 1))  # what comes next lies elsewhere


def test_what_a_region_with_a_native_region_keeps_under_autocast_does_not_depend_on_addresses():
    x, w = leaf(4, 4), leaf(4, 4)

    def inner(x):
        s = x.sin()
        return keep("product", torch.mm, torch.stack([s, s]).mean(0), w)  # a cast may lie where the stack lay

    def run(inner):
        with torch.autocast("cpu", torch.bfloat16):
            y = remat.checkpoint()(lambda x: inner(x.cos()))(x * 1.0)
        return torch.autograd.grad(y.float().sum(), [x, w])

    expected = run(lambda x: torch.stack([x.sin(), x.sin()]).mean(0) @ w)
    held = []
    for _ in range(100):
        assert_same(expected, run(region([aten.sin.default])(inner)))
        held.append(torch.randn(4, 4))  # what comes next lies elsewhere


AROUND = {
    "nothing": plain,
    "a region": remat.checkpoint(),
    "a region to its end": remat.checkpoint(early_stop=False),
    "torch's checkpoint": full,
    "save_on_cpu": on_cpu,
}


def _modifies_what_it_saved(a, b):
    a = torch.relu_(a)
    b.t().sub_(1)
    return a


@pairwise(around=AROUND, policy=[remat.CheckpointPolicy.SAVE, remat.CheckpointPolicy.OFFLOAD])
def test_call_that_modifies_what_it_saved_is_an_error_under_whatever_hooks(around, policy):
    call = remat.op(_modifies_what_it_saved, "call", policy=policy)
    run = remat.checkpoint()(lambda x: call(x, x))
    y = AROUND[around](lambda x: run(x.cos()))(leaf(4, 4))
    with pytest.raises(remat.MutationError, match="modified in place after it was saved"):
        y.sum().backward()


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("policy", [[aten.add_.Tensor], [aten.mm.default], None])
def test_tensor_that_is_replaced_after_forward_is_as_the_user_left_it_after_backward(policy, early_stop):
    """Replay writes what forward wrote, also to what is there now, or refuses to read it."""
    module = nn.Module()
    module.state = torch.ones(4)

    def block(x):
        with torch.no_grad():
            module.state.add_(x.detach().abs().mean(0))
        return (x * module.state).softmax(-1)

    x = leaf(4, 4)
    expected = torch.autograd.grad(block(x * 1.0).cos().sum(), x)
    module.state = torch.ones(4)
    y = region(policy, early_stop=early_stop)(block)(x * 1.0)
    module.state = replaced = module.state * 2
    left, version = replaced.clone(), replaced._version
    with contextlib.suppress(remat.MutationError):
        assert_same(expected, torch.autograd.grad(y.cos().sum(), x))
    assert module.state is replaced
    assert torch.equal(replaced, left)
    assert replaced._version == version


WRITES_OF_AN_ARGUMENT = {
    "relu_": lambda b: b.relu_(),
    "mul_": lambda b: b.mul_(0.9),
    "exp_": lambda b: b.exp_(),
    "a row": lambda b: b[0].mul_(0.5),
    "a view": lambda b: b.view(-1)[::3].tanh_(),
    "transposed": lambda b: b.t().sigmoid_(),
    "twice": lambda b: b.mul_(2).sigmoid_(),
    "dropout": lambda b: F.dropout(b, 0.5, inplace=True),
}


@pytest.mark.parametrize("policy", [None, nothing, [aten.mm.default]], ids=["plain", "nothing", "matmuls"])
@pytest.mark.parametrize("write", WRITES_OF_AN_ARGUMENT.values(), ids=WRITES_OF_AN_ARGUMENT)
def test_region_that_writes_an_argument_is_refused_whatever_its_policy(write, policy):
    def block(a, b):
        write(b)
        return (a @ b).tanh(), b.exp()

    x, y = leaf(4, 4), leaf(4, 4)
    first, second = region(policy)(block)(x.sin(), y.cos())
    with pytest.raises(remat.MutationError, match="the region itself modified this input in place") as caught:
        (first.sum() + second.sum()).backward()
    assert caught.value.tensor == "args[1]"
