"""Measures, prints tables and bars, and fails if a bar fails: ``python -m benchmarks --help``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from . import eviction, handles, kept, offload, tables
from .bars import judge
from .measure import ROUNDS, Result, measure
from .memory import check_counter
from .workloads import WORKLOADS as RECOMPUTED

WORKLOADS = {**RECOMPUTED, **handles.WORKLOADS, **kept.WORKLOADS}
# What measures itself, for it needs another clock or other columns; it has no bars.
REPORTS = {"offload": offload.report, "eviction": eviction.report}
NAMES = [*WORKLOADS, *REPORTS]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks that the command line asks for and return the exit code."""
    options = _parser().parse_args(arguments)
    check_counter()
    results: dict[str, Result] = {}
    for name in _selected(options.names):
        if name in REPORTS:
            _say(REPORTS[name](options.rounds))
            continue
        for result in measure(WORKLOADS[name](), options.rounds):
            results[result.workload.name] = result
            _say(tables.contenders_table(result))
            replayed = tables.replayed_table(result)
            if replayed:
                _say(replayed)
    scaling = tables.saved_tensors_table(results)
    if scaling:
        _say(scaling)
    verdicts = [] if options.no_bars else judge(results)
    if verdicts:
        _say(tables.verdicts_table(verdicts))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(tables.plain_data(results, verdicts), indent=2) + "\n")
    return 0 if all(verdict.passed for verdict in verdicts) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"a workload (default: all): {', '.join(NAMES)}")
    parser.add_argument(
        "--rounds", type=_positive, default=ROUNDS, help="samples of each contender (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write everything that was measured to PATH")
    parser.add_argument("--no-bars", action="store_true", help="print the tables only, and judge nothing")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _selected(names: Sequence[str]) -> list[str]:
    """Return the workloads to measure, in the order of ``NAMES``; all of them where none is named."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise SystemExit(f"no workload is called {unknown[0]!r}; there are: {', '.join(NAMES)}")
    return [name for name in NAMES if not names or name in names]


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
