"""What has a name in a region: ops with handles and native regions, in the order in which they began.

Replay must come to the same names, with the same decisions, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_remat.policies.decision import CheckpointPolicy

if TYPE_CHECKING:
    from torch.multiprocessing.reductions import StorageWeakRef

    from torch_remat.dispatch.ambient import RngState
    from torch_remat.dispatch.log.slot import Slot
    from torch_remat.dispatch.views import Elided
    from torch_remat.offload.transfer import Placement

NO_SLOTS: Mapping[int, Any] = MappingProxyType({})


class Record:
    """One named op of a region.

    Attributes:
        name: The op's name, with its scopes.
        policy: Its policy.
        as_tuple: Whether it returned a tuple.
        slots: The inputs that replay would not have, by place; of a saved op the outputs that replay must have.
        elided_outputs: Saved tensors of SAVE ops that replay takes from this op's outputs.
        elided_inputs: Saved tensors of this SAVE op that replay takes from its inputs.
        drawn: Where the op left the random generators, if it was saved and drew numbers.
        saved_before: How many tensors the region had saved when the op began.
        again: Why replay makes a saved call again; empty if it leaves it out.
    """

    # Most records have little to note: what stands here is not set for each of them.
    as_tuple = False
    slots: Mapping[int, Slot] = NO_SLOTS
    elided_outputs: list[Elided] | None = None
    elided_inputs: list[Elided] | None = None
    drawn: RngState | None = None
    saved_before = 0
    again = ""

    def __init__(self, name: str, policy: CheckpointPolicy) -> None:
        self.name = name
        self.policy = policy

    def label(self, place: int) -> str:
        """Return the name of an output."""
        return str(max(place, 0)) if self.as_tuple else "out"

    def forget_slots(self) -> None:
        """Drop what only a further replay would need."""
        self.slots = NO_SLOTS
        self.drawn = None


class Left(NamedTuple):
    """What a native region left in a tensor from outside that it changed in place.

    Attributes:
        storage: The tensor's storage.
        slot: What it was afterwards; None if it was changed once more, so that the change runs again.
        place: Which entry changed it first, and which of the tensors that this entry changed it is.
        lies: Where it lies in the storage.
    """

    storage: StorageWeakRef
    slot: Slot | None
    place: tuple[int, int]
    lies: Placement


class Stretch(Record):
    """A native region whose ops are watched, in a region that is not: a group of entries, all saved.

    Attributes:
        start: The place of its first entry in the log.
        end: The place after its last one.
        left: What it left in tensors from outside that it changed in place.
        returned: Those returned tensors that are views of the outputs of ops with handles, by their place among the
            leaves of the result.
        raised: Whether an exception left it.
    """

    start = 0
    end = -1  # until it is over
    left: Sequence[Left] = ()
    returned: Mapping[int, Slot] = NO_SLOTS
    raised = False

    def forget_slots(self) -> None:
        """Drop what only a further replay would need."""
        super().forget_slots()
        self.left = ()
        self.returned = NO_SLOTS
