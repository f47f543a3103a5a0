"""Op-level policies that go wrong: other ops in replay, unmatched entries, exceptions; and what surrounds them."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.profiler import record_function

import torch_remat as remat
from tests.helpers import (
    LiveStorages,
    alive,
    assert_clean_state,
    assert_same,
    assert_same_program,
    leaf,
    parameter_gradients,
    plain,
    python_objects,
    watch,
)
from tests.native_programs import aten, full, keep, region, replayed_ops, sac, uncollected

MM = [aten.mm.default]


def matmuls(ctx, op, *args, **kwargs):
    return op is aten.mm.default


# Other ops in replay


@pytest.mark.parametrize("policy", [matmuls, lambda ctx, op, *args, **kwargs: False], ids=["matmuls", "nothing"])
@pytest.mark.parametrize("kind", ["record_function", "DataParallel", "finally"])
def test_ops_that_the_end_of_replay_leaves_through_are_no_mismatch(kind, policy):
    counts = []

    def program(wrap):
        counter, log, linear, x = torch.zeros(()), torch.zeros(2, 3), nn.Linear(3, 3), leaf(2, 3)
        names = []

        def function(x):
            h = x.sin()
            try:
                if kind == "record_function":
                    with record_function("a"):
                        return linear(h)
                return linear(h) if kind == "finally" else parallel(h)
            finally:
                if kind == "finally":
                    counter.add_(1)
                    counter.add_(counter)
                    torch.add(log, 1, out=log)
                    names.append(h.view(-1).shape)

        parallel = nn.DataParallel(linear)
        y = wrap(function)(x)
        y.sum().backward()
        counts.append(len(names))
        return y, x.grad, parameter_gradients(linear)  # what `finally` modified, it modifies once more

    assert_same_program(program, policy=policy)
    assert counts == ([1, 2] if kind == "finally" else [0, 0])


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


HIDDEN_CHANGES = {
    "product of three dimensions": lambda x, w: (x.sin() @ w).add_(1).sigmoid(),
    "a slice of it": lambda x, w: (x.sin() @ w)[..., :2].mul_(3).sigmoid(),
    "unsafe_chunk": lambda x, w: (x[0].sin() @ w).unsafe_chunk(2, 1)[0].add_(1).sigmoid(),
    "data": lambda x, w: (lambda h: (h.data.mul_(2), h.exp())[1])(x.sin() @ w),
}


@pytest.mark.parametrize("policy", [MM, matmuls, remat.save_names("mm_*")])
@pytest.mark.parametrize("change", HIDDEN_CHANGES)
def test_result_that_the_region_itself_changes_unseen_by_autograd_is_right_kept_or_not(change, policy):
    function = HIDDEN_CHANGES[change]
    inputs = leaf(2, 3, 4), leaf(4, 4)
    expected = torch.autograd.grad(function(*inputs).sum(), inputs)
    for chosen in (policy, [aten.sigmoid.default]) if change != "data" else (policy,):
        y = region(chosen, region_name="block")(function)(*inputs)
        assert_same(expected, torch.autograd.grad(y.sum(), inputs))


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


def test_recurrent_cell_that_works_in_place_is_never_silently_wrong():
    cell, x = torch.nn.GRUCell(4, 4), leaf(3, 4)
    expected = torch.autograd.grad(cell(x.sin()).sum(), x)
    for policy in (remat.policies.save_matmuls, [aten.tanh_.default, aten.sigmoid_.default]):
        kept = region(policy)(lambda x: cell(x.sin()))(x)
        assert_same(expected, torch.autograd.grad(kept.sum(), x))


def test_with_the_check_off_a_saved_op_in_place_may_be_changed_again():
    x = leaf(3, 4)
    y = region([aten.bernoulli_.float], allow_cache_entry_mutation=True)(lambda x: F.dropout(x.sin(), 0.5).exp() * x)(x)
    y.sum().backward()


# Entries that match nothing


def test_list_may_have_ops_that_do_not_occur():
    """Lists that are written once for many models, such as TorchTitan's, do."""
    function = lambda x: x.sin().exp()  # noqa: E731
    listed = region([aten.sin.default, aten.mm.default, aten._scaled_mm])
    assert replayed_ops(function, listed, (leaf(3, 3),)) == {"exp": 1}


