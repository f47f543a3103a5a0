"""A call of `region` that is saved: replay leaves it out, with all that its Python does.

In forward: the call's arguments and variables, the ops inside, what autograd saves meanwhile, and the result. Kept:
residents; in the log what replay must know of the result, and of what the call wrote. Out: in replay the result, kept
tensors or placeholders in it, the elided holders filled, and what it wrote put back.

NOTE [ When a saved call is made again ]
To leave a call out is right only if it reaches the rest of its region by its result and by what it writes. Else the
call is *made again*: it runs as a native region does, so that its Python runs once more and its ops are answered from
the log. So it is if
1. a node after it reads one inside that is no result, or a variable, list, dict or set made in the region and in its
   reach holds other objects after it;
2. a gradient is taken in the region before its forward ends: then every call of the region;
3. an op of it must run in replay: a result that replay needs was written in place since, or is no longer there;
4. it returned something that can be no part of the log, such as a generator or a cache object;
5. it wrote a tensor that is made in the region, and that is not to be found among arguments and variables.
What autograd saves in it is kept in each case, so that the second run keeps nothing. One warning says so.
An exception that leaves the call is raised by it in replay, too.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple, Protocol

import optree
import torch
from torch.autograd.graph import Node
from torch.nn import Parameter

from torch_remat._compat import (
    PYTREE_NAMESPACE,
    has_one_output,
    is_refused,
    node_behind,
    node_number,
    sequence_number,
    set_version,
    without_dispatch_modes,
)
from torch_remat.dispatch.check.mismatch import mismatched
from torch_remat.dispatch.handle.variables import (
    Path,
    State,
    at_path,
    changed_in,
    identity_of,
    state_of,
    tensors_reached,
)
from torch_remat.dispatch.handle.whole_call import CallForward, note_backward
from torch_remat.dispatch.holder import (
    AUTOCAST_DTYPES,
    CAST,
    Anchor,
    Holder,
    OpHolder,
    changed_in_place,
    parameter_behind,
)
from torch_remat.dispatch.log.entry import WRITTEN, Entry, WholeCall, run_for_good, still_there
from torch_remat.dispatch.log.meta import Meta, WrapperMeta, described, key_of, layout_of, stand_in
from torch_remat.dispatch.log.record import Left, Record, Stretch
from torch_remat.dispatch.log.slot import Slot
from torch_remat.dispatch.placeholder import Packed, Placeholder, Source
from torch_remat.dispatch.region.inputs import leaves_of, with_leaves
from torch_remat.dispatch.views import Elided, placement_in
from torch_remat.errors import MismatchError, RematWarning, qualified_name
from torch_remat.offload.transfer import Placement
from torch_remat.policies.decision import CheckpointPolicy


class Made(NamedTuple):
    """A tensor of the result that an entry made, or a view of one.

    Attributes:
        entry: The entry; None for the call itself, which must not know itself.
        place: Which of its results; `WRITTEN` if the entry wrote it.
        meta: What is known of the tensor.
        requires_grad: Whether it needs a gradient.
    """

    entry: Entry | None
    place: int
    meta: Any
    requires_grad: bool


class Passed(NamedTuple):
    """A tensor of the result that is an argument or a variable, or a view of one.

    Attributes:
        place: Which of them.
        view: Where it lies there; None if it is the same tensor.
    """

    place: int
    view: Elided | None


class PutBack(NamedTuple):
    """What the call wrote in an argument or a variable.

    Attributes:
        place: Which of them.
        view: Where the written part lies there.
        left: What was left there.
        requires_grad: Whether the tensor needed a gradient afterwards.
    """

    place: int
    view: Elided
    left: Left
    requires_grad: bool


class LeftOut(Record):
    """What replay must know of a saved call to leave it out.

    Attributes:
        identity: What tells its function from others.
        layout: Shape and strides of its arguments.
        again: Why replay makes the call again; empty if it leaves it out.
        raised: Whether an exception left it.
        forms: What the leaves of its result are: `Made`, `Passed`, a `Slot`, or a plain value.
        form: Its result with numbers in place of the leaves, alone in a tuple; empty if it is one leaf.
        put_back: What it wrote in tensors of the region.
        paths: Where those variables are found that are read in replay, by their places after the arguments.
    """

    identity: Any
    layout: Sequence[Any]
    again = ""
    raised = False
    forms: Sequence[Any] = ()
    form: tuple[Any, ...] = ()
    put_back: Sequence[PutBack] = ()
    paths: Mapping[int, Path] = MappingProxyType({})

    def given(self, function: Any, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return arguments and variables in replay, by their places in forward."""
        if not self.paths:
            return leaves
        given = [*leaves, *[None] * (max(self.paths) + 1 - len(leaves))]
        for place, path in self.paths.items():
            given[place] = at_path((function, *leaves), path)
        return given

    def forget_slots(self) -> None:
        """Drop what only a further replay would need."""
        super().forget_slots()
        self.forms = self.put_back = ()
        self.paths = {}


