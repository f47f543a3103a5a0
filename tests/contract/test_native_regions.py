"""Native regions: what runs inside is not computed again, whatever ops it is made of."""

from __future__ import annotations

import collections
import functools

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import torch_remat as remat
from tests.helpers import (
    Calls,
    assert_equal_gradients,
    assert_same,
    checkpointed,
    leaf,
    pairwise,
    tensors_in,
)
from tests.native_programs import RECOMPUTE, SAVE, ComputeOps, keep, region, replayed_ops

SIDE = 4


def framed(body):
    """Return a function with a recomputed op before the native region and two after each floating output of it."""

    def function(x, w):
        out = keep("body", body, x * 2, w)
        return [y.sin().exp() for y in tensors_in([out]) if y.is_floating_point()]

    return function


def in_place(h, w):
    a = h @ w
    a.add_(1).mul_(2)
    return a.tanh_()


def in_place_on_views(h, w):
    a = h @ w
    a[0].mul_(3)
    a.t()[1:, 2].zero_()
    a.view(-1)[::3].sub_(h.detach().reshape(-1)[::3])
    return a.exp()


def saved_then_rebound(h, w):
    a = (h @ w).exp()
    b = a * a
    a = a.clone().add_(b)
    return a.sigmoid_()


def out_argument(h, w):
    with torch.no_grad():
        buffer = torch.empty(SIDE, SIDE)
        torch.mm(h, w, out=buffer)
        other = torch.empty(0)
        torch.add(buffer, 1, out=other)
    return h * buffer + w * other


def several_out_arguments(h, w):
    with torch.no_grad():
        values, index = torch.empty(0), torch.empty(0, dtype=torch.long)
        torch.sort(h @ w, dim=-1, out=(values, index))
    return h.gather(-1, index) * values


def multi_output(h, w):
    values, index = (h @ w).sort(-1)
    variance, mean = torch.var_mean(h @ w, -1)
    return values, index, {"stats": (variance, mean)}


def pieces(h, w):
    a, b = (h @ w).chunk(2)
    top, rest = a.split([1, 1])
    return top * rest, torch.stack(b.unbind(1)), torch.cat([a, b])


def decomposition(h, w):
    q, r = torch.linalg.qr(h @ w + 3 * torch.eye(SIDE))
    return q, torch.linalg.inv(r + torch.eye(SIDE))


def factories(h, w):
    steps = torch.arange(SIDE, dtype=torch.float32)
    mask = torch.ones(SIDE, SIDE).tril()
    bias = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return h * mask @ w + torch.linspace(0, 1, SIDE) * bias + h.new_full((SIDE,), 0.5) + steps + torch.zeros_like(h)


def indexing(h, w):
    a = h @ w
    mask = a > 0
    b = torch.where(mask, a, a.exp())
    c = b.index_put((torch.tensor([0, 2]),), torch.ones(2, SIDE))
    return c.masked_fill(mask.t(), 0.5), b[mask], b[[1, 3]], b.scatter(0, mask.long(), 2.0)


def random_inside(h, w):
    a = F.dropout(h @ w, 0.4)
    b = a * torch.rand_like(a) + torch.randn(SIDE)
    c = b[torch.randperm(SIDE)]
    noise = torch.empty(SIDE, SIDE).uniform_(-1, 1)
    return c * noise + torch.bernoulli(torch.full((SIDE,), 0.5)), torch.normal(b.detach(), 1.0) * b


def under_autocast(h, w):
    with torch.autocast("cpu", torch.bfloat16):
        a = h @ w
        b = a @ w
        with torch.autocast("cpu", enabled=False):
            c = a.float() @ w
    return b.float() * c


def attention(h, w):
    q = (h @ w).view(1, 2, 2, SIDE)
    return F.scaled_dot_product_attention(q, q * 2, q.sin(), is_causal=True)


