"""What native regions keep, tensor by tensor and byte by byte, against counts by hand and a model of the rules.

Kept are tensors born inside that backward reads, and returned tensors that replay or a later native region's backward
reads; nothing from outside that replay will have, never a parameter, nothing twice.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import torch_remat as remat
from tests.helpers import LiveStorages, alive, assert_same, leaf, pairwise, watch
from tests.native_programs import (
    ATTENTION,
    MATMULS,
    RECOMPUTE,
    Marks,
    TransformerBlock,
    keep,
    kept,
    peak_bytes,
    region,
    retained_bytes,
    sac,
    uncollected,
)


@pytest.fixture(scope="module", autouse=True)
def _warm():
    """Run what torch loads when it is first needed, which leaves cycles."""
    with LiveStorages():
        leaf(1).detach().sin()


def unread(m, x, w):
    """A matmul saves what it was given; nobody reads what it makes."""
    return m("h", keep("a", torch.mm, x, w)) * 2


def born_inside(m, x, w):
    return keep("a", lambda: m("c", m("b", m("a", x @ w).sin()).exp())) * 2


def read_outside(m, x, w):
    return m("y", m("h", keep("a", torch.mm, x, w)).sin())


def read_by_a_needed_op(m, x, w):
    return m("y", m("double", m("h", keep("a", torch.mm, x, w)) * 2).sin())


def read_through_a_sum(m, x, w):
    return m("y", m("sum", m("h", keep("a", torch.mm, x, w)) + x).sin())


def read_only_by_linear_ops(m, x, w):
    return m("z", m("y", m("h", keep("a", torch.mm, x, w)) + x) * 3)


def read_after_the_last_fill(m, x, w):
    g = m("g", x.sin())
    return m("y", m("h", keep("a", torch.mm, g, w)) + g)


def outside_tensor_saved_inside(m, x, w):
    g = m("g", x.exp())
    return keep("a", lambda: m("s", g.sin()) * 2)


def outside_tensor_in_a_closure(m, x, w):
    given = {"g": [m("g", x.exp())]}
    return keep("a", lambda: m("s", given["g"][0].sin()) * w * 2)


def view_of_outside_tensor_saved_inside(m, x, w):
    g = m("g", x.exp())
    return keep("a", lambda: g.t()[1:].sin() * 2)


def outside_tensor_that_no_grad_made(m, x, w):
    with torch.no_grad():
        scale = m("scale", x.abs() + 1)
    return keep("a", lambda: (w * scale) * 2)


def read_by_the_next_native_region(m, x, w):
    h = m("h", keep("a", torch.mm, x, w))
    return keep("b", lambda: m("s", h.sin()) * 2)


def read_linearly_by_the_next_native_region(m, x, w):
    h = m("h", keep("a", torch.mm, x, w))
    return keep("b", lambda: m("s", h * 2) + 1).sum(-1)


def read_by_both(m, x, w):
    h = m("h", keep("a", torch.mm, x, w))
    return keep("b", lambda: m("s", h.sin())) + m("c", h.cos())


def view_of_what_it_returns(m, x, w):
    return m("y", m("h", keep("a", torch.mm, x, w)).t()[1:].sin())


def view_that_it_returns(m, x, w):
    return m("y", keep("a", lambda: m("h", x @ w).t()).sin())


def returned_twice(m, x, w):
    one, two, three = keep("a", lambda: ((h := m("h", x @ w)), h, h.view(-1)))
    return (one.sin() + two.cos()).view(-1) * three


def returns_a_view_of_outside(m, x, w):
    g = m("g", x.exp())
    return m("y", keep("a", lambda: g.t()[1:]).sin())


def returns_what_it_was_given(m, x, w):
    g = m("g", x.exp())
    one, two, three = keep("a", lambda g: (g, x, w), g)
    return m("y", (one * two * three).sin())


def returns_a_view_of_a_parameter(m, x, w):
    return m("y", keep("a", lambda: w.t()).sin() * x)


def parameter_inside(m, x, w):
    return keep("a", lambda: m("s", w.sin()) + m("t", w.t()[1:].cos()).sum(0)) * 2


def one_of_two_outputs(m, x, w):
    u, v = keep("a", lambda: (m("u", x @ w), m("v", x * 3)))
    return m("y", v.sin()) + u


def saved_and_returned(m, x, w):
    h = m("h", keep("a", lambda: x.exp()))
    return m("y", h.sin())


def integers(m, x, w):
    values, index = keep("a", lambda: tuple(m(*pair) for pair in zip(("values", "index"), x.sort(-1), strict=True)))
    return w.gather(-1, index) + values


def mask(m, x, w):
    return m("y", x * m("mask", keep("a", lambda: x > 0)))


def number_without_gradient(m, x, w):
    scale = m("scale", keep("a", lambda: (m("abs", x.detach().abs())).amax(-1, keepdim=True)))
    return m("y", w * scale)


def changed_in_place_inside(m, x, w):
    return keep("a", lambda: m("s", m("h", x @ w).add_(1).mul_(2).sin())) * 2


def nested(m, x, w):
    return keep("a", lambda: m("s", m("h", keep("inner", torch.mm, x, w)).sin())) * 2


def recomputed_region_reads(m, x, w):
    h = m("h", keep("a", torch.mm, x, w))
    return remat.op(lambda t: m("s", m("d", t * 2).sin()).exp(), "b", policy=RECOMPUTE)(h)


def chain(m, x, w):
    a = m("a", keep("1", torch.mm, x, w))
    b = m("b", keep("2", torch.mm, a, w))
    c = m("c", keep("3", torch.mm, b.sin(), w))
    return m("d", keep("4", lambda: c * 2))


def item_inside(m, x, w):
    return keep("a", lambda: x * m("max", m("abs", x.detach().abs()).max()).item()) * 2


BY_HAND = {
    unread: "",
    born_inside: "a c",
    read_outside: "h",
    read_by_a_needed_op: "h",
    read_through_a_sum: "h",
    read_only_by_linear_ops: "",
    read_after_the_last_fill: "",
    outside_tensor_saved_inside: "",
    outside_tensor_in_a_closure: "s",
    view_of_outside_tensor_saved_inside: "",
    outside_tensor_that_no_grad_made: "",
    read_by_the_next_native_region: "h",
    read_linearly_by_the_next_native_region: "",
    read_by_both: "h",
    view_of_what_it_returns: "h",
    view_that_it_returns: "h",
    returned_twice: "h",
    returns_a_view_of_outside: "",
    returns_what_it_was_given: "",
    returns_a_view_of_a_parameter: "",
    parameter_inside: "",
    one_of_two_outputs: "v",
    saved_and_returned: "h",
    integers: "index",
    mask: "mask",
    number_without_gradient: "scale",
    changed_in_place_inside: "h",
    nested: "h",
    recomputed_region_reads: "h",
    chain: "a b",
    item_inside: "",
}


@pairwise(function=BY_HAND, keeps_graph=[False, True])
def test_native_regions_keep_what_was_counted_by_hand(function, keeps_graph):
    x, w, marks = leaf(4, 4), nn.Parameter(torch.randn(4, 4)), Marks()
    expected = set(BY_HAND[function].split())
    plain_gradients = torch.autograd.grad(function(Marks(), x, w).sum(), [x, w], allow_unused=True)
    with uncollected():
        after = kept(lambda x: region()(lambda x: function(marks, x, w))(x), [x], marks)
        assert after.names == expected
        assert after.bytes == marks.bytes(expected)
        for retain in (True, True, False) if keeps_graph else (False,):
            gradients = after.backward([x, w], retain_graph=retain)
            assert [g is None for g in gradients] == [g is None for g in plain_gradients]
            assert_same([g for g in plain_gradients if g is not None], [g for g in gradients if g is not None])
            assert marks.alive() == (expected if retain else set())
        assert after.live.bytes() == 0


def test_resident_is_freed_as_soon_as_its_node_has_run():
    x, marks, seen = leaf(4, 4), Marks(), []
    with uncollected():

        def function(x):
            a = m_hook("a", keep("1", lambda: marks("a", x * 2).sin()))
            b = m_hook("b", keep("2", lambda: marks("b", a * 3).sin()))
            return m_hook("c", keep("3", lambda: marks("c", b * 5).sin()))

        def m_hook(name, tensor):
            if not remat.is_recomputing():
                tensor.register_hook(lambda grad: seen.append((name, marks.alive())))
            return tensor

        after = kept(region()(function), [x], marks)
        assert after.names == {"a", "b", "c"}
        after.backward([x])
    assert seen == [("c", {"a", "b", "c"}), ("b", {"a", "b"}), ("a", {"a"})]
    assert marks.alive() == set()


def test_region_input_that_a_native_region_saves_is_kept_once():
    root = leaf(5, 5)
    with uncollected():
        with LiveStorages() as live:
            x = root * 1
            y = region()(lambda x: keep("a", lambda: x.t().sin() + x.cos()))(x)
        size = x.nbytes
        del x
        loss = y.sum()
        del y
        assert live.bytes() == size
        loss.backward()
        assert live.bytes() == 0


def test_caller_alone_holds_an_output_that_nothing_reads():
    x = leaf(3, 3)
    with uncollected():
        y = region()(lambda x: keep("a", lambda: (x @ x) * 2))(x)
        reference, graph = watch(y), y.grad_fn
        assert alive(reference) == 1
        del y
        assert alive(reference) == 0
        del graph


@pytest.mark.parametrize(
    ("make", "policy"),
    [
        (lambda x: keep("a", torch.mm, x, x), None),
        (lambda x: keep("a", lambda: x @ x), None),
        (lambda x: x @ x, lambda _ctx, op, *args, **kwargs: op is torch.ops.aten.mm.default),
    ],
    ids=["call", "python", "policy"],
)
def test_placeholder_that_outlives_replay_keeps_nothing_of_the_region_alive(make, policy):
    """As in a list of hidden states, to which replay appends once more."""
    states, made = [], []

    def block(x):
        y = x.cos()
        made.append(watch(y))
        states.append(make(y).detach())
        return y.sin()

    with uncollected():
        y = region(policy)(block)(leaf(3, 3))
        y.sum().backward()
        del y
        assert [type(state).__name__ for state in states] == ["Tensor", "Placeholder"]
        assert [alive(reference) for reference in made] == [0, 0]
        with pytest.raises(remat.PlaceholderError, match=r"[.:](out|mm_0_0)"):
            states[1].sum().item()


class Gelu(torch.autograd.Function):
    @staticmethod
    @remat.auto_forward("x")
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.ops.aten.gelu_backward(grad, x)


@pytest.mark.parametrize("up_is_native", [False, True])
@pytest.mark.parametrize("is_read", [False, True])
def test_op_with_a_handle_in_between_does_not_keep_a_result_that_nothing_reads(is_read, up_is_native):
    """What replay hands to `Gelu` comes before the result of `down`, which is only added to something."""
    up, down = nn.Linear(8, 16), nn.Linear(16, 8)
    gelu = remat.op(Gelu.apply, "gelu", policy=remat.CheckpointPolicy.SAVE)

    def block(x, keep=keep, gelu=gelu):
        y = x + keep("down", down, gelu(keep("up", up, x) if up_is_native else up(x)))
        return y.sin() if is_read else y

    x = leaf(4, 8)
    expected = torch.autograd.grad(block(x, keep=plain_call, gelu=F.gelu).sum(), [x, *up.parameters()])
    y = region()(block)(x)
    assert (" down.out " in str(remat.memory_report(y))) == is_read
    assert_same(expected, torch.autograd.grad(y.sum(), [x, *up.parameters()]))


def plain_call(_name, function, *args):
    return function(*args)


# The transformer block of the benchmarks


@pytest.mark.parametrize(("what", "expected"), [("attention", 1_056_768), ("matmuls", 4_718_592)])
def test_transformer_block_retains_the_count_by_hand(what, expected):
    x = leaf(4, 128, 256)
    assert retained_bytes(region()(TransformerBlock()), [x]) == 524_288
    assert retained_bytes(region()(TransformerBlock().keeping(what)), [x]) == expected


@pytest.mark.parametrize(("what", "ops"), [("attention", ATTENTION), ("matmuls", MATMULS)])
def test_peak_of_the_transformer_block_is_not_above_that_of_the_peer(what, ops):
    x, block = leaf(2, 32, 32), TransformerBlock(32, 2)
    parameters = list(block.parameters())
    peer = peak_bytes(sac(ops)(block), [x], parameters)
    assert peak_bytes(region()(block.keeping(what)), [x], parameters) <= peer


# Programs drawn at random, against a model of the rules

OPS = {
    "double": (1, lambda t: t * 2, ""),
    "transposed": (1, lambda t: t.t().contiguous() + 1, ""),
    "add": (2, torch.add, ""),
    "sin": (1, torch.sin, "i"),
    "exp": (1, torch.exp, "o"),
    "sigmoid": (1, torch.sigmoid, "o"),
    "mul": (2, torch.mul, "i"),
    "mm": (2, torch.mm, "i"),
}
"""How many tensors an op takes, what it does, and whether it saves its inputs or its output."""


@st.composite
def programs(draw):
    """Draw steps: `(native region or None, op, indices of what it reads)`; value 0 is the input."""
    steps, group, native = [], 0, None
    for index in range(draw(st.integers(1, 9))):
        move = draw(st.sampled_from(["plain", "plain", "new", "new", "same"]))
        if move == "new":
            group += 1
        native = None if move == "plain" else native if move == "same" else group
        name = draw(st.sampled_from(list(OPS)))
        reads = tuple(draw(st.integers(max(0, index - 3), index)) for _ in range(OPS[name][0]))
        steps.append((native, name, reads))
    return steps


def run(steps, marks, x):
    """Run the steps, those of one group in one native region, and return all values that no step reads."""
    values = {0: x}

    def do(numbers):
        for number in numbers:
            _, name, reads = steps[number - 1]
            values[number] = marks(f"v{number}", OPS[name][1](*(values[read] for read in reads)))
        return [values[number] for number in numbers]

    number = 1
    while number <= len(steps):
        native, last = steps[number - 1][0], number
        if native is None:
            do([number])
        else:
            while last < len(steps) and steps[last][0] == native:
                last += 1
            numbers = list(range(number, last + 1))
            values |= zip(numbers, keep(f"native{native}", do, numbers), strict=True)
        number = last + 1
    read = {read for _, _, reads in steps for read in reads}
    return [values[number] for number in values if number and number not in read]


def model(steps):
    """Return the numbers of the values that the rules keep."""
    groups = {0: None} | {number: native for number, (native, _, _) in enumerate(steps, 1)}
    stays, last = set(), -1
    for number, (native, name, reads) in enumerate(steps, 1):
        saved = [*(reads if OPS[name][2] == "i" else ()), *([number] if OPS[name][2] == "o" else ())]
        for value in saved:
            if groups[value] is not None and (native is not None or value != number):
                stays.add(value)
            if groups[value] is None or native is None:
                last = number
    for number, (native, name, reads) in enumerate(steps, 1):
        runs = native is None and (number < last or (number == last and OPS[name][2] == "o"))
        if runs:
            stays |= {read for read in reads if groups[read] is not None}
    return stays


@settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_drawn_program_keeps_what_the_model_says(steps):
    x, marks = leaf(3, 3), Marks()
    with uncollected():
        after = kept(region()(lambda x: run(steps, marks, x)), [x], marks)
        expected = {f"v{number}" for number in model(steps)}
        assert after.names == expected, steps
        assert after.bytes == marks.bytes(expected), steps
        (actual,) = after.backward([x])
        (expected,) = torch.autograd.grad(sum(y.sum() for y in run(steps, Marks(), x)), [x])
        assert_same(expected, actual)
        assert marks.alive() == set(), steps
        assert after.live.bytes() == 0, steps
