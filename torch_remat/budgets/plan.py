"""`Plan`: decisions of a budget that last, by region name.

In: what a budget has decided in a step. Kept: names and numbers. Out: regions that keep and evict the same in each
step, on each rank, whatever their forwards take.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from torch_remat._compat import process_groups
from torch_remat.budgets.kept import Inside, registers_around
from torch_remat.budgets.steps import Planned as Planned
from torch_remat.budgets.steps import Step
from torch_remat.budgets.text import format_plan
from torch_remat.dispatch.options import keeping
from torch_remat.errors import UsageError
from torch_remat.reports.report import Data

_VERSION = 1
_FORM = "A plan comes from budget.plan(), or from Plan.from_json(text) with the text that to_json() gave."


World = tuple[int, tuple[tuple[str, int], ...]]  # how many ranks, and the names and sizes of groups


class Plan(dict[str, Planned], Data):
    """Which saved tensors regions keep, by region name; see `Budget.plan`.

    Its text is a list of prices. It is changed by `keep` and `evict`, and used by
    ``checkpoint_modules(model, patterns, plan=plan)``.

    Args:
        entries: What each region keeps.
        world: How many ranks there were, and the names and sizes of the groups that agreed on it: it is refused
            where these are others. None for one of a single rank, or for any.

    Example:
        >>> import torch_remat as remat
        >>> plan = remat.budgets.Plan({"layers.3": remat.budgets.Planned(0, 12, 96 * 2**20, 0.0031)})
        >>> print(plan)
        layers.3: keeps 96.0 MiB, spares 3.1 ms
        >>> remat.budgets.Plan.from_json(plan.to_json()) == plan
        True
    """

    _fits = False  # whether it was found that the ranks are those that it is for

    def __init__(self, entries: Mapping[str, Planned], world: World | None = None) -> None:
        for name, entry in entries.items():
            if not (isinstance(name, str) and isinstance(entry, Planned) and entry.evicted_tensors >= 0):
                raise UsageError(f"{name!r}: {entry!r} is not an entry of a plan", remedy=_FORM)
        super().__init__(entries)
        self.world = world

    def __str__(self) -> str:
        """Return a line for each region: what it keeps, and what that spares."""
        return format_plan(self.items())

    def __repr__(self) -> str:
        return f"<plan of {len(self)} regions>"

    def keep(self, name: str) -> None:
        """Have a region keep all that it saves.

        Raises:
            KeyError: The plan has no such region.
        """
        self[name] = replace(self[name], evicted_tensors=0)

    def evict(self, name: str, tensors: int | None = None) -> None:
        """Have a region evict its first saved tensors, by default all.

        Raises:
            KeyError: The plan has no such region.
        """
        entry = self[name]
        self[name] = replace(entry, evicted_tensors=entry.saved_tensors if tensors is None else tensors)

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
            return Plan({name: Planned(**row) for name, row in rows.items()}, made_for)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"this text is not a plan: {error!r}", remedy=_FORM) from None


def plan_of(step: Step) -> Plan:
    """Return what was decided in a step; where a name stands for several calls, what evicts most."""
    entries = {}
    for name, rows in step.by_name():
        most = max(rows, key=lambda row: row.cut)
        spared = most.forward_seconds - most.evicted_seconds
        kept = sum(row.saved_bytes - row.evicted_bytes for row in rows)
        entries[name] = Planned(most.cut, most.tensors, kept, max(spared, 0.0) * len(rows))
    return Plan(entries)


def largest(steps: Sequence[Step]) -> Step | None:
    """Return, of the steps whose backward has come, the latest of those that would keep most without a budget."""
    done = [step for step in steps if step.has_backward]
    return max(reversed(done), key=lambda step: sum(row.saved_bytes for row in step.rows), default=None)
