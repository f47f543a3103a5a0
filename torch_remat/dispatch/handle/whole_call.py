"""A native region that is one call of a function of torch's own: replay leaves out the call whole.

In forward: the call's arguments, results, and the tensors that autograd saves meanwhile. Kept: residents; in the log
what replay must know of arguments and results. Out: in replay the results, kept ones or placeholders, and the values
of arguments that were saved, without a dispatch mode in either phase.

Such a function is C++ code: what it does depends on its arguments alone, so that there is no sequence of ops to watch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from types import BuiltinFunctionType
from typing import Any, Protocol

import optree
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.nn import functional as F

from torch_remat._compat import (
    PYTREE_NAMESPACE,
    any_autocast_enabled,
    is_compiled,
    node_number,
    sequence_number,
    storage_key,
)
from torch_remat.dispatch.check.mismatch import mismatched
from torch_remat.dispatch.holder import Anchor, Holder
from torch_remat.dispatch.log.entry import CallEntry, Entry
from torch_remat.dispatch.log.meta import Meta, WrapperMeta, described, keys_of, layout_of, stand_in, tensors_in
from torch_remat.dispatch.log.record import WholeCall
from torch_remat.dispatch.log.schema import may_draw
from torch_remat.dispatch.log.slot import version_of
from torch_remat.dispatch.naming import default_name
from torch_remat.dispatch.placeholder import Placeholder, Source, real, unpack
from torch_remat.dispatch.region.inputs import leaves_of, with_leaves
from torch_remat.errors import MutationError, UsageError


def is_whole_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function is one of torch's own, called with ordinary tensors, which changes none of them, or compiled.

    Under autocast one of torch's own makes casts besides, and parameters' casts are not to be kept.
    """
    if type(function) is not BuiltinFunctionType:
        return is_compiled(function) and all(map(_is_ordinary, args)) and all(map(_is_ordinary, kwargs.values()))
    if not _is_pure(function) or any_autocast_enabled():
        return False
    if kwargs and ("out" in kwargs or any(not _is_ordinary(value) for value in kwargs.values())):
        return False
    return all(map(_is_ordinary, args))


def _is_ordinary(value: Any) -> bool:
    if type(value) in _ORDINARY:
        return True
    if isinstance(value, torch.Tensor):
        return False
    return not isinstance(value, (list, tuple)) or all(map(_is_ordinary, value))


_USUAL = {torch.Tensor, Parameter}
_ORDINARY = frozenset((torch.Tensor, Parameter, Placeholder, int, float, bool, type(None)))
_pure: dict[int, bool] = {}


def _is_pure(function: Any) -> bool:
    pure = _pure.get(id(function))
    if pure is None:
        name = function.__name__
        known = any(getattr(place, name, None) is function for place in (torch, F))
        # Norms change running statistics; what is named so changes its argument.
        pure = _pure[id(function)] = known and not name.endswith("_") and "_norm" not in name
    return pure


def _versions_of(args: Sequence[Any]) -> list[int]:
    return [version_of(arg) for arg in args if isinstance(arg, torch.Tensor)]


_version_of = attrgetter("_version")


