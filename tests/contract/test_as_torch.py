"""Behaviours of `torch.utils.checkpoint` that its users rely on, through `drop_in`, next to torch's own.

Only what no other file of tests shows. Gradients of all kinds of graphs are in `test_graphs.py` and
`test_gradients.py`, nested regions in `test_nesting.py`, what replay may not do otherwise in `test_mismatch.py`, memory
in `test_lifetimes.py`, selective checkpointing in `test_policy_sac.py`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections import Counter

import pytest
import torch
import torch.utils.checkpoint as of_torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import allow_mutation_on_saved_tensors, disable_saved_tensors_hooks, saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts, set_checkpoint_early_stop

import torch_remat as remat
from tests.helpers import CountOps, Mlp, assert_clean_state, assert_same, chain, leaf, parameter_gradients
from torch_remat import _compat

aten = torch.ops.aten
TORCH = functools.partial(of_torch.checkpoint, use_reentrant=False)
OURS = remat.drop_in()
SAVING = remat.drop_in(policy=lambda ctx, op, *args, **kwargs: True)
MATMULS = remat.drop_in(policy=remat.policies.save_matmuls)
EVERY = pytest.mark.parametrize(
    "run", [TORCH, OURS, MATMULS, SAVING], ids=["torch", "plain", "save_matmuls", "save_everything"]
)
BOTH = pytest.mark.parametrize("run", [TORCH, OURS], ids=["torch", "plain"])
SIZE = 3000  # ops so large that replay stops before them


class Saving(torch.autograd.Function):
    """Returns its first argument, saves the second, and tells which object backward gets."""

    @staticmethod
    def forward(ctx, x, y, seen):
        ctx.save_for_backward(y)
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(ctx.saved_tensors[0])
        return grad, None, None


# ---- arguments and results


@pytest.mark.parametrize("where", ["argument", "closure"])
@pytest.mark.parametrize(
    "run",
    [TORCH, OURS, MATMULS, SAVING],
    ids=["torch", "plain", "save_matmuls", "save_everything"],
)
def test_backward_gets_the_very_object_that_was_saved_if_it_needs_no_gradient(run, where):
    x, y, seen = leaf(3), torch.ones(3), []
    out = run(Saving.apply, x, y, seen) if where == "argument" else run(lambda x: Saving.apply(x, y, seen), x)
    out.sum().backward()
    (found,) = seen
    assert found is y


@BOTH
def test_parameters_and_what_is_no_tensor_are_the_same_objects_in_both_phases(run):
    """Other tensors are other objects, but one argument that is given twice is one object in replay too."""
    x, w, other = leaf(3), nn.Parameter(torch.ones(3)), object()
    h = x * 1
    seen = []

    def function(w, h, again, other, named=None):
        seen.append((w, h is again, other, named))
        return (w * h).sin().exp()

    run(function, w, h, h, other, named=other).sum().backward()
    assert len(seen) == 2
    for w_seen, same, other_seen, named in seen:
        assert w_seen is w
        assert same
        assert other_seen is named is other


@EVERY
def test_a_function_may_bind_its_arguments_anew(run):
    def function(x, items):
        x = x.sin()
        items = [item * x for item in items]
        x = x + items[0]
        return x.exp() * items[1]

    x, y, z = leaf(3), leaf(3), leaf(3)
    expected = torch.autograd.grad(function(x, [y, z]).sum(), [x, y, z])
    assert_same(expected, torch.autograd.grad(run(function, x, [y, z]).sum(), [x, y, z]))


@EVERY
def test_nested_regions_take_and_return_what_is_no_tensor(run):
    def inner(x, scale, *, names):
        return {"y": (x * scale).sin(), "names": [*names, "inner"], "none": None}, scale + 1

    def outer(x, scale=2.0):
        found, scale = run(inner, x.exp(), scale, names=("outer",))
        return found["y"].cos() * scale, found["names"], found["none"]

    x = leaf(3)
    expected = outer(x)
    actual = run(outer, x, scale=2.0)
    assert actual[1:] == expected[1:] == (["outer", "inner"], None)
    assert_same([expected[0]], [actual[0]])
    assert_same(torch.autograd.grad(expected[0].sum(), x), torch.autograd.grad(actual[0].sum(), x))


@EVERY
def test_results_without_gradient_stay_without(run):
    linear = nn.Linear(3, 3)

    def function(x):
        h = linear(x)
        with torch.no_grad():
            count = h.exp().sum(0)
        return h.sin(), h.detach(), count, (h > 0).nonzero()

    x = leaf(2, 3)
    plain, found = function(x), run(function, x)
    assert [y.requires_grad for y in found] == [y.requires_grad for y in plain] == [True, False, False, False]
    assert_same(plain, found)
    (found[0] * found[2]).sum().backward()
    assert_same(torch.autograd.grad((plain[0] * plain[2]).sum(), x), [x.grad])


@BOTH
@pytest.mark.parametrize("how", ["detach", "no_grad"])
def test_backward_from_a_region_that_is_all_detached_is_the_error_of_plain_autograd(run, how):
    linear = nn.Linear(3, 3)

    def function(x):
        with torch.no_grad() if how == "no_grad" else contextlib.nullcontext():
            return linear(x).detach()

    y = run(function, leaf(2, 3))
    assert not y.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        y.sum().backward()


@EVERY
def test_detached_input_gets_no_gradient_and_parameters_do(run):
    mlp = Mlp(4)
    x = leaf(2, 4)
    expected = torch.autograd.grad(mlp(x.detach()).square().sum(), list(mlp.parameters()))
    run(mlp, x.detach()).square().sum().backward()
    assert x.grad is None
    assert_same(expected, parameter_gradients(mlp))


@EVERY
def test_complex_named_and_packed_inputs_are_equal(run):
    lstm = nn.LSTM(3, 4, batch_first=True)

    def recurrent(sequence):
        out, (h, c) = lstm(sequence)
        return out.data.sin(), h * c

    def spectrum(x):
        return torch.view_as_real(x * x.conj().exp()).sin()

    def order(pair):
        return pair.values.sin() * pair.indices

    cases = [
        (recurrent, lambda x: nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)),
        (spectrum, lambda x: torch.complex(x, x.cos())),
        (order, lambda x: x.sort(dim=1)),
    ]
    for function, made in cases:
        x = leaf(2, 3, 3)

        def gradients(call, function=function, made=made, x=x):
            out = call(function, made(x))
            out = out if isinstance(out, tuple) else (out,)
            lstm.zero_grad()
            return torch.autograd.grad(sum(y.sum() for y in out), [x, *lstm.parameters()], allow_unused=True)

        expected = gradients(lambda function, *args: function(*args))
        actual = gradients(run)
        assert_same([g for g in expected if g is not None], [g for g in actual if g is not None])


@EVERY
def test_nested_tensors_are_equal(run):
    w = leaf(3, 3)

    def function(x):
        return (x.sin() @ w).exp()

    def jagged(call):
        rows = [torch.linspace(-1, 1, 3 * n).view(n, 3).requires_grad_() for n in (2, 4)]
        y = call(function, torch.nested.as_nested_tensor(rows, layout=torch.jagged))
        return y.values().detach(), torch.autograd.grad(y.values().sum(), [*rows, w])

    assert_same(jagged(lambda function, x: function(x)), jagged(run))


@pytest.mark.parametrize(
    "run",
    [
        TORCH,
        pytest.param(
            OURS, marks=pytest.mark.xfail(strict=True, reason="a Parameter made inside is taken for one from outside")
        ),
        MATMULS,
        SAVING,
    ],
    ids=["torch", "plain", "save_matmuls", "save_everything"],
)
def test_region_that_copies_a_module_is_equal(run):
    linear = nn.Linear(3, 3)

    def function(x):
        return copy.deepcopy(linear)(x).sin()

    x = leaf(2, 3)
    expected = torch.autograd.grad(function(x).sum(), x)
    assert_same(expected, torch.autograd.grad(run(function, x).sum(), x))


class Doubled(torch.Tensor):
    """A subclass whose sine is twice the sine."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func is torch.Tensor.sin else out


