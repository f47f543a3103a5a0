"""Steps that repeat: a region that stays full in each of them runs without holders, as plain autograd runs it.

In: the regions of each step, in order: what they were given, and what they kept of it. Kept: the latest steps, by their
first region. Out: for a region that begins, whether it may run without holders, and how many bytes that will keep.

NOTE [ Regions without holders ]
1. Holders cost microseconds a saved tensor, and only what may be given up needs them. Steps are alike that have the
   same regions (names, inputs, autograd nodes, saved tensors, bytes). After three, the regions that were full in the
   last of these run as they are: their function is called, and autograd keeps what it keeps. Those that had given up
   nearly all begin empty, as outside of a budget, but where there is more room now. The others have holders, and make
   room; what they do is how it is done the next time.
2. Where several kinds of steps begin alike (sources of one length, with targets of several), that holds of what they
   have in common, if each of the latest 16 steps that began so is like two others.
3. A region without holders is counted with what those like it kept, until a backward comes to it or its graph is gone.
4. What is not as before has holders: a region that gets something else, that begins with more kept, within a smaller
   limit, under hooks or observers. If one gets something else, or makes another number of nodes, all have holders from
   then on.
5. One step in 32 has holders throughout: whether all is as before is seen only there.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from math import inf
from typing import Any

import optree
import torch
from torch import Tensor
from torch.nn import Parameter

from torch_remat.budgets.steps import Row

_ENOUGH = 3  # steps that are alike
_LATEST = 16  # each of the latest so many steps that begin alike has to be like others
_NEARLY = 0.9  # of what it saves: a region that gives up more begins empty
_LOOK = 32  # one step in so many has holders throughout
_MOST = 64  # how many steps are known, by their first regions

_CONTAINERS = frozenset((tuple, list, dict))
_VALUES = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))  # compared as such


class Place:
    """One region's place in a step.

    Attributes:
        given: What its region was given; None where that cannot be compared, and where others than it decide.
        before: The bytes that were kept when it had begun.
        row: What reports know of it.
        nodes: How many autograd nodes its forward has made; -1 while that runs, and of what cannot run as it is.
        saved: The bytes of all that it saves, whoever else holds it.
        alone: Those of what nobody has held before.
        stays: Whether it was full to the end.
        leaves: Whether nearly all was given up.
        begins_empty: Whether it is to be so from the start, in the step that runs.
    """

    __slots__ = ("alone", "before", "begins_empty", "given", "leaves", "nodes", "row", "saved", "stays")

    def __init__(self, given: Hashable, before: int, row: Row) -> None:
        self.given = given
        self.before = before
        self.row = row
        self.nodes = -1
        self.saved = self.alone = 0
        self.stays = self.leaves = self.begins_empty = False

    def finish(self, nodes: int, saved: int, alone: int) -> None:
        """Its forward is over."""
        self.nodes, self.saved, self.alone = nodes, saved, alone

    def is_like(self, other: Place) -> bool:
        """Whether another step had the same here; what regions saved is compared where they kept it."""
        same = self.given == other.given and self.nodes == other.nodes and self.row.tensors == other.row.tensors
        return same and (self.saved == other.saved or not (_is_full(self.row) and _is_full(other.row)))

    def end(self) -> None:
        """Its step is over."""
        row = self.row
        self.stays = self.nodes >= 0 and _is_full(row)
        self.leaves = self.nodes >= 0 and row.given_bytes > _NEARLY * row.saved_bytes and not row.offloaded_bytes

    def may_begin_empty(self, kept: int, limit: float) -> bool:
        """Whether its region may, with so many bytes kept: while it runs it takes what it would take if it was full."""
        return self.begins_empty and kept <= min(self.before, limit - self.row.saved_bytes)


def _is_full(row: Row) -> bool:
    return not (row.given_bytes or row.offloaded_bytes or row.replays)


class _Pattern:
    """Steps that are alike.

    Attributes:
        places: The regions.
        limit: The most that they were to keep in the latest.
        times: How many of these there were.
        last: Which it was of the steps that begin so.
        used: How many had regions without holders since one was looked at.
    """

    def __init__(self, places: list[Place], limit: float, last: int) -> None:
        self.places, self.limit, self.last = places, limit, last
        self.times, self.used = 1, 0

    def is_like(self, places: list[Place]) -> bool:
        """Whether a step is like these."""
        return len(places) == len(self.places) and all(map(Place.is_like, places, self.places))

    def add(self, places: list[Place], limit: float, last: int) -> None:
        """Take one in which all regions had holders."""
        self.places, self.limit, self.last = places, limit, last
        self.times += 1

    def add_without(self, places: list[Place], last: int) -> None:
        """Take one in which some had none: what the others did then is how it is done from now on."""
        for number, (place, before) in enumerate(zip(places, self.places, strict=True)):
            if place is not before and place.nodes == before.nodes and place.row.tensors == before.row.tensors:
                place.end()
                self.places[number] = place
        self.last = last
        self.used += 1
        if self.used == _LOOK:
            self.used, self.times = 0, _ENOUGH - 1

    def begin_step(self, limit: float) -> None:
        """Have regions begin empty that are to leave: not those that there is room for now, the costliest first."""
        room = limit - sum(place.alone if place.stays else place.row.kept_bytes for place in self.places)
        leaving = [place for place in self.places if place.leaves]
        for place in sorted(leaving, key=lambda place: place.row.given_seconds / place.row.given_bytes, reverse=True):
            place.begins_empty = room <= 0
            room -= place.row.given_bytes


class _Steps:
    """The steps that begin with the same region, given the same.

    Attributes:
        count: How many there were.
        patterns: Those that are alike.
    """

    def __init__(self) -> None:
        self.count = 0
        self.patterns: list[_Pattern] = []

    def add(self, places: list[Place], limit: float, measured: bool) -> None:
        """Take one in which all regions had holders, or one that is like none before."""
        self.count += 1
        for place in places:
            place.end()
        self.patterns = [one for one in self.patterns if one.times >= _ENOUGH or self.count - one.last < _LATEST]
        found = next((one for one in self.patterns if one.is_like(places)), None)
        if found is None:
            found = _Pattern(places, limit, self.count)
            self.patterns = [*self.patterns[1 - _LATEST :], found]
        else:
            found.add(places, limit, self.count)
        if measured:  # takes other times, and has other limits
            found.times = min(found.times, _ENOUGH - 1)

    @property
    def repeat(self) -> bool:
        """Whether each of the latest is like others."""
        return all(one.times >= _ENOUGH for one in self.patterns)


class Repeats:
    """Which steps repeat; see NOTE [ Regions without holders ]."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Steps] = {}
        self._places: list[Place] = []  # of the step that runs
        self._now: list[_Pattern] = []  # what it may be like; empty where nothing is known or some do not repeat
        self._limit = inf
        self._may = False  # whether its regions may run without holders
        self._some = False  # whether one did, or began empty

    def begin_step(self, limit: float, may: bool) -> None:
        """A step begins.

        Args:
            limit: What its regions may keep.
            may: Whether they may run without holders: it is not measured.
        """
        self.end_step()
        self._limit, self._may = limit, may
        self._some = False

    def end_step(self) -> None:
        """The step has ended: learn from it."""
        now, places = self._now, self._places
        self._now, self._places = [], []
        if not places or places[0].given is None:
            return
        steps = self._known.setdefault(places[0].given, _Steps())
        if len(self._known) > _MOST:
            del self._known[next(iter(self._known))]
        same = next((one for one in now if len(one.places) == len(places)), None) if self._some else None
        if same is None:
            steps.add(places, self._limit, not self._may)
        else:
            steps.count += 1
            same.add_without(places, steps.count)

    def starts_with(self, given: Hashable) -> Row | None:
        """Return the first region's row of steps that repeat, if they begin with what was given."""
        steps = self._known.get(given)
        return steps.patterns[0].places[0].row if steps is not None and steps.repeat else None

    def may_expect(self, is_new_step: bool) -> bool:
        """Whether it may be worth the while to ask."""
        return self._known != {} if is_new_step else self._now != []

    def expects(self, given: Hashable, kept: int) -> Place | None:
        """Return the place of a region that may run without holders.

        Args:
            given: What it is given.
            kept: The bytes that are kept now.
        """
        places = self._next(given)
        if not places or not all(place.stays and kept <= place.before for place in places):
            return None
        return max(places, key=lambda place: place.alone)

    def _next(self, given: Hashable) -> list[Place]:
        """Return the places that may come next, of what the step is like so far."""
        number = len(self._places)
        if not number and self._may:
            steps = self._known.get(given)
            if steps is not None and steps.repeat and all(one.limit <= self._limit for one in steps.patterns):
                self._now = steps.patterns
                for one in self._now:
                    one.begin_step(self._limit)
        self._now = [one for one in self._now if number < len(one.places) and one.places[number].given == given]
        return [one.places[number] for one in self._now]

    def add(self, given: Hashable, before: int, row: Row) -> tuple[Place, Row | None]:
        """Take a region that has holders; return its place, and the row of one like it, if it may begin empty."""
        like = self._next(given)
        place = Place(given, before, row)
        self._places.append(place)
        if not like or not all(one.may_begin_empty(before, self._limit) for one in like):
            return place, None
        self._some = True
        return place, like[0].row

    def add_without(self, place: Place) -> None:
        """Take one that has none."""
        self._places.append(place)
        self._some = True

    def ran(self, place: Place, nodes: int) -> None:
        """One that has none has run, and made so many autograd nodes."""
        number = len(self._places) - 1
        self._now = [one for one in self._now if self.is_last(place) and one.places[number].nodes == nodes]
        if place.nodes != nodes:
            other = self._now[0].places[number] if self._now else copy(place)
            other.nodes = nodes
            self._places = [other if one is place else one for one in self._places]

    def is_last(self, place: Place) -> bool:
        """Whether no other region has begun since."""
        return bool(self._places) and self._places[-1] is place


def what_is_given(name: str, values: Sequence[Any]) -> Hashable:
    """Return a region's name and what can be compared of its arguments; None where something cannot."""
    found: list[Hashable] = [name]
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
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
