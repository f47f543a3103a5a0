"""What tensors from outside were before a region with a policy changed them, for ops that read them before.

In: each op of forward that is about to write. Kept: a copy of the storage of a tensor from outside, if an op has read
it that may run again in replay; past the end of forward, if it does. Out: in replay, the op's argument as it was.

The whole storage is copied: an op may have read any part of it. Only what is read before it is written in one region
costs this; a buffer that is only written, or read after, costs nothing.

An inner region's replay reads for itself: what one has read counts only if the same one writes it, under a policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torch_remat._compat import without_dispatch_modes
from torch_remat.dispatch.calls import key_of
from torch_remat.dispatch.placeholder import Geometry, Placeholder, geometry_of
from torch_remat.dispatch.policy_call import ONE, VIEW, PolicyCall
from torch_remat.dispatch.same_storage import in_same_storage
from torch_remat.policies.decision import CheckpointPolicy

if TYPE_CHECKING:
    from torch_remat.dispatch.departures import Departures
    from torch_remat.dispatch.record import Slot
    from torch_remat.dispatch.storages import Storages


_PLAIN = object()  # an inner region without a policy


class Earlier:
    """The copies of one forward.

    Args:
        storages: The storages of the forward.
        calls: Its calls, as they come.
    """

    def __init__(self, storages: Storages, calls: Sequence[PolicyCall]) -> None:
        self._storages = storages
        self._calls = calls
        self._seen = 0  # how many calls are among the readers
        # By the storage from outside that it read: each call since the last change, which of its tensors it was, and
        # the inner region in which it ran.
        self._readers: dict[int, list[tuple[PolicyCall, int, object]]] = {}
        self._inner: list[object] = [None]  # the inner regions that run
        self._marks: list[tuple[int, object]] = []  # from which call on which of them runs
        self._reading: object = None  # that of the last reader
        self._copies: list[tuple[torch.Tensor, list[tuple[PolicyCall, int]]]] = []

    def enter(self, has_policy: bool) -> None:
        """Note that an inner region begins."""
        self._inner.append(object() if has_policy else _PLAIN)
        self._marks.append((len(self._calls), self._inner[-1]))

    def leave(self) -> None:
        """Note that it has ended."""
        self._inner.pop()
        self._marks.append((len(self._calls), self._inner[-1]))

    def note_writes(self, written: Sequence[torch.Tensor]) -> None:
        """Copy what an op is about to write, where that comes from outside and was read."""
        outside = [tensor for tensor in written if self._storages.is_foreign(key_of(tensor))]
        if not outside:
            return
        self._note_readers()
        for tensor in outside:
            read = self._readers.pop(key_of(tensor), ())
            readers = [(call, at) for call, at, inner in read if inner is self._inner[-1] is not _PLAIN]
            if readers and tensor.layout is torch.strided and not isinstance(tensor, Placeholder):
                # A region around this one sees the copy made, so that in its replay, too, it is of what was.
                self._copies.append((_storage_of(tensor).clone(), readers))

    def _note_readers(self) -> None:
        marks = iter([*self._marks, (len(self._calls), None)])
        until, following = next(marks)
        for place in range(self._seen, len(self._calls)):
            while until <= place:
                self._reading = following
                until, following = next(marks)
            call = self._calls[place]
            if call.versions and not (call.kind == VIEW or call.outside or (call.kind == ONE and call.saved)):
                for at, _ in call.versions:
                    self._readers.setdefault(call.reads[at], []).append((call, at, self._reading))
        self._seen, self._reading, self._marks = len(self._calls), self._inner[-1], []

    def keep(self, departures: Departures) -> None:
        """At the end of forward: keep what a call that replay runs will read."""
        for copy, readers in self._copies:
            slot: Slot | None = None
            for call, at in readers:
                if call.run:
                    slot = slot or departures.slot_for(
                        call.native, earlier_label(call, at), copy, CheckpointPolicy.SAVE
                    )
                    call.earlier = {**call.earlier, at: slot}
        self._copies = []

    def undecided(self) -> Iterator[tuple[str, str, torch.Tensor, CheckpointPolicy]]:
        """Yield op, name, tensor and policy of each copy."""
        for copy, readers in self._copies:
            yield readers[0][0].native, earlier_label(*readers[0]), copy, CheckpointPolicy.SAVE


def earlier_label(call: PolicyCall, at: int) -> str:
    """Return the name of what one of a call's tensors was before it was changed."""
    return f"{call.label(0)} input {at}"


def as_it_was(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it was when its storage was copied."""
    with without_dispatch_modes(), torch.no_grad():
        return in_same_storage(copy, geometry_of(tensor), tensor.dtype, tensor.is_conj(), tensor.is_neg())


def with_tensors(
    args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Mapping[int, torch.Tensor]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return arguments with some of the tensors among them replaced, by their places as `tensors_in` counts them."""
    count = -1

    def replaced(value: Any) -> Any:
        nonlocal count
        if isinstance(value, (list, tuple)):
            return [replaced(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        count += 1
        return tensors.get(count, value)

    return [replaced(arg) for arg in args], {name: replaced(value) for name, value in kwargs.items()}


def _storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor's storage."""
    count = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return in_same_storage(tensor.detach(), Geometry(torch.Size((count,)), (1,), 0), tensor.dtype, False, False)