def attention_with_dropout(h, w):
    q = (h @ w).view(1, 2, 2, SIDE)
    return F.scaled_dot_product_attention(q, q * 2, q.sin(), dropout_p=0.3)


def complex_numbers(h, w):
    spectrum = torch.fft.rfft(h @ w)
    return torch.fft.irfft(spectrum * spectrum.conj(), n=SIDE), torch.view_as_real(spectrum), spectrum.real


def convolution(h, w):
    image = h.view(1, 1, SIDE, SIDE)
    a = F.conv2d(image, w.view(1, 1, SIDE, SIDE)[:, :, :2, :2], padding=1)
    return F.max_pool2d(a, 2), F.avg_pool2d(F.relu(a), 2)


def losses(h, w):
    target = torch.tensor([0, 3, 1, 2])
    return F.cross_entropy(h @ w, target), F.layer_norm(h @ w, (SIDE,)), F.embedding(target, w), F.gelu(h @ w)


def no_grad_inside(h, w):
    with torch.no_grad():
        scale = (h @ w).abs().amax()
    return (h / scale) @ w.detach() + (h @ w).detach() * w


def python_values(h, w):
    a = h @ w
    n = int((a > 0).sum()) % SIDE + 1
    scale = a.detach().abs().max().item()
    rows = [a[i] * (i + scale) for i in range(n)]
    return torch.stack(rows) if bool(a.detach().mean() > 0) else -torch.stack(rows)


def loop_until(h, w):
    a = h @ w
    steps = 0
    while float(a.detach().norm()) > 1 and steps < 5:
        a, steps = a * 0.5, steps + 1
    return a.tanh() * steps + a


def dynamic_shapes(h, w):
    a = h @ w
    rows, columns = (a > 0).nonzero(as_tuple=True)
    unique = torch.unique((a.detach() > 0).long())
    return a[rows, columns].exp(), a.masked_select(a < 0).sin(), a[unique[:1]]


def scalar_index(h, w):
    a = h @ w
    best = a.detach().sum(-1).argmax()
    return a[best] * 2, a.narrow(0, int(best), 1), a.select(0, best.item())


def nested(h, w):
    a = keep("inner", torch.mm, h, w)
    b = remat.op(lambda t: t.sin().cos(), "other", policy=RECOMPUTE)(a)
    return keep("last", lambda: keep("deep", torch.exp, b).tanh())


def comparisons(h, w):
    """Python asks the right operand first if its type is a subclass, as a placeholder's is."""
    mean = (h @ w).detach().mean()
    kept = [h > mean, h >= mean, h < mean, h <= mean, h == mean, h != mean, mean < h]
    return sum(torch.where(mask, h, w) * (index + 1) for index, mask in enumerate(kept)), (h - mean) / mean


def compared_with_its_mean(h, w):
    return torch.where(h > h.detach().mean(), h, h * h), torch.where(w.detach().mean() <= w, h, w)


def views_only(h, w):
    return h.t()[1:], w.view(2, -1), h.unsqueeze(0).expand(2, -1, -1)


def the_inputs(h, w):
    return h, w


BODIES = {
    body.__name__: body
    for body in (
        in_place,
        in_place_on_views,
        saved_then_rebound,
        out_argument,
        several_out_arguments,
        multi_output,
        pieces,
        decomposition,
        factories,
        indexing,
        random_inside,
        under_autocast,
        attention,
        attention_with_dropout,
        complex_numbers,
        convolution,
        losses,
        no_grad_inside,
        python_values,
        loop_until,
        dynamic_shapes,
        scalar_index,
        nested,
        comparisons,
        compared_with_its_mean,
        views_only,
        the_inputs,
    )
}


@pairwise(name=BODIES, early_stop=[True, False])
def test_gradients_are_those_of_plain_autograd(name, early_stop):
    function = framed(BODIES[name])
    inputs = leaf(SIDE, SIDE), leaf(SIDE, SIDE)
    assert_equal_gradients(function, checkpointed(function, early_stop=early_stop), inputs)


