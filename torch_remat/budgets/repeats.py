"""Steps that repeat: a region that stays full in each of them runs without holders, as plain autograd runs it.

In: the regions of each step, in order: what they were given, and what they kept of it. Kept: the latest steps, by their
first region. Out: for a region that begins, whether it may run without holders, and how many bytes that will keep.

NOTE [ Regions without holders ]
1. Holders cost microseconds a saved tensor, and only what may be given up needs them. After three steps in a row with
   the same regions (names, inputs, autograd nodes, saved tensors, bytes), those that were full in all three run as they
   are: their function is called, and autograd keeps what it keeps. The others have holders, and make room.
2. Such a region is counted with what it kept before, until a backward comes to it or its graph is gone.
3. What is not as before has holders: a region that gets something else, that begins with more kept, within a smaller
   limit, in another thread, under hooks or observers. If one gets something else, or makes another number of nodes, all
   have holders from then on, until steps have repeated four times as often as it took before.
4. One step in 32 has holders throughout: whether all is as before is seen only there.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Hashable, Sequence
from math import inf
from typing import Any

import optree
import torch
from torch import Tensor
from torch.nn import Parameter

from torch_remat.budgets.steps import Row

_ENOUGH = 3  # steps that are alike
_SLOWER = 4  # that many times more of them, after steps that began alike and were not
_LOOK = 32  # one step in so many has holders throughout
_MOST = 64  # how many steps are known, by their first regions

_CONTAINERS = frozenset((tuple, list, dict))
_VALUES = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))  # compared as such


class Place:
    """One region's place in a step.

    Attributes:
        given: What its region was given; None where it cannot be compared, or is no region that could run as it is.
        before: The bytes that were kept when it had begun.
        row: What reports know of it.
        nodes: How many autograd nodes its forward has made; -1 while that runs.
        saved: The bytes of all that it saves, whoever else holds it.
        alone: Those of what nobody has held before.
        stays: Whether it was full to the end, in each of the steps that are alike.
    """

    __slots__ = ("alone", "before", "given", "nodes", "row", "saved", "stays")

    def __init__(self, given: Hashable, before: int, row: Row) -> None:
        self.given = given
        self.before = before
        self.row = row
        self.nodes = -1
        self.saved = self.alone = 0
        self.stays = True

    def finish(self, nodes: int, saved: int, alone: int) -> None:
        """Its forward is over."""
        self.nodes, self.saved, self.alone = nodes, saved, alone

    def is_like(self, other: Place) -> bool:
        """Whether another step had the same here; what regions saved is compared where they kept it."""
        same = self.given == other.given and self.nodes == other.nodes and self.row.tensors == other.row.tensors
        return same and (self.saved == other.saved or not (_is_full(self.row) and _is_full(other.row)))

    def join(self, earlier: Place) -> None:
        """Take what an earlier step had here."""
        self.before = max(self.before, earlier.before)
        self.alone = max(self.alone, earlier.alone)
        self.stays = earlier.stays and _is_full(self.row)


def _is_full(row: Row) -> bool:
    return not (row.given_bytes or row.offloaded_bytes or row.replays)


class _Known:
    """Steps that are alike.

    Attributes:
        places: The regions.
        limit: The least that they were to keep in one of the steps.
        times: How many of these there were in a row.
        wanted: How many are wanted.
        used: How many steps had regions without holders since.
    """

    def __init__(self, places: list[Place], limit: float) -> None:
        self.wanted = _ENOUGH
        self.start(places, limit)

    def start(self, places: list[Place], limit: float) -> None:
        """Begin anew with one step."""
        self.places, self.limit = places, limit
        self.times, self.used = 1, 0
        for place in places:
            place.stays = _is_full(place.row)

    def add(self, places: list[Place], limit: float) -> None:
        """Take a step in which all regions had holders."""
        if len(places) == len(self.places) and all(map(Place.is_like, places, self.places)):
            for place, earlier in zip(places, self.places, strict=True):
                place.join(earlier)
            self.places, self.limit = places, min(limit, self.limit)
            self.times += 1
        else:
            if self.repeat:
                self.wanted *= _SLOWER
            self.start(places, limit)

    @property
    def repeat(self) -> bool:
        """Whether there were enough of them."""
        return self.times >= self.wanted

    def differed(self) -> None:
        """A step in which some had none was another."""
        self.times = 0
        self.wanted *= _SLOWER


class Repeats:
    """Which steps repeat; see NOTE [ Regions without holders ]."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}
        self._places: list[Place] = []  # of the step that runs
        self._now: _Known | None = None  # those that began as it did
        self._limit = inf
        self._may = False  # whether its regions may run without holders
        self._some = False  # whether one did
        self._differs = False
        self._thread = get_ident()

    def begin_step(self, limit: float, may: bool) -> None:
        """A step begins.

        Args:
            limit: What its regions may keep.
            may: Whether they may run without holders.
        """
        self.end_step()
        self._thread = get_ident()
        self._limit, self._may = limit, may
        self._some = self._differs = False

    def end_step(self) -> None:
        """The step has ended: learn from it."""
        known, places = self._now, self._places
        self._now, self._places = None, []
        if not places:
            return
        if known is None:
            if places[0].given is not None:
                self._known[places[0].given] = _Known(places, self._limit)
                if len(self._known) > _MOST:
                    del self._known[next(iter(self._known))]
        elif not self._some:
            known.add(places, self._limit)
        elif self._differs:
            known.differed()
        else:
            known.used += 1
            if known.used == _LOOK:
                known.used, known.times = 0, known.wanted - 1

    def starts_with(self, given: Hashable) -> Row | None:
        """Return the first region's row of steps that have repeated, if they begin with what was given."""
        known = self._known.get(given)
        return None if known is None or not known.repeat else known.places[0].row

    def may_expect(self, is_new_step: bool) -> bool:
        """Whether it may be worth the while to ask."""
        if is_new_step:
            return self._known != {}
        return self._now is not None and self._now.repeat and self._may and not self._differs

    def expects(self, given: Hashable, kept: int) -> Place | None:
        """Return the place of a region that may run without holders.

        Args:
            given: What it is given.
            kept: The bytes that are kept now.
        """
        place = self._next(given) if self._thread == get_ident() else None
        return place if place is not None and place.stays and kept <= place.before else None

    def _next(self, given: Hashable) -> Place | None:
        """Return the place that comes next in steps that have repeated, if it is that of a region given the same."""
        if not self._places:
            self._now = self._known.get(given)
        known, number = self._now, len(self._places)
        if known is None or not self._may or self._differs or not known.repeat or self._limit < known.limit:
            return None
        if number >= len(known.places) or known.places[number].given != given:
            self.differ()
            return None
        return known.places[number]

    def add(self, given: Hashable, before: int, row: Row) -> Place:
        """Take a region that has holders."""
        self._next(given)
        place = Place(given if self._thread == get_ident() else None, before, row)
        self._places.append(place)
        return place

    def add_without(self, place: Place, nodes: int) -> None:
        """Take one that has none, and has made so many autograd nodes."""
        self._places.append(place)
        self._some = True
        if nodes != place.nodes:
            self.differ()

    def is_last(self, place: Place) -> bool:
        """Whether no other region has begun since."""
        return bool(self._places) and self._places[-1] is place

    def differ(self) -> None:
        """The step is not as the others were."""
        self._differs = True


def what_is_given(name: str, values: Sequence[Any]) -> Hashable:
    """Return a region's name and what can be compared of its arguments; None where something cannot."""
    found: list[Hashable] = [name]
    for value in values:
        kind = type(value)
        if (kind is Tensor or kind is Parameter) and value.layout is torch.strided:
            found.append((value.shape, value.dtype, value.device, value.requires_grad))
        elif kind in _VALUES:
            found.append(value)
        elif kind in _CONTAINERS:
            inside = what_is_given(kind.__name__, optree.tree_leaves(value, none_is_leaf=True))
            if inside is None:
                return None
            found.append(inside)
        else:
            return None
    return tuple(found)
