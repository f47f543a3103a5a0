"""Handles: a SAVE body runs once, ever; a RECOMPUTE body runs again; gradients are those of plain autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import Function

import torch_remat as remat
from tests.handle_ops import (
    KERNELS,
    POLICIES,
    RECOMPUTE,
    SAVE,
    STYLES,
    Affine,
    Both,
    Gather,
    Inner,
    Kernel,
    Result,
    Shift,
    Sort,
    Trace,
    as_tuple,
    call,
)
from tests.helpers import LiveStorages, assert_same, assert_same_program, checkpointed, leaf, name_of, pairwise, plain


def run_kernel(style, kernel, trace, policy, x, w):
    """Run the kernel on what it takes, then a RECOMPUTE op that reads its floating outputs."""
    second = [torch.tensor([[1, 0, 1]] * 3)] if kernel is Gather else [w]
    outputs = as_tuple(call(style, kernel, trace, "it", policy, x, *second[: kernel.arity - 1]))
    other = outputs[-1] if outputs[-1].is_floating_point() and len(outputs) > 1 else w
    return call(style, Affine, trace, "reader", RECOMPUTE, outputs[0], other), *outputs


@pairwise(kernel=KERNELS, style=STYLES, policy=POLICIES)
def test_op_is_equal_and_its_body_runs_as_often_as_its_policy_says(kernel, style, policy):
    traces = {}

    def program(wrap, form=style):
        trace = traces[wrap, form] = Trace()
        x, w = leaf(3, 3), leaf(3, 3)
        y, *outputs = wrap(lambda x: run_kernel(form, kernel, trace, policy, x.sin(), w))(x)
        results = []
        for keep in (True, True, False):
            y.sum().backward(retain_graph=keep)
            results += [x.grad.clone(), w.grad.clone() if w.grad is not None else w]
        return y, *outputs, results

    assert_same_program(program)
    region = next(traces[key] for key in traces if key[0] is not plain)
    assert traces[plain, style].runs == {"it": 1, "reader": 1}
    assert region.runs == {"it": 1 if policy is SAVE else 4, "reader": 4}
    torch.manual_seed(2)
    expected = program(plain, "plain")
    torch.manual_seed(2)
    assert_same(expected, program(plain))


@pytest.mark.parametrize("style", STYLES)
def test_region_whose_ops_need_no_replay_is_not_replayed(style):
    trace = Trace()

    def block(x):
        h = call(style, Inner, trace, "a", SAVE, x * 2)
        h = call(style, Result, trace, "b", SAVE, h)
        h = call(style, Shift, trace, "c", SAVE, h)
        return call(style, Inner, trace, "d", SAVE, h) + 1, call(style, Sort, trace, "e", SAVE, h)[0]

    y, z = checkpointed(block)(leaf(3, 3))
    (y.sum() + z.square().sum()).backward()
    assert trace.runs == dict.fromkeys("abcde", 1)


def test_methods_keep_one_tensor_bare_and_several_in_a_tuple():
    seen = []

    class Op(Function):
        @staticmethod
        def forward(ctx, name, policy, *inputs):
            handle = remat.get_handle(ctx, name, policy)
            if (ret := handle.maybe_load_saved()) is not None:
                seen.append(("loaded", isinstance(ret, tuple)))
                return ret
            given = handle.save_or_load_inputs(*inputs)
            inputs = as_tuple(given)
            handle.save_for_backward({"first": inputs[0]})
            out = handle.record_outputs(*(x.sin() for x in inputs))
            seen.append(("ran", type(given), type(out)))
            return out

        @staticmethod
        def backward(ctx, *grads):
            return None, None, *grads

    def block(x, w):
        y, z = Op.apply("two", SAVE, Op.apply("one", SAVE, x), w)
        return Op.apply("again", RECOMPUTE, y), z

    y, z = checkpointed(block)(leaf(3), leaf(3))
    assert seen == [("ran", torch.Tensor, torch.Tensor), ("ran", tuple, tuple), ("ran", torch.Tensor, torch.Tensor)]
    seen.clear()
    (y + z).sum().backward()
    assert seen == [("loaded", False), ("loaded", True), ("ran", torch.Tensor, torch.Tensor)]


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
    if style == "handle":
        kept |= {"op0.out", "op2.out"}  # what SAVE ops save of their arguments, which only `auto_forward` knows
    assert trace.alive() == kept | {"op3.out"}
    loss = outputs.pop().sum()
    assert live.bytes() == x.nbytes * len(kept)
    got = torch.autograd.grad(loss, [x, outside[0], outside[2]])
    trace = Trace()
    assert_same(torch.autograd.grad(block(x).sum(), [x, outside[0], outside[2]]), got)


# --- Ops that autograd does not record


@pytest.mark.parametrize("style", STYLES)
def test_policy_holds_where_no_input_needs_a_gradient(style):
    traces = []

    def program(wrap):
        trace = Trace()
        traces.append(trace)
        x, t = leaf(3), torch.randn(3)

        def block(x):
            s = call(style, Both, trace, "constant", SAVE, t)
            with torch.no_grad():
                s = call(style, Affine, trace, "under no_grad", SAVE, x, s)
                r = call(style, Both, trace, "again", RECOMPUTE, s)
            assert not s.requires_grad
            s = call(style, Inner, trace, "tail", SAVE, s)
            return call(style, Affine, trace, "reader", RECOMPUTE, call(style, Affine, trace, "sum", SAVE, x, s), r)

        y = wrap(block)(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program, replays=1)
    assert traces[1].runs == {"constant": 1, "under no_grad": 1, "again": 2, "tail": 1, "sum": 1, "reader": 2}


@pairwise(style=STYLES, chain=["R", "OR", "RSSR"], early_stop=[True, False])
def test_ops_in_inference_mode_inside_a_region_are_equal_and_saved_ones_run_once(style, chain, early_stop):
    policies = {"R": RECOMPUTE, "S": SAVE, "O": remat.CheckpointPolicy.OFFLOAD}
    traces = []

    def program(wrap):
        trace = Trace()
        traces.append(trace)

        def block(x):
            with torch.inference_mode():
                h = x.detach() * 2
                for place, name in enumerate(chain):
                    h = call(style, Both, trace, f"{place}", policies[name], h)
            s = call(style, Affine, trace, "after", SAVE, x.cos(), x)
            return call(style, Both, trace, "last", RECOMPUTE, s)

        x = leaf(3, 3)
        y = wrap(block)(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program, early_stop=early_stop)
    ops = {f"{place}": 1 + (name == "R") for place, name in enumerate(chain)}
    assert traces[1].runs == {**ops, "after": 1, "last": 2}


# --- Views of what replay has, and what changes before it is saved


VIEWS = {
    "itself": lambda t: t,
    "detached": lambda t: t.detach(),
    "transposed": lambda t: t.t(),
    "expanded": lambda t: t[0].expand(5, 4),
    "unfolded": lambda t: t.view(16).unfold(0, 3, 2),
    "as strided": lambda t: t.as_strided((2, 3), (5, 1), 2),
    "smaller dtype": lambda t: t.view(torch.float16),
    "of complex": lambda t: t,
    "real pairs": lambda t: torch.view_as_real(t)[..., 1],
    "conjugate": lambda t: t.conj(),
    "negative": lambda t: t.conj().imag,
}
OF_COMPLEX = ("of complex", "real pairs", "conjugate", "negative")


def description(tensor):
    """Return all that tells how a tensor shows its storage."""
    how = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
    return (*how, tensor.is_conj(), tensor.is_neg())


PRODUCER = Kernel("producer", (), lambda ctx, x: (x * 2 + 1, {}), lambda ctx, saved, grad: grad * 2)


def numbers(tensor):
    """Return the tensor's values as bounded doubles that autograd does not follow."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().nan_to_num().tanh()


