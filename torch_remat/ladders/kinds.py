"""Which regions have one ladder: those of the same code, module and mode, whose forwards made the same calls.

In: regions that begin, and records of first forwards. Kept: of so many kinds records without tensors, and ladders. Out:
the ladder of a region, or word that its forward is to be recorded.

NOTE [ Kinds ]
A *kind* is a guess before forward runs: the function and the module that it belongs to, whether that is in training,
what distinguishes arguments but their shapes, and autocast. What was recorded shows more: equal layers have one ladder,
with the least times of all. A wrong guess costs bytes or time, never a gradient. Of each kind some shapes are recorded;
what has others later takes the ladder of the nearest, whose bytes are scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import CodeType, FunctionType
from typing import Any
from weakref import ref

from torch import Tensor
from torch.nn import Module

from torch_remat._compat import any_autocast_enabled
from torch_remat.ladders.ladder import Ladder
from torch_remat.ladders.record import Record

_SAMPLES = 3  # forwards that are recorded before a ladder is made: the first one runs cold
_SHAPES = 3  # of a kind that are recorded
_KINDS = 4096
_VALUES = frozenset((bool, str, type(None)))  # numbers may count steps
_RESTARTS = 2  # replays that start over before nothing of a kind is kept by price


class Timed:
    """A record, with the least time of each step in all forwards that were the same."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.count = 1
        self.ladders: dict[Hashable, Ladder] = {}

    def add(self, record: Record) -> None:
        """Take the times of another forward, if no ladder was made yet."""
        self.count += 1
        if not self.ladders:
            self.record.whole_ns = min(self.record.whole_ns, record.whole_ns)
            for step, other in zip(self.record.steps, record.steps, strict=True):
                step.ns = min(step.ns, other.ns)

    def ladder(self, selected: Collection[Any], left_out: Sequence[str], ends: bool) -> Ladder:
        """Return the ladder under a policy that selects functions, and excludes calls by name; or just its ends."""
        key = frozenset(selected), tuple(left_out), ends
        if (ladder := self.ladders.get(key)) is None:
            record = replace(self.record, is_hidden=True) if ends else self.record
            ladder = self.ladders[key] = Ladder(record, selected, left_out)
        return ladder


class Kind:
    """Regions that are taken for equal but for the shapes of their arguments.

    Attributes:
        restarts: How many replays had to start over.
        communicates: What shows that such regions communicate with other ranks, in words; empty if nothing does.
    """

    def __init__(self, owner: object) -> None:
        self.restarts = 0
        self.communicates = ""
        self._owner = ref(owner) if isinstance(owner, Module) else (lambda: owner)
        self._by_shapes: dict[Hashable, Timed] = {}

    def is_of(self, owner: object) -> bool:
        """Whether it is of a module or code, whose address another one may have by now."""
        return self._owner() is owner

    def is_new(self, shapes: Hashable) -> bool:
        """Whether a forward with arguments of these shapes is to be recorded."""
        known = self._by_shapes.get(shapes)
        return len(self._by_shapes) < _SHAPES if known is None else known.count < _SAMPLES

    @property
    def keeps_calls(self) -> bool:
        """Whether calls are to be kept or skipped: not if replays have started over for it."""
        return self.restarts < _RESTARTS

    def knows(self, shapes: Hashable) -> bool:
        """Whether a forward with arguments of these shapes was recorded."""
        return shapes in self._by_shapes

    def learn(self, shapes: Hashable, record: Record) -> None:
        """Take the record of a forward."""
        key = record.signature()
        if (timed := _timed.get(key)) is not None:
            timed.add(record)
        else:
            if len(_timed) >= _KINDS:
                _timed.clear()
            timed = _timed[key] = Timed(record)
        self._by_shapes[shapes] = timed

    def ladder(self, shapes: Hashable, selected: Collection[Any] = (), left_out: Sequence[str] = ()) -> Ladder | None:
        """Return the ladder of regions with arguments of these shapes; None if it is not known yet."""
        timed = self._by_shapes.get(shapes)
        if timed is None:
            latest_first = reversed(self._by_shapes.values())
            timed = max(latest_first, key=lambda one: one.count, default=None)
        # Where each step has other shapes, none of them comes as often.
        if timed is None or (timed.count < _SAMPLES and self.is_new(shapes)):
            return None
        return timed.ladder(selected, left_out, bool(self.communicates) or not self.keeps_calls)


_timed: dict[Hashable, Timed] = {}
_kinds: dict[Hashable, Kind] = {}


def kind_of(function: Callable[..., Any], leaves: Sequence[Any]) -> tuple[Kind, Hashable]:
    """Return the kind of a region that begins, and the shapes of its arguments.

    Args:
        function: What the region runs.
        leaves: The leaves of its arguments.
    """
    while isinstance(function, partial):
        leaves = (*leaves, *function.args, *function.keywords.values())
        function = function.func
    owner = function if isinstance(function, Module) else getattr(function, "__self__", function)
    code = getattr(function, "__code__", None) or getattr(function, "__qualname__", None)
    cells = map(_cell, getattr(function, "__closure__", None) or ())
    if not isinstance(owner, Module):  # which may be made anew for each step
        owner = code if isinstance(code, CodeType) else type(owner)
    given: list[Any] = []
    shapes = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            given += (leaf.dtype, leaf.requires_grad)
            shapes.append(leaf.shape)
        else:
            given.append(_said(leaf))
    key = id(owner), code, *cells, getattr(owner, "training", None), any_autocast_enabled(), *given
    kind = _kinds.get(key)
    if kind is None or not kind.is_of(owner):
        if len(_kinds) >= _KINDS:
            _kinds.clear()
        kind = _kinds[key] = Kind(owner)
    return kind, tuple(shapes)


def forget_kinds() -> None:
    """Forget all that was recorded; for tests."""
    _timed.clear()
    _kinds.clear()


def _said(leaf: Any) -> Any:
    said: Any = leaf
    if isinstance(leaf, Module):
        said = id(leaf), leaf.training
    elif type(leaf) not in _VALUES:
        said = type(leaf)
    return said


def _cell(cell: Any) -> Any:
    try:
        value = cell.cell_contents
    except ValueError:  # not set yet
        return None
    if isinstance(value, (Mapping, list, tuple, set, Tensor)):
        return type(value)
    if isinstance(value, FunctionType):
        return id(value.__code__)
    return _said(getattr(value, "__self__", value))
