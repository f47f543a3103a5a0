"""Native regions that go wrong: another op sequence in replay, changed tensors, exceptions, misuse."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.profiler import record_function

import torch_remat as remat
from tests.handle_ops import RECOMPUTE, SAVE, Inner, Result, Trace, call
from tests.helpers import (
    LiveStorages,
    alive,
    assert_clean_state,
    assert_equal_gradients,
    assert_same,
    leaf,
    watch,
)
from tests.native_programs import keep, region, uncollected


def differing(forward, replay):
    """Return a function whose native region runs one body in forward and another in replay."""

    def function(x):
        body = replay if remat.is_recomputing() else forward
        return keep("scores", body, x * 2).sin().exp()

    return function


CHANGES = {
    "another op": (lambda h: h.cos().exp(), lambda h: h.sin().exp(), ("cos", "sin")),
    "another op later": (lambda h: h.cos().exp().tanh(), lambda h: h.cos().exp().sigmoid(), ("tanh", "sigmoid")),
    "one op more": (lambda h: h.cos(), lambda h: h.cos().exp(), ("exp",)),
    "one op more that saves its input": (lambda h: h.cos(), lambda h: h.cos().sin(), ("sin",)),
    "one op more at first": (lambda h: h.cos(), lambda h: h.neg().cos(), ("neg", "cos")),
    "one op fewer": (lambda h: h.cos().exp(), lambda h: h.cos(), ("exp",)),
    "swapped": (lambda h: h.cos().exp(), lambda h: h.exp().cos(), ("cos", "exp")),
    "none": (lambda h: h.cos(), lambda h: h, ("cos",)),
}


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_op_sequence_is_an_error_that_names_the_first_difference(change, early_stop):
    forward, replay, named = CHANGES[change]
    y = region(region_name="block", early_stop=early_stop)(differing(forward, replay))(leaf(3))
    with pytest.raises(remat.MismatchError) as caught:
        y.sum().backward()
    text = str(caught.value)
    assert caught.value.region == "block"
    if change == "another shape":  # the op saves its input, which is the first difference
        assert caught.value.tensor.startswith("saved tensor")
    else:
        assert caught.value.op == "scores"
        assert "block::scores" in text
    for name in named:
        assert name in text


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("policy", [None, [torch.ops.aten.exp.default]])
def test_native_region_that_replay_leaves_out_is_an_error_that_names_it(policy, early_stop):
    """Its function runs all the same, and saves the same."""

    def function(x):
        h = x * 2
        h = torch.exp(h) if remat.is_recomputing() else keep("scores", lambda: torch.exp(h))
        return h.sin().exp().tanh()

    y = region(policy, region_name="block", early_stop=early_stop)(function)(leaf(3))
    with pytest.raises(remat.MismatchError, match="forward ran this op, but replay") as caught:
        y.sum().backward()
    assert (caught.value.region, caught.value.op) == ("block", "scores")
    assert_clean_state()


@pytest.mark.parametrize("change", ["rows", "dtype"])
def test_other_shapes_or_dtypes_in_replay_are_never_silent(change):
    def function(x, w):
        h = x * 2
        if remat.is_recomputing():
            h = h[1:] if change == "rows" else h.double()
        return keep("a", lambda: h.sin() + 1).sum(0).exp() * w

    y = region()(function)(leaf(3, 3), leaf(3))
    with pytest.raises(remat.MismatchError):
        y.sum().backward()


def test_native_region_that_is_missing_new_or_renamed_in_replay_is_an_error():
    def renamed(x):
        return keep("other" if remat.is_recomputing() else "scores", torch.sin, x * 2).exp()

    def missing(x):
        h = torch.sin(x * 2) if remat.is_recomputing() else keep("scores", torch.sin, x * 2)
        return keep("last", torch.cos, h).exp()

    def new(x):
        h = keep("scores", torch.sin, x * 2) if remat.is_recomputing() else torch.sin(x * 2)
        return keep("last", torch.cos, h).exp()

    def swapped(x):
        names = ["scores", "last"][:: -1 if remat.is_recomputing() else 1]
        h = keep(names[0], torch.sin, x * 2)
        return keep(names[1], torch.sin, h).exp()

    for function in (renamed, missing, new, swapped):
        with pytest.raises(remat.MismatchError) as caught:
            region(region_name="block")(function)(leaf(3)).sum().backward()
        assert caught.value.region == "block"


def test_other_policy_in_replay_is_an_error_with_the_name():
    def function(x):
        policy = RECOMPUTE if remat.is_recomputing() else SAVE
        return remat.op(torch.sin, "scores", policy=policy)(x * 2).exp()

    with pytest.raises(remat.MismatchError) as caught:
        region()(function)(leaf(3)).sum().backward()
    assert caught.value.op == "scores"


# In-place changes of what is kept


@pytest.mark.parametrize("how", ["returned", "view", "inside", "slot"])
def test_in_place_change_of_a_kept_tensor_is_an_error_with_its_name(how):
    held = []

    def function(x, w):
        if how == "inside":
            return keep("scores", lambda: (held.append(h := x @ w), h.sin())[1]) * 2
        h = keep("scores", lambda: (x @ w).exp()) if how == "returned" else keep("scores", torch.mm, x, w)
        held.append(h.detach()[0] if how == "view" else h)
        return h * 2 if how == "returned" else (h * 2).sin() if how == "slot" else h.sin()

    y = region(region_name="block")(function)(leaf(3, 3), leaf(3, 3))
    with torch.no_grad():
        held[0].mul_(2)
    with pytest.raises(remat.MutationError) as caught:
        y.sum().backward()
    assert caught.value.region == "block"
    assert caught.value.op == "scores"
    assert "block::scores" in str(caught.value)
    assert caught.value.tensor


def test_in_place_change_inside_of_a_tensor_saved_before_is_refused_as_by_plain_autograd():
    def body(x, w):
        h = (x @ w).exp()
        h.mul_(2)
        return h

    x, w = leaf(3, 3), leaf(3, 3)
    with pytest.raises(RuntimeError, match="inplace"):
        body(x, w).sum().backward()
    with pytest.raises(remat.MutationError) as caught:
        region()(lambda x: keep("scores", body, x, w))(x).sum().backward()
    assert caught.value.op == "scores"


def test_change_of_a_region_input_that_only_a_native_region_reads_is_an_error():
    root, w = leaf(3, 3), leaf(3, 3)
    x = root * 1
    y = region()(lambda x: keep("a", torch.mm, x, w) * 2)(x)
    x.add_(1)
    with pytest.raises(remat.MutationError):
        y.sum().backward()


# Exceptions


class Stop(Exception):
    """Raised by bodies of native regions."""


def test_exception_leaves_no_state_behind_and_frees():
    x, held = leaf(3), []

    def body(h):
        a = h.sin()
        held.extend(watch(a))
        a.exp()
        raise Stop

    with uncollected():
        with LiveStorages() as live, pytest.raises(Stop) as caught:
            region()(lambda x: keep("a", body, x * 2))(x)
        del caught
        assert_clean_state()
        assert alive(held) == 0
        assert live.bytes() == 0
        assert not remat.is_recomputing()
    function = lambda x: keep("a", torch.sin, x * 2).exp()  # noqa: E731
    assert_equal_gradients(function, region()(function), [x])


class Leave(BaseException):
    """The same for code that no ``except Exception`` is to stop."""


@pytest.mark.parametrize("kind", [Stop, Leave])
@pytest.mark.parametrize("way", ["on the exception", "in a list", "after a failing op"])
def test_tensor_made_before_an_early_exit_is_right_afterwards(kind, way):
    def function(x, w):
        made = []

        def body(h):
            if way == "after a failing op":
                with contextlib.suppress(RuntimeError):
                    h.view(5)
            h = (h @ w).sin()
            torch.rand(2)
            done = kind()
            if way == "on the exception":
                done.value = h
            else:
                made.append(h)
            raise done

        try:
            keep("search", body, x * 2)
        except kind as done:
            h = done.value if way == "on the exception" else made[0]
        return h.exp() * torch.rand_like(h)

    inputs = leaf(4, 3), leaf(3, 3)
    with pytest.warns(remat.RematWarning, match=r"search\.sin_0_0"):
        assert_equal_gradients(function, region()(function), inputs)


@pytest.mark.parametrize("where", ["inside", "around"])  # the counter is counted once more: docs/limits.md
def test_ops_of_a_context_manager_that_the_end_of_replay_leaves_are_no_mismatch(where):
    counter = torch.zeros(())

    @contextlib.contextmanager
    def counted():
        try:
            with record_function("range"):
                yield
        finally:
            counter.add_(1).mul_(1)
            torch.stack([torch.ones(2), torch.zeros(2)])

    def function(x):
        def body(h):
            with counted():
                return torch.ops.aten.sin(h) * h

        if where == "inside":
            return keep("a", body, x * 2)
        with counted():
            return keep("a", torch.sin, x * 2) * x

    assert_equal_gradients(function, region()(function), [leaf(3)])


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_op_that_fails_on_the_data_fails_in_replay_too(where):
    """Cholesky with a fallback: the failure depends on data that replay does not have."""

    def factor(a):
        return torch.linalg.cholesky(a - 10 * torch.eye(3))

    def safe(a):
        try:
            return factor(a)
        except torch.linalg.LinAlgError:
            return torch.linalg.cholesky(a + torch.eye(3))

    def function(x):
        a = x @ x.t() * 2
        if where == "inside":
            return keep("factor", safe, a).exp()
        try:
            return keep("factor", factor, a).exp()
        except torch.linalg.LinAlgError:
            return keep("fallback", lambda: torch.linalg.cholesky(a + torch.eye(3))).exp()

    x = leaf(3, 3)
    assert_equal_gradients(function, region()(function), [x])


# Misuse


def test_duplicate_name_is_an_error_with_the_name():
    def twice(x):
        return keep("scores", torch.sin, keep("scores", torch.sin, x))

    def with_handle(x):
        return keep("scores", torch.sin, call("handle", Inner, Trace(), "scores", SAVE, x))

    def with_recomputed(x):
        h = remat.op(torch.sin, "scores", policy=RECOMPUTE)(x)
        return keep("scores", torch.sin, h)

    for function in (twice, with_handle, with_recomputed):
        with pytest.raises(remat.UsageError) as caught:
            region(region_name="block")(function)(leaf(3))
        assert caught.value.op == "scores"
        assert caught.value.region == "block"


@pytest.mark.parametrize("name", ["", None, 3, b"a"], ids=str)
def test_name_that_is_empty_or_no_string_is_an_error(name):
    for call_it in (lambda x: keep(name, torch.sin, x), lambda x: remat.native_save_region(name, torch.sin, x)):
        with pytest.raises(remat.UsageError):
            region()(call_it)(leaf(3))


def test_function_that_cannot_be_called_is_a_type_error():
    with pytest.raises(TypeError):
        region()(lambda x: keep("a", x.sin()))(leaf(3))


# Handles inside and around


def test_native_region_is_the_remedy_for_a_native_reader_of_a_saved_handle():
    def function(x, remedy):
        h = call("handle", Inner, Trace(), "h", SAVE, x)
        return (keep("reader", torch.sin, h) if remedy else h.sin()).exp()

    x = leaf(3)
    with pytest.raises(remat.PlaceholderError):
        region()(lambda x: function(x, False))(x).sum().backward()
    y = region()(lambda x: function(x, True))(x)
    y.sum().backward()
    h = call("plain", Inner, Trace(), "h", SAVE, x)
    assert_same(torch.autograd.grad(h.sin().exp().sum(), x)[0], x.grad)


@pytest.mark.filterwarnings("ignore::torch_remat.RematWarning")
def test_gradient_taken_inside_through_a_handle_in_a_native_region_is_refused():
    def function(x):
        y = keep("scores", lambda: call("auto", Result, Trace(), "h", RECOMPUTE, x.sin()).cos())
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + gradient

    with pytest.raises(remat.UsageError, match="a gradient is taken through this call"):
        region()(function)(leaf(3)).sum().backward()
