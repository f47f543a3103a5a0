"""One call that replay skips: a function given to `remat.op`, or one of torch's own in a native region.

In: the call's arguments and variables, what autograd saves meanwhile, and the result. Kept: residents, and the call in
the log. Out: in replay the result, kept tensors or placeholders in it, and the values of arguments that were saved.

NOTE [ When a saved call runs whole ]
Replay skips a call, or runs it whole. It runs it whole, and warns once, if
1. a result of it was modified in place after it;
2. it modified an argument or a variable that the region had made, or
3. it raised an exception.
Then nothing of it is kept, as if its policy were RECOMPUTE; where only replay knows, forward's holders have what the
second run saves. Every other way in which tensors of a
skipped call reach its region is a `UsageError` in forward: a tensor that was not returned, a variable or container of
the region that holds other tensors afterwards, a result that is not a tree of tensors and plain values.
Tensors outside the region are modified once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from operator import attrgetter
from types import BuiltinFunctionType, MappingProxyType
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch.autograd.graph import Node
from torch.nn import Module, Parameter
from torch.nn import functional as F

from torch_remat._compat import (
    any_autocast_enabled,
    has_one_output,
    is_compiled,
    node_behind,
    node_number,
    sequence_number,
    storage_key,
)
from torch_remat.dispatch.ambient import Draws
from torch_remat.dispatch.call.entry import Call
from torch_remat.dispatch.call.result import (
    USUAL,
    Again,
    Passed,
    State,
    flatten,
    is_changed,
    is_flat,
    lying_in,
    refused,
    state_of,
)
from torch_remat.dispatch.holder import (
    Anchor,
    Holder,
    OpHolder,
    RegionLike,
)
from torch_remat.dispatch.keys import key_of, keys_of, layout_of, tensors_in, version_of
from torch_remat.dispatch.ops.entry import Entry
from torch_remat.dispatch.ops.meta import Meta, WrapperMeta, described
from torch_remat.dispatch.ops.storages import Storages
from torch_remat.dispatch.placeholder import Placeholder
from torch_remat.dispatch.reach import Place, node_of, reach
from torch_remat.dispatch.region.inputs import leaves_of
from torch_remat.dispatch.region.region import OpenRegion
from torch_remat.dispatch.slot import Slot
from torch_remat.errors import UsageError
from torch_remat.offload.sender import Departures
from torch_remat.policies.decision import CheckpointPolicy


class Log(Protocol):
    """What a call that runs asks of its region's log; the `Recorder`."""

    region: OpenRegion
    departures: Departures
    draws: Draws | None
    entries: list[Entry]
    opened: list[tuple[ref[Any], Call]]
    storages: Storages

    def is_in_skipped_body(self) -> bool:
        """Whether the body of a saved handle runs."""

    def made_by_handle(self, tensor: torch.Tensor) -> tuple[Call, int] | None:
        """Return the handle that made a tensor, and as which of its outputs."""

    def name_of(self, tensor: torch.Tensor, automatic: str) -> str:
        """Return the name of a tensor that the call saves, given its automatic one."""

    def resident(self, op: str, name: str, tensor: torch.Tensor, policy: CheckpointPolicy) -> OpHolder:
        """Return the holder for a tensor that replay saves again, as a placeholder."""

    def pack(self, tensor: torch.Tensor) -> Holder | Anchor | None:
        """Return what autograd keeps of a tensor that is saved outside of calls."""

    def note_result(self, call: Call, result: torch.Tensor, key: int) -> None:
        """Note a call with its one result, an ordinary tensor in a storage of its own."""

    def note_results(self, call: Call, leaves: Sequence[Any], made: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Note a call with its results."""

    def note_readers(self, tensors: Iterable[Any]) -> None:
        """Note that replay reads tensors here."""

    def note_writes(self, running: Running) -> None:
        """Note what a call modified that was there before it."""


_PARAMETERS = frozenset((torch.Tensor, Parameter))
_VALUES = frozenset((int, float, bool, type(None)))
_ORDINARY = frozenset((*_PARAMETERS, *_VALUES, Placeholder))
_FLAT = _PARAMETERS | _VALUES  # what the arguments of most calls are
_NONE: Mapping[int, Any] = MappingProxyType({})
_FUNCTION_CLASS = type(torch.autograd.Function)
_version_of = attrgetter("_version")
_pure: dict[int, bool] = {}


def is_builtin(function: Any) -> bool:
    """Whether a function is one of torch's own in C++, and not the ``apply`` of a Function, C++ since torch 2.14."""
    return type(function) is BuiltinFunctionType and type(function.__self__) is not _FUNCTION_CLASS


def is_whole_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function is one of torch's own, called with ordinary tensors, which changes none of them, or compiled.

    Under autocast one of torch's own makes casts besides, and parameters' casts are not to be kept.
    """
    if is_builtin(function):
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


def _is_pure(function: Any) -> bool:
    pure = _pure.get(id(function))
    if pure is None:
        name = function.__name__
        known = any(getattr(place, name, None) is function for place in (torch, F))
        # Norms change running statistics; what is named so changes its argument.
        pure = _pure[id(function)] = known and not name.endswith("_") and "_norm" not in name
    return pure


@cache
def may_draw(name: str) -> bool:
    """Whether a function of torch's own may draw random numbers, as its ops' tags and parameters tell."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or not hasattr(packet, "overloads"):  # such as a method of Python's, `__eq__`
        return True
    ops = [getattr(packet, overload) for overload in packet.overloads()]
    return any(
        torch.Tag.nondeterministic_seeded in op.tags or any(value.name in _OF_RANDOM for value in op._schema.arguments)
        for op in ops
    )


# Ops that consist of others have no tag, but parameters by which they draw.
_OF_RANDOM = {"p", "train", "training", "dropout", "dropout_p", "generator"}


class Given:
    """The arguments of a call, then the variables that its function reaches, which are looked for when asked for.

    Args:
        function: The function; None if it has no variables.
        leaves: The leaves of the arguments.
        keys: The storages of all of them, if these are known.
    """

    used: Mapping[int, tuple[int, Any]] = _NONE  # places of variables that replay is to find, by their number
    before: Sequence[tuple[torch.Tensor, int]] = ()  # those that the call may modify, with their versions
    _places: Sequence[Place] | None = None
    _by_key: dict[int, int] | None = None
    _has_keys_of_variables = False

    def __init__(self, function: Any, leaves: Sequence[Any], keys: Sequence[int] | None = None) -> None:
        self.leaves = leaves
        self._function = function
        self._all_keys = keys

    def place_at(self, key: int) -> int | None:
        """Return which of them has a storage; None if none has. The variables are looked for if no argument has it."""
        if self._all_keys is not None and key not in self._all_keys:
            return None
        if self._by_key is None:
            self._by_key = {}
            for place, leaf in enumerate(self.leaves):
                for part in keys_of(leaf) if isinstance(leaf, torch.Tensor) else ():
                    self._by_key.setdefault(part, place)
        if key not in self._by_key and not self._has_keys_of_variables:
            self._has_keys_of_variables = True
            self.variables()
            for place, variable in enumerate(self._places or (), len(self.leaves)):
                if variable.tensor is not None and variable.tensor.layout is torch.strided:
                    self._by_key.setdefault(key_of(variable.tensor), place)
        return self._by_key.get(key)

    def variables(self) -> Sequence[torch.Tensor]:
        """Return the tensors that the function reaches besides."""
        if self._places is None:
            self._places = [] if self._function is None else variables_of(self._function, self.leaves)
        return [place.tensor for place in self._places if place.tensor is not None]

    def keys(self) -> Sequence[int]:
        """Return the storages of all of them."""
        self.place_at(-1)
        return () if self._by_key is None else list(self._by_key)

    def find(self, tensor: torch.Tensor, key: int) -> tuple[int, torch.Tensor] | None:
        """Return which of them a tensor is, or else shares the storage of, and that one; None if it is new."""
        for place, leaf in enumerate(self.leaves):
            if leaf is tensor:
                return place, leaf
        found = self.place_at(key)
        return None if found is None else (found, self.at(found))

    def at(self, place: int) -> Any:
        """Return one of them."""
        at = place - len(self.leaves)
        return self.leaves[place] if at < 0 or self._places is None else self._places[at].tensor

    def use(self, place: int) -> None:
        """Note that replay reads one of them."""
        at = place - len(self.leaves)
        if at >= 0 and self._places is not None:
            self.used = {**self.used, place: (at, self._places[at].key)}

    def has_changed(self, tensor: torch.Tensor) -> bool:
        """Whether the call has modified one of them so far."""
        return any(one is tensor and version_of(one) != version for one, version in self.before)

    def is_of_module(self, place: int) -> bool:
        """Whether it is a buffer or an attribute of a module, which no region makes."""
        at = place - len(self.leaves)
        if at < 0 or self._places is None:
            return False
        holder = self._places[at].holder
        return self._places[at].module is not None or (type(holder) is dict and "_parameters" in holder)


_NOTHING = Given(None, ())


def variables_of(function: Any, leaves: Sequence[Any]) -> list[Place]:
    """Return where the tensors are that a call reaches besides its arguments, in the same order in both phases."""
    owner = getattr(function, "__self__", None)
    if type(function) is BuiltinFunctionType or isinstance(owner, type):  # or the ``apply`` of a custom Function
        return [Place(None, "self", owner, None)] if isinstance(owner, torch.Tensor) else []
    return reach(function, [leaf for leaf in leaves if isinstance(leaf, Module)]).tensors


class Written(NamedTuple):
    """A tensor that a call modified and had not made.

    Attributes:
        tensor: The tensor.
        version: Its version before.
        is_own: Whether an autograd node of the region had made it.
    """

    tensor: torch.Tensor
    version: int
    is_own: bool


class Running(ABC):
    """A saved call while forward runs, whatever runs.

    Attributes:
        call: What the log keeps of it.
        given: Its arguments and variables.
        first: The number of the first autograd node that it may make.
        last: That of the first one after it.
        outputs: The nodes of its result, with which of the node's outputs each is.
        written: The tensors that were there before the call and that it modified, by storage.
    """

    # What most calls have none of is not set for each.
    last = -1
    outputs: set[tuple[Node, int]] | None = None
    written: Mapping[int, Written] = _NONE

    def __init__(self, ops: Log, call: Call, given: Given) -> None:
        self.ops = ops
        self.call = call
        self.given = given
        self.first = sequence_number()

    def pack(self, tensor: torch.Tensor) -> Holder | Anchor | None:
        """Return what autograd keeps of a tensor; None if replay recomputes it, or has it."""
        return self.ops.pack(tensor)

    @abstractmethod
    def returns(self, result: Any) -> None:
        """Note what the call returns."""

    def has_made(self, key: int) -> bool:
        """Whether it has made a storage, as far as somebody watches."""
        return False

    def note_written(self, tensor: torch.Tensor, version: int) -> None:
        """Note a tensor that the call modifies, with its version before, unless it has made it."""
        node = node_of(tensor)
        is_own = node is not None and node_number(node) >= self.ops.region.first_number
        for key in keys_of(tensor):
            if not self.has_made(key) and key not in self.written:
                self.written = {**self.written, key: Written(tensor, version, is_own)}

    def watch_end(self, draws: bool) -> None:
        """Note at the end of the call what leaves the device, and the random generators."""
        ops = self.ops
        if ops.departures.waiting:
            ops.departures.send()
        if draws and ops.draws is not None:
            self.call.drawn = ops.draws.end()
        self.last = sequence_number()

    def let_go(self) -> None:
        """Let go of arguments and variables, once the call is over: the region may be done with them."""
        self.given = _NOTHING
        self.written = _NONE

    def left_by(self, error: BaseException) -> None:
        """Note that an exception left the call, which replay runs again."""
        self.call.is_saved, self.call.always = False, True
        self.watch_end(True)
        self.ops.entries.append(self.call)


class RunningCall(Running):
    """A call of a function whose Python does not run in replay."""

    _state: State = ()

    def __init__(
        self, ops: Log, call: Call, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any],
        is_pure: bool,
    ) -> None:  # fmt: skip
        self._is_pure = is_pure
        given: Sequence[Any]
        leaves = given = args if is_pure and not kwargs else _leaves_of(args, kwargs)
        super().__init__(ops, call, Given(function, leaves))
        kinds = set(map(type, leaves))
        try:
            if not _PARAMETERS.issuperset(kinds):
                if not _FLAT.issuperset(kinds):
                    raise RuntimeError
                given = [arg for arg in leaves if type(arg) in _PARAMETERS]
            call.layout = [(one.shape, one.stride()) for one in given]
            call.reads = list(map(storage_key, given))
        except RuntimeError:  # sparse tensors have no strides
            given = list(tensors_in(leaves, {}))
            call.layout = layout_of(leaves, {})
            call.reads = [key for tensor in given for key in keys_of(tensor)]
        if not is_pure:
            self._state = state_of((function, *args, *kwargs.values()))
            self.given.before = [(tensor, version_of(tensor)) for tensor in (*given, *self.given.variables())]
        self._draws = not is_builtin(function) or may_draw(function.__name__)
        if self._draws and ops.draws is not None:
            ops.draws.begin()

    def returns(self, result: Any) -> None:
        """Note what the call returns."""
        call, ops = self.call, self.ops
        for tensor, version in self.given.before:
            if version_of(tensor) != version:
                self.note_written(tensor, version)
        leaves: Sequence[Any] = (result,)
        form = None
        if (
            type(result) is torch.Tensor and result._base is None and result.layout is torch.strided
            and not result.dtype.is_complex and (key := storage_key(result)) not in call.reads
            and (self._is_pure or self._is_new(result, key))
        ):  # fmt: skip
            if self._draws or ops.departures.waiting:
                self.watch_end(self._draws)
            else:
                self.last = sequence_number()
            ops.note_result(call, result, key)
        else:
            if not isinstance(result, torch.Tensor):
                leaves, form = flatten(result)
            if why := refused(leaves):
                raise self._cannot_be_skipped(why, "Return tensors and plain values")
            self._returns_several(leaves, () if form is None or form.is_leaf() else (form,))
        if self.given.used:
            call.places = self.given.used
        if call.start == call.end or self.last - self.first > 1:
            refuse_gradient(ops.region, call.name, self.first, leaves)
        if not self._is_pure:
            self._check_left(leaves)

    def _is_new(self, result: torch.Tensor, key: int) -> bool:
        """Whether the call has made the storage of its result, which is no view."""
        node = result.grad_fn
        if node is not None and node_number(node) >= self.first and not self.written:
            return True
        return self.given.find(result, key) is None

    def _returns_several(self, leaves: Sequence[Any], template: tuple[Any, ...]) -> None:
        ops, call = self.ops, self.call
        self.watch_end(self._draws)
        seen: dict[int, int] = {}
        forms, made = [], []
        for at, leaf in enumerate(leaves):
            form = leaf
            if isinstance(leaf, torch.Tensor) and (first := seen.setdefault(id(leaf), at)) != at:
                form = Again(first)
            elif isinstance(leaf, torch.Tensor):
                form = self._form_of(leaf)
                if type(form) in (Meta, WrapperMeta):
                    made.append((at, leaf))
            forms.append(form)
        call.template = template
        call.results = forms if call.template else forms[0]
        call.gradients = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        ops.note_results(call, leaves, made)

    def _form_of(self, leaf: torch.Tensor) -> Any:
        """Describe a tensor of the result."""
        key = key_of(leaf)
        found = self.given.find(leaf, key)
        if found is not None:
            place, source = found
            self.given.use(place)
            if source is leaf:
                return Passed(place, None)
            both = type(leaf) in USUAL and type(source) in USUAL
            if (
                both
                and leaf.layout is source.layout is torch.strided
                and leaf.dtype in (source.dtype, source.dtype.to_real())
            ):
                return Passed(place, lying_in(leaf, source), leaf.requires_grad, leaf._base is not None)
        if leaf.is_leaf and leaf.requires_grad:
            return leaf
        meta = described(leaf, None)
        return (
            meta
            if type(meta) in (Meta, WrapperMeta)
            else Slot(leaf.detach(), self.ops.region.hooks, leaf.requires_grad)
        )

    def _check_left(self, leaves: Sequence[Any]) -> None:
        """Look for effects of the call other than its result."""
        ops = self.ops
        made = self.last - self.first
        if made > 1 or (made and not (len(leaves) == 1 and has_one_output(node_behind(leaves[0])))):
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            # Where a view is modified later, autograd goes on from what it is a view of.
            tensors += [leaf._base for leaf in tensors if leaf._base is not None]
            self.outputs = {(node, leaf.output_nr) for leaf in tensors if (node := node_behind(leaf)) is not None}
        if self._state and is_changed(self._state, ops.region.function):
            raise self._cannot_be_skipped(
                "it changed which tensors a variable, container or iterator of the region holds",
                "Return the tensors",
            )
        if self.written:
            ops.note_writes(self)

    def _cannot_be_skipped(self, why: str, remedy: str) -> UsageError:
        return cannot_be_skipped(self.ops.region, self.call, why, remedy)

    def let_go(self) -> None:
        """Let go of arguments and variables, once the call is over: the region may be done with them."""
        super().let_go()
        self._state = ()


def cannot_be_skipped(region: RegionLike, call: Call, why: str, remedy: str) -> UsageError:
    """Return the error about a call that has effects on its region other than its result."""
    return UsageError(
        f"replay cannot skip this call: {why}",
        region=region.name,
        op=call.name,
        remedy=f"{remedy}, use remat.native_save_region, whose Python runs again in replay, or give the call the "
        "policy RECOMPUTE.",
    )


def _leaves_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    return args if is_flat(args, kwargs) else leaves_of(args, kwargs)


def refuse_gradient(region: RegionLike, name: str, first: int, leaves: Sequence[Any]) -> None:
    """Refuse a gradient inside of the region's forward through a call's result, where no saved tensor shows it."""
    for leaf in leaves:
        node = leaf.grad_fn if type(leaf) is torch.Tensor and leaf._base is None else node_behind(leaf)
        if node is not None and node_number(node) >= first:
            node.register_prehook(partial(region.note_gradient, name))
