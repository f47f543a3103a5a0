"""Calls of functions of torch that a policy keeps, found by a mode for torch functions.

In: what user code calls in a region whose policy lists functions. Kept: of a chosen call what it saved, and what it
returned if replay goes on past it. Out: in replay, these results in place of the call.

NOTE [ Functions ]
1. All that other calls cost is one look-up. Both phases count the calls of each chosen function; the same number of the
   same function, at the same place of the tape, with tensors of the same shapes, is the same call.
2. A call is judged after it ran. Any doubt means that replay runs it, as if nobody had chosen it: it modified an
   argument, returned one or a view of one, or something else than tensors; its result was modified since, or there was
   access to its memory (``.numpy()``, ``data_ptr()``), which no version counter shows. So nothing is said about it.
3. Arguments of the call wait, as for any saved call; but what an earlier kept call made is kept.
4. Under autocast a kept call would keep the casts that it makes of its arguments: these are made before it, in
   autocast's own order, since gradients of one tensor add up in it.
5. Not seen as calls: what stands in an inner region, under a transform, without gradients, or in code that is compiled;
   and what the runtime and the hooks of users do: `RematMode.hidden` takes the mode off the stack meanwhile.
   Functions in Python that call others are opened: `policies.functions.opened_around`.
6. A function in Python, and an op, may run anything: it is a call as those of `remat.op`, also beside a policy for ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from sys import _getframe
from types import BuiltinFunctionType, MappingProxyType, MethodDescriptorType, WrapperDescriptorType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from torch_remat._compat import (
    POINTER_FUNCTIONS,
    OperatorBase,
    OpOverloadPacket,
    any_autocast_enabled,
    casts_the_last_first,
    is_dynamo_compiling,
    is_transformed,
    keep_from_compiler,
    optree,
    storage_key,
    without_torch_function,
)
from torch_remat.dispatch.call.answerer import Answerer
from torch_remat.dispatch.call.call import may_draw
from torch_remat.dispatch.call.entry import Call
from torch_remat.dispatch.call.recorder import Recorder
from torch_remat.dispatch.call.result import flatten, identity_of
from torch_remat.dispatch.keys import USUAL, key_of, keys_of, parts_of
from torch_remat.dispatch.mode import Ops, RematMode, Replaying, current_mode
from torch_remat.dispatch.naming import ModulePath
from torch_remat.dispatch.ops.entry import FIRST
from torch_remat.dispatch.ops.meta import described
from torch_remat.dispatch.placeholder import Placeholder
from torch_remat.dispatch.region.inputs import leaves_of, with_leaves
from torch_remat.dispatch.region.region import OpenRegion
from torch_remat.dispatch.slot import Slot
from torch_remat.errors import Carried, RematError
from torch_remat.policies.decision import CheckpointPolicy, Decision
from torch_remat.policies.functions import changes_arguments, label_of, name_of, opened, opened_around
from torch_remat.policies.nothing import is_known, is_new, note_first_functions, note_known
from torch_remat.policies.policy import NOTHING_BY_FUNCTION, KeptFunctions

if TYPE_CHECKING:
    from torch_remat.ladders.ladder import Rung

_new = object.__new__  # as in the recorder
_OURS = f"{__name__.partition('.')[0]}."  # modules of this package, which write nothing
_CASTABLE = (Tensor, Placeholder)  # in the replay of an enclosing region
_FLAT = frozenset((*USUAL, int, float, bool, str, type(None)))
_IN_C = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)  # which run no Python of users
# What autocast runs in a smaller dtype on each device, and casts anew for each call.
_CAST = frozenset(("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "scaled_dot_product_attention"))
Act = Callable[[Any, Any, Sequence[Any], Mapping[str, Any]], Any]


class Functions(TorchFunctionMode):
    """The calls of functions in one phase of a region, as the innermost mode for torch functions."""

    table: Mapping[Any, Act] = MappingProxyType({})

    def __init__(self, chosen: KeptFunctions) -> None:
        super().__init__()
        self.chosen = chosen
        self._about = _about(chosen)
        self._counts: dict[Any, int] = {}

    @keep_from_compiler
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, or do with it what the policy says."""
        if is_dynamo_compiling():  # the compiler traces this, too
            return func(*args, **kwargs) if kwargs else func(*args)
        act = self.table.get(func)
        if act is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return act(self, func, args, kwargs or {})

    def around(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the region's function, and see the functions that it calls."""
        self._counts.clear()  # replay may start over
        with self:
            return function(*args, **kwargs)

    def open(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function in Python so that the functions are seen that it calls."""
        with self:
            return self.chosen.tables["opened"][func](*args, **kwargs)


class Noting(Functions):
    """The calls of functions in forward."""

    def __init__(self, mode: RematMode, log: Callable[[], Recorder], chosen: KeptFunctions) -> None:
        super().__init__(chosen)
        self._mode, self._log = mode, log
        self.table = _table_of(chosen, "forward")
        self._left_out = chosen.left_out
        self._path = ModulePath(cast("Callable[..., Any]", mode.region.function))
        self._named: dict[str, int] = {}

    def around(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the region's function, and see the functions that it calls."""
        self._path.end = _getframe()
        try:
            return super().around(function, *args, **kwargs)
        finally:
            self._path.end = None

    def finish(self) -> None:
        """Take note that forward is over."""

    def watch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function that gives access to the memory of a tensor."""
        frame = _getframe(1)
        while (module := frame.f_globals.get("__name__", "")) == __name__ and frame.f_back is not None:
            frame = frame.f_back
        if module.startswith(_OURS):  # such as in a handle
            return func(*args, **kwargs)
        for arg in args:
            for part in parts_of(arg) if isinstance(arg, Tensor) and not is_lazy(arg) else ():
                storage = StorageWeakRef(part.untyped_storage()) if part.layout is torch.strided else None
                self._log().pointed[key_of(part)] = storage
        return func(*args, **kwargs)

    def keep(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a chosen function, and note the call."""
        if not is_counted(self._mode, kwargs):
            return func(*args, **kwargs)
        number = self._counts[func] = self._counts.get(func, -1) + 1
        places: Sequence[int] | None = None
        if (numbers := self.chosen.acts.get(func)) is not None and (places := numbers.get(number)) is None:
            return func(*args, **kwargs)
        log = self._log()
        if places is not None:
            name = self.chosen.names.get((func, number)) or f"{self._about[func].name}_{number}"
        else:
            name = self._name_of(func)
        if self._left_out and places is None and any(fnmatchcase(name, pattern) for pattern in self._left_out):
            return func(*args, **kwargs)
        about = self._about[func]
        if log.has_policy or not about.is_in_c:
            return self._run(name, number, about.policy, func, args, kwargs)
        casts = None
        if places is None and any_autocast_enabled():
            args, kwargs, casts = _cast(func, args, kwargs, is_there=lambda leaf: key_of(leaf) not in log.by_handles)
        leaves = args if not kwargs and _FLAT.issuperset(map(type, args)) else leaves_of(args, kwargs)
        call: Call = _new(Call)
        call.name = call.group = name
        call.policy, call.function, call.waiting = about.policy, func, ()
        if places is not None:
            call.is_by_price = True
            if (func, number) in self.chosen.away:
                call.policy = CheckpointPolicy.OFFLOAD
        if casts is not None:
            call.casts = casts
        call.layout, before, reads = _taken(leaves)
        draws = log.draws if about.draws else None
        log.open(call, leaves, reads)
        if draws is not None:
            draws.begin()
        try:
            result = func(*args, **kwargs)
        except BaseException:
            log.give_up(call)
            raise
        for tensor, version in before:
            if tensor._version != version:
                log.give_up(call)
                return result
        if self._note_result(log, call, result, reads, places):
            if call.policy is CheckpointPolicy.OFFLOAD:
                call.away = call.saved
            if draws is not None:
                call.drawn = draws.end()
            if call.start == call.end:  # no place of the tape distinguishes it from another
                call.layout = call.layout, _known_by(log.region, leaves)
            log.region.tape.functions[func, number] = call
        else:
            log.give_up(call)
        return result

    def _note_result(
        self, log: Recorder, call: Call, result: Any, reads: Sequence[int], places: Sequence[int] | None
    ) -> bool:
        """Note what a call returned, of which ``places`` are kept, or all; return False if replay is to run it."""
        if type(result) is Tensor and result.layout is torch.strided:  # what most calls return
            if (key := storage_key(result)) in reads:
                return False
            log.settle()
            call.gradients, call.saved, call.made = (result.requires_grad,), FIRST, ((0, key),)
            log.storages.writers[key] = call, 0
            if places is None or 0 in places:
                call.kept = {0: Slot.of_alias(self._mode.alias_of(result))}
            else:  # there is a placeholder in replay
                call.results = [described(result, None)]
                log.known.append(StorageWeakRef(result.untyped_storage()))
            return True
        leaves, form = flatten(result)
        if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
            return False
        if not form.is_leaf():
            call.template = (form,)
        made: dict[int, None] = {}
        for leaf in leaves:
            if (key := key_of(leaf)) in reads or key in made:
                return False
            made[key] = None
        log.settle()
        call.gradients = [leaf.requires_grad for leaf in leaves]
        call.saved = FIRST if len(leaves) == 1 else frozenset(range(len(leaves)))
        kept = [place for place in range(len(leaves)) if places is None or place in places]
        if len(kept) < len(leaves):
            call.results = [described(leaf, None) for leaf in leaves]
            log.known += [StorageWeakRef(leaf.untyped_storage()) for leaf in leaves]
        call.kept = {place: Slot.of_alias(self._mode.alias_of(leaves[place])) for place in kept}
        call.made = [(0, key) for key in made]
        for key in made:
            log.storages.writers[key] = call, 0
        return True

    def _run(
        self,
        name: str,
        number: int,
        policy: CheckpointPolicy,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a function that may run anything as a call of `remat.op`."""
        log = self._log()
        try:
            return _run(log, name, policy, func, args, kwargs)
        finally:
            if (record := log.region.tape.records.get(name)) is not None:
                record.listed = func, number

    def _name_of(self, func: Any) -> str:
        stem = self._path.of(_getframe(3)) + self._about[func].name
        number = self._named[stem] = self._named.get(stem, -1) + 1
        return f"{stem}_{number}"


class First(Noting):
    """The calls of functions in the first forward of a region's code under a policy: what is not called is said."""

    def __init__(self, mode: RematMode, log: Callable[[], Recorder], chosen: KeptFunctions) -> None:
        super().__init__(mode, log, chosen)
        self._ran: dict[str, None] = {}

    @keep_from_compiler
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note that a function runs."""
        if not is_dynamo_compiling() and not name_of(func).startswith("__"):
            self._ran[name_of(func)] = None
        return super().__torch_function__(func, types, args, kwargs)

    def finish(self) -> None:
        """Say which of the functions did not run, once for each code."""
        region, policy = self._mode.region, self.chosen.policy
        code = identity_of(region.function)
        note_known(self.chosen.tables, code)
        if not is_new(policy, code):
            return
        kinds = [kind for kind in policy.kinds() if kind.functions()]
        every, listed = (
            list(dict.fromkeys(name for kind in some for name in kind.op_names()))
            for some in (kinds, [kind for kind in kinds if not kind.is_ready])
        )
        selects = region.options.policy is not None or not self._ran.keys().isdisjoint(every)
        note_first_functions(policy, code, region.name, listed if selects else every, list(self._ran), selects)


class Census(TorchFunctionMode):
    """The calls of all functions in one run, with their names.

    Attributes:
        calls: Their names, the functions as users write them, and how many ops ran before each and by its end.
    """

    def __init__(self, root: Callable[..., Any]) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, int, int]] = []
        self._path = ModulePath(root)
        self._named: dict[str, int] = {}
        self._now: Callable[[], int] = int

    def around(
        self, function: Callable[..., Any], now: Callable[[], int], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a function; ``now`` returns how many ops have run."""
        self._now, self._path.end = now, _getframe()
        try:
            with self:
                return function(*args, **kwargs)
        finally:
            self._now, self._path.end = int, None

    @keep_from_compiler
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, and note it if ops run; those in Python are looked into."""
        if is_dynamo_compiling():
            return func(*args, **kwargs) if kwargs else func(*args)
        if (copy := opened(func)) is not None:
            with self:
                return copy(*args, **(kwargs or {}))
        begin = self._now()
        stem = self._path.of(_getframe(1)) + name_of(func)
        result = func(*args, **kwargs) if kwargs else func(*args)
        if (end := self._now()) > begin and not name_of(func).startswith("__"):
            number = self._named[stem] = self._named.get(stem, -1) + 1
            self.calls.append((f"{stem}_{number}", label_of(func), begin, end))
        return result


def with_rung(fixed: KeptFunctions | None, rung: Rung) -> KeptFunctions:
    """Return what a policy says of functions, if there is one, with what is kept by price."""
    fixed = NOTHING_BY_FUNCTION if fixed is None else fixed
    key = id(rung), id(fixed.tables)
    if (known := _RUNGS.get(key)) is None or known[0] is not rung or known[1].tables is not fixed.tables:
        if len(_RUNGS) >= _MANY:
            _RUNGS.clear()
        decisions = dict.fromkeys(rung.acts, Decision.MUST_SAVE) | dict(fixed.decisions)
        acts = {function: acts for function, acts in rung.acts.items() if function not in fixed.decisions}
        whole = fixed._replace(decisions=decisions, tables={}, acts=acts, away=rung.away, names=rung.names)
        known = _RUNGS[key] = rung, fixed, whole
    return known[2]


_RUNGS: dict[Any, tuple[Rung, KeptFunctions, KeptFunctions]] = {}
_MANY = 4096


def is_counted(mode: RematMode, kwargs: Mapping[str, Any] | None) -> bool:
    """Whether a call of a function now is one of a region's forward itself, which a policy can keep."""
    if current_mode() is not mode:
        return False
    log = mode.ops
    if isinstance(log, Recorder) and (log.calling is not None or (log.opened and log.is_in_skipped_body())):
        return False
    return torch.is_grad_enabled() and not is_transformed() and not (kwargs and kwargs.get("out") is not None)


def can_be_kept(function: Any) -> bool:
    """Whether a call of a function can be kept by price: it runs no Python of users, and does not change arguments."""
    if type(function) not in _IN_C and not isinstance(function, OperatorBase | OpOverloadPacket):
        return False
    return not changes_arguments(name_of(function))


def noting(mode: RematMode, log: Callable[[], Recorder], chosen: KeptFunctions) -> Noting:
    """Return what notes the calls of functions in a region's forward; ``log`` makes its log, if nothing else has."""
    is_first = not (chosen.acts or is_known(chosen.tables, identity_of(mode.region.function)))
    return (First if is_first else Noting)(mode, log, chosen)


class Giving(Functions):
    """The calls of functions in replay."""

    def __init__(self, replay: Replaying, ops: Answerer, chosen: KeptFunctions) -> None:
        super().__init__(chosen)
        self._replay, self._ops = replay, ops
        self._calls = ops.region.tape.functions
        calls = ops.region.tape.records.values()  # those of functions that may run anything
        self._named = {call.listed: call for call in calls if call.listed is not None}
        self.table = _table_of(chosen, "replay")

    def give(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what a chosen function returned in forward, or run it."""
        replay, ops = self._replay, self._ops
        if (
            current_mode() is not replay
            or replay.over
            or ops.native is not None
            or ops.whole is not None
            or not torch.is_grad_enabled()
            or is_transformed()
            or (kwargs and kwargs.get("out") is not None)
        ):
            return func(*args, **kwargs)
        number = self._counts[func] = self._counts.get(func, -1) + 1
        if self._named and (named := self._named.get((func, number))) is not None:
            return _run(ops, named.name, named.policy, func, args, kwargs)
        call = self._calls.get((func, number))
        if call is None or not (call.is_saved and call.is_answered):
            return func(*args, **kwargs)
        if call.casts is not None:
            args, kwargs, _ = _cast(func, args, kwargs, call.casts)
        leaves = args if not kwargs and _FLAT.issuperset(map(type, args)) else leaves_of(args, kwargs)
        layout: Any = _layout_of(leaves)
        if call.start == call.end:
            layout = layout, _known_by(ops.region, leaves)
        if replay.position != call.start or layout != call.layout:
            return func(*args, **kwargs)
        ops.come_to(call, leaves)
        if call.drawn is not None:
            call.drawn.restore()
        if not call.template:
            return ops.kept_or_stand_in(call, 0)
        made = [ops.kept_or_stand_in(call, place) for place in range(len(call.gradients))]
        return optree.tree_unflatten(call.template[0], made)


def _run(
    log: Ops, name: str, policy: CheckpointPolicy, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run a call as one of `remat.op`: a TypeError is carried past torch's operators, which take it for their own."""
    try:
        return log.run(False, name, policy, func, args, kwargs)
    except TypeError as error:
        if isinstance(error, RematError):
            raise Carried(error) from None
        raise


def _table_of(chosen: KeptFunctions, phase: str) -> Mapping[Any, Act]:
    """Return what is done with each function in a phase."""
    if (table := chosen.tables.get(phase)) is None:
        opened = chosen.tables["opened"] = opened_around(tuple(chosen.decisions))
        acts: dict[Any, Act] = dict.fromkeys(opened, Functions.open)
        if phase == "forward":
            acts |= dict.fromkeys(POINTER_FUNCTIONS, Noting.watch)
        acts |= dict.fromkeys(chosen.decisions, Noting.keep if phase == "forward" else Giving.give)
        table = chosen.tables[phase] = acts
    return table


class _About(NamedTuple):
    """What is known of a function."""

    name: str
    policy: CheckpointPolicy
    draws: bool  # whether it may draw random numbers
    is_in_c: bool  # and runs no Python of users


def _about(chosen: KeptFunctions) -> Mapping[Any, _About]:
    about: dict[Any, _About] | None = chosen.tables.get("about")
    if about is None:
        about = {}
        for function, decision in chosen.decisions.items():
            name = name_of(function)
            policy = CheckpointPolicy.OFFLOAD if decision.offloads else CheckpointPolicy.SAVE
            about[function] = _About(name, policy, may_draw(name), type(function) in _IN_C)
        chosen.tables["about"] = about  # whole, since other threads may look
    return about


def _taken(leaves: Sequence[Any]) -> tuple[Sequence[Any], Sequence[tuple[Tensor, int]], Sequence[int]]:
    """Return, of the tensors among arguments, what `_layout_of` does, their versions, and their storages."""
    layout, before, reads, is_plain = [], [], [], True
    try:
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                layout.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad))
                before.append((leaf, leaf._version))
                reads.append(storage_key(leaf))
                is_plain = is_plain and type(leaf) in USUAL
    except (RuntimeError, NotImplementedError):  # made in inference mode, or of a layout without strides or storage
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        counted = [(leaf, leaf._version) for leaf in given if not leaf.is_inference()]
        return _layout_of(leaves), counted, [key for leaf in given for key in keys_of(leaf)]
    if not is_plain:
        reads = [key for tensor, _ in before for key in keys_of(tensor)]
    return layout, before, reads


def _layout_of(leaves: Sequence[Any]) -> Sequence[Any]:
    """Return what distinguishes calls of one function: an odd one in one phase must not take the place of another."""
    layout: list[Any] = []
    try:
        for leaf in leaves:
            if type(leaf) is Placeholder:
                break  # each look at one takes as long as all of this
            if isinstance(leaf, Tensor):
                layout.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad))
        else:
            return layout
    except RuntimeError:  # sparse tensors have no strides
        return [(leaf.shape, leaf.dtype, leaf.requires_grad) for leaf in leaves if isinstance(leaf, Tensor)]
    with without_torch_function():
        return [
            (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad) for leaf in leaves if isinstance(leaf, Tensor)
        ]


