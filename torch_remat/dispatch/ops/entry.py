"""One entry of the log: something that forward ran and that replay may skip.

In: what forward noted of it. Kept: metadata, the decision about it, and slots for what replay needs. Out: what replay
answers in its place.

An entry is an aten op under a policy, or a *call*, of which `call.entry` notes more: something with a name that replay
skips whole or runs whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat._compat import in_autocast, kernel_of
from torch_remat.dispatch.ambient import RngState
from torch_remat.dispatch.keys import tensors_in
from torch_remat.dispatch.ops.meta import Given, Meta, WrapperMeta
from torch_remat.dispatch.ops.schema import LIFT, Effects, argument, effects_of
from torch_remat.dispatch.slot import Slot

NOTHING: frozenset[int] = frozenset()
FIRST = frozenset((0,))
_NONE: Mapping[int, Any] = MappingProxyType({})
ODD, ONE, SEVERAL, VIEW = range(4)  # kinds of entries, see `Entry`
WRITTEN = -1  # stands, among the places of results, for the arguments that an op writes
LEFT = frozenset((WRITTEN,))


class Entry:
    """One entry of the log.

    Attributes:
        op: The op, or what ran.
        kernel: What runs the op.
        count: How many ops of its name came before it in the same module; -1 if nobody sees its name.
        results: What it returned: a `Meta` or `WrapperMeta` for a tensor, a list for several results, `Raised`, or a
            plain value.
        path: The module in which it ran, if its name is seen.
        group: Of a call its name; empty for an op.
        is_call: Whether it is a call.
        effects: What it does besides computing.
        kind: `ONE` if it made one new ordinary tensor, `SEVERAL` if it made several, `VIEW` if it returned views of its
            first argument, in each case from ordinary tensors and numbers, and did nothing else; otherwise `ODD`.
        reads: The storages of its arguments.
        layout: Shape and strides of the tensors among its arguments, if its results are saved.
        form: The tree that a higher-order op returned, of which `results` are the leaves; None if these are all.
        version: The version counter of a tensor created outside the region before the op gave it another shape.
        writes: The storages of the arguments that it writes.
        whole: Whether it writes its arguments' whole storages.
        outside: Those of them that were created outside the region.
        made: The storages of its new results, by their place, unless there is just `storage`.
        storage: That of its one new result, if its kind is `ONE`.
        saved: The places of the results that are to be kept if replay needs them.
        away: Those of them that leave the device.
        barred: The places of the results that the policy excludes by name.
        always: Whether replay runs it whatever it is needed for.
        run: Whether replay runs it.
        before: The random generators before it, if replay must set them.
        kept: The results that are kept for replay, by their place, and from -1 downwards what it left in the arguments
            that it writes.
        packed: The places of the results that autograd saved, if the policy asks.
        names: The names that were given to results by hand.
    """

    # What all have is set where one is made, in the recorder, or in `entry_of`. Most have little to note besides.
    op: Any
    kernel: Callable[..., Any]
    effects: Effects
    count = -1
    path = ""
    results: Any = None
    kind = ODD
    group = ""
    is_call = False
    reads: Sequence[int] = ()
    layout: Sequence[tuple[torch.Size, tuple[int, ...]]] = ()
    form: Any = None
    version: int | None = None
    writes: Sequence[int] = ()
    outside: Sequence[StorageWeakRef] = ()
    made: Sequence[tuple[int, int]] = ()
    storage = 0
    saved: frozenset[int] = NOTHING
    away: frozenset[int] = NOTHING
    barred: frozenset[int] = NOTHING
    whole = True
    always = run = False
    before: RngState | None = None
    kept: Mapping[int, Slot] = _NONE
    packed: frozenset[int] = NOTHING
    names: Mapping[int, str] = _NONE

    @property
    def count_of_results(self) -> int:
        """How many results it has."""
        return len(self.results) if type(self.results) is list else 1

    def touches(self) -> Sequence[int]:
        """Return the storages that it made or wrote."""
        return (self.storage,) if self.kind == ONE else [*(key for _, key in self.made), *self.writes]

    def is_view(self) -> bool:
        """Whether it returned a view and no more: also of a placeholder of an enclosing region, which has no kind."""
        if self.kind == VIEW or (self.effects.viewed is not None and self.reads):  # else of a number, such as ``1j``
            return True
        return not self.writes and bool(getattr(self.results, "alias", False))

    def meta(self, place: int) -> Any:
        """Return what is known of one of its results."""
        return self.results[place] if type(self.results) is list else self.results

    def all_places(self) -> frozenset[int]:
        """Return the places of all results and written arguments."""
        return frozenset((WRITTEN, *range(self.count_of_results)))

    def label(self, place: int) -> str:
        """Return the name of one of the results, such as ``attention.mm_2_0``."""
        if self.names and (name := self.names.get(place)) is not None:
            return name
        if self.count < 0:  # it is told by what it is
            return self.effects.name
        return f"{self.path}{self.effects.name}_{self.count}_{place if place > 0 else 0}"

    def labels(self) -> list[str]:
        """Return the automatic names of all results."""
        stem = f"{self.path}{self.effects.name}_{self.count}"
        return [f"{stem}_{place}" for place in range(self.count_of_results)]

    def changed_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors that it writes, also those that it returns without a word in its schema."""
        found = written_arguments(self.effects, args, kwargs) if self.effects.written else []
        if self.effects.foreign and (places := _given_in(self.results)):
            given = list(tensors_in(args, kwargs))
            found += [given[place] for place in places if not any(given[place] is tensor for tensor in found)]
        return found


def entry_of(op: Any) -> type[Entry]:
    """Return the kind of entry of an op: a class, so that what all its calls have in common is not set for each."""
    kind = _entries.get(id(op))  # by identity, as `effects_of` does, which keeps the op
    if kind is None:
        effects = effects_of(op)
        is_view = effects.view and op is not LIFT
        shape = VIEW if is_view else ONE if effects.plain else ODD
        about = {"op": op, "effects": effects, "kind": shape, "kernel": kernel_of(op) if shape else op}
        kind = _entries[id(op)] = type("Entry", (Entry,), about)
    return kind


_entries: dict[int, type[Entry]] = {}


def names_of(entries: Iterable[Entry]) -> Iterator[str]:
    """Yield the names of all results, those given by hand and the automatic ones."""
    for entry in entries:
        yield from entry.names.values()
        if entry.count >= 0 and type(entry.results) in (Meta, WrapperMeta, list):
            yield from entry.labels()


def is_bookkeeping(effects: Effects, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op is no entry: bookkeeping, or a cast of a parameter that autocast may have kept."""
    if effects.ignored:
        return True
    first = args[0] if effects.cast else None
    return (
        isinstance(first, torch.Tensor) and first.is_leaf and first.requires_grad
        and first.dtype is torch.float32 and in_autocast()
        and kwargs.get("dtype") in (torch.bfloat16, torch.float16)
    )  # fmt: skip


def written_arguments(effects: Effects, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an op writes."""
    found: list[torch.Tensor] = []
    for where in effects.written:
        found += tensors_in((argument(where, args, kwargs),), {})
    return found


def still_there(storages: Iterable[StorageWeakRef]) -> set[int]:
    """Return what `key_of` gives for tensors in those storages that still exist."""
    return {storage.cdata for storage in storages if not storage.expired()}


def _given_in(results: Any) -> list[int]:
    if type(results) is Given:
        return [results.place]
    return [place for item in results for place in _given_in(item)] if type(results) is list else []
