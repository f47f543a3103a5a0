"""The bench on the command line: ``python -m torch_remat.dtr simulate | record | info``."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

from torch_remat._util.text import format_bytes
from torch_remat.dtr import _chart
from torch_remat.dtr._memory import Deallocation
from torch_remat.dtr._pool import Search
from torch_remat.dtr.heuristics import HEURISTICS, resolve
from torch_remat.dtr.log import Log
from torch_remat.dtr.recording import record
from torch_remat.dtr.simulate import Simulation, simulate
from torch_remat.errors import RematError, UsageError

_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for and return the exit code: 2 where that cannot be done."""
    options = _parser().parse_args(arguments)
    try:
        options.do(options)
    except (RematError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torch_remat.dtr", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("simulate", help="what heuristics cost on a log, at budgets")
    run.set_defaults(do=_simulate)
    run.add_argument("log", type=Path, metavar="LOG")
    run.add_argument(
        "--budgets", type=_share, nargs="+", default=_SHARES, metavar="SHARE", help="by the peak (default: 0.9 to 0.3)"
    )
    run.add_argument(
        "--heuristics",
        nargs="+",
        default=("dtr_eq",),
        metavar="NAME",
        help=f"among {', '.join(HEURISTICS)}, or a class of your own, module:Class (default: dtr_eq)",
    )
    run.add_argument("--deallocation", choices=get_args(Deallocation), default="eager")
    run.add_argument("--search", choices=get_args(Search), help="how the victim is found (default: what suits)")
    run.add_argument("--seed", type=int, default=0, help="of a sample (default: 0)")
    run.add_argument("--max-overhead", type=float, default=2.0, help="where a run is stopped (default: 2)")
    run.add_argument("--plot", type=Path, metavar="CHART", help="draw overhead by budget into a file")
    run.add_argument("--json", type=Path, metavar="FILE", help="write all figures into a file")
    recorder = commands.add_parser("record", help="run a program and write its log")
    recorder.set_defaults(do=_record)
    recorder.add_argument("log", type=Path, metavar="LOG")
    recorder.add_argument("target", help="a Python script, or module:function to call without arguments")
    recorder.add_argument("rest", nargs=argparse.REMAINDER, help="arguments of the script")
    info = commands.add_parser("info", help="what is in a log")
    info.set_defaults(do=_info)
    info.add_argument("log", type=Path, metavar="LOG")
    return parser


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share < float("inf"):
        raise argparse.ArgumentTypeError("a budget is a share of the log's peak, above 0")
    return share


def _simulate(options: argparse.Namespace) -> None:
    log = Log.load(options.log)
    heuristics = {name: resolve(_imported(name) if ":" in name else name) for name in options.heuristics}
    runs: dict[str, list[Simulation]] = {name: [] for name in heuristics}
    done = 0
    with closing(_bar(len(log.steps) * len(heuristics) * len(options.budgets))) as bar:
        for name, heuristic in heuristics.items():
            for share in options.budgets:
                result = simulate(
                    log,
                    share * log.peak_bytes,
                    heuristic,
                    options.deallocation,
                    max_overhead=options.max_overhead,
                    search=options.search,
                    seed=options.seed,
                    progress=lambda step, done=done: bar.update(done + step - bar.n),  # type: ignore[misc]
                )
                runs[name].append(result)
                done += len(log.steps)
                bar.update(done - bar.n)  # also where the run was stopped
    sys.stdout.write(_table(log, options.budgets, runs))
    if options.json:
        options.json.write_text(json.dumps(_plain_data(options, log, runs), indent=2) + "\n", encoding="utf-8")
    if options.plot:
        _chart.plot(f"Recomputation of {options.log.name}", len(log.ops), options.budgets, runs, options.plot)


class _NoBar:
    n = 0

    def update(self, steps: int) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Leave nothing behind."""


def _bar(steps: int) -> Any:
    """Return a progress bar of log steps, by tqdm where that is installed and somebody watches."""
    try:
        return importlib.import_module("tqdm").tqdm(total=steps, unit="step", leave=False, disable=None)
    except ImportError:
        return _NoBar()


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{name} cannot be imported: {error}") from error
    finally:
        sys.path.remove("")


def _table(log: Log, shares: Sequence[float], runs: dict[str, list[Simulation]]) -> str:
    width = max(9, *(len(name) for name in runs))
    lines = [
        f"{len(log.ops)} ops, peak {format_bytes(log.peak_bytes)}; compute by budget, by that without recomputation",
        "",
        " ".join([" " * width, *(f"{share:>8.2f}" for share in shares)]),
    ]
    for name, results in runs.items():
        lines.append(" ".join([f"{name:<{width}}", *(f"{_cell(result):>8}" for result in results)]))
    return "\n".join(lines) + "\n"


def _cell(result: Simulation) -> str:
    if result.ran_out:
        return "no room"
    return "stopped" if result.stopped else f"{result.overhead:.2f}"


def _plain_data(options: argparse.Namespace, log: Log, runs: dict[str, list[Simulation]]) -> dict[str, Any]:
    return {
        "log": str(options.log),
        "ops": len(log.ops),
        "peak_bytes": log.peak_bytes,
        "base_compute": log.base_compute,
        "deallocation": options.deallocation,
        "max_overhead": options.max_overhead,
        "budgets": list(options.budgets),
        "runs": {name: [dataclasses.asdict(result) for result in results] for name, results in runs.items()},
        "chain": {"layers": _chart.chain_of(len(log.ops)), **_chart.chain_bounds(len(log.ops), options.budgets)},
    }


def _record(options: argparse.Namespace) -> None:
    run: Callable[[], Any]
    if ":" in options.target and not Path(options.target).exists():
        run = _imported(options.target)
    else:
        if not Path(options.target).is_file():
            raise UsageError(f"there is no script {options.target}", remedy="A function is named module:function.")

        def run() -> None:
            runpy.run_path(options.target, run_name="__main__")

    arguments, sys.argv = sys.argv, [options.target, *options.rest]
    try:
        with record(options.log):
            run()
    finally:
        sys.argv = arguments
    _info(options)


def _info(options: argparse.Namespace) -> None:
    log = Log.load(options.log)
    constants = [log.storage_of[tensor] for tensor, op in enumerate(log.op_of) if op < 0]
    made = [0 if view else log.sizes_bytes[storage] for view, storage in zip(log.view, log.storage_of, strict=True)]
    largest = max((sum(made[tensor] for tensor in op.outputs) for op in log.ops), default=0)
    rows = [
        ("lines", f"{log.lines}"),
        ("ops", f"{len(log.ops)}"),
        ("storages", f"{len(log.sizes_bytes)}"),
        ("views", f"{sum(log.view)}"),
        ("constants", f"{len(constants)}, {format_bytes(sum(log.sizes_bytes[one] for one in constants))}"),
        ("largest op's results", format_bytes(largest)),
        ("peak", format_bytes(log.peak_bytes)),
        ("compute", f"{log.base_compute / 1e6:.3f} ms"),
    ]
    sys.stdout.write("".join(f"{name:<22}{value}\n" for name, value in rows))


if __name__ == "__main__":
    raise SystemExit(main())
