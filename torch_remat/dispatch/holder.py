"""What autograd keeps in a node instead of a saved tensor.

In: a tensor that autograd wants to save while a region runs. Kept: nothing but a description of it. Out: the value,
when backward unpacks it.

NOTE [ Life of a holder ]
1. Autograd's node owns the holder, the holder owns its region; the region's tape knows the holder weakly.
2. While forward runs it has its value. Then it is *empty* until the replay fills it, unless something keeps it.
   Unpacking an empty holder starts the replay.
3. A filled holder keeps its value until its node lets go of it, so that a node may unpack twice. Where the graph is
   kept (``retain_graph=True``) it releases the value at the first read, so that the memory between two backwards is
   that of after forward; a later read replays again. (Not while another thread replays the region, which counts on
   what it has filled.) Inside a ``GraphExecGroup`` it keeps the value until the group
   is gone, since the group's backwards share one replay.
4. Parameters, other leaves that require a gradient, and views of these exist anyway: the graph owns them. Autograd
   keeps them itself, in an `Anchor`, and replay does not fill them; it only checks that the same one is at the same
   place. Only forward asks what is a leaf, and no input of the region counts as one: in replay all inputs are leaves.
5. Every read compares version counters, as autograd does for tensors that it saves itself.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Protocol
from weakref import ref

import torch
from torch.nn import Parameter

from torch_remat._compat import OF_TRACES, detached, graph_exec_group, graph_is_kept, untraced
from torch_remat.errors import MutationError


class RegionLike(Protocol):
    """What holders ask of their region, whose room is above this one; see `region.region.Region`.

    Attributes:
        finished: Whether forward is over.
        filling: Whether a replay runs.
    """

    finished: bool
    filling: bool

    @property
    def name(self) -> str:
        """The name that messages use."""

    @property
    def inputs(self) -> object | None:
        """The arguments; None once no replay can be needed."""

    def place_of(self, holder: Holder) -> int:
        """Return the place of a live holder on the tape."""

    def note_gradient(self, op: str | None) -> None:
        """Note a gradient that is taken before forward ends."""

    def note_gradient_of(self, holder: OpHolder) -> None:
        """Note one that reads what a call has saved."""

    def refill(self, holder: Holder) -> torch.Tensor:
        """Return the value of an empty holder, by a replay."""


# The version of a tensor that was modified in place after it was saved: no read accepts it.
CHANGED = -1

AUTOCAST_DTYPES = frozenset((torch.bfloat16, torch.float16))


class Holder:
    """The stand-in for one saved tensor of a region; see NOTE [ Life of a holder ].

    It has no ``__init__``: `Recording.pack_hook` makes one for each saved tensor and sets its fields, because a call
    here would be a tenth of what a saved tensor costs.

    Attributes:
        region: The region that refills it.
        value: The saved tensor, without a graph, or None while the holder is empty.
        origin: What replay must find again here: the leaf that the tensor is autocast's copy of; a weak reference to
            another tensor that is older than the region and no input; else None.
        metadata: What `metadata_of` said of the tensor when it was saved.
        layout: The placement of a view in its base; None if it has the base's layout, or is no view.
        producer: The type of the autograd node that made the tensor, or what it is a view of; `NoneType` for inputs and
            leaves.
        plain: The producer, where replay compares metadata, layout and producer and nothing else: an op of the region
            made the tensor, with a gradient, and it is no copy by autocast; or it is an input, or a view of one. Else
            None.
        fingerprint: The checksum that ``determinism_check="bitwise"`` compares; set only there.
    """

    __slots__ = ("__weakref__", "fingerprint", "layout", "metadata", "origin", "plain", "producer", "region", "value")

    region: RegionLike
    value: torch.Tensor | None
    origin: torch.Tensor | ref[torch.Tensor] | None
    metadata: tuple[int, torch.Size, torch.dtype, torch.device]
    layout: Layout | None
    producer: type
    plain: type | None
    fingerprint: bytes

    op: str | None = None
    resident = False

    @property
    def name(self) -> str:
        """The holder's place in the region, as error messages name it."""
        return f"saved tensor {self.region.place_of(self)}"

    def expect_version_of(self, value: torch.Tensor) -> None:
        """Expect the version of a value that counts its changes for itself."""
        if self.metadata[0] != CHANGED:
            self.metadata = (value._version, *self.metadata[1:])


Saver = tuple[str, str]  # the call that saves a tensor, and what it calls it
NOBODY: Saver = ("", "")
# What autograd keeps of a parameter or a view of one: (value, version, region, who saved it).
Anchor = tuple[torch.Tensor, int, RegionLike, Saver]

# (version, shape, dtype, device) of a tensor, in one call. The version counter counts its in-place modifications.
metadata_of: Callable[[torch.Tensor], tuple[int, torch.Size, torch.dtype, torch.device]]
metadata_of = attrgetter("_version", "shape", "dtype", "device")


# The layout of a view in the tensor that it is a view of: strides, offset there, and the strides of that tensor.
Layout = tuple[tuple[int, ...], int, tuple[int, ...]]
# That of a view whose layout replay cannot know.
UNKNOWN_LAYOUT: Layout = ((), -1, ())


