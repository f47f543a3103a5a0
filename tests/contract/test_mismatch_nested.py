"""Ops of regions inside regions: what differs in the replay of the region around is an error that names the op."""

from __future__ import annotations

import pytest
import torch

import torch_remat as remat
from tests.handle_ops import RECOMPUTE, SAVE, STYLES, Both, Trace, call
from tests.helpers import assert_same_program, checkpointed, leaf, pairwise, plain

OFFLOAD = remat.CheckpointPolicy.OFFLOAD
A, B, C = ("a", SAVE), ("b", SAVE), ("c", SAVE)
AR, BR, CR = ("a", RECOMPUTE), ("b", RECOMPUTE), ("c", RECOMPUTE)

DIFFERENCES = {
    "names swapped": ([A, B], [B, A], "b"),
    "names of recomputed ops swapped": ([AR, BR], [BR, AR], "b"),
    "policy to save": ([AR, B], [A, B], "a"),
    "policy to recompute": ([A, B], [A, BR], "b"),
    "policy to offload": ([A, B], [A, ("b", OFFLOAD)], "b"),
    "another name": ([A, B], [A, C], "c"),
    "first is missing": ([A, B], [B], "b"),
    "last is missing": ([A, B], [A], "b"),
    "last recomputed one is missing": ([A, BR], [A], "b"),
    "all are missing": ([A], [], "a"),
    "first is new": ([B], [A, B], "a"),
    "last is new": ([A], [A, B], "b"),
    "only one is new": ([], [A], "a"),
}


def run_ops(style, ops, x):
    """Run ops, given as `(name, policy)`, one after another."""
    for name, policy in ops:
        x = call(style, Both, Trace(), name, policy, x)
    return x


def run_native(name, policy, function, x):
    return remat.op(function, name, policy=policy)(x)


def native(style, ops, x):
    """Run native regions in place of ops."""
    for name, policy in ops:
        x = run_native(name, policy, lambda h: h.sin().exp(), x)
    return x


def nested(depth, block, **options):
    """Return a function that runs a block `depth` regions deep, with ops that save around each."""

    def level(x):
        h = x.sin()
        h = nested(depth - 1, block, **options)(h) if depth > 1 else checkpointed(block, region_name="inner")(h)
        return h.exp().cos()

    return checkpointed(level, region_name=f"level {depth}", **options)


def run_differing(run, forward, replay, depth=1, run_that_differs=2, **options):
    runs = []

    def block(x):
        runs.append(None)
        return run(replay if len(runs) == run_that_differs else forward, x.cos())

    x = leaf(3)
    y = nested(depth, block, **options)(x)
    with pytest.raises(remat.MismatchError) as caught:
        y.sum().backward()
    assert x.grad is None
    assert len(runs) >= run_that_differs
    return caught.value


@pairwise(name=DIFFERENCES, style=[*STYLES, "native"], early_stop=[True, False])
def test_op_of_an_inner_region_that_differs_in_the_outer_replay_is_an_error_that_names_it(name, style, early_stop):
    forward, replay, op = DIFFERENCES[name]
    run = native if style == "native" else lambda ops, x: run_ops(style, ops, x)
    if style == "native":
        run = lambda ops, x: native(style, ops, x)  # noqa: E731
    error = run_differing(run, forward, replay, early_stop=early_stop)
    assert_names(error, op, name)
    assert "level 1" in str(error)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("name", ["names swapped", "policy to save", "last is missing", "last is new"])
def test_op_that_differs_in_any_replay_around_it_is_an_error_that_names_it(name, depth):
    """Its region's own replay is the run after those of the regions around; it need not come to the last op."""
    forward, replay, op = DIFFERENCES[name]
    own_replay = depth + 2
    for run in range(2, own_replay + (name != "last is missing" and name != "last is new")):
        error = run_differing(lambda ops, x: run_ops("auto", ops, x), forward, replay, depth, run)
        assert_names(error, op, name)


def assert_names(error, op, difference):
    """Of an op that is missing, the region around it is named, and the op only where the replay went to its end."""
    if "missing" in difference:
        assert error.region == "inner" or error.region.startswith("level ")
        assert error.op in (op, None)
    else:
        assert (error.region, error.op) == ("inner", op)