class SavedCall(LeftOut, Stretch):
    """The record of a saved call whose ops are watched.

    Args:
        name: Its name.
        policy: SAVE or OFFLOAD.
        function: What is called.
        leaves: The leaves of its arguments.
    """

    def __init__(self, name: str, policy: CheckpointPolicy, function: Any, leaves: Sequence[Any]) -> None:
        super().__init__(name, policy)
        self.identity = identity_of(function)
        self.layout = layout_of(leaves, {})


class OpaqueCall(LeftOut, WholeCall):
    """The record of a saved call whose ops are not watched, and its own entry in the log."""

    @property
    def identity(self) -> Any:
        """What tells its function from others."""
        return self.op


class Ops(Protocol):
    """What of a region's recorder is asked here."""

    region: Any
    entries: list[Entry]
    storages: Any
    results: Any
    departures: Any
    draws: Any

    def hold(self, record: Any, name: str, tensor: torch.Tensor, policy: CheckpointPolicy) -> Holder | Anchor:
        """Return the holder for a tensor that a call saves."""

    def holder_for(self, op: str, name: str, tensor: torch.Tensor) -> OpHolder:
        """Return a holder without a value."""


class Given:
    """The arguments of a call, then the tensors among its variables, which are looked for only if they are asked for.

    Args:
        call: The record, which is told the paths of variables.
        function: The function.
        leaves: The leaves of its arguments.
    """

    def __init__(self, call: LeftOut, function: Any, leaves: Sequence[Any]) -> None:
        self._call = call
        self._function = function
        self.leaves = leaves
        self._variables: list[tuple[Path, torch.Tensor]] = []
        self._more: Iterator[tuple[Path, torch.Tensor]] | None = None

    def __iter__(self) -> Iterator[Any]:
        yield from self.leaves
        if self._more is None:
            self._more = tensors_reached((self._function, *self.leaves))
        for _, tensor in self._variables:
            yield tensor
        for variable in self._more:
            self._variables.append(variable)
            yield variable[1]

    def use(self, place: int) -> None:
        """Note that replay reads one of them."""
        at = place - len(self.leaves)
        if at >= 0:
            self._call.paths = {**self._call.paths, place: self._variables[at][0]}


