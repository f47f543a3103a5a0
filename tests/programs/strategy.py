"""Draws programs: what is simple comes first in each choice, so that a failure shrinks to it."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.helpers import OLDEST
from tests.programs.priced import PRICED
from tests.programs.program import OFFLOAD, RECOMPUTE, SAVE, Body, Fault, Program, Step, steps_of
from tests.programs.running import BINARY, FUNCTIONS, IN_PLACE, LATER, READ, STATE, TREES, UNARY, USUAL, VIEW

TABLES = {"unary": UNARY, "binary": BINARY, "view": VIEW, "read": READ, "in_place": IN_PLACE, "state": STATE}
NAMES = {kind: st.sampled_from(list(table)) for kind, table in TABLES.items()}
CALLS = {
    "native": ("native", "native mm"),
    "op": ("op", "op mm"),
    "handle": ("seed", "named seed", "op Function"),
}
PICK = st.sampled_from((0, 0, 1, 2, 3, 4, 5, 6))
MAYBE_POLICY = st.sampled_from((None, None, *USUAL))
BY_PRICE = st.sampled_from((None, *PRICED, "products by function"))
DECISIONS = st.sampled_from((SAVE, SAVE, RECOMPUTE, OFFLOAD))
BACKWARDS = st.sampled_from(("once", "once", "kept", "two orders", "one by one", "subset", "thread", "dropped"))
RESULTS = st.sampled_from((*("tuple",) * 3, *TREES))
ODD = ("", "", "", "hooks", "autocast", "inputs", "offload", "budget", "fault", "fault", "later", "later", "later")
PHASES = st.sampled_from(("forward", "replay", "backward"))
FAULTS = st.tuples(PHASES, st.integers(0, 20)).map(lambda drawn: Fault(*drawn))


class Kinds:
    """Which kinds of steps one program has.

    Attributes:
        plain: Kinds of steps without a body, with repetition as their weights.
        nested: Kinds of steps with a body, likewise.
        calls: Kinds of calls.
        priced: Whether policies go by price.
        policies: Draws policies of regions.
    """

    def __init__(self, writes: bool, state: bool, calls: tuple[str, ...], torch: bool, priced: bool = False) -> None:
        self.plain = ("unary",) * 4 + ("binary", "binary", "view", "read") + ("in_place",) * 3 * writes
        self.plain += ("state",) * 3 * state
        self.nested = ("call",) * 4 * bool(calls) + ("region",) + ("torch",) * torch
        self.calls, self.priced = calls, priced
        self.policies = BY_PRICE if priced else MAYBE_POLICY

    def without_writes(self) -> Kinds:
        """Return the kinds inside of a Function, whose backward runs its body again."""
        return Kinds(False, False, self.calls, "torch" in self.nested, self.priced)


@st.composite
def kinds(draw: st.DrawFn, priced: bool | None = None) -> Kinds:
    """Draw what a program may have; few kinds at once, so that each meets the others often."""
    if priced is None:
        priced = draw(st.sampled_from((False, False, True)))
    calls = draw(st.sampled_from(((), ("native",), ("op",), ("handle",), ("native", "op"), tuple(CALLS))))
    writes, state = draw(st.booleans()), draw(st.booleans())
    torch = draw(st.booleans()) and not writes and not state  # torch's misses what a region of it writes
    return Kinds(writes, state, tuple(name for family in calls for name in CALLS[family]), torch, priced)


def bodies(allowed: Kinds, depth: int = 2) -> st.SearchStrategy[Body]:
    """Return the strategy of functions whose calls and regions nest at most `depth` deep."""
    step = st.sampled_from(allowed.plain).flatmap(
        lambda kind: st.tuples(NAMES[kind], PICK, PICK).map(lambda drawn: Step(kind, *drawn))
    )
    if depth > 0:
        inner = st.sampled_from(allowed.nested).flatmap(lambda kind: nested(allowed, kind, depth))
        step = st.one_of(step, step, inner)
    steps = st.lists(step, min_size=1, max_size=9 if depth == 2 else 4).map(tuple)
    returns = st.lists(PICK, min_size=1, max_size=2).map(tuple)
    return st.tuples(steps, returns, RESULTS).map(lambda drawn: Body(*drawn))


def nested(allowed: Kinds, kind: str, depth: int) -> st.SearchStrategy[Step]:
    """Return the strategy of calls or regions."""
    if kind != "call":
        policy = allowed.policies if kind == "region" else st.none()
        drawn = st.tuples(PICK, PICK, bodies(allowed, depth - 1), policy)
        return drawn.map(lambda drawn: Step(kind, "", *drawn))

    def of_call(what: str) -> st.SearchStrategy[Step]:
        if what.endswith("mm"):
            return st.tuples(PICK, PICK, st.none(), DECISIONS).map(lambda drawn: Step("call", what, *drawn))
        inner = allowed.without_writes() if what in FUNCTIONS else allowed
        body = bodies(inner, depth - 1)
        if "in_place" in inner.plain:  # so that calls change what was read before them
            body = st.one_of(body, st.tuples(body, NAMES["in_place"], PICK).map(_changing_an_argument))
        drawn = st.tuples(PICK, PICK, body, DECISIONS, st.booleans())
        return drawn.map(lambda drawn: Step("call", what, *drawn))

    return st.sampled_from(allowed.calls).flatmap(of_call)


def _changing_an_argument(drawn: tuple[Body, str, int]) -> Body:
    body, what, two = drawn
    return body._replace(steps=(Step("in_place", what, two % 2, two), *body.steps))


@st.composite
def programs(draw: st.DrawFn, odds: tuple[str, ...] = ODD, priced: bool | None = None) -> Program:
    """Draw a program; at most one of the odd things named, and a few others, are around it."""
    allowed = draw(kinds(priced))
    around = ("nothing",) * 3 + ("region", "region with policy", "twice") + ("torch",) * ("torch" in allowed.nested)
    body, policy, options = draw(bodies(allowed)), draw(allowed.policies), {}
    options["inputs"] = draw(st.sampled_from(("plain", "plain", "transposed")))
    odd = draw(st.sampled_from(odds))
    if odd == "hooks":
        options["hooks"] = draw(st.sampled_from(("around", "inside")))
    elif odd == "inputs":
        # Backward of a subclass runs torch's checkpoint without `__torch_function__`: it recomputes other types.
        kinds_of_inputs = ("wrapper",) if "torch" in allowed.nested else ("subclass", "wrapper")
        options["inputs"] = draw(st.sampled_from(kinds_of_inputs))
    elif odd == "budget":
        options["budget"] = draw(st.sampled_from((1, 300, 1000, 10**6)))
    elif odd == "later" and "torch" not in allowed.nested:  # whose checkpoint recomputes with what was changed
        options["later"] = draw(st.sampled_from(list(LATER)))
    elif odd == "fault" and not (OLDEST and "torch" in allowed.nested):  # its checkpoint leaves its hooks on the stack
        options["fault"] = draw(FAULTS)
    elif odd == "autocast":
        options["autocast"] = draw(st.sampled_from(("forward", "forward", "backward")))
    elif odd == "offload":
        options["offload"] = True
    early_stop = draw(st.sampled_from((True, True, False)))
    program = Program(body, policy, draw(st.sampled_from(around)), draw(BACKWARDS), early_stop=early_stop, **options)
    return program if program.offload else _staying(program)


def _staying(program: Program) -> Program:
    """Return the program without decisions to offload, which need an offloader."""
    if all(step.policy != OFFLOAD for step in steps_of(program.body)):
        return program
    return program._replace(body=_body_staying(program.body))


def _body_staying(body: Body) -> Body:
    return body._replace(
        steps=tuple(
            step._replace(
                policy=SAVE if step.policy == OFFLOAD else step.policy, body=step.body and _body_staying(step.body)
            )
            for step in body.steps
        )
    )