def _known_by(region: OpenRegion, leaves: Sequence[Any]) -> Sequence[Any]:
    """Return what distinguishes calls that save nothing: plain arguments, and those of the region, and parameters."""
    found: list[Any] = []
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            found.append(leaf if type(leaf) in _FLAT else None)
        elif type(leaf) in USUAL and leaf.layout is torch.strided:  # in replay it may be a placeholder
            stays = region.hooks is None and not region.options.offload_inputs
            is_here = stays and region.inputs.lies_with(storage_key(leaf))
            if is_here or type(leaf) is Parameter:
                found.append((place, storage_key(leaf)))
    return found


def _cast(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    as_forward: Sequence[int] | None = None,
    is_there: Callable[[Tensor], bool] = bool,
) -> tuple[Sequence[Any], Mapping[str, Any], Sequence[int] | None]:
    """Return the arguments as autocast gives them to a function, and which leaves it casts; None without autocast.

    Casts of leaves that require a gradient stay where they are: autocast makes one for all calls.

    Args:
        func: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        as_forward: Which leaves forward has cast.
        is_there: Whether replay will have a tensor, so that it can cast that, too.
    """
    if name_of(func) not in _CAST or (not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled()):
        return args, kwargs, None
    leaves = leaves_of(args, kwargs)
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    if first is None or not torch.is_autocast_enabled(first.device.type) or first.dim() < 2:
        return args, kwargs, None
    dtype, places = torch.get_autocast_dtype(first.device.type), as_forward
    if places is None:
        places = [place for place, leaf in enumerate(leaves) if _is_cast(leaf) and is_there(leaf)]
        if any(isinstance(leaf, Tensor) and leaf.dim() < 2 for leaf in leaves) and name_of(func) != "linear":
            return args, kwargs, None
    # In this order gradients of one tensor add up.
    for place in reversed(places) if casts_the_last_first() else places:
        leaves[place] = leaves[place].to(dtype)
    args, kwargs = with_leaves(args, kwargs, leaves)
    return args, kwargs, places


def _is_cast(leaf: Any) -> bool:
    if type(leaf) not in _CASTABLE or leaf.dtype is not torch.float32:
        return False
    return not (leaf.is_leaf and leaf.requires_grad)
