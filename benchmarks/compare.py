"""Shows what moved between two files of results: ``python -m benchmarks.compare``.

Without arguments it compares the newest two in ``benchmarks/results``; ``--old`` and ``--new`` name others. All other
arguments are those of ``python -m benchmarks``: with any of them, it measures, and the newest file is the old one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .__main__ import main as measure
from .results import moved_table, newest, read

FRESH = Path("out") / "bench.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--old", type=Path, metavar="FILE", help="default: the newest in benchmarks/results, or the one before"
    )
    parser.add_argument("--new", type=Path, metavar="FILE", help="default: a fresh run, or the newest")
    options, run = parser.parse_known_args(arguments)
    if options.new and run:
        parser.error(f"--new names a file; nothing is measured for {' '.join(run)}")
    new = options.new or (FRESH if run else newest(1)[0])
    old = options.old or newest(1 if options.new or run else 2)[0]
    before = read(old)  # a wrong name is found before the run
    if run:
        measure([*run, "--json", str(new)])
    print(moved_table(before, read(new)))


if __name__ == "__main__":
    main()