def keeper_kernel(make, seen):
    """Return a kernel that saves what `make` makes of its input, and notes what backward sees of it."""

    def forward(ctx, x):
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return numbers(x).sum(), {"v": make(x)}

    def backward(ctx, saved, grad):
        seen.append((description(saved[0]), numbers(saved[0])))
        return (grad * numbers(saved[0]).sum()).to(ctx.dtype).expand(ctx.shape)

    return Kernel("keeper", ("v",), forward, backward)


@pairwise(
    name=VIEWS,
    style=STYLES,
    producer=["input", "op", "native"],
    where=["caller", "body"],
    possible=lambda style, producer, name, where: (
        (producer != "native" or style == "auto")  # where the arguments are known
        and not (where == "caller" and name in ("detached", "smaller dtype"))  # plain autograd saves nothing
    ),
)
def test_saved_view_of_what_replay_has_keeps_nothing_and_is_exact(name, style, producer, where):
    seen, traces, view = [], [], VIEWS[name]
    keeper = keeper_kernel(view if where == "body" else VIEWS["itself"], seen)

    def program(wrap):
        trace = Trace()
        traces.append(trace)

        def block(x):
            if producer == "op":
                x = call(style, PRODUCER, trace, "producer", RECOMPUTE, x)
            elif producer == "native":
                x = x * 2 + 1
                trace.ran("producer", (), (x,))
            return call(style, keeper, trace, "keeper", SAVE, view(x) if where == "caller" else x)

        x = torch.randn(4, 4, dtype=torch.complex64 if name in OF_COMPLEX else torch.float32, requires_grad=True)
        y = wrap(block)(x * 1)
        kept = {"keeper.out", "producer.out"} if style == "handle" else {"keeper.out"}
        assert wrap is plain or trace.alive() <= kept
        y.sum().backward()
        return y, x.grad

    assert_same_program(program)
    assert traces[1].runs["keeper"] == 1
    (how, values), (how_region, values_region) = seen
    assert how == how_region
    assert_same(values, values_region)


OTHER = {
    "dtype": lambda h: h.double(),
    "producer": lambda h: h.flip(0),
    "shape": lambda h: h[:2].clone(),
    "device": lambda h: h.to("meta"),
    "no tensor": lambda h: None,
}


@pairwise(name=OTHER, style=["auto"], check=["default", "bitwise", "none"], where=["caller", "body"], ids=name_of)
def test_saved_input_that_differs_in_replay_is_an_error_of_the_op_that_saved_it(name, style, check, where):
    keeper = Kernel(
        "keeper",
        ("x",),
        lambda ctx, x: (x.exp(), {"x": x if where == "caller" else x.view(2, 2).t()}),
        lambda ctx, saved, grad: grad * saved[0].reshape(4).exp(),
    )

    def block(x):
        h = x.sin()
        return call(style, keeper, Trace(), "keeper", SAVE, OTHER[name](h) if remat.is_recomputing() else h)

    x = leaf(4)
    loss = checkpointed(block, region_name="block", determinism_check=check)(x).sum()
    if name == "producer" and check == "none":
        loss.backward()  # nothing but what was asked for is compared
        return
    with pytest.raises(remat.MismatchError) as caught:
        loss.backward()
    assert x.grad is None
    assert (caught.value.region, caught.value.op, caught.value.tensor) == ("block", "keeper", "x")
