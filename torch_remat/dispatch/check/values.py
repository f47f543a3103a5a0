"""Values of saved tensors, compared between forward and replay.

In: each saved tensor, right after its holder was made or filled. Kept: one value for each, such as a checksum. Out:
an error at the first difference.

NOTE [ A value is taken after its op ]
Some ops save a buffer before they fill it (``F.rrelu`` its noise). All tensors that one op saves see the same
autograd sequence number, and the next op's see a larger one. So a value is computed when the next op's first tensor
comes, or at the end of the phase.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torch_remat._compat import sequence_number
from torch_remat.dispatch.check.mismatch import other_value
from torch_remat.dispatch.holder import Holder
from torch_remat.errors import RematError, UsageError

if TYPE_CHECKING:
    from torch_remat.dispatch.region.region import Region

ValueOf = Callable[[torch.Tensor], Any]


def value_function(check: str | ValueOf) -> ValueOf | None:
    """Return the function whose values are compared, or None if only metadata is, or nothing."""
    if callable(check):
        return check
    return checksum if check == "bitwise" else None


def checksum(tensor: torch.Tensor) -> bytes:
    """Return a 128-bit BLAKE2b digest of a tensor's elements in logical order."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    content = plain.cpu().contiguous()
    data = (ctypes.c_char * content.nbytes).from_address(content.data_ptr()) if content.nbytes else b""
    return hashlib.blake2b(data, digest_size=16).digest()


class Values:
    """Takes the value of each saved tensor once its op is over; see NOTE [ A value is taken after its op ].

    Args:
        value_of: The function whose values are taken.
        receive: Is called with each holder and its value.
    """

    __slots__ = ("_number", "_pending", "_receive", "_value_of")

    def __init__(self, value_of: ValueOf, receive: Callable[[Holder, Any], None]) -> None:
        self._value_of = value_of
        self._receive = receive
        self._pending: list[tuple[Holder, torch.Tensor]] = []
        self._number = -1

    def add(self, holder: Holder, tensor: torch.Tensor) -> None:
        """Queue a tensor, after taking the values of the ops before it."""
        number = sequence_number()
        if number != self._number:
            self.flush()
            self._number = number
        self._pending.append((holder, tensor))

    def flush(self) -> None:
        """Take the values of all queued tensors.

        Those that were changed in place since they were saved have none: backward refuses them anyway.
        """
        pending, self._pending = self._pending, []
        with torch.no_grad():
            for holder, tensor in pending:
                if holder.metadata[0] == tensor._version:
                    self._receive(holder, self._value_of(tensor))

    def forget(self) -> None:
        """Let go of what is queued; a node of autograd may know these values, through its pack hook."""
        self._pending.clear()


def keep_value(holder: Holder, value: Any) -> None:
    """Note the value that forward took, for replay to compare."""
    holder.fingerprint = value


def difference(region: Region, holder: Holder, value: Any) -> RematError | None:
    """Return the error about a value of replay that does not equal forward's, if it does not."""
    before = holder.fingerprint
    try:
        if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor):
            same = torch.equal(before, value)
        else:
            same = bool(before == value)
    except Exception as error:
        return UsageError(
            f"determinism_check returned {type(before).__name__} in forward and {type(value).__name__} in replay, "
            f"which cannot be compared: {error}",
            region=region.name,
            tensor=holder.name,
            remedy="Return something of which == says True or False, such as a number, a tuple of numbers or a tensor.",
        )
    return None if same else other_value(region, holder, value)
