"""Values of saved tensors, compared between forward and replay.

In: the saved tensors at the end of a phase, when each op has filled what it saved. Kept: one value for each, such as a
checksum. Out: an error at the first difference.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torch_remat._compat import has_memory
from torch_remat.dispatch.check.compare import SAME_OPS, described, differs_at
from torch_remat.dispatch.holder import Holder, RegionLike
from torch_remat.dispatch.keys import parts_of
from torch_remat.dispatch.mode import unseen
from torch_remat.dispatch.placeholder import Placeholder
from torch_remat.errors import RematError, UsageError, shown

ValueOf = Callable[[torch.Tensor], Any]

_NOT_COMPARED = object()


def value_function(check: str | ValueOf) -> ValueOf | None:
    """Return the function whose values are compared, or None if only metadata is, or nothing."""
    if callable(check):
        return check
    return checksum if check == "bitwise" else None


def checksum(tensor: torch.Tensor) -> bytes:
    """Return a 128-bit BLAKE2b digest of a tensor's elements in logical order.

    What has no memory, such as a tensor on the meta device or inside of a transform, has an empty one. So have bytes:
    the workspace of recurrent layers consists of these, and has gaps that nobody has written.

    Raises:
        UsageError: The tensor is of a subclass that has no memory of its own and does not say what it consists of.
    """
    if tensor.dtype is torch.uint8 or not has_memory(tensor):
        return b""
    if type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__"):
        parts = b"".join(map(checksum, parts_of(tensor)))
        return hashlib.blake2b(parts, digest_size=16).digest()
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    content = plain.cpu().contiguous()
    if content.nbytes and not content.data_ptr():
        raise UsageError(
            f'determinism_check="bitwise" cannot read the values of a {type(tensor).__name__}',
            remedy="Define __tensor_flatten__ on the class, or pass a callable (tensor) -> value as determinism_check.",
        )
    data = (ctypes.c_char * content.nbytes).from_address(content.data_ptr()) if content.nbytes else b""
    return hashlib.blake2b(data, digest_size=16).digest()


def take_values(
    value_of: ValueOf, known: Iterable[Holder], compare: Callable[[Holder, Any], None] | None = None
) -> None:
    """Take the values of saved tensors at the end of a phase.

    Those that were modified in place since they were saved have none: backward refuses them anyway. Nor has a
    placeholder, in a region inside one that is replayed, and skips what made it.

    Args:
        value_of: The function whose values are taken.
        known: The holders.
        compare: Is called with each holder and its value; without it the holder keeps the value.
    """
    with torch.no_grad(), unseen():
        for holder in known:
            if (tensor := holder.value) is None:
                continue
            if type(tensor) is Placeholder or holder.metadata[0] != tensor._version:
                continue
            try:
                value = value_of(tensor)
            except UsageError as error:
                error.region = error.region or holder.region.name
                raise
            if compare is None:
                holder.fingerprint = value
            else:
                compare(holder, value)


def difference(region: RegionLike, holder: Holder, value: Any) -> RematError | None:
    """Return the error about a value of replay that does not equal forward's, if it does not."""
    before = getattr(holder, "fingerprint", _NOT_COMPARED)
    if before is _NOT_COMPARED:
        return None
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
            remedy="Return a value that == turns into True or False, such as a number, a tuple of numbers, a tensor.",
        )
    if same:
        return None
    told = "" if isinstance(value, bytes) else f" ({shown(before)} in forward, {shown(value)} in replay)"
    what = f"the saved {described(holder)} has other values in replay than in forward{told}"
    return differs_at(region, holder, f"{what}; this is the first difference", SAME_OPS + _NOT_DETERMINISTIC)


_NOT_DETERMINISTIC = (
    " Nondeterministic ops on this device differ too (torch.use_deterministic_algorithms(True) reports them)."
)