def test_all_patterns_that_match_nothing_are_named():
    with pytest.raises(remat.PolicyError) as caught:
        region(remat.save_names("mm_*", "first.*", "second.*", "third"))(lambda x, w: x @ w)(leaf(3, 3), leaf(3, 3))
    for pattern in ("first.*", "second.*", "third"):
        assert pattern in caught.value.what
    assert "mm_*" not in caught.value.what
    assert caught.value.tensor == "first.*"


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


def test_without_gradients_there_is_nothing_to_match():
    """Under `no_grad` nothing is kept, and the region is a plain call."""
    x, w = leaf(3, 3), leaf(3, 3)
    with torch.no_grad():
        y = region(remat.save_names("none.*"))(lambda x: (x @ w).sin())(x)
    assert not y.requires_grad


# Surroundings


def block(x, w):
    h = F.dropout((x @ w).sin(), 0.2)
    return (h @ w).tanh() * h


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


@pytest.mark.parametrize("inner", [None, MM, matmuls])
@pytest.mark.parametrize("outer", [MM, matmuls])
def test_regions_with_policies_nest(outer, inner):
    def program(wrap):
        x, w = leaf(3, 3), leaf(3, 3)
        outside = region(outer) if wrap is not plain else plain
        inside = region(inner) if wrap is not plain else plain
        wrap(torch.sin)(x)

        def function(x):
            h = inside(lambda h: block(h, w))((x @ w).cos())
            return F.dropout(h @ w, 0.2).exp()

        y = outside(function)(x)
        results = [torch.autograd.grad(y.sum(), [x, w], retain_graph=True)]
        return y, results, torch.autograd.grad(y.sum(), [x, w]), torch.rand(2)

    assert_same_program(program)


def dead_branch(t, w):
    """Its last product dies with the function."""
    a = t * 1.5
    m = torch.maximum(a, t @ w)
    m.tanh().mul(w)
    return m * 1


def draws(t, w):
    return (t * torch.rand_like(t)) @ w + F.dropout(t, 0.3)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("inner", [dead_branch, draws])
def test_nested_regions_with_every_pair_of_saved_ops(inner, native):
    """What the inner region keeps passes the outer one, in forward and again in its replay."""

    def named(function, *args):
        seen = []
        region(lambda ctx, op, *args, **kwargs: (seen.append(ctx.name), False)[1])(function)(*args)
        return [(), *((name,) for name in seen if "empty" not in name and "bernoulli" not in name)]

    def outer(inside, x):
        h = x * 1.5
        n = keep("n", lambda: inside(x, w) * 1) if native else inside(x, w) * 1
        return (h @ n).sin()

    def saving(names):
        return lambda ctx, op, *args, **kwargs: ctx.name in names

    x, w = leaf(4, 4), leaf(4, 4)
    torch.manual_seed(4)
    expected = torch.autograd.grad(outer(inner, x).sum(), [x, w])
    for outside in named(lambda x: outer(inner, x), x):
        for inside in named(inner, x, w):
            torch.manual_seed(4)
            y = region(saving(outside))(lambda x, i=inside: outer(region(saving(i))(inner), x))(x)
            assert_same(expected, torch.autograd.grad(y.sum(), [x, w]), f"outer {outside}, inner {inside}")


def test_keywords_named_like_options_reach_the_function():
    def function(x, *, policy, allow_cache_entry_mutation):
        return (x * policy @ allow_cache_entry_mutation).sin()

    x, w = leaf(3, 3), leaf(3, 3)
    y = region(MM)(function)(x, policy=3, allow_cache_entry_mutation=w)
    assert_same(torch.autograd.grad((x * 3 @ w).sin().sum(), [x, w]), torch.autograd.grad(y.sum(), [x, w]))


@pytest.mark.parametrize("shape", ["inside torch's", "around torch's", "inside SAC", "around SAC"])
def test_mixed_with_torch_checkpoint(shape):
    def program(wrap):
        x, w = leaf(3, 3), leaf(3, 3)
        other = plain if wrap is plain else full if "torch" in shape else sac(MM)

        def inner(h):
            return (h @ w).sin().exp()

        if shape.startswith("inside"):
            y = other(lambda x: wrap(lambda x: block(x, w))((x @ w).sin()).cos())(x)
        else:
            y = wrap(lambda x: other(inner)((x @ w).sin()).cos() @ w)(x)
        return y, torch.autograd.grad(y.sum(), [x, w]), torch.rand(2)

    assert_same_program(program, policy=matmuls)


