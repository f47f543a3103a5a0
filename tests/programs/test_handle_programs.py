"""Programs drawn at random: handle ops, native ops, views, dropout, nested regions; bit for bit as plain autograd.

`REMAT_EXAMPLES=5000 pytest tests/programs/test_handle_programs.py` runs more programs, other ones each time.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import torch_remat as remat
from tests.handle_ops import (
    POLICIES,
    RECOMPUTE,
    SAME_KIND,
    SAVE,
    STYLES,
    Affine,
    Gated,
    Gather,
    Half,
    SinCos,
    Sort,
    Trace,
    as_tuple,
    call,
    policy_ids,
)
from tests.helpers import LiveStorages, assert_same, collector_off, leaf, plain

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _without_collector():
    with LiveStorages():
        leaf(1).detach().sin()  # what torch loads when it first needs it leaves cycles
    with collector_off():
        yield


SIDE = 3
EXAMPLES = int(os.environ.get("REMAT_EXAMPLES", "0"))
ONE_TO_ONE = [*SAME_KIND, SinCos, Sort, Gated, Half]
ALIASING = {"Identity", "Transpose"}
UNARY = {
    "sin": torch.sin,
    "exp": lambda t: (-t * t).exp(),
    "softmax": lambda t: t.softmax(-1),
    "double": lambda t: t * 2,
    "norm": lambda t: F.layer_norm(t, (SIDE,)),
    "dropout": lambda t: F.dropout(t, 0.3),
    "noise": lambda t: t * torch.rand(SIDE, SIDE),
    "gelu": F.gelu,
}
BINARY = {"add": torch.add, "mul": torch.mul, "matmul": lambda s, t: (s @ t).tanh()}
VIEWS = {
    "t": torch.t,
    "row": lambda t: t[1].expand(SIDE, SIDE),
    "column": lambda t: t[:, 2:].expand(SIDE, SIDE),
    "squeezed": lambda t: t.unsqueeze(0).transpose(0, 1).squeeze(1),
    "chunk": lambda t: t.split(1)[2].expand(SIDE, SIDE),
    "detach": lambda t: t.detach(),
    "diagonal": lambda t: t.diagonal().unsqueeze(0).expand(SIDE, SIDE),
}
IN_PLACE = {
    "add_": lambda t: t.add_(1),
    "mul_": lambda t: t.mul_(0.5),
    "sin_": torch.sin_,
    "view": lambda t: t[0, ::2].mul_(2),
}


def settings_for(examples):
    """Return the settings of a property test: always the same programs, unless more are asked for."""
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@dataclass(frozen=True)
class Step:
    """One step of a drawn function; `picks` choose among the values that are there."""

    kind: str
    what: object
    picks: tuple[int, int]
    policy: object = None
    style: str = "plain"
    inner: object = None

    def __repr__(self):
        policy = f" {self.style} {policy_ids(self.policy)} " if self.kind == "op" else ""
        return f"{self.kind}:{self.what}{policy}{self.picks}{self.inner or ''}"

    def _repr_pretty_(self, printer, cycle):
        printer.text(repr(self))


@dataclass(frozen=True)
class Body:
    """A drawn function: its steps, and which values it returns."""

    steps: tuple[Step, ...]
    returns: tuple[int, ...]

    def __repr__(self):
        return f"{list(self.steps)} -> {self.returns}"

    def _repr_pretty_(self, printer, cycle):
        printer.text(repr(self))


PICKS = st.tuples(st.integers(0, 7), st.integers(0, 7))


@st.composite
def bodies(draw, depth=2, misuse=False, in_place=False):
    """Draw a function."""
    kinds = ["op"] * 5 + ["unary", "binary", "view", "view"] + ["region"] * (depth > 0) + ["in_place"] * 2 * in_place
    kinds += ["misuse"] * 4 * misuse
    steps = []
    for _ in range(draw(st.integers(1, 8))):
        kind, picks = draw(st.sampled_from(kinds)), draw(PICKS)
        if kind == "op":
            kernel = draw(st.sampled_from([*ONE_TO_ONE, Affine, Affine, Gather]))
            steps.append(Step(kind, kernel, picks, draw(st.sampled_from(POLICIES)), draw(st.sampled_from(STYLES))))
        elif kind == "region":
            steps.append(Step(kind, "", picks, inner=draw(bodies(depth - 1, misuse, in_place))))
        else:
            table = {"unary": UNARY, "misuse": UNARY, "binary": BINARY, "view": VIEWS, "in_place": IN_PLACE}[kind]
            steps.append(Step(kind, draw(st.sampled_from(list(table))), picks))
    return Body(tuple(steps), tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))))


@dataclass(frozen=True)
class Value:
    """A tensor of a program.

    Attributes:
        tensor: The tensor.
        readable: Whether replay has its data, so that native ops may read it.
        fresh: Whether it shares memory with nothing else, so that it may be changed in place.
    """

    tensor: torch.Tensor
    readable: bool = True
    fresh: bool = False


class Program:
    """Runs a drawn function, plain or in regions, and counts body runs and region calls."""

    def __init__(self, wrap, style=None):
        self.style = "plain" if wrap is plain and style is None else style
        self.wrap = wrap
        self.trace = Trace()
        self.calls = Counter()
        self.saved = {}

    def region(self, body, path, inputs):
        """Run a function as a region."""
        self.calls[path] += 1
        return self.wrap(lambda *tensors: self.run(body, path, tensors))(*inputs)

    def run(self, body, path, inputs):
        """Run the steps of a function; return the chosen values, none of which is an input."""
        values = [Value(tensor) for tensor in inputs]
        own = [Value(inputs[0] * 1.5, fresh=True)]
        for index, step in enumerate(body.steps):
            known = [value for value in values + own if value.tensor.is_floating_point()]
            own += self.step(step, f"{path}.{index}", known, values + own)
        returned = [own[pick % len(own)].tensor for pick in body.returns]
        return tuple(tensor if tensor.is_floating_point() else tensor.view(SIDE, SIDE) for tensor in returned)

    def step(self, step, path, known, everything):
        """Run one step; return what is new."""
        one, two = (known[::-1][pick % len(known)] for pick in step.picks)
        readable = [value for value in known if value.readable]
        if step.kind == "op":
            return self.op(step, path, one, two, [v for v in everything if not v.tensor.is_floating_point()])
        if step.kind == "region":
            outputs = self.region(step.inner, path, (one.tensor, two.tensor))
            return [Value(tensor) for tensor in outputs]
        if step.kind == "view":
            return [Value(VIEWS[step.what](one.tensor), one.readable)]
        if step.kind == "misuse":
            skipped = [value for value in known if not value.readable] or [one]
            return [Value(UNARY[step.what](skipped[step.picks[0] % len(skipped)].tensor), fresh=True)]
        if step.kind == "in_place":
            targets = [value for value in readable if value.fresh]
            if targets:
                IN_PLACE[step.what](targets[step.picks[0] % len(targets)].tensor)
            return []
        one, two = (readable[::-1][pick % len(readable)] for pick in step.picks)
        if step.kind == "unary":
            return [Value(UNARY[step.what](one.tensor), fresh=True)]
        return [Value(BINARY[step.what](one.tensor, two.tensor), fresh=True)]

    def op(self, step, path, one, two, integers):
        """Run a handle op; without integers to take, there is no Gather."""
        if step.what is Gather and not integers:
            return []
        second = integers[step.picks[1] % len(integers)] if step.what is Gather else two
        inputs = [one.tensor, second.tensor][: step.what.arity]
        self.saved[path] = step.policy is SAVE
        outputs = as_tuple(call(self.style or step.style, step.what, self.trace, path, step.policy, *inputs))
        readable = step.policy is RECOMPUTE
        fresh = step.what.name not in ALIASING and len(outputs) == 1
        return [Value(tensor, readable, fresh) for tensor in outputs]

    def check_runs(self):
        """Assert that each SAVE body ran at most once for each time that its region was called, and not in replay."""
        for path, saved in self.saved.items():
            region = path.rpartition(".")[0]
            if saved:
                assert 1 <= self.trace.runs[path] <= self.calls[region], path


def outcome(bodies, wrap, backwards, style=None):
    """Run regions one after another from one seed, then backward; return the program and the tensors to compare."""
    torch.manual_seed(11)
    program = Program(wrap, style)
    x, w = (torch.randn(SIDE, SIDE, requires_grad=True) for _ in range(2))
    values = [x, w]
    for index, body in enumerate(bodies):
        values = [*program.region(body, f"r{index}", values[:2]), w]
    outputs = [y for y in values[:-1] if y.requires_grad]
    results = [*values, torch.rand(2)]
    kept = [y.detach().clone() for y in results]
    if outputs:
        kept += gradients(outputs, [x, w], backwards)
    if wrap is not plain:
        program.check_runs()
    return program, [*kept, torch.rand(2)]


def gradients(outputs, leaves, backwards):
    """Walk the graph in one of several ways; return all gradients, zero for none."""
    loss = sum(y.sin().sum() for y in outputs)
    results = []

    def grad(of, wanted=leaves, **options):
        results.append(list(torch.autograd.grad(of, wanted, allow_unused=True, **options)))
        return results[-1]

    if backwards == "once":
        grad(loss)
    elif backwards == "kept":
        for keep in (True, True, False):
            grad(loss, retain_graph=keep)
    elif backwards == "one by one":
        for index, y in enumerate(outputs, 1):
            grad(y.sum(), retain_graph=index < len(outputs))
    elif backwards == "subset":
        grad(loss, leaves[1:], retain_graph=True)
        grad(outputs[-1].sum(), leaves[:1])
    else:
        first = grad(loss, create_graph=True)
        scalar = sum(g.sin().sum() for g in first if g is not None and g.requires_grad)
        grad(scalar + loss)
    return [torch.zeros(()) if g is None else g.detach() for result in results for g in result]


BACKWARDS = st.sampled_from(["once", "kept", "one by one", "subset", "two orders"])


def refused_or(error_type, run):
    """Return what the run returns, or None if it raises this error, which must tell of an in-place change."""
    try:
        return run()
    except error_type as error:
        if not re.search("in[- ]?place", str(error)):
            raise
        return None


@settings_for(400)
@given(st.lists(bodies(), min_size=1, max_size=2), BACKWARDS, st.booleans())
def test_drawn_program_is_equal_to_plain_autograd(bodies, backwards, early_stop):
    _, expected = outcome(bodies, plain, backwards)
    program, actual = outcome(bodies, remat.checkpoint(early_stop=early_stop), backwards)
    assert_same(expected, actual)
    assert program.trace.alive() == set()


def exact_copy(tensor):
    """Return a copy with the same strides, which kernels may tell apart by the last bit."""
    storage = tensor.untyped_storage().clone()
    geometry = (tensor.storage_offset(), tensor.shape, tensor.stride())
    return torch.empty(0, dtype=tensor.dtype).set_(storage, *geometry)


@settings_for(150)
@given(st.lists(bodies(depth=1), min_size=1, max_size=2), BACKWARDS)
def test_drawn_program_under_saved_tensor_hooks_is_equal_to_plain_autograd(bodies, backwards):
    _, expected = outcome(bodies, plain, backwards)
    with saved_tensors_hooks(exact_copy, lambda tensor: tensor):
        program, actual = outcome(bodies, remat.checkpoint(), backwards)
    assert_same(expected, actual)
    assert program.trace.alive() == set()


@settings_for(100)
@given(bodies(depth=1, misuse=True), BACKWARDS, st.booleans())
def test_drawn_program_that_reads_skipped_outputs_raises_or_is_equal(body, backwards, early_stop):
    _, expected = outcome([body], plain, backwards)
    try:
        _, actual = outcome([body], remat.checkpoint(early_stop=early_stop), backwards)
    except remat.PlaceholderError:
        return
    assert_same(expected, actual)


@settings_for(100)
@given(st.lists(bodies(depth=1, in_place=True), min_size=1, max_size=2), BACKWARDS)
def test_drawn_program_with_in_place_ops_is_equal_or_refused(bodies, backwards):
    """Where plain autograd refuses, a region must too, or give what ops that save copies give; it may refuse more."""
    actual = refused_or(RuntimeError, lambda: outcome(bodies, remat.checkpoint(), backwards))
    if actual is None:
        return
    expected = refused_or(RuntimeError, lambda: outcome(bodies, plain, backwards))
    if expected is None:
        if backwards == "two orders":  # copies take no part in the graph
            return
        expected = refused_or(RuntimeError, lambda: outcome(bodies, plain, backwards, "copies"))
    assert expected is not None, "plain autograd refuses it"
    assert_same(expected[1], actual[1])


def test_misuse_is_an_error_where_replay_reaches_it():
    """Not all of the drawn programs above may be the harmless ones."""
    read = Step("misuse", "sin", (0, 0))
    for kernel in (Affine, SAME_KIND[0]):
        body = Body((Step("op", kernel, (0, 0), SAVE, "handle"), read), (1, 2))
        with pytest.raises(remat.PlaceholderError):
            outcome([body], remat.checkpoint(), "once")