@pytest.mark.parametrize("name", BODIES)
def test_nothing_inside_is_computed_again(name):
    """Beyond backward's own ops, replay runs the ops outside of the native region and no other."""
    function = framed(BODIES[name])
    inputs = leaf(SIDE, SIDE), leaf(SIDE, SIDE)
    torch.manual_seed(3)
    outputs = len(function(*inputs))
    replayed = replayed_ops(function, region(), inputs)
    replayed.pop("_to_copy", None)  # autocast's cast of a leaf comes from outside: it is not kept, but made again
    assert replayed == {"mul": 1, "sin": outputs, "exp": outputs}


@pytest.mark.parametrize("before", [lambda x: x, torch.exp])
@pytest.mark.parametrize("is_leaf", [True, False])
def test_indices_that_ops_without_a_gradient_read_before_the_last_save_are_kept(before, is_leaf):
    """Replay ends while the sine saves what it is given, and has run all that came before it."""

    def function(x):
        h = before(x)
        scale = keep("order", torch.argsort, x).float() + 1
        return h.sin() + scale

    x = leaf(SIDE, SIDE)
    given = x if is_leaf else x * 1
    assert_equal_gradients(function, region()(function), (given,))


@pytest.mark.parametrize("changes", [False, True])
def test_warning_about_a_reader_is_an_error_where_warnings_are_errors(changes):
    def function(x):
        y = keep("a", torch.sin, x)
        h = x * 2
        if changes:
            h.relu_()
        return h * sum(y.detach().sum(-1).tolist()) + x.exp()

    y = region()(function)(leaf(SIDE, SIDE))
    with pytest.raises(remat.RematWarning, match="replay starts over"):
        y.sum().backward()


def test_region_all_of_whose_saved_tensors_are_born_inside_is_not_replayed():
    function = Calls(lambda x: keep("a", lambda: x.exp().tanh()))
    x = leaf(SIDE)
    y = region()(function)(x)
    y.sum().backward()
    assert (function.total, function.replays) == (1, 0)
    assert_same(torch.autograd.grad(x.exp().tanh().sum(), x)[0], x.grad)


# The forms of the call


def test_outside_of_a_region_it_is_a_plain_call():
    given = leaf(3)
    tree = {"a": (object(), None), "b": given}
    assert keep("a", lambda: tree) is tree
    assert remat.native_save_region("a", lambda: tree) is tree
    assert remat.op(lambda: tree, "a", policy=RECOMPUTE)() is tree
    y = keep("a", torch.sin, given)
    assert y.grad_fn.name() == "SinBackward0"
    assert y.grad_fn._saved_self is given
    for _ in range(2):  # names matter only within a region
        assert_same(torch.sin(given), keep("a", torch.sin, given))


def test_save_is_the_policy_of_native_region_unless_told():
    def function(x, policy):
        options = {} if policy is None else {"policy": policy}
        return remat.op(lambda h: h.sin().cos(), "a", **options)(x * 2).exp()

    x = leaf(3)
    for policy, expected in (
        (None, {"mul": 1, "exp": 1}),
        (SAVE, {"mul": 1, "exp": 1}),
        (RECOMPUTE, {"mul": 1, "sin": 1, "cos": 1, "exp": 1}),
    ):
        bound = functools.partial(function, policy=policy)
        assert_equal_gradients(bound, region()(bound), [x])
        assert replayed_ops(bound, region(), [x]) == expected, policy


