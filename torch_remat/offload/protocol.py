"""What an offloader is: the contract between the runtime and code that stores tensors elsewhere."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from torch_remat.errors import qualified_name

Kind = Literal["residual", "input"]


class OffloadInfo(NamedTuple):
    """What an offloader is told about a tensor, for its own decisions and for messages.

    If several places need the same memory, it travels once, under the name of the first of them.

    Attributes:
        region: Name of the region.
        op: Name of the op, or None for an input of the region and for what a policy keeps.
        tensor: Name of the tensor: that of a saved tensor, ``"out"``, ``"args[0]"``.
        kind: ``"residual"`` if a backward needs it, ``"input"`` if replay does.
        bytes: How many bytes travel.

    Example:
        >>> import torch_remat as remat
        >>> print(remat.offload.OffloadInfo("block", "attention", "q", "residual", 4096).name)
        block::attention.q
    """

    region: str
    op: str | None
    tensor: str
    kind: Kind
    bytes: int

    @property
    def name(self) -> str:
        """``region::op.tensor``, as messages say it."""
        return qualified_name(self.region, self.op, self.tensor)


@runtime_checkable
class Offloader(Protocol):
    """Takes tensors away in forward and brings them back in backward. Any object with these four methods is one.

    The life of a ticket: one `offload`; then any number of `prefetch` and `onload`, in any order, perhaps none; at last
    exactly one `release`. For one ticket no two of them run at once. For different tickets anything may run at once, on
    different threads, so state that tickets share needs a lock.

    What travels is one-dimensional, contiguous, detached and strided: the runtime takes storages apart and rebuilds
    views, lazy conjugates and version counters itself. Parameters, tensors on the meta device and tensor subclasses
    never travel, and neither does anything inside a region under saved-tensor hooks (another
    region's, ``save_on_cpu``): those hooks decide there.

    The optional attribute ``prefetch_bytes`` bounds how many bytes the runtime asks for ahead (256 MiB without it; one
    tensor is always asked for; 0 or less means never).

    Memory reports ask two optional methods, on any thread, which must not wait. ``still_here(ticket)`` returns the
    tensor that `offload` was given as long as the offloader keeps it, else None. ``stays(ticket)`` returns whether a
    tensor that was taken could not leave after all, and is kept until `release`.

    `remat.testing.check_offloader` checks an implementation against all of this.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> class Halves:  # keeps half the bytes, where they are; bits are lost, so gradients are approximate
        ...     def offload(self, tensor, info):
        ...         return tensor.to(torch.bfloat16) if tensor.dtype is torch.float32 else None
        ...
        ...     def onload(self, ticket):
        ...         return ticket.float()
        ...
        ...     prefetch = release = lambda self, ticket: None
        >>> block = remat.checkpoint(offloader=Halves(), offload_inputs=True)(torch.nn.Linear(8, 8))
    """

    def offload(self, tensor: torch.Tensor, info: OffloadInfo) -> Any | None:
        """Begin to take a tensor away, and return a ticket for it; None leaves the tensor where it is.

        Called in forward, on the thread that runs the region, with the stream current that made the tensor: a copy on
        another stream must wait for that one. The tensor shares its memory with the user's. Keep a reference until the
        copy is done, and not longer. Should the user change it meanwhile, backward raises `MutationError`.

        May raise any ``Exception``: the tensor then stays where it is, and one warning says so.
        """

    def prefetch(self, ticket: Any) -> None:
        """Begin to bring a tensor back: `onload` will probably come soon.

        Called in backward, on the thread that runs it, in the order in which backward will reach the tensors, and
        not for more than ``prefetch_bytes`` at a time. It should not block. What it raises is ignored, as `onload`
        will raise it.
        """

    def onload(self, ticket: Any) -> torch.Tensor:
        """Return the tensor: same length, dtype and device, contiguous, without a graph.

        Called in backward, on the thread that runs it, with the stream current on which the tensor is used: it must be
        ready there. Called again after ``retain_graph=True``. The result belongs to the caller, which may change it in
        place, so it must share memory neither with what is stored nor with an earlier result. The one exception is the
        very tensor that `offload` was given, which may be returned as long as it is still there.

        May raise: an `OffloadError` passes as it is, any other ``Exception`` becomes the cause of one.
        """

    def release(self, ticket: Any) -> None:
        """Forget a tensor: it was read for the last time, or the graph that needed it is gone.

        Called on any thread, also from inside a garbage collection, which may interrupt the offloader's own methods. So
        it must not wait for a lock that they hold: put the ticket on a ``collections.deque`` and look at that later.
        It must not raise.
        """


# What `offload_to` has chosen for the regions that are called inside.
chosen: ContextVar[Offloader | None] = ContextVar("torch_remat_offloader", default=None)
