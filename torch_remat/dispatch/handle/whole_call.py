"""A native region that is one call of a function of torch's own: replay leaves out the call whole.

In forward: the call's arguments, results, and the tensors that autograd saves meanwhile. Kept: residents; in the log
what replay must know of arguments and results. Out: in replay the results, kept ones or placeholders, and the values
of arguments that were saved, without a dispatch mode in either phase.

Such a function is C++ code: what it does depends on its arguments alone, so that there is no sequence of ops to watch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from types import BuiltinFunctionType
from typing import Any

import optree
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.nn import functional as F

from torch_remat._compat import (
    PYTREE_NAMESPACE,
    DispatchMode,
    any_autocast_enabled,
    is_compiled,
    node_behind,
    node_number,
    sequence_number,
    storage_key,
)
from torch_remat.dispatch.check.compare import mismatched
from torch_remat.dispatch.holder import OpHolder
from torch_remat.dispatch.log.entry import CALL, WRITTEN, Entry, WholeCall, written_arguments
from torch_remat.dispatch.log.meta import (
    Meta,
    Raised,
    WrapperMeta,
    described,
    keys_of,
    layout_of,
    stand_in,
    tensors_in,
)
from torch_remat.dispatch.log.schema import WRITES_WITHOUT_SAYING, effects_of, may_draw
from torch_remat.dispatch.log.slot import version_of
from torch_remat.dispatch.naming import default_name
from torch_remat.dispatch.placeholder import NOT_LAZY, Placeholder, Source, new_tuple, unpack
from torch_remat.dispatch.region.inputs import fresh_alias, leaves_of, with_leaves
from torch_remat.errors import MismatchError, MutationError, UsageError
from torch_remat.policies.decision import CheckpointPolicy


def is_whole_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function is one of torch's own, called with ordinary tensors, which changes none of them, or compiled.

    Under autocast one of torch's own makes casts besides, and parameters' casts are not to be kept.
    """
    if type(function) is BuiltinFunctionType:
        if not (_pure.get(id(function)) or _is_pure(function)) or any_autocast_enabled() or "out" in kwargs:
            return False
    elif not is_compiled(function):
        return False
    if not kwargs and _ORDINARY.issuperset(map(type, args)):
        return True
    return all(map(_is_ordinary, args)) and all(map(_is_ordinary, kwargs.values()))


def _is_ordinary(value: Any) -> bool:
    if type(value) in _ORDINARY:
        return True
    if isinstance(value, torch.Tensor):
        return False
    return not isinstance(value, (list, tuple)) or all(map(_is_ordinary, value))


_USUAL = frozenset((torch.Tensor, Parameter))
_VALUES = frozenset((int, float, bool, type(None)))
_ORDINARY = frozenset((*_USUAL, *_VALUES, Placeholder))
_FLAT = _USUAL | _VALUES  # what the arguments of most calls are
_pure: dict[int, bool] = {}


def _is_pure(function: Any) -> bool:
    pure = _pure.get(id(function))
    if pure is None:
        name = function.__name__
        known = any(getattr(place, name, None) is function for place in (torch, F))
        # Norms change running statistics; what is named so changes its argument.
        pure = _pure[id(function)] = known and not name.endswith("_") and "_norm" not in name
    return pure


_version_of = attrgetter("_version")


def template_of(result: Any) -> tuple[Any, ...]:
    """Return a result with numbers in place of its leaves, alone in a tuple."""
    return (optree.tree_map(_nothing, result, namespace=PYTREE_NAMESPACE),)


def _nothing(_leaf: Any) -> int:
    return 0


def may_draw_in(function: Callable[..., Any]) -> bool:
    """Whether such a function may draw random numbers."""
    if type(function) is not BuiltinFunctionType:
        return True  # and is no name for long
    draws = _draws[id(function)] = may_draw(function.__name__)
    return draws


_draws: dict[int, bool] = {}


