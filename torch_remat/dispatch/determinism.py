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
from typing import Any

import torch

from torch_remat._compat import sequence_number
from torch_remat.dispatch.holder import Holder

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
    """

    __slots__ = ("_number", "_pending", "_value_of")

    def __init__(self, value_of: ValueOf) -> None:
        self._value_of = value_of
        self._pending: list[tuple[Holder, torch.Tensor]] = []
        self._number = -1

    def add(self, holder: Holder, tensor: torch.Tensor, receive: Callable[[Holder, Any], None]) -> None:
        """Queue a tensor, after giving the values of the ops before it to ``receive(holder, value)``."""
        number = sequence_number()
        if number != self._number:
            self.flush(receive)
            self._number = number
        self._pending.append((holder, tensor))

    def flush(self, receive: Callable[[Holder, Any], None]) -> None:
        """Give the values of all queued tensors to ``receive(holder, value)``."""
        pending, self._pending = self._pending, []
        with torch.no_grad():
            for holder, tensor in pending:
                receive(holder, self._value_of(tensor))
