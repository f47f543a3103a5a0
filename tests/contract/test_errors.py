"""Native regions and op-level policies that go wrong: another op in replay, changed tensors, exceptions, misuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import record_function

import torch_remat as remat
from tests.handle_ops import SAVE, Inner, Trace, call
from tests.helpers import (
    assert_clean_state,
    assert_same_program,
    leaf,
    parameter_gradients,
)
from tests.native_programs import aten, keep, region

MM = [aten.mm.default]


# --- In a native region


def differing(forward, replay):
    """Return a function whose native region runs one body in forward and another in replay."""

    def function(x):
        body = replay if remat.is_recomputing() else forward
        return keep("scores", body, x * 2).sin().exp()

    return function


CHANGES = {
    "another op": (lambda h: h.cos().exp(), lambda h: h.sin().exp(), ("cos", "sin")),
    "another overload": (lambda h: h**2, lambda h: h**h, ("pow",)),
    "one op more": (lambda h: h.cos(), lambda h: h.cos().exp(), ("exp",)),
    "one op fewer": (lambda h: h.cos().exp(), lambda h: h.cos(), ("exp",)),
    "none": (lambda h: h.cos(), lambda h: h, ("cos",)),
}


@pytest.mark.parametrize("early_stop", [True, False])
def test_changed_op_sequence_is_an_error_that_names_the_first_difference(early_stop):
    for change, (forward, replay, named) in CHANGES.items():
        y = region(region_name="block", early_stop=early_stop)(differing(forward, replay))(leaf(3))
        with pytest.raises(remat.MismatchError) as caught:
            y.sum().backward()
        assert (caught.value.region, caught.value.op) == ("block", "scores"), change
        for name in ("block::scores", *named):
            assert name in str(caught.value), change
        assert_clean_state()


@pytest.mark.parametrize("how", ["returned", "view", "inside", "slot", "policy"])
def test_in_place_change_of_a_kept_tensor_is_an_error_with_its_name(how):
    held = []

    def function(x, w):
        if how == "inside":
            return keep("scores", lambda: (held.append(h := x @ w), h.sin())[1]) * 2
        if how == "policy":
            return (held.append(h := x @ w), (h * 2).sin())[1]
        h = keep("scores", lambda: (x @ w).exp()) if how == "returned" else keep("scores", torch.mm, x, w)
        held.append(h.detach()[0] if how == "view" else h)
        return h * 2 if how == "returned" else (h * 2).sin() if how == "slot" else h.sin()

    y = region(MM if how == "policy" else None, region_name="block")(function)(leaf(3, 3), leaf(3, 3))
    with torch.no_grad():
        held[0].mul_(2)
    with pytest.raises(remat.MutationError) as caught:
        y.sum().backward()
    assert caught.value.region == "block"
    assert ("mm_0_0" if how == "policy" else "block::scores") in str(caught.value)
    assert caught.value.tensor
    assert caught.value.op == "scores" or how == "policy"


def test_wrong_name_or_function_is_an_error():
    for name in ("", None, 3, b"a"):
        with pytest.raises(remat.UsageError):
            region()(lambda x, name=name: keep(name, torch.sin, x))(leaf(3))
    with pytest.raises(TypeError):
        region()(lambda x: keep("a", x.sin()))(leaf(3))


def test_duplicate_name_is_an_error_with_the_name():
    def twice(x):
        return keep("scores", torch.sin, keep("scores", torch.sin, x))

    def with_handle(x):
        return keep("scores", torch.sin, call("handle", Inner, Trace(), "scores", SAVE, x))

    for function in (twice, with_handle):
        with pytest.raises(remat.UsageError) as caught:
            region(region_name="block")(function)(leaf(3))
        assert caught.value.op == "scores"
        assert caught.value.region == "block"


# --- Under a policy


def matmuls(ctx, op, *args, **kwargs):
    return op is aten.mm.default


@pytest.mark.parametrize("policy", [matmuls, lambda ctx, op, *args, **kwargs: False], ids=["matmuls", "nothing"])
def test_ops_that_the_end_of_replay_leaves_through_are_no_mismatch(policy):
    counts = []

    def program(wrap):
        counter, log, linear, x = torch.zeros(()), torch.zeros(2, 3), nn.Linear(3, 3), leaf(2, 3)
        names = []

        def function(x):
            h = x.sin()
            try:
                with record_function("a"):
                    return linear(h)
            finally:
                counter.add_(1)
                counter.add_(counter)
                torch.add(log, 1, out=log)
                names.append(h.view(-1).shape)

        y = wrap(function)(x)
        y.sum().backward()
        counts.append(len(names))
        return y, x.grad, parameter_gradients(linear)  # what `finally` modified, it modifies once more

    assert_same_program(program, policy=policy)
    assert counts == [1, 2]


POLICY_CHANGES = {
    "another op": (lambda h: h.sin(), lambda h: h.cos(), ("sin", "cos")),
    "one op more": (lambda h: h.sin(), lambda h: h.neg().sin(), ("neg",)),
    "one op fewer": (lambda h: h.neg().sin(), lambda h: h.sin(), ("neg",)),
    "swapped": (lambda h: h.exp().sin(), lambda h: h.sin().exp(), ("exp", "sin")),
}


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("change", POLICY_CHANGES)
def test_other_ops_in_replay_are_an_error_that_names_the_first_difference(change, early_stop):
    forward, replay, named = POLICY_CHANGES[change]

    def function(x, w):
        h = (x @ w) * 2
        return (replay if remat.is_recomputing() else forward)(h).exp() @ w

    y = region(MM, region_name="block", early_stop=early_stop)(function)(leaf(3, 3), leaf(3, 3))
    with pytest.raises(remat.MismatchError) as caught:
        y.sum().backward()
    assert caught.value.region == "block"
    assert any(name in str(caught.value).lower() for name in named)
    assert_clean_state()