class Leaving:
    """A saved call while forward runs: what it leaves to the rest of its region.

    Attributes:
        record: What the log keeps of it.
        given: Its arguments and variables.
        first: The number of the first autograd node that it may make.
        last: That of the first one after it.
        outputs: The nodes of its result, with which of the node's outputs each is; None if they are all that it made.
    """

    record: Any
    given: Given
    first: int
    last = -1
    outputs: set[tuple[Node, int]] | None = None
    _ops: Any
    _state: State

    def note_results(self, result: Any, leaves: Sequence[Any]) -> None:
        """Note how replay comes to the result, or why it makes the call again."""
        record = self.record
        if self.last - self.first > 1 or len(leaves) != 1 or not has_one_output(node_behind(leaves[0])):
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self.outputs = {(node, leaf.output_nr) for leaf in tensors if (node := node_behind(leaf)) is not None}
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                record.again = f"it returned an object of type {type(leaf).__name__}, of which the log can keep nothing"
                return
            if is_refused(leaf):
                record.again = "it returned a view that was made without gradients and whose base has a history now"
                return
        if len(leaves) != 1 or leaves[0] is not result:
            record.form = (optree.tree_map(_nothing, result, namespace=PYTREE_NAMESPACE),)
        record.forms = [
            self._described(leaf, at) if isinstance(leaf, torch.Tensor) else leaf for at, leaf in enumerate(leaves)
        ]

    def note_state(self) -> None:
        """Note whether the call changed what its region goes on with."""
        if self._state and changed_in(self._state, self._ops.region.function):
            self.record.again = "it changed a variable, list, dict or set that was made in the region"

    def cast_of_leaf(self, tensor: torch.Tensor, name: str) -> OpHolder | None:
        """Keep a leaf's copy in a smaller dtype, or a view of it, as what it is: cast again when it is read."""
        owner = tensor if tensor._base is None else tensor._base
        if owner.dtype not in AUTOCAST_DTYPES or (leaf := parameter_behind(owner)) is None or leaf is owner:
            return None
        holder: OpHolder = self._ops.holder_for(self.record.name, name, tensor)
        view = None if owner is tensor else Placement.of(tensor)
        holder.packed = (leaf, leaf._version, self._ops.region)
        holder.unpack = partial(_cast, owner.dtype, view)
        return holder

    def _described(self, leaf: torch.Tensor, at: int) -> Any:
        ops, record = self._ops, self.record
        writer = ops.storages.writer_of(leaf)
        if (
            writer is None
            or writer[0].group != record.name
            or (writer[1] < 0 and ops.storages.is_foreign(key_of(leaf)))
        ):
            if (passed := self._passed(leaf)) is not None:
                return passed
            if leaf.is_leaf and leaf.requires_grad:
                return Slot(leaf, None)
            if writer is None:
                return Slot(leaf, ops.region.hooks)
        assert writer is not None
        if writer[0] is record:
            return Made(None, at, record.meta(at), leaf.requires_grad)
        meta = described(leaf, None)
        if type(meta) in (Meta, WrapperMeta) and (writer[1] >= 0 or len(writer[0].writes) == 1):
            return Made(writer[0], writer[1], meta, leaf.requires_grad)
        record.again = "it returned a tensor that the log cannot describe"
        return None

    def _passed(self, leaf: torch.Tensor) -> Passed | None:
        """Describe an argument or a variable, or a view of one."""
        is_plain = leaf.layout is torch.strided and type(leaf) is torch.Tensor
        key, view = key_of(leaf), None
        for place, given in enumerate(self.given):
            if given is leaf:
                self.given.use(place)
                return Passed(place, None)
            is_base = view is None and is_plain and type(given) in _USUAL and given.layout is torch.strided
            if is_base and key_of(given) == key:
                view = Passed(place, _view(Placement.of(leaf), Placement.of(given)))
        if view is not None:
            self.given.use(view.place)
        return view


