"""What outlives a region and may change: buffers, tensors of closures and globals.

In: the places that the region's function reaches. Kept: their versions, copies of small buffers that forward changed,
and which calls changed what. Out: in a replay small buffers as forward found them, all of it afterwards as it was, and
the tensors that the replay must not read.

NOTE [ Outside ]
A tensor counts as changed if its version counter moved in forward or if its place was bound to another tensor; a small
buffer of a module in training also if its values differ, since batch norms and ``.data`` move no counter.
1. A buffer of at most 64 KiB that only recomputed code changed is as forward found it while the replay runs, and
   afterwards as it was. So is a place that was only bound to another tensor.
2. What only skipped calls changed is not changed again. It is *unread* until the replay has passed the last of them.
3. A larger buffer, or a tensor that is not a buffer, that recomputed code changed, and any tensor that both changed, is
   copied for the replay, put back afterwards, and unread throughout.
4. Any other tensor that is not as the region's forward left it when the replay begins (another region, another call of
   the same module, or the user changed it) is unread throughout.
Reading an unread tensor ends the replay with an error. Under a policy the log knows what its ops wrote, and which ops
read it before; writes are not repeated, unless an op that runs again has read a small buffer before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from torch_remat._compat import BATCH_NORM, NORM, is_refused, set_version, without_modes_for
from torch_remat.dispatch.check.unread import Unreadable
from torch_remat.dispatch.log.meta import key_of, keys_of
from torch_remat.dispatch.log.slot import UNCOUNTED, version_of
from torch_remat.dispatch.reach import Place
from torch_remat.errors import MutationError, RematError, at_user_line

COPIED_BYTES = 1 << 16
"""Up to this size a buffer is copied before forward, since only the end of forward shows whether it changed."""


class State(NamedTuple):
    """A place at one time.

    Attributes:
        place: The place.
        tensor: The tensor that was there.
        version: Its version counter.
        copy: Its values; None if they were not copied.
    """

    place: Place
    tensor: Tensor | None
    version: int
    copy: Tensor | None


class Noted:
    """One place, from the region's start on.

    Attributes:
        start: The place when forward began; past the end of forward only where the replay starts from it.
        is_trained: Whether it is a small buffer of a module in training, whose values are compared too.
        names: The skipped calls that changed it.
        skipped: By how much skipped calls moved the version counter; None if none of them changed it.
        last: How many names had begun when the last of these calls was over; infinite if replay never passes it.
        after: Its values after that call, if no version counter told that it changed them.
        left: The tensor and its version when forward ended.
        shape: Its shape then.
        is_changed: Whether forward changed it.
        is_bound: Whether a skipped call bound the place to another tensor.
        is_put_back: Whether the replay starts from its state at the start of forward.
        is_copied: Whether the replay may change it, so that its values are put back.
    """

    __slots__ = (
        "after",
        "is_bound",
        "is_changed",
        "is_copied",
        "is_put_back",
        "is_trained",
        "last",
        "left",
        "names",
        "place",
        "shape",
        "skipped",
        "start",
    )

    def __init__(self, start: State, is_trained: bool = False) -> None:
        self.place = start.place
        self.start: State | None = start
        self.is_trained = is_trained
        self.names: list[str] = []
        self.skipped: int | None = None
        self.last = 0.0
        self.after: Tensor | None = None
        self.left: tuple[ref[Tensor] | None, int] = (None, 0)
        self.shape: torch.Size | None = None
        self.is_bound = self.is_changed = self.is_put_back = self.is_copied = False

    def now(self, with_values: bool) -> State:
        """Return the state of the place now."""
        tensor = self.place.held()
        if not isinstance(tensor, Tensor):
            return State(self.place, None, 0, None)
        return State(self.place, tensor, version_of(tensor), _copy(tensor) if with_values else None)

    def note_skipped(self, before: State, last: int, name: str) -> bool:
        """Note what a call that replay skips has changed, given the state before it; return whether it has."""
        now = self.now(False)
        is_same = now.tensor is before.tensor
        by_value = is_same and before.copy is not None and now.tensor is not None and not _same(now.tensor, before.copy)
        if is_same and now.version == before.version and not by_value:
            return False
        self.names.append(name)
        self.is_bound = self.is_bound or not is_same
        self.skipped = (self.skipped or 0) + (now.version - before.version if is_same else 0)
        self.last = max(self.last, last)
        if by_value and now.tensor is not None and before.copy is not None:
            earlier = self.after if self.after is not None or self.start is None else self.start.copy
            if earlier is None or not _same(before.copy, earlier):
                self.last = inf  # recomputed code has changed it too
            self.after = _copy(now.tensor)
        return True

    def runs_again(self) -> None:
        """Note that replay runs the call after all, which alone has changed it."""
        self.skipped, self.after, self.last, self.is_bound = None, None, 0.0, False

    def classify(self, log_knows: bool, has_policy: bool) -> None:
        """Note how forward leaves the place, and by whom it was changed; see NOTE [ Outside ].

        Args:
            log_knows: Whether ops that are watched have written the tensor.
            has_policy: Whether all ops are watched.
        """
        assert self.start is not None
        _, tensor, version, copy = self.start
        now = self.now(False)
        is_bound = now.tensor is not tensor
        moved = 0 if tensor is None else version_of(tensor) - version
        by_value = self.is_trained and not moved and tensor is not None and copy is not None and not _same(tensor, copy)
        self.is_changed = is_bound or bool(moved) or by_value
        self.is_put_back = self.is_copied = False
        if by_value and self.after is not None and tensor is not None and not _same(tensor, self.after):
            self.last = inf
        if log_knows and (has_policy or not moved) and self.skipped is None and not is_bound:
            self.is_changed = False  # the log knows what reads it too late
        elif self.is_changed and self.skipped is None:
            is_only_bound = is_bound and not moved
            self.is_put_back = not (has_policy and by_value) and (copy is not None or tensor is None or is_only_bound)
            self.is_copied, self.last = not is_only_bound, inf
        elif self.is_changed and (self.last == inf or not (is_bound or moved == self.skipped)):
            self.is_copied, self.last = True, inf
        self.left, self.shape = (None, 0), None
        if now.tensor is not None:
            self.left, self.shape = (ref(now.tensor), now.version), now.tensor.shape

    def has_moved(self) -> bool:
        """Whether another tensor is there since forward ended, or its version counter moved."""
        known, version = self.left
        now = self.now(False)
        return now.tensor is not (None if known is None else known()) or now.version != version

    def is_as_left(self) -> bool:
        """Whether the place is as forward left it."""
        tensor = self.place.held()
        if self.has_moved():
            return False
        return self.after is None or not isinstance(tensor, Tensor) or _same(tensor, self.after)

    def unread_until(self) -> float:
        """Return how many names must have begun in a replay before it may read what is there."""
        if not self.is_changed:
            return 0 if self.is_as_left() else inf
        return self.last if self.is_as_left() else inf


class Outside:
    """The places that one region reaches.

    Args:
        places: The places.
        has_policy: Whether a policy watches the region's ops.
    """

    __slots__ = ("_has_policy", "_lazy", "_noted")

    def __init__(self, places: Sequence[Place] = (), has_policy: bool = False) -> None:
        self._has_policy = has_policy
        self._noted: list[Noted] = []
        self._lazy: list[Place] = []
        for place in places:
            tensor, module = place.tensor, place.module
            if tensor is None:
                if has_policy:  # by which replay must make it again, too
                    self._noted.append(Noted(State(place, None, 0, None)))
            elif module is None:
                if not (is_refused(tensor) or tensor.is_inference()):
                    self._noted.append(Noted(State(place, tensor, tensor._version, None)))
            elif is_lazy(tensor):  # until the region initializes it
                self._lazy.append(place)
            else:
                is_small = not tensor.is_sparse and tensor.nbytes <= COPIED_BYTES
                may_change = module.training or not (has_policy or isinstance(module, BATCH_NORM))
                copy = _copy(tensor) if is_small and may_change else None
                is_trained = is_small and module.training
                self._noted.append(Noted(State(place, tensor, version_of(tensor), copy), is_trained))

    def buffers(self) -> set[int]:
        """Return the storages of the buffers of modules that the region reaches."""
        buffers = [noted.place.tensor for noted in self._noted if noted.place.module is not None]
        return {key for buffer in buffers if buffer is not None for key in keys_of(buffer)}

    def has_buffer(self, key: int) -> bool:
        """Whether a storage belongs to such a buffer."""
        return key in self.buffers()

    def states(self) -> list[State]:
        """Return the state of each place, before a call that replay skips."""
        return [noted.now(noted.is_trained) for noted in self._noted]

    def note_skipped(self, before: Sequence[State], last: int, name: str) -> tuple[bool, list[str]]:
        """Note what such a call has changed, once it is over.

        Args:
            before: What `states` returned when the call began.
            last: How many names had begun in the region.
            name: That of the call.

        Returns:
            Whether it changed any, and the names of the changed places that replay could not put back.
        """
        changed = [
            noted for noted, state in zip(self._noted, before, strict=False) if noted.note_skipped(state, last, name)
        ]
        return bool(changed), [
            noted.place.name
            for noted in changed
            if noted.place.module is None or noted.start is None or noted.start.copy is None
        ]

    def has_changed(self, tensor: Tensor) -> bool:
        """Whether forward has changed a tensor, as a place that the region reaches has it."""
        return any(noted.is_changed and noted.place.tensor is tensor for noted in self._noted)

    def runs_again(self, name: str, log_knows: Callable[[Tensor], bool]) -> bool:
        """Note that replay runs a call after all: it counts as recomputed code. Return whether it changed anything."""
        changed = False
        for noted in self._noted:
            if name in noted.names:
                changed = True
                tensor = noted.place.tensor
                is_known = tensor is not None and log_knows(tensor)
                if noted.names == [name] and not is_known:
                    noted.runs_again()
                else:  # others have changed it too, which replay does not repeat
                    noted.last = inf
                noted.classify(is_known, self._has_policy)
        return changed

    def holds(self, key: int) -> bool:
        """Whether a storage belongs to a tensor that the region reaches."""
        return any(noted.place.tensor is not None and key in keys_of(noted.place.tensor) for noted in self._noted)

    def finish(self, log_knows: Callable[[Tensor], bool] | None) -> None:
        """Note what forward has changed.

        Args:
            log_knows: Takes a tensor: whether the log knows of changes of it; None if there is no log.
        """
        for noted in self._noted:
            tensor = noted.place.tensor
            noted.classify(log_knows is not None and tensor is not None and log_knows(tensor), self._has_policy)
        for place in self._lazy:
            made = place.held()
            if isinstance(made, Tensor) and not is_lazy(made):  # there is no earlier state to start from
                noted = Noted(State(place, made, version_of(made), None))
                noted.is_changed, noted.is_copied, noted.last = True, True, inf
                noted.left = ref(made), version_of(made)
                self._noted.append(noted)

    def let_go(self) -> None:
        """Let go of what no replay starts from."""
        for noted in self._noted:
            noted.place = noted.place._replace(tensor=None)
            if not noted.is_put_back:
                noted.start = None

    def repeatable(self) -> set[int]:
        """Return the storages of the buffers that a replay may start from as forward found them, if ops write them."""
        return {
            key
            for noted in self._noted
            if noted.start is not None and noted.start.copy is not None and noted.skipped is None
            if noted.start.tensor is not None and not isinstance(noted.place.module, NORM)
            for key in keys_of(noted.start.tensor)
        }

    def repeat(self, keys: set[int]) -> None:
        """Let replay start from some of them as forward found them: it runs all ops again that write them."""
        for noted in self._noted:
            if noted.start is not None and noted.start.tensor is not None and key_of(noted.start.tensor) in keys:
                noted.is_changed = noted.is_put_back = noted.is_copied = True

    def take_over(self, inner: Outside) -> None:
        """Note what an inner region has changed that this one does not reach itself."""
        known = {(id(noted.place.holder), noted.place.key) for noted in self._noted}
        for noted in inner._noted:
            if noted.is_changed and noted.start is not None:
                place = noted.place
                if (id(place.holder), place.key) not in known:
                    self._noted.append(Noted(noted.start, noted.is_trained))

    def changes(self) -> list[str]:
        """Return, for an error in replay, which places are not as forward left them."""
        found = []
        for noted in self._noted:
            (known, _), shape, now = noted.left, noted.shape, noted.place.held()
            if known is None or shape is None or noted.is_put_back:
                continue
            name, before = noted.place.name, f"had shape {tuple(shape)} in forward"
            if not isinstance(now, Tensor):
                found.append(f"{name} {before} and is gone or no tensor now.")
            elif now.shape != shape:
                found.append(f"{name} {before} and has {tuple(now.shape)} now.")
            elif now is not known():
                found.append(f"{name} is another tensor than in forward.")
        return found

    def go_back(self, region: str) -> tuple[list[State], list[Unreadable]]:
        """Let the places be as a replay needs them.

        Returns:
            What they were, for `put_back`; and what the replay must not read.
        """
        before: list[State] = []
        unread: list[Unreadable] = []
        for noted in self._noted:
            if noted.is_put_back:
                before.append(noted.now(noted.is_copied))
                assert noted.start is not None
                started = noted.start.tensor
                if started is not None and noted.start.copy is None and started._version != noted.start.version:
                    unread.append(Unreadable(started, inf, True, True, partial(_changed, region, noted.place, False)))
            elif until := noted.unread_until():
                state = noted.now(noted.is_copied)
                if noted.is_changed:  # a native region's Python binds its place anew
                    before.append(state)
                if state.tensor is not None:
                    error = partial(_changed, region, noted.place, noted.is_changed)
                    may_be_overwritten, has_moved = noted.skipped is None, noted.has_moved()
                    unread.append(Unreadable(state.tensor, until, may_be_overwritten, has_moved, error))
        put_back([noted.start for noted in self._noted if noted.is_put_back and noted.start is not None])
        return before, unread


def put_back(states: Sequence[State]) -> None:
    """Let places be as they were, as far as that is known."""
    for place, tensor, version, copy in states:
        if place.held() is not tensor:
            place.put(tensor)
        if copy is None or tensor is None:
            continue
        with without_modes_for(tensor), torch.no_grad():
            if tensor.shape != copy.shape:
                tensor.data = copy
            elif not _same(tensor, copy):  # what overlaps itself cannot be written
                tensor.data.copy_(copy)
        if version != UNCOUNTED:
            set_version(tensor, version)


def _copy(tensor: Tensor) -> Tensor:
    with without_modes_for(tensor), torch.no_grad():
        return tensor.detach().clone()


def _same(tensor: Tensor, copy: Tensor) -> bool:
    if type(tensor) is not Tensor or tensor.is_meta or tensor.layout is not torch.strided:
        return False  # nobody knows
    with without_modes_for(tensor):
        return tensor.shape == copy.shape and torch.equal(tensor, copy)


def _changed(region: str, place: Place, by_region: bool, tensor: Tensor) -> RematError:
    when = "the region modified it in forward" if by_region else "it was modified after the region's forward"
    shape = tuple(tensor.shape)
    return MutationError(
        f"replay reads {place.name}{at_user_line()}, a tensor of shape {shape} created outside the region, but {when}, "
        "so replay may read a different value than forward did",
        region=region,
        tensor=place.name,
        remedy="Read it in the same call that modifies it (remat.native_save_region, or a saved op), pass a clone "
        "made before the region or the tensor itself as an argument, or modify it after backward.",
    )