def _keys_in(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [key for tensor in tensors for key in keys_of(tensor)]


def _nothing(_leaf: Any) -> int:
    return 0


def may_draw_in(function: Callable[..., Any]) -> bool:
    """Whether such a function may draw random numbers."""
    if type(function) is not BuiltinFunctionType:
        return True
    draws = _draws.get(id(function))
    if draws is None:
        draws = _draws[id(function)] = may_draw(function.__name__)
    return draws


_draws: dict[int, bool] = {}


class Ops(Protocol):
    """What of a region's recorder is asked here."""

    region: Any
    entries: list[Entry]
    storages: Any
    results: Any
    departures: Any
    skipped: list[tuple[int, int]]

    def hold(self, record: WholeCall, name: str, tensor: torch.Tensor, args: tuple[Any, ...]) -> Holder | Anchor:
        """Return the holder for a tensor that a whole call saves."""

    def note_returned(self, leaf: torch.Tensor, first: int, last: int) -> bool:
        """Note a tensor that a native region returned."""


class CallForward:
    """One such call, while forward runs.

    Args:
        ops: The recorder of the region around it.
        record: Its record.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(self, ops: Ops, record: WholeCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._ops = ops
        self._record = record
        self._saved = 0
        self._first = sequence_number()
        self._args = tuple(args) if not kwargs else (*args, *kwargs.values())
        record.layout = layout_of(args, kwargs)
        self._versions = None if type(record.function) is BuiltinFunctionType else _versions_of(self._args)
        rng = ops.region.rng if may_draw_in(record.function) else None
        self._rng = None if rng is None else rng.present()

    def pack(self, tensor: torch.Tensor) -> Holder | Anchor:
        """Return what autograd keeps of a tensor that the call saves."""
        if type(tensor) is Parameter:
            return (tensor, tensor._version, self._ops.region)
        name = f"saved_{self._saved}"
        self._saved += 1
        return self._ops.hold(self._record, name, tensor, self._args)

    def returns(self, result: Any) -> None:
        """Note what the call returns."""
        ops, record = self._ops, self._record
        if self._versions is not None and self._versions != _versions_of(self._args):
            raise UsageError(
                "a compiled function in a native region changed its argument in place, which replay would not repeat",
                region=ops.region.name,
                op=record.name,
                remedy="Return the new value from it, or give the native region the policy RECOMPUTE.",
            )
        leaves = (result,) if isinstance(result, torch.Tensor) else leaves_of((result,), {})
        if leaves and all(map(self._is_view_of_argument, leaves)):
            self._end()
            return
        last = sequence_number()
        ops.skipped.append((self._first, last))
        given = [arg for arg in self._args if isinstance(arg, torch.Tensor)]
        if list in map(type, self._args) or tuple in map(type, self._args):
            given = list(tensors_in(self._args, {}))
        reads = [storage_key(arg) for arg in given] if set(map(type, given)) <= _USUAL else _keys_in(given)
        if type(result) is torch.Tensor and not result.dtype.is_complex and result.layout is torch.strided:
            # What most calls return.
            record.leaves = [result.requires_grad]
            entry = CallEntry(record.function, record, described(result, None), ("out",))
            ops.storages.note_one(entry, result)
            ops.results.note_one(entry, result)
        else:
            entry = self._note_several(result, leaves, reads)
        record.entry = entry
        entry.reads = reads
        try:
            entry.versions = list(enumerate(map(_version_of, given)))
        except RuntimeError:  # made in inference mode
            entry.versions = list(enumerate(map(version_of, given)))
        ops.entries.append(entry)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                continue
            ops.note_returned(leaf, self._first, last)
            node = leaf.grad_fn
            if node is not None and not self._saved and node_number(node) >= self._first:
                node.register_prehook(ops.region.note_backward)
        self._end()

    def _note_several(self, result: Any, leaves: Sequence[Any], reads: Sequence[int]) -> CallEntry:
        ops, record = self._ops, self._record
        record.leaves = [leaf.requires_grad if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if len(leaves) != 1 or leaves[0] is not result:
            record.template = optree.tree_map(_nothing, result, namespace=PYTREE_NAMESPACE)
        names = [record.output_name(place) for place in range(len(leaves))]
        entry = CallEntry(record.function, record, [described(leaf, None) for leaf in leaves], names)
        ops.storages.note_call(entry, leaves, reads)
        ops.results.note(entry, leaves)
        return entry

    def _is_view_of_argument(self, leaf: Any) -> bool:
        if not isinstance(leaf, torch.Tensor):
            return False
        base = leaf._base
        for arg in self._args:
            if arg is leaf:
                return True
            if base is not None and isinstance(arg, torch.Tensor) and (arg is base or arg._base is base):
                return True
        return False

    def left_by(self, error: BaseException) -> None:
        """Note that an exception left the call: the region that catches it must do without."""
        if isinstance(error, Exception):
            self._record.raised = type(error), error.args
        self._end()

    def _end(self) -> None:
        if self._ops.departures.waiting:
            self._ops.departures.send()
        if self._rng is not None:
            self._record.drawn = self._rng.drawn()
            self._rng = None
        self._args = ()


class Replay(Protocol):
    """What of a region's replay is asked here."""

    region: Any

    def fail(self, error: Any) -> Any:
        """End the replay with an error."""

    def note_loaded(self, tensor: torch.Tensor) -> None:
        """Note a tensor that was kept."""


def replayed(
    replay: Replay,
    record: WholeCall,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    start_over: Callable[[Entry, int, str], Any],
) -> Any:
    """Return what the call returned in forward; make it again where it must be.

    Args:
        replay: The replay.
        record: The call's record.
        function: The function.
        args: Its positional arguments, of which the elided holders have been filled.
        kwargs: Its keyword arguments.
        start_over: Ends a replay in which something reads a result that was not kept.

    Raises:
        MutationError: The call is made again, and an argument was changed in place since forward.
    """
    if record.raised is not None:
        kind, values = record.raised
        raise kind(*values)
    entry, region = record.entry, replay.region
    if entry is None:
        return function(*args, **kwargs)
    if entry.run or region.tape.backward_inside:
        return _made_again(replay, record, function, args, kwargs)
    if record.drawn is not None:
        record.drawn.restore()
    leaves = [_leaf(replay, record, place, start_over) for place in range(len(record.leaves))]
    return leaves[0] if record.template is None else with_leaves((record.template,), {}, leaves)[0][0]


def check_call(
    replay: Replay, record: WholeCall, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """End the replay if it makes another call than forward."""
    same = function is record.function
    if not same or layout_of(args, kwargs) != record.layout:
        ran = default_name(record.function)
        found = "tensors of other shapes or strides" if same else default_name(function)
        replay.fail(
            mismatched(
                replay.region,
                f"forward ran {ran} here, replay ran {'it on ' if same else ''}{found}",
                "A native region must run the same function on the same arguments in both phases.",
                op=record.name,
            )
        )


def _made_again(
    replay: Replay, record: WholeCall, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Make the call at its own place. Forward's holders have what backward needs; results that were kept stay."""
    leaves = [real(leaf, record.name) for leaf in leaves_of(args, kwargs)]
    args, kwargs = with_leaves(args, kwargs, leaves)
    given = list(tensors_in(args, kwargs))
    for at, version in () if replay.region.inputs.packed else record.entry.versions:
        # What replay makes itself has storages of its own; autograd may sum gradients in place in one phase only.
        if version_of(given[at]) != version and not set(_keys_in([given[at]])).isdisjoint(record.entry.reads):
            raise MutationError(
                f"this call is made again in replay, and its argument {at} was changed in place since it was made",
                region=replay.region.name,
                op=record.name,
                remedy="Use the out-of-place form of the op that changes it.",
            )
    with saved_tensors_hooks(torch.detach, unpack):
        result = function(*args, **kwargs)
    if record.drawn is not None:
        record.drawn.restore()
    return result


def _leaf(replay: Replay, record: WholeCall, place: int, start_over: Callable[[Entry, int, str], Any]) -> Any:
    entry, known = record.entry, record.leaves[place]
    meta = entry.meta(place)
    slot = entry.kept.get(place)
    name = record.output_name(place)
    if slot is not None:
        tensor = slot.load(replay.region.name, record.name, name)
        replay.note_loaded(tensor)
        return tensor.requires_grad_(known)
    if type(meta) not in (Meta, WrapperMeta):
        return meta
    made = stand_in(meta, Source(replay.region.name, record.name, name), partial(start_over, entry, place))
    return made.requires_grad_() if known else made
