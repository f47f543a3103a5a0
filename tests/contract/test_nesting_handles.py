"""Handle ops beside what else a region's function may do: options, hooks, threads, ops in ops, backward inside."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import torch_remat as remat
from tests.handle_ops import (
    POLICIES,
    RECOMPUTE,
    SAVE,
    STYLES,
    Affine,
    Both,
    Identity,
    Inner,
    Kernel,
    Noise,
    Trace,
    Transpose,
    call,
    policy_ids,
)
from tests.helpers import (
    LiveStorages,
    assert_clean_state,
    assert_same,
    assert_same_program,
    checkpointed,
    leaf,
    pairwise,
    plain,
)

PAIRS = list(itertools.product(POLICIES, repeat=2))
OPTIONS = [
    {"early_stop": False},
    {"preserve_rng_state": True},
    {"determinism_check": "bitwise"},
    {"determinism_check": "none"},
    {"debug": True},
    {"debug": True, "early_stop": False, "determinism_check": "bitwise"},
    {"region_name": "named"},
]


@pairwise(options=OPTIONS, policies=PAIRS)
def test_ops_are_equal_and_bodies_run_as_often_under_every_option(options, policies):
    traces = []

    def program(wrap):
        trace, x, w = Trace(), leaf(3, 3), leaf(3, 3)
        traces.append(trace)

        def block(x, w):
            h = call("handle", Noise, trace, "a", policies[0], nn.functional.dropout(x.sin()))
            h = call("auto", Affine, trace, "b", RECOMPUTE, h, w)
            h = call("auto", Affine, trace, "c", policies[1], h.t() * 2, h)
            return call("handle", Both, trace, "d", RECOMPUTE, h).exp()

        y = wrap(block)(x, w)
        y.sum().backward()
        return y, x.grad, w.grad

    assert_same_program(program, replays=1, **options)
    runs = [1 if policy is SAVE else 2 for policy in policies]
    assert traces[1].runs == {"a": runs[0], "b": 2, "c": runs[1], "d": 2}


def test_hooks_on_the_output_of_a_saved_op_run_once_in_each_backward():
    def program(wrap):
        seen, x = [], leaf(3)

        def block(x):
            s = call("handle", Both, Trace(), "a", SAVE, x.sin())
            s.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
            if s.requires_grad:
                s.retain_grad()
            r = call("handle", Both, Trace(), "b", RECOMPUTE, s)
            r.register_hook(lambda grad: grad * 3)
            return r

        y = wrap(block)(x)
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        assert len(seen) == 2
        return seen, x.grad

    assert_same_program(program)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("producer", ["native", RECOMPUTE, SAVE])
def test_one_tensor_saved_under_two_names_is_right(producer, style):
    def forward(ctx, x):
        y = x.sin()
        return y, {"a": x, "b": x, "y": y, "z": y, "row": x[0]}

    def backward(ctx, saved, grad):
        a, b, y, z, row = saved
        return grad * a + b * y * z + row

    kernel = Kernel("twice", ("a", "b", "y", "z", "row"), forward, backward)

    def program(wrap):
        x = leaf(3, 3)

        def block(x):
            h = x * 2 if producer == "native" else call(style, Inner, Trace(), "h", producer, x)
            return call(style, kernel, Trace(), "it", SAVE, h), x.exp()

        y, z = wrap(block)(x)
        results = [torch.autograd.grad(y.sum() + z.sum(), x, retain_graph=True) for _ in range(2)]
        return y, results, torch.autograd.grad(y.sum(), x)

    assert_same_program(program)


@pytest.mark.parametrize("style", STYLES)
def test_tensors_from_outside_the_region_are_not_copied(style):
    outside = [leaf(3, 3), torch.randn(3, 3), nn.Parameter(torch.randn(3, 3)), leaf(3, 3).sin()]
    trace, live, x = Trace(), LiveStorages(), leaf(3, 3)

    def block(x):
        for index, tensor in enumerate(outside):
            x = call(style, Affine, trace, f"op{index}", POLICIES[index % 2], x, tensor)
        return x

    leaf(1).detach().sin()
    with live:
        outputs = [checkpointed(block)(x)]
    kept = {"op1.out"}  # what the RECOMPUTE op after the SAVE op reads
    assert trace.alive() == kept | {"op3.out"}
    loss = outputs.pop().sum()
    assert live.bytes() == x.nbytes * len(kept)
    got = torch.autograd.grad(loss, [x, outside[0], outside[2]])
    trace = Trace()
    assert_same(torch.autograd.grad(block(x).sum(), [x, outside[0], outside[2]]), got)


VIEWS = {
    "itself": lambda t: t,
    "transposed": lambda t: t.t(),
    "rows": lambda t: t[1:],
    "every second": lambda t: t[::2, 1::2],
    "expanded": lambda t: t[2].expand(4, 3),
    "diagonal": lambda t: t.diagonal(),
    "last part": lambda t: t.split(2, dim=1)[1],
    "unfolded": lambda t: t.unfold(0, 2, 1),
    "other dtype": lambda t: t.detach().view(torch.int32),
    "flat": lambda t: t.view(-1)[3:],
    "detached": lambda t: t.detach()[0],
    "with new axes": lambda t: t[None, :, None, 1],
}


@pairwise(name=VIEWS, style=STYLES)
def test_views_of_skipped_outputs_are_given_back_exactly(name, style):
    seen = []

    def forward(ctx, x, w):
        seen.append((x.clone(), x.shape, x.stride(), x.storage_offset(), x.dtype, ctx.needs_input_grad[1:3]))
        return x.double().nan_to_num().tanh().sum().float() + w.sin(), {"w": w}

    kernel = Kernel("look", ("w",), forward, lambda ctx, saved, grad: (None, grad * saved[0].cos()), 2)

    def block(x, w):
        s = call(style, Inner, Trace(), "s", SAVE, x)
        return call(style, kernel, Trace(), "look", RECOMPUTE, VIEWS[name](s), w)

    y = checkpointed(block)(leaf(3, 3), leaf(3))
    y.sum().backward()
    assert len(seen) == 2
    assert_same(seen[0][0], seen[1][0])
    assert seen[0][1:] == seen[1][1:]


def test_regions_in_several_threads_at_once_are_equal():
    def work(index, results, barrier):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(4, 4, generator=generator).requires_grad_()

        def block(x):
            with remat.name_scope(f"thread{index}"):
                for step in range(10):
                    x = call(STYLES[step % 2], Both, Trace(), f"op{step}", POLICIES[step % 2], x)
            return x

        barrier.wait()
        for _ in range(5):
            y = checkpointed(block)(x)
            got = torch.autograd.grad(y.sum(), x)
            results[index].append((got, torch.autograd.grad(block(x).sum(), x)))

    results, barrier = {index: [] for index in range(4)}, threading.Barrier(4)
    threads = [threading.Thread(target=work, args=(index, results, barrier)) for index in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pairs in results.values():
        assert len(pairs) == 5
        for got, want in pairs:
            assert_same(want, got)


def written_copy(tensor):
    """Return a copy that was filled in place, as pinned copies are: its version is not 0."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return copy.copy_(tensor).add_(0)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kernel", [Identity, Transpose, Inner], ids=str)
