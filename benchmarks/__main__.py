"""Measures, prints tables and bars, and fails if a bar fails: ``python -m benchmarks --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from . import eviction, handles, imports, kept, offload, page, real, tables, titan
from .bars import judge, judge_times, only_judged
from .contenders import UnavailableError, compare_with
from .measure import ROUNDS, Result, measure
from .memory import check_counter
from .results import record, write
from .workloads import WORKLOADS as RECOMPUTED
from .workloads import Workload

GROUPS = {**RECOMPUTED, **handles.WORKLOADS, **kept.WORKLOADS, **real.WORKLOADS, **titan.WORKLOADS}
"""Workloads that are measured in the same rounds, by their own names and by that of the group."""
REPORTS = {"offload": offload.report, "eviction": eviction.report, "import": imports.report}
"""What measures itself, for it needs another clock; it has no bars."""
NAMES = [*GROUPS, *REPORTS]

ROUNDS_OF_ONE = 3 * ROUNDS
SECONDS_OF_ONE = 180.0
QUICK_SECONDS = 1.5
"""How long ``--quick`` takes times of each workload; gradients and bytes take as long again."""
NOT_QUICK = ("saved-tensors", "regions", "watching", "handles-save", "offload", "eviction", "import")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks that the command line asks for and return the exit code."""
    options = _parser().parse_args(arguments)
    selected = _selected(options)
    start = perf_counter()
    check_counter()
    if options.compare:
        try:
            compare_with(options.compare)
        except FileNotFoundError as error:
            raise SystemExit(str(error)) from None
    results: dict[str, Result] = {}
    for name, factories in selected.items():
        if name in REPORTS:
            _say(REPORTS[name](options.rounds or ROUNDS))
            continue
        for result in _measured(name, factories, options):
            results[result.workload.name] = result
            if not options.quick:
                _say(tables.contenders_table(result), tables.replayed_table(result))
    return _conclude(results, options, start)


def _measured(name: str, factories: dict[str, Callable[[], Workload]], options: argparse.Namespace) -> list[Result]:
    start = perf_counter()
    try:
        workloads = [build() for build in factories.values()]
    except UnavailableError as error:
        _say(f"### {name}\n\nSkipped: {error}")
        return []
    if options.quick:
        workloads = [only_judged(workload) for workload in workloads]
    rounds = options.rounds or (ROUNDS_OF_ONE if options.only else ROUNDS)
    seconds = QUICK_SECONDS * len(workloads) if options.quick else SECONDS_OF_ONE if options.only else None
    results = measure(workloads, rounds, None if options.rounds else seconds, all_bytes=not options.quick)
    if options.quick:
        sys.stderr.write(f"{name}: {perf_counter() - start:.0f} s\n")
    return results


def _conclude(results: dict[str, Result], options: argparse.Namespace, start: float) -> int:
    """Print what concerns more than one workload, write files, and return the exit code."""
    times = [] if options.no_bars else judge_times(results)
    verdicts = [] if options.no_bars else judge(results)
    _say(
        tables.saved_tensors_table(results),
        tables.times_table(times) if times else None,
        tables.verdicts_table(verdicts, only_failed=options.quick) if verdicts else None,
        tables.before_table(results),
    )
    sys.stdout.write(f"Done in {perf_counter() - start:.0f} s.\n")
    if options.json:
        write(record(results), options.json)
    if options.docs:
        page.write(record(results))
    return 0 if all(verdict.passed for verdict in (*times, *verdicts)) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="name",
        help=f"what to measure (default: all): {', '.join(NAMES)}, or one row of these",
    )
    parser.add_argument("--only", metavar="ROW", help=f"one row, with {ROUNDS_OF_ONE} rounds, in three minutes at most")
    parser.add_argument(
        "--quick", action="store_true", help="rows with bars on time, but not `watching`, in two minutes; ratios only"
    )
    parser.add_argument("--rounds", type=_positive, help=f"samples of each contender (default: {ROUNDS})")
    parser.add_argument("--compare", type=Path, metavar="PATH", help="another checkout, which takes part as `before`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all ratios to FILE")
    parser.add_argument(
        "--docs",
        action="store_true",
        help="also write tables and charts into docs/performance.md and benchmarks/README.md",
    )
    parser.add_argument("--no-bars", action="store_true", help="print the tables only, and judge nothing")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _selected(options: argparse.Namespace) -> dict[str, dict[str, Callable[[], Workload]]]:
    """Return the groups to measure, and of each the rows, in the order of ``NAMES``; all where none is named."""
    names = [*options.names, *([options.only] if options.only else [])]
    rows = {row for group in GROUPS.values() for row in group}
    unknown = [name for name in names if name not in NAMES and name not in rows]
    if options.only and (options.only not in rows or options.names):
        raise SystemExit(f"--only takes one row and no other names; there are: {', '.join(sorted(rows))}")
    if unknown:
        raise SystemExit(f"nothing is called {unknown[0]!r}; there are: {', '.join(sorted({*NAMES, *rows}))}")
    if not names:
        names = [name for name in NAMES if not (options.quick and name in NOT_QUICK)]
    chosen = {}
    for name in NAMES:
        group = GROUPS.get(name, {})
        picked = {row: build for row, build in group.items() if row in names or name in names}
        if options.only:
            picked = {row: build for row, build in group.items() if row == options.only}
        if picked or (name in names and name in REPORTS):
            chosen[name] = picked
    return chosen


def _say(*texts: str | None) -> None:
    for text in texts:
        if text:
            sys.stdout.write(f"{text}\n\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
