"""A forward that is recorded: what each call of a function reads and makes, and its seconds.

Matters in the first forwards of a kind of region whose policy, or whose budget, goes by price. In: calls of functions,
as a mode for them sees them, and the ops in each, as a dispatch mode does. Kept, until forward ends: weak references to
storages. Out: the `Record` of which a ladder is made. The region itself keeps nothing in such a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from sys import _getframe
from time import perf_counter_ns
from types import NoneType
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from torch_remat._compat import (
    COLLECTIVES,
    CompiledCode,
    collective_counter,
    graph_task,
    is_dynamo_compiling,
    keep_from_compiler,
    process_groups,
)
from torch_remat.dispatch.call.collectives import Collectives
from torch_remat.dispatch.call.functions import can_be_kept, is_counted
from torch_remat.dispatch.call.result import flatten
from torch_remat.dispatch.holder import value_behind
from torch_remat.dispatch.keys import USUAL, key_of, keys_of, parts_of, tensors_in
from torch_remat.dispatch.naming import ModulePath
from torch_remat.dispatch.ops.entry import written_arguments
from torch_remat.dispatch.ops.schema import effects_of
from torch_remat.dispatch.region.inputs import leaves_of
from torch_remat.dispatch.region.region import Tape
from torch_remat.ladders.kinds import Kind
from torch_remat.ladders.record import Record, Step
from torch_remat.policies.functions import name_of, opened

if TYPE_CHECKING:
    from torch_remat.dispatch.mode import RematMode

_ACCESS = frozenset(("__get__", "__set__"))  # to attributes


class Survey(TorchFunctionMode):
    """The calls of all functions in one forward.

    Args:
        mode: The region's forward.
        kind: What learns of it.
        shapes: Of the region's arguments.
    """

    def __init__(self, mode: RematMode, kind: Kind, shapes: Any) -> None:
        super().__init__()
        self._mode, self._kind, self._shapes = mode, kind, shapes
        self._record = Record()
        self._units: dict[int, int] = {}
        self._saved: dict[int, int] = {}  # the bytes of all that is saved, by storage
        self._begun = perf_counter_ns()
        self._alive: list[StorageWeakRef] = []  # so that no address comes again
        self._step: Step | None = None
        self._made: dict[int, None] = {}  # the units that it has made so far
        self._changed: dict[int, None] = {}  # and those that it has written, which were there before
        self._has_effects = False  # whether it has written what was there before the region
        self._counts: dict[Any, int] = {}
        self._named: dict[str, int] = {}
        self._path = ModulePath(cast("Callable[..., Any]", mode.region.function))
        self._compiled = CompiledCode()
        self._has_gradients = False
        self._is_on_cpu = True
        self._has_others = any(size > 1 for _, size in process_groups())
        count = collective_counter() if self._has_others else None
        self._collectives = None if count is None else Collectives(count, mode.region.function)

    def around(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the region's function, and see the functions that it calls."""
        self._path.end = _getframe()
        for tensor in tensors_in(leaves_of(args, kwargs), {}):
            self._record.inputs.update(self._new_units(tensor))
            self._is_on_cpu = self._is_on_cpu and tensor.device.type == "cpu"
        try:
            with self, self._compiled:
                return function(*args, **kwargs)
        finally:
            self._path.end = None

    def finish(self, tape: Tape) -> None:
        """End the record, given what forward has noted.

        Of what compiled code hides, and where gradients are taken inside, no more is learned than all that it keeps.
        """
        record = self._record
        for entry in tape.saved:
            if (value := value_behind(entry)) is not None:
                record.saved.update(self._units_of(value))
        self.note_saved(tape.saved)
        if self._collectives is not None and (found := self._collectives.found()):
            self._kind.communicates = found
        record.whole_bytes = sum(self._saved.values())
        record.whole_ns = perf_counter_ns() - self._begun
        record.is_hidden = self._compiled.ran or self._has_gradients
        record.is_named = bool(tape.records)
        for known in (self._alive, self._units, self._saved):
            known.clear()
        record.end()
        self._kind.learn(self._shapes, record)

    def note_saved(self, saved: Sequence[Any]) -> None:
        """Note what autograd has saved in this region, or in one inside, where it keeps that as plain code."""
        for entry in saved:
            holder = entry() if type(entry) is ref else None
            if holder is not None and (value := holder.value) is not None:
                if self._has_others and type(value).__module__.startswith("torch.distributed."):
                    self._kind.communicates = f"saves a {type(value).__name__}"
                for part in parts_of(value):
                    if part.layout is torch.strided and (
                        holder.producer is not NoneType or key_of(part) in self._units
                    ):
                        self._saved[key_of(part)] = part.untyped_storage().nbytes()

    @keep_from_compiler
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, and note the call; those in Python are looked into."""
        if is_dynamo_compiling() or self._step is not None:
            return func(*args, **kwargs) if kwargs else func(*args)
        if (copy := opened(func)) is not None:
            with self:
                return copy(*args, **(kwargs or {}))
        name = name_of(func)
        if name in _ACCESS or not is_counted(self._mode, kwargs):
            return func(*args, **kwargs) if kwargs else func(*args)
        number = self._counts[func] = self._counts.get(func, -1) + 1
        self._step = step = Step(func, number, self._path.of(_getframe(1)) + name)
        saved = self._mode.region.tape.saved
        places = len(saved)
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        finally:
            self._step, made, changed, effects = None, self._made, self._changed, self._has_effects
            self._made, self._changed, self._has_effects = {}, {}, False
        step.saves = len(saved) > places
        values = [value for entry in saved[places:] if (value := value_behind(entry)) is not None]
        step.saves_made = any(unit in made for value in values for unit in self._units_of(value))
        self._record.calls += 1
        leaves, _ = flatten(result)
        if made or changed or effects:
            is_whole = not (changed or effects) and can_be_kept(func)
            step.results = self._results_in(made, leaves) if is_whole else None
            self._add(step, [*made, *changed])
        elif step.reads and not all(isinstance(leaf, Tensor) for leaf in leaves):
            self._add(step, ())  # a number: whatever reads it decides by it
        return result

    def _results_in(self, made: Mapping[int, None], leaves: Sequence[Any]) -> tuple[int, ...] | None:
        """Return the units of a call's results; None if they are no plain tensors in storages of their own."""
        if not leaves or not USUAL.issuperset(map(type, leaves)):
            return None
        found = tuple(unit for leaf in leaves for unit in self._units_of(leaf))
        return found if len(found) == len(leaves) == len(set(found)) and made.keys() >= set(found) else None

    def _add(self, step: Step, writes: Sequence[int]) -> None:
        """Note a step that is over."""
        record = self._record
        step.writes = list(writes)
        for unit in writes:
            record.writers[unit].append(len(record.steps))
        at = self._named[step.name] = self._named.get(step.name, -1) + 1
        step.name = f"{step.name}_{at}"
        record.steps.append(step)

    def see(self, _mode: Any, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run an op, and note it."""
        kwargs = kwargs or {}
        self._has_gradients = self._has_gradients or graph_task() >= 0
        known = {key for tensor in tensors_in(args, kwargs) for key in keys_of(tensor)}
        given = [self._units[key] for key in known if key in self._units]
        before = [len(self._record.writers[unit]) for unit in given]
        begin = perf_counter_ns()
        result = op(*args, **kwargs)
        if not self._is_on_cpu:
            torch.accelerator.synchronize()
        spent = perf_counter_ns() - begin
        effects = effects_of(op)
        if effects.ignored:
            return result
        if self._has_others and effects.namespace in COLLECTIVES:
            self._kind.communicates = "runs collectives"
        step = Step(None, -1, effects.name) if self._step is None else self._step
        step.ns += spent
        step.random = step.random or effects.random
        step.reads += [(unit, n) for unit, n in zip(given, before, strict=True) if unit not in self._made]
        changed = written_arguments(effects, args, kwargs)
        written = [unit for one in changed for unit in self._units_of(one)]
        leaves = [leaf for leaf in leaves_of((result,), {}) if isinstance(leaf, Tensor)]
        made = [unit for leaf in leaves for unit in self._new_units(leaf, known)]
        if self._step is None:
            if made or changed or not leaves:
                step.saves = True  # what follows may save it: nobody knows who has called the op
                self._add(step, [*made, *written])
            return result
        self._made.update(dict.fromkeys(made))
        self._changed.update(dict.fromkeys(unit for unit in written if unit not in self._made))
        self._has_effects = self._has_effects or not (len(written) == len(changed) or effects.higher)
        return result

    def _units_of(self, tensor: Tensor) -> list[int]:
        """Return the units of a tensor; none for what was there before the region."""
        return [self._units[key] for key in keys_of(tensor) if key in self._units]

    def _new_units(self, tensor: Tensor, known: Collection[int] = ()) -> list[int]:
        """Return units for those storages of a tensor that have none and are not among the known ones."""
        found = []
        for part in parts_of(tensor):
            if part.layout is torch.strided and (key := key_of(part)) not in self._units and key not in known:
                storage = part.untyped_storage()
                self._alive.append(StorageWeakRef(storage))
                self._units[key] = unit = self._record.new_unit(storage.nbytes())
                found.append(unit)
        return found
