"""What regions with native regions or under a policy keep, and which ops they run again: by hand, and by models.

Of a native region are kept tensors born inside that backward reads, and returned tensors that replay or a later native
region's backward reads; nothing from outside that replay will have, never a parameter, nothing twice. Under a policy
what autograd saves is needed: a needed result of a saved op is kept; a needed result of a recomputed op is run again,
and all that it reads is needed. Nothing else is kept or run. Views cost nothing.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import torch_remat as remat
from tests.helpers import (
    CountOps,
    LiveStorages,
    alive,
    assert_same,
    leaf,
    pairwise,
    watch,
)
from tests.native_programs import (
    ATTENTION,
    MATMULS,
    RECOMPUTE,
    Marks,
    TransformerBlock,
    aten,
    keep,
    kept,
    peak_bytes,
    region,
    replayed_ops,
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


def read_through_a_sum(m, x, w):
    return m("y", m("sum", m("h", keep("a", torch.mm, x, w)) + x).sin())


def read_after_the_last_fill(m, x, w):
    g = m("g", x.sin())
    return m("y", m("h", keep("a", torch.mm, g, w)) + g)


def outside_tensor_saved_inside(m, x, w):
    g = m("g", x.exp())
    return keep("a", lambda: m("s", g.sin()) * 2)


def view_of_outside_tensor_saved_inside(m, x, w):
    g = m("g", x.exp())
    return keep("a", lambda: g.t()[1:].sin() * 2)


def read_by_the_next_native_region(m, x, w):
    h = m("h", keep("a", torch.mm, x, w))
    return keep("b", lambda: m("s", h.sin()) * 2)


def read_by_both(m, x, w):
    h = m("h", keep("a", torch.mm, x, w))
    return keep("b", lambda: m("s", h.sin())) + m("c", h.cos())


def view_of_what_it_returns(m, x, w):
    return m("y", m("h", keep("a", torch.mm, x, w)).t()[1:].sin())


def returned_twice(m, x, w):
    one, two, three = keep("a", lambda: ((h := m("h", x @ w)), h, h.view(-1)))
    return (one.sin() + two.cos()).view(-1) * three


def returns_what_it_was_given(m, x, w):
    g = m("g", x.exp())
    one, two, three = keep("a", lambda g: (g, x, w), g)
    return m("y", (one * two * three).sin())


def parameter_inside(m, x, w):
    return keep("a", lambda: m("s", w.sin()) + m("t", w.t()[1:].cos()).sum(0)) * 2


def one_of_two_outputs(m, x, w):
    u, v = keep("a", lambda: (m("u", x @ w), m("v", x * 3)))
    return m("y", v.sin()) + u


def integers(m, x, w):
    values, index = keep("a", lambda: tuple(m(*pair) for pair in zip(("values", "index"), x.sort(-1), strict=True)))
    return w.gather(-1, index) + values


def changed_in_place_inside(m, x, w):
    return keep("a", lambda: m("s", m("h", x @ w).add_(1).mul_(2).sin())) * 2


def nested(m, x, w):
    return keep("a", lambda: m("s", m("h", keep("inner", torch.mm, x, w)).sin())) * 2


def recomputed_region_reads(m, x, w):
    h = m("h", keep("a", torch.mm, x, w))
    return remat.op(lambda t: m("s", m("d", t * 2).sin()).exp(), "b", policy=RECOMPUTE)(h)


def native_chain(m, x, w):
    a = m("a", keep("1", torch.mm, x, w))
    b = m("b", keep("2", torch.mm, a, w))
    c = m("c", keep("3", torch.mm, b.sin(), w))
    return m("d", keep("4", lambda: c * 2))


BY_HAND = {
    unread: "",
    born_inside: "a c",
    read_outside: "h",
    read_through_a_sum: "h",
    read_after_the_last_fill: "",
    outside_tensor_saved_inside: "",
    view_of_outside_tensor_saved_inside: "",
    read_by_the_next_native_region: "h",
    read_by_both: "h",
    view_of_what_it_returns: "h",
    returned_twice: "h",
    returns_what_it_was_given: "",
    parameter_inside: "",
    one_of_two_outputs: "v",
    integers: "index",
    changed_in_place_inside: "h",
    nested: "h",
    recomputed_region_reads: "h",
    native_chain: "a b",
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


def test_dropout_keeps_its_mask_and_its_result_only_where_it_is_read():
    x, w = leaf(4, 4), leaf(4, 4)
    read = kept(region()(lambda x: keep("a", F.dropout, x * 2, 0.5) @ w), [x])
    assert read.bytes == 2 * x.nbytes
    unread = kept(region()(lambda x: keep("a", F.dropout, x * 2, 0.5) + w), [x])
    assert unread.bytes == x.nbytes


TRANSFORMER = {  # the bytes kept at width 256, and the ops that run again
    "attention": (ATTENTION, 1_056_768, {"native_layer_norm": 2, "addmm": 3, "add": 1, "gelu": 1}),
    "matmuls": (
        MATMULS,
        4_718_592,
        {"native_layer_norm": 2, "_scaled_dot_product_flash_attention_for_cpu": 1, "add": 1, "gelu": 1},
    ),
}


@pytest.mark.parametrize("how", ["native regions", "policy"])
@pytest.mark.parametrize("what", TRANSFORMER)
def test_transformer_block_of_the_benchmarks_costs_what_was_counted_by_hand(what, how):
    """And no more bytes, ops or peak than SAC."""
    ops, expected, replayed = TRANSFORMER[what]
    x, block = leaf(4, 128, 256), TransformerBlock()
    assert retained_bytes(region()(block), [x]) == 524_288
    assert expected <= retained_bytes(sac(ops)(block), [x])
    policy = ops if how == "policy" else None
    assert retained_bytes(region(policy)(block if policy else block.keeping(what)), [x]) == expected

    x, block = leaf(2, 8, 16), TransformerBlock(16, 2)
    parameters = list(block.parameters())
    peer = replayed_ops(block, sac(ops), [x], parameters)
    peak = peak_bytes(sac(ops)(block), [x], parameters)
    function = block if policy else block.keeping(what)
    assert replayed_ops(function, region(policy), [x], parameters) == replayed
    assert not Counter(replayed) - Counter(peer)
    assert peak_bytes(region(policy)(function), [x], parameters) <= peak


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


# --- Native regions drawn at random


NATIVE_OPS = {
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
def native_programs(draw):
    """Draw steps: `(native region or None, op, indices of what it reads)`; value 0 is the input."""
    steps, group, native = [], 0, None
    for index in range(draw(st.integers(1, 9))):
        move = draw(st.sampled_from(["plain", "plain", "new", "new", "same"]))
        if move == "new":
            group += 1
        native = None if move == "plain" else native if move == "same" else group
        name = draw(st.sampled_from(list(NATIVE_OPS)))
        reads = tuple(draw(st.integers(max(0, index - 3), index)) for _ in range(NATIVE_OPS[name][0]))
        steps.append((native, name, reads))
    return steps


def run_native(steps, marks, x):
    """Run the steps, those of one group in one native region, and return all values that no step reads."""
    values = {0: x}

    def do(numbers):
        for number in numbers:
            _, name, reads = steps[number - 1]
            values[number] = marks(f"v{number}", NATIVE_OPS[name][1](*(values[read] for read in reads)))
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


def native_model(steps):
    """Return the numbers of the values that the rules keep."""
    groups = {0: None} | {number: native for number, (native, _, _) in enumerate(steps, 1)}
    stays, last = set(), -1
    for number, (native, name, reads) in enumerate(steps, 1):
        saved = [*(reads if NATIVE_OPS[name][2] == "i" else ()), *([number] if NATIVE_OPS[name][2] == "o" else ())]
        for value in saved:
            if groups[value] is not None and (native is not None or value != number):
                stays.add(value)
            if groups[value] is None or native is None:
                last = number
    for number, (native, name, reads) in enumerate(steps, 1):
        runs = native is None and (number < last or (number == last and NATIVE_OPS[name][2] == "o"))
        if runs:
            stays |= {read for read in reads if groups[read] is not None}
    return stays


@settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(native_programs())
def test_drawn_native_regions_keep_what_the_model_says(steps):
    x, marks = leaf(3, 3), Marks()
    with uncollected():
        after = kept(region()(lambda x: run_native(steps, marks, x)), [x], marks)
        expected = {f"v{number}" for number in native_model(steps)}
        assert after.names == expected, steps
        assert after.bytes == marks.bytes(expected), steps
        (actual,) = after.backward([x])
        (expected,) = torch.autograd.grad(sum(y.sum() for y in run_native(steps, Marks(), x)), [x])
        assert_same(expected, actual)
        assert marks.alive() == set(), steps
        assert after.live.bytes() == 0, steps


# --- Under a policy


MM = [aten.mm.default]


def only_feeds_a_saved_op(m, x, w):
    """The matmul's second factor needs no gradient, so nobody reads the first."""
    return m("e", m("h", m("b", m("a", x * 2) + 1) @ w.detach()).exp())


