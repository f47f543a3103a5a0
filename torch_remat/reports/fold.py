"""Layers that are alike, told once: ``layers.0-31: 24.0 MiB each``.

In: regions in order. Out: groups of regions in a row whose names differ in one number that counts up, or not at all,
and that keep the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from torch_remat.reports.data import KeptTensor, RegionReport

_T = TypeVar("_T")
_MOST_IN_A_LAYER = 8
_NUMBER = re.compile(r"\d+")


class Group(NamedTuple):
    """Regions in a row that are alike."""

    label: str  # the name of one, or ``layers.0-31``, or ``Block x12`` where all have the same name
    regions: list[RegionReport]


def fold(regions: Sequence[RegionReport]) -> list[Group]:
    """Return regions in groups, in order."""
    return [Group(*group) for group in fold_series(regions, lambda region: region.name, _contents)]


def fold_series(
    items: Sequence[_T], name_of: Callable[[_T], str], facts_of: Callable[[_T], Any]
) -> list[tuple[str, list[_T]]]:
    """Return items in groups, in order, each with one label: their facts are equal, and their names make a series.

    A model may have several regions in each layer: items that take turns (attention, MLP, attention, MLP) are folded to
    one group for each of them.
    """
    facts = [facts_of(item) for item in items]
    names = [name_of(item) for item in items]
    groups: list[tuple[str, list[_T]]] = []
    at = 0
    while at < len(items):
        period, turns = _longest_run(facts, names, at)
        for start in range(at, at + period):
            places = range(start, at + period * turns, period)
            label = series_label([names[place] for place in places])
            groups.append((label or names[start], [items[place] for place in places]))
        at += period * turns
    return groups


def _longest_run(facts: Sequence[Any], names: Sequence[str], at: int) -> tuple[int, int]:
    """Return how many items take turns from a place on, and how often: the choice that covers the most items."""
    best = (1, 1)
    for period in range(1, _MOST_IN_A_LAYER + 1):
        turns = 1
        while at + period * (turns + 1) <= len(facts) and all(
            facts[at + place] == facts[at + turns * period + place]
            and series_label(names[at + place : at + turns * period + place + 1 : period]) is not None
            for place in range(period)
        ):
            turns += 1
        if turns > 1 and period * turns > best[0] * best[1]:
            best = period, turns
    return best


def series_label(names: Sequence[str]) -> str | None:
    """Return one label for names that are all equal or that count up evenly in one number; None for others.

    Example:
        >>> series_label(["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"])
        'layers.0-2.mlp'
        >>> series_label(["layers.0", "layers.2", "layers.4", "layers.6"])
        'layers.{0,2,...,6}'
    """
    if len(names) == 1:
        return names[0]
    if len(set(names)) == 1:
        return f"{names[0]} x{len(names)}"
    first, last = list(_NUMBER.finditer(names[0])), list(_NUMBER.finditer(names[-1]))
    if len(first) != len(last):
        return None
    for one, other in zip(first, last, strict=True):
        if one.group() != other.group():
            head, tail = names[0][: one.start()], names[0][one.end() :]
            start, end = int(one.group()), int(other.group())
            step = max(1, (end - start) // (len(names) - 1))
            if any(name != f"{head}{start + step * place}{tail}" for place, name in enumerate(names)):
                return None
            if step == 1:
                return f"{head}{start}-{end}{tail}"
            middle = ",".join([str(start), str(start + step), *(["..."] if len(names) > 3 else [])])
            return f"{head}{{{middle}{f',{end}' if len(names) > 2 else ''}}}{tail}"
    return None


def _contents(region: RegionReport) -> Any:
    return _facts(region.tensors), [(op.name, op.policy, _facts(op.tensors)) for op in region.ops]


def _facts(tensors: Sequence[KeptTensor]) -> list[KeptTensor]:
    """Return tensors without names of regions, which differ between layers that are alike."""
    return [replace(one, name="", needed_by=(), shared_with=one.shared_with and "another", note="") for one in tensors]
