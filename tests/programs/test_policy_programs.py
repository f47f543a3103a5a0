"""Programs and op-level policies drawn at random: bit for bit as plain autograd, and never worse than SAC."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
import torch

import torch_remat as remat
from tests.helpers import assert_same, plain, tensors_in
from tests.native_programs import keep, kept, region, replayed_ops, sac
from tests.programs.test_random_programs import BINARY, IN_PLACE, SIZE, UNARY

pytestmark = pytest.mark.slow

INSIDE = [lambda t: t.sort(-1)[0], lambda t: t.max(-1, keepdim=True)[0] * t, lambda t: t * torch.rand_like(t)]
INSIDE += [lambda t: t.unbind(0)[1].expand(SIZE, SIZE), lambda t: torch.cat(t.chunk(2)), lambda t: t.cumsum(0)]
INSIDE += [
    lambda t: t[t.detach() > 0].sum() + t,
    lambda t: t * t.detach().mean().item(),
    lambda t: t.index_select(0, ROWS),
]
ROWS = torch.tensor([1, 1, 3, 0])
DETERMINISTIC = [*UNARY[:14], *UNARY[16:], *INSIDE[:2], *INSIDE[3:]]


def drawn_policy(seed, share):
    """Return a policy that saves this share of the calls, told by op and count; the same calls each time."""
    counts = Counter()

    def policy(ctx, op, *args, **kwargs):
        if ctx.is_recompute or op._schema.is_mutable or op is torch.ops.aten.empty_like.default:
            return False  # what is saved and then changed in place, as the mask of a dropout, is an error
        if op.overloadpacket.__name__ in ("lt", "le", "gt", "ge"):
            return False  # an inner region's policy may see them mirrored in replay: see NOTE [ Loose ops ]
        counts[op] += 1
        return random.Random(f"{seed} {op} {counts[op]}").random() < share

    return policy


def draw_body(rng, weights, depth, in_place, unary):
    """Draw the steps of one function."""
    steps = []
    for _ in range(rng.randint(3, 9)):
        weighted = {
            "unary": 5,
            "binary": 3,
            "weight": 3,
            "in_place": in_place,
            "region": 2 * (depth > 0),
            "native": depth > 0,
        }
        kind = rng.choices(list(weighted), list(weighted.values()))[0]
        inner = draw_body(rng, weights, depth - 1, in_place, unary) if kind in ("region", "native") else None
        table = {"unary": unary, "binary": BINARY, "weight": weights, "in_place": IN_PLACE}.get(kind, [None])
        steps.append((kind, rng.choice(table), rng.random(), rng.random(), inner, rng.random()))
    return steps, [rng.random() for _ in range(rng.randint(1, 3))]


def run_body(body, wrap, inputs, seed, path="r"):
    """Run drawn steps over the inputs; return the drawn values, none of which is an input."""
    steps, chosen = body
    values = list(inputs)
    own = [values[0] * 1.5]
    fresh = {id(own[0])}  # what shares memory with nothing else, and may be changed in place
    for index, (kind, what, pick, other, inner, share) in enumerate(steps):
        known = values + own
        one, two = known[int(pick * len(known))], known[int(other * len(known))]
        name = f"{path}.{index}"
        if kind == "unary":
            own.append(what(one))
        elif kind == "binary":
            own.append(what(one, two))
            fresh.add(id(own[-1]))
        elif kind == "weight":
            own.append((one @ what).tanh() if pick < 0.5 else one * what)
        elif kind == "in_place":
            target = own[int(pick * len(own))]
            if id(target) not in fresh or not target.is_contiguous():
                own.append(target := target.clone(memory_format=torch.contiguous_format))
            what(target)
        elif kind == "native" and wrap is not plain:
            own += keep(name, lambda *i, b=inner, n=name: run_body(b, wrap, i, seed, n), one, two)
        else:
            around = wrap(drawn_policy(f"{seed}{name}", share)) if kind == "region" and wrap is not plain else plain
            own += around(lambda *i, b=inner, n=name: run_body(b, wrap, i, seed, n))(one, two)
    return tuple(own[int(share * len(own))] * 1 for share in chosen)


def outcome(seed, wrap, in_place=0, unary=(*UNARY, *INSIDE)):
    """Run the program of a seed; return its outputs and gradients, or the error if it is refused."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    weights = [torch.randn(SIZE, SIZE, requires_grad=True) for _ in range(2)]
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    bodies = [draw_body(rng, weights, 2, in_place, unary) for _ in range(rng.randint(1, 2))]
    backwards, share = rng.choice(["one", "kept", "two orders", "one by one"]), rng.random()
    try:
        values = (x,)
        for index, body in enumerate(bodies):
            around = plain if wrap is plain else wrap(drawn_policy(f"{seed}{index}", share))
            values = around(lambda *i, b=body: run_body(b, wrap, i, seed))(*values[:2])
        values = [y for y in values if y.requires_grad]
        if not values:
            return []
        loss = sum(y.square().mean() for y in values)
        leaves = [x, *weights]
        if backwards == "kept":
            results = [
                torch.autograd.grad(loss, leaves, retain_graph=keep, allow_unused=True) for keep in (True, False)
            ]
        elif backwards == "two orders":
            first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
            scalar = sum(g.square().sum() for g in first if g is not None and g.requires_grad)
            results = [first, torch.autograd.grad(scalar + loss, leaves, allow_unused=True)]
        elif backwards == "one by one":
            results = [
                torch.autograd.grad(y.sum(), leaves, retain_graph=y is not values[-1], allow_unused=True)
                for y in values
            ]
        else:
            results = [torch.autograd.grad(loss, leaves, allow_unused=True)]
    except RuntimeError as error:
        if not re.search("in[- ]?place", str(error)):
            raise
        return error
    gradients = [torch.zeros(()) if g is None else g.detach() for result in results for g in result]
    return [*(y.detach() for y in values), *gradients, torch.rand(2)]


