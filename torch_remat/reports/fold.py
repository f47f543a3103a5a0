"""Layers that are alike, told once: ``layers.0-31: 24.0 MiB each``.

In: regions in order. Out: groups of regions in a row whose names differ in one number that counts up, or not at all,
and that keep the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch_remat.reports.data import KeptTensor, RegionReport

_T = TypeVar("_T")
_MOST_IN_A_LAYER = 8
_NUMBER = re.compile(r"(\d+)")


def fold(regions: Sequence[RegionReport]) -> list[tuple[str, list[RegionReport]]]:
    """Return regions in groups, in order: those in a row that are alike, with one label."""
    return fold_series(regions, lambda region: region.name, _contents)


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
    parts = [_NUMBER.split(name) for name in names]  # texts, and numbers at odd places
    if len({len(one) for one in parts}) > 1:
        return None
    place, *others = [at for at, values in enumerate(zip(*parts, strict=True)) if len(set(values)) > 1]
    if others or place % 2 == 0:
        return None
    numbers = [one[place] for one in parts]
    start, end = int(numbers[0]), int(numbers[-1])
    step = max(1, (end - start) // (len(names) - 1))
    if numbers != [str(start + step * turn) for turn in range(len(names))]:
        return None
    shown = numbers if len(names) < 4 else [*numbers[:2], "...", numbers[-1]]
    series = f"{start}-{end}" if step == 1 else f"{{{','.join(shown)}}}"
    return "".join([*parts[0][:place], series, *parts[0][place + 1 :]])


def _contents(region: RegionReport) -> Any:
    ops = [(op.name, op.policy, _facts(op.tensors)) for op in region.ops]
    return region.idle_policy, _facts(region.tensors), ops


def _facts(tensors: Sequence[KeptTensor]) -> list[KeptTensor]:
    """Return tensors without names of regions, which differ between layers that are alike."""
    return [replace(one, name="", needed_by=(), shared_with=one.shared_with and "another") for one in tensors]