@pytest.mark.parametrize(
    "tree",
    [
        lambda a, b: a,
        lambda a, b: (a,),
        lambda a, b: [a, [b, [a]]],
        lambda a, b: {"z": a, "a": {"m": b}},
        lambda a, b: collections.OrderedDict(z=b, a=a),
        lambda a, b: (None, a, None, 7, (), [], {}, b, "s", False, 1.5),
        lambda a, b: collections.deque([a, b]),
        lambda a, b: (a, a, a[:1], a.t()),
    ],
)
def test_output_tree_of_every_kind_is_given_back_in_replay(tree):
    def flat(out):
        if isinstance(out, torch.Tensor):
            return [out]
        values = (
            out.values() if isinstance(out, dict) else out if isinstance(out, (tuple, list, collections.deque)) else ()
        )
        return [y for item in values for y in flat(item)]

    kinds = []

    def function(x, w):
        out = keep("a", lambda: tree((x @ w).sin(), x.exp()))
        kinds.append(type(out))
        return [(y * y).exp() for y in flat(out)]

    inputs = leaf(3, 3), leaf(3, 3)
    assert_equal_gradients(function, region()(function), inputs)
    assert len(set(kinds)) == 1
    outputs = len(flat(tree(*inputs)))
    assert replayed_ops(function, region(), inputs) == {"mul": outputs, "exp": outputs}


def test_python_value_made_from_a_tensor_is_the_same_in_replay():
    seen = []

    def function(x, w):
        a, n, scale = keep("a", lambda: ((h := x @ w), int((h > 0).sum()), h.detach().max().item()))
        seen.append((n, scale))
        return (a.flatten()[:n] * scale).exp()

    inputs = leaf(3, 3), leaf(3, 3)
    region()(function)(*inputs).sum().backward()
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert_equal_gradients(function, region()(function), inputs)


def test_metadata_of_what_it_returns_is_true_in_replay():
    seen = []

    def function(x, w):
        outs = keep("a", lambda: ((x @ w).t(), (x @ w)[1:, ::2], (x > 0), x.sum().double(), (x @ w).detach()))
        seen.append([(y.shape, y.stride(), y.dtype, y.device, y.requires_grad, y.is_contiguous()) for y in outs])
        return outs[0].sin() * outs[3]

    inputs = leaf(4, 4), leaf(4, 4)
    region(early_stop=False)(function)(*inputs).sum().backward()
    assert len(seen) == 2
    assert seen[0] == seen[1]


# What surrounds it


def test_no_mode_is_on_the_stack_outside_of_native_regions():
    stacks = collections.defaultdict(list)

    def note(where):
        stacks[where].append(len(_get_current_dispatch_mode_stack()))

    def function(x):
        note("before")
        a = keep("a", lambda: (note("inside"), x.sin())[1])
        note("between")
        b = remat.op(lambda: (note("recomputed"), a.cos())[1], "b", policy=RECOMPUTE)()
        note("after")
        return b.exp()

    x = leaf(3)
    region(early_stop=False)(function)(x).sum().backward()
    assert stacks["before"] == stacks["between"] == stacks["recomputed"] == stacks["after"] == [0, 0]
    assert stacks["inside"] in ([1], [1, 1])


def test_an_outer_mode_sees_each_op_inside_once_in_forward():
    function = framed(python_values)
    inputs = leaf(SIDE, SIDE), leaf(SIDE, SIDE)
    with ComputeOps() as expected:
        function(*inputs)
    with ComputeOps() as actual:
        region()(function)(*inputs)
    assert actual.counts == expected.counts


def test_results_are_placeholders_while_a_native_region_is_replayed():
    seen = []

    def inside(x, w):
        product = x @ w
        result = product.sin()
        seen.append((remat.is_placeholder(product), remat.is_placeholder(result)))
        return result

    def function(x, w):
        return keep("a", inside, x, w).exp()

    inputs = leaf(3, 3), leaf(3, 3)
    assert_equal_gradients(function, region()(function), inputs)
    assert seen[-1] == (True, True)  # what is kept takes its place once the function has returned
    assert seen[0] == (False, False)


def test_result_that_is_changed_inside_is_no_result_of_its_first_op_in_replay():
    def inside(x, w):
        result = x @ w
        result.mul_(2)
        return result

    def function(x, w):
        return keep("a", inside, x, w).exp()

    assert_equal_gradients(function, region()(function), (leaf(3, 3), leaf(3, 3)))