def chain(m, x, w):
    a = m("a", x @ w)
    b = m("b", a @ w)
    return m("c", b @ w).sin()


def views(m, x, w):
    h = m("h", x @ w)
    top, rest = h.t().split([1, 3])
    return top.sin().sum() + rest.unsqueeze(0).expand(2, 3, 4).cos().sum() + m("e", h.view(-1)[::2].exp()).sum()


def sum_of_two(m, x, w):
    a, b = m("a", x @ w), m("b", w @ x)
    return m("y", m("s", a + b).sin())


def several_outputs(m, x, w):
    values, index = m("h", x @ w).sort(-1)
    m("values", values), m("index", index)
    return m("y", values.sin()), w.gather(-1, index)


def numbers(m, x, w):
    h = m("h", x @ w)
    scale = h.detach().abs().max().item()
    return m("y", m("p", h * scale).sin())


POLICIES_BY_HAND = [
    (only_feeds_a_saved_op, MM, "h", {"exp": 1}),
    (only_feeds_a_saved_op, [], "", {"mul": 1, "add": 1, "mm": 1, "exp": 1}),
    (only_feeds_a_saved_op, [aten.add.Tensor], "b", {"mm": 1, "exp": 1}),
    (only_feeds_a_saved_op, [aten.exp.default], "e", {}),
    (chain, MM, "a b c", {}),
    (chain, [aten.sin.default], "", {"mm": 3}),
    (views, MM, "h", {"exp": 1}),
    (views, [aten.exp.default], "e", {"mm": 1}),
    (sum_of_two, MM, "a b", {"add": 1}),
    (sum_of_two, [*MM, aten.add.Tensor], "s", {}),
    (several_outputs, MM, "h", {"sort": 1}),
    (several_outputs, [*MM, aten.sort.default], "values index", {}),
    (numbers, MM, "h", None),
    (numbers, [aten.mul.Tensor], "p", None),
]


