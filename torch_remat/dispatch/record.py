"""The tape's entry for one op: what replay needs to know of it.

In: the op's name, policy, inputs and outputs, in forward. Kept: slots (inputs that replay would not have), the random
state after a skipped op that drew numbers, and descriptions. Out: inputs and placeholders, in replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torch_remat._compat import SavedTensorHooks
from torch_remat.dispatch.holder import CHANGED
from torch_remat.dispatch.placeholder import Geometry
from torch_remat.errors import MutationError
from torch_remat.policies.decision import CheckpointPolicy

if TYPE_CHECKING:
    from torch.multiprocessing.reductions import StorageWeakRef

    from torch_remat.dispatch.ambient import RngState
    from torch_remat.dispatch.calls import NativeCall
    from torch_remat.dispatch.elided import Elided
    from torch_remat.dispatch.region.region import Region


class Output(NamedTuple):
    """What replay must know of a skipped op's output to stand something in for it."""

    name: str
    geometry: Geometry
    dtype: torch.dtype
    device: torch.device
    differentiable: bool


def _counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares the version counter of another, but not its data, which may leave."""
    counter = tensor.detach()
    counter.data = _NOTHING
    return counter


_NOTHING = torch.empty(0)
# The version of a tensor made in inference mode: nothing tells of changes in place, so that a slot keeps a copy.
_UNCOUNTED = -2


class Slot:
    """A tensor that the tape keeps because replay needs it as an input.

    Like a region's inputs it goes through the saved-tensor hooks around the region.

    Attributes:
        kept: The tensor, or what the hooks around the region made of it.
        device: Where the tensor was when it was kept.
        source: Name and place of the skipped op's output that it is, or is a view of; None where its owner knows.
    """

    __slots__ = ("_aliases", "_requires_grad", "_unpack", "_version", "device", "kept", "source")

    def __init__(
        self,
        tensor: torch.Tensor,
        hooks: SavedTensorHooks | None,
        requires_grad: bool | None = None,
        unchecked: bool = False,
        source: tuple[str, int] | None = None,
    ) -> None:
        self.source = source
        self.device = tensor.device
        self._requires_grad = tensor.requires_grad if requires_grad is None else requires_grad
        self._aliases: Sequence[tuple[torch.Tensor, int]] = ()
        self._unpack: Callable[[Any], torch.Tensor] | None = None
        if tensor.is_inference():
            self._version = _UNCOUNTED
            self.kept: Any = tensor.clone()
            return
        self._version = tensor._version
        if hooks is None:
            self.kept = tensor.detach()
            if unchecked:  # changes in place are allowed, so that they must not be counted
                self.kept = self.kept.data
                self._version = self.kept._version
        else:
            pack, self._unpack = hooks
            with torch.no_grad():
                self.kept = pack(tensor)

    @classmethod
    def of_alias(cls, alias: torch.Tensor) -> Slot:
        """Return the slot for an alias without a history, which nobody else has."""
        slot = cls.__new__(cls)
        slot.source = slot._unpack = None
        slot.device = alias.device
        slot._requires_grad = False
        slot._version = alias._version
        slot._aliases = ()
        slot.kept = alias
        return slot

    def watch(self, aliases: Sequence[torch.Tensor]) -> None:
        """Look also at tensors that share the storage and count changes for themselves; see `Storages`."""
        self._aliases = [(_counter_of(alias), alias._version) for alias in aliases]

    def mark_changed(self) -> None:
        """Note that the tensor was changed in place after it should have been kept: no load accepts it."""
        self._version = CHANGED
        self._unpack = None

    def _is_changed(self) -> bool:
        if self._version < 0:
            return self._version == CHANGED
        if self._aliases and any(alias._version != at for alias, at in self._aliases):
            return True
        changed: bool = self._unpack is None and self.kept._version != self._version
        return changed  # what hooks have kept, they check themselves

    def unchanged(self) -> torch.Tensor | None:
        """Return the tensor without a history if it is simply there; else None: `load` has more to do."""
        kept: torch.Tensor = self.kept
        return None if self._unpack is not None or self._is_changed() else kept.detach()

    def load(self, region: Region, op: str, name: str) -> torch.Tensor:
        """Return the tensor for one replay; ``name`` is what an error calls it.

        Raises:
            MutationError: It was changed in place since forward.
        """
        kept: torch.Tensor = self.kept
        usual = self._unpack is None and self._version >= 0 and not self._aliases
        if usual and kept._version == self._version:
            return kept.detach().requires_grad_() if self._requires_grad else kept.detach()
        if self._is_changed():
            raise MutationError(
                "this tensor was changed in place after it was kept for replay",
                region=region.name,
                op=op,
                tensor=name,
                remedy="Use the out-of-place form of the op that changes it, change it after backward, or let the "
                "region recompute it.",
            )
        if self._unpack is not None:
            with torch.no_grad():
                kept = self._unpack(kept)
        return kept.detach().requires_grad_(self._requires_grad)


_NO_SLOTS: Mapping[int, Slot] = MappingProxyType({})


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


class WholeCallRecord(Record):
    """The tape's entry for a native region that is one call of a function of torch's own.

    Attributes:
        function: The function.
        layout: Shape and strides of the tensors among its arguments.
        metas: Its results: a `Meta` and whether it needs a gradient for each tensor, other values as they are.
        template: Its result with numbers in place of the leaves; None if it is one tensor or value.
        returned: The tensors that it returned and replay reads, by their place among the leaves of the result.
        raised: The kind and arguments of the exception that it raised.
        views: Whether all its results are views of its arguments, which cost nothing: then replay runs it again.
        warned: Whether the user was told that replay runs it after all.
    """

    __slots__ = ("function", "layout", "metas", "raised", "returned", "template", "views", "warned")

    def __init__(self, name: str, policy: CheckpointPolicy, function: Callable[..., Any]) -> None:
        super().__init__(name, policy)
        self.function = function
        self.layout: Sequence[Any] = ()
        self.metas: list[Any] = []
        self.template: Any = None
        self.returned: dict[int, Slot] = {}
        self.raised: tuple[type[Exception], tuple[Any, ...]] | None = None
        self.views = self.warned = False

    def output_name(self, place: int) -> str:
        """Return the name of a result."""
        return "out" if self.template is None else str(place)

    def forget_slots(self) -> None:
        """Drop what only a further replay would need."""
        super().forget_slots()
        self.returned = {}


class Written(NamedTuple):
    """A tensor from outside that a native region changed in place.

    Attributes:
        storage: Its storage.
        slot: What it was afterwards.
        place: Which op changed it first, and which of the tensors that this op changed it is.
    """

    storage: StorageWeakRef
    slot: Slot
    place: tuple[int, int]


class NativeRecord(Record):
    """The tape's entry for a native region that replay skips.

    Attributes:
        calls: The aten ops that ran inside, in order.
        returned: The tensors that it returned and replay reads, by their place among the leaves of the result.
        written: The tensors from outside that it changed in place.
        raised: Whether an exception left it.
        once: Whether it cannot run again, since it has read what it changed outside.
        single: Whether it returned one tensor and nothing else.
        warned: Whether the user was told that replay runs it after all.
    """

    __slots__ = ("calls", "once", "raised", "returned", "single", "warned", "written")

    def __init__(self, name: str, policy: CheckpointPolicy) -> None:
        super().__init__(name, policy)
        self.calls: list[NativeCall] = []
        self.returned: dict[int, Slot] = {}
        self.written: list[Written] = []
        self.raised = self.once = self.single = False
        self.warned = False

    def output_name(self, place: int) -> str:
        """Return the name of a result."""
        return "out" if self.single else str(place)

    def forget_slots(self) -> None:
        """Drop what only a further replay would need."""
        super().forget_slots()
        self.returned = {}
        self.written = []