@pytest.mark.parametrize(
    ("run", "backward_of"),
    [
        pytest.param(OURS, "a tensor", id="plain"),
        pytest.param(MATMULS, "a tensor", id="save_matmuls"),
        pytest.param(OURS, "the subclass", id="plain, in backward of the subclass"),
        pytest.param(MATMULS, "the subclass", id="save_matmuls, in backward of the subclass"),
        pytest.param(SAVING, "the subclass", id="save_everything, in backward of the subclass"),
    ],
)
def test_what_a_subclass_makes_of_functions_it_makes_in_replay_too(run, backward_of):
    """Where backward is a method of the subclass, torch's checkpoint gives the gradients of another function."""

    def function(x):
        return x.sin().exp().cos()

    gradients = []
    for call in (lambda function, x: function(x), run):
        x = torch.linspace(-1, 1, 4).as_subclass(Doubled).requires_grad_()
        y = call(function, x).sum()
        (y if backward_of == "the subclass" else y.as_subclass(torch.Tensor)).backward()
        gradients.append(x.grad.as_subclass(torch.Tensor))
    assert_same(*gradients)


# ---- hooks on tensors


@EVERY
def test_hook_of_a_weight_that_is_used_inside_and_outside_runs_once_with_the_whole_gradient(run):
    w, x = nn.Parameter(torch.randn(3, 3)), leaf(2, 3)

    def function(x):
        return (x @ w).sin().exp()

    expected = torch.autograd.grad((function(x) @ w).cos().sum(), w)
    hooked, accumulated = [], []
    w.register_hook(lambda grad: hooked.append(grad.clone()))
    w.register_post_accumulate_grad_hook(lambda tensor: accumulated.append(tensor.grad.clone()))
    (run(function, x) @ w).cos().sum().backward()
    assert_same([expected, expected], [hooked, accumulated])


