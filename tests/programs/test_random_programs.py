"""Programs drawn at random: regions, nesting, in-place ops, views, dropout; equal to plain autograd bit for bit.

Where plain autograd refuses a program (a saved tensor was changed in place), the checkpointed program must raise too.
It may raise where plain autograd does not only if a region's input was changed in place before its backward.
"""

from __future__ import annotations

import random
import re

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.helpers import assert_same, checkpointed, plain

pytestmark = pytest.mark.slow

SIZE = 4
UNARY = [torch.sin, torch.exp, torch.tanh, torch.sigmoid, torch.cos, F.relu, F.gelu, torch.neg, torch.t]
UNARY += [lambda t: t.softmax(-1), lambda t: t * 2, lambda t: t + 1, lambda t: F.layer_norm(t, (SIZE,)), torch.square]
UNARY += [lambda t: F.dropout(t, 0.3), lambda t: t * torch.rand(SIZE, SIZE)]
UNARY += [lambda t: t.detach(), lambda t: t[1:].sum(0).expand(SIZE, SIZE), lambda t: t.clamp(-1, 1)]
RRELU = [lambda t: F.rrelu(t, training=True)] * 3  # only where there is no region of torch's, which gets it wrong
BINARY = [torch.add, torch.mul, torch.sub, torch.matmul, torch.maximum, lambda s, t: torch.where(s > 0, s, t)]
IN_PLACE = [lambda t: t.add_(1), lambda t: t.mul_(0.5), torch.sin_, torch.relu_, lambda t: t[0].mul_(2)]
IN_PLACE += [lambda t: t.view(-1)[::3].zero_(), lambda t: t.t().sub_(1)]


def draw_body(rng, weights, depth, in_place):
    """Draw the steps of one function; the steps are data, so that the function does the same each time it runs."""
    steps = []
    for _ in range(rng.randint(3, 8)):
        kind = rng.choices(["unary", "binary", "weight", "in_place", "region"], [5, 3, 3, in_place, 2 * (depth > 0)])[0]
        pick, other = rng.random(), rng.random()
        if kind == "region":
            use = "ours" if in_place else rng.choices(["ours", "torch"], [4, 1])[0]  # torch's misses changed tensors
            steps.append((kind, use, pick, other, draw_body(rng, weights, depth - 1, in_place)))
        else:
            table = {
                "unary": UNARY + RRELU * bool(in_place),
                "binary": BINARY,
                "weight": weights,
                "in_place": IN_PLACE,
            }[kind]
            steps.append((kind, rng.choice(table), pick, other, None))
    return steps, [rng.random() for _ in range(rng.randint(1, 3))]


def run_body(body, wrap, inputs, given):
    """Run drawn steps over the inputs; return the drawn outputs, none of which is an input.

    The inputs of inner regions go to the list `given`, if there is one, each with its version.
    """
    steps, chosen = body
    values = list(inputs)
    own = [values[0] * 1.5]
    for kind, what, pick, other, inner in steps:
        known = values + own
        one, two = known[int(pick * len(known))], known[int(other * len(known))]
        if kind == "unary":
            own.append(what(one))
        elif kind == "binary":
            own.append(what(one, two))
        elif kind == "weight":
            own.append((one @ what).tanh() if pick < 0.5 else one * what)
        elif kind == "in_place":
            target = own[int(pick * len(own))]
            if not target.is_contiguous() or target.data_ptr() in {value.data_ptr() for value in values}:
                own.append(target := target.clone(memory_format=torch.contiguous_format))
            what(target)
        elif what == "torch" and wrap is not plain:
            own += torch_checkpoint(lambda *i, b=inner, g=given: run_body(b, wrap, i, g), one, two, use_reentrant=False)
        else:
            if given is not None:
                given += [(one, one._version), (two, two._version)]
            own += wrap(lambda *i, b=inner, g=given: run_body(b, wrap, i, g))(one, two)
    return tuple(own[int(share * len(own))] * 1 for share in chosen)


def outcome(seed, wrap, in_place, given=None):
    """Run the program of a seed; return its outputs and gradients, or the error if autograd refuses it."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    weights = [torch.randn(SIZE, SIZE, requires_grad=True) for _ in range(2)]
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    bodies = [draw_body(rng, weights, 2, in_place) for _ in range(rng.randint(1, 3))]
    backwards = rng.choice(["one", "kept", "two orders", "one by one"])
    try:
        values = (x,)
        for body in bodies:
            values = wrap(lambda *i, b=body: run_body(b, wrap, i, given))(*values[:2])
        values = [y for y in values if y.requires_grad]
        if not values:
            return []
        loss = sum(y.square().mean() for y in values)
        leaves = [x, *weights]
        if backwards == "kept":
            first = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
            results = [first, torch.autograd.grad(loss, leaves, allow_unused=True)]
        elif backwards == "two orders":
            first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
            scalar = sum(g.square().sum() for g in first if g is not None and g.requires_grad)
            second = torch.autograd.grad(scalar + loss, leaves, allow_unused=True)
            results = [first, second]
        elif backwards == "one by one":
            results = [
                torch.autograd.grad(y.sum(), leaves, retain_graph=y is not values[-1], allow_unused=True)
                for y in values
            ]
        else:
            loss.backward()
            results = [leaf.grad for leaf in leaves]
    except RuntimeError as error:
        if not re.search("in[- ]?place", str(error)):
            raise
        return error
    flat = [g for result in results for g in (result if isinstance(result, tuple) else [result])]
    return [*values, *(torch.zeros(()) if g is None else g for g in flat)]


SEEDS = range(150)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_program_is_equal(seed):
    expected = outcome(seed, plain, in_place=0)
    assert isinstance(expected, list)
    assert_same(expected, outcome(seed, checkpointed, in_place=0))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_program_with_in_place_ops_is_equal_or_refused_as_by_plain_autograd(seed):
    given = []
    expected, actual = outcome(seed, plain, in_place=3, given=given), outcome(seed, checkpointed, in_place=3)
    if isinstance(expected, RuntimeError):
        assert isinstance(actual, remat.MutationError)
    elif isinstance(actual, RuntimeError):
        assert isinstance(actual, remat.MutationError)
        assert any(tensor._version != version for tensor, version in given), str(actual)
    else:
        assert_same(expected, actual)


def test_drawn_programs_are_of_both_kinds():
    refused = [isinstance(outcome(seed, plain, in_place=3), RuntimeError) for seed in SEEDS]
    assert 10 < sum(refused) < len(refused) - 10
    long = [len(outcome(seed, plain, in_place=0)) for seed in SEEDS]
    assert sum(length > 3 for length in long) > len(long) / 2