def ids(value):
    if callable(value):
        return value.__name__
    return "+".join(op._schema.name.removeprefix("aten::") for op in value) or "none" if isinstance(value, list) else ""


@pytest.mark.parametrize(("function", "ops", "names", "runs"), POLICIES_BY_HAND, ids=ids)
def test_region_keeps_and_runs_what_was_counted_by_hand(function, ops, names, runs):
    x, w, marks = leaf(4, 4), nn.Parameter(torch.randn(4, 4)), Marks()

    def policy(ctx, op, *args, **kwargs):
        return op in ops

    def loss(m, x):
        out = function(m, x, w)
        return sum(y.sum() for y in (out if isinstance(out, tuple) else (out,)))

    plain_gradients = torch.autograd.grad(loss(Marks(), x), [x, w], allow_unused=True)
    with uncollected():
        after = kept(lambda x: region(policy)(lambda x: function(marks, x, w))(x), [x], marks)
        assert after.names == set(names.split())
        assert after.bytes == marks.bytes(names.split())
        for retain in (True, False):
            gradients = after.backward([x, w], retain_graph=retain)
            assert [g is None for g in gradients] == [g is None for g in plain_gradients]
            assert_same([g for g in plain_gradients if g is not None], [g for g in gradients if g is not None])
        assert marks.alive() == set()
        assert after.live.bytes() == 0
    ours = replayed_ops(lambda x: function(Marks(), x, w), region(policy), [x], [w])
    assert runs is None or ours == runs
    peer = replayed_ops(lambda x: function(Marks(), x, w), sac(policy), [x], [w])
    assert not Counter(ours) - Counter(peer)


# --- Policies drawn at random


OPS = {
    "double": (1, lambda t: t * 2, "", "mul"),
    "shift": (1, lambda t: t + 1, "", "add"),
    "t": (1, lambda t: t.t(), "", None),
    "row": (1, lambda t: t[1].expand(3, 3), "", None),
    "add": (2, torch.add, "", "add"),
    "sin": (1, torch.sin, "i", "sin"),
    "exp": (1, torch.exp, "o", "exp"),
    "sigmoid": (1, torch.sigmoid, "o", "sigmoid"),
    "mul": (2, torch.mul, "i", "mul"),
    "mm": (2, torch.mm, "i", "mm"),
}
"""How many tensors an op takes, what it does, whether it saves its inputs or its output, its name if it computes."""


