"""`explain`: why each named tensor is kept or not, and what each op's other policies would cost.

`Notes` watches the run: which ops ran in which phase, what each read, made and saved, and their FLOPs, which are those
of ``torch.utils.flop_counter``. It keeps numbers and names.

NOTE [ Numbers of storages ]
Addresses are used again, so each storage has a number, which is new when an op makes it. Which storage a saved tensor
is in, the names of the node's attributes tell: they are those of the op's arguments, or of its results. What a handle
saves it gives by names of its own; of any other custom Function shape and dtype tell, as far as they do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import get_ident
from typing import Any
from weakref import ref

import torch
from torch.autograd.function import BackwardCFunction

from torch_remat._compat import TorchDispatchMode, as_written, eager_only
from torch_remat._kept import Kept, decisions_of, kept_by
from torch_remat._options import says_form
from torch_remat._util.flops import flops_of
from torch_remat._util.storages import pieces_in, storages_of, tensors_in, viewed_parameter
from torch_remat.dispatch.holder import Holder
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.placeholder import is_placeholder
from torch_remat.dispatch.region.region import Region
from torch_remat.errors import UsageError, qualified_name, user_line
from torch_remat.offload.protocol import chosen
from torch_remat.offload.sender import default_offloader
from torch_remat.policies.decision import CheckpointPolicy
from torch_remat.reports.data import report_of
from torch_remat.reports.explanation import Alternative, Explanation, OpExplanation, RegionExplanation
from torch_remat.reports.graph import is_of_checkpoint, is_released, nodes_below, saved_in
from torch_remat.reports.reasons import Cost, OpNotes, Prices, Reasons, Seen, Step, never_needed
from torch_remat.reports.watch import Observer, WatchedOp, observed_by

Look = tuple[torch.Size, torch.dtype]


@dataclass
class RegionNotes:
    """One region, while its forward runs."""

    told: RegionExplanation
    ops: dict[str, OpNotes] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    looks: dict[Look, int] = field(default_factory=dict)  # by shape and dtype the storage that was seen last

    def note_saves(self) -> None:
        """Note what autograd saved of the last step, which has its node by now."""
        step = self.steps[-1] if self.steps else Step("", "")
        for result in step.outs:
            node = None if (tensor := result()) is None else tensor.grad_fn
            named = isinstance(node, BackwardCFunction) and step.call and self.ops[step.call].saved
            for label, packed in () if node is None or named else saved_in(node):
                if not isinstance(packed, Holder):
                    continue
                if label in step.names:
                    step.before.add(step.names[label])
                elif label.startswith("result") and step.makes:
                    step.after.update(step.makes)
                elif (look := packed.metadata[1:3]) in self.looks:
                    step.after.add(self.looks[look])
        step.outs = ()


class Notes(Observer, TorchDispatchMode):
    """Takes notes of all regions whose forward this thread runs outside of replays, by their serial numbers."""

    supports_higher_order_operators = True

    def __init__(self, alternatives: bool) -> None:
        super().__init__()
        self.regions: dict[int, RegionNotes] = {}
        self._alternatives = alternatives
        self._thread = get_ident()
        # What runs, by thread, innermost last: the region, its notes if there are any, the op in it, and the phase.
        self._running: dict[int, list[tuple[Region, RegionNotes | None, OpNotes | None, str]]] = defaultdict(list)
        self._numbers: dict[Hashable, int] = {}
        self._sizes: dict[int, int] = {}
        self._new_number = count().__next__

    def begin(self, region: Region, op: WatchedOp | None, phase: str) -> None:
        """Begin to count for an op, or for a region."""
        mode = current_mode()
        mine = get_ident() == self._thread
        if op is None and phase == "forward" and mine and mode is not None and not mode.recomputing:
            self.regions[region.serial] = RegionNotes(RegionExplanation(region.name))
            given = tensors_in(region.inputs.given if region.inputs else ())
            saved = {self._look_at("", tensor).number for tensor in given}
            for _, step in self._steps_of("", ()):
                step.before, step.inner = saved, True
        notes, found = self.regions.get(region.serial), None
        if notes is not None and op is not None:
            if phase == "forward":
                told = OpExplanation(op.name, op.policy.value)
                notes.ops.setdefault(op.name, OpNotes(told, op.policy))
            found = notes.ops.get(op.name)
        elif notes is not None and phase == "replay":
            notes.told.replays += 1
            for other in notes.ops.values():
                other.told.replay = "not reached" if other.told.replay == "no replay" else other.told.replay
        self._running[get_ident()].append((region, notes, found, phase))

    def end(self, region: Region, op: WatchedOp | None, phase: str) -> None:
        """Count for what is around again; note what an op saved and returned, and what a region holds after replay."""
        self._running[get_ident()].pop()
        notes = self.regions.get(region.serial)
        if notes is None:
            return
        if op is None and phase == "replay":
            report = report_of(region)
            notes.told.refilled_bytes = max(notes.told.refilled_bytes, report.bytes + report.offloaded_bytes)
        elif op is not None and (found := notes.ops.get(op.name)) is not None:
            if phase == "replay":
                found.told.replay = "skipped" if op.outputs is None else "ran"
            elif op.outputs is not None and not found.outputs:
                self._note_end(region, notes, found, op)

    def _note_end(self, region: Region, notes: RegionNotes, found: OpNotes, op: WatchedOp) -> None:
        """Note what an op saved and returned."""
        made = enumerate(op.outputs or ())
        found.outputs = [
            self._look_at(str(place) if op.as_tuple else "out", one)
            for place, one in made
            if isinstance(one, torch.Tensor)
        ]
        found.saved = [self._look_at(label, tensor) for label, tensor in op.named.items() if tensor is not None]
        notes.note_saves()
        after = {seen.number for seen in found.saved if not seen.parameter}
        notes.steps.append(Step("", found.told.name, after=after))

    def _look_at(self, label: str, tensor: torch.Tensor) -> Seen:
        storages = storages_of(tensor)
        number = self._number(storages[0]._cdata, storages[0].nbytes()) if storages else -1
        size = sum(storage.nbytes() for storage in storages)
        return Seen(label, size, number, viewed_parameter(tensor) is not None)

    def _number(self, key: Hashable, size: int) -> int:
        """Return the number of a storage, which may not have been seen yet."""
        if key not in self._numbers:
            self._numbers[key] = self._new_number()
        self._sizes.setdefault(self._numbers[key], size)
        return self._numbers[key]

    def numbers_in(self, value: Any) -> dict[int, int]:
        """Return the numbers and bytes of the storages in a value of `kept_by`, in place or elsewhere."""
        memory = [one for piece in pieces_in(value) if piece.besides is None for one in piece.memory]
        return {self._number(one.key, one.bytes): one.bytes for one in memory}

    def offload_began(self, tensor: torch.Tensor, key: int) -> None:
        """Note which storage has left: its copy has its number."""
        (storage,) = storages_of(tensor)
        self._numbers["away", key] = self._number(storage._cdata, storage.nbytes())

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op, and count it for every op and region that runs in this thread if it computes something."""
        kwargs = kwargs or {}
        running = self._running[get_ident()]
        given = list(tensors_in((args, kwargs))) if running else []
        schema = getattr(op, "_schema", None)  # a higher-order op has none
        if getattr(op, "is_view", False) or not running or any(map(is_placeholder, given)):
            return op(*args, **kwargs)
        steps = self._steps_of(str(op), given)
        arguments = [f"argument {place}" for place in range(len(args))]
        if schema is not None:
            arguments = [one.name for one in schema.arguments]
        names = dict(zip(arguments, args, strict=False)) | dict(kwargs)
        numbers = {
            name: self._look_at("", value).number for name, value in names.items() if isinstance(value, torch.Tensor)
        }
        out = op(*args, **kwargs)
        flops = flops_of(op, args, kwargs, out)
        for _, notes, found, phase in running:
            told: Any = found.told if found is not None else notes.told if notes is not None else None
            if found is None and notes is not None:
                setattr(told, f"{phase}_ops", getattr(told, f"{phase}_ops") + 1)
            if told is not None:
                setattr(told, f"{phase}_flops", getattr(told, f"{phase}_flops") + flops)
        keys = {storage._cdata for tensor in given for storage in storages_of(tensor)}
        results = list(tensors_in(out))
        new = {storage._cdata: storage.nbytes() for one in results for storage in storages_of(one)}
        for key in new.keys() - keys:
            self._numbers.pop(key, None)
        made = {self._number(key, size) for key, size in new.items() if key not in keys}
        for notes, step in steps:
            step.makes, step.flops, step.names, step.outs = made, flops, numbers, list(map(ref, results))
            notes.looks.update(self._looks_of(results))
        return out

    def _looks_of(self, tensors: Sequence[torch.Tensor]) -> list[tuple[Look, int]]:
        return [((one.shape, one.dtype), self._look_at("", one).number) for one in tensors]

    def _steps_of(self, op: str, given: Sequence[torch.Tensor]) -> list[tuple[RegionNotes, Step]]:
        """Begin a step of each region whose forward runs in this thread."""
        looks, (file, line) = self._looks_of(given), user_line()
        running = [one for one in self._running[get_ident()] if one[1] is not None and one[3] == "forward"]
        steps: dict[int, tuple[RegionNotes, Step]] = {}
        for region, notes, found, _ in running:
            assert notes is not None
            if region.serial not in steps:
                inner, reads = region is not running[-1][0], {number for _, number in looks}
                notes.note_saves()
                notes.looks.update(looks)
                notes.steps.append(Step(op, "", inner, f"{Path(file).name}:{line}", reads))
                steps[region.serial] = notes, notes.steps[-1]
            step = steps[region.serial][1]
            around = notes.ops.get(step.call)
            if found is not None and (around is None or around.policy is CheckpointPolicy.RECOMPUTE):
                step.call = found.told.name  # in the body of a skipped op all is part of that
        return list(steps.values())

    def finish(self, region: Region, boundary: object) -> None:
        """Explain what the region keeps, now that its forward is over."""
        notes = self.regions.get(region.serial)
        if notes is None:
            return
        told, report, decisions = notes.told, report_of(region), decisions_of(region)
        if region.last_number < 0:  # it does not outlive its forward
            told.ops = tuple(op.told for op in notes.ops.values())
            for op in notes.ops.values():
                op.told.tensors = tuple(never_needed(region, op))
            return
        notes.note_saves()
        # Without ops in the body of a skipped op, which are part of that.
        notes.ops = {name: notes.ops[name] for name in decisions if name in notes.ops}
        told.ops = tuple(op.told for op in notes.ops.values())
        rows = list(kept_by(region))
        told.unnamed = sum(row.what == "empty" and not row.op for row in rows)
        inputs = [one for one in report.tensors if one.kind == "input"]
        told.kept_bytes, told.offloaded_bytes = report.bytes, report.offloaded_bytes
        told.input_bytes = sum(one.bytes for one in inputs if not one.offloaded)
        told.offloaded_input_bytes = sum(one.bytes for one in inputs if one.offloaded)
        prices = self._prices_of(region, notes, rows)
        cost = prices.under(decisions)
        reasons = Reasons(region, rows, report, self.numbers_in, cost.ran)
        told.by_policy = tuple(reasons.by_policy())
        # Of a call that a policy for aten ops would look into, or that what is around recomputes, the log has no price.
        hooks, policy = region.hooks, region.options.chosen
        is_priced = current_mode() is None and policy is None and not (hooks and is_of_checkpoint(hooks[1]))
        for op in notes.ops.values():
            op.told.tensors = tuple(reasons.of(op))
            if self._alternatives and is_priced:
                op.told.alternatives = tuple(_others(op, prices, decisions, cost))
        notes.steps = []

    def _prices_of(self, region: Region, notes: RegionNotes, rows: Sequence[Kept]) -> Prices:
        kinds = ("result", "saved")
        kept = {number for row in rows if not row.op and row.what in kinds for number in self.numbers_in(row.value)}
        inputs_away = {
            number
            for row in rows
            if row.what == "input" and any(piece.offloaded for piece in pieces_in(row.value, row.made_on))
            for number in self.numbers_in(row.value)
        }
        handles = [name for name, call in region.tape.records.items() if call.is_handle]
        offloader = region.options.offloader or chosen.get()
        least = getattr(offloader or default_offloader(), "min_bytes", 0)
        by_policy = kept if region.options.policy is not None else None
        return Prices(notes.steps, self._sizes, inputs_away, by_policy, handles, least)


