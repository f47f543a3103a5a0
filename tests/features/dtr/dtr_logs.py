"""Logs for tests of the simulator: made-up chains and random programs, and recorded steps."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from pathlib import Path

from torch_remat.dtr import Log, LogWriter


class LogText(LogWriter):
    """Writes a log into memory."""

    def __init__(self) -> None:
        self._file = io.StringIO()
        self.annotate("START")

    def op(self, result: str, args: Sequence[str], size: int = 1, time: int = 1, alias: int = -1) -> None:
        self.call("op", args, [(result, size, alias)], time)

    def release(self, *names: str) -> None:
        for name in names:
            super().release(name)

    def log(self) -> Log:
        return Log.parse(self._file.getvalue().splitlines())


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

    for _ in range(draw.randint(1, 3)):
        live.append(fresh())
        text.constant(live[-1], draw.randint(0, 6))
    for _ in range(ops):
        args = [draw.choice(live) for _ in range(draw.randint(0 if draw.random() < 0.1 else 1, 3))] if live else []
        time = draw.choice([0, 1, 1, 1, 2, 3, 5, 8])
        what = draw.random()
        if what < 0.62 or not args:
            results = []
            for _ in range(draw.choice([1, 1, 1, 1, 2, 3])):
                alias = draw.randrange(len(args)) if args and draw.random() < 0.25 else -1
                results.append((fresh(), draw.choice([0, 1, 2, 2, 3, 4, 8]), alias))
            text.call("op", args, results, time)
            live += [name for name, _, _ in results]
        elif what < 0.76:
            text.mutate("op_", args, draw.sample(range(len(args)), draw.randint(1, len(args))), time)
        elif what < 0.82:
            live.append(fresh())
            text.copy(live[-1], draw.choice(live[:-1]))
        elif what < 0.86:
            text.copy_from(draw.choice(live), draw.choice(live))
        elif what < 0.89:
            live.append(fresh())
            text.constant(live[-1], draw.randint(1, 4))
        while len(live) > 4 and draw.random() < 0.42:
            text.release(live.pop(draw.randrange(len(live))))
    while live and draw.random() < 0.95:
        text.release(live.pop(draw.randrange(len(live))))
    return text


def recorded(name: str) -> list[str]:
    """Return the lines of a step that `benchmarks.dtr_live logs` recorded, without its START."""
    return (Path(__file__).parent / "data" / f"dtr_{name}.log").read_text().splitlines()[1:]
