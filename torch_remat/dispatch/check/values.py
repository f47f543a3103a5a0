"""Values of saved tensors, compared between forward and replay with ``determinism_check="bitwise"``.

In: the saved tensors at the end of a phase, when each op has filled what it saved. Kept: a checksum of each. Out: an
error at the first difference.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable

import torch

from torch_remat._compat import has_memory
from torch_remat.dispatch.check.compare import described
from torch_remat.dispatch.holder import Holder
from torch_remat.dispatch.keys import parts_of
from torch_remat.dispatch.mode import unseen
from torch_remat.dispatch.placeholder import Placeholder
from torch_remat.dispatch.region.region import SAME_OPS, Region
from torch_remat.errors import RematError, UsageError


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
            remedy="Define __tensor_flatten__ on the class.",
        )
    data = (ctypes.c_char * content.nbytes).from_address(content.data_ptr()) if content.nbytes else b""
    return hashlib.blake2b(data, digest_size=16).digest()


def note_checksums(known: Iterable[Holder]) -> None:
    """Note the checksums of saved tensors at the end of forward."""
    for holder, value in _checksums(known):
        holder.fingerprint = value


def first_difference(region: Region, known: Iterable[Holder]) -> RematError | None:
    """Return, at the end of replay, the error about the first checksum that is not forward's, if there is one."""
    for holder, value in _checksums(known):
        if getattr(holder, "fingerprint", value) != value:
            what = f"the saved {described(holder)} has other values in replay than in forward"
            return region.differs_at(holder, f"{what}; this is the first difference", SAME_OPS + _NOT_DETERMINISTIC)
    return None


def _checksums(known: Iterable[Holder]) -> list[tuple[Holder, bytes]]:
    """Return holders with the checksums of their values.

    Those that were modified in place since they were saved have none: backward refuses them anyway. Nor has a
    placeholder, in a region inside one that is replayed, and skips what made it.
    """
    found = []
    with torch.no_grad(), unseen():
        for holder in known:
            tensor = holder.value
            if tensor is None or type(tensor) is Placeholder or holder.metadata[0] != tensor._version:
                continue
            try:
                found.append((holder, checksum(tensor)))
            except UsageError as error:
                error.region = error.region or holder.region.name
                raise
    return found


_NOT_DETERMINISTIC = (
    " Nondeterministic ops on this device differ too (torch.use_deterministic_algorithms(True) reports them)."
)