@EVERY
@pytest.mark.parametrize("mode", ["all", "any"])
def test_hook_of_several_tensors_runs_once(run, mode):
    x, w = leaf(3), nn.Parameter(torch.randn(3))
    calls = []

    def once(gradients):
        gradients = gradients if mode == "all" else [gradients]
        calls.append(sum(gradient is not None for gradient in gradients))

    h = x * 1
    torch.autograd.graph.register_multi_grad_hook([h, w], once, mode=mode)
    y = run(lambda x: (x.sin() * w).exp(), h)
    y.sum().backward()
    assert calls == [2 if mode == "all" else 1]


@EVERY
def test_hooks_of_modules_see_the_gradients_of_one_backward(run):
    def gradients(call):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        seen = []
        for name, module in (("first", model[0]), ("all", model)):
            module.register_full_backward_hook(lambda _, given, out, name=name: seen.append((name, *given, *out)))
            module.register_full_backward_pre_hook(lambda _, out, name=name: seen.append((name, *out)))
        x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
        call(model, x).square().sum().backward()
        return [name for name, *_ in seen], [tensor for _, *tensors in seen for tensor in tensors], x.grad

    expected, actual = gradients(lambda model, x: model(x)), gradients(run)
    assert actual[0] == expected[0]
    assert_same(expected[1:], actual[1:])


# ---- hooks on saved tensors


@BOTH
def test_where_hooks_on_saved_tensors_are_disabled_a_region_is_the_error_that_was_given(run):
    x = leaf(3)
    with disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        run(chain, x)
    assert_clean_state()
    run(chain, x).sum().backward()


@EVERY
def test_an_exception_of_hooks_outside_reaches_the_caller(run):
    class OwnError(Exception):
        pass

    def refuse(_):
        raise OwnError

    x = leaf(3)
    with saved_tensors_hooks(refuse, lambda tensor: tensor), pytest.raises(OwnError):
        run(chain, x * 1)
    assert_clean_state()
    with saved_tensors_hooks(lambda tensor: tensor, refuse):
        y = run(chain, x * 1)
    with pytest.raises(OwnError):
        y.sum().backward()
    assert_clean_state()
    run(chain, x).sum().backward()


@EVERY
def test_hooks_inside_and_outside_together_are_equal(run):
    def hooks(factor):  # which change the values, in a way that is undone
        return saved_tensors_hooks(lambda tensor: (tensor * factor, factor), lambda pair: pair[0] / pair[1])

    def function(x):
        with hooks(4.0):
            h = x.sin().exp()
        with hooks(0.5), hooks(2.0):
            return h.cos() * x

    x = leaf(3)
    gradients = []
    for call in (lambda function, x: function(x), run):
        with hooks(8.0):
            y = call(function, x * 1).tanh()
        gradients.append(torch.autograd.grad(y.sum(), x))
    assert_same(*gradients)