class CallForward:
    """One such call, while forward runs.

    Attributes:
        record: What the log keeps of it.
        args: The arguments, while it runs.
        named: Tensors that autograd saves next, by the names that `auto_forward` gives them.
    """

    kind = WholeCall
    named: Sequence[tuple[str, torch.Tensor | None]] = ()
    next_name: Callable[[torch.Tensor], str]

    def __init__(
        self, ops: Any, name: str, policy: CheckpointPolicy, function: Callable[..., Any], args: Sequence[Any]
    ) -> None:
        self._ops = ops
        self._saved = 0
        self.first = sequence_number()
        self.args = args
        given: Sequence[torch.Tensor] = args
        kinds = set(map(type, args))
        try:
            if not _USUAL.issuperset(kinds):
                if not _FLAT.issuperset(kinds):
                    raise RuntimeError
                given = [arg for arg in args if type(arg) in _USUAL]
            self.record = record = self.kind(name, policy, function, [(one.shape, one.stride()) for one in given])
            record.reads = list(map(storage_key, given))
            record.versions = list(enumerate(map(_version_of, given)))
        except RuntimeError:  # sparse tensors have no strides, those of inference mode no versions
            given = list(tensors_in(args, {}))
            self.record = record = self.kind(name, policy, function, layout_of(args, {}))
            record.reads = [key for tensor in given for key in keys_of(tensor)]
            record.versions = list(enumerate(map(version_of, given)))
        self._given = given
        draws = _draws.get(id(function))
        self.draws = ops.draws if (draws is None and may_draw_in(function)) or draws else None
        if self.draws is not None:
            self.draws.begin()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd keeps of a tensor that the call saves."""
        ops, record = self._ops, self.record
        if type(tensor) is Parameter:
            return (tensor, tensor._version, ops.region, record.name)
        name = self.next_name(tensor) if self.named else f"saved_{self._saved}"
        self._saved += 1
        if ops.is_usual and type(tensor) is torch.Tensor and (node := tensor.grad_fn) is not None:
            for place, arg in enumerate(self.args):  # what most are: an argument that replay makes again
                if arg is tensor:
                    if (elided := ops.elide_made(record, name, tensor, node, place)) is not None:
                        return elided
                    break
        held = ops.hold(record, name, tensor, CheckpointPolicy.SAVE)
        if record.away and ops.region.hooks is None and type(held) is OpHolder and held.resident:
            ops.departures.waiting.append((held, tensor))
        return held

    def returns(self, result: Any) -> None:
        """Note what the call returns."""
        record = self.record
        if type(record.op) is not BuiltinFunctionType and record.versions != list(
            enumerate(map(version_of, self._given))
        ):
            raise UsageError(
                "this call is left out of replay, and changed an argument in place, which replay would not repeat",
                region=self._ops.region.name,
                op=record.name,
                remedy="Return the new value from it, or give it the policy RECOMPUTE. Of a call that is declared as "
                "opaque, leave out opaque=True.",
            )
        if (
            type(result) is torch.Tensor and result._base is None and result.layout is torch.strided
            and not result.dtype.is_complex and (key := storage_key(result)) not in record.reads
        ):  # fmt: skip
            self._returns_one(result, key)
        else:
            self._returns_odd(result)

    def _returns_one(self, result: torch.Tensor, key: int) -> None:
        """Note what most calls return: a tensor in memory of its own."""
        ops, record = self._ops, self.record
        last = sequence_number()
        geometry = result.shape, result.stride(), result.storage_offset()
        record.results = new_tuple(Meta, (geometry, result.dtype, result.device, False, NOT_LAZY))
        record.leaves = (result.requires_grad,)
        record.storage = key
        record.is_entry = True
        ops.note_result(record, result, self.first, last)
        ops.skipped.append((self.first, last))
        if not self._saved or last - self.first > 1:
            refuse_gradient(ops.region, record.name, self.first, (result,))
        if self.draws is not None or ops.departures.waiting:
            self._end()

    def _returns_odd(self, result: Any) -> None:
        leaves = (result,) if isinstance(result, torch.Tensor) else leaves_of((result,), {})
        if leaves and all(map(self._is_view_of_argument, leaves)):
            self._end()
        else:
            self._note_several(result, leaves)

    def _note_several(self, result: Any, leaves: Sequence[Any]) -> None:
        ops, record = self._ops, self.record
        last = sequence_number()
        record.kind = CALL
        record.leaves = [leaf.requires_grad if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if len(leaves) != 1 or leaves[0] is not result:
            record.template = template_of(result)
        record.results = described(leaves if record.template else result, None)
        record.saved = frozenset(range(len(leaves)))
        if record.away:
            record.away = record.saved
        ops.storages.note_call(record, leaves, record.reads)
        ops.results.note(record, leaves)
        ops.entries.append(record)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                ops.note_returned(leaf, self.first, last)
        record.is_entry = True
        ops.skipped.append((self.first, last))
        if not self._saved or last - self.first > 1:
            refuse_gradient(ops.region, record.name, self.first, leaves)
        self._end()

    def _is_view_of_argument(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and not set(keys_of(leaf)).isdisjoint(self.record.reads)

    def left_by(self, error: BaseException) -> None:
        """Note that an exception left the call: the region that catches it must do without."""
        if isinstance(error, Exception):
            self.record.results = Raised(type(error), error.args)
        self._end()

    def _end(self) -> None:
        if self._ops.departures.waiting:
            self._ops.departures.send()
        if self.draws is not None:
            self.record.drawn = self.draws.end()


def refuse_gradient(region: Any, name: str, first: int, leaves: Sequence[Any]) -> None:
    """Refuse a gradient inside of the region's forward through a call's result, where no saved tensor tells."""
    for leaf in leaves:
        node = node_behind(leaf)
        if node is not None and node_number(node) >= first:
            node.register_prehook(partial(region.note_gradient, name))


def replayed(
    replay: Any, record: WholeCall, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Return what the call returned in forward; make it again where it must be. Its elided holders are filled."""
    if not record.is_entry:
        if type(record.results) is Raised:
            raise record.results.kind(*record.results.args)
        return function(*args, **kwargs)
    if record.run or not replay.region.finished:
        return made_again(replay, record, function, args, kwargs)
    if record.drawn is not None:
        record.drawn.restore()
    if not record.template:
        return kept_or_stand_in(replay, record, 0, record.results, record.leaves[0])
    metas = zip(record.results, record.leaves, strict=True)
    leaves = [kept_or_stand_in(replay, record, place, *known) for place, known in enumerate(metas)]
    return with_leaves(record.template, {}, leaves)[0][0]


