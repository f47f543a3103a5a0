"""What outlives a region and may change: buffers, tensors of closures and globals.

In: the places that the region's function reaches. Kept: tensors and versions there, and copies of small buffers that
changed. Out: in a replay the state of forward, afterwards all as it was, and the tensors that the replay must not read.

NOTE [ Outside ]
Which tensor a place is bound to, and the values of a buffer of at most 64 KiB of a module in training, are *state*: if
forward changes them, replay starts from what forward began with, a skipped call leaves there what it left in forward,
and afterwards all is as it was. So are numbers, strings and None among the attributes of a module with such tensors, or
one that may get some: they say how much of a cache is filled. But not where a call changes one that replay skips.
Values are compared too, since batch norms and ``.data`` move no counter.
All else that changed is *unread*:
1. What only skipped calls modified, until the last of them has begun; it is not modified again.
2. What recomputed code modified, throughout; it is copied for the replay, and put back afterwards.
3. What is not as the region's forward left it (another region, another call of the module or the user modified it).
Reading an unread tensor ends the replay with an error. Under a policy the log knows what its ops wrote, and which ops
read it before; these writes are not repeated, but for those of small buffers, which are state here, too. Batch norms'
are not: their ops do not say that they write, so that replay could not tell whether to repeat it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import inf
from operator import is_
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from torch_remat._compat import BATCH_NORM, is_refused, set_version, without_modes_for
from torch_remat.dispatch.keys import UNCOUNTED, keys_of, version_of
from torch_remat.dispatch.reach import Place, Reached
from torch_remat.errors import MutationError, RematError, at_user_line

COPIED_BYTES = 1 << 16
"""Up to this size a buffer is copied before forward, since only the end of forward shows whether it changed."""

Before = tuple[Sequence["State"], Sequence[Any]]  # what a call finds: at the places, and the numbers of modules
NOTHING_BEFORE: Before = ((), ())
MakeErrorOf = Callable[[Tensor], RematError]  # of the tensor that is read
# Storages, as `key_of` names them; how many names must have begun in a replay before they may be read; whether an op
# that overwrites all of one makes it right; whether one is another since forward ended, so that a saved tensor is
# wrong, too; and the error.
Unreadable = tuple[Collection[int], float, bool, bool, MakeErrorOf]


class State(NamedTuple):
    """What was at a place at one time: a tensor or other object, its version counter, its values if they are state."""

    value: object
    version: int
    copy: Tensor | None = None

    @property
    def tensor(self) -> Tensor | None:
        """The value, if it is a tensor."""
        return self.value if isinstance(self.value, Tensor) else None


class Noted:
    """One place, from the region's start on.

    Attributes:
        place: The place.
        is_small: Whether it is of a buffer of a module in training, whose values are state if they are small.
        start: What forward found there; past forward only where the replay starts from it.
        left: What skipped calls left there, of what is state.
        by_calls: By how much skipped calls moved the version counter of what is no state.
        last: How many names had begun when the last of these calls was over.
        until: How many names must have begun before a replay may read the tensor.
        end: The tensor and its version when forward ended.
        shape: Its shape then.
        is_logged: Whether the log of a policy writes what is there, as replay does again, to whatever tensor is there.
    """

    __slots__ = (
        "by_calls",
        "end",
        "is_logged",
        "is_small",
        "last",
        "left",
        "place",
        "shape",
        "start",
        "until",
    )

    def __init__(self, place: Place) -> None:
        self.place = place
        self.is_small = place.module is not None and place.module.training
        self.start: State | None = self.now(self.is_small)
        self.left: Sequence[State] = ()
        self.by_calls, self.last, self.until = 0, 0, 0.0
        self.is_logged = False
        self.end: tuple[ref[Tensor] | None, int] = (None, 0)
        self.shape: torch.Size | None = None

    def now(self, with_values: bool) -> State:
        """Return what is at the place now."""
        tensor = self.place.held()
        if not isinstance(tensor, Tensor):
            return State(tensor, 0)
        if type(tensor) is not Tensor and is_lazy(tensor):  # the region may initialize it
            return State(tensor, UNCOUNTED)
        is_copied = with_values and not tensor.is_sparse and tensor.nbytes <= COPIED_BYTES
        return State(tensor, version_of(tensor), _copy(tensor) if is_copied else None)

    def has_values(self) -> bool:
        """Whether its values are state."""
        return self.start is not None and self.start.copy is not None

    def is_state_of_ops(self) -> bool:
        """Whether its values are state where a policy watches the ops that modify it."""
        return self.has_values() and not isinstance(self.place.module, BATCH_NORM)

    def finish(self, has_policy: bool, is_logged: Callable[[Tensor], bool]) -> None:
        """Note how forward leaves the place, and forget the start of what is no state; see NOTE [ Outside ]."""
        assert self.start is not None
        tensor, version, copy = self.start.tensor, self.start.version, self.start.copy
        now = self.now(False)
        self.end = (None if now.tensor is None else ref(now.tensor)), now.version
        self.shape = None if now.tensor is None else now.tensor.shape
        is_bound, moved = now.value is not self.start.value, 0
        if tensor is not None and not (is_bound and version == UNCOUNTED):
            moved = (version_of(tensor) if is_bound else now.version) - version
        is_written = bool(moved) or not (copy is None or tensor is None or _same(tensor, copy))
        is_state = is_bound or bool(self.left) or (is_written and copy is not None)
        if has_policy and (is_state or moved):
            found = (tensor, now.tensor, *[state.tensor for state in self.left])
            is_known = any(one is not None and is_logged(one) for one in found)
            if is_known and self.is_state_of_ops():
                pass  # replay starts from it
            elif is_known or not (moved or is_bound or self.left):  # by ops, also those of batch norms
                self.is_logged = is_known
                self.until = 0 if is_known and not (is_bound or self.left or self.by_calls) else inf
                is_state, moved = False, 0
        if not is_state:
            self.start, self.left = None, ()
            if moved:
                self.until = self.last if moved == self.by_calls else inf
        self.place = self.place._replace(tensor=None)

    def go_back(self, region: str, before: list[tuple[Place, State]], unread: list[Unreadable]) -> None:
        """Note what the place is now, to be put back after a replay, and what that must not read."""
        now = self.now(False)
        if self.start is not None:
            seen = set()
            for state in (self.start, *self.left):
                tensor, version, copy = state.tensor, state.version, state.copy
                if tensor is None or id(tensor) in seen:
                    continue
                has_moved = copy is None and version_of(tensor) != version
                if has_moved:  # nobody knows what it was
                    error = partial(_changed, region, self.place, False)
                    unread.append((keys_of(tensor), inf, False, True, error))
                if has_moved or copy is not None:
                    seen.add(id(tensor))
                    before.append((self.place, State(tensor, version_of(tensor), _copy(tensor))))
            before.append((self.place, now))
        elif now.tensor is not None:
            known, version = self.end
            is_other = now.tensor is not (None if known is None else known())
            has_moved = is_other or now.version != version
            if self.until == inf or (self.is_logged and is_other):
                before.append((self.place, now._replace(copy=_copy(now.tensor))))
            elif self.until:
                before.append((self.place, now))
            if until := inf if has_moved else self.until:
                error = partial(_changed, region, self.place, bool(self.until))
                unread.append((keys_of(now.tensor), until, not self.by_calls, has_moved, error))


class Outside:
    """The places that one region reaches.

    Args:
        reached: What the region's function reaches.
        has_policy: Whether a policy watches the region's ops.
    """

    __slots__ = ("_effects", "_has_policy", "_noted", "_numbers")

    def __init__(self, reached: Reached, has_policy: bool) -> None:
        self._has_policy = has_policy
        self._numbers = reached.numbers
        self._effects: dict[str, list[tuple[Noted, State]]] = {}  # what each skipped call left
        self._noted = [
            Noted(place)
            for place in reached.places
            if (tensor := place.tensor) is None
            or place.module is not None
            or not (is_refused(tensor) or tensor.is_inference())
        ]

    # Forward.

    def tensors(self) -> list[Tensor | None]:
        """Return the tensors that are there now."""
        return [noted.now(False).tensor for noted in self._noted]

    def holds(self, key: int) -> bool:
        """Whether a storage belongs to a tensor that was there when forward began."""
        return key in _keys(self._noted)

    def buffers(self) -> set[int]:
        """Return the storages of the buffers of modules."""
        return _keys([noted for noted in self._noted if noted.place.module is not None])

    def small(self) -> set[int]:
        """Return the storages of the small buffers, whose values are state."""
        return _keys([noted for noted in self._noted if noted.has_values()])

    def before(self) -> Before:
        """Return what is there before a call that replay skips."""
        return [noted.now(noted.is_small) for noted in self._noted], self._numbers_now()

    def _numbers_now(self) -> list[Any]:
        return [attributes.get(name) for attributes, start in self._numbers for name in start]

    def after(self, before: Before, name: str, number: int) -> tuple[bool, list[str]]:
        """Note what such a call has changed, once it is over.

        Args:
            before: What `before` returned when the call began.
            name: That of the call.
            number: How many names had begun in the region, or under a policy entries of the log.

        Returns:
            Whether it changed any place, and the names of those whose tensor it modified that is no state.
        """
        effects: list[tuple[Noted, State]] = []
        modified = []
        states, numbers = before
        if not all(map(is_, numbers, self._numbers_now())):
            self._numbers = []  # replay has those that the call left
        for noted, earlier in zip(self._noted, states, strict=True):
            now, tensor, copy = noted.now(False), earlier.tensor, earlier.copy
            is_same = now.value is earlier.value and now.version == earlier.version
            if is_same and (copy is None or tensor is None or _same(tensor, copy)):
                continue
            assert noted.start is not None
            is_other = now.tensor is None or now.tensor is not noted.start.tensor
            if copy is not None or is_other:  # also what the region itself has put there
                state = noted.now(noted.is_small)
                if state.tensor is not None and state.tensor.grad_fn is not None:  # its graph may own the region
                    with without_modes_for(state.tensor):
                        state = state._replace(value=state.tensor.detach().requires_grad_())
                effects.append((noted, state))
                noted.left = [*noted.left, state]
            else:
                noted.by_calls += now.version - earlier.version
                noted.last = number
                modified.append(noted.place.name)
        if effects:
            self._effects[name] = effects
        return bool(effects or modified), modified

    def has_changed(self, tensor: Tensor) -> bool:
        """Whether forward has changed a tensor so far, as a place that the region reaches has it."""
        for noted in self._noted:
            now = noted.now(False)
            if now.tensor is tensor and noted.start is not None:
                found, version, copy = noted.start
                if found is not tensor or version != now.version or (copy is not None and not _same(tensor, copy)):
                    return True
        return False

    def changes(self) -> list[str]:
        """Return, for an error in replay, which places are not as forward left them."""
        found = []
        for noted in self._noted:
            (known, _), shape, now = noted.end, noted.shape, noted.place.held()
            if known is None or shape is None or noted.start is not None:
                continue
            name, before = noted.place.name, f"had shape {tuple(shape)} in forward"
            if not isinstance(now, Tensor):
                found.append(f"{name} {before} and is gone or no tensor now.")
            elif now.shape != shape:
                found.append(f"{name} {before} and has {tuple(now.shape)} now.")
            elif now is not known():
                found.append(f"{name} is another tensor than in forward.")
        return found

    def state_of_ops(self) -> set[int]:
        """Return the storages of the small buffers that ops write again, if replay runs them."""
        return _keys([noted for noted in self._noted if noted.is_state_of_ops()])

    def finish(self, is_logged: Callable[[Tensor], bool]) -> None:
        """Note what forward has changed.

        Args:
            is_logged: Whether the log of a policy has writes of a tensor.
        """
        for noted in self._noted:
            noted.finish(self._has_policy, is_logged)
        for attributes, start in self._numbers:
            for name, value in start.items():
                if attributes.get(name) is not value:
                    self._noted.append(Noted(Place(attributes, name, None, None)))
                    self._noted[-1].start = State(value, 0)
        self._numbers = []

    # Replay.

    def go_back(self, region: str) -> tuple[list[tuple[Place, State]], list[Unreadable]]:
        """Let the places be as a replay needs them.

        Returns:
            What they were, for `put_back`; and what the replay must not read.
        """
        before: list[tuple[Place, State]] = []
        unread: list[Unreadable] = []
        for noted in self._noted:  # two places may be one: all are read before any is put
            noted.go_back(region, before, unread)
        put_back([(noted.place, noted.start) for noted in self._noted if noted.start is not None])
        return before, unread

    def leave(self, name: str) -> list[Tensor | None]:
        """Leave the places as a skipped call left them; return what was put there."""
        left = [(noted.place, state) for noted, state in self._effects.get(name, ()) if noted.start is not None]
        put_back(left)
        return [state.tensor for _, state in left]


def _keys(places: Sequence[Noted]) -> set[int]:
    started = [noted.start.tensor for noted in places if noted.start is not None]
    return {key for tensor in started if tensor is not None and not is_lazy(tensor) for key in keys_of(tensor)}


def put_back(states: Sequence[tuple[Place, State]]) -> None:
    """Let places be as they were, as far as that is known."""
    for place, state in states:
        tensor, version, copy = state.tensor, state.version, state.copy
        if place.held() is not state.value:
            place.put(state.value)
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
