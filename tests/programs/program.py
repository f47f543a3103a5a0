"""A program as data: nested tuples of small steps, which hypothesis shrinks and whose `repr` can be pasted."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

SAVE, RECOMPUTE, OFFLOAD = "SAVE", "RECOMPUTE", "OFFLOAD"


class Body(NamedTuple):
    """A function.

    Attributes:
        steps: What it does.
        returns: Which of its values it returns; index 0 is the latest value.
        tree: How it returns them: `tuple`, `bare` (a single one), `dict`, `with None`, `dataclass` or `nested`.
    """

    steps: tuple[Step, ...]
    returns: tuple[int, ...]
    tree: str = "tuple"


class Step(NamedTuple):
    """One step of a function.

    Attributes:
        kind: `unary`, `binary`, `view`, `in_place`, `state`, `read`, `region`, `torch` or `call`.
        what: The name of the op in the kind's table, or the kind of call.
        one: Index of the first value that it takes, counted from the latest.
        two: Index of the second one.
        body: What a region or a call runs.
        policy: Name of an inner region's policy, or the decision for a call.
        closes: Whether a call reaches its values through its closure instead of its arguments.
    """

    kind: str
    what: str
    one: int = 0
    two: int = 0
    body: Body | None = None
    policy: str | None = None
    closes: bool = False


class Fault(NamedTuple):
    """An error that is raised at an op: the n-th of `forward`, of a `replay` or of `backward` outside of replays."""

    phase: str
    index: int


class Program(NamedTuple):
    """A body in a region, what is around it, and how its gradients are taken.

    Attributes:
        body: What the region runs.
        policy: Name of the region's policy.
        around: `nothing`, `region`, `region with policy`, `torch`, or `twice`: the region runs two times.
        backward: `once`, `kept`, `two orders`, `one by one`, `subset`, `thread` or `dropped`.
        hooks: Saved-tensor hooks that copy: `around` forward, or `inside` of the region.
        autocast: What runs under autocast to bfloat16: `forward`, `backward` or None.
        inputs: `plain`, `transposed`, `subclass` (by `as_subclass`) or `wrapper` (a subclass of two tensors).
        offload: Whether there is an offloader, which takes the inputs and what is marked.
        budget: Bytes of a budget around the step, or None.
        early_stop: The region's option.
        fault: The error to inject, or None.
        later: What the caller changes between forward and backward, or None.
    """

    body: Body
    policy: str | None = None
    around: str = "nothing"
    backward: str = "once"
    hooks: str | None = None
    autocast: str | None = None
    inputs: str = "plain"
    offload: bool = False
    budget: int | None = None
    early_stop: bool = True
    fault: Fault | None = None
    later: str | None = None


def steps_of(body: Body) -> Iterator[Step]:
    """Yield all steps of a function, those of inner functions too."""
    for step in body.steps:
        yield step
        if step.body is not None:
            yield from steps_of(step.body)


def policies_of(program: Program) -> set[str]:
    """Return the names of all policies of regions in a program."""
    names = {step.policy for step in steps_of(program.body) if step.kind == "region"} | {program.policy}
    if program.around == "region with policy":
        names.add("products")
    return {name for name in names if name is not None}


def without(program: Program, names: Collection[str]) -> Program:
    """Return a program whose regions have none of some policies."""
    policy = None if program.policy in names else program.policy
    return program._replace(body=_body_without(program.body, names), policy=policy)


def _body_without(body: Body, names: Collection[str]) -> Body:
    return body._replace(
        steps=tuple(
            step._replace(
                policy=None if step.kind == "region" and step.policy in names else step.policy,
                body=step.body and _body_without(step.body, names),
            )
            for step in body.steps
        )
    )


def calls_of(program: Program) -> list[Step]:
    """Return all calls in a program."""
    return [step for step in steps_of(program.body) if step.kind == "call"]


def writes(program: Program) -> bool:
    """Return whether the program changes a tensor or a buffer in place."""
    return any(step.kind in ("in_place", "state") for step in steps_of(program.body))


def reads_into_python(program: Program) -> bool:
    """Return whether the program reads data that autograd does not see it read."""
    unseen = ("number", "numpy", "branch", "rows", "mask", "no_grad", "detach", "gather", "where")
    return any(step.what in unseen for step in steps_of(program.body))


def draws(program: Program) -> bool:
    """Return whether the program draws random numbers."""
    random = ("dropout", "noise", "generator", "bernoulli_")
    return any(step.what in random for step in steps_of(program.body))