def another_call(region: Any, record: WholeCall, function: Any) -> MismatchError:
    """Return the error about a call that is not that of forward."""
    same = function is record.op
    found = "tensors of other shapes or strides" if same else default_name(function)
    return mismatched(
        region,
        f"forward ran {default_name(record.op)} here, replay ran {'it on ' if same else ''}{found}",
        "A call must be one of the same function, on the same arguments, in both phases.",
        op=record.name,
    )


def made_again(
    replay: Any, record: WholeCall, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Make the call at its own place. Forward's holders have what backward needs; results that were kept stay."""
    if is_compiled(function):  # which, unlike ops, asks no placeholder for its value
        args, kwargs = with_leaves(args, kwargs, replay.load_inputs(record, leaves_of(args, kwargs), record.name))
    given = list(tensors_in(args, kwargs))
    for at, version in () if replay.region.inputs.packed else record.versions:
        # What replay makes itself has storages of its own; autograd may sum gradients in place in one phase only.
        if version_of(given[at]) != version and not set(keys_of(given[at])).isdisjoint(record.reads):
            raise MutationError(
                f"this call is made again in replay, and its argument {at} was changed in place since it was made",
                region=replay.region.name,
                op=record.name,
                remedy="Use the out-of-place form of the op that changes it.",
            )
    watched = None if type(function) is BuiltinFunctionType or is_compiled(function) else replay.own_writes()
    with saved_tensors_hooks(torch.detach, unpack), watched or nullcontext():
        result = function(*args, **kwargs)
    if record.drawn is not None:
        record.drawn.restore()
    return result


class OwnWrites(DispatchMode):
    """Watches a call that runs once more though forward did not plan it: it may write only what it has made itself.

    Args:
        refuse: Ends the replay.
    """

    lets_compiled_code_run = True

    def __init__(self, refuse: Callable[[], Any]) -> None:
        super().__init__()
        self._refuse = refuse
        self._own: set[int] = set()

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op, unless it writes what was there before the call."""
        return self(op, args, kwargs or {})

    def __call__(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Do the same for what watches the ops already."""
        effects = effects_of(op)
        written = written_arguments(effects, args, kwargs)
        if effects.name in WRITES_WITHOUT_SAYING and args[5]:
            written += [tensor for tensor in args[3:5] if isinstance(tensor, torch.Tensor)]
        if not all(self._own.issuperset(keys_of(tensor)) for tensor in written):
            self._refuse()
        result = op(*args, **kwargs)
        given = {key for tensor in tensors_in(args, kwargs) for key in keys_of(tensor)}
        self._own.update({key for tensor in tensors_in((result,), {}) for key in keys_of(tensor)} - given)
        return result


def kept_or_stand_in(replay: Any, entry: Entry, place: int, meta: Any, requires_grad: bool) -> Any:
    """Return what replay has of a result: what was kept of it, else a placeholder; what is no tensor as it is."""
    slot = entry.kept.get(place)
    has_history = requires_grad and (replay.changes_results or replay.region.inputs.keeps_histories)
    if slot is None and place == WRITTEN and entry.written:
        slot = entry.written[0]
    if slot is not None:
        tensor = slot.unchanged()
        if tensor is None:
            tensor = replay.load(slot, entry.group, entry.label(place))
        tensor = fresh_alias(tensor.data, True, True) if has_history else tensor.requires_grad_(requires_grad)
        replay.note_loaded(tensor)
        return tensor
    if type(meta) not in (Meta, WrapperMeta):
        return meta
    source = Source(replay.region.name, entry.group, entry.label(place), id(replay.region))
    made = stand_in(meta, source)
    if has_history:
        return fresh_alias(made, True, True)
    return made.requires_grad_() if requires_grad else made