class WatchedCall(Leaving):
    """A saved call whose ops are watched.

    Args:
        ops: The recorder of the region around it.
        name: The call's name.
        policy: SAVE or OFFLOAD.
        function: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(
        self, ops: Ops, name: str, policy: CheckpointPolicy, function: Any, args: Sequence[Any], kwargs: Any
    ) -> None:
        leaves = args if is_flat(args, kwargs) else leaves_of(args, kwargs)
        self.record = record = SavedCall(name, policy, function, leaves)
        self.given = Given(record, function, leaves)
        self._ops = ops
        self._saved = 0
        self._names: set[str] = set()
        self._state = state_of(function, args, kwargs)
        if ops.draws is not None:
            ops.draws.begin()
        self.first = sequence_number()

    def pack(self, tensor: torch.Tensor) -> Holder | Anchor:
        """Return what autograd keeps of a tensor that the call saves."""
        ops, record = self._ops, self.record
        if type(tensor) is Parameter:
            return (tensor, tensor._version, ops.region)
        if ops.results.unread:
            ops.results.read_versions()
        name = f"saved_{self._saved}"
        self._saved += 1
        writer = ops.storages.writer_of(tensor) if ops.entries else None
        if writer is None:
            if (held := self.cast_of_leaf(tensor, name)) is not None:
                return held
        elif writer[0].group == record.name and writer[1] >= 0:
            label = writer[0].label(writer[1])
            name = name if label in self._names else label
            self._names.add(label)
        held = ops.hold(record, name, tensor, CheckpointPolicy.SAVE)
        leaves = record.policy is CheckpointPolicy.OFFLOAD and ops.region.hooks is None
        if leaves and type(held) is OpHolder and held.resident:
            ops.departures.waiting.append((held, tensor))
        return held

    def returns(self, result: Any) -> None:
        """Note what the call returned, and what it left."""
        ops, record = self._ops, self.record
        if ops.departures.waiting:
            ops.departures.send()
        self.last = sequence_number()
        record.drawn = None if ops.draws is None else ops.draws.end()
        leaves = (result,) if isinstance(result, torch.Tensor) else leaves_of((result,), {})
        self.note_results(result, leaves)
        self.note_state()
        if not self._saved:
            note_backward(ops.region, self.first, leaves)
        if record.left or ops.storages.has_writes:
            self._note_writes()

    def left_by(self, _error: BaseException) -> None:
        """Note that an exception left the call: replay makes it again, so that it is raised again."""
        self.record.raised = True
        self.last = sequence_number()

    def _note_writes(self) -> None:
        """Find what the call wrote among arguments and variables."""
        record, entries = self.record, self._ops.entries[self.record.start : self.record.end]
        made = {key for entry in entries for key in (entry.storage, *(key for _, key in entry.made))}
        writing = [entry for entry in entries if not made.issuperset(entry.writes)]
        for entry in writing:
            if any(key not in made and not self._ops.storages.is_foreign(key) for key in entry.writes):
                record.again = "it wrote a result of another saved op in place"
                return
        found = []
        for left in record.left:
            known = ((at, one) for at, one in enumerate(self.given) if _is_of(one, left.storage.cdata))
            place, source = next(known, (-1, None))
            if source is None and is_buffer(self._ops.region, left.storage.cdata):
                continue  # it outlives the region
            if source is None:
                record.again = "it wrote a tensor in place that is neither among its arguments nor in its reach"
                return
            self.given.use(place)
            if source.grad_fn is not None:
                self.outputs = {*(self.outputs or ()), (source.grad_fn, source.output_nr)}
            found.append(PutBack(place, _view(left.lies, Placement.of(source)), left, source.requires_grad))
        record.put_back = found
        for entry in writing:
            entry.restored = True


class UnwatchedCall(Leaving, CallForward):
    """A saved call whose ops are not watched, since its author promises that they write nothing outside.

    Args:
        ops: The recorder of the region around it.
        name: The call's name.
        policy: SAVE or OFFLOAD.
        function: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    kind = OpaqueCall

    def __init__(
        self, ops: Any, name: str, policy: CheckpointPolicy, function: Any, args: Sequence[Any], kwargs: Any
    ) -> None:
        leaves = args if is_flat(args, kwargs) else leaves_of(args, kwargs)
        super().__init__(ops, name, policy, identity_of(function), leaves)
        self.given = Given(self.record, function, leaves)
        self._state = state_of(function, args, kwargs)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd keeps of a tensor that the call saves."""
        if tensor.dtype in AUTOCAST_DTYPES and (held := self.cast_of_leaf(tensor, f"saved_{self._saved}")) is not None:
            self._saved += 1
            return held
        return super().pack(tensor)

    def _returns_one(self, result: torch.Tensor) -> None:
        super()._returns_one(result)
        self.note_state()
        self.last = sequence_number()
        if (node := result.grad_fn) is not None and (self.last - self.first > 1 or not has_one_output(node)):
            self.outputs = {(node, result.output_nr)}

    def _returns_odd(self, result: Any) -> None:
        leaves = (result,) if isinstance(result, torch.Tensor) else leaves_of((result,), {})
        self._note_several(result, leaves)
        self.last = sequence_number()
        self.note_results(result, leaves)
        self.note_state()
        if self.record.again:
            self.record.leaves = self.record.results = ()  # which may be any objects

    def left_by(self, _error: BaseException) -> None:
        """Note that an exception left the call: replay makes it again, so that it is raised again."""
        self.record.raised = True
        self.last = sequence_number()
        self._end()


def is_buffer(region: Any, key: int) -> bool:
    """Whether a storage is that of a buffer of a module that the region reaches."""
    return region.buffers is not None and key in map(key_of, region.buffers.tensors())


def is_flat(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether there are only positional arguments, and each is a leaf."""
    return not kwargs and _FLAT.issuperset(map(type, args))


