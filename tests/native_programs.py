"""What the tests of native regions and op-level policies share: what was kept, which ops replay ran, peers.

The reference of every comparison is plain autograd; the peer is torch's selective activation checkpointing (SAC).
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import torch_remat as remat
from tests.helpers import LiveStorages, tensors_in

aten = torch.ops.aten
SAVE, RECOMPUTE = remat.CheckpointPolicy.SAVE, remat.CheckpointPolicy.RECOMPUTE


def keep(name: str, function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Run a function as a native region that is saved."""
    return remat.native_save_region(name, function, *args, **kwargs)


def region(policy: Any = None, **options: Any) -> Callable[[Callable], Callable]:
    """Return what wraps a function as a region of ours, with an op-level policy if there is one."""
    if policy is not None:
        options["policy"] = policy
    return remat.checkpoint(**options)


def sac(policy: Any, **options: Any) -> Callable[[Callable], Callable]:
    """Return what wraps a function as a region of torch's selective activation checkpointing."""
    contexts = functools.partial(create_selective_checkpoint_contexts, policy, **options)

    def wrap(function: Callable) -> Callable:
        return lambda *args, **kwargs: torch_checkpoint(
            function, *args, use_reentrant=False, context_fn=contexts, **kwargs
        )

    return wrap


def full(function: Callable) -> Callable:
    """Return a function as a region of torch's that recomputes everything."""
    return lambda *args, **kwargs: torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


def on_cpu(function: Callable) -> Callable:
    """Return a function whose saved tensors torch keeps on the CPU."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return function(*args, **kwargs)

    return call


class Marks:
    """Remembers, by name and without holding them, tensors that a function made when it ran in forward.

    Attributes:
        storages: Name to the storage of the tensor of that name.
        sizes: Name to the bytes of that storage.
    """

    def __init__(self) -> None:
        self.storages: dict[str, StorageWeakRef] = {}
        self.sizes: dict[str, int] = {}

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """Remember the tensor, if this is forward, and return it."""
        if not remat.is_recomputing() and name not in self.storages:
            storage = tensor.untyped_storage()
            self.storages[name], self.sizes[name] = StorageWeakRef(storage), storage.nbytes()
        return tensor

    def alive(self) -> set[str]:
        """Return the names of the tensors whose memory is alive."""
        return {name for name, reference in self.storages.items() if not reference.expired()}

    def bytes(self, names: Iterable[str]) -> int:
        """Return the bytes of the tensors of these names."""
        return sum(self.sizes[name] for name in names)


class Kept:
    """A region after its forward, its outputs dropped: what its graph keeps.

    Attributes:
        bytes: Bytes of the storages made in forward that are alive.
        names: Names of the marked tensors that are alive.
    """

    def __init__(self, function: Callable, inputs: Sequence[Any], marks: Marks | None = None) -> None:
        self.live, self.marks = LiveStorages(), marks or Marks()
        with self.live:
            outputs = tensors_in([function(*inputs)])
        self.loss = sum(y.sum() for y in outputs if y.requires_grad)
        self.held = sum(y.nbytes for y in outputs)
        del outputs
        self.bytes, self.names = self.live.bytes(), self.marks.alive()

    def backward(self, leaves: Sequence[Tensor], **options: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of the sum of all outputs."""
        return torch.autograd.grad(self.loss, leaves, allow_unused=True, **options)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Leave the garbage collector off: what is measured inside is made inside, so nothing need be collected first."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def kept(function: Callable, inputs: Sequence[Any], marks: Marks | None = None) -> Kept:
    """Run a wrapped function with the collector off and return what its graph keeps without the outputs."""
    with uncollected():
        return Kept(function, inputs, marks)


def retained_bytes(function: Callable, inputs: Sequence[Any]) -> int:
    """Return the bytes made in a wrapped function's forward that are alive while its outputs are."""
    with uncollected(), LiveStorages() as live:
        outputs = function(*inputs)
    count = live.bytes()
    del outputs
    return count


class ComputeOps(TorchDispatchMode):
    """Counts aten ops that compute something: no views, no empty tensors."""

    FREE = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"})

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not func.is_view and name not in self.FREE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class PeakBytes(LiveStorages):
    """Watches what `LiveStorages` does, and how many bytes of it were alive at once after any op."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, self.bytes())
        return out


def floating_leaves(inputs: Sequence[Any]) -> list[Tensor]:
    """Return the inputs that require a gradient."""
    return [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]


def backward_ops(function: Callable, inputs: Sequence[Any], leaves: Sequence[Tensor] = ()) -> Counter[str]:
    """Return the computing ops that run in the backward of a function, its replay included.

    Forward runs under the mode too: some of torch's functions take other ways where a mode sees them.
    """
    torch.manual_seed(3)
    with ComputeOps() as ops:
        outputs = [y for y in tensors_in([function(*inputs)]) if y.requires_grad]
        weights = [torch.ones_like(y) for y in outputs]
        ops.counts.clear()
        torch.autograd.grad(outputs, [*floating_leaves(inputs), *leaves], weights, allow_unused=True)
    return ops.counts


def replayed_ops(
    function: Callable, wrap: Callable, inputs: Sequence[Any], leaves: Sequence[Tensor] = ()
) -> dict[str, int]:
    """Return the computing ops that a region's backward runs beyond those of the same code without a region."""
    extra = backward_ops(wrap(function), inputs, leaves)
    extra.subtract(backward_ops(function, inputs, leaves))
    assert min(extra.values(), default=0) >= 0, extra
    return dict(+extra)


def peak_bytes(function: Callable, inputs: Sequence[Any], leaves: Sequence[Tensor] = ()) -> int:
    """Return the most bytes, made by ops of a forward and its backward, that were alive at once."""
    torch.manual_seed(3)
    with uncollected(), PeakBytes() as peak:
        outputs = function(*inputs)
        torch.autograd.grad(outputs.sum(), [*floating_leaves(inputs), *leaves], allow_unused=True)
    return peak.peak


class TransformerBlock(nn.Module):
    """Pre-norm attention and a four times wider MLP, as in `benchmarks/workloads.py`."""

    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.sdpa = F.scaled_dot_product_attention
        self.linear = lambda name, layer, x: layer(x)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.linear("proj", self.proj, self.attention(self.attention_norm(x)))
        return x + self.linear("fc2", self.fc2, F.gelu(self.linear("fc1", self.fc1, self.mlp_norm(x))))

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.linear("qkv", self.qkv, x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = self.sdpa(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, width)

    def keeping(self, what: str) -> TransformerBlock:
        """Make native regions of the attention or of all matmuls, and return the block."""
        if what == "attention":
            self.sdpa = functools.partial(keep, "attention", F.scaled_dot_product_attention)
        else:
            self.linear = keep
        return self


ATTENTION = [aten._scaled_dot_product_flash_attention_for_cpu.default]
MATMULS = [aten.addmm.default]
