"""Budgets of dynamic rematerialization on six small models: what bookkeeping costs, overhead by budget, pictures, logs.

python -m benchmarks.dtr_live bookkeeping
python -m benchmarks.dtr_live models
python -m benchmarks.dtr_live pictures docs/pictures
python -m benchmarks.dtr_live logs tests/features/dtr/data
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torch_remat as remat
from benchmarks import dtr_models
from benchmarks.dtr_models import MODELS, outcome

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
KEPT_LOGS = ("unet",)  # small enough to be kept with the tests


class PassThrough(torch.Tensor):
    """The least that a wrapper subclass does for an op: unwrap, call, wrap."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # noqa: TID251
    inner: torch.Tensor

    @staticmethod
    def wrap(inner: torch.Tensor) -> PassThrough:
        made = torch.Tensor._make_wrapper_subclass(
            PassThrough, inner.shape, inner.stride(), 0, None, inner.dtype, torch.strided, inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.wrap(func(*[one.inner if type(one) is cls else one for one in args], **(kwargs or {})))


def _seconds(x: torch.Tensor, ops: int = 2000) -> float:
    start = time.perf_counter()
    for _ in range(ops):
        x.sin()
    return (time.perf_counter() - start) / ops


def bookkeeping(rounds: int = 15) -> tuple[float, float, float]:
    """Return microseconds of a small op: eager, and what a pass-through subclass and a budget add."""
    x = torch.randn(4, 16)
    times: list[list[float]] = [[], [], []]
    for _ in range(rounds):
        times[0].append(_seconds(x))
        times[1].append(_seconds(PassThrough.wrap(x)))
        with remat.dtr.budget("1 GiB"):
            times[2].append(_seconds(x + 0))
    eager, wrapper, block = (1e6 * min(part) for part in times)
    return eager, wrapper - eager, block - eager


def in_budget(name: str, limit: int, **options: Any) -> remat.dtr.Runtime:
    """Run a model's step in a budget."""
    kept: list[remat.dtr.Runtime] = []

    def around(run: Callable[[], torch.Tensor]) -> torch.Tensor:
        with remat.dtr.budget(limit, **options) as runtime:
            kept.append(runtime)
            return run()

    outcome(name, around)
    return kept[0]


def overheads(name: str, heuristic: str) -> dict[float, float | None]:
    """Return the overhead in compute by share of the plain peak; None where the budget is too small."""
    in_budget(name, 2**40)  # so that costs are known
    peak = in_budget(name, 2**40).peak_bytes
    return {share: _overhead(name, int(share * peak), heuristic) for share in SHARES}


def _overhead(name: str, limit: int, heuristic: str) -> float | None:
    try:
        return in_budget(name, limit, heuristic=heuristic).overhead
    except remat.dtr.BudgetError:
        return None


def checkpointed(name: str) -> tuple[float, float]:
    """Return peak and compute of a step whose blocks are all checkpointed regions, as shares of the plain ones."""
    block = {"transformer": dtr_models._Block, "resnet32": dtr_models._Residual}[name]
    forward = block.forward
    plain = in_budget(name, 2**40, cost="flops")
    block.forward = lambda self, x: remat.checkpoint()(forward)(self, x)
    try:
        full = in_budget(name, 2**40, cost="flops")
    finally:
        block.forward = forward
    return full.peak_bytes / plain.peak_bytes, full.base_compute / plain.base_compute


def models() -> None:
    for name in ("transformer", "resnet32"):
        peak, compute = checkpointed(name)
        least = in_budget(name, int(peak * in_budget(name, 2**40).peak_bytes), cost="flops")
        print(f"{name}: all blocks checkpointed reach {peak:.2f} of the peak with {compute:.3f} of the FLOPs, ", end="")
        print(f"dtr_eq at that budget {least.overhead:.3f}")
    for name in MODELS:
        found = overheads(name, "dtr_eq")
        cells = [f"{share}: {'too small' if cost is None else f'{cost:.3f}'}" for share, cost in found.items()]
        print(f"{name:<14} {'  '.join(cells)}", flush=True)


class _Watch(TorchDispatchMode):
    """Notes how many bytes live before each op."""

    def __init__(self, runtime: remat.dtr.Runtime) -> None:
        super().__init__()
        self._runtime = runtime
        self.live: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.live.append(self._runtime.live_bytes)
        return func(*args, **(kwargs or {}))


def live_bytes(name: str, limit: int) -> list[int]:
    """Return the bytes that live before each op of a model's step."""
    kept: list[_Watch] = []

    def around(run: Callable[[], torch.Tensor]) -> torch.Tensor:
        with remat.dtr.budget(limit) as runtime, _Watch(runtime) as watch:
            kept.append(watch)
            return run()

    outcome(name, around)
    return kept[0].live


def pictures(folder: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    free = live_bytes("transformer", 2**40)
    figure, axes = plt.subplots(figsize=(7, 3.2))
    axes.plot([size / 2**20 for size in free], label="no budget", color="0.6")
    for share in (0.7, 0.4):
        limit = int(share * max(free))
        line = axes.plot([size / 2**20 for size in live_bytes("transformer", limit)], label=f"budget {share}")[0]
        axes.axhline(limit / 2**20, color=line.get_color(), linestyle=":", linewidth=1)
    axes.set(xlabel="op of the program", ylabel="MiB alive", title="A transformer's step: bytes alive, and budgets")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(folder / "dtr_live_bytes.png", dpi=110)
    figure, axes = plt.subplots(figsize=(7, 3.2))
    for name in MODELS:
        found = {share: cost for share, cost in overheads(name, "dtr_eq").items() if cost is not None and cost < 2}
        axes.plot(list(found), list(found.values()), marker="o", label=name)
    axes.set(xlabel="budget, of the plain peak", ylabel="compute, of plain", title="dtr_eq, live")
    axes.invert_xaxis()
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(folder / "dtr_live_overhead.png", dpi=110)


def logs(folder: Path) -> None:
    for name in KEPT_LOGS:

        def around(run: Callable[[], torch.Tensor], name: str = name) -> torch.Tensor:
            with remat.dtr.record(folder / f"dtr_{name}.log"):
                return run()

        outcome(name, around)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["bookkeeping"]:
            eager, wrapper, block = bookkeeping()
            print(
                f"eager {eager:.2f} us, pass-through subclass +{wrapper:.2f}, "
                f"budget +{block:.2f}: {block / wrapper:.2f}"
            )
        case ["models"]:
            models()
        case ["pictures", folder]:
            pictures(Path(folder))
        case ["logs", folder]:
            logs(Path(folder))
        case _:
            print(__doc__)
