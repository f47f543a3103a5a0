"""A tensor created outside the region, or an argument, that the region reads and then changes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.testing._internal.two_tensor import TwoTensor

import torch_remat as remat
from tests.helpers import assert_same, assert_same_program, leaf, name_of, pairwise, parameter_gradients, plain
from tests.native_programs import aten, keep, region


def _after(tensor):
    """Return a function that adds to a tensor in a native region."""
    return lambda: tensor.add_(1)


def counting(run, x, w, state):
    run("count", _after(state))
    return (x @ w).sin()


def caching(run, x, w, state):
    def write():
        with torch.no_grad():
            state[1:3].copy_((x @ w)[:2])

    run("write", write)
    return (x * state.sum(0)).sin() @ w


def averaging_in_place_of_a_view(run, x, w, state):
    row = state[0]

    def update():
        with torch.no_grad():
            row.lerp_(x.mean(0), 0.5)
            state[1].mul_(2)

    run("first", update)
    run("second", update)
    return ((x @ w + row).sin() * 2).exp()


def logging(run, x, w, state):
    level = (state * 2).sum().sqrt()
    h = (x @ w).sin()
    run("count", _after(state))
    assert level.shape == ()
    return h.exp()


def caching_part_by_part(run, x, w, state):
    h = x @ w
    for step in range(3):

        def write(step=step, h=h):
            with torch.no_grad():
                state[:, step].copy_(h.sum(1))

        run(f"write {step}", write)
        h = (h * state[:, : step + 1].sum()).sin()
    return h


def _plainly(name, function, *args):
    return function(*args)


STATEFUL = [counting, caching, averaging_in_place_of_a_view, logging, caching_part_by_part]
# These read, in recomputed code, what a native region changes later.
READING_EARLY = [logging, caching_part_by_part]
HOWS = ["args", "kwargs", "closure"]


def stateful_program(function, run, how, wrap, retain=False):
    """Return the output, the gradients and the tensor that the function changed."""
    torch.manual_seed(3)
    x, w, state = leaf(4, 4), leaf(4, 4), torch.rand(4, 4)
    if how == "args":
        y = wrap(lambda x, state: function(run, x, w, state))(x, state)
    elif how == "kwargs":
        y = wrap(lambda x, **given: function(run, x, w, **given))(x, state=state)
    else:
        y = wrap(lambda x: function(run, x, w, state))(x)
    gradients = []
    if retain:
        gradients += torch.autograd.grad(y.sum(), [x, w], retain_graph=True)
    return y, gradients, torch.autograd.grad(y.sum(), [x, w]), state


# Native regions


@pairwise(
    options=[{}, {"early_stop": False}, {"debug": True}], function=STATEFUL, how=HOWS, retain=[False, True], ids=name_of
)
def test_argument_that_a_native_region_changes_is_changed_once(function, how, retain, options):
    if function in READING_EARLY:
        with pytest.raises(remat.MutationError, match=r"this call modifies|the region modified"):
            stateful_program(function, keep, how, region(**options), retain)
    else:
        expected = stateful_program(function, _plainly, how, plain, retain)
        assert_same(expected, stateful_program(function, keep, how, region(**options), retain))


def reading_before(run, x, w, state):
    h = x @ w - state
    run("update", _after(state))
    return h.sin()


def reading_in_between(run, x, w, state):
    run("update", _after(state))
    h = (x @ w) * 1.5 - state.mean()
    run("again", _after(state))
    return run("other", torch.sin, h.exp()).cos()


def reading_a_number_before(run, x, w, state):
    h = x @ w * state.sum().item()
    run("update", _after(state))
    return h.sin()


def reading_into_a_sum_in_place(run, x, w, state):
    h = x @ w * 1.5
    h += state
    run("update", _after(state))
    return h.sin()


READERS = [reading_before, reading_in_between, reading_a_number_before, reading_into_a_sum_in_place]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("function", READERS, ids=lambda f: f.__name__)
def test_read_of_what_a_native_region_changes_later_is_refused_by_name(function, how):
    with pytest.raises(
        remat.MutationError, match=r"(?=.*shape \(4, 4\)).* at test_mutation_after_read.py:\d+"
    ) as caught:
        stateful_program(function, keep, how, region(region_name="block"))
    assert caught.value.region == "block"
    assert caught.value.tensor == ("variable 'state'" if how == "closure" else "written")


# Policies


def nothing(ctx, op, *args, **kwargs):
    return False


def everything(ctx, op, *args, **kwargs):
    return True


POLICIES = {"matmuls": [aten.mm.default], "nothing": nothing, "everything": everything}


@pairwise(function=[*STATEFUL, *READERS], policy=POLICIES, how=HOWS)
def test_region_with_a_policy_reads_what_was_and_changes_it_once(function, policy, how):
    for run in (_plainly, keep):
        for options in ({}, {"allow_cache_entry_mutation": True}):
            for retain in (False, True):
                expected = stateful_program(function, _plainly, how, plain, retain)
                wrap = region(POLICIES[policy], **options)
                if runs_early_reader(function, policy):
                    with pytest.raises(remat.MutationError, match=r"is recomputed in replay and reads|reads variable"):
                        stateful_program(function, run, how, wrap, retain)
                else:
                    assert_same(expected, stateful_program(function, run, how, wrap, retain))


def runs_early_reader(function, policy):
    """Whether replay runs an op that reads what the region has changed since."""
    reads_early = function in (*READERS, caching_part_by_part) and function is not reading_a_number_before
    return reads_early and policy != "everything"  # a number is in the log, whatever the policy says


@pairwise(function=[*STATEFUL, *READERS], around=["save_on_cpu", "the same policy", "another policy"])
def test_early_reads_are_refused_under_hooks_around_the_region_too(function, around):
    inner = region([aten.mm.default])
    outer = region(nothing if around == "another policy" else [aten.mm.default])
    wrap = inner if around == "save_on_cpu" else lambda function: outer(inner(function))
    expected = stateful_program(function, _plainly, "closure", plain)
    with save_on_cpu() if around == "save_on_cpu" else nullcontext():
        if runs_early_reader(function, "matmuls"):
            with pytest.raises(remat.MutationError):
                stateful_program(function, _plainly, "closure", wrap)
        else:
            assert_same(expected, stateful_program(function, _plainly, "closure", wrap))


@pytest.mark.parametrize("inner", [None, "policy"])
def test_inner_region_that_reads_what_the_outer_one_changes_later_is_refused(inner):
    """Its own replay, which comes after that of the outer one, would read the tensor as it is then."""
    w, state, wrap = leaf(4, 4), torch.rand(4, 4), region(None if inner is None else nothing)

    def function(x):
        h = wrap(lambda h: (h.sin() - state).exp())(x @ w)
        state.add_(1)
        return h.sin()

    y = region([aten.mm.default])(function)(leaf(4, 4))
    with pytest.raises(remat.MutationError, match="sub"):
        y.sum().backward()


@pytest.mark.parametrize("how", ["alone", "in an inner region", "in a saved call"])
def test_instance_norm_with_running_statistics_under_a_policy_is_refused_unless_one_call_reads_and_changes_them(how):
    def program(wrap):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv1d(3, 3, 1), nn.InstanceNorm1d(3, track_running_stats=True))
        x = leaf(2, 3, 5)

        def block(x):
            if how == "alone":
                return module(x).sin()
            if how == "in an inner region":
                return wrap(module)(x).sin()
            return remat.native_save_region("norm", module, x).sin()

        wrap(block)(x).sin().sum().backward()
        return x.grad, parameter_gradients(module), list(module.buffers())

    for policy in (remat.policies.save_matmuls, nothing):
        if how == "in a saved call":
            assert_same_program(program, policy=policy)
        else:
            with pytest.raises(remat.MutationError, match=r"aten\.repeat\.default is recomputed in replay and reads"):
                program(remat.checkpoint(policy=policy))


@pytest.mark.parametrize("keeps", [False, True])
def test_write_to_a_wrapper_subclass_after_a_read_is_an_error_where_the_read_is_repeated(keeps):
    """It has no storage that could be copied."""

    def block(x):
        y = x * 1.5
        x.view(2, 8).view(4, 4).add_(y)
        return (y * x).sin()

    def gradient(function):
        torch.manual_seed(0)
        x = TwoTensor(torch.randn(4, 4), torch.randn(4, 4)).requires_grad_()
        (grad,) = torch.autograd.grad(function(x * 1).sum(), x)
        return grad

    function = remat.checkpoint(region_name="r", policy=lambda *_, **__: keeps)(block)
    if keeps:
        assert_same(gradient(block), gradient(function))
    else:
        with pytest.raises(remat.MutationError, match=r"r::mul: aten\.mul\.Tensor is recomputed"):
            gradient(function)


def _doubled(x):
    return x.mul_(2).sin()


def _part_doubled(x):
    x[1:].mul_(2)
    return x.sin()


def _doubled_past_autograd(x):
    x.detach().mul_(2)
    return x.sin()


@pairwise(
    write=[_doubled, _part_doubled, _doubled_past_autograd],
    way=["native", "nothing", "everything", "sin"],
    is_read_after=[False, True],
)
def test_argument_that_needs_a_gradient_may_be_changed_where_replay_leaves_that_out(write, way, is_read_after):
    def block(x, write=write):
        y = write(x)
        return y * x if is_read_after else y.exp()

    def policy(_ctx, op, *_, **__):
        return way == "everything" or op._schema.name == f"aten::{way}"

    def run(function):
        x = torch.linspace(0.1, 1, 16).view(4, 4).requires_grad_()
        h = x * 1
        y = function(h)
        return y, h, *torch.autograd.grad(y.sum(), x)

    if way == "native":
        actual = run(region()(lambda x: block(x, lambda x: keep("written", write, x))))
    else:
        actual = run(region(policy)(block))
    assert_same(run(block), actual)