_USUAL = frozenset((torch.Tensor, Parameter))
_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.layout, Enum, type)
_FLAT = frozenset((*_USUAL, Placeholder, int, float, bool, str, complex, type(None)))


def _nothing(_leaf: Any) -> int:
    return 0


def _nobody() -> None:
    return None


def _is_of(tensor: Any, key: int) -> bool:
    return isinstance(tensor, torch.Tensor) and key_of(tensor) == key


def _view(view: Placement, source: Placement) -> Elided:
    """Describe how a tensor lies in the storage of another, though no holder waits for it."""
    return Elided(_nobody, 0, view, source)  # type: ignore[arg-type]


def _cast(dtype: torch.dtype, view: Placement | None, anchor: Anchor) -> torch.Tensor:
    leaf, version, region = anchor
    if leaf._version != version:
        raise changed_in_place(region, "parameter", leaf.shape)
    with without_dispatch_modes():
        cast = leaf.detach().to(dtype)
        return cast if view is None else view.seen_in(cast)


# At the end of forward.

Saved = WatchedCall | UnwatchedCall


def mark_calls_made_again(
    calls: Sequence[Saved], entries: Sequence[Entry], boundary: Sequence[Node | None], taken: bool
) -> None:
    """Find the calls that are made again because of what came after them; see the note above.

    Args:
        calls: The saved calls of a region, in their order.
        entries: The region's log.
        boundary: The nodes of its outputs.
        taken: Whether a gradient was taken before forward ended.
    """
    _mark_escapes(calls, boundary)
    for call in calls:
        record = call.record
        if taken:
            record.again = record.again or "a gradient is taken in the region before its forward ends"
        if isinstance(record, OpaqueCall):
            if record.again:
                run_for_good([record])
        elif taken:
            run_for_good(entries[record.start : record.end])


def runs(record: Any, entries: Sequence[Entry]) -> bool:
    """Whether replay runs something of a call."""
    if isinstance(record, OpaqueCall):
        return record.run
    return any(entry.run for entry in entries[record.start : record.end])


