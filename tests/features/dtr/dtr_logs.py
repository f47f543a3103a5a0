"""Logs made up for tests of the simulator: chains, a recurrent network, random programs."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence

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


def recurrent(steps: int, seed: int = 0) -> LogText:
    """A recurrent network with four gates, its backward, and gradients of the weights summed in place.

    About 130 lines a step; gates are views of one matmul, costs and sizes vary a little.
    """
    text, draw = LogText(), random.Random(seed)
    time = lambda usual: round(usual * draw.uniform(0.8, 1.2))  # noqa: E731
    text.constant("w", 4000)
    text.constant("h-1", 100)
    text.constant("c-1", 100)
    for step in range(steps):
        text.constant(f"x{step}", 100)
        text.op(f"joint{step}", [f"x{step}", f"h{step - 1}"], 200, time(20))
        text.op(f"gates{step}", [f"joint{step}", "w"], 400, time(300))
        text.call([f"gates{step}"], [(f"view{gate}{step}", 0, 0) for gate in "ifgo"], time(5))
        for gate in "ifgo":
            text.op(f"{gate}{step}", [f"view{gate}{step}"], 100, time(15))
            text.release(f"view{gate}{step}")
        text.release(f"gates{step}")
        text.op(f"ig{step}", [f"i{step}", f"g{step}"], 100, time(15))
        text.op(f"fc{step}", [f"f{step}", f"c{step - 1}"], 100, time(15))
        text.op(f"c{step}", [f"ig{step}", f"fc{step}"], 100, time(15))
        text.release(f"ig{step}", f"fc{step}")
        text.op(f"t{step}", [f"c{step}"], 100, time(15))
        text.op(f"h{step}", [f"o{step}", f"t{step}"], 100, time(15))
    last = steps - 1
    text.op(f"dh{last}", [f"h{last}"], 100, time(15))
    text.op(f"dc{last}", [f"dh{last}"], 100, time(15))
    text.op("dw", ["w"], 4000, time(30))
    for step in reversed(range(steps)):
        _recurrent_backward(text, step, time)
    text.release("dh-1", "dc-1")
    return text


def _recurrent_backward(text: LogText, step: int, time) -> None:
    parts = {"i": ("g", "dc"), "g": ("i", "dc"), "f": (f"c{step - 1}", "dc"), "o": ("t", "dh")}
    text.op(f"dt{step}", [f"dh{step}", f"o{step}", f"t{step}"], 100, time(20))
    text.mutate([f"dc{step}", f"dt{step}"], [0], time(15))
    text.release(f"dt{step}")
    for gate, (other, given) in parts.items():
        other = other if other.startswith("c") else f"{other}{step}"
        text.op(f"d{gate}{step}", [f"{given}{step}", other, f"{gate}{step}"], 100, time(20))
    text.op(f"dc{step - 1}", [f"dc{step}", f"f{step}"], 100, time(15))
    text.op(f"dgates{step}", [f"d{gate}{step}" for gate in "ifgo"], 400, time(20))
    text.release(*(f"d{gate}{step}" for gate in "ifgo"), f"dc{step}", f"dh{step}")
    text.op(f"part{step}", [f"joint{step}", f"dgates{step}"], 4000, time(300))
    text.mutate(["dw", f"part{step}"], [0], time(30))
    text.op(f"djoint{step}", [f"dgates{step}", "w"], 200, time(300))
    text.call([f"djoint{step}"], [(f"dx{step}", 0, 0), (f"dh{step - 1}", 0, 0)], time(5))
    text.release(f"part{step}", f"dgates{step}", f"djoint{step}", f"dx{step}", f"joint{step}")
    text.release(*(f"{name}{step}" for name in "ifgothc"), f"x{step}")


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


def load(text: LogText) -> Log:
    """As `LogText.log`, by way of bytes."""
    return Log.parse(io.BytesIO("\n".join(text.lines).encode()))
