"""Offloading: residents, slots and inputs of a region that leave the device.

In: a tensor that the region would keep. Kept: a view of a parcel in its place. Out: the tensor, brought back when
backward or replay needs it.

It takes the way of saved-tensor hooks around a region: what is kept is packed, and unpacked with each read. Where
there are such hooks, they decide, and nothing is offloaded: an enclosing region recomputes what this one would send.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal
from weakref import ref

import torch

from torch_remat._compat import SavedTensorHooks, without_dispatch_modes
from torch_remat.dispatch.manifest import Manifest, route_of
from torch_remat.dispatch.observe import tell_offloaded
from torch_remat.dispatch.parcel import Parcel, may_travel
from torch_remat.dispatch.port import Batch, port_of
from torch_remat.offload.placement import Placement
from torch_remat.offload.protocol import Offloader, OffloadInfo

if TYPE_CHECKING:
    from torch_remat.dispatch.holder import OpHolder
    from torch_remat.dispatch.region import Region

# What `remat.offload_to` has chosen for the regions that are called inside.
chosen: ContextVar[Offloader | None] = ContextVar("torch_remat_offloader", default=None)


class Offloaded:
    """What stands in for one tensor that is away: a view of a parcel.

    Attributes:
        parcel: The parcel; the last of its views releases it.
        info: What the tensor is called here.
        placement: How the tensor lay in its storage.
    """

    __slots__ = ("_manifest", "_place", "info", "parcel", "placement")

    def __init__(self, parcel: Parcel, tensor: torch.Tensor, info: OffloadInfo, manifest: Manifest) -> None:
        self.parcel = parcel
        self.info = info
        self.placement = Placement.of(tensor)
        self._manifest = manifest
        parcels = manifest.inputs if info.kind == "input" else manifest.residuals
        self._place = len(parcels)
        parcels.append(ref(parcel))

    def another(self, tensor: torch.Tensor, op: str | None, name: str) -> Offloaded | None:
        """Return what stands, in a slot, for another view of the same storage; None if it must travel by itself."""
        parcel = self.parcel
        if not (may_travel(tensor) and parcel.is_unchanged(Placement.of(tensor))):
            return None
        tell_offloaded(tensor, parcel)
        return Offloaded(
            parcel, tensor, OffloadInfo(self.info.region, op or None, name, "input", parcel.trip.bytes), self._manifest
        )

    def load(self) -> torch.Tensor:
        """Return the tensor, with the version that it had.

        Raises:
            MutationError: It was changed in place after its offload began.
            OffloadError: It could not be brought back.
        """
        parcel = self.parcel
        with torch.no_grad(), without_dispatch_modes():
            flat, missing = parcel.take(self.info)
            self._manifest.route.reached(self._manifest, self.info.kind, self._place, parcel, missing)
            return self.placement.rebuilt_on(flat, parcel.span.start)


load = Offloaded.load
"""The unpack function of what is offloaded."""


class Offloading:
    """What one region has away.

    Args:
        region: The region.

    Attributes:
        manifests: What it sent, by the id of the offloader; the parcels in it keep those alive.
    """

    __slots__ = ("_batch", "_parameters", "manifests")

    def __init__(self, region: Region) -> None:
        self.manifests: dict[int, Manifest] = {}
        self._batch: Batch | None = None
        # A detached alias of a parameter does not look like one.
        self._parameters: set[int] = set()
        self.know_parameters(region.parameters)
        if region.inputs is not None:
            self.know_parameters(region.inputs.parameters())

    def know_parameters(self, values: Iterable[Any]) -> None:
        """Let the memory of those values that are parameters stay where it is."""
        for value in values:
            if type(value) is torch.nn.Parameter:
                self._parameters.add(value.untyped_storage()._cdata)

    def send(
        self,
        region: Region,
        tensor: torch.Tensor,
        op: str | None,
        name: str,
        kind: Literal["residual", "input"],
        together: object = None,
    ) -> Offloaded | None:
        """Send a tensor away; None if it stays.

        Args:
            region: The region.
            tensor: The tensor.
            op: The op that needs it.
            name: What it is called.
            kind: What it is needed for.
            together: Equal for those that are sent in one `Batch`; None for what is sent by itself.
        """
        if not may_travel(tensor) or tensor.untyped_storage()._cdata in self._parameters:
            return None
        offloader = region.options.offloader or chosen.get()
        if offloader is None:
            from torch_remat.offload.cpu import default_offloader  # few offload

            offloader = default_offloader()
        port = port_of(offloader)
        op = op or None  # of what a policy keeps, it is empty
        batch = self._batch
        if together is None:
            batch = None
        elif batch is None or batch.key != together:
            batch = self._batch = Batch(together)
        parcel = port.send(offloader, tensor, (region.name, op, name, kind), batch)
        if parcel is None:
            return None
        tell_offloaded(tensor, parcel)
        manifest = self.manifests.get(id(offloader))
        if manifest is None:
            manifest = self.manifests[id(offloader)] = Manifest(route_of(offloader, port))
        return Offloaded(parcel, tensor, OffloadInfo(region.name, op, name, kind, parcel.trip.bytes), manifest)

    def offloaded_bytes(self) -> int:
        """Return the bytes that the region has away now."""
        return sum(manifest.offloaded_bytes() for manifest in self.manifests.values())


def offload_resident(region: Region, holder: OpHolder, tensor: torch.Tensor, together: object = None) -> bool:
    """Send what a holder would keep; False if it stays.

    Args:
        region: The region.
        holder: The holder.
        tensor: What it would keep.
        together: Tells the `Batch`; without it that is what autograd saves of the op, all at once.
    """
    inputs = region.inputs
    if inputs is not None and inputs.holds(tensor if tensor._base is None else tensor._base):
        return False  # its memory stays with the inputs
    away = _of(region).send(region, tensor, holder.op, holder.tensor_name, "residual", together or holder.op)
    if away is None:
        return False
    holder.packed, holder.unpack = away, load
    return True


def slot_hooks(region: Region, op: str | None, name: str, tensor: torch.Tensor) -> SavedTensorHooks | None:
    """Send what a slot would keep; return the hooks by which the slot keeps it, None if it stays."""
    away = _of(region).send(region, tensor, op, name, "input")
    return None if away is None else ((lambda _: away), load)


def know_parameters(region: Region, args: Iterable[Any]) -> None:
    """Let the memory of an op's parameters stay where it is, also if the op saves a detached alias."""
    _of(region).know_parameters(args)


def offload_inputs(region: Region, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Send those of a region's inputs that travel."""
    assert region.inputs is not None
    offloading, together = _of(region), object()

    def send(tensor: torch.Tensor, place: str) -> Offloaded | None:
        return offloading.send(region, tensor, None, place, "input", together)

    region.inputs.give_away(args, kwargs, send)


def _of(region: Region) -> Offloading:
    if region.offloading is None:
        region.offloading = Offloading(region)
    return region.offloading
