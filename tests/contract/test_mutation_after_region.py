"""Results of native regions and calls that code outside of them changes in place, and other things that come after."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_remat as remat
from tests.helpers import assert_same, leaf, pairwise

SAVE, OFFLOAD = remat.CheckpointPolicy.SAVE, remat.CheckpointPolicy.OFFLOAD

CALLS = {
    "native": remat.native_save_region,
    "region": lambda name, function, *args: remat.op(function, name)(*args),
}


def plainly(_name, function, *args):
    return function(*args)


def gradients(function, x, options=None, seed=0):
    """Return the gradient by one argument; a RematWarning that a call is made again is in order."""
    torch.manual_seed(seed)
    run = function if options is None else remat.checkpoint(**options)(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat.RematWarning)
        return torch.autograd.grad(run(x).float().square().sum(), x)


def weight(*shape):
    return torch.linspace(-1, 1, torch.Size(shape).numel()).cos().view(shape)


MAKERS = {
    "linear without bias": lambda x: F.linear(x, weight(8, 8)),
    "product": lambda x: x @ weight(8, 8),
    "scores": lambda x: x @ x.mT,
    "reshaped": lambda x: (x * 2).mT.reshape(4, 24),
    "chunk": lambda x: (x * 2).unsafe_chunk(2, -1)[0],
    "split": lambda x: (x * 2).unsafe_split(4, -1)[1],
    "linear": lambda x: F.linear(x, weight(8, 8), weight(8)),
    "view": lambda x: (x * 2).view(4, 24),
}
CHANGES = {
    "silu": lambda h: F.silu(h, inplace=True),
    "clamp": lambda h: h.clamp_(-0.2, 0.2).mul(2),
    "mul": lambda h: h.mul_(h.detach().clone()),
    "div": lambda h: h.div_(h.detach().abs() + 1).sin(),
    "part": lambda h: F.silu(h[..., :1], inplace=True).sum() * h,
}


@pairwise(
    maker=MAKERS,
    change=CHANGES,
    call=CALLS,
    options=[{}, {"determinism_check": "bitwise"}, {"early_stop": False}, {"policy": remat.policies.save_matmuls}],
)
def test_saved_result_that_is_changed_afterwards_is_made_again(maker, change, call, options):
    """Also where the change is counted by an alias alone, as that which `F.linear` returns without a bias."""

    def block(x, run):
        return CHANGES[change](run("made", MAKERS[maker], x))

    x = leaf(3, 4, 8)
    expected = gradients(lambda x: block(x, plainly), x)
    assert_same(expected, gradients(lambda x: block(x, CALLS[call]), x, options))


def two_dropouts(x):
    return F.dropout(x.sin(), 0.5), F.dropout(x.cos(), 0.5)


def three_draws(x):
    torch.rand(3)
    return x.sin() * torch.rand_like(x), (x.cos() + torch.randn_like(x)) * 2


def attention_with_dropout(x):
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.2), F.dropout(x, 0.3)


@pairwise(
    function=[two_dropouts, three_draws, attention_with_dropout],
    which=[0, 1],
    call=CALLS,
    options=[{}, {"determinism_check": "bitwise"}, {"early_stop": False}],
)
def test_what_draws_again_draws_the_same_numbers(function, which, call, options):
    def block(x, run):
        results = run("drawn", function, x)
        return F.silu(results[which], inplace=True) + results[1 - which] + F.dropout(x, 0.5).sin()

    x = leaf(2, 2, 4, 8)
    expected = gradients(lambda x: block(x, plainly), x, seed=3)
    assert_same(expected, gradients(lambda x: block(x, CALLS[call]), x, options, seed=3))


@pytest.mark.parametrize("outer", [None, remat.checkpoint(region_name="outer")])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("part", [False, True])
def test_argument_that_a_call_changes_and_other_code_changes_again(part, call, outer):
    drop = nn.Dropout(0.3, inplace=True)

    def change(h):
        drop(h[1:] if part else h)
        return h

    def block(x, run):
        h = x * 2
        h = run("drop", change, h)
        h += x
        return h.sin().sin()

    x = leaf(3, 8)
    expected = gradients(lambda x: block(x, plainly), x)
    inner = remat.checkpoint()(lambda x: block(x, CALLS[call]))
    assert_same(expected, gradients(inner if outer is None else outer(inner), x))


def force(x):
    z = x.detach().requires_grad_()
    return torch.autograd.grad(z.sin().exp().sum(), z)[0]


@pytest.mark.parametrize(
    "way",
    {
        "policy": lambda: remat.checkpoint(policy=remat.offload_names("*"))(lambda x: x.sin() + force(x)),
        "region": lambda: remat.checkpoint()(lambda x: x.sin() + remat.op(force, "force", policy=OFFLOAD)(x)),
        "native": lambda: remat.checkpoint()(lambda x: x.sin() + remat.op(force, "force", policy=OFFLOAD)(x)),
    }.items(),
    ids=lambda way: way[0],
)
@pytest.mark.filterwarnings("ignore:CpuOffloader moves")
def test_gradient_taken_inside_of_what_is_offloaded(way):
    x = leaf(300, 300)
    assert_same(gradients(lambda x: x.sin() + force(x), x), gradients(way[1](), x))


def test_gradient_taken_through_a_call_that_autocast_casts_for_is_refused_or_right():
    linear = nn.Linear(8, 8)

    def block(x, run):
        with torch.autocast("cpu", torch.bfloat16):
            y = run("linear", linear, x.sin())
            return y * torch.autograd.grad(y.float().square().sum(), x, create_graph=True)[0]

    x = leaf(3, 8)
    for call in CALLS.values():
        with pytest.raises(remat.UsageError, match="gradient is taken through this call"):
            gradients(lambda x, call=call: block(x, call), x, {})


@pytest.mark.parametrize("options", [{}, {"early_stop": False}])
def test_activation_may_change_after_a_gradient_by_a_leaf_in_its_memory(options):
    def block(x):
        h = x * 2
        h.add_(force(h))
        return h.sin()

    x = leaf(3, 4)
    assert_same(gradients(block, x), gradients(block, x, options))


def casts(ctx, op, *args, **kwargs):
    return "_to_copy" in ctx.name


def even_names(ctx, op, *args, **kwargs):
    return len(ctx.name) % 2 == 0


@pytest.mark.parametrize("policy", [casts, even_names])
def test_what_an_inner_region_keeps_under_autocast_does_not_depend_on_addresses(policy):
    """Casts of weights are no entries of the log; they may lie where something lay that was one."""
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(8, 2, 12, batch_first=True)
    x, z = leaf(3, 4, 8), leaf(3, 4, 8)

    def run(inner):
        with torch.autocast("cpu", torch.bfloat16):
            y = remat.checkpoint()(lambda x, z: inner(x, z))(x, z)
        return torch.autograd.grad(y.float().square().sum(), [x, z, *layer.parameters()])

    torch.manual_seed(1)
    expected = run(layer)
    held = []
    for size in range(20):
        torch.manual_seed(1)
        assert_same(expected, run(remat.checkpoint(policy=policy)(lambda x, z: layer(x, z))))
        held.append(torch.randn(size + 1))  # what comes next lies elsewhere
