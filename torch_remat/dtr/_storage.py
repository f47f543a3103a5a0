"""What a block knows of its tensors: storages, the buffers that tensors of the program alias, and handles on them.

    EvictableTensor -> Handle -> Buffer -> Version (the present one) -> Op -> Version (what the op read) ...

NOTE [Storages and versions]. A `Version` is what an op made: it holds the data, or only the op that makes it again.
Its data never changes: an in-place modification makes another one, the buffer's next version. All tensors of a program
that share memory share one `Buffer`, so all see the write. Such an alias is a place in the storage (size, stride,
offset), and nothing runs to derive it again. What ops have read they keep as storages, never as tensors of the
program: references go from results to inputs only, but for `Storage.children`, which the memory takes apart when
it removes a storage.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Protocol

import torch

from torch_remat._compat import set_conj, set_neg
from torch_remat.dtr.heuristics import Storage

# The place of a tensor in its storage: size, stride, offset, and the type and lazy bits that it is read with.
Place = tuple[torch.Size, tuple[int, ...], Any, torch.dtype, bool, bool]


class Version(Storage):
    """One version of a piece of memory that the block made; its `names` is 1 or 0.

    Attributes:
        tensor: The data as the op returned it, None while it is evicted.
    """

    def __init__(self, tensor: torch.Tensor | None, size_bytes: int, cost: float, clock: float, pin: str = "") -> None:
        self.size_bytes = size_bytes
        self.cost = cost
        self.last_access = clock
        self.children: dict[Version, None] = {}
        self.tensor = tensor
        self.resident = tensor is not None
        if pin:
            self.pin = pin

    def data(self) -> torch.Tensor:
        """Return the data; it must be resident."""
        assert self.tensor is not None
        return self.tensor

    def fill(self, data: torch.Tensor) -> None:
        """Hold data."""
        self.tensor, self.resident = data, True

    def drop(self) -> None:
        """Hold no data."""
        self.tensor, self.resident = None, False


class Owner(Protocol):
    """What handles and tensors need of the runtime that made them."""

    dropped: deque[Handle]  # handles whose tensor has died

    def read(self, tensor: torch.Tensor, reader: str, *, share: bool) -> torch.Tensor:
        """Return a plain tensor with the data of one of its tensors; one that is shared stays where it is."""


class Buffer:
    """What tensors of the program that share memory share: the present version, and how many of them there are."""

    __slots__ = ("handles", "owner", "storage")

    def __init__(self, storage: Version, owner: Owner) -> None:
        self.storage = storage
        self.handles = 0
        self.owner = owner


class Handle:
    """What a tensor of the program holds: its buffer, and its place in there if it is not the whole as it was made.

    When the tensor dies the handle notifies the runtime, which frees what nobody can reach before the next op.
    """

    __slots__ = ("buffer", "look", "place", "used")

    def __init__(self, buffer: Buffer, place: Place | None, look: Any) -> None:
        self.buffer = buffer
        self.place = place
        self.look = look  # stands for shape, stride and type in the key of an op
        self.used = False  # whether an op has read the tensor, so that autograd's graph may know it
        buffer.handles += 1

    def move(self, like: torch.Tensor, look: Any) -> None:
        """Let the tensor lie as another one does, which looks so."""
        self.place, self.look = place_of(like), look

    def __del__(self) -> None:
        self.buffer.owner.dropped.append(self)


class Alias(NamedTuple):
    """A place in a storage, as an argument of a recorded op."""

    storage: Version
    place: Place


def place_of(tensor: torch.Tensor) -> Place:
    """Return the place of a tensor in its storage."""
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def derive(tensor: torch.Tensor, place: Place, memory: torch.UntypedStorage | None = None) -> torch.Tensor:
    """Return a tensor at a place in the memory of another one, or in other memory."""
    shape, stride, offset, dtype, conj, neg = place
    memory = tensor.untyped_storage() if memory is None else memory
    made = torch.empty(0, dtype=dtype, device=tensor.device).set_(memory, offset, shape, stride)
    if conj:
        set_conj(made, True)
    if neg:
        set_neg(made, True)
    return made


def copy_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the place in a copy of the whole memory that this one has in the original."""
    return derive(tensor, place_of(tensor), tensor.untyped_storage().clone())
