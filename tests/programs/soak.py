"""Draws fresh programs for a time, in several processes, and shrinks what fails."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter

import torch
from hypothesis import HealthCheck, given, seed, settings

from tests.programs.outcome import outcome
from tests.programs.program import Program
from tests.programs.strategy import ODD, programs

BATCH = 200
"""Programs drawn from one seed."""


def options(examples: int) -> settings:
    """Return the settings under which programs are drawn; one failure is enough, since shrinking takes minutes."""
    return settings(
        max_examples=examples,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


def batch(
    drawn_from: int,
    kinds: Counter[str],
    examples: int = BATCH,
    odds: tuple[str, ...] = ODD,
    priced: bool | None = None,
) -> tuple[Program, AssertionError] | None:
    """Judge the programs of a seed.

    Args:
        drawn_from: The seed.
        kinds: Counts what the programs came to.
        examples: How many programs.
        odds: The odd things that may be around them.
        priced: Whether policies go by price; None for some of them.

    Returns:
        The smallest program that failed and its error, or None.
    """
    failed: list[tuple[Program, Exception]] = []

    @seed(drawn_from)
    @options(examples)
    @given(programs(odds, priced))
    def judge(program: Program) -> None:
        try:
            kinds[outcome(program)] += 1
        except Exception as error:
            failed[:] = [(program, error.with_traceback(None))]
            raise

    try:
        judge()
    except Exception:
        if not failed:
            raise
        return failed[0]
    return None


def soak(seconds: float, first: int, priced: bool | None = None) -> bool:
    """Draw programs for some seconds and print what they came to; return whether all were right."""
    torch.set_num_threads(1)
    seeds, kinds, right, end = random.Random(first), Counter(), True, time.monotonic() + seconds
    while time.monotonic() < end:
        drawn_from = seeds.randrange(2**32)
        if (failure := batch(drawn_from, kinds, priced=priced)) is not None:
            right = False
            program, error = failure
            text = f"FAILED, seed {drawn_from}: {type(error).__name__}: {error}"
            print(f"{text}\n{reproduction(program)}", flush=True)  # noqa: T201
    print(f"{sum(kinds.values())} programs in {seconds:.0f} s: {dict(kinds.most_common())}", flush=True)  # noqa: T201
    return right


def reproduction(program: Program) -> str:
    """Return Python that judges a program."""
    return (
        "from tests.programs.program import Body, Fault, Program, Step\n"
        "from tests.programs.outcome import outcome\n"
        f"outcome({program!r})\n"
    )


def soak_in_processes(seconds: float, first: int, jobs: int) -> bool:
    """Run `soak` in several processes, each with seeds of its own; return whether all programs were right."""
    command = [sys.executable, "-m", "tests.programs", "--seconds", str(seconds), "--jobs", "1", "--seed"]
    running = [subprocess.Popen([*command, str(first + job)]) for job in range(jobs)]
    statuses = [process.wait() for process in running]
    return not any(statuses)
