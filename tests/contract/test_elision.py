"""A SAVE op keeps nothing that replay has anyway, and backward sees exactly the same values all the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_remat as remat
from tests.handle_ops import POLICIES, RECOMPUTE, SAVE, STYLES, Affine, Inner, Kernel, SinCos, Trace, call, policy_ids
from tests.helpers import (
    LiveStorages,
    assert_same,
    assert_same_program,
    checkpointed,
    collector_off,
    leaf,
    name_of,
    pairwise,
    plain,
    shown,
)

VIEWS = {
    "itself": lambda t: t,
    "detached": lambda t: t.detach(),
    "transposed": lambda t: t.t(),
    "rows": lambda t: t[1:3],
    "column": lambda t: t[:, 2],
    "every second": lambda t: t[::2, 1::2],
    "element": lambda t: t[1, 1],
    "expanded": lambda t: t[0].expand(5, 4),
    "diagonal": lambda t: t.diagonal(),
    "flat": lambda t: t.view(16),
    "last chunk": lambda t: t.chunk(2, dim=1)[1],
    "unfolded": lambda t: t.view(16).unfold(0, 3, 2),
    "unsqueezed": lambda t: t.unsqueeze(1).permute(2, 0, 1),
    "as strided": lambda t: t.as_strided((2, 3), (5, 1), 2),
    "empty": lambda t: t[2:2],
    "other dtype": lambda t: t.view(torch.int32),
    "smaller dtype": lambda t: t.view(torch.float16),
    "pairs": lambda t: torch.view_as_complex(t.view(4, 2, 2)),
}
COMPLEX_VIEWS = {
    "itself": lambda t: t,
    "conjugate": lambda t: t.conj(),
    "imaginary": lambda t: t.imag,
    "negative": lambda t: t.conj().imag,
    "adjoint": lambda t: t.mH,
    "real pairs": lambda t: torch.view_as_real(t)[..., 1],
}


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


def run_keeper(style, wrap, producer, view, where, seen, dtype):
    """Run a region with a producer and a SAVE op that saves a view of what it made.

    Returns:
        The trace, what was alive after forward, and the tensors to compare.
    """
    keeper = keeper_kernel(view if where == "body" else VIEWS["itself"], seen)
    trace = Trace()

    def block(x):
        if producer == "op":
            x = call(style, PRODUCER, trace, "producer", RECOMPUTE, x)
        elif producer == "native":
            x = x * 2 + 1
            trace.ran("producer", (), (x,))
        return call(style, keeper, trace, "keeper", SAVE, view(x) if where == "caller" else x)

    x = torch.randn(4, 4, dtype=dtype, requires_grad=True)
    if where == "caller" and not view(x).requires_grad:
        pytest.skip("plain autograd saves nothing")
    y = wrap(block)(x * 1)
    alive = trace.alive()
    y.sum().backward()
    return trace, alive, [y, x.grad]


def check_keeper(style, producer, view, where, dtype=torch.float32):
    results, seen = [], []
    for wrap in (plain, checkpointed):
        torch.manual_seed(4)
        trace, alive, result = run_keeper(style, wrap, producer, view, where, seen, dtype)
        results.append(result)
        if wrap is checkpointed:
            assert alive <= {"keeper.out"}
            assert trace.runs["keeper"] == 1
    assert_same(*results)
    (how, values), (how_region, values_region) = seen
    assert how == how_region
    assert_same(values, values_region)


@pairwise(name=VIEWS, style=STYLES, producer=["input", "op"], where=["caller", "body"])
def test_saved_view_of_what_replay_has_keeps_nothing_and_is_exact(name, style, producer, where):
    check_keeper(style, producer, VIEWS[name], where)


@pairwise(name=COMPLEX_VIEWS, style=STYLES, producer=["input", "op"], where=["caller", "body"])
def test_saved_complex_view_of_what_replay_has_keeps_nothing_and_is_exact(name, style, producer, where):
    check_keeper(style, producer, COMPLEX_VIEWS[name], where, torch.complex64)


@pytest.mark.parametrize("where", ["caller", "body"])
@pytest.mark.parametrize("style", ["auto"])
@pytest.mark.parametrize("name", ["itself", "transposed", "rows", "expanded"])
def test_saved_argument_that_native_ops_recompute_keeps_nothing_where_the_arguments_are_known(name, style, where):
    check_keeper(style, "native", VIEWS[name], where)


@pytest.mark.parametrize("style", STYLES)
def test_output_of_a_saved_op_is_kept_by_the_saved_op_that_saves_it(style):
    trace, x = Trace(), leaf(3)

    def block(x):
        return call(style, Affine, trace, "b", SAVE, call(style, Inner, trace, "a", SAVE, x), x)

    loss = checkpointed(block)(x).sum()
    assert trace.alive() == {"a.m", "a.out"}
    loss.backward()
    assert trace.runs == {"a": 1, "b": 1}
    assert trace.alive() == set()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("which", [0, 1])
def test_one_of_several_outputs_of_a_recomputed_op_keeps_nothing(style, which):
    traces = []

    def program(wrap):
        trace, x = Trace(), leaf(3)
        traces.append(trace)

        def block(x):
            parts = call(style, SinCos, trace, "parts", RECOMPUTE, x)
            return call(style, Affine, trace, "keeper", SAVE, parts[which], parts[which])

        loss = wrap(block)(x).sum()
        assert wrap is plain or trace.alive() == set()
        loss.backward()
        return x.grad

    assert_same_program(program, replays=1)
    assert traces[1].runs == {"parts": 2, "keeper": 1}


@pytest.mark.parametrize("style", STYLES)
def test_tensor_saved_by_several_ops_is_exact_in_each(style):
    def program(wrap):
        trace, x, w = Trace(), leaf(3), leaf(3)

        def block(x, w):
            h = call(style, Affine, trace, "h", RECOMPUTE, x, w)
            one = call(style, Affine, trace, "one", SAVE, h, x)
            two = call(style, Affine, trace, "two", RECOMPUTE, h, w)
            three = call(style, Affine, trace, "three", SAVE, h.view(3), two)
            return h.sin() * two, one, three

        y, one, three = wrap(block)(x, w)
        (y * one * three).sum().backward()
        return y, one, three, x.grad, w.grad

    assert_same_program(program, replays=1)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("change", ["mul_", "through a view", "under no_grad"])
def test_output_changed_in_place_before_a_saved_op_saves_it_gives_equal_gradients(style, change):
    """The value that the producer made is not the one that was saved."""

    def program(wrap):
        trace, x = Trace(), leaf(3, 3)

        def block(x):
            h = call(style, Inner, trace, "producer", RECOMPUTE, x)
            if change == "mul_":
                h.mul_(3)
            elif change == "through a view":
                h.view(-1)[::2].add_(2)
            else:
                with torch.no_grad():
                    h.mul_(2)
            y = call(style, Affine, trace, "keeper", SAVE, h, h.t())
            return y, h.exp()

        y, z = wrap(block)(x)
        (y.sum() + z.sum()).backward()
        return y, z, x.grad

    assert_same_program(program, replays=1)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("producer", ["native", "op"])
@pytest.mark.parametrize("style", STYLES)
def test_output_changed_in_place_after_a_saved_op_saved_it_is_an_error_or_right(style, producer, tail, early_stop):
    def run(function, style):
        def block(x):
            h = x * 1.5 if producer == "native" else call(style, Inner, Trace(), "producer", RECOMPUTE, x)
            y = call(style, Affine, Trace(), "keeper", SAVE, h, x)
            h.mul_(2)
            return y, h.sin().exp() if tail else h

        y, h = function(block)(x)
        return torch.autograd.grad(y.sum() + h.sum(), x)

    x = leaf(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(plain, "plain")
    try:
        actual = run(lambda block: checkpointed(block, early_stop=early_stop), style)
    except remat.MutationError:
        return
    assert_same(run(plain, "copies"), actual)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("policy", POLICIES, ids=policy_ids)
def test_parameter_is_neither_counted_nor_copied(style, policy):
    w = nn.Parameter(torch.randn(3, 3))
    pointers = []

    def forward(ctx, x, w):
        return x * w, {"w": w, "view": w.t()[1:]}

    def backward(ctx, saved, grad):
        pointers.append([tensor.data_ptr() for tensor in saved])
        return grad * saved[0], grad * saved[1].sum()

    keeper = Kernel("keeper", ("w", "view"), forward, backward, 2)
    trace, live, x = Trace(), LiveStorages(), leaf(3, 3)
    with collector_off():
        with live:
            y = checkpointed(lambda x: call(style, keeper, trace, "it", policy, x.sin(), w))(x)
        assert live.bytes() == y.nbytes
        y.sum().backward()
    assert pointers == [[w.data_ptr(), w[:, 1:].data_ptr()]]
    expected = torch.autograd.grad(call("plain", keeper, Trace(), "it", policy, x.sin(), w).sum(), [x, w])
    assert_same(expected, [x.grad, w.grad])


@pytest.mark.parametrize("style", STYLES)
def test_input_of_the_region_is_kept_once_and_not_copied(style):
    trace, live, root = Trace(), LiveStorages(), leaf(5, 5)
    with collector_off():
        with live:
            x = root * 1
            y = checkpointed(lambda x: call(style, Affine, trace, "it", SAVE, x, x.t()))(x)
            size = x.nbytes
            del x
        loss = y.sum()
        del y
        assert live.bytes() == size
        loss.backward()
        assert live.bytes() == 0


@pytest.mark.parametrize("style", STYLES)
def test_elided_tensors_are_exact_in_every_backward_of_a_kept_graph(style):
    trace, x = Trace(), leaf(3)

    def block(x):
        h = call(style, Inner, trace, "producer", RECOMPUTE, x)
        return call(style, Affine, trace, "keeper", SAVE, h, x.flip(0))

    y = checkpointed(block)(x)
    assert trace.alive() == {"keeper.out"}
    results = [torch.autograd.grad(y.sum(), x, retain_graph=True) for _ in range(3)]
    assert trace.alive() == {"keeper.out"}
    expected = torch.autograd.grad(checkpointed(block, early_stop=False)(x).sum(), x)
    for result in results:
        assert_same(expected, result)
    assert trace.runs == {"producer": 6, "keeper": 2}


@pytest.mark.parametrize("style", STYLES)
def test_elided_tensor_is_found_when_its_producer_reads_a_slot(style):
    def program(wrap):
        trace, x = Trace(), leaf(3)

        def block(x):
            s = call(style, Inner, trace, "s", SAVE, x)
            r = call(style, Inner, trace, "r", RECOMPUTE, s)
            return call(style, Affine, trace, "keeper", SAVE, r, s)

        loss = wrap(block)(x).sum()
        assert wrap is plain or trace.alive() == {"s.m", "s.out"}
        loss.backward()
        return x.grad

    assert_same_program(program, replays=1)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("changed", [lambda y: y.view(3, 2), lambda y: y.double()], ids=["shape", "dtype"])
def test_output_that_differs_in_replay_is_an_error_of_the_op_that_saved_it(style, changed):
    calls = []

    def forward(ctx, x):
        calls.append(x)
        y = x.exp()
        return (y if len(calls) == 1 else changed(y)), {}

    producer = Kernel("Changing", (), forward, lambda ctx, saved, grad: grad)
    x = leaf(2, 3)

    def block(x):
        h = call(style, producer, Trace(), "producer", RECOMPUTE, x)
        return call(style, Affine, Trace(), "keeper", SAVE, h, x.detach())

    loss = checkpointed(block)(x).sum()
    told = "the op that made it returns" if style == "handle" else "the op gets"
    with pytest.raises(remat.MismatchError, match=told) as caught:
        loss.backward()
    assert (caught.value.op, caught.value.tensor) == ("keeper", "x")


OTHER = {
    "dtype": lambda h: h.double(),
    "producer": lambda h: h.flip(0),
    "shape": lambda h: h[:2].clone(),
    "device": lambda h: h.to("meta"),
    "no tensor": lambda h: None,
}


@pairwise(
    name=OTHER, style=["auto"], check=["default", "bitwise", "none", torch.sum], where=["caller", "body"], ids=name_of
)
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
    if name == "producer" and check in ("none", torch.sum):
        loss.backward()  # nothing but what was asked for is compared
        return
    with pytest.raises(remat.MismatchError) as caught:
        loss.backward()
    assert x.grad is None
    assert (caught.value.region, caught.value.op, caught.value.tensor) == ("block", "keeper", "x")


@pytest.mark.parametrize("changed", [lambda h: h.double(), lambda h: h.view(2, 2)], ids=["dtype", "shape"])
@pytest.mark.parametrize("view", ["view", "detached alias"])
@pytest.mark.parametrize("style", STYLES)
def test_output_that_differs_in_replay_is_an_error_of_the_op_that_saved_a_view_of_it(style, view, changed, request):
    def block(x):
        h = call(style, PRODUCER, Trace(), "producer", RECOMPUTE, changed(x) if remat.is_recomputing() else x)
        return call(style, Affine, Trace(), "keeper", SAVE, h.view(2, 2) if view == "view" else h.detach(), x[0])

    x = leaf(4)
    loss = checkpointed(block, region_name="block")(x).sum()
    if style == "auto" and view == "view" and request.node.callspec.id.endswith("shape"):
        loss.backward()  # what the op gets is as it was
        assert_same(torch.autograd.grad(block(x).sum(), x)[0], x.grad)
        return
    with pytest.raises(remat.MismatchError) as caught:
        loss.backward()
    assert (caught.value.region, caught.value.op, caught.value.tensor) == ("block", "keeper", "x")


def test_number_of_outputs_that_differs_in_replay_is_an_error_of_the_op_that_saved_one():
    def forward(ctx, x):
        return (x.sin(),) if remat.is_recomputing() else (x.sin(), x.cos()), {}

    parts = Kernel("parts", (), forward, lambda ctx, saved, *grads: grads[0])

    def block(x):
        return call("auto", Affine, Trace(), "keeper", SAVE, call("auto", parts, Trace(), "parts", RECOMPUTE, x)[-1], x)

    # What the op gets looks like what it was given, so that values alone tell.
    loss = checkpointed(block, determinism_check="bitwise")(leaf(3)).sum()
    with pytest.raises(remat.MismatchError, match="other values") as caught:
        loss.backward()
    assert (caught.value.op, caught.value.tensor) == ("keeper", "x")


@pytest.mark.parametrize("producer", ["native", "op"])
@pytest.mark.parametrize("check", ["bitwise", torch.sum], ids=shown)
@pytest.mark.parametrize("style", ["auto"])
def test_values_of_a_saved_tensor_that_is_not_kept_are_compared_if_asked_for(style, check, producer):
    factor = 2.0

    def block(x):
        h = x * factor if producer == "native" else call(style, PRODUCER, Trace(), "h", RECOMPUTE, x.detach() * factor)
        return call(style, Affine, Trace(), "keeper", SAVE, h, x)

    loss = checkpointed(block, determinism_check=check)(leaf(3)).sum()
    loss.backward(retain_graph=True)
    factor = 3.0
    with pytest.raises(remat.MismatchError, match="other values") as caught:
        loss.backward()
    assert (caught.value.op, caught.value.tensor) == ("keeper", "x")


def halve_data(h):
    h.data.mul_(0.5)


def halve_in_numpy(h):
    h.detach().numpy()[...] *= 0.5


def replace_data(h):
    h.data = h.data * 0.5


@pytest.mark.parametrize("policy", [None, remat.policies.save_matmuls], ids=["", "policy"])
@pairwise(style=STYLES, write=[halve_data, halve_in_numpy, replace_data], early_stop=[True, False])
def test_write_that_no_version_counts_before_a_saved_op_saves_the_tensor_gives_equal_gradients(
    style, write, early_stop, policy
):
    """Replay makes the tensor at its producer, but has to go on to the op that saved it."""

    def program(wrap):
        x = leaf(4)

        def block(x):
            h = call(style, PRODUCER, Trace(), "producer", RECOMPUTE, x)
            write(h)
            return call(style, Affine, Trace(), "keeper", SAVE, h, x)

        y = wrap(block)(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program, early_stop=early_stop, policy=policy)


def test_saved_view_is_exact_where_hooks_give_the_inputs_back_with_other_strides():
    def program(wrap):
        x = leaf(3, 4)
        seen = []
        keeper = keeper_kernel(lambda t: t.t()[1:], seen)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous(), lambda t: t):
            y = wrap(lambda x: call("auto", keeper, Trace(), "keeper", SAVE, x.sin()))(x.t())
        y.backward()
        return x.grad, seen[0][1]

    assert_same_program(program)
