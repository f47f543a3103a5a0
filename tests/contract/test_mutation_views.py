"""Views of what was changed in place, in regions whose ops are skipped: what replay shows through them."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import torch_remat as remat
from tests.handle_ops import SAVE, Inner, Trace, call
from tests.helpers import assert_same_program, leaf, pairwise
from tests.native_programs import aten, keep

VIEWS_WRITTEN = {
    "view after": lambda y: y.relu_().t(),
    "view before": lambda y: (y.t(), y.relu_())[0],
    "through a view": lambda y: (y.view(-1).relu_(), y)[1],
}
"""Ways to change a tensor in place and to see it through a view."""

# What a call, or code after it, modifies of the region's own tensors has the call run whole, with a warning.
pytestmark = pytest.mark.filterwarnings("ignore:.*replay recomputes this call:torch_remat.RematWarning")


@pytest.mark.parametrize("make", ["op", "function", "handle"])
@pytest.mark.parametrize("name", VIEWS_WRITTEN)
def test_saved_write_is_seen_through_all_views_without_another_run(name, make):
    makers = {
        "op": lambda x: x * 2,
        "function": lambda x: keep("made", torch.sin, x),
        "handle": lambda x: call("handle", Inner, Trace(), "made", SAVE, x),
    }

    def program(wrap):
        x = leaf(3, 3)
        y = wrap(lambda x: VIEWS_WRITTEN[name](makers[make](x)).exp().sin())(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program, policy=lambda ctx, op, *args, **kwargs: op is aten.relu_.default)


PARTS = {
    "all, then part": lambda h: (h.mul_(3), h[1].mul_(2)),
    "two parts": lambda h: (h[1].mul_(2), h[:, 0].mul_(3)),
    "parts, and all of another": lambda h: (h[1].mul_(2), h[2].add_(1), h.mul_(0.5)),
}


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("name", PARTS)
def test_all_parts_that_a_native_region_changes_of_a_recomputed_tensor_are_restored(name, early_stop):
    def body(h, k):
        PARTS[name](h)
        k.add_(1)
        return h

    def program(wrap):
        x = leaf(3, 3)

        def block(x):
            h, k = x * 1.5, x.cos()
            keep("body", body, h, k)
            return h.sin() * k.exp()

        y = wrap(block)(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program, early_stop=early_stop)


def returns_nothing(change):
    """Return a function that changes its argument in place and returns nothing."""

    def function(h):
        change(h)

    return function


REWRITES = {
    "all": lambda h: h.mul_(2),
    "a part": lambda h: h[1:].zero_(),
    "twice": lambda h: h.sin_().mul_(3),
}


@pairwise(
    name=REWRITES,
    maker=["call", "function", "region"],
    seen=["itself", "a view before", "a view after", "both"],
)
def test_saved_result_that_a_later_native_region_changes_and_does_not_return(name, maker, seen):
    make = {
        "call": lambda h: keep("made", torch.sin, h),
        "function": lambda h: keep("made", lambda: h.exp().sin()),
        "region": lambda h: remat.op(lambda h: h.sin() + h, "made")(h),
    }[maker]

    def block(x):
        y = make(x * 1.5)
        view = y.t()
        keep("changed", returns_nothing(REWRITES[name]), y)
        read = {"itself": y, "a view before": view, "a view after": y.t(), "both": y + view}[seen]
        return (x.sin() + read) * x.cos()

    def program(wrap):
        x = leaf(3, 3)
        y = wrap(block)(x)
        y.sum().backward()
        return y, x.grad

    with pytest.warns(remat.RematWarning, match="::made: replay recomputes this call, since a result of it"):
        assert_same_program(program)


VIEWS = {
    "view": (lambda h: h.view(-1), lambda h: h.t_()),
    "narrow": (lambda h: h.narrow(1, 3, 2), lambda h: h.as_strided_((3,), (1,))),
}


@pytest.mark.parametrize("name", VIEWS)
def test_view_of_a_saved_tensor_that_is_reshaped_in_place_under_a_policy(name):
    """Autograd makes the view anew, by its own function, of a placeholder that has another shape by then."""
    view, reshape = VIEWS[name]

    def block(x):
        y = x.sin()
        part = view(y)
        reshape(y)
        return (part.sin() * 2).sum() * y.cos().sum() * x.cos()

    def program(wrap):
        x = leaf(3, 5)
        y = wrap(block)(x)
        y.sum().backward()
        return y, x.grad

    with pytest.warns(remat.RematWarning, match="replay starts over"):
        assert_same_program(program, policy=lambda ctx, op, *args, **kwargs: True)


def under_a_policy(function):
    return remat.checkpoint(policy=lambda ctx, op, *args, **kwargs: False)(function)


def test_read_of_a_tensor_from_outside_that_a_region_with_a_policy_reshapes_is_refused():
    def program(wrap):
        x, table = leaf(3, 4), torch.arange(12.0).view(4, 3)

        def block(x):
            table.t_()
            return (x * table).sin()

        wrap(block)(x).sum().backward()

    with pytest.raises(remat.MutationError, match="variable 'table'"):
        program(remat.checkpoint(policy=lambda ctx, op, *args, **kwargs: False))


@pytest.mark.parametrize("call_of", ["native region", "call"])
@pytest.mark.parametrize("dims", [0, (), (1, 3)])
@pytest.mark.filterwarnings("ignore:.*in place the shape:torch_remat.RematWarning")
def test_reshape_in_place_of_what_replay_makes_again(dims, call_of):
    """Also where it changes nothing, so that the tensor has the shape that it was left with from the start."""

    def function(h):
        return h.squeeze_(dims)

    def program(wrap):
        saved = (
            partial(partial, remat.native_save_region, "kept")
            if call_of == "native region"
            else lambda f: remat.op(f, "kept")
        )
        x = leaf(3, 1, 4, 1)
        h = wrap(lambda x: (saved(function)(x * 1.0) * 0.7).exp() + x.sum())(x)
        return h, torch.autograd.grad(h.sum(), x)

    assert_same_program(program)


@pytest.mark.parametrize("inside", [True, False])
def test_tensor_that_a_region_with_a_policy_has_overwritten_must_keep_its_shape(inside):
    """The copy from before the change would be seen in another shape than the op saw it in."""
    table = torch.arange(9.0).view(3, 3)

    @under_a_policy
    def block(x):
        y = x + table
        table.mul_(2)
        if inside:
            table.t_()
        return y.sin()

    y = block(leaf(3, 3))
    if not inside:
        table.t_()
    with pytest.raises(remat.MutationError, match=r"add: .* reads a tensor created outside the region"):
        y.sum().backward()
