"""One entry of the log: something that forward ran and that replay may leave out.

In: what forward noted of it. Kept: metadata, the decision about it, and slots for what replay needs. Out: what replay
answers in its place.

An entry is an aten op that was watched, or a *call*: an op with a handle, or a function of torch's own that a native
region calls. Replay does not see what happens inside of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat._compat import in_autocast, kernel_of
from torch_remat.dispatch.log.meta import Given, Meta, Raised, WrapperMeta, has_placeholder, tensors_in
from torch_remat.dispatch.log.record import NO_SLOTS, Record
from torch_remat.dispatch.log.schema import LIFT, UNKNOWN, Effects, argument, effects_of
from torch_remat.dispatch.placeholder import Placeholder, reshape
from torch_remat.policies.decision import CheckpointPolicy

if TYPE_CHECKING:
    from torch_remat.dispatch.ambient import RngState
    from torch_remat.dispatch.log.slot import Slot

NOTHING: frozenset[int] = frozenset()
FIRST = frozenset((0,))
_NONE: Mapping[int, Any] = MappingProxyType({})
ODD, ONE, SEVERAL, VIEW, CALL = range(5)  # kinds of entries, see `Entry`
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
        group: The native region, or the op with a handle, in which it ran; empty outside of such.
        effects: What it does besides computing.
        kind: `ONE` if it made one new ordinary tensor, `SEVERAL` if it made several, `VIEW` if it returned views of its
            first argument, in each case from ordinary tensors and numbers, and did nothing else; `CALL` for a call;
            otherwise `ODD`.
        reads: The storages of its arguments.
        layout: Shape and strides of the tensors among its arguments, if its results are saved.
        listed: Whether there are lists of tensors among its arguments, though it is of a kind.
        version: The version counter of a tensor from outside before the op gave it another shape.
        early: The storages from outside that it reads and that a later entry writes.
        writes: The storages of the arguments that it writes.
        whole: Whether it writes its arguments' whole storages.
        ends: Whether it writes a part, and the call in which it ran, if that is left out, keeps all that is there then.
        restored: Whether the call in which it ran leaves in them what it wrote, also without running it.
        outside: Those of them that come from outside the region.
        repeats: Whether replay writes these again.
        made: The storages of its new results, by their place, unless there is just `storage`.
        storage: That of its one new result, if its kind is `ONE`.
        saved: The places of the results that are to be kept if replay needs them.
        away: Those of them that leave the device.
        always: Whether replay runs it whatever it is needed for.
        run: Whether replay runs it.
        before: The random generators before it, if replay must set them.
        moved: Whether something else than an op had set them since the last random op (`torch.random.fork_rng`).
        kept: The results that are kept for replay, by their place.
        written: What it left in the arguments that it writes, if that is kept.
        packed: The places of the results that autograd saved, if somebody asks.
        names: The names that were given to results by hand.
        gone: Storages that nothing reaches once it is over: whatever lies at their addresses later is another.
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
    reads: Sequence[int] = ()
    layout: Sequence[tuple[torch.Size, tuple[int, ...]]] = ()
    listed = False
    version: int | None = None
    early: Sequence[StorageWeakRef] = ()
    writes: Sequence[int] = ()
    restored = False
    outside: Sequence[StorageWeakRef] = ()
    made: Sequence[tuple[int, int]] = ()
    storage = 0
    saved: frozenset[int] = NOTHING
    away: frozenset[int] = NOTHING
    whole = True
    ends = False
    always = run = moved = repeats = False
    before: RngState | None = None
    kept: Mapping[int, Slot] = _NONE
    written: Sequence[Slot] = ()
    packed: frozenset[int] = NOTHING
    names: Mapping[int, str] = _NONE
    gone: Collection[int] = ()

    @property
    def count_of_results(self) -> int:
        """How many results it has."""
        return len(self.results) if type(self.results) is list else 1

    def touches(self) -> Sequence[int]:
        """Return the storages that it made or wrote."""
        return (self.storage,) if self.kind == ONE else [*(key for _, key in self.made), *self.writes]

    def is_view(self) -> bool:
        """Whether it returned a view and no more: also of a placeholder of a region around, which has no kind."""
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
        if self.effects.namespace != "aten" and (places := _given_in(self.results)):
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


# Where it leaves the random generators its record tells.
_OF_A_CALL = UNKNOWN._replace(random=False)


class Call(Record, Entry):
    """What replay leaves out whole: a record, and its own entry in the log."""

    effects = _OF_A_CALL

    def forget_slots(self) -> None:
        """Drop what only a further replay would need."""
        if self.drawn is not None:
            self.drawn = None
        if self.kept:
            self.kept = _NONE
        if self.slots:
            self.slots = NO_SLOTS


class HandleCall(Call):
    """An op with a handle that replay skips; an entry only where ops are watched.

    Attributes:
        results: What replay must know of its outputs; None if its body has raised.
        plain: The places of the outputs that are not differentiable.
    """

    kind = CALL
    plain: Sequence[int] = ()
    group: str

    @property
    def op(self) -> HandleCall:
        """The entry itself, by which the log knows it."""
        return self


class WholeCall(Call):
    """One call of a function of torch's own.

    Attributes:
        versions: The version counters of its arguments, by place.
        leaves: The leaves of its result: for each tensor whether it needs a gradient, other values as they are.
        template: Its result with numbers in place of the leaves, alone in a tuple; empty if it is one leaf.
        is_entry: Whether it stands in the log. It does not if all its results are views of its arguments, which cost
            nothing, so that replay makes the call again, nor if it raised.
    """

    kind = ONE
    saved = FIRST
    versions: Sequence[tuple[int, int]] = ()
    leaves: Sequence[Any] = ()
    template: tuple[Any, ...] = ()
    is_entry = False

    def __init__(self, name: str, policy: CheckpointPolicy, op: Any, layout: Sequence[Any]) -> None:
        self.name = self.group = name
        self.policy = policy
        self.op = op
        self.layout = layout
        if policy is CheckpointPolicy.OFFLOAD:
            self.away = FIRST

    def label(self, place: int) -> str:
        """Return the name of a result."""
        return str(max(place, 0)) if self.template else "out"

    def forget_slots(self) -> None:
        """Drop what only a further replay would need; its inputs are in no slots."""
        super().forget_slots()
        self.results = None


def names_of(entries: Iterable[Entry]) -> Iterator[str]:
    """Yield the names of all results, those given by hand and the automatic ones."""
    for entry in entries:
        yield from entry.names.values()
        if entry.kind != CALL and entry.count >= 0 and type(entry.results) in (Meta, WrapperMeta, list):
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
        value = argument(where, args, kwargs)
        values = value if isinstance(value, (list, tuple)) else [value]
        found += [item for item in values if isinstance(item, torch.Tensor)]
    return found


def still_there(storages: Iterable[StorageWeakRef]) -> set[int]:
    """Return what `key_of` gives for tensors in those storages that still exist."""
    return {storage.cdata for storage in storages if not storage.expired()}


def answered(
    entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any], make: Callable[[int, Any], torch.Tensor]
) -> Any:
    """Return what replay answers an op with that it does not run; ``make`` makes the tensor for one of the results."""
    results, effects = entry.results, entry.effects
    if type(results) is Raised:
        raise results.kind(*results.args)
    if effects.written and len(effects.returned) == 1 and effects.returned[0] >= 0:
        return _fitted(argument(effects.written[effects.returned[0]], args, kwargs), results)
    if effects.reshapes:
        return reshape(entry.op, args, kwargs) if isinstance(args[0], Placeholder) else entry.op(*args, **kwargs)
    if type(results) is Given:
        return list(tensors_in(args, kwargs))[results.place]
    several = type(results) is list
    base = argument(effects.viewed, args, kwargs) if effects.viewed is not None else None
    if any(getattr(item, "alias", False) for item in (results if several else [results])):
        base = args[0]
    # Placeholders inside of a wrapper subclass give views, but not what is one without the schema saying so.
    is_there = not (has_placeholder(base) if effects.viewed is None else isinstance(base, Placeholder))
    if isinstance(base, torch.Tensor) and is_there:
        return entry.op(*args, **kwargs)  # views of a tensor that is there
    if not several:
        return _of_base(base, _answered_item(results, 0, (), make))
    given = list(tensors_in(args, kwargs))
    made = [
        _fitted(argument(effects.written[effects.returned[place]], args, kwargs), item)
        if place < len(effects.returned) and effects.returned[place] >= 0
        else _of_base(base, _answered_item(item, place, given, make))
        for place, item in enumerate(results)
    ]
    return made if len(effects.returned) == 1 else tuple(made)


def _fitted(written: Any, meta: Any) -> Any:
    """Return a written argument in the shape that the op has given it: ``out=`` tensors are resized."""
    if type(meta) is Meta and isinstance(written, torch.Tensor) and written.shape != meta.geometry[0]:
        if isinstance(written, Placeholder):
            written.resized = True
        else:
            written.resize_(meta.geometry[0])
    return written


def _of_base(base: Any, view: Any) -> Any:
    if isinstance(base, Placeholder) and isinstance(view, Placeholder):
        view.source = base.source  # by which what shares a storage is known
    return view


def _answered_item(
    item: Any, place: int, given: Sequence[torch.Tensor], make: Callable[[int, Any], torch.Tensor]
) -> Any:
    if type(item) in (Meta, WrapperMeta):
        return make(place, item)
    if type(item) is Given:
        return given[item.place]
    if type(item) is list:
        return [_answered_item(inner, place, given, make) for inner in item]
    return item


def _given_in(results: Any) -> list[int]:
    if type(results) is Given:
        return [results.place]
    return [place for item in results for place in _given_in(item)] if type(results) is list else []


def run_for_good(entries: Sequence[Entry]) -> None:
    """Make the ops of a forward that is not over run in each replay: a backward inside of it goes through them."""
    for entry in entries:
        entry.always = entry.run = not entry.is_view()
