"""Behaviours of `torch.utils.checkpoint` that its users rely on, through `drop_in`, next to torch's own.

Only what no other file of tests shows. Gradients of all kinds of graphs are in `test_graphs.py` and
`test_gradients.py`, nested regions in `test_nesting.py`, what replay may not do otherwise in `test_mismatch.py`, memory
in `test_lifetimes.py`, selective checkpointing in `test_policy_sac.py`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter

import pytest
import torch
import torch.utils.checkpoint as of_torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import allow_mutation_on_saved_tensors, disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils.checkpoint import set_checkpoint_early_stop

import torch_remat as remat
from tests.helpers import assert_clean_state, assert_same, chain, leaf
from torch_remat import _compat

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


# ---- where regions meet other parts of torch


@BOTH
def test_parametrized_weight_that_a_cache_has_in_one_phase_only_is_an_error(run):
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    with nn.utils.parametrize.cached():
        y = run(linear, run(linear, leaf(2, 4)))
    with pytest.raises(RuntimeError, match=r"metadata|used another"):
        y.sum().backward()


LIBRARY = torch.library.Library("remat_tests_more", "DEF")
LIBRARY.define("product_and_length(Tensor x, Tensor y) -> (Tensor, int)")
LIBRARY.impl("product_and_length", lambda x, y: (x * y, x.shape[0]), "CompositeExplicitAutograd")


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