@st.composite
def programs(draw):
    """Draw steps: `(saved, op, indices of what it reads)`; value 0 is the input."""
    steps = []
    for index in range(draw(st.integers(1, 10))):
        name = draw(st.sampled_from(list(OPS)))
        reads = tuple(draw(st.integers(max(0, index - 4), index)) for _ in range(OPS[name][0]))
        steps.append((draw(st.booleans()), name, reads))
    return steps


def run(steps, marks, x):
    """Run the steps; return the values that no step reads."""
    values = [x]
    for number, (_, name, reads) in enumerate(steps, 1):
        values.append(marks(f"v{number}", OPS[name][1](*(values[read] for read in reads))))
    read = {read for _, _, reads in steps for read in reads}
    return [value for number, value in enumerate(values) if number and number not in read]


def by_position(steps):
    """Return a policy that saves the computing ops that are marked so, by their order in forward."""
    wanted = [saved for saved, name, _ in steps if OPS[name][3]]
    position = iter(range(len(wanted)))

    def policy(ctx, op, *args, **kwargs):
        return False if ctx.is_recompute or op.is_view else wanted[next(position)]

    return policy


def model(steps):
    """Return the numbers of the values that are kept, and the ops that run again."""
    kept, again = set(), set()

    def need(number):
        if number == 0:
            return
        saved, name, reads = steps[number - 1]
        if OPS[name][3] is None:
            need(reads[0])
        elif saved:
            kept.add(number)
        elif number not in again:
            again.add(number)
            for read in reads:
                need(read)

    for number, (_, name, reads) in enumerate(steps, 1):
        for value in reads if OPS[name][2] == "i" else [number] * (OPS[name][2] == "o"):
            need(value)
    return kept, Counter(OPS[steps[number - 1][1]][3] for number in again)


def roots(steps, kept):
    """Return the names of the kept values and of all views of them: they share memory."""
    shared = set(kept)
    for number, (_, name, reads) in enumerate(steps, 1):
        if OPS[name][3] is None and reads[0] in shared:
            shared.add(number)
    return {f"v{number}" for number in shared}


@settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_drawn_program_keeps_and_runs_what_the_model_says(steps):
    x, marks = leaf(3, 3), Marks()
    stays, again = model(steps)
    with uncollected():
        after = kept(region(by_position(steps))(lambda x: run(steps, marks, x)), [x], marks)
        names = {name for name in after.names if marks.storages[name].cdata != x.untyped_storage()._cdata}
        assert names == roots(steps, stays), steps
        assert after.bytes == len(stays) * x.nbytes, steps
        (actual,) = after.backward([x])
        assert_same(torch.autograd.grad(sum(y.sum() for y in run(steps, Marks(), x)), [x])[0], actual)
        assert after.live.bytes() == 0, steps
    wrap = lambda f: lambda x: region(by_position(steps))(f)(x)  # noqa: E731
    replayed = replayed_ops(lambda x: run(steps, Marks(), x), wrap, [x])
    assert replayed == dict(again), steps
    peer = replayed_ops(lambda x: run(steps, Marks(), x), lambda f: lambda x: sac(by_position(steps))(f)(x), [x])
    assert not Counter(replayed) - Counter(peer), steps


# --- What a mode outside sees of replay


def all_backward_ops(checkpointed, *inputs):
    """Return how often each op ran in backward, as a mode outside counts, detach excluded."""
    y = checkpointed(*inputs)
    with CountOps() as ops:
        torch.autograd.grad(y.sum(), inputs)
    del ops.counts["detach"]
    return ops.counts


@pytest.mark.parametrize("last", ["a norm", "a product with a constant"])
def test_replay_ends_at_the_last_tensor_also_if_that_is_a_float_without_gradient(last):
    """Such a tensor may be a buffer that its op is about to fill; here it is none, as the calls tell."""

    def function(x, w):
        if last == "a norm":
            h = F.layer_norm(x.sin(), (4,))
        else:
            with torch.no_grad():
                constant = (x @ w).sin()
            h = x.sin() * constant
        return h.t().contiguous().t() + h.view(2, -1)[:, :4].sum()

    policy = [aten.add.Tensor]
    x, w = leaf(4, 4), torch.randn(4, 4)
    ours = all_backward_ops(lambda x: region(policy)(function)(x, w), x)
    peers = all_backward_ops(lambda x: sac(policy)(function)(x, w), x)
    assert not ours - peers
    assert_same(
        torch.autograd.grad(function(x, w).sum(), x), torch.autograd.grad(region(policy)(function)(x, w).sum(), x)
    )
