"""What has a name in a region: ops with handles and native regions, in the order in which they began.

Replay must come to the same names, with the same decisions, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torch_remat.dispatch.placeholder import Geometry
from torch_remat.policies.decision import CheckpointPolicy

if TYPE_CHECKING:
    from torch.multiprocessing.reductions import StorageWeakRef

    from torch_remat.dispatch.ambient import RngState
    from torch_remat.dispatch.log.slot import Slot
    from torch_remat.dispatch.views import Elided

_NO_SLOTS: Mapping[int, Any] = MappingProxyType({})


class Output(NamedTuple):
    """What replay must know of a skipped op's output to stand something in for it."""

    name: str
    geometry: Geometry
    dtype: torch.dtype
    device: torch.device
    differentiable: bool


class Record:
    """One named op of a region.

    Attributes:
        name: The op's name, with its scopes.
        policy: Its policy.
        outputs: Its outputs, in order.
        as_tuple: Whether it returned a tuple.
        slots: The inputs that replay would not have, by place.
        elided_outputs: Saved tensors of SAVE ops that replay takes from this op's outputs.
        elided_inputs: Saved tensors of this SAVE op that replay takes from its inputs.
        drawn: Where the op left the random generators, if it was saved and drew numbers.
        saved_before: How many tensors the region had saved when the op began.
    """

    __slots__ = (
        "as_tuple",
        "drawn",
        "elided_inputs",
        "elided_outputs",
        "name",
        "outputs",
        "policy",
        "saved_before",
        "slots",
    )

    def __init__(self, name: str, policy: CheckpointPolicy) -> None:
        self.name = name
        self.policy = policy
        self.outputs: Sequence[Output] = ()
        self.as_tuple = False
        self.slots: Mapping[int, Slot] = _NO_SLOTS  # and no list of its own for what most ops have none of
        self.elided_outputs: list[Elided] | tuple[()] = ()
        self.elided_inputs: list[Elided] | tuple[()] = ()
        self.drawn: RngState | None = None
        self.saved_before = 0

    def elide_output(self, elided: Elided) -> None:
        """Note a saved tensor that replay takes from this op's outputs."""
        if self.elided_outputs:
            self.elided_outputs.append(elided)
        else:
            self.elided_outputs = [elided]

    def elide_input(self, elided: Elided) -> None:
        """Note a saved tensor of this op that replay takes from its inputs."""
        if self.elided_inputs:
            self.elided_inputs.append(elided)
        else:
            self.elided_inputs = [elided]

    def forget_slots(self) -> None:
        """Drop what only a further replay would need."""
        self.slots = _NO_SLOTS
        self.drawn = None


class Left(NamedTuple):
    """What a native region left in a tensor from outside that it changed in place.

    Attributes:
        storage: The tensor's storage.
        slot: What it was afterwards.
        place: Which entry changed it first, and which of the tensors that this entry changed it is.
    """

    storage: StorageWeakRef
    slot: Slot
    place: tuple[int, int]


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

    __slots__ = ("end", "left", "raised", "returned", "start")

    def __init__(self, name: str, policy: CheckpointPolicy) -> None:
        super().__init__(name, policy)
        self.start, self.end = 0, -1  # the latter until it is over
        self.left: list[Left] = []
        self.returned: dict[int, Slot] = {}
        self.raised = False

    def forget_slots(self) -> None:
        """Drop what only a further replay would need."""
        super().forget_slots()
        self.left = []
        self.returned = {}


class WholeCall(Record):
    """One call of a function of torch's own, which replay leaves out whole.

    Attributes:
        function: The function.
        layout: Shape and strides of the tensors among its arguments.
        leaves: The leaves of its result: for each tensor whether it needs a gradient, other values as they are.
        template: Its result with numbers in place of the leaves; None if it is one tensor or value.
        raised: The kind and arguments of the exception that it raised.
        entry: Its entry in the log; None if all its results are views of its arguments, which cost nothing, so that
            replay makes the call again.
    """

    __slots__ = ("entry", "function", "layout", "leaves", "raised", "template")

    def __init__(self, name: str, policy: CheckpointPolicy, function: Any) -> None:
        super().__init__(name, policy)
        self.function = function
        self.layout: Sequence[Any] = ()
        self.leaves: list[Any] = []
        self.template: Any = None
        self.raised: tuple[type[Exception], tuple[Any, ...]] | None = None
        self.entry: Any = None

    def output_name(self, place: int) -> str:
        """Return the name of a result."""
        return "out" if self.template is None else str(place)

    def forget_slots(self) -> None:
        """Drop what only a further replay would need."""
        super().forget_slots()
        self.entry = None