def layout_of(tensor: torch.Tensor, owner: torch.Tensor) -> Layout | None:
    """Return the layout of a view in its owner; None where both are equal, or where the owner has no strides."""
    try:
        strides, own = tensor.stride(), owner.stride()
        offset: Any = tensor.storage_offset() - owner.storage_offset()
    except RuntimeError:  # sparse tensors and nested ones have none
        return None
    return None if strides == own and not offset else (strides, offset, own)


def mark_changed(holder: Holder) -> None:
    """Note that the tensor was modified in place after it was saved: no version of it is right now."""
    holder.metadata = (CHANGED, *holder.metadata[1:])


class OpHolder(Holder):
    """The stand-in for one saved tensor of a saved call, or of what a policy keeps.

    It is *resident*, or *waits* for an argument or variable of its call, which replay has.

    Attributes:
        op: The name of the call, or of the op.
        tensor_name: The tensor's name.
        resident: Whether the tensor is kept from the start.
        unpack: What makes the tensor of ``packed``, which stands for it: the hooks around the region, an offloader, or
            the leaf that it is the cast of.
    """

    # No slots, since most are as the class says.
    op: str
    tensor_name = ""
    resident = True
    packed: Any = None
    unpack: Callable[[Any], torch.Tensor] | None = None

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.tensor_name


class ResidentRef(ref[OpHolder]):
    """The place on the tape of a resident that replay saves again; a type of its own, since replay does not fill it."""

    __slots__ = ()

    def value_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what replay's own graph keeps of the tensor that it saves: the resident, if it is there."""
        holder = self()
        if holder is not None and (kept := holder.value) is not None and kept.shape == tensor.shape:
            return kept  # the same values, and no alias to make
        return detached(tensor)


def value_behind(entry: Any) -> torch.Tensor | None:
    """Return the value of the holder behind an entry of the tape, if there is one."""
    holder = entry() if type(entry) is ref else None
    return None if holder is None else holder.value


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an ``nn.Parameter``; the two usual types are told apart without a slow ``isinstance``."""
    kind = type(tensor)
    return kind is not torch.Tensor and (kind is Parameter or isinstance(tensor, Parameter))


def parameter_behind(owner: torch.Tensor) -> torch.Tensor | None:
    """Return the parameter that a tensor is, or the leaf of which it is autocast's copy in a smaller dtype; else None.

    Both phases must find the same one, and only its identity shows that: its values may change in between.
    """
    if is_parameter(owner):
        return owner
    if owner.dtype in AUTOCAST_DTYPES:
        node = owner.grad_fn
        if node is not None and type(node) is CAST:
            leaf: torch.Tensor | None = getattr(node.next_functions[0][0], "variable", None)
            return leaf
    return None


with torch.enable_grad():
    # The type of the node of a cast, such as those that autocast makes of weights.
    CAST = type(torch.zeros((), requires_grad=True, device="cpu").to(torch.float64).grad_fn)


@untraced
def read(packed: Any) -> Any:
    """Unpack hook: return the tensor of a holder or an anchor, replaying its region if it is not there.

    Raises:
        MutationError: The tensor was modified in place after autograd saved it.
        ReleasedError: The region's inputs were freed by an earlier backward.
        UsageError: The gradient is taken before forward ends, and cannot be right; see `Region.note_gradient`.
    """
    if type(packed) is Holder:
        kept = packed.value
        if kept is not None and packed.region.inputs is None and kept._version == packed.metadata[0]:
            return kept
    else:
        if type(packed) is tuple:
            value, version, region, (op, name) = packed
            if value._version != version:
                raise changed_in_place(region, "parameter" if is_parameter(value) else "leaf", value.shape, name, op)
            if not region.finished:
                region.note_gradient(op)
            return value
        if type(packed) in OF_TRACES:
            return packed
        if not packed.region.finished:
            packed.region.note_gradient_of(packed)
        if packed.unpack is not None and packed.value is None:
            with torch.no_grad():
                return packed.unpack(packed.packed)
    region = packed.region
    kept = packed.value
    if not region.finished and type(packed) is Holder:
        region.note_gradient("")
    if kept is None:
        kept = region.refill(packed)
    if kept._version != packed.metadata[0]:
        raise changed_in_place(region, "tensor", kept.shape, packed.name, packed.op)
    if (
        region.finished
        and region.inputs is not None
        and not packed.resident
        and graph_is_kept()
        and not region.filling
        and graph_exec_group() is None
    ):
        packed.value = None
    return kept


def changed_in_place(
    region: RegionLike, kind: str, shape: torch.Size, name: str | None = None, op: str | None = None
) -> MutationError:
    """Return the error about a saved tensor that was modified in place."""
    return MutationError(
        f"a {kind} of shape {tuple(shape)} that backward needs was modified in place after it was saved",
        region=region.name,
        op=op or None,
        tensor=name or kind,
        remedy="Use the out-of-place form of the op that modifies it, or modify it after backward.",
    )