def _others(op: OpNotes, prices: Prices, decisions: Mapping[str, CheckpointPolicy], now: Cost) -> Iterator[Alternative]:
    """Yield what the other policies of an op would cost."""
    for policy in CheckpointPolicy:
        if policy is not op.policy:
            cost = prices.under({**decisions, op.told.name: policy})
            if cost.refused is not None:
                step, call = cost.refused
                out = next((seen.label for seen in op.outputs), "out")
                what = f"{step.op} at {step.line} reads {qualified_name(None, call, out)}"
                yield Alternative(policy.value, 0, 0, 0, what)
            else:
                change = cost.bytes - now.bytes, cost.offloaded_bytes - now.offloaded_bytes, cost.flops - now.flops
                yield Alternative(policy.value, *change)


_FORM = "remat.explain(function)(*args, **kwargs)"


@eager_only
@says_form(f"The form is {_FORM}.")
def explain(function: Callable[..., Any], *, alternatives: bool = True) -> Callable[..., Explanation]:
    """Run a function forward and backward once, and say why each named tensor in its regions is kept or not.

    Backward starts from all tensors that the function returns, also in containers and dataclasses, and that need a
    gradient, with ones; gradients are dropped, not accumulated. A function that calls backward itself, such as a
    training step, may return anything.

    For each op it also says what the other policies would cost: the log of this one run shows which storages each op
    reads, makes and saves, how large they are, and how many FLOPs it has. So these are computed, not measured. Not in
    them is random state. OFFLOAD is priced as if all tensors left that are as large as the offloader's ``min_bytes``.
    Ops have no prices in regions inside other regions, and in those with a policy for aten ops, which would decide
    about the ops inside a call that is recomputed.

    Args:
        function: What contains the regions, such as a model; called with the arguments of the second call.
        alternatives: Whether to say what other policies would cost.

    Returns:
        A callable that takes the function's arguments and returns the explanation: plain data, and text with ``print``.

    Raises:
        UsageError: It was called inside a region, ``function`` cannot be called, or its arguments are in the same call.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     @remat.auto_forward("x")
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x * x
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return 2 * grad * ctx.saved_tensors[0]
        >>> def block(x):
        ...     return remat.op(Square.apply, "square")(x.sin())
        >>> x = torch.randn(4, requires_grad=True)
        >>> explanation = remat.explain(remat.checkpoint(region_name="block")(block))(x)
        >>> [(tensor.label, tensor.state) for tensor in explanation.regions[0].ops[0].tensors]
        [('x', 'elided'), ('out', 'not kept')]
    """
    if not callable(function):
        raise UsageError(f"explain() cannot run a {type(function).__name__}", remedy=f"The form is {_FORM}.")

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        if current_mode() is not None:
            raise UsageError("explain() was called inside a region", remedy="Call it around the whole model.")
        notes = Notes(alternatives)
        with as_written(), torch.enable_grad(), observed_by(notes), notes:
            no_backward = _backward(function(*args, **kwargs))
        return Explanation(tuple(region.told for region in notes.regions.values()), no_backward)

    return explained


def _backward(output: Any) -> str | None:
    """Run backward from what needs a gradient, without accumulating any; return why none ran, if so."""
    found = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
    released = {node for node in nodes_below(found) if is_released(node)}
    roots = [root for root in found if not released or released.isdisjoint(nodes_below([root]))]
    variables = [variable for node in nodes_below(roots) if (variable := getattr(node, "variable", None)) is not None]
    if variables:
        torch.autograd.grad(roots, variables, [torch.ones_like(root) for root in roots], allow_unused=True)
        return None
    if found:
        return "the function itself ran the backward of what it returned"
    return (
        f"it found no tensor that needs a gradient in what the function returned ({type(output).__name__}). "
        "Return the loss, in a container or dataclass if need be, or run backward in the function."
    )
