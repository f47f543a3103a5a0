"""A native region while forward runs, of either kind: one whose ops are watched, or one call that is skipped whole.

In: what the function returns. Kept, until forward ends: aliases of it. Out: slots on the tape for what replay reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from torch_remat._compat import sequence_number
from torch_remat.dispatch.placeholder import new_tuple
from torch_remat.dispatch.record import NativeRecord, Record, WholeCallRecord

if TYPE_CHECKING:
    from torch_remat.dispatch.forward_op import Body
    from torch_remat.dispatch.forward_ops import ForwardOps
    from torch_remat.dispatch.holder import Anchor, Holder


class Returned(NamedTuple):
    """A returned tensor that was born inside, until forward ends and tells whether replay reads it."""

    place: int
    key: int
    tensor: torch.Tensor
    version: int
    node: torch.autograd.graph.Node | None
    output: int

    @classmethod
    def of(cls, place: int, key: int, leaf: torch.Tensor) -> Returned:
        """Describe a returned tensor."""
        made: Returned = new_tuple(cls, (place, key, leaf, leaf._version, leaf.grad_fn, leaf.output_nr))
        return made


class Native(ABC):
    """A native region with policy SAVE, while forward runs.

    Args:
        ops: The ops of the region around it.

    Attributes:
        record: Its record.
        first_number: The sequence number of the first autograd node made inside.
        last_number: That of the first one after it.
        returned: The returned tensors that were born inside.
        read: The indices of those that replay reads.
        changes: How many times it has changed a tensor from outside in place, by its storage.
        views: Whether it made nothing but views of its arguments, so that replay runs it again.
        reads_written: Whether it read what it changed outside: then it cannot run again.
        skipped_op: The body of an op with a handle that runs inside; replay does not run it.
    """

    record: NativeRecord | WholeCallRecord
    views = reads_written = False
    changes: Mapping[int, int] = MappingProxyType({})
    skipped_op: Body | None = None

    def __init__(self, ops: ForwardOps) -> None:
        self.returned: list[Returned] = []
        self.read: set[int] = set()
        self.first_number = self.last_number = sequence_number()
        self._ops = ops

    @abstractmethod
    def pack(self, tensor: torch.Tensor) -> Holder | Anchor | None:
        """Return what autograd keeps of a tensor that is saved inside; None for one that replay will have."""

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was born inside, or changed, as far as that is known."""
        return False

    def note_op(self, record: Record, outputs: Sequence[torch.Tensor]) -> None:  # noqa: B027 (most do not care)
        """Note the outputs of an op with a handle that ran inside."""

    def keep(self, stop: int) -> None:
        """At the end of forward: keep the returned tensors that replay reads.

        Args:
            stop: The number of the first autograd node that replay does not come to.
        """
        for index, returned in enumerate(self.returned):
            if index not in self.read and not self.reads_written:
                # Autograd does not show what reads a choice, such as a router's indices; it must not be made again.
                chosen = not (returned.tensor.is_floating_point() or returned.tensor.is_complex())
                if not chosen or self.last_number >= stop:
                    continue
            name = self.record.output_name(returned.place)
            slot = self._ops.departures.slot_for(self.record.name, name, returned.tensor, self.record.policy)
            if returned.tensor._version != returned.version:
                slot.mark_changed()
            self.record.returned[returned.place] = slot
        self.returned = []
