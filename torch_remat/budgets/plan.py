"""`Plan`: decisions of a budget that last, by region name.

In: what a budget has bought in a step. Kept: names and numbers. Out: regions that keep the same in each step, on each
rank, whatever their forwards take.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from torch_remat._compat import process_groups
from torch_remat.budgets.kept import Inside, registers_around
from torch_remat.budgets.steps import Row, Step
from torch_remat.budgets.text import format_plan
from torch_remat.dispatch.region.region import keeping
from torch_remat.errors import UsageError, shown
from torch_remat.ladders.ladder import Rung
from torch_remat.policies.functions import found_at, place_of
from torch_remat.reports.report import Data

_VERSION = 2
_FORM = "A plan comes from budget.plan(), or from Plan.from_json(text) with the text that to_json() gave."


World = tuple[int, tuple[tuple[str, int], ...]]  # how many ranks, and the names and sizes of groups


@dataclass(frozen=True)
class Planned:
    """What a region keeps.

    Attributes:
        is_plain: Whether it runs as plain code, which keeps everything.
        acts: If not, for each function, as a user names it, by the number of a call which of its results are kept;
            replay runs all other calls.
        kept_bytes: What it keeps.
        spared_seconds: What its backward need not recompute therefore.
    """

    is_plain: bool = False
    acts: Mapping[str, Mapping[int, Sequence[int]]] = field(default_factory=dict)
    kept_bytes: int = 0
    spared_seconds: float = 0.0

    def rung(self) -> Rung:
        """Return it as the runtime takes it."""
        known: Rung | None = self.__dict__.get("_rung")
        if known is None:
            acts = {found_at(name): numbers for name, numbers in self.acts.items()}
            known = self.__dict__["_rung"] = Rung(self.kept_bytes, 0, acts, is_plain=self.is_plain)
        return known


class Plan(dict[str, Planned], Data):
    """What regions keep, by region name; see `Budget.plan`.

    Its text is a list of prices. It is changed by `keep` and `drop`, and used by
    ``checkpoint_modules(model, patterns, plan=plan)``.

    Args:
        entries: What each region keeps.
        world: How many ranks there were, and the names and sizes of the groups that agreed on it: it is refused
            where these are others. None for one of a single rank, or for any.

    Example:
        >>> import torch_remat as remat
        >>> acts = {"F.linear": {0: (0,), 2: ()}}
        >>> plan = remat.budgets.Plan({"layers.3": remat.budgets.Planned(False, acts, 96 * 2**20, 0.0031)})
        >>> print(plan)
        layers.3: keeps 96.0 MiB, spares 3.1 ms; 2 calls kept or skipped
        >>> remat.budgets.Plan.from_json(plan.to_json()) == plan
        True
    """

    _fits = False  # whether it was found that the ranks are those that it is for

    def __init__(self, entries: Mapping[str, Planned], world: World | None = None) -> None:
        for name, entry in entries.items():
            if not (isinstance(name, str) and isinstance(entry, Planned)):
                raise UsageError(f"{name!r}: {entry!r} is not an entry of a plan", remedy=_FORM)
        super().__init__(entries)
        self.world = world

    def __str__(self) -> str:
        """Return a line for each region: what it keeps, and what that spares."""
        return format_plan(self.items())

    def __repr__(self) -> str:
        return f"<plan of {len(self)} regions>"

    def keep(self, name: str) -> None:
        """Have a region keep all that it saves: it runs as plain code.

        Raises:
            UsageError: The plan has no such region.
        """
        self[name] = replace(self._of(name), is_plain=True, acts={})

    def drop(self, name: str) -> None:
        """Have a region keep its arguments alone.

        Raises:
            UsageError: The plan has no such region.
        """
        self[name] = replace(self._of(name), is_plain=False, acts={})

    def _of(self, name: str) -> Planned:
        if name not in self:
            near = get_close_matches(str(name), self, n=6, cutoff=0.3) or list(self)[:6]
            raise UsageError(f"the plan has no region {shown(name)}", remedy=f"Near names: {', '.join(near)}.")
        return self[name]

    def bind(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose regions keep what the plan says; `checkpoint_modules` asks this."""

        def planned(*args: Any, **kwargs: Any) -> Any:
            self.raise_in_another_world()
            token = keeping.set(Inside(registers_around(), self))
            try:
                return run(*args, **kwargs)
            finally:
                keeping.reset(token)

        return planned

    def raise_in_another_world(self) -> None:
        """Raise if the ranks are not those that have agreed on this plan.

        Raises:
            UsageError: There are more or fewer, or the groups have other sizes.
        """
        if self.world is None or self._fits:
            return
        groups = process_groups()
        ranks = max((size for _, size in groups), default=1)
        if ranks != self.world[0] or not groups.issuperset(self.world[1]):
            told = ", ".join(f"{name}: {size}" for name, size in self.world[1])
            raise UsageError(
                f"this plan is of a world of {self.world[0]} ranks ({told}); this one has {ranks}, or other groups",
                remedy="Make a plan for this one: run steps in remat.budget(limit, group=...), and ask its plan().",
            )
        self._fits = True

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        world = {} if self.world is None else {"world": {"ranks": self.world[0], "groups": dict(self.world[1])}}
        return {"version": _VERSION, **world, "regions": {name: asdict(entry) for name, entry in self.items()}}

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan that `to_json` has written.

        Raises:
            UsageError: The text is not a plan.
        """
        names = {field.name for field in fields(Planned)}
        try:
            data = json.loads(text)
            if data["version"] != _VERSION:
                raise ValueError(f"version {data['version']!r}")
            rows = {name: {key: row[key] for key in names} for name, row in data["regions"].items()}
            world = data.get("world")
            made_for = None if world is None else (int(world["ranks"]), tuple(world["groups"].items()))
            return Plan({name: _planned(**row) for name, row in rows.items()}, made_for)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"this text is not a plan: {error!r}", remedy=_FORM) from None


def _planned(is_plain: bool, acts: Mapping[str, Any], kept_bytes: int, spared_seconds: float) -> Planned:
    """Return an entry as JSON has it: numbers are text there, and tuples are lists."""
    numbers = {name: {int(at): tuple(places) for at, places in found.items()} for name, found in acts.items()}
    entry = Planned(bool(is_plain), numbers, int(kept_bytes), float(spared_seconds))
    entry.rung()  # raises where a name is that of no function
    return entry


def plan_of(step: Step) -> Plan:
    """Return what was bought in a step; where a name stands for several calls, what keeps least."""
    return Plan({name: planned_of(rows) for name, rows in step.by_name() if all(row.part for row in rows)})


def planned_of(rows: Sequence[Row]) -> Planned:
    """Return what the regions of one name keep."""
    least = min(rows, key=lambda row: (row.is_plain, row.kept_bytes))
    rung, part = least.rung, least.part
    if part is None or rung is None or rung.away:
        return Planned(kept_bytes=sum(row.kept_bytes for row in rows))
    acts = {place_of(function): dict(numbers) for function, numbers in rung.acts.items()}
    if not all(isinstance(place, str) for place in acts):
        return Planned(kept_bytes=sum(row.input_bytes for row in rows))  # of a function that has no name to be found by
    spared = (part.ladder.rungs[0].ns - rung.ns) * part.scale * len(rows) / 1e9
    return Planned(rung.is_plain, acts, sum(row.kept_bytes for row in rows), max(spared, 0.0))


def largest(steps: Sequence[Step]) -> Step | None:
    """Return, of the whole steps of which it is known what they can keep, the latest that would keep most."""
    done = [step for step in steps if step.has_backward and step.is_known]
    return max(reversed(done), key=lambda step: step.sum_of("whole_bytes"), default=None)