def test_saved_tensor_hooks_around():
    def program(wrap):
        x, w = leaf(3, 3), leaf(3, 3)
        with saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            y = wrap(lambda x: block(x, w))(x)
        results = [torch.autograd.grad(y.sum(), [x, w], retain_graph=True) for _ in range(2)]
        return y, results

    assert_same_program(program, policy=MM)


def test_saved_tensor_hooks_inside():
    def program(wrap):
        x, w = leaf(3, 3), leaf(3, 3)

        def function(x):
            h = x @ w
            with saved_tensors_hooks(lambda t: t.detach() + 1, lambda t: t - 1):
                h = h.sin()
            return h.exp()

        y = wrap(function)(x)
        y.sum().backward()
        return y, x.grad, w.grad

    assert_same_program(program, policy=MM)


@pytest.mark.parametrize("where", ["around", "inside"])
def test_autocast_with_one_weight_used_several_times(where):
    def program(wrap):
        x, w = leaf(4, 4), leaf(4, 4)

        def function(x):
            with torch.autocast("cpu", torch.bfloat16, enabled=where == "inside" or torch.is_autocast_enabled("cpu")):
                h = (x @ w).sin() @ w
            return h.float().exp()

        with torch.autocast("cpu", torch.bfloat16, enabled=where == "around"):
            before = x @ w
            y = wrap(function)(x)
            z = wrap(function)(y)
        (before.float().sum() + z.sum()).backward()
        return y, z, x.grad, w.grad

    assert_same_program(program, policy=MM)


def test_other_options_hold_with_a_policy():
    x, w = leaf(3, 3), leaf(3, 3)
    expected = torch.autograd.grad(((x @ w).sin() @ w).exp().sum(), [x, w])
    for options in (
        {"early_stop": False},
        {"preserve_rng_state": False},
        {"determinism_check": "bitwise"},
        {"determinism_check": "none"},
        {"debug": True},
    ):
        y = region(MM, **options)(lambda x: ((x @ w).sin() @ w).exp())(x)
        assert_same(expected, torch.autograd.grad(y.sum(), [x, w]))


def test_policy_with_a_sequence_of_functions():
    x, w = leaf(3, 3), leaf(3, 3)
    functions = [lambda h: (h @ w).sin() for _ in range(4)]
    y = remat.checkpoint_sequential(functions, 2, x, policy=MM)
    expected = x
    for function in functions:
        expected = function(expected)
    assert_same(torch.autograd.grad(expected.sum(), [x, w]), torch.autograd.grad(y.sum(), [x, w]))


def test_policy_and_context_fn_together_are_an_error_or_work():
    x, w = leaf(3, 3), leaf(3, 3)
    try:
        y = remat.checkpoint(policy=MM, context_fn=lambda: (torch.enable_grad(), torch.enable_grad()))(
            lambda x: (x @ w).sin()
        )(x)
    except (TypeError, ValueError):
        return
    assert_same(torch.autograd.grad((x @ w).sin().sum(), x), torch.autograd.grad(y.sum(), x))


def test_one_policy_in_several_threads_at_once():
    expected, results, errors = None, {}, []

    def work(wrap):
        generator = torch.Generator().manual_seed(3)
        x, w = (torch.randn(3, 3, generator=generator, requires_grad=True) for _ in range(2))
        for _ in range(10):
            y = wrap(lambda x: ((x @ w).sin() @ w).exp())(x)
            gradients = torch.autograd.grad(y.sum(), [x, w])
        return [y.detach(), *gradients]

    def run(index):
        try:
            results[index] = work(region(policy))
        except Exception as error:
            errors.append(error)

    policy = list(MM)
    expected = work(plain)
    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for index in range(4):
        assert_same(expected, results[index])


def test_many_regions_leave_nothing_behind():
    x, w = leaf(3, 3), leaf(3, 3)

    def step():
        region(MM)(lambda x: keep("a", lambda: block(x, w)) @ w)(x).sum().backward()
        x.grad = w.grad = None

    with uncollected():
        for _ in range(20):
            step()
        before = python_objects()
        for _ in range(100):
            step()
        grown = [after - start for after, start in zip(python_objects(), before, strict=True)]
    assert grown[0] == 0
    assert grown[1] <= 20
    assert grown[2] <= 500


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
