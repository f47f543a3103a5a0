"""Programs drawn at random with native regions, handle ops, regions and views; bit for bit as plain autograd.

`REMAT_EXAMPLES=5000 pytest tests/programs/test_native_programs.py` runs more programs, other ones each time.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

import torch_remat as remat
from tests.handle_ops import POLICIES, RECOMPUTE, SAVE, STYLES, Affine, Gather
from tests.helpers import LiveStorages, assert_same, collector_off, leaf, plain
from tests.native_programs import keep, region, replayed_ops
from tests.programs.test_handle_programs import (
    BACKWARDS,
    BINARY,
    IN_PLACE,
    ONE_TO_ONE,
    PICKS,
    SIDE,
    UNARY,
    VIEWS,
    Body,
    Program,
    Step,
    Value,
    exact_copy,
    gradients,
    refused_or,
)
from tests.programs.test_handle_programs import settings_for as common_settings
from tests.programs.test_policy_programs import drawn_policy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _without_collector():

    with LiveStorages():
        leaf(1).detach().sin()
    with collector_off():
        yield


READING = {
    "scaled": lambda t: t * (1 + t.detach().mean().tanh().item()),
    "sign": lambda t: t.sin() if t.detach().sum() > 0 else t.cos(),
    "rows": lambda t: torch.cat([t[: 1 + int(t.detach().argmax()) % SIDE], t])[-SIDE:],
    "mask": lambda t: torch.where(t > t.detach().mean(), t, t * t),
}
"""Ops that read data into Python, or that no graph shows."""
INSIDE = {
    "sort": lambda t: t.sort(-1).values,
    "max": lambda t: t.max(-1, keepdim=True).values * t,
    "filled": lambda t: torch.zeros(SIDE, SIDE).copy_(t).mul_(2).tanh(),
    "written": lambda t: (t * 1.5).index_fill_(0, torch.tensor([1]), 0.5).exp_(),
    "nonzero": lambda t: t + t[(t.detach() > 0).nonzero(as_tuple=True)].exp().sum(),
    "bernoulli": lambda t: t * torch.empty(SIDE, SIDE).bernoulli_(0.6),
}
"""Ops that are only drawn inside native regions."""


def settings_for(examples):
    """Return the settings of a property test; one failure is enough, since shrinking several takes minutes."""
    return settings(common_settings(examples), report_multiple_bugs=False)


@dataclass(frozen=True)
class Chosen:
    """What may be drawn: kinds of steps, with repetition as their weights."""

    kinds: tuple[str, ...]


EVERYTHING = Chosen(("op",) * 3 + ("unary", "binary", "view", "view", "reading") + ("native",) * 4 + ("region",) * 2)
IN_PLACE_TOO = Chosen(("unary", "binary", "view", "in_place", "in_place", "native", "native", "region"))


@st.composite
def bodies(draw, chosen, depth=2, native=False):
    """Draw a function; nothing nests deeper than `depth`."""
    kinds = [kind for kind in chosen.kinds if depth > 0 or kind not in ("native", "region")]
    kinds += ["inside"] * 2 * native
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        kind, picks = draw(st.sampled_from(kinds)), draw(PICKS)
        if kind == "op":
            kernel = draw(st.sampled_from([*ONE_TO_ONE, Affine, Gather]))
            steps.append(Step(kind, kernel, picks, draw(st.sampled_from(POLICIES)), draw(st.sampled_from(STYLES))))
        elif kind in ("region", "native"):
            policy = draw(st.sampled_from([SAVE, SAVE, SAVE, RECOMPUTE]))
            inner = draw(bodies(chosen, depth - 1, kind == "native"))
            steps.append(Step(kind, policy.name, picks, policy, inner=inner))
        else:
            table = {"unary": UNARY, "binary": BINARY, "view": VIEWS, "in_place": IN_PLACE, "reading": READING}
            steps.append(Step(kind, draw(st.sampled_from(list((table | {"inside": INSIDE})[kind]))), picks))
    return Body(tuple(steps), tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))))


def saves_outside_of_native(body):
    """Return whether a function has a saved handle op whose output a native op outside could not read."""
    return any(
        (step.kind == "op" and step.policy is SAVE)
        or (step.kind == "native" and step.policy is RECOMPUTE and saves_outside_of_native(step.inner))
        for step in body.steps
    )


def changes_in_place(body):
    """Return whether an op that is only drawn inside native regions changes a tensor in place."""
    return any(
        step.what in ("filled", "written", "bernoulli") or (step.inner and changes_in_place(step.inner))
        for step in body.steps
    )


class NativeProgram(Program):
    """Runs a drawn function, some steps of which are native regions; counts those."""

    natives = 0
    depth = 0

    def region(self, body, path, inputs):
        """Run a function as a region; what a native region around it saves, its own replay may run again."""
        depth, self.depth = self.depth, 0
        try:
            return super().region(body, path, inputs)
        finally:
            self.depth = depth

    def step(self, step, path, known, everything):
        readable = [value for value in known if value.readable]
        if step.kind == "native":
            return self.native(step, path, [known[::-1][pick % len(known)] for pick in step.picks])
        if step.kind in ("reading", "inside"):
            table = READING if step.kind == "reading" else INSIDE
            return [Value(table[step.what](readable[::-1][step.picks[0] % len(readable)].tensor), fresh=True)]
        return super().step(step, path, known, everything)

    def native(self, step, path, given):
        """Run a function as a native region."""
        inputs = [value.tensor for value in given]
        self.natives += 1
        saved = step.policy is SAVE
        self.calls[path] += 1
        self.depth += saved
        try:
            if self.wrap is plain:
                outputs = self.run(step.inner, path, inputs)
            elif saved:
                outputs = keep(path, lambda *tensors: self.run(step.inner, path, tensors), *inputs)
            else:
                outputs = remat.op(lambda *t: self.run(step.inner, path, t), path, policy=RECOMPUTE)(*inputs)
        finally:
            self.depth -= saved
        # What was made from the output of a saved op cannot be made again, should something read it after all.
        readable = saved and all(value.readable for value in given)
        readable = readable or (not saved and not saves_outside_of_native(step.inner))
        return [Value(tensor, readable) for tensor in outputs]

    def op(self, step, path, one, two, integers):
        outputs = super().op(step, path, one, two, integers)
        if path in self.saved:
            self.saved[path] = self.depth > 0 or step.policy is SAVE
        return outputs


def outcome(bodies, wrap, backwards):
    """Run regions one after another from one seed, then backward; return the program and the tensors to compare."""
    torch.manual_seed(11)
    program = NativeProgram(wrap)
    x, w = (torch.randn(SIDE, SIDE, requires_grad=True) for _ in range(2))
    values = [x, w]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of results that are read where no graph shows it
        for index, body in enumerate(bodies):
            values = [*program.region(body, f"r{index}", values[:2]), w]
        outputs = [y for y in values[:-1] if y.requires_grad]
        kept = [y.detach().clone() for y in [*values, torch.rand(2)]]
        if outputs:
            kept += gradients(outputs, [x, w], backwards)
    if wrap is not plain:
        program.check_runs()
    return program, [*kept, torch.rand(2)]


@settings_for(300)
@given(st.lists(bodies(EVERYTHING), min_size=1, max_size=2), BACKWARDS, st.booleans())
def test_drawn_program_is_equal_to_plain_autograd(bodies, backwards, early_stop):
    _, expected = outcome(bodies, plain, backwards)
    program, actual = outcome(bodies, remat.checkpoint(early_stop=early_stop), backwards)
    assert_same(expected, actual)
    assert program.trace.alive() == set()


@settings_for(100)
@given(st.lists(bodies(EVERYTHING), min_size=1, max_size=2), BACKWARDS, st.integers(0, 99), st.floats(0, 1))
def test_drawn_program_under_a_drawn_policy_is_equal_to_plain_autograd(bodies, backwards, seed, share):
    """A policy may save what an op inside then changes in place: that is an error."""
    _, expected = outcome(bodies, plain, backwards)
    run = functools.partial(outcome, bodies, lambda function: region(drawn_policy(seed, share))(function), backwards)
    actual = refused_or(remat.MutationError, run)
    if actual is None:
        assert any(map(changes_in_place, bodies))
    else:
        assert_same(expected, actual[1])


@settings_for(80)
@given(st.lists(bodies(EVERYTHING, depth=1), min_size=1, max_size=2), BACKWARDS)
def test_drawn_program_under_saved_tensor_hooks_is_equal_to_plain_autograd(bodies, backwards):
    _, expected = outcome(bodies, plain, backwards)
    with saved_tensors_hooks(exact_copy, lambda tensor: tensor):
        program, actual = outcome(bodies, remat.checkpoint(), backwards)
    assert_same(expected, actual)
    assert program.trace.alive() == set()


@settings_for(150)
@given(st.lists(bodies(IN_PLACE_TOO), min_size=1, max_size=2), BACKWARDS)
def test_drawn_program_with_in_place_ops_is_equal_or_refused(bodies, backwards):
    """Where plain autograd refuses, a region must too; it may refuse more."""
    actual = refused_or(RuntimeError, lambda: outcome(bodies, remat.checkpoint(), backwards))
    expected = refused_or(RuntimeError, lambda: outcome(bodies, plain, backwards))
    if expected is None:
        assert actual is None, "plain autograd refuses it"
    elif actual is not None:
        assert_same(expected[1], actual[1])


@settings_for(100)
@given(bodies(Chosen(("unary", "binary", "view", "reading")), depth=0, native=True))
def test_drawn_native_region_runs_nothing_again(body):
    def function(x, w):
        out = keep("native", lambda *tensors: NativeProgram(plain).run(body, "b", tensors), x * 2, w)
        # Of results without a gradient no graph shows who reads them: then the native region may run once more.
        return [y.sin().exp() for y in out if y.requires_grad]

    inputs = leaf(SIDE, SIDE), leaf(SIDE, SIDE)
    needing = len(function(*inputs))
    if needing:
        assert replayed_ops(function, remat.checkpoint(), inputs) == {"mul": 1, "sin": needing, "exp": needing}


def test_drawn_programs_have_native_regions():
    programs = []

    @settings_for(60)
    @given(bodies(EVERYTHING))
    def draw(body):
        programs.append(outcome([body], plain, "once")[0].natives)

    draw()
    assert sum(count > 0 for count in programs) > 20