def test_hooks_around_the_region_may_give_back_tensors_of_any_version(kernel, style):
    def program(wrap):
        x = leaf(3, 3)

        def block(x):
            keep = call(style, Both, Trace(), "of input", SAVE, x)
            s = call(style, Inner, Trace(), "s", SAVE, keep)
            r = call(style, kernel, Trace(), "alias", RECOMPUTE, s)
            return call(style, Both, Trace(), "keeper", SAVE, r), call(style, kernel, Trace(), "t", RECOMPUTE, x)

        with saved_tensors_hooks(written_copy, lambda tensor: tensor):
            y, t = wrap(block)(x * 2)
        results = [torch.autograd.grad(y.sum() + t.sum(), x, retain_graph=True) for _ in range(2)]
        return y, results, torch.autograd.grad(y.sum(), x)

    assert_same_program(program)


def equal_or_remat_error(program):
    """Assert that the program gives with a region what it gives without, or an error of this library."""
    torch.manual_seed(2)
    expected = program(plain)
    torch.manual_seed(2)
    try:
        actual = program(checkpointed)
    except remat.RematError:
        assert_clean_state()
        return
    assert_same(expected, actual)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("policies", PAIRS, ids=policy_ids)
def test_op_in_the_body_of_an_op_is_equal_or_an_error(policies, style):
    def program(wrap):
        x = leaf(3)

        def forward(ctx, x):
            y = call(style, Inner, Trace(), "inner", policies[1], x)
            return y.sin() if policies[1] is RECOMPUTE else y, {"x": x, "y": y}

        outer = Kernel("outer", ("x", "y"), forward, lambda ctx, saved, grad: grad * saved[0] * saved[1])

        def block(x):
            h = call(style, Both, Trace(), "before", SAVE, x.sin())
            h = call(style, outer, Trace(), "outer", policies[0], h)
            return call(style, Both, Trace(), "after", RECOMPUTE, h)

        y = wrap(block)(x)
        y.sum().backward()
        return y, x.grad

    equal_or_remat_error(program)


@pytest.mark.parametrize("policies", PAIRS, ids=policy_ids)
@pytest.mark.parametrize("kind", ["gradient is used", "gradient is dropped", "of a part"])
def test_backward_inside_the_region_is_equal_or_an_error(kind, policies):
    def program(wrap):
        x = leaf(3)

        def block(x):
            h = call("handle", Both, Trace(), "a", policies[0], x.sin())
            r = call("handle", Both, Trace(), "b", policies[1], h)
            inner = x.detach().requires_grad_()
            part = call("handle", Both, Trace(), "c", policies[0], inner.cos())
            target, of = (inner, part) if kind == "of a part" else (x, r)
            (grad,) = torch.autograd.grad(of.sum(), target, retain_graph=True)
            y = call("handle", Affine, Trace(), "d", RECOMPUTE, r, grad)
            return y if kind != "gradient is dropped" else r

        y = wrap(block)(x)
        y.sum().backward()
        return y, x.grad

    equal_or_remat_error(program)


def test_checkpoint_sequential_with_ops_is_equal():
    def build():
        trace = Trace()
        return [lambda h, i=i: call(STYLES[i % 2], Both, trace, f"op{i}", POLICIES[i % 2], h) for i in range(6)], trace

    x = leaf(3)
    functions, trace = build()
    y = remat.checkpoint_sequential(functions, 3, x)
    y.sum().backward()
    expected = x.detach().clone().requires_grad_()
    h = expected
    for function in build()[0]:
        h = function(h)
    h.sum().backward()
    assert_same(expected.grad, x.grad)
    assert trace.runs == {"op0": 2, "op1": 1, "op2": 2, "op3": 1, "op4": 1, "op5": 1}


def test_region_may_be_called_again_and_its_graphs_walked_in_any_order():
    def program(wrap):
        x, w = leaf(3), leaf(3)

        def block(x):
            h = call("handle", Affine, Trace(), "a", SAVE, x, w)
            return call("handle", Affine, Trace(), "b", RECOMPUTE, h, w)

        region = wrap(block)
        outputs = [region(x * index) for index in range(1, 4)]
        for index in (1, 2, 0):
            outputs[index].sum().backward()
        return x.grad, w.grad

    assert_same_program(program, replays=3)
