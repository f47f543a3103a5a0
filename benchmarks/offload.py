"""Offloading beside keeping: a step of 12 blocks whose activations stay, go to files, or go to host memory.

It has a measurement of its own, since its work waits, for files and for devices: the clock is the wall's. The rest is
as in ``measure``: rounds in which each contender takes a sample, in a changing order, and ratios within each round.

Bytes are those of tensors that PyTorch allocated and that are alive, summed by storage. What backward reads of files is
not among them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import torch_remat as remat
from torch_remat._compat import accelerator_type

from .measure import quartiles, undisturbed
from .tables import markdown

BLOCKS = 12
ROUNDS = 30
"""At most so many; a step takes seconds."""
SAVE, OFFLOAD = remat.CheckpointPolicy.SAVE, remat.CheckpointPolicy.OFFLOAD


class Wide(torch.autograd.Function):
    """The two matrix products of an MLP; saves the wide activation between them, and its input."""

    @staticmethod
    @remat.auto_forward("x", "h")
    def forward(ctx, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        h = torch.tanh(x @ up)
        ctx.weights = up, down
        ctx.save_for_backward(x, h)
        return h @ down

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, h = ctx.saved_tensors
        up, down = ctx.weights
        inner = grad @ down.t() * (1 - h * h)
        return inner @ up.t(), x.t() @ inner, h.t() @ grad


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Parameter(torch.randn(width, 4 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(4 * width, width) / width)

    def forward(self, x: Tensor, policy: remat.CheckpointPolicy) -> Tensor:
        return x + remat.op(Wide.apply, "wide", policy=policy)(self.norm(x), self.up, self.down)


@dataclass
class Contender:
    """One way to keep what backward needs.

    Attributes:
        policy: Of the op in each block.
        options: Of each region.
        flush: Waits until what leaves has left.
        seconds: Samples.
    """

    policy: remat.CheckpointPolicy
    options: dict = field(default_factory=dict)
    flush: Callable[[], None] = lambda: None
    seconds: list[float] = field(default_factory=list)


class LiveBytes(TorchDispatchMode):
    """Sums the storages that ops made and that are alive; ``peak`` is the most after any op."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in torch.utils._pytree.tree_leaves((args, kwargs)) if _has_data(x)}
        for tensor in torch.utils._pytree.tree_leaves(out):
            if _has_data(tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._seen = {key: known for key, known in self._seen.items() if not known[0].expired()}
        self.peak = max(self.peak, self.bytes())
        return out

    def bytes(self) -> int:
        return sum(count for reference, count in self._seen.values() if not reference.expired())


def _has_data(value: object) -> bool:
    return isinstance(value, Tensor) and not remat.is_placeholder(value)


def report(rounds: int) -> str:
    """Measure, and return the tables."""
    torch.manual_seed(0)
    with undisturbed(), on_disk() as offloader:
        contenders = {
            "SAVE": Contender(SAVE),
            "OFFLOAD to files": Contender(OFFLOAD, {"offloader": offloader}, offloader.flush),
            "OFFLOAD to files, inputs too": Contender(
                OFFLOAD, {"offloader": offloader, "offload_inputs": True}, offloader.flush
            ),
        }
        table = compare(contenders, width=256, rows=2048, device="cpu", dtype=torch.float32, rounds=min(rounds, ROUNDS))
    text = f"### offload\n\n{BLOCKS} residual MLPs of d=256 on 2048 rows, each a region with one op; CPU\n\n{table}"
    return f"{text}\n\n### offload, overlap on a GPU\n\n{overlap(rounds)}"


def overlap(rounds: int) -> str:
    """Measure host memory against keeping, on blocks that are large enough to hide the copies."""
    if accelerator_type() != "cuda":
        return "Skipped: there is no CUDA device."
    offloader = remat.CpuOffloader(prefetch_bytes=2 << 30, max_pending_bytes=2 << 30)
    contenders = {
        "SAVE": Contender(SAVE),
        "OFFLOAD to host memory": Contender(OFFLOAD, {"offloader": offloader}, torch.cuda.synchronize),
    }
    with undisturbed():
        return compare(
            contenders, width=8192, rows=8192, device="cuda", dtype=torch.bfloat16, rounds=min(rounds, ROUNDS)
        )


def compare(
    contenders: dict[str, Contender], *, width: int, rows: int, device: str, dtype: torch.dtype, rounds: int
) -> str:
    """Check gradients, count bytes, take times, and return a table."""
    blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS)).to(device, dtype)
    x = torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)
    steps = {name: partial(_forward, blocks, x, contender) for name, contender in contenders.items()}
    _check_gradients(steps, [x, *blocks.parameters()])
    counted = {name: _bytes(steps[name], contender.flush) for name, contender in contenders.items()}
    names = list(contenders)
    for index in range(-2, rounds):
        start = index % len(names)
        for name in names[start:] + names[:start]:
            seconds = _seconds(steps[name], blocks, device)
            if index >= 0:
                contenders[name].seconds.append(seconds)
    first = contenders[names[0]]
    rows_of_table = []
    for name, contender in contenders.items():
        ratios = [one / other for one, other in zip(contender.seconds, first.seconds, strict=True)]
        low, high = quartiles(ratios)
        retained, peak = counted[name]
        rows_of_table.append(
            [
                name,
                f"{median(contender.seconds) * 1000:,.1f}",
                f"{median(ratios):.3f}",
                f"{low:.3f} - {high:.3f}",
                f"{retained:,}",
                f"{peak:,}",
            ]
        )
    return markdown(["contender", "ms/step", "it / SAVE", "quartiles", "retained B", "peak B"], rows_of_table)


@contextmanager
def on_disk() -> Iterator[remat.DiskOffloader]:
    with tempfile.TemporaryDirectory(dir=".") as directory:
        yield remat.DiskOffloader(directory)


def _forward(blocks: nn.ModuleList, x: Tensor, contender: Contender) -> Tensor:
    h = x.clone()
    for block in blocks:
        h = remat.checkpoint(**contender.options)(block)(h, contender.policy)
    return h


def _check_gradients(steps: dict[str, Callable[[], Tensor]], leaves: list[Tensor]) -> None:
    expected = None
    for name, forward in steps.items():
        gradients = torch.autograd.grad(forward().sum(), leaves)
        expected = expected or gradients
        for one, other in zip(expected, gradients, strict=True):
            if not torch.equal(one, other):
                raise AssertionError(f"offload: {name} has another gradient")


def _bytes(forward: Callable[[], Tensor], flush: Callable[[], None]) -> tuple[int, int]:
    with LiveBytes() as live:
        output = forward()
        flush()
        retained = live.bytes()
        output.sum().backward()
    return retained, live.peak


def _seconds(forward: Callable[[], Tensor], blocks: nn.Module, device: str) -> float:
    blocks.zero_grad()
    if device == "cuda":
        torch.cuda.synchronize()
    start = perf_counter()
    forward().sum().backward()
    if device == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - start
