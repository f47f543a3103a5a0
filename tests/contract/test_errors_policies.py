"""Op-level policies that go wrong: other ops in replay, unmatched entries, exceptions; and what surrounds them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import torch_remat as remat
from tests.helpers import (
    LiveStorages,
    alive,
    assert_clean_state,
    assert_same,
    leaf,
    watch,
)
from tests.native_programs import aten, region, replayed_ops, uncollected

MM = [aten.mm.default]


def matmuls(ctx, op, *args, **kwargs):
    return op is aten.mm.default


# Other ops in replay


CHANGES = {
    "another op": (lambda h: h.sin(), lambda h: h.cos(), ("sin", "cos")),
    "one op more": (lambda h: h.sin(), lambda h: h.neg().sin(), ("neg",)),
    "one op fewer": (lambda h: h.neg().sin(), lambda h: h.sin(), ("neg",)),
    "swapped": (lambda h: h.exp().sin(), lambda h: h.sin().exp(), ("exp", "sin")),
}


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_other_ops_in_replay_are_an_error_that_names_the_first_difference(change, early_stop):
    forward, replay, named = CHANGES[change]

    def function(x, w):
        h = (x @ w) * 2
        return (replay if remat.is_recomputing() else forward)(h).exp() @ w

    y = region(MM, region_name="block", early_stop=early_stop)(function)(leaf(3, 3), leaf(3, 3))
    with pytest.raises(remat.MismatchError) as caught:
        y.sum().backward()
    assert caught.value.region == "block"
    assert any(name in str(caught.value).lower() for name in named)
    assert_clean_state()


def test_policy_that_answers_otherwise_in_replay_changes_nothing_or_is_an_error():
    """What forward decided holds: the policy is not asked again, or it must say the same."""

    def policy(ctx, op, *args, **kwargs):
        return (op is aten.mm.default) != ctx.is_recompute

    x, w = leaf(3, 3), leaf(3, 3)
    function = lambda x: ((x @ w).sin() @ w).exp()  # noqa: E731
    try:
        actual = torch.autograd.grad(region(policy)(function)(x).sum(), x)
    except remat.MismatchError:
        return
    assert_same(torch.autograd.grad(function(x).sum(), x), actual)


@pytest.mark.parametrize("policy", [MM, matmuls])
def test_op_that_saves_other_inputs_than_forward_is_an_error_about_what_it_saves(policy):
    """Autograd saves its inputs before the op itself can be seen, and the first difference is reported."""
    x, w, v = leaf(3, 3), leaf(3, 3), leaf(3, 3)

    def function(x):
        h = x @ w
        return ((h @ v) if remat.is_recomputing() else h).exp().tanh()

    y = region(policy, region_name="block")(function)(x)
    with pytest.raises(remat.MismatchError, match=r"saved tensor 2: forward saved .* made by Exp"):
        y.sum().backward()
    assert_clean_state()


# Changes in place that no version counter of the kept tensor shows


def test_hidden_change_after_the_region_is_an_error():
    h, y = region(MM)(lambda x, w: (h := x.sin() @ w, h.exp().tanh()))(leaf(2, 3, 4), leaf(4, 4))
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(remat.MutationError, match="mm_0_0"):
        y.sum().backward()


def test_aliases_of_kept_results_are_freed_with_the_graph():
    x, w, held = leaf(2, 3, 4), leaf(4, 4), []

    def function(x, w):
        held.extend(watch(h := x.sin() @ w))
        return h.exp().tanh()

    with uncollected():
        y = region(MM)(function)(x, w)
        assert alive(held) == 1
        del y
        assert alive(held) == 0


# Entries that match nothing


def test_list_may_have_ops_that_do_not_occur():
    """Lists that are written once for many models, such as TorchTitan's, do."""
    function = lambda x: x.sin().exp()  # noqa: E731
    listed = region([aten.sin.default, aten.mm.default, aten._scaled_mm])
    assert replayed_ops(function, listed, (leaf(3, 3),)) == {"exp": 1}


