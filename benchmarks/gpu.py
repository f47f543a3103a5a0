"""Everything that only a GPU shows, in one command and a fixed time: ``python -m benchmarks.gpu OUT``.

``.ci/gpu OUT`` calls this on a bare machine. Each part is a process of its own with a share of the time that is left:
one that fails, hangs or runs out of memory does not stop the others, and what it has measured until then counts. After
each part ``OUT/gpu.json`` and the page ``OUT/gpu.md`` are written anew; ``OUT/NAME.log`` has what the part printed.

Without a CUDA device, and with ``--toy``, all parts run at toy size, and what needs the device says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import Any

from .tables import markdown

ROOT = Path(__file__).parents[1]
SECONDS = 480.0
GRACE_SECONDS = 5.0
"""For a part to write what it has, and at the end for the page."""
NEEDS_CUDA = "needs CUDA"


@dataclass(frozen=True)
class Part:
    """One part of the run.

    Attributes:
        title: Its heading.
        about: What its table shows.
        weight: Its share of the time, beside those of the parts that come after it.
    """

    title: str
    about: str
    weight: float


PARTS = {
    "machine": Part("Machine", "What ran, and how fast pinned memory is copied.", 20),
    "tests": Part("Tests", "`pytest -m gpu`: the ways of keeping, generators, streams, autocast, offloading.", 150),
    "llama-1024": Part("Llama blocks, width 1,024", "A step in bfloat16: forward, backward.", 70),
    "llama-4096": Part("Llama blocks, width 4,096", "A step in bfloat16: forward, backward.", 100),
    "overlap": Part(
        "Offloading beside the computation",
        "Residual MLPs whose wide activation is kept, or copied to host memory and back. *Hidden* is the share of the "
        "copies' own time that the step does not take longer.",
        70,
    ),
    "reserve": Part(
        "The allocator's reserve",
        "What the allocator holds above what is allocated, at the peak of a step, and what a budget left for it.",
        70,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and write the page; return 1 if one did not end well."""
    options = _parser().parse_args(arguments)
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    start = perf_counter()
    end = start + options.seconds - GRACE_SECONDS
    results: dict[str, Any] = {"measured": datetime.now(timezone.utc).isoformat(timespec="minutes"), "parts": {}}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    try:
        for index, name in enumerate(options.parts):
            weights = [PARTS[other].weight for other in options.parts[index:]]
            limit = (end - perf_counter()) * weights[0] / sum(weights)
            sys.stderr.write(f"{name}: up to {limit:.0f} s\n")
            results["parts"][name] = _run(name, limit, out, options.toy)
            _write(results, out, perf_counter() - start)
    finally:
        _write(results, out, perf_counter() - start)
    sys.stderr.write(f"{out / 'gpu.md'}\n")
    return 0 if all(part["state"] == "done" for part in results["parts"].values()) else 1


def _run(name: str, limit: float, out: Path, toy: bool) -> dict[str, Any]:
    """Run one part in a process, for so many seconds at most, and return what it wrote."""
    if limit < 1:
        return {"state": "not run: no time was left", "rows": [], "seconds": 0}
    file, start = out / f"{name}.json", perf_counter()
    file.unlink(missing_ok=True)
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    command = [sys.executable, "-m", "benchmarks.gpu_parts", name, "--json", str(file), "--out", str(out)]
    command += ["--seconds", f"{max(limit - GRACE_SECONDS, limit / 2):.1f}", *(["--toy"] if toy else [])]
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
            state = "done" if code == 0 else f"failed with exit code {code}: see {name}.log"
        except subprocess.TimeoutExpired:
            state = f"stopped after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what the part has started
            process.wait()
    found = json.loads(file.read_text()) if file.exists() else {"rows": []}
    file.unlink(missing_ok=True)
    return {"state": state, **found, "seconds": round(perf_counter() - start, 1)}


def _write(results: Mapping[str, Any], out: Path, seconds: float) -> None:
    (out / "gpu.json").write_text(json.dumps({**results, "seconds": round(seconds, 1)}, indent=1) + "\n")
    (out / "gpu.md").write_text(page({**results, "seconds": seconds}))


def page(results: Mapping[str, Any]) -> str:
    """Return the results as a page."""
    lines = ["# On a GPU", "", f"Measured {results['measured']}, in {results['seconds']:.0f} s (`.ci/gpu`)."]
    for name, found in results["parts"].items():
        lines += ["", f"## {PARTS[name].title}", "", PARTS[name].about]
        if found["state"] != "done":
            lines += ["", f"**{found['state'].capitalize()}.**"]
        if found["rows"]:
            lines += ["", _table(found["rows"])]
        lines += [line for note in found.get("notes", ()) for line in ("", note)]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    header = list(dict.fromkeys(key for row in rows for key in row))
    return markdown(header, [[_cell(row.get(key, "")) for key in header] for row in rows])


def _cell(value: object) -> str:
    if value is None:
        return NEEDS_CUDA
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder for gpu.json, gpu.md and logs")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"when to stop (default: {SECONDS:.0f})")
    parser.add_argument("--toy", action="store_true", help="toy sizes, also on a GPU")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which parts, in this order (default: all)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