@pytest.mark.parametrize("run", [OURS, MATMULS, SAVING], ids=["plain", "save_matmuls", "save_everything"])
def test_saved_tensors_that_are_changed_where_that_is_allowed_are_right_or_an_error(run):
    """Torch's checkpoint gives wrong gradients here."""

    def function(x):
        y = x.sin()
        z = y.exp()
        z.mul_(2)
        return z * y

    x = leaf(3)
    with allow_mutation_on_saved_tensors():
        expected = torch.autograd.grad(function(x).sum(), x)
        y = run(function, x)
        if run is SAVING:
            assert_same(expected, torch.autograd.grad(y.sum(), x))
        else:
            with pytest.raises(remat.MutationError):
                y.sum().backward()
    assert_clean_state()


# ---- early stop


def counted(function, counts, name):
    """Count the calls of a function, and how many came to their end."""

    def call(*args):
        counts[name, "begun"] += 1
        out = function(*args)
        counts[name, "ended"] += 1
        return out

    return call


EARLY = [None, True, False]


@pytest.mark.parametrize("around", EARLY)
@pytest.mark.parametrize("inside", EARLY)
def test_switches_of_early_stop_around_nested_regions_stop_where_torch_does(around, inside):
    def switch(value):
        return contextlib.nullcontext() if value is None else set_checkpoint_early_stop(value)

    def counts_of(run):
        counts = Counter()

        def inner(x):
            return x.sin().exp().sin()

        def outer(x):
            with switch(inside):
                y = run(counted(inner, counts, "inner"), x.cos())
            return y.exp().sin()

        x = torch.linspace(-1, 1, SIZE).requires_grad_()
        with switch(around):
            y = run(counted(outer, counts, "outer"), x)
        y.sum().backward()
        return counts, x.grad

    (theirs, expected), (ours, actual) = counts_of(TORCH), counts_of(OURS)
    assert_same([expected], [actual])
    assert ours["outer", "ended"] == theirs["outer", "ended"] == 1 + (around is False)
    assert ours["inner", "begun"] <= theirs["inner", "begun"]


@BOTH
@pytest.mark.parametrize("early_stop", [True, False])
def test_region_whose_tensors_nobody_needs_is_not_run_again(run, early_stop):
    counts = Counter()

    def outer(x):
        return run(counted(lambda x: x + 1, counts, "inner"), x).clone()

    x = leaf(3)
    with set_checkpoint_early_stop(early_stop):
        run(counted(outer, counts, "outer"), x).sum().backward()
    assert counts["outer", "begun"] == counts["inner", "begun"] == 1
    assert_same([torch.ones(3)], [x.grad])


@EVERY
def test_what_a_function_entered_is_left_when_replay_stops_early(run):
    left = []

    @contextlib.contextmanager
    def noted():
        try:
            yield
        finally:
            left.append("left")

    def function(x):
        with noted(), torch.autocast("cpu", torch.bfloat16, enabled=False):
            return x.sin().exp().sin()

    x = torch.linspace(-1, 1, SIZE).requires_grad_()
    run(function, x).sum().backward()
    assert set(left) == {"left"}
    assert_clean_state()
    assert_same(torch.autograd.grad(function(x).sum(), x), [x.grad])


def test_replay_stops_also_through_code_that_catches_exceptions():
    """Torch's early stop is an `Exception`: its replay would go on with what the code falls back to."""

    def function(x):
        y = x.sin()
        try:
            y = y.exp().cos()
        except Exception:  # noqa: BLE001, RUF100
            y = y.tanh()
        return y.sin().sum()

    x = torch.linspace(-1, 1, SIZE).requires_grad_()
    expected = torch.autograd.grad(function(x), x)
    for policy in (None, remat.policies.save_matmuls):
        assert_same(expected, torch.autograd.grad(remat.drop_in(policy=policy)(function, x), x))


# ---- backward


