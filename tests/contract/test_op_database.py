"""Every op of torch's op database in a native region and under policies: bit for bit as plain autograd.

`REMAT_SAMPLES=5 pytest tests/contract/test_op_database.py` takes all ops, not some, and more samples of arguments for
each.
"""

from __future__ import annotations

import itertools
import os
import random

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

import torch_remat as remat
from tests.helpers import assert_same, plain, tensors_in
from tests.native_programs import ComputeOps, floating_leaves, keep, region

SAMPLES = int(os.environ.get("REMAT_SAMPLES", "1"))
ALL_OPS = [op for op in op_db if op.supports_autograd and torch.float32 in op.supported_dtypes("cpu")]
OPS = ALL_OPS[:: 3 if SAMPLES == 1 else 1]
IN_PLACE = [op for op in ALL_OPS if op.inplace_variant is not None][:: 2 if SAMPLES == 1 else 1]


def call(op, *args, **kwargs):
    return op(*args, **kwargs)


def native(op, *args, **kwargs):
    return keep("native", op, *args, **kwargs)


def drawn(seed):
    """Return a policy that saves a fixed half of all ops."""
    return lambda ctx, op, *args, **kwargs: random.Random(f"{seed}{op}").random() < 0.5


WAYS = {
    "native": (region(), native),
    "everything": (region(lambda ctx, op, *args, **kwargs: True), call),
    "nothing": (region(lambda ctx, op, *args, **kwargs: False), call),
    "one half": (region(drawn(0)), call),
    "other half": (region(drawn(1)), call),
}


def mapped(function, tree):
    """Apply a function to the tensors in nested lists and tuples."""
    if isinstance(tree, Tensor):
        return function(tree)
    return type(tree)(mapped(function, item) for item in tree) if isinstance(tree, (list, tuple)) else tree


def outcome(op, sample, wrap, way):
    """Run an op in a region, with an op before and two after it, and backward twice; return results and gradients."""
    leaves = []

    def leaf_of(tensor):
        tensor = tensor.detach().clone()
        leaves.append(tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex()))
        return tensor

    first, args = mapped(leaf_of, sample.input), mapped(leaf_of, list(sample.args))
    kwargs = {name: mapped(leaf_of, value) for name, value in sample.kwargs.items()}

    def function(*_):
        out = way(op, mapped(lambda t: t * 1 if t.requires_grad else t, first), *args, **kwargs)
        return [(y * 1.5).sin() for y in tensors_in(list(out) if isinstance(out, tuple) else [out]) if y.requires_grad]

    torch.manual_seed(1)
    outputs = wrap(function)(*leaves)
    if not outputs:
        return None
    loss = sum((y.abs() if y.is_complex() else y).sum() for y in outputs)
    gradients = []
    for retain in (True, False):
        torch.manual_seed(77)
        gradients += torch.autograd.grad(loss, floating_leaves(leaves), allow_unused=True, retain_graph=retain)
    return [y.detach() for y in outputs] + [torch.zeros(()) if g is None else g.detach() for g in gradients]


def references(op, database):
    """Yield samples of arguments with the outcome of plain autograd, where that is the same each time."""
    try:
        samples = list(itertools.islice(database.sample_inputs("cpu", torch.float32, requires_grad=True), 40))
    except (ImportError, ModuleNotFoundError):
        return
    random.Random(0).shuffle(samples)
    found = 0
    for sample in samples:
        try:
            expected, again = outcome(op, sample, plain, call), outcome(op, sample, plain, call)
            assert_same(expected, again)
        except (RuntimeError, NotImplementedError, TypeError, AssertionError):
            continue  # not for these arguments, or what it leaves uninitialized differs
        if expected is not None:
            yield sample, expected
            found += 1
        if found == SAMPLES:
            return


def check(op, database):
    """Compare each way with plain autograd; a policy may save what the op then changes in place, which is refused.

    Returns whether there was something to compare: plain autograd may have no gradient, or another one each time.
    """
    compared = False
    for sample, expected in references(op, database):
        compared = True
        for name, (wrap, way) in WAYS.items():
            try:
                actual = outcome(op, sample, wrap, way)
            except remat.MutationError:
                assert name in ("everything", "one half", "other half"), (database.formatted_name, name)
                continue
            assert_same(expected, actual, f"{database.formatted_name}, {name}")
    return compared


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(8))
def test_op_is_equal_to_plain_autograd(part):
    ops = OPS[part::8]
    assert sum(check(database.op, database) for database in ops) > 0.8 * len(ops)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(4))
def test_function_that_a_policy_lists_is_equal_to_plain_autograd(part):
    """All but lambdas around several functions, and what changes its arguments: these are refused by name."""
    functions = [(database.op, database) for database in ALL_OPS[part::4]]
    functions += [(database.method_variant, database) for database in ALL_OPS[part::12] if database.method_variant]
    compared = spared = 0
    for function, database in functions:
        try:
            wrap = region([function])
        except remat.PolicyError:
            continue
        for sample, expected in references(function, database):
            compared += 1
            assert_same(expected, outcome(function, sample, wrap, call), database.formatted_name)
            with ComputeOps() as kept:
                outcome(function, sample, wrap, call)
            with ComputeOps() as recomputed:
                outcome(function, sample, region(), call)
            spared += sum(kept.counts.values()) < sum(recomputed.counts.values())
    assert compared > 0.6 * len(functions)
    assert spared > 0.5 * compared  # the others are views, or run till what they save


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(4))
def test_in_place_op_is_equal_to_plain_autograd(part):
    ops = IN_PLACE[part::4]
    assert sum(check(database.inplace_variant, database) for database in ops) > 0.5 * len(ops)
