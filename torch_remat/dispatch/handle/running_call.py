"""A call of `op` that is saved, while forward runs: replay leaves it out, with all that its Python does.

In: the call's arguments and variables, the ops inside, what autograd saves meanwhile, and the result. Kept: residents,
and the record of the call. Out: what replay makes again, and why.

NOTE [ When a saved call is made again ]
To leave a call out is right only if it reaches the rest of its region by its result and by what it writes. Else the
call is *made again*: it runs as a native region does, so that its Python runs once more, and its ops are answered from
the log or run where they are needed. So it is if
1. a node after it reads one inside that is no result, or a variable, list, dict or set made in the region and in its
   reach holds other objects after it;
2. an op of it must run in replay: a result that replay needs was written in place since, or is no longer there;
3. it returned something that can be no part of the log, such as a generator or a cache object;
4. it wrote a tensor that is made in the region, and that is not to be found among arguments and variables, or that
   code outside of calls wrote once more; in a region with a policy, any that was there before and is no buffer; or it
   gave one another shape in place (``unsqueeze_``).
What autograd saves in it is kept in each case, so that the second run keeps nothing. One warning says so.
An exception that leaves the call is raised by it in replay, too.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.nn import Parameter

from torch_remat._compat import (
    has_one_output,
    in_autocast,
    is_refused,
    node_behind,
    node_number,
    sequence_number,
    without_dispatch_modes,
)
from torch_remat.dispatch.handle.saved_call import (
    Again,
    LeftOut,
    Made,
    OpaqueCall,
    Passed,
    PutBack,
    SavedCall,
    is_flat,
    lying_in,
    runs,
)
from torch_remat.dispatch.handle.variables import Path, State, changed_in, identity_of, state_of, tensors_reached
from torch_remat.dispatch.handle.whole_call import CallForward, refuse_gradient, template_of
from torch_remat.dispatch.holder import (
    AUTOCAST_DTYPES,
    CAST,
    Anchor,
    Holder,
    OpHolder,
    changed_in_place,
    parameter_behind,
)
from torch_remat.dispatch.log.entry import Entry, run_for_good
from torch_remat.dispatch.log.meta import Meta, WrapperMeta, described, key_of
from torch_remat.dispatch.log.slot import Slot
from torch_remat.dispatch.placeholder import Placeholder
from torch_remat.dispatch.region.inputs import leaves_of
from torch_remat.errors import RematWarning, qualified_name, user_line
from torch_remat.offload.transfer import Placement
from torch_remat.policies.decision import CheckpointPolicy


class Given:
    """The arguments of a call, then the tensors among its variables, looked for only if they are asked for."""

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
        named: Tensors that autograd saves next, by the names that `auto_forward` gives them.
    """

    record: Any
    given: Given
    first: int
    last = -1
    outputs: set[tuple[Node, int]] | None = None
    named: Sequence[tuple[str, torch.Tensor | None]] = ()
    _ops: Any
    _saved: int
    _names: set[str]
    _state: State

    def next_name(self, tensor: torch.Tensor) -> str:
        """Return the name of a tensor that autograd saves now; each name is given once."""
        for name, expected in self.named:
            if expected is tensor and name not in self._names:
                self._names.add(name)
                return name
        return f"saved_{self._saved}"

    def note_results(self, result: Any, leaves: Sequence[Any]) -> None:
        """Note how replay comes to the result, or why it makes the call again."""
        record = self.record
        made = self.last - self.first
        if made > 1 or (made and not (len(leaves) == 1 and has_one_output(node_behind(leaves[0])))):
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
            record.template = template_of(result)
        record.forms = []
        seen: dict[int, int] = {}
        for at, leaf in enumerate(leaves):
            form = leaf
            if isinstance(leaf, torch.Tensor):
                first = seen.setdefault(id(leaf), at)
                form = self._described(leaf, at) if first == at else Again(first)
            record.forms.append(form)

    def let_go(self) -> None:
        """Let go of arguments and variables, once the call is over: the region may be done with them."""
        del self.given, self._state

    def note_state(self) -> None:
        """Note whether the call changed what its region goes on with."""
        if self._state and changed_in(self._state, self._ops.region.function):
            self.record.again = "it changed a variable, container, iterator or object that was made in the region"

    def cast_of_leaf(self, tensor: torch.Tensor, name: str) -> OpHolder | None:
        """Keep a leaf's copy in a smaller dtype, or a view of it, as what it is: cast again when it is read."""
        owner = tensor if tensor._base is None else tensor._base
        if owner.dtype not in AUTOCAST_DTYPES or (leaf := parameter_behind(owner)) is None or leaf is owner:
            return None
        node = owner.grad_fn
        if node is None or (node_number(node) < self._ops.region.first_number and not in_autocast()):
            return None  # a copy of the user's own, which need not follow the leaf
        holder: OpHolder = self._ops.holder_for(self.record.name, name, tensor)
        view = None if owner is tensor else Placement.of(tensor)
        holder.packed = (leaf, leaf._version, self._ops.region, self.record.name)
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
                return leaf
            if writer is None:
                return Slot(leaf.detach(), ops.region.hooks, leaf.requires_grad)
        assert writer is not None
        if writer[0] is record:
            return Made(None, at, record.meta(at), leaf.requires_grad)
        meta = described(leaf, None)
        if type(meta) in (Meta, WrapperMeta) and (writer[1] >= 0 or len(writer[0].writes) == 1):
            if not (writer[1] >= 0 or writer[0].whole):
                ops.results.note_end(writer[0], leaf if leaf._base is None else leaf._base)
            return Made(writer[0], writer[1], meta, leaf.requires_grad)
        record.again = "it returned a tensor that the log cannot describe"
        return None

    def _passed(self, leaf: torch.Tensor) -> Passed | None:
        """Describe an argument or a variable, or a view of one."""
        is_plain = leaf.layout is torch.strided and type(leaf) in _USUAL
        key, view = key_of(leaf), None
        for place, given in enumerate(self.given):
            if given is leaf:
                self.given.use(place)
                return Passed(place, None)
            is_base = view is None and is_plain and type(given) in _USUAL and given.layout is torch.strided
            if is_base and leaf.dtype in (given.dtype, given.dtype.to_real()) and key_of(given) == key:
                lies = lying_in(Placement.of(leaf), Placement.of(given))
                view = Passed(place, lies, leaf.requires_grad, leaf._base is not None)
        if view is not None:
            self.given.use(view.place)
        return view