@EVERY
def test_gradients_are_taken_several_times_in_any_order_and_for_any_inputs(run):
    w = nn.Parameter(torch.randn(3, 3))

    def function(x, y):
        h = (x @ w).sin()
        return h.exp() * y, (y @ w).cos()

    def gradients(call):
        x, y = (torch.linspace(low, 1, 9).view(3, 3).requires_grad_() for low in (-1, 0))
        one, two = call(function, x, y)
        found = [
            torch.autograd.grad(one.sum(), y, retain_graph=True),
            torch.autograd.grad(two.sum(), [y, w], retain_graph=True),
            torch.autograd.grad(two.sum(), x, retain_graph=True, allow_unused=True, materialize_grads=True),
            torch.autograd.grad([one, two], [w, x], [one.detach(), two.detach()], retain_graph=True),
        ]
        rows = torch.eye(9).view(9, 3, 3)
        found.append(torch.autograd.grad(one, [x, w], rows, retain_graph=True, is_grads_batched=True))
        torch.autograd.backward([one.sum(), two.sum()], inputs=[x])
        assert w.grad is None
        return [*found, x.grad]

    assert_same(gradients(lambda function, *args: function(*args)), gradients(run))


@EVERY
def test_second_derivatives_through_a_custom_function_are_equal(run):
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return Square.apply(x) * 3 * grad

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    def function(x):
        return Cube.apply(x.sin()).exp() * Square.apply(x)

    def gradients(call):
        x = torch.linspace(-1, 1, 5).requires_grad_()
        (first,) = torch.autograd.grad(call(function, x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(call(torch.mul, first, first).sum(), x, create_graph=True)
        return first, second, *torch.autograd.grad(second.sum(), x)

    assert_same(gradients(lambda function, *args: function(*args)), gradients(run))


@EVERY
def test_without_multithreading_backward_is_equal(run):
    x, mlp = leaf(2, 4), Mlp(4)
    expected = torch.autograd.grad(mlp(mlp(x)).sum(), [x, *mlp.parameters()])
    with torch.autograd.set_multithreading_enabled(False):
        y = run(lambda x: run(mlp, run(mlp, x)), x)
        assert_same(expected, torch.autograd.grad(y.sum(), [x, *mlp.parameters()]))


@EVERY
def test_backwards_in_many_threads_over_one_weight_add_up(run):
    w = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))

    def function(x):
        return (x @ w).sin() @ w

    inputs = [torch.full((2, 4), float(number), dtype=torch.float64) for number in range(6)]
    expected = sum(torch.autograd.grad(function(x).sum(), w)[0] for x in inputs)
    threads = [threading.Thread(target=lambda x=x: run(function, x).sum().backward()) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(w.grad, expected)  # the order in which they are added differs


@EVERY
@pytest.mark.parametrize("shape", ["one region", "regions in a row", "nested"])
def test_weights_that_are_updated_as_soon_as_their_gradient_is_there_are_equal(run, shape):
    def update(weight):
        with torch.no_grad():
            weight.add_(weight.grad, alpha=-0.1)
        weight.grad = None

    def trained(call):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(update)
        for _ in range(2):
            x = torch.linspace(-1, 1, 8).view(2, 4)
            if shape == "one region":
                y = call(model, x)
            elif shape == "nested":
                y = call(lambda x: call(model[2], call(model[:2], x).exp()), x)
            else:
                y = call(model[2], call(model[:2], x))
            y.sin().sum().backward()
        return [weight.detach() for weight in model.parameters()]

    assert_same(trained(lambda function, x: function(x)), trained(run))


@EVERY
def test_gradients_of_inputs_first_and_of_weights_later_are_equal_with_several_batches_under_way(run):
    """As schedules of pipelines do that take the two apart."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    inputs = [torch.full((2, 4), float(number)).requires_grad_() for number in range(3)]

    def gradients(call):
        under_way, found = [], []
        for x in inputs:
            under_way.append((x, call(model, x).sin().sum()))
            if len(under_way) > 1:
                found += torch.autograd.grad(under_way[-2][1], under_way[-2][0], retain_graph=True)
        for _, loss in under_way:
            found += torch.autograd.grad(loss, list(model.parameters()))
        return found

    assert_same(gradients(lambda function, x: function(x)), gradients(run))


@EVERY
def test_an_exception_in_replay_reaches_the_caller_and_the_graph_is_still_there(run):
    broken = [False]

    def function(x):
        h = x.sin()
        if broken[0]:
            raise KeyError("not now")
        return h.exp().cos() @ torch.ones(3, 3)

    x = leaf(3, 3)
    y = run(function, x)
    expected = torch.autograd.grad(function(x).sum(), x)
    broken[0] = True
    if run is not SAVING:  # which runs nothing again
        with pytest.raises(KeyError, match="not now"):
            y.sum().backward(retain_graph=True)
    assert_clean_state()
    broken[0] = False
    assert_same(expected, torch.autograd.grad(y.sum(), x))


def test_errors_of_the_reentrant_kind_leave_the_other_kind_alone():
    x = leaf(3)
    y = OURS(chain, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"incompatible with \.grad"):
        torch.autograd.grad(y.sum(), x)
    with pytest.raises(ValueError, match="context_fn"):
        OURS(chain, x, use_reentrant=True, context_fn=lambda: (contextlib.nullcontext(), contextlib.nullcontext()))
    assert_same(torch.autograd.grad(chain(x).sum(), x), torch.autograd.grad(OURS(chain, x).sum(), x))


@EVERY
def test_backward_of_the_reentrant_kind_inside_regions_is_equal(run):
    mlp = Mlp(4)

    def function(x):
        return of_torch.checkpoint(mlp, run(mlp, x).sin(), use_reentrant=True).exp()

    def gradients(call):
        mlp.zero_grad()
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        call(function, x * 1).sum().backward()
        return x.grad, *parameter_gradients(mlp)

    assert_same(gradients(lambda function, x: mlp(mlp(x).sin()).exp()), gradients(lambda _, x: run(function, x)))


# ---- where regions meet other parts of torch


@EVERY
def test_parametrized_weights_are_equal(run):
    def gradients(call):
        torch.manual_seed(0)
        linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        call(linear, call(linear, x).sin()).sum().backward()
        return x.grad, *parameter_gradients(linear)

    assert_same(gradients(lambda function, x: function(x)), gradients(run))


@BOTH
def test_parametrized_weight_that_a_cache_has_in_one_phase_only_is_an_error(run):
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    with nn.utils.parametrize.cached():
        y = run(linear, run(linear, leaf(2, 4)))
    with pytest.raises(RuntimeError, match=r"metadata|another tensor"):
        y.sum().backward()


LIBRARY = torch.library.Library("remat_tests_more", "DEF")
LIBRARY.define("product_and_length(Tensor x, Tensor y) -> (Tensor, int)")
LIBRARY.impl("product_and_length", lambda x, y: (x * y, x.shape[0]), "CompositeExplicitAutograd")


class Product(torch.autograd.Function):
    """Calls an op whose results are a tensor and a number."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        out, ctx.length = torch.ops.remat_tests_more.product_and_length(x, y)
        return out * ctx.length

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y * ctx.length, grad * x * ctx.length


@pytest.mark.parametrize("checkpoint", [TORCH, OURS], ids=["torch", "ours"])
@pytest.mark.parametrize("saved", [True, False])
def test_op_that_returns_a_number_beside_its_tensor_is_saved_or_run_again(checkpoint, saved):
    op = torch.ops.remat_tests_more.product_and_length.default
    context_fn = functools.partial(create_selective_checkpoint_contexts, [op] if saved else [aten.exp.default])

    def function(x, y):
        return Product.apply(x.sin(), y).exp()

    x, y = leaf(3), leaf(3)
    expected = torch.autograd.grad(function(x, y).sum(), [x, y])
    out = checkpoint(function, x, y, context_fn=context_fn)
    with CountOps() as ops:
        actual = torch.autograd.grad(out.sum(), [x, y])
    assert_same(expected, actual)
    if checkpoint is OURS:
        assert ops.counts["product_and_length"] == 0 or not saved


@pytest.mark.parametrize("checkpoint", [TORCH, OURS], ids=["torch", "ours"])
@pytest.mark.parametrize("products", [[aten.mm.default], [aten.mm.default, aten.sin.default]], ids=str)
def test_contexts_of_selective_checkpointing_work_on_a_wrapper_subclass(checkpoint, products):
    context_fn = functools.partial(create_selective_checkpoint_contexts, products)

    def function(x, w):
        return ((x @ w).sin() @ w).exp()

    def gradients(call):
        x, w = (TwoTensor(torch.linspace(low, 1, 9).view(3, 3), torch.ones(3, 3)) for low in (-1, 0))
        x.requires_grad_()
        w.requires_grad_()
        y = call(x, w)
        with CountOps() as ops:
            y.sum().backward()
        assert type(x.grad) is TwoTensor
        return [y.a, y.b, x.grad.a, x.grad.b, w.grad.a, w.grad.b], ops.counts

    expected, plain = gradients(function)
    actual, replayed = gradients(lambda x, w: checkpoint(function, x, w, context_fn=context_fn))
    assert_same(expected, actual)
    assert replayed["mm"] == plain["mm"]  # those of backward; no product runs again
    assert replayed["sin"] == plain["sin"] + (aten.sin.default not in products)


# ---- where there are no values


@pytest.mark.parametrize(
    ("kind", "run"),
    [
        pytest.param(kind, run, id=f"{kind}-{name}")
        for kind in ("meta", "fake")
        for name, run in (("torch", TORCH), ("plain", OURS), ("save_matmuls", MATMULS), ("save_everything", SAVING))
    ],
)
def test_tensors_without_data_get_gradients_of_the_right_shape(kind, run):
    """As those do who measure a model before it is there."""
    mode = FakeTensorMode() if kind == "fake" else torch.device("meta")
    with mode:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        x = torch.randn(2, 4, 8, requires_grad=True)
        run(layer, x).sum().backward()
    assert x.grad.shape == x.shape
    assert all(parameter.grad.shape == parameter.shape for parameter in layer.parameters())


CONSTANTS = pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="what a policy keeps is a constant to the tracer"
)


