"""Views of what was changed in place, in regions whose ops are skipped: what replay shows through them."""

from __future__ import annotations

import warnings

import pytest
import torch

import torch_remat as remat
from tests.handle_ops import SAVE, Inner, Trace, call
from tests.helpers import assert_same, assert_same_program, leaf, pairwise
from tests.native_programs import aten, keep

VIEWS_WRITTEN = {
    "view after": lambda y: y.relu_().t(),
    "view of a view after": lambda y: y.relu_().unsqueeze(0).permute(2, 0, 1).squeeze(1),
    "view before": lambda y: (y.t(), y.relu_())[0],
    "through a view": lambda y: (y.view(-1).relu_(), y)[1],
    "from view to view": lambda y: (y.t(), y.view(-1).relu_())[0],
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


@pytest.mark.parametrize("natively", [True, False])
def test_views_that_autograd_makes_anew_after_a_write_are_not_taken_for_those_of_the_user(natively):
    def body(x, w):
        y = torch.einsum("ij,jk->ki", x * 2, w)
        y[:, 0].zero_()
        return y.view(-1).sin()

    def program(wrap):
        x, w = leaf(3, 3), leaf(3, 3)
        y = wrap(lambda x, w: (keep("body", body, x, w) if natively else body(x, w)).exp().cos())(x, w)
        y.sum().backward()
        return y, x.grad, w.grad

    options = {} if natively else {"policy": lambda ctx, op, *args, **kwargs: op is not aten.exp.default}
    assert_same_program(program, **options)


def test_what_lies_at_the_address_of_something_gone_is_another_tensor():
    def block(x):
        y = remat.op(lambda t: t * 1.1 + t.sin(), "first")(x)  # whose first product is gone after it
        changed = y.exp().clamp(max=3)
        z = remat.op(lambda: changed.mul_(0.5).t(), "second")()
        return (z * y).sin().cos()

    x = torch.randn(4, 4, requires_grad=True)
    expected = torch.autograd.grad(block(x).sum(), x)
    for count in range(40):
        others = [torch.empty(4**size) for size in range(count % 5)]
        assert_same(expected, torch.autograd.grad(remat.checkpoint()(block)(x).sum(), x))
        del others


def returns_nothing(change):
    """Return a function that changes its argument in place and returns nothing."""

    def function(h):
        change(h)

    return function


REWRITES = {
    "all": lambda h: h.mul_(2),
    "a part": lambda h: h[1:].zero_(),
    "through a view": lambda h: h.t().add_(0.5),
    "by a copy": lambda h: h.copy_(h.detach().t().clone()),
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


@pytest.mark.parametrize("name", REWRITES)
def test_surprise_reads_a_saved_result_as_later_native_regions_left_it(name):
    """The graph shows no reader: replay starts over, and runs what changed the result, too."""

    def block(x):
        y = keep("made", torch.sin, x * 1.5)
        keep("changed", returns_nothing(REWRITES[name]), y)
        return (x.sin() * y.detach().clone()).exp()

    def program(wrap):
        x = leaf(3, 3)
        y = wrap(block)(x)
        y.sum().backward()
        return y, x.grad

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat.RematWarning)
        assert_same_program(program)


VIEWS = {
    "view": (lambda h: h.view(-1), lambda h: h.t_()),
    "select": (lambda h: h[:, 4], lambda h: h.t_()),
    "row": (lambda h: h[2], lambda h: h.unsqueeze_(0)),
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


def test_read_of_a_tensor_from_outside_that_a_region_with_a_policy_reshapes_is_refused():
    def program(wrap):
        x, table = leaf(3, 4), torch.arange(12.0).view(4, 3)

        def block(x):
            table.t_()
            return (x * table).sin()

        wrap(block)(x).sum().backward()

    with pytest.raises(remat.MutationError, match="variable 'table'"):
        program(remat.checkpoint(policy=lambda ctx, op, *args, **kwargs: False))