def test_packet_means_all_its_overloads_and_an_overload_itself_alone():
    function = lambda x: (x * 2).sin().exp()  # noqa: E731
    for listed, count in ((aten.mul, 0), (aten.mul.Tensor, 0), (aten.mul.Scalar, 1)):
        assert replayed_ops(function, region([listed]), (leaf(3),)).get("mul", 0) == count, listed
    overloads = aten.sum.overloads()
    for function, overload in ((lambda x: x.sum().sin(), "default"), (lambda x: x.sum(0).sin(), "dim_IntList")):
        assert overload in overloads
        assert "sum" not in replayed_ops(function, region([aten.sum]), (leaf(3, 3),)), overload


def test_error_of_an_unmatched_entry_frees_everything():
    x, held = leaf(3, 3), []

    def function(x):
        h = x.sin()
        held.extend(watch(h))
        return h.exp()

    with uncollected():
        with LiveStorages() as live, pytest.raises(remat.RematError) as caught:
            region(remat.save_names("mm_*"))(function)(x)
        del caught
        assert alive(held) == 0
        assert live.bytes() == 0


def test_exception_of_the_function_comes_before_that_of_an_unmatched_entry():
    def function(x):
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        region(remat.save_names("mm_*"))(function)(leaf(3))
    assert_clean_state()


# Surroundings


@pytest.mark.parametrize("policy", [MM, matmuls, [aten.sin.default], remat.save_names("*")])
@pytest.mark.parametrize("create_graph", [True, False])
def test_backward_inside_a_region_through_ops_that_are_not_kept_is_refused(create_graph, policy):

    def function(x, w):
        y = (F.dropout(x.sin(), 0.2) @ w).exp()
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=create_graph, retain_graph=True)
        return (gradient * y).tanh() * torch.rand(3)

    with pytest.raises(remat.UsageError, match="a gradient is taken before the region's forward ends"):
        region(policy)(function)(leaf(3, 3), leaf(3, 3))
    assert_clean_state()


def test_policy_and_context_fn_together_are_an_error_or_work():
    x, w = leaf(3, 3), leaf(3, 3)
    try:
        y = remat.checkpoint(policy=MM, context_fn=lambda: (torch.enable_grad(), torch.enable_grad()))(
            lambda x: (x @ w).sin()
        )(x)
    except (TypeError, ValueError):
        return
    assert_same(torch.autograd.grad((x @ w).sin().sum(), x), torch.autograd.grad(y.sum(), x))


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("policy", [lambda *_, **__: False, lambda _, op, *__, **___: op is aten.add.Tensor])
def test_read_that_would_need_random_numbers_whose_state_was_not_kept_is_refused(policy, early_stop):
    """What is made again may itself read what was drawn, and nothing else of the region drew in replay."""

    def function(x):
        noisy = x.detach() + torch.rand(3)
        return (x.exp() * float(noisy.numpy().sum())).sin()

    y = remat.checkpoint(policy=policy, early_stop=early_stop)(function)(leaf(3))
    state = torch.get_rng_state()
    with pytest.raises(remat.PlaceholderError):
        y.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_read_of_what_was_made_from_random_numbers_that_replay_draws_too_is_equal():
    def program(wrap):
        def function(x):
            noise = torch.rand(3)
            noisy = x.detach() + noise
            return F.dropout((x.exp() * float(noisy.numpy().sum())).sin(), 0.5).cos()

        torch.manual_seed(4)
        x = leaf(3)
        y = wrap(function)(x)
        y.sum().backward()
        return y, x.grad, torch.rand(2)

    with pytest.warns(remat.RematWarning, match="starts over"):
        actual = program(remat.checkpoint(policy=lambda *_, **__: False))
    assert_same(program(lambda function: function), actual)
