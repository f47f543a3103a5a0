"""Reads, in replay, of tensors that a native region of the same forward has changed since.

In: the ops of a replay around its native regions. Kept: nothing past the replay. Out: an error where what such a read
gave would fill a holder.

NOTE [ Stale reads ]
A buffer that a native region updates is updated once, in forward. An op that read it before, outside of native regions,
runs again in replay and reads what came later. A plain region sees no ops in forward, so that its replay looks: from
its start to the last native region that changes something outside, it watches its ops, and follows what was made of a
tensor that is not yet what it was. To read it harms nothing (a log, say); to fill a holder from it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_remat._compat import Handler, keep_from_compiler, without_dispatch_modes
from torch_remat.dispatch.log.entry import still_there, written_arguments
from torch_remat.dispatch.log.meta import key_of, tensors_in
from torch_remat.dispatch.log.record import Stretch
from torch_remat.dispatch.log.schema import effects_of
from torch_remat.dispatch.placeholder import Packed, geometry_of
from torch_remat.errors import MutationError

_PackHook = Callable[[torch.Tensor], "torch.Tensor | Packed"]


class StaleReads:
    """What one replay has read too late.

    Attributes:
        run: What runs an op.
    """

    def __init__(self, replay: Any, changed: Mapping[int, list[tuple[int, torch.Tensor | None]]]) -> None:
        self.run: Handler = _run
        self._replay = replay
        self._changed = changed  # by storage: which records of the tape changed it, and where in it, if that is known
        self._last = max(at for places in changed.values() for at, _ in places)
        self._made: dict[int, tuple[str, int]] = {}  # by storage: what op read which record's tensor too late

    @keep_from_compiler
    def watch(self, mode: Any, op: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an op of the replay, and note what it makes of a stale tensor."""
        ops = self._replay.ops
        if not self._made and (ops is None or ops.begun > self._last):
            self._replay.show_ops_to(self.run)
            return self.run(mode, op, types, args, kwargs)
        effects = effects_of(op)
        if effects.ignored or effects.viewed is not None or effects.reshapes or effects.factory:
            return self.run(mode, op, types, args, kwargs)
        why = next(filter(None, (self._reason(tensor, op) for tensor in tensors_in(args, kwargs))), None)
        result = self.run(mode, op, types, args, kwargs)
        results = list(tensors_in([result], {}))
        if why is None:
            if self._made and not effects.written:
                for tensor in results:
                    self._made.pop(key_of(tensor), None)
            return result
        if not results and result is not None:
            self._fail(why)  # a number, by which code may branch
        for tensor in (*results, *written_arguments(effects, args, kwargs)):
            self._made[key_of(tensor)] = why
        return result

    def _reason(self, tensor: torch.Tensor, op: Any) -> tuple[str, int] | None:
        key = key_of(tensor)
        places = self._changed.get(key)
        if places is not None and (ops := self._replay.ops) is not None:
            begun = ops.begun
            at = next((at for at, place in places if at >= begun and (place is None or _overlap(place, tensor))), None)
            if at is not None:
                return str(op), at
        return self._made.get(key)

    def guarded(self, pack: _PackHook) -> _PackHook:
        """Return a pack hook of the replay that fills nothing from a stale read."""

        def check(tensor: torch.Tensor) -> torch.Tensor | Packed:
            if self._made and self._replay.fills_next():
                self.check(tensor)
            return pack(tensor)

        return check

    def check(self, tensor: torch.Tensor) -> None:
        """End the replay with an error if a tensor, which would fill a holder, comes of a stale read."""
        why = self._made.get(key_of(tensor))
        if why is not None:
            self._fail(why)

    def _fail(self, why: tuple[str, int]) -> None:
        region = self._replay.region
        self._replay.fail(
            MutationError(
                f"{why[0]} reads, in the region and before this native region, a tensor from outside that this native "
                "region changes in place; replay does not undo the change, so that the op reads another value than "
                "in forward",
                region=region.name,
                op=list(region.tape.records)[why[1]],
                tensor="written",
                remedy="Read it inside a native region, too; or let the op read a clone of it that is made before the "
                "region is called.",
            )
        )


def stale_reads(replay: Any) -> StaleReads | None:
    """Return what watches for stale reads; None where no native region has changed what outlives the forward."""
    changed: dict[int, list[tuple[int, torch.Tensor | None]]] = {}
    for at, record in enumerate(replay.region.tape.records.values()):
        if isinstance(record, Stretch) and record.left:
            for storage, slot, *_ in record.left:
                for key in still_there([storage]):
                    kept = slot.kept if isinstance(slot.kept, torch.Tensor) else None  # hooks made it something else
                    changed.setdefault(key, []).append((at, kept))
    return StaleReads(replay, changed) if changed else None


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage share an element; True where that is not easily told."""
    if one.dtype != other.dtype or one.layout is not torch.strided or key_of(one) != key_of(other):
        return True
    size = one.untyped_storage().nbytes()
    if size in (one.nbytes, other.nbytes):
        return bool(one.numel() and other.numel())
    with without_dispatch_modes(), torch.no_grad():
        written = torch.zeros(size // one.dtype.itemsize, dtype=torch.bool)
        written.as_strided(*geometry_of(one)).fill_(True)
        return bool(written.as_strided(*geometry_of(other)).any())


@keep_from_compiler
def _run(_mode: Any, op: Any, _types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return op(*args, **kwargs)
