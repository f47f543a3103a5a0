"""A tensor from outside, or an argument, that a region reads and changes: changed once, and read as it was."""

from __future__ import annotations

import re

import pytest
import torch
from helpers import (
    assert_same,
    assert_same_program,
    leaf,
    no_other_regions,
    parameter_gradients,
    plain,
)
from native_programs import aten, keep, region
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import torch_remat as remat
from torch_remat.dispatch.region.region import live_regions


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


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("function", STATEFUL, ids=lambda f: f.__name__)
@pytest.mark.parametrize("options", [{}, {"early_stop": False}, {"debug": True}], ids=str)
def test_argument_that_a_native_region_changes_is_changed_once(function, how, retain, options):
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
    with pytest.raises(remat.MutationError, match="before this native region") as caught:
        stateful_program(function, keep, how, region(region_name="block"))
    assert (caught.value.region, caught.value.tensor) == ("block", "written")
    assert caught.value.op == ("again" if function is reading_in_between else "update")
    assert re.search(r"aten\.\w+", str(caught.value))


@pytest.mark.parametrize("how", HOWS)
def test_read_inside_native_regions_of_what_one_changes_later_is_right(how):
    def function(run, x, w, state):
        h = run("read", lambda: x @ w - state)
        run("update", _after(state))
        return h.sin()

    expected = stateful_program(function, _plainly, how, plain)
    assert_same(expected, stateful_program(function, keep, how, region()))


def test_argument_that_the_region_changes_outside_of_native_regions_too_is_refused():
    def function(x, state):
        state.add_(1)
        keep("count", _after(state))
        return x.sin()

    y = region()(function)(leaf(3), torch.zeros(3))
    with pytest.raises(remat.MutationError, match="the region itself changed this input") as caught:
        y.sum().backward()
    assert caught.value.tensor == "args[1]"


def test_argument_that_is_changed_after_the_region_is_refused():
    state = torch.zeros(3)
    y = region()(lambda x, state: counting(keep, x, x, state))(leaf(3, 3), state)
    state.add_(1)
    with pytest.raises(remat.MutationError, match="after the region was called"):
        y.sum().backward()


# Policies


def nothing(ctx, op, *args, **kwargs):
    return False


def everything(ctx, op, *args, **kwargs):
    return True


POLICIES = {"matmuls": [aten.mm.default], "nothing": nothing, "everything": everything}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("function", [*STATEFUL, *READERS], ids=lambda f: f.__name__)
def test_region_with_a_policy_reads_what_was_and_changes_it_once(function, policy, how):
    for run in (_plainly, keep):
        for options in ({}, {"allow_cache_entry_mutation": True}):
            for retain in (False, True):
                expected = stateful_program(function, _plainly, how, plain, retain)
                wrap = region(POLICIES[policy], **options)
                assert_same(expected, stateful_program(function, run, how, wrap, retain))


@pytest.mark.parametrize("around", ["save_on_cpu", "the same policy", "another policy"])
@pytest.mark.parametrize("function", [*STATEFUL, *READERS], ids=lambda f: f.__name__)
def test_what_was_passes_the_hooks_around_the_region(function, around):
    inner = region([aten.mm.default])
    outer = region(nothing if around == "another policy" else [aten.mm.default])
    wrap = inner if around == "save_on_cpu" else lambda function: outer(inner(function))
    expected = stateful_program(function, _plainly, "closure", plain)
    if around == "save_on_cpu":
        with save_on_cpu():
            actual = stateful_program(function, _plainly, "closure", wrap)
    else:
        actual = stateful_program(function, _plainly, "closure", wrap)
    assert_same(expected, actual)


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


@pytest.mark.parametrize("saved", [aten.exp.default, aten.sub.Tensor])
def test_inner_region_that_reads_what_changes_later_is_refused_where_the_outer_one_saves_what_it_made(saved):
    """Its arguments come through the hooks of the outer region, and count their versions anew; the others do not."""
    w, state = leaf(4, 4), torch.rand(4, 4)

    def function(x):
        h = region(nothing)(lambda h: (h.sin() - state).exp())(x @ w)
        state.add_(1)
        return h.sin()

    y = region([saved])(function)(leaf(4, 4))
    with pytest.raises(remat.MutationError, match="sub"):
        y.sum().backward()


def test_inner_region_that_reads_and_changes_is_right_in_an_outer_one():
    def program(wrap):
        w, state, x = leaf(4, 4), torch.rand(4, 4), leaf(4, 4)

        def inner(h):
            made = (h - state).sin()
            state.add_(1)
            return made.exp()

        y = wrap(lambda x: wrap(inner)(x @ w) * wrap(inner)((x @ w).cos()))(x)
        y.sum().backward()
        return y, x.grad, w.grad, state

    assert_same_program(program, policy=nothing)


def test_instance_norm_with_running_statistics_is_an_ordinary_module():
    def program(wrap):
        module = nn.Sequential(nn.Conv1d(3, 3, 1), nn.InstanceNorm1d(3, track_running_stats=True))
        x = leaf(2, 3, 5)
        outputs = [wrap(module)(x), wrap(module)(x * 2)]
        sum(y.sin().sum() for y in outputs).backward()
        return outputs, x.grad, parameter_gradients(module), list(module.buffers())

    for policy in (remat.policies.save_matmuls, nothing, everything):
        assert_same_program(program, policy=policy)
        assert_same_program(program, policy=policy, allow_cache_entry_mutation=True)


