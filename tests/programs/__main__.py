"""`python -m tests.programs --seconds 600 --seed 1 --jobs 2`: a soak; exit status 1 if a program failed."""

from __future__ import annotations

import argparse
import random
import sys

from tests.programs.soak import soak, soak_in_processes


def main() -> int:
    """Read the options, run the soak, return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, help="where seeds start; a fresh one by default")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--priced", action="store_true", help="only policies by price, in one process")
    options = parser.parse_args()
    first = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    if options.jobs == 1 or options.priced:
        return int(not soak(options.seconds, first, options.priced or None))
    print(f"--seed {first} --jobs {options.jobs}", flush=True)  # noqa: T201
    return int(not soak_in_processes(options.seconds, first, options.jobs))


if __name__ == "__main__":
    sys.exit(main())
