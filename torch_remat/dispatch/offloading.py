"""Residents, slots and inputs of a region that leave the device.

In: a tensor that the region would keep. Kept: an `Offloaded` in its place. Out: the tensor, brought back when backward
or replay needs it.

It takes the way of saved-tensor hooks around a region: what is kept is packed, and unpacked with each read. Where
there are such hooks, they decide, and nothing is offloaded: an enclosing region recomputes what this one would send.

`sender`, and with it all that moves tensors, is imported when the first tensor is to leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from torch_remat._compat import SavedTensorHooks
from torch_remat.dispatch.observe import tell_offloaded
from torch_remat.dispatch.options import Options

if TYPE_CHECKING:
    from torch_remat.dispatch.sender import Offloaded, Sender


class Holder(Protocol):
    """What offloading needs of an `OpHolder`."""

    op: str
    tensor_name: str
    packed: Any
    unpack: Callable[[Any], torch.Tensor] | None


class Region(Protocol):
    """What offloading needs of a region."""

    options: Options
    inputs: Any
    parameters: Any
    offloading: Sender | None

    @property
    def name(self) -> str:
        """Its name."""
        ...


def load(away: Offloaded) -> torch.Tensor:
    """Unpack function of what is offloaded."""
    return away.load()


def offload_resident(region: Region, holder: Holder, tensor: torch.Tensor, together: object = None) -> bool:
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
    away = _sender_of(region).send(tensor, holder.op, holder.tensor_name, "residual", together or holder.op)
    if away is None:
        return False
    holder.packed, holder.unpack = away, load
    return True


def slot_hooks(region: Region, op: str | None, name: str, tensor: torch.Tensor) -> SavedTensorHooks | None:
    """Send what a slot would keep; return the hooks by which the slot keeps it, None if it stays."""
    away = _sender_of(region).send(tensor, op, name, "input")
    return None if away is None else ((lambda _: away), load)


def know_parameters(region: Region, args: Iterable[Any]) -> None:
    """Let the memory of an op's parameters stay where it is, also if the op saves a detached alias."""
    _sender_of(region).know_parameters(args)


def offload_inputs(region: Region, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Send those of a region's inputs that travel."""
    assert region.inputs is not None
    sender, together = _sender_of(region), object()
    region.inputs.give_away(args, kwargs, lambda tensor, place: sender.send(tensor, None, place, "input", together))


def _sender_of(region: Region) -> Sender:
    if region.offloading is None:
        from torch_remat.dispatch.sender import Sender

        region.offloading = Sender(region.name, region.options.offloader, tell_offloaded)
        region.offloading.know_parameters(region.parameters)
        if region.inputs is not None:
            region.offloading.know_parameters(region.inputs.parameters())
    return region.offloading