class WatchedCall(Leaving):
    """A saved call whose ops are watched."""

    def __init__(
        self, ops: Any, name: str, policy: CheckpointPolicy, function: Any, args: Sequence[Any], kwargs: Any
    ) -> None:
        leaves = args if is_flat(args, kwargs) else leaves_of(args, kwargs)
        self.record = record = SavedCall(name, policy, function, leaves)
        self.given = Given(record, function, leaves)
        self._ops = ops
        self._saved = 0
        self._names = set()
        self._state = state_of(function, args, kwargs)
        if ops.draws is not None:
            ops.draws.begin()
        self.first = sequence_number()

    def pack(self, tensor: torch.Tensor) -> Holder | Anchor:
        """Return what autograd keeps of a tensor that the call saves."""
        ops, record = self._ops, self.record
        if type(tensor) is Parameter:
            return (tensor, tensor._version, ops.region, record.name)
        if ops.results.unread:
            ops.results.read_versions()
        name = given = self.next_name(tensor)
        self._saved += 1
        writer = ops.storages.writer_of(tensor) if ops.entries else None
        if writer is None:
            if (held := self.cast_of_leaf(tensor, name)) is not None:
                return held
        elif given.startswith("saved_") and writer[0].group == record.name and writer[1] >= 0:
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
        if not self._saved or self.last - self.first > 1:
            refuse_gradient(ops.region, record.name, self.first, leaves)
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
            outer = [key for key in entry.writes if key not in made]
            if self._ops.has_policy and not all(is_buffer(self._ops.region, key) for key in outer):
                record.again = "it wrote a tensor in place that was there before, in a region with a policy"
                return
            if any(not self._ops.storages.is_foreign(key) for key in outer):
                record.again = "it wrote a result of another saved op in place"
                return
        found = []
        for left in record.left:
            key = left.storage.cdata
            known = ((at, one) for at, one in enumerate(self.given) if torch.is_tensor(one) and key_of(one) == key)
            place, source = next(known, (-1, None))
            if source is None and is_buffer(self._ops.region, left.storage.cdata):
                continue  # it outlives the region
            if source is None:
                record.again = "it wrote a tensor in place that is neither among its arguments nor in its reach"
                return
            self.given.use(place)
            if source.grad_fn is not None:
                if not _had_history(source.grad_fn, self.first):
                    record.again = "it gave a history to a tensor that had none"
                if self.outputs is not None:
                    self.outputs.add((source.grad_fn, source.output_nr))
            found.append(PutBack(place, lying_in(left.lies, Placement.of(source)), left, source.requires_grad))
        record.put_back = found
        for entry in writing:
            entry.restored = True


