"""What a block knows of its tensors: storages, the buffers that tensors of the program alias, and handles on them.

    EvictableTensor -> Handle -> Buffer -> Storage (its present version) -> Op -> Storage (what the op read) ...

NOTE [Storages and versions]. A `Storage` is what an op made: it holds the data, or only the op that makes it again.
Its data never changes: a write in place makes another storage, the buffer's next version. All tensors of the program
that share memory share one `Buffer`, so all see the write. Such an alias is a place in the storage (size, stride,
offset), and nothing runs to derive it again. What ops have read they keep as storages, never as tensors of the
program: references go from results to inputs only, but for `Storage.children`, which `Runtime` takes apart when a
storage dies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any, NamedTuple, Protocol

import torch

from torch_remat._compat import set_conj, set_neg

# Where a tensor lies in its storage: size, stride, offset, and the type and lazy bits that it is read with.
Place = tuple[torch.Size, tuple[int, ...], Any, torch.dtype, bool, bool]


class Storage:
    """One version of a piece of memory that the block made; heuristics see it as `heuristics.Storage`.

    Attributes:
        tensor: The data as the op returned it, None while it is evicted.
        op: What makes it (again); None for one that is never evicted, whose `pin` says why.
        size_bytes: Bytes of its memory, whoever views how much of it.
        cost: Seconds (or the unit of the cost function) that its op takes.
        last_access: The runtime's clock at the last op that read or made it.
        children: Storages whose ops read this one.
        users: How many recorded ops read it.
        external: Whether the program can still reach it: some tensor of its own, or one that autograd saved.
        locks: How many running ops need it where it is.
        pooled: Whether it stands in the pool of what can be evicted.
        pin: Why it is never evicted, empty where it can be.
    """

    # The usual, so that a storage sets only what is its own.
    aliases: dict[Place, torch.Tensor] | None = None
    external = True
    locks = 0
    note: Any = None
    pin = ""
    place = -1
    pooled = False
    users = 0

    def __init__(self, tensor: torch.Tensor | None, op: Any, size_bytes: int, cost: float, clock: float) -> None:
        self.tensor = tensor
        self.op = op  # an `_ops.Op` or None
        self.size_bytes = size_bytes
        self.cost = cost
        self.last_access = clock
        self.children: dict[Storage, None] = {}

    @property
    def resident(self) -> bool:
        """Whether it holds data now."""
        return self.tensor is not None

    @property
    def parents(self) -> Collection[Storage]:
        """Storages that its op read."""
        return self.op.inputs if self.op is not None else ()

    def at(self, place: Place) -> torch.Tensor:
        """Return the alias of the data at a place; it must be resident."""
        if self.aliases is None:
            self.aliases = {}
        alias = self.aliases.get(place)
        if alias is None:
            assert self.tensor is not None
            alias = self.aliases[place] = derive(self.tensor, place)
        return alias


class Owner(Protocol):
    """What handles and tensors need of the runtime that made them."""

    dropped: deque[Handle]  # handles whose tensor has died

    def read(self, tensor: torch.Tensor, reader: str, *, share: bool) -> torch.Tensor:
        """Return a plain tensor with the data of one of its tensors; one that is shared stays where it is."""


class Buffer:
    """What tensors of the program that share memory share: the present version, and how many of them there are."""

    __slots__ = ("handles", "owner", "storage")

    def __init__(self, storage: Storage, owner: Owner) -> None:
        self.storage = storage
        self.handles = 0
        self.owner = owner


class Handle:
    """What a tensor of the program holds: its buffer, and its place in there if it is not the whole as it was made.

    When the tensor dies the handle tells the runtime, which frees what nobody can reach before the next op.
    """

    __slots__ = ("buffer", "look", "place", "used")

    def __init__(self, buffer: Buffer, place: Place | None, look: Any) -> None:
        self.buffer = buffer
        self.place = place
        self.look = look  # stands for shape, stride and type in the key of an op
        self.used = False  # whether an op has read the tensor, so that autograd's graph may know it
        buffer.handles += 1

    def __del__(self) -> None:
        self.buffer.owner.dropped.append(self)


class Alias(NamedTuple):
    """A place in a storage, as an argument of a recorded op."""

    storage: Storage
    place: Place


def place_of(tensor: torch.Tensor) -> Place:
    """Return where a tensor lies in its storage."""
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def derive(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """Return a tensor that lies at a place in the memory of another one."""
    shape, stride, offset, dtype, conj, neg = place
    made = torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage(), offset, shape, stride)
    if conj:
        set_conj(made, True)
    if neg:
        set_neg(made, True)
    return made


def copy_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that lies in a copy of the whole memory as this one does in the original."""
    copied = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        tensor.untyped_storage().clone(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    if tensor.is_conj():
        set_conj(copied, True)
    if tensor.is_neg():
        set_neg(copied, True)
    return copied
