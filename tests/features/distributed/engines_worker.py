"""One process of the tests over ranks: `engines_worker.py RANK WORLD_SIZE RENDEZVOUS SECONDS STEPS CELL...`.

Runs cells, each an engine and a way, `fsdp2:matmuls`, or a check, `check:dtr_is_refused`. A cell trains for some steps
with updates of the parameters and compares loss and gradients of each with those of the engine without checkpointing,
bit for bit; one more step counts collectives and the peak of what is alive. One line a cell; the process ends at the
first that fails, or takes longer than SECONDS.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import sys
import traceback
import warnings

import torch
import torch.distributed as dist

import torch_remat as remat
from tests.features.distributed import budget_checks, collectives_checks, engines_checks, example_checks  # noqa: F401
from tests.features.distributed.engines import CHECKS, ENGINES, WAYS, Engine, Peak, compare

_expected: dict[str, list[list[torch.Tensor]]] = {}


def train(engine: Engine, steps: int) -> list[list[torch.Tensor]]:
    """Return what each step gives."""
    return [engine.step(1000 * step + dist.get_rank()) for step in range(steps)]


def run(cell: str, steps: int) -> str:
    """Run a cell; return what is to be told of it."""
    name, _, way = cell.partition(":")
    if name == "check":
        return f"equal {CHECKS[way]() or ''}"
    if name not in _expected:
        _expected[name] = train(ENGINES[name](WAYS["none"]), steps)
    engine = ENGINES[name](WAYS[way])
    compare(_expected[name], train(engine, steps))
    with Peak() as peak, remat.testing.collectives() as collectives:
        engine.step(99_000 + dist.get_rank())
    return f"equal collectives={len(collectives)} peak={peak.peak}"


def main(rank: int, world_size: int, rendezvous: str, limit: int, steps: int, cells: list[str]) -> None:
    """Run the cells, in order."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", module="torch")
    warnings.filterwarnings("error", category=remat.RematWarning)
    warnings.filterwarnings("ignore", message="the budget")  # is too small
    warnings.filterwarnings("ignore", message=".*saves nothing")  # of offloading from memory to memory
    warnings.filterwarnings("ignore", message=".*selected nothing, so all is recomputed")
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=limit)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timeout
    )
    for cell in cells:
        faulthandler.dump_traceback_later(limit, exit=True)
        try:
            told, failed = run(cell, steps), False
        except BaseException as error:
            refused = isinstance(error, remat.UsageError)
            told, failed = f"{'refused' if refused else 'FAILED'} {type(error).__name__}: {error}", True
            if not refused or os.environ.get("ENGINES_VERBOSE"):
                traceback.print_exc()
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.write(f"{cell} {' '.join(told.split())}\n")
        sys.stdout.flush()
        if failed:
            break
    else:
        dist.barrier()
    os._exit(0)  # gloo's threads abort the process now and then when Python takes it down, without any region too


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6:])