def test_running_statistics_in_keyword_arguments_are_updated_once():
    def program(wrap):
        x, w, statistics = leaf(2, 3, 5), leaf(5, 5), (torch.zeros(3), torch.ones(3))
        y = wrap(lambda x, **given: F.instance_norm(x, **given).sin() @ w)(
            x, running_mean=statistics[0], running_var=statistics[1]
        )
        y.sum().backward()
        return y, x.grad, w.grad, statistics

    assert_same_program(program, policy=remat.policies.save_matmuls)


def test_what_was_is_kept_and_reported_where_replay_reads_it_and_only_there():
    x, w, state = leaf(4, 4), leaf(4, 4), torch.rand(4, 4)

    def rows(function, policy):
        with no_other_regions():
            y = region(policy, region_name="block")(lambda x: function(_plainly, x, w, state))(x)
            report = remat.memory_report(y)
        return {tensor.label: tensor.bytes for tensor in report.regions[0].tensors if tensor.kind != "input"}

    assert rows(reading_before, [aten.mm.default]) == {"mm_0_0": 64, "sub_0_0 input 1": 64}
    assert rows(reading_before, remat.save_names("sub_0_0")) == {"sub_0_0": 64}
    assert rows(logging, [aten.mm.default]) == {"mm_0_0": 64}
    assert rows(caching, nothing) == {}


def test_two_readers_share_what_was():
    def function(run, x, w, state):
        h = (x @ w - state) * state.exp()
        run("update", _after(state))
        return (h.sin() + state).cos()

    expected = stateful_program(function, _plainly, "closure", plain)
    assert_same(expected, stateful_program(function, _plainly, "closure", region(nothing)))
    x, w, state = leaf(4, 4), leaf(4, 4), torch.rand(4, 4)
    with no_other_regions():
        y = region(nothing)(lambda x: function(_plainly, x, w, state))(x)
        (live,) = live_regions()
        kept = [slot for call in live.tape.calls for slot in call.earlier.values()]
        del y
    assert len(kept) == 2
    assert len(set(map(id, kept))) == 1


def test_lists_and_views_of_other_dtypes_are_read_as_they_were():
    def function(run, x, w, state):
        h = torch.cat([x @ w, state.view(torch.int32).view(torch.float32).t()[1:]])
        g = torch.stack([h[:4], state], 0).exp()
        run("update", _after(state))
        return (g * 2).sin()

    for policy in POLICIES.values():
        expected = stateful_program(function, _plainly, "closure", plain)
        assert_same(expected, stateful_program(function, _plainly, "closure", region(policy)))


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
        with pytest.raises(remat.MutationError, match=r"r::mul_0_0: aten\.mul\.Tensor runs again"):
            gradient(function)


@pytest.mark.parametrize("keeps", ["", "mul", "sin"])
def test_gradient_taken_after_statistics_were_read_and_changed_reads_them_as_they_were(keeps):
    """It replays a forward that is not over."""

    def program(wrap):
        norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)

        def block(x):
            y = norm(x[None])[0]
            s = y.detach().requires_grad_()
            (grad,) = torch.autograd.grad(s.sin().square().sum(), s)
            return y * grad

        x = leaf(4, 4)
        y = wrap(block)(x)
        y.sum().backward()
        return y, x.grad, norm.running_mean, norm.running_var, *parameter_gradients(norm)

    assert_same_program(program, policy=lambda ctx, op, *_, **__: keeps == op._schema.name.removeprefix("aten::"))


def _doubled(x):
    return x.mul_(2).sin()


def _part_doubled(x):
    x[1:].mul_(2)
    return x.sin()


def _doubled_past_autograd(x):
    x.detach().mul_(2)
    return x.sin()


@pytest.mark.parametrize("is_read_after", [False, True])
@pytest.mark.parametrize("way", ["native", "nothing", "everything", "sin"])
@pytest.mark.parametrize("write", [_doubled, _part_doubled, _doubled_past_autograd])
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


NORM = ["native_batch_norm_0_0", "native_batch_norm_0_1", "native_batch_norm_0_2"]
REPEATS = [f"repeat_{count}_0" for count in range(4)]


@pytest.mark.parametrize("inner", [[], REPEATS, REPEATS[2:]], ids=["nothing", "copies", "copies of the statistics"])
@pytest.mark.parametrize("outer", [[], ["repeat_2_0", *NORM[:1]], ["repeat_0_0", "repeat_3_0", *NORM]], ids=repr)
def test_statistics_in_regions_with_policies_in_each_other_are_updated_once(outer, inner):
    def keeps(names):
        return lambda ctx, *_, **__: ctx.name.endswith(tuple(names))

    def gradients(wrap):
        torch.manual_seed(0)
        norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        x = leaf(4, 4)
        block = wrap(lambda x: norm(x[None])[0].sin(), keeps(inner))
        y = wrap(lambda x: block(x).exp(), keeps(outer))(x)
        y.sum().backward()
        return y, x.grad, norm.running_mean, norm.running_var, *parameter_gradients(norm)

    assert_same(gradients(lambda function, _: function), gradients(lambda function, policy: region(policy)(function)))
