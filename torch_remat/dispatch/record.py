"""The tape's entry for one op: what replay needs to know of it.

In: the op's name, policy, inputs and outputs, in forward. Kept: slots (inputs that replay would not have), the random
state after a skipped op that drew numbers, and descriptions. Out: inputs and placeholders, in replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch

from torch_remat._compat import SavedTensorHooks, negative_view
from torch_remat.dispatch.placeholder import Geometry, Source, geometry_of, placeholder_at
from torch_remat.dispatch.policy import CheckpointPolicy
from torch_remat.errors import MutationError

if TYPE_CHECKING:
    from torch_remat.dispatch.ambient import RngState
    from torch_remat.dispatch.holder import OpHolder
    from torch_remat.dispatch.region import Region


class Output(NamedTuple):
    """What replay must know of a skipped op's output to stand something in for it."""

    name: str
    geometry: Geometry
    dtype: torch.dtype
    device: torch.device
    differentiable: bool

    def placeholder(self, region: str, op: str) -> torch.Tensor:
        """Return a fresh placeholder for the output."""
        return placeholder_at(self.geometry, self.dtype, self.device, Source(region, op, self.name))


class Slot:
    """A tensor that the tape keeps because replay needs it as an input.

    Like a region's inputs it goes through the saved-tensor hooks around the region.
    """

    __slots__ = ("_kept", "_requires_grad", "_unpack", "_version")

    def __init__(self, tensor: torch.Tensor, hooks: SavedTensorHooks | None) -> None:
        self._requires_grad = tensor.requires_grad
        self._version = tensor._version
        self._unpack: Callable[[Any], torch.Tensor] | None = None
        if hooks is None:
            self._kept: Any = tensor.detach()
        else:
            pack, self._unpack = hooks
            with torch.no_grad():
                self._kept = pack(tensor)

    def load(self, region: Region, op: str, place: int) -> torch.Tensor:
        """Return the tensor for one replay.

        Raises:
            MutationError: It was changed in place since forward.
        """
        kept: torch.Tensor = self._kept
        if self._unpack is not None:
            with torch.no_grad():
                kept = self._unpack(kept)
        elif kept._version != self._version:
            raise MutationError(
                "this input was changed in place after it was kept for replay",
                region=region.name,
                op=op,
                tensor=f"input {place}",
                remedy="Use the out-of-place form of the op that changes it, or change it after backward.",
            )
        return kept.detach().requires_grad_(self._requires_grad)


class Elided(NamedTuple):
    """A saved tensor that is not kept, since replay makes it, or what it is a view of, again.

    Attributes:
        holder: The holder that waits for it.
        place: Which output of its producer, or which input of its op, it is or is a view of.
        source_offset: That tensor's storage offset in forward, in bytes.
        geometry: Where the saved tensor lies in the same storage.
        dtype: Its dtype; a view may have another than what it is a view of.
        conjugated: Whether it is a lazy conjugate.
        negated: Whether it is a lazy negative.
    """

    holder: ref[OpHolder]
    place: int
    source_offset: int
    geometry: Geometry
    dtype: torch.dtype
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, holder: OpHolder, place: int, source_offset: int) -> Elided:
        """Describe a saved tensor."""
        geometry = geometry_of(tensor)
        return cls(ref(holder), place, source_offset, geometry, tensor.dtype, tensor.is_conj(), tensor.is_neg())

    def value(self, source: torch.Tensor) -> torch.Tensor:
        """Return the saved tensor, from replay's counterpart of what it is a view of."""
        base = source.detach()
        if base.is_conj():
            base = base.conj()
        if base.is_neg():
            base = negative_view(base)
        if base.dtype != self.dtype:
            count = max(1, self.dtype.itemsize // base.dtype.itemsize)
            base = base.as_strided((count,), (1,), 0).view(self.dtype)
        shape, stride, offset = self.geometry
        moved = offset_in_bytes(source) - self.source_offset
        value = base.as_strided(shape, stride, offset + moved // self.dtype.itemsize)
        if self.conjugated:
            value = value.conj()
        return negative_view(value) if self.negated else value


def offset_in_bytes(tensor: torch.Tensor) -> int:
    """Return where a tensor's first element lies in its storage."""
    return int(tensor.storage_offset()) * tensor.dtype.itemsize


class Record:
    """The tape's entry for one op.

    Attributes:
        name: The op's name, with its scopes.
        policy: Its policy.
        outputs: Its outputs, in order.
        as_tuple: Whether it returned a tuple.
        slots: The inputs that replay would not have, by place.
        elided_outputs: Saved tensors of SAVE ops that replay takes from this op's outputs.
        elided_inputs: Saved tensors of this SAVE op that replay takes from its inputs.
        drawn: Where the op left the random generators, if it was saved and drew numbers.
    """

    __slots__ = ("as_tuple", "drawn", "elided_inputs", "elided_outputs", "name", "outputs", "policy", "slots")

    def __init__(self, name: str, policy: CheckpointPolicy) -> None:
        self.name = name
        self.policy = policy
        self.outputs: Sequence[Output] = ()
        self.as_tuple = False
        self.slots: dict[int, Slot] = {}
        self.elided_outputs: list[Elided] = []
        self.elided_inputs: list[Elided] = []
        self.drawn: RngState | None = None

    def forget_slots(self) -> None:
        """Drop what only a further replay would need."""
        self.slots = {}
        self.drawn = None