@pytest.mark.parametrize(
    "run",
    [TORCH, OURS, *(pytest.param(run, marks=CONSTANTS) for run in (MATMULS, SAVING))],
    ids=["torch", "plain", "save_matmuls", "save_everything"],
)
def test_trace_of_a_whole_step_is_right_for_other_inputs(run):
    w = torch.randn(4, 4)

    def step(call, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(call(lambda x: (x @ w).sin().exp(), x).sum(), x)[0]

    traced = make_fx(functools.partial(step, run))(torch.randn(3, 4))
    for _ in range(2):
        x = torch.randn(3, 4)
        assert_same([step(lambda function, x: function(x), x)], [traced(x)])


@pytest.mark.parametrize("keep", ["policy", "native region"])
def test_one_hot_of_what_is_kept_runs_the_ops_of_forward(keep):
    """ATen has another one_hot for tensor subclasses, such as placeholders."""
    w = torch.randn(4, 3)

    def function(x):
        scores = (x @ w).softmax(-1)
        chosen = nn.functional.one_hot(scores.argmax(-1), 3)
        expert, token = chosen.T.nonzero(as_tuple=True)
        return (scores[token, expert].unsqueeze(-1) * x[token]).exp().sin()

    x = torch.randn(5, 4, requires_grad=True)
    run = remat.checkpoint(policy=remat.policies.save_discrete)(function)
    if keep == "native region":
        run = remat.checkpoint()(lambda x: remat.native_save_region("k", function, x).sin())
    expected = function(x) if keep == "policy" else function(x).sin()
    assert torch.equal(torch.autograd.grad(expected.sum(), x)[0], torch.autograd.grad(run(x).sum(), x)[0])


def test_private_symbols_that_only_save_time_have_a_public_way_that_does_the_same():
    assert _compat.faster("no_such.symbol", 3) == 3
    seen = []
    _compat.push_in_public(lambda tensor: seen.append("packed") or tensor, lambda tensor: tensor)
    try:
        hooks = _compat.top_saved_tensors_hooks()
        assert hooks is not None
        torch.ones(2, requires_grad=True).exp()
    finally:
        _compat.pop_in_public()
    assert seen == ["packed"]
    assert _compat.top_saved_tensors_hooks() is None