SEEDS = range(120)


@pytest.mark.filterwarnings("ignore::torch_remat.errors.RematWarning")
@pytest.mark.parametrize("seed", SEEDS)
def test_random_program_is_equal(seed):
    expected = outcome(seed, plain)
    assert isinstance(expected, list)
    actual = outcome(seed, region)
    if isinstance(actual, Exception):
        raise actual
    assert_same(expected, actual)


@pytest.mark.filterwarnings("ignore::torch_remat.errors.RematWarning")
@pytest.mark.parametrize("seed", SEEDS)
def test_random_program_with_in_place_ops_is_equal_or_refused(seed):
    """Where plain autograd refuses a program, a region must too; it may refuse more: a saved result was changed."""
    expected, actual = outcome(seed, plain, in_place=3), outcome(seed, region, in_place=3)
    if isinstance(expected, RuntimeError):
        assert isinstance(actual, RuntimeError)
    elif isinstance(actual, RuntimeError):
        assert isinstance(actual, remat.MutationError)
    else:
        assert_same(expected, actual)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_program_keeps_and_runs_no_more_than_sac(seed):
    rng = random.Random(seed)
    weights = [torch.randn(SIZE, SIZE, requires_grad=True) for _ in range(2)]
    body, share = draw_body(rng, weights, 0, 0, DETERMINISTIC), rng.random()
    inputs = [torch.randn(SIZE, SIZE, requires_grad=True) for _ in range(2)]

    def function(*inputs):
        return run_body(body, plain, inputs, seed)

    if not any(y.requires_grad for y in tensors_in(function(*inputs))):
        return
    wraps = [lambda f, kind=kind: lambda *i: kind(drawn_policy(seed, share))(f)(*i) for kind in (region, sac)]
    ours, peer = (kept(wrap(function), inputs).bytes for wrap in wraps)
    assert ours <= peer
    ours, peer = (replayed_ops(function, wrap, inputs, weights) for wrap in wraps)
    assert not Counter(ours) - Counter(peer), (ours, peer)


def test_drawn_programs_are_of_both_kinds():
    refused = [isinstance(outcome(seed, plain, in_place=3), RuntimeError) for seed in SEEDS]
    assert 5 < sum(refused) < len(refused) - 5
    long = [len(outcome(seed, plain)) for seed in SEEDS]
    assert sum(length > 4 for length in long) > len(long) / 2
