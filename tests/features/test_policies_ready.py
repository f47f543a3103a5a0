"""`remat.policies`: the ready-made policies, alone and combined with `|`."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import torch_remat as remat
from tests.helpers import assert_equal_gradients, assert_same, assert_same_program, leaf
from tests.native_programs import (
    ATTENTION,
    MATMULS,
    TransformerBlock,
    aten,
    region,
    replayed_ops,
    retained_bytes,
)
from torch_remat import policies

MM = [aten.mm.default]


def sine_chain(x, w):
    """Six times a matmul and a sine."""
    for _ in range(6):
        x = (x @ w).sin()
    return x


def test_all_are_there():
    names = {"save_attention", "save_matmuls", "save_every_other_matmul", "save_discrete", "never_replay_effects"}
    assert {*names, "save_collectives"} == set(policies.__all__) <= set(dir(policies))
    assert remat.policies is policies


# Each alone


def test_save_attention_is_the_list_of_attention_ops():
    x, block = leaf(2, 8, 16), TransformerBlock(16, 2)
    parameters = list(block.parameters())
    assert replayed_ops(block, region(policies.save_attention), [x], parameters) == replayed_ops(
        block, region(ATTENTION), [x], parameters
    )
    x, block = leaf(4, 128, 256), TransformerBlock()
    assert retained_bytes(region(policies.save_attention)(block), [x]) == 1_056_768


def test_save_matmuls_is_the_list_of_matmul_ops():
    x, block = leaf(2, 8, 16), TransformerBlock(16, 2)
    parameters = list(block.parameters())
    assert replayed_ops(block, region(policies.save_matmuls), [x], parameters) == replayed_ops(
        block, region(MATMULS), [x], parameters
    )
    x, block = leaf(4, 128, 256), TransformerBlock()
    assert retained_bytes(region(policies.save_matmuls)(block), [x]) == 4_718_592


@pytest.mark.parametrize("product", ["mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "einsum"])
def test_save_matmuls_saves_products_of_every_form(product):
    def function(x, w):
        b = x.expand(2, 4, 4)
        y = {
            "mm": lambda: x @ w,
            "addmm": lambda: torch.addmm(x, x, w),
            "bmm": lambda: torch.bmm(b, b * 2),
            "baddbmm": lambda: torch.baddbmm(b, b, b),
            "matmul": lambda: b @ w,
            "linear": lambda: F.linear(b, w, x[0]),
            "einsum": lambda: torch.einsum("bij,jk->bik", b, w),
        }[product]()
        return y.sin().exp()

    inputs = leaf(4, 4), leaf(4, 4)
    assert_equal_gradients(function, region(policies.save_matmuls)(function), inputs)
    assert not {"mm", "addmm", "bmm", "baddbmm"} & set(replayed_ops(function, region(policies.save_matmuls), inputs))


def test_save_every_other_matmul_saves_half_of_them_and_always_the_same():
    inputs = leaf(4, 4), leaf(4, 4)
    assert_equal_gradients(sine_chain, region(policies.save_every_other_matmul)(sine_chain), inputs)
    for _ in range(2):
        replayed = replayed_ops(sine_chain, region(policies.save_every_other_matmul), inputs)
        assert replayed["mm"] == 3


def test_save_every_other_matmul_has_no_state():
    """With an odd number of products a counter would alternate from region to region."""

    def odd(x, w):
        for _ in range(3):
            x = (x @ w).sin()
        return x

    inputs = leaf(4, 4), leaf(4, 4)
    wrap = region(policies.save_every_other_matmul)
    counts = [replayed_ops(odd, wrap, inputs)["mm"] for _ in range(4)]
    assert counts == [1] * 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
        lambda: TransformerBlock(8, 2),
    ],
)
def test_save_every_other_matmul_alternates_over_the_whole_region(make):
    """Each module here runs one product, so that a count for each module would save all or none."""
    module, x = make(), leaf(2, 4, 8)
    asked = []

    def policy(ctx, op, *args, **kwargs):
        if (said := policies.save_every_other_matmul(ctx, op, *args, **kwargs)) or policies.save_matmuls(ctx, op):
            asked.append(said)
        return said

    assert_equal_gradients(module, region(policies.save_every_other_matmul)(module), [x])
    region(policy)(module)(x).sum().backward()
    count = len(asked)
    assert count >= 4
    assert asked == [place % 2 == 0 for place in range(count)]
    table = remat.list_names(module, policy=policies.save_every_other_matmul)(x)
    assert any(row.kept for row in table)


def test_save_every_other_matmul_counts_anew_in_the_replay_of_an_outer_region():
    def odd(x, w):
        for _ in range(3):
            x = (x @ w).sin()
        return x

    inner = region(policies.save_every_other_matmul)(odd)

    def outer(x, w):
        return inner(inner(x, w).cos(), w).exp()

    inputs = leaf(4, 4), leaf(4, 4)
    both = remat.checkpoint()(outer), region(policies.save_every_other_matmul)(outer)
    for checkpointed in both:
        assert_equal_gradients(lambda x, w: odd(odd(x, w).cos(), w).exp(), checkpointed, inputs)


@pytest.mark.parametrize(
    "op", ["topk", "sort", "argsort", "argmax", "argmin", "unique", "nonzero", "max", "multinomial"]
)
def test_save_discrete_does_not_choose_again(op):
    def function(x):
        h = x * 2
        flat = h.detach()
        if op == "topk":
            h = h.topk(2)[0]
        elif op == "sort":
            h = h.sort(-1)[0]
        elif op == "argsort":
            h = h.gather(-1, flat.argsort(-1))
        elif op in ("argmax", "argmin"):
            h = h[getattr(flat, op)(-1)]
        elif op == "unique":
            h = h * torch.unique((flat > 0).long(), return_inverse=True)[1]
        else:
            h = h[(flat > 0).nonzero(as_tuple=True)]
        return h.sin().exp()

    x = leaf(4, 4)
    replayed = replayed_ops(function, region(policies.save_discrete), [x])
    chosen = {"topk", "sort", "argmax", "argmin", "nonzero", "unique", "_unique2"}
    assert not chosen & set(replayed), replayed
    assert_equal_gradients(function, region(policies.save_discrete)(function), [x])


@pytest.fixture
def _process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
def test_collective_that_writes_its_argument_is_not_run_again():
    def function(x, w):
        h = (x @ w).sin()
        total = h.detach().clone()
        dist.all_reduce(total)
        return (h * total).exp() @ w

    inputs = leaf(4, 4), leaf(4, 4)
    expected = torch.autograd.grad(function(*inputs).sum(), inputs)
    try:
        y = region(policies.never_replay_effects)(function)(*inputs)
        actual = torch.autograd.grad(y.sum(), inputs)
    except remat.RematError as error:
        assert "clone" in str(error) or "allreduce" in str(error)  # noqa: PT017
        return
    assert_same(expected, actual)
    assert not any("reduce" in name for name in replayed_ops(function, region(policies.never_replay_effects), inputs))


# Combined


def test_combination_saves_what_either_saves():
    x, block = leaf(2, 8, 16), TransformerBlock(16, 2)
    parameters = list(block.parameters())
    both = replayed_ops(block, region(policies.save_attention | policies.save_matmuls), [x], parameters)
    assert both == replayed_ops(block, region(ATTENTION + MATMULS), [x], parameters)
    assert both == replayed_ops(block, region(policies.save_matmuls | policies.save_attention), [x], parameters)
    assert set(both) == {"native_layer_norm", "add", "gelu"}


def sines(ctx, op, *args, **kwargs):
    return op is aten.sin.default


def test_policies_of_every_kind_combine():
    inputs = leaf(4, 4), leaf(4, 4)
    kinds = {
        "list": MM,
        "function": sines,
        "names": remat.save_names("sin_*"),
        "ready": policies.save_matmuls,
    }
    saved = {"list": {"mm"}, "function": {"sin"}, "names": {"sin"}, "ready": {"mm"}}
    for left in kinds:
        for right in kinds:
            if not {left, right} & {"names", "ready"}:
                continue  # two plain lists are added, two plain functions have no `|`
            replayed = set(replayed_ops(sine_chain, region(kinds[left] | kinds[right]), inputs))
            assert replayed == {"mm", "sin"} - saved[left] - saved[right], (left, right)


def test_stronger_decision_wins():
    def never(ctx, op, *args, **kwargs):
        return remat.CheckpointPolicy.RECOMPUTE

    inputs = leaf(4, 4), leaf(4, 4)
    for combined in (policies.save_matmuls | never, never | policies.save_matmuls):
        assert "mm" not in replayed_ops(sine_chain, region(combined), inputs)


def test_unmatched_entry_of_a_combined_policy_is_named():
    with pytest.raises(remat.RematError, match="attention"):
        region(policies.save_matmuls | remat.save_names("attention.*"))(sine_chain)(leaf(4, 4), leaf(4, 4))


def test_combination_with_something_else_is_a_type_error():
    with pytest.raises(TypeError):
        policies.save_matmuls | 3
    with pytest.raises(TypeError):
        "mm" | policies.save_matmuls


def test_ready_policy_of_which_only_some_ops_run_is_fine():
    """`save_matmuls` names many ops; a region need not run all of them."""
    inputs = leaf(4, 4), leaf(4, 4)
    for policy in (policies.save_matmuls, policies.save_every_other_matmul):
        region(policy)(sine_chain)(*inputs).sum().backward()
    region(policies.save_discrete)(lambda x: x.topk(2)[0].sin())(leaf(4)).sum().backward()


def test_trained_transformer_with_each_policy_is_equal_to_plain():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(TransformerBlock(16, 2) for _ in range(2))

    for policy in (
        policies.save_attention,
        policies.save_matmuls,
        policies.save_every_other_matmul,
        policies.save_attention | policies.save_every_other_matmul,
    ):

        def program(wrap):
            torch.manual_seed(9)
            model, losses = Model(), []
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            for _ in range(3):
                h = torch.randn(2, 6, 16)
                for block in model.blocks:
                    h = F.dropout(wrap(block)(h), 0.1)
                loss = h.square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            return losses, list(model.parameters())

        assert_same_program(program, policy=policy)


@pytest.mark.parametrize("copied", [lambda policy: pickle.loads(pickle.dumps(policy)), copy.deepcopy])
def test_policies_can_be_pickled_and_copied(copied):
    for name in policies.__all__:
        assert copied(getattr(policies, name)) is getattr(policies, name)
    policy = policies.save_matmuls | remat.save_names("a.*", "b") | [aten.sin.default] | remat.offload_names("c")
    assert repr(copied(policy)) == repr(policy)
    inputs = leaf(4, 4), leaf(4, 4)
    policy = policies.save_matmuls | [aten.sin.default]
    assert replayed_ops(sine_chain, region(copied(policy)), inputs) == replayed_ops(sine_chain, region(policy), inputs)


def test_policies_say_what_they_are():
    policy = remat.policies.save_matmuls | remat.save_names("a.*", "b") | [torch.ops.aten.mm.default]
    assert repr(policy | remat.offload_names("c")) == (
        "save_matmuls | save_names('a.*', 'b') | [aten.mm.default] | offload_names('c')"
    )
