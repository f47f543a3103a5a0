"""One entry of the log: something that forward ran and that replay may skip.

In: what forward noted of it. Kept: metadata, the decision about it, and slots for what replay needs. Out: what replay
answers in its place.

An entry is an aten op under a policy, or a *call*: something with a name that replay skips whole or runs whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat._compat import in_autocast, kernel_of
from torch_remat.dispatch.log.meta import (
    Given,
    GivenView,
    Meta,
    Raised,
    WrapperMeta,
    has_placeholder,
    tensors_in,
    view_of,
)
from torch_remat.dispatch.log.schema import LIFT, UNKNOWN, Effects, argument, effects_of
from torch_remat.dispatch.placeholder import Placeholder, reshape
from torch_remat.policies.decision import CheckpointPolicy

if TYPE_CHECKING:
    from torch_remat.dispatch.ambient import RngState
    from torch_remat.dispatch.log.slot import Elided, Slot

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
        group: Of a call its name; empty for an op.
        effects: What it does besides computing.
        kind: `ONE` if it made one new ordinary tensor, `SEVERAL` if it made several, `VIEW` if it returned views of its
            first argument, in each case from ordinary tensors and numbers, and did nothing else; `CALL` for a call;
            otherwise `ODD`.
        reads: The storages of its arguments.
        layout: Shape and strides of the tensors among its arguments, if its results are saved.
        listed: Whether there are lists of tensors among its arguments, though it is of a kind.
        form: The tree that a higher-order op returned, of which `results` are the leaves; None if these are all.
        version: The version counter of a tensor created outside the region before the op gave it another shape.
        early: The storages created outside the region that it reads and that a later entry writes.
        writes: The storages of the arguments that it writes.
        whole: Whether it writes its arguments' whole storages.
        outside: Those of them that were created outside the region.
        repeats: Whether replay writes these again.
        made: The storages of its new results, by their place, unless there is just `storage`.
        storage: That of its one new result, if its kind is `ONE`.
        saved: The places of the results that are to be kept if replay needs them.
        away: Those of them that leave the device.
        barred: The places of the results that the policy excludes by name.
        always: Whether replay runs it whatever it is needed for.
        run: Whether replay runs it.
        before: The random generators before it, if replay must set them.
        kept: The results that are kept for replay, by their place.
        written: What it left in the arguments that it writes, if that is kept.
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
    reads: Sequence[int] = ()
    layout: Sequence[tuple[torch.Size, tuple[int, ...]]] = ()
    listed = False
    form: Any = None
    version: int | None = None
    early: Sequence[StorageWeakRef] = ()
    writes: Sequence[int] = ()
    outside: Sequence[StorageWeakRef] = ()
    made: Sequence[tuple[int, int]] = ()
    storage = 0
    saved: frozenset[int] = NOTHING
    away: frozenset[int] = NOTHING
    barred: frozenset[int] = NOTHING
    whole = True
    always = run = repeats = False
    before: RngState | None = None
    kept: Mapping[int, Slot] = _NONE
    written: Sequence[Slot] = ()
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


# Where it leaves the random generators the call itself stores.
_OF_A_CALL = UNKNOWN._replace(random=False)


class Call(Entry):
    """Something with a name: a call of `op`, a native region, or an op with a handle.

    Attributes:
        name: Its name, with its scopes.
        policy: Its policy.
        function: What identifies its function in both phases; None for a handle.
        results: For each leaf of the result a `Meta` or `WrapperMeta` if the call made the tensor; else where it comes
            from (`Passed`, `Again`), or the value itself. Alone if the result is one leaf. `Raised` if it raised.
        gradients: For each leaf that the call made, whether it needs a gradient.
        template: The form of the result, alone in a tuple; empty if it is one leaf.
        layout: Shape and strides of its tensor arguments.
        start: How many tensors the region had saved when the call began.
        end: How many when it ended, or had saved what it saves.
        waiting: Saved tensors that replay has: arguments and variables, or views of these.
        places: Where variables among these, or among the results, are found, by their number after the arguments.
        drawn: Where the call left the random generators, if it drew numbers.
        answers: The ops of a native region, in order, each with its results; None for other calls.
        plain: The outputs of a handle that are not differentiable.
        inputs: What is kept of those arguments that are outputs of handles, by their number, if replay runs the call.
        views: Which of them are views.
        touched: Whether it modified something created outside the region.
        wrote: The tensors created outside the region that it modified and that replay cannot put back, by name.
        modified: Arguments and variables that it modified, by place, with weak references to their storages: replay
            runs it whole if it has others there, which the region makes.
        higher: Whether a higher-order op ran in it that gets placeholders in replay, if it is a native region.
        why: Why replay runs it whole; empty if it skips it.
        function_number: How many calls of its torch function came before it, if a policy that lists it has made it.
        held: What a call of a torch function returned and is kept, by place, with versions, until forward ends.
        is_answered: Whether replay goes on past it, so that there is what it returned, or what stands in for that.
        casts: Which of its arguments autocast casts before it runs, by place; None without autocast.
        is_saved: Whether it keeps what it has saved; decided at the end of forward, if its policy says so.
    """

    kind = CALL
    effects = _OF_A_CALL
    name = ""
    policy = CheckpointPolicy.SAVE
    function: Any = None
    results: Any = None
    gradients: Sequence[bool] = ()
    template: tuple[Any, ...] = ()
    layout: Sequence[Any] = ()
    start = end = 0
    waiting: Sequence[Elided] = ()
    places: Mapping[int, tuple[int, Any]] = _NONE
    drawn: RngState | None = None
    answers: Sequence[Entry] | None = None
    plain: Sequence[int] = ()
    inputs: Mapping[int, Slot] = _NONE
    views: Sequence[int] = ()
    touched = higher = False
    wrote: Sequence[str] = ()
    modified: Sequence[tuple[int, StorageWeakRef]] = ()
    why = ""
    function_number = -1
    held: Sequence[tuple[int, torch.Tensor, int]] = ()
    is_answered = False
    casts: Sequence[int] | None = None
    is_saved = True

    def __init__(self, name: str, policy: CheckpointPolicy, function: Any = None) -> None:
        self.name = self.group = name
        self.policy = policy
        self.function = function

    @property
    def op(self) -> Call:
        """The call itself, by which the log knows it."""
        return self

    @property
    def is_skipped(self) -> bool:
        """Whether replay skips what it saved: its range of the tape."""
        return self.answers is None and self.policy is not CheckpointPolicy.RECOMPUTE and self.is_saved

    @property
    def is_handle(self) -> bool:
        """Whether it is an op with a handle."""
        return self.function is None

    def label(self, place: int) -> str:
        """Return the name of a result: ``out``, or its number if there are several."""
        return str(max(place, 0)) if self.template else "out"

    def forget(self) -> None:
        """Drop what only a further replay would need; reports still ask for the saved tensors that replay has."""
        if self.drawn is not None:
            self.drawn = self.before = None
        self.kept = self.inputs = _NONE
        if self.answers is not None:
            self.answers = ()


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
        found += tensors_in((argument(where, args, kwargs),), {})
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
    given = list(tensors_in(args, kwargs)) if several or type(results) is WrapperMeta else ()
    if not several:
        return _of_base(base, _answered_item(results, 0, given, make))
    made = [
        _fitted(argument(effects.written[effects.returned[place]], args, kwargs), item)
        if place < len(effects.returned) and effects.returned[place] >= 0
        else _of_base(base, _answered_item(item, place, given, make))
        for place, item in enumerate(results)
    ]
    if entry.form is not None:
        return optree.tree_unflatten(entry.form, made)
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
    if type(item) is WrapperMeta:
        item = item.around(given)
    if type(item) in (Meta, WrapperMeta):
        return make(place, item)
    if type(item) is Given:
        return given[item.place]
    if type(item) is GivenView:
        return view_of(given[item.place], item.meta)
    if type(item) is list:
        return [_answered_item(inner, place, given, make) for inner in item]
    return item


def _given_in(results: Any) -> list[int]:
    if type(results) is Given:
        return [results.place]
    return [place for item in results for place in _given_in(item)] if type(results) is list else []