def test_op_that_moved_from_one_inner_region_to_another_is_an_error():
    def program(which):
        def outer(x):
            for index in range(3):
                ops = [A] if index in (0, which()) else []
                x = checkpointed(lambda x, ops=ops: run_ops("auto", ops, x.cos()), region_name=f"inner {index}")(x)
            return x

        return checkpointed(outer)(leaf(3)).sum()

    program(lambda: 1).backward()
    loss = program(lambda: 2 if remat.is_recomputing() else 1)
    with pytest.raises(remat.MismatchError) as caught:
        loss.backward()
    assert (caught.value.region, caught.value.op) == ("inner 2", "a")


class Wave(torch.autograd.Function):
    """Keeps its input."""

    @staticmethod
    @remat.auto_forward("x")
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


def waves(policies):
    def run(x):
        for place, policy in enumerate(policies):
            x = remat.op(Wave.apply, f"wave {place}", policy=policy)(x)
        return x

    return run


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("policy", [SAVE, RECOMPUTE])
def test_inner_regions_with_ops_in_a_native_region_give_equal_gradients(policy, early_stop):
    def program(wrap):
        def body(x):
            return wrap(waves([SAVE, RECOMPUTE, SAVE]))(x.cos()).exp()

        def outer(x):
            h = wrap(waves([RECOMPUTE, SAVE]))(x.sin())
            h = run_native("body", policy, body, h.cos())
            return wrap(waves([SAVE, SAVE]))(h.cos())

        x = leaf(3)
        y = wrap(outer)(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program, early_stop=early_stop)


def test_inner_regions_with_ops_in_a_native_region_that_runs_once_more_give_equal_gradients():
    """The ops in it come twice in one replay."""

    def program(wrap):
        def body(x):
            y = wrap(waves([SAVE, RECOMPUTE]))(x.cos()).exp()
            return y, y * 2

        def outer(x):
            h, double = run_native("body", SAVE, body, x.sin())
            scale = double.detach().numpy().max().item()  # autograd does not see that
            return wrap(waves([SAVE]))(h * scale).cos()

        x = leaf(3)
        y = wrap(outer)(x)
        if wrap is plain:
            y.sum().backward()
        else:
            with pytest.warns(remat.RematWarning):
                y.sum().backward()
        return y, x.grad

    assert_same_program(program)


@pytest.mark.filterwarnings("ignore:.*a gradient is taken in the region:torch_remat.RematWarning")
@pytest.mark.parametrize("early_stop", [True, False])
def test_inner_region_with_ops_in_the_body_of_a_recomputed_op_gives_equal_gradients(early_stop):
    def program(wrap):
        class Slope(torch.autograd.Function):
            @staticmethod
            @remat.auto_forward("slope")
            def forward(ctx, x):
                with torch.enable_grad():
                    h = x.detach().requires_grad_()
                    (slope,) = torch.autograd.grad(wrap(waves([SAVE, RECOMPUTE]))(h.cos()).sum(), h)
                ctx.save_for_backward(slope)
                return slope * x

            @staticmethod
            def backward(ctx, grad):
                return grad * ctx.saved_tensors[0]

        def outer(x):
            h = remat.op(Slope.apply, "slope", policy=RECOMPUTE)(x.sin())
            h = remat.op(Wave.apply, "last", policy=SAVE)(h)
            return wrap(waves([RECOMPUTE, SAVE]))(h)

        x = leaf(3)
        y = wrap(outer)(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program, early_stop=early_stop)


def test_gradient_taken_inside_a_region_through_an_inner_one_with_ops_is_equal():
    def program(wrap):
        def outer(x):
            h = x.detach().requires_grad_()
            y = wrap(lambda h: run_ops("auto", [AR, B], h.cos()))(h.sin())
            (g,) = torch.autograd.grad(y.sum(), h)
            return wrap(lambda h: run_ops("auto", [A, BR], h.cos()))(x.exp()) * g

        x = leaf(3)
        y = wrap(outer)(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program)