def _mark_escapes(calls: Sequence[Saved], boundary: Sequence[Node | None]) -> None:
    calls = [call for call in calls if call.outputs is not None]
    if not calls:
        return
    starts = [call.first for call in calls]

    def call_of(number: int) -> Saved | None:
        at = bisect_right(starts, number) - 1
        return calls[at] if at >= 0 and number < calls[at].last else None

    todo = [node for node in boundary if node is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        reader = call_of(node_number(node))
        for child, place in node.next_functions:
            if child is None or (number := node_number(child)) < starts[0]:
                continue
            call = call_of(number)
            if (
                call is not None
                and call is not reader
                and (child, place) not in (call.outputs or ())
                and not _is_cast(child)
            ):
                call.record.again = call.record.again or "the region goes on with a tensor of it that it did not return"
            if child not in seen:
                seen.add(child)
                todo.append(child)


def _is_cast(node: Node) -> bool:
    """Whether a node is that of a leaf's cast, which autocast makes once for all that read it."""
    return type(node) is CAST and hasattr(node.next_functions[0][0], "variable")


def check_needs(region: Any, calls: Sequence[Saved], entries: Sequence[Entry]) -> None:
    """Once it is known what replay runs: mark the calls of which it runs something, and warn of all that are marked."""
    for call in calls:
        record = call.record
        if not record.again and runs(record, entries):
            record.again = "replay needs a result of it that was changed in place after it, or that is no longer there"
        if record.again and not record.raised:
            _warn(region, record)


def _warn(region: Any, record: LeftOut) -> None:
    code = record.identity
    file, line = (code.co_filename, code.co_firstlineno) if isinstance(code, CodeType) else ("torch_remat", 0)
    warnings.warn_explicit(
        f"{qualified_name(region.name, record.name)}: replay makes this call again, since {record.again}. Its Python "
        "runs a second time, its ops do not; the gradients are right all the same. To spare the second run, return "
        "all that the region goes on with, and change nothing of it in place; or use remat.native_save_region, whose "
        "Python always runs again.",
        RematWarning,
        file,
        line,
        registry=_warned,
    )


_warned: dict[Any, Any] = {}


# In replay.


class Replay(Protocol):
    """What of a region's replay is asked here."""

    region: Any

    def note_loaded(self, tensor: torch.Tensor) -> None:
        """Note a tensor that was kept."""


_SAME = "A region must make the same calls in both phases, on tensors that lie in memory in the same way."


def of_another_function(region: Any, call: LeftOut, function: Any) -> MismatchError:
    """Return the error about a call that is not that of forward."""
    same = identity_of(function) == call.identity
    return mismatched(
        region,
        f"replay made this call {'with tensors of other shapes or strides' if same else 'of another function'}",
        _SAME,
        op=call.name,
    )


def put_back(replay: Replay, call: LeftOut, given: Sequence[Any]) -> bool:
    """Leave in arguments and variables what the call left there; return whether all of them are as in forward."""
    moved = set()
    for place, view, left, requires_grad in call.put_back:
        tensor = given[place]
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, Placeholder):
            return False
        if key_of(tensor) in still_there([left.storage]):
            continue  # it outlives the region, and was changed in forward
        if tensor.requires_grad != requires_grad:
            return False  # it has to get a history
        value = left.slot.load(replay.region.name, call.name, "written")
        with torch.no_grad(), without_dispatch_modes():
            target = view.value(tensor)
            if target is None or target.shape != value.shape:
                return False
            target.data.copy_(value)
        if place not in moved:
            moved.add(place)
            set_version(tensor, tensor._version + left.times)
            replay.note_loaded(tensor)  # its history is not forward's
    return True


def result_of(
    replay: Replay,
    call: LeftOut,
    given: Sequence[Any],
    load: Callable[[Slot, str, str], torch.Tensor],
    start_over: Callable[[Entry, int, str], Any],
) -> Any:
    """Return what a call that is left out returned in forward.

    Args:
        replay: The replay.
        call: The call.
        given: Its arguments and variables in replay.
        load: Returns what a slot keeps; takes the names of the call and of the tensor, too.
        start_over: Ends a replay in which something reads a result that was not kept.
    """
    name, leaves = replay.region.name, []
    for form in call.forms:
        value = form
        if type(form) is Made:
            made, place, meta, requires_grad = form
            entry: Any = call if made is None else made
            slot = entry.kept.get(place) if place != WRITTEN else next(iter(entry.written), None)
            label = entry.label(place)
            if slot is None:
                value = stand_in(meta, Source(name, call.name, label), partial(start_over, entry, place))
            else:
                value = _seen(load(slot, call.name, label), entry, place, meta)
                replay.note_loaded(value)
            value.requires_grad_(requires_grad)
        elif type(form) is Passed:
            value = given[form.place]
            if form.view is not None and (value := form.view.value(value, with_history=True)) is None:
                raise mismatched(
                    replay.region, "replay returned a view of a tensor that lies otherwise", _SAME, op=call.name
                )
        elif type(form) is Slot:
            value = load(form, call.name, "out")
            replay.note_loaded(value)
        leaves.append(value)
    return with_leaves(call.form, {}, leaves)[0][0] if call.form else leaves[0]


def _seen(value: torch.Tensor, entry: Entry, place: int, meta: Any) -> torch.Tensor:
    """Return what was returned, as a view of what was kept of the entry."""
    own = entry.meta(place) if place != WRITTEN else None
    if type(meta) is not Meta or meta == own or (type(own) is not Meta and meta.describes(value)):
        return value
    seen = _view(placement_in(meta), placement_in(own) if type(own) is Meta else Placement.of(value)).value(value)
    return value if seen is None else seen


def kept_of_second_run(tensor: torch.Tensor) -> torch.Tensor | Packed:
    """Pack hook of a call that is made again: forward's holders have what backward needs."""
    return Packed.of(tensor) if isinstance(tensor, Placeholder) else tensor.detach()