class UnwatchedCall(Leaving, CallForward):
    """A saved call whose ops are not watched, since its author promises that they write nothing outside."""

    kind = OpaqueCall

    def __init__(
        self, ops: Any, name: str, policy: CheckpointPolicy, function: Any, args: Sequence[Any], kwargs: Any
    ) -> None:
        leaves = args if is_flat(args, kwargs) else leaves_of(args, kwargs)
        super().__init__(ops, name, policy, identity_of(function), leaves)
        self.given = Given(self.record, function, leaves)
        self._names = set()
        self._state = state_of(function, args, kwargs)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd keeps of a tensor that the call saves."""
        if tensor.dtype in AUTOCAST_DTYPES and (held := self.cast_of_leaf(tensor, f"saved_{self._saved}")) is not None:
            self._saved += 1
            return held
        return super().pack(tensor)

    def _returns_one(self, result: torch.Tensor, key: int) -> None:
        super()._returns_one(result, key)
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

    def let_go(self) -> None:
        """Let go of arguments and variables, once the call is over: the region may be done with them."""
        super().let_go()
        self.args = self._given = ()


def is_buffer(region: Any, key: int) -> bool:
    """Whether a storage is that of a buffer of a module that the region reaches."""
    return region.outside is not None and region.outside.has_buffer(key)


_USUAL = frozenset((torch.Tensor, Parameter, Placeholder))
_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.layout, Enum, type)


def _had_history(node: Node | None, first: int) -> bool:
    """Whether what ops since a node changed in place had a history before."""
    while node is not None and node_number(node) >= first:
        node = node.next_functions[0][0] if node.next_functions else None
    return node is not None


def _cast(dtype: torch.dtype, view: Placement | None, anchor: Anchor) -> torch.Tensor:
    leaf, version, region, _ = anchor
    if leaf._version != version:
        raise changed_in_place(region, "parameter", leaf.shape)
    with without_dispatch_modes():
        cast = leaf.detach().to(dtype)
        return cast if view is None else view.seen_in(cast)


Saved = WatchedCall | UnwatchedCall


def mark_calls_made_again(calls: Sequence[Saved], ops: Any, boundary: Sequence[Node | None]) -> None:
    """Find the calls that are made again because of what came after them; see the note above."""
    left = _calls_left_by_tensors(calls, boundary)
    for call in calls:
        record = call.record
        if call in left:
            record.again = record.again or "the region goes on with a tensor of it that it did not return"
        elif ops.has_policy and ops.watch.compiled_code.ran:
            record.again = record.again or "compiled code runs in this region, which has a policy"
        elif ops.has_policy and not record.again and any(_is_changed(ops.results, form) for form in record.forms):
            record.again = "a result of it was changed in place after it, in a region with a policy"
        if isinstance(record, OpaqueCall):
            if record.again:
                run_for_good([record])
        elif call in left:
            run_for_good(ops.entries[record.start : record.end])
        if record.again and not isinstance(record, OpaqueCall):
            for entry in ops.entries[record.start : record.end]:
                entry.restored = entry.ends = False


def _is_changed(results: Any, form: Any) -> bool:
    """Whether a result that needs a gradient was changed in place since, which replay's leaf would refuse."""
    return type(form) is Made and form.requires_grad and not results.can_keep(form.entry, form.place)


def _calls_left_by_tensors(calls: Sequence[Saved], boundary: Sequence[Node | None]) -> set[Saved]:
    """Return the calls of which a node outside reads a node that made no result."""
    left: set[Saved] = set()
    calls = [call for call in calls if call.outputs is not None]
    if not calls:
        return left
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
                left.add(call)
            if child not in seen:
                seen.add(child)
                todo.append(child)
    return left


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


def _warn(region: Any, record: SavedCall | OpaqueCall) -> None:
    file, line = _defined_at(record.identity)
    again = "Its Python runs a second time, and of its ops what is needed"
    if isinstance(record, OpaqueCall):
        again = "It runs a second time"
    warnings.warn_explicit(
        f"{qualified_name(region.name, record.name)}: replay makes this call again, since {record.again}. {again}; the "
        "gradients are right all the same. To spare the second run, return all that the region goes on with, and "
        "change nothing of it in place; or use remat.native_save_region, whose Python always runs again.",
        RematWarning,
        file,
        line,
        registry=_warned,
    )


def _defined_at(identity: Any) -> tuple[str, int]:
    """Return file and line of what was called: of a function, a module's class, or a custom Function."""
    if isinstance(identity, tuple):
        identity = identity[0]
    if isinstance(identity, type):
        identity = getattr(getattr(identity, "forward", None) or identity.__call__, "__code__", None)
    return (identity.co_filename, identity.co_firstlineno) if isinstance(identity, CodeType) else user_line()


_warned: dict[Any, Any] = {}
