"""Logs for tests of the simulator: made-up chains and random programs, and recorded steps."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from torch_remat.dtr.log import Log


class LogText:
    """Collects the lines of a log, as text; names are given by the caller."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.add("ANNOTATE", ANNOTATION="START")

    def add(self, instruction: str, **fields: object) -> None:
        self.lines.append(json.dumps({"INSTRUCTION": instruction, **fields}))

    def constant(self, name: str, size: int) -> str:
        self.add("CONSTANT", NAME=name)
        self.add("MEMORY", NAME=name, MEMORY=str(size))
        return name

    def call(self, args: Sequence[str], results: Sequence[tuple[str, int, int]], time: int = 1) -> str:
        """Each result: name, size, alias."""
        names = [name for name, _, _ in results]
        self.add("CALL", NAME="op", ARGS=list(args), RESULT=names, TIME=str(time))
        for name, size, alias in results:
            self.add("MEMORY", NAME=name, MEMORY=str(size))
            self.add("ALIAS", NAME=name, ALIAS=str(alias))
        return names[0] if names else ""

    def op(self, result: str, args: Sequence[str], size: int = 1, time: int = 1, alias: int = -1) -> str:
        return self.call(args, [(result, size, alias)], time)

    def mutate(self, args: Sequence[str], indices: Sequence[int], time: int = 1) -> None:
        self.add("MUTATE", NAME="op_", ARGS=list(args), MUTATE=list(indices), TIME=str(time))

    def copy(self, target: str, source: str) -> None:
        self.add("COPY", DST=target, SRC=source)

    def copy_from(self, target: str, source: str) -> None:
        self.add("COPY_FROM", DST=target, SRC=source)

    def release(self, *names: str) -> None:
        for name in names:
            self.add("RELEASE", NAME=name)

    def log(self) -> Log:
        return Log.parse(self.lines)


def chain(length: int) -> LogText:
    """Forward ops f0 to f(length - 1), then a gradient for each; cost and size 1, no constants."""
    text = LogText()
    for layer in range(length):
        text.op(f"f{layer}", [f"f{layer - 1}"] if layer else [])
    for layer in reversed(range(length)):
        text.release(f"f{layer}")
        text.op(f"g{layer}", [f"f{layer - 1}"] * (layer > 0) + [f"g{layer + 1}"] * (layer < length - 1))
        text.release(f"g{layer + 1}")
    return text


def random_program(draw: random.Random, ops: int = 40) -> LogText:
    """Ops on random live names: several results, views, mutation, copies, rebinding, releases, constants between."""
    text, live, number = LogText(), [], 0

    def fresh() -> str:
        nonlocal number
        number += 1
        return f"t{number}"

    live += [text.constant(fresh(), draw.randint(0, 6)) for _ in range(draw.randint(1, 3))]
    for _ in range(ops):
        args = [draw.choice(live) for _ in range(draw.randint(0 if draw.random() < 0.1 else 1, 3))] if live else []
        time = draw.choice([0, 1, 1, 1, 2, 3, 5, 8])
        what = draw.random()
        if what < 0.62 or not args:
            results = []
            for _ in range(draw.choice([1, 1, 1, 1, 2, 3])):
                alias = draw.randrange(len(args)) if args and draw.random() < 0.25 else -1
                results.append((fresh(), draw.choice([0, 1, 2, 2, 3, 4, 8]), alias))
            text.call(args, results, time)
            live += [name for name, _, _ in results]
        elif what < 0.76:
            text.mutate(args, draw.sample(range(len(args)), draw.randint(1, len(args))), time)
        elif what < 0.82:
            live.append(fresh())
            text.copy(live[-1], draw.choice(live[:-1]))
        elif what < 0.86:
            text.copy_from(draw.choice(live), draw.choice(live))
        elif what < 0.89:
            live.append(text.constant(fresh(), draw.randint(1, 4)))
        while len(live) > 4 and draw.random() < 0.42:
            text.release(live.pop(draw.randrange(len(live))))
    while live and draw.random() < 0.95:
        text.release(live.pop(draw.randrange(len(live))))
    return text


def recorded(name: str) -> list[str]:
    """Return the lines of a step that `benchmarks.dtr_live logs` recorded, without its START."""
    return (Path(__file__).parent / "data" / f"dtr_{name}.log").read_text().splitlines()[1:]
