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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_remat._compat import DispatchMode, has_memory, sequence_number, storage_key
from torch_remat.dispatch.check.compare import SAME_OPS, described, differs_at
from torch_remat.dispatch.holder import Holder, RegionLike
from torch_remat.dispatch.log.meta import parts_of
from torch_remat.dispatch.log.schema import WRITES_WITHOUT_SAYING, effects_of
from torch_remat.dispatch.mode import unseen
from torch_remat.dispatch.placeholder import Placeholder
from torch_remat.errors import Carried, RematError, UsageError, shown

ValueOf = Callable[[torch.Tensor], Any]

_NOT_COMPARED = object()


def value_function(check: str | ValueOf) -> ValueOf | None:
    """Return the function whose values are compared, or None if only metadata is, or nothing."""
    if callable(check):
        return check
    return checksum if check == "bitwise" else None


def checksum(tensor: torch.Tensor) -> bytes:
    """Return a 128-bit BLAKE2b digest of a tensor's elements in logical order.

    What has no memory, such as a tensor on the meta device or inside of a transform, has an empty one.

    Raises:
        Carried: A `UsageError`: a subclass has no memory of its own and does not say what it consists of.
    """
    if not has_memory(tensor):
        return b""
    if type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__"):
        parts = b"".join(map(checksum, parts_of(tensor)))
        return hashlib.blake2b(parts, digest_size=16).digest()
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    content = plain.cpu().contiguous()
    if content.nbytes and not content.data_ptr():
        raise Carried(
            UsageError(
                f'determinism_check="bitwise" cannot read the values of a {type(tensor).__name__}',
                remedy="Define __tensor_flatten__ on the class, or pass a callable (tensor) -> value as "
                "determinism_check.",
            )
        )
    data = (ctypes.c_char * content.nbytes).from_address(content.data_ptr()) if content.nbytes else b""
    return hashlib.blake2b(data, digest_size=16).digest()


class LeftOut(DispatchMode):
    """Excludes from the comparison what is saved and may differ from run to run, while a forward runs.

    The running statistics of batch norms in training: autograd saves them, each run changes them, and backward does not
    read them. In evaluation it does. Instance norms are batch norms too, on copies of the statistics. And the workspace
    of recurrent layers, which has gaps that nobody has written.
    """

    lets_compiled_code_run = True

    def __init__(self, values: Values) -> None:
        super().__init__()
        self._values = values

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op; what a batch norm is about to change is saved, but its value is not taken yet."""
        name = effects_of(op).name
        norm = name.removesuffix("_backward")  # which saves them where its gradient has a graph
        if norm in WRITES_WITHOUT_SAYING and args[5 if norm == name else 7]:  # in training; of some it is epsilon
            self._values.leave_out(args[3:5])
        result = op(*args, **(kwargs or {}))
        workspace = result[3] if name in _RECURRENT else None  # which is None without a gradient, too
        self._values.workspace = None if workspace is None else storage_key(workspace)
        return result


# The fourth of what they return is their workspace.
_RECURRENT = frozenset(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"))


class Values:
    """Takes the value of each saved tensor once its op is over; see NOTE [ A value is taken after its op ].

    Args:
        value_of: The function whose values are taken.
        compare: Is called with each holder and its value; without it the holder keeps the value.

    Attributes:
        workspace: The storage of one that the op before has made; its value is not taken.
    """

    __slots__ = ("_compare", "_number", "_pending", "_value_of", "workspace")

    def __init__(self, value_of: ValueOf, compare: Callable[[Holder, Any], None] | None = None) -> None:
        self._value_of = value_of
        self._compare = compare
        self._pending: list[tuple[Holder, torch.Tensor]] = []
        self._number = -1
        self.workspace: int | None = None

    def add(self, holder: Holder, tensor: torch.Tensor) -> None:
        """Queue a tensor, after taking the values of the ops before it."""
        if self.workspace is not None and type(tensor) is torch.Tensor and storage_key(tensor) == self.workspace:
            holder.fingerprint = _NOT_COMPARED
            return
        if type(tensor) is Placeholder:  # in a region inside one that is replayed, and skips what made it
            holder.fingerprint = _NOT_COMPARED
            return
        number = sequence_number()
        if number != self._number:
            self.flush()
            self._number = number
        self._pending.append((holder, tensor))

    def leave_out(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Do not compare what was queued of these tensors."""
        queued, self._pending = self._pending, []
        for holder, tensor in queued:
            if any(one is tensor for one in tensors):
                holder.fingerprint = _NOT_COMPARED
            else:
                self._pending.append((holder, tensor))

    def flush(self) -> None:
        """Take the values of all queued tensors.

        Those that were modified in place since they were saved have none: backward refuses them anyway.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return
        with torch.no_grad(), unseen():
            for holder, tensor in pending:
                if holder.metadata[0] != tensor._version:
                    continue
                value = self._value_of(tensor)
                if self._compare is None:
                    holder.fingerprint = value
                else:
                    self._compare(holder, value)

    def forget(self) -> None:
        """Let go of what is queued; a node of autograd may know these values, through its pack hook."""
        self._pending.clear()


def difference(region: RegionLike, holder: Holder, value: Any) -> RematError | None:
    """Return the error about a value of replay that does not equal forward's, if it does not."""
    before = holder.fingerprint
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
