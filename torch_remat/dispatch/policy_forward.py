"""A region with a policy for its ops, in forward: all ops run, and each is noted with what it reads and writes.

In: each aten op, and the tensors that autograd saves. Kept: results that the policy saves, until the end of forward
tells which of them replay or backward needs (`needs`). Out: residents, and on the tape the calls for replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from torch_remat._compat import CompiledCode, kernel_of
from torch_remat.dispatch.calls import (
    Meta,
    Raised,
    changed_arguments,
    described,
    is_kept_out,
    key_of,
    layout_of,
    plain_layout,
    tensors_in,
    written_arguments,
)
from torch_remat.dispatch.earlier import Earlier
from torch_remat.dispatch.holder import OpHolder
from torch_remat.dispatch.module_path import ModulePath
from torch_remat.dispatch.needs import find_needs, keep_random
from torch_remat.dispatch.op_policy import OpContext
from torch_remat.dispatch.policy import CheckpointPolicy
from torch_remat.dispatch.policy_call import FIRST, ONE, WRITTEN, PolicyCall, SkippedOp, names_of
from torch_remat.dispatch.record import Record
from torch_remat.dispatch.saved_results import SavedResults
from torch_remat.dispatch.schema import UNKNOWN, Effects, effects_of
from torch_remat.dispatch.storages import Storages, parts_of
from torch_remat.errors import PolicyError

if TYPE_CHECKING:
    from torch_remat.dispatch.forward_op import Body
    from torch_remat.dispatch.forward_ops import ForwardOps
    from torch_remat.dispatch.op_policy import OpPolicy

_Noter = Callable[[PolicyCall, Sequence[Any], Any], bool]
# Of an op: its effects; what notes a call of it in the short way, if it has one; whether the policy keeps its results,
# if it decides by the op alone; and what runs it.
_Plan = tuple[Effects, _Noter | None, bool | None, Callable[..., Any]]
Observer = Callable[[PolicyCall, Sequence[Any], Mapping[str, Any], Any], None]


class PolicyForward:
    """The ops of one region with a policy, while its forward runs.

    Args:
        ops: The ops of the region.
        policy: The policy.
        path: Tells the module that runs.
        allow_mutation: Whether a kept tensor may be changed in place.
        observer: Is told each op.

    Attributes:
        native: The native region that runs, all of whose results are saved; empty outside of such.
        skipped_op: The body of an op with a handle and policy SAVE; replay does not run it.
        results: What saved calls returned, held until the end of forward.
        earlier: What tensors from outside were before the region changed them.
    """

    def __init__(
        self, ops: ForwardOps, policy: OpPolicy, path: ModulePath, allow_mutation: bool, observer: Observer | None
    ) -> None:
        self.native = ""
        self._native_policy = CheckpointPolicy.SAVE
        self.skipped_op: Body | None = None
        self._calls: list[PolicyCall] = []
        self._ops = ops
        self._saved = ops.region.tape.saved
        self._rng = ops.region.rng
        self._decider = policy.begin()
        self._paths = path.stack
        self._allow_mutation = allow_mutation
        self._observer = observer
        self._has_random = False
        self._plans: dict[int, _Plan] = {}  # by the identity of each op
        self._departures = ops.departures
        self._counts: dict[tuple[str, str], int] = {}
        self._storages = Storages(ops.region.hooks is not None)
        self.results = SavedResults(ops, self._storages, allow_mutation)
        self.earlier = Earlier(self._storages, self._calls)
        self._roots: list[tuple[int, int, int]] = []
        self.compiled_code = CompiledCode()

    def watch(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an op, ask the policy, and note what it did."""
        effects, noter, keeps, kernel = self._plans.get(id(op)) or self._plan(op)
        if noter is None or self.native or self.skipped_op or self.results.unread or self._departures.waiting:
            return self._watch_odd(op, args, kwargs, effects)
        # It computes new tensors or returns views, and does nothing else.
        path = self._paths[-1]
        key = path, effects.name
        self._counts[key] = count = self._counts.get(key, -1) + 1
        call = PolicyCall(op, count, None, path, effects)
        try:
            result = kernel(*args, **kwargs)
        except Exception as error:
            self._note_raised(call, error)
            raise
        if not noter(call, args, result):
            self._note_odd(call, args, kwargs, result)
        if self._ops.opened is not None:
            call.always = self._ops.in_recomputed_op()
        if keeps is None:
            self._decide(call, args, kwargs, result)
        elif keeps:
            call.saved = FIRST if call.kind == ONE else call.all_places()
        if call.saved:
            if call.kind:
                call.layout = plain_layout(args)
                self.results.note_new(call, result)
            else:
                call.layout = layout_of(args, kwargs)
                self.results.note(call, result)
        self._calls.append(call)
        if self._observer is not None:
            self._observer(call, args, kwargs, result)
        return result

    def _plan(self, op: Any) -> _Plan:
        effects = effects_of(op)
        plan: _Plan = effects, None, None, op
        if effects.plain:
            plan = effects, self._storages.note_plain, self._decider.decide_op(op), kernel_of(op)
        elif effects.view:  # whose results are never kept, whatever the policy says
            keeps = None if self._decider.decide_op(op) is None else False
            plan = effects, self._storages.note_view, keeps, kernel_of(op)
        self._plans[id(op)] = plan
        return plan

    def _watch_odd(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], effects: Effects) -> Any:
        """Do the same for any op, wherever it runs."""
        if effects.ignored or (effects.cast and is_kept_out(effects, args)):
            return op(*args, **kwargs)
        if self.skipped_op is not None:
            if self.skipped_op.is_running():
                return op(*args, **kwargs)
            self.skipped_op = None
        if self.results.unread:
            self.results.read_versions()
        if effects.written:
            self.earlier.note_writes(written_arguments(effects, args, kwargs))
        before = self._rng.present() if effects.random and self._rng is not None else None
        path = self._paths[-1]
        key = path, effects.name
        self._counts[key] = count = self._counts.get(key, -1) + 1
        call = PolicyCall(op, count, None, path, effects)
        try:
            result = op(*args, **kwargs)
        except Exception as error:
            self._note_raised(call, error)
            raise
        if self._departures.waiting:
            self._departures.send()
        if before is not None:
            call.before = before
            self._has_random = True
        if self.native:
            call.native = self.native
        noter = self._plans[id(op)][1]
        if noter is None or not noter(call, args, result):
            self._note_odd(call, args, kwargs, result)
        call.always = self._ops.in_recomputed_op()
        self._decide(call, args, kwargs, result)
        if call.saved:
            if not effects.written:  # ops resize what they write
                call.layout = layout_of(args, kwargs)
            self.results.note(call, result, changed_arguments(call, effects, args, kwargs) if call.writes else None)
        elif effects.reshapes and (writer := self._storages.writers.get(key_of(args[0]))) is not None:
            self.results.unread.append(writer[0])
        self._calls.append(call)
        if self._observer is not None:
            self._observer(call, args, kwargs, result)
        return result

    def _note_raised(self, call: PolicyCall, error: Exception) -> None:
        call.results = Raised(type(error), error.args)
        self._calls.append(call)

    def _note_odd(self, call: PolicyCall, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        given = () if call.effects.namespace == "aten" else list(tensors_in(args, kwargs))
        call.results = described(result, args[0] if args else None, given)
        self._storages.note(call, args, kwargs, result)

    def run_native(
        self,
        name: str,
        policy: CheckpointPolicy,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a native region; all results in one with policy SAVE are saved."""
        if policy is CheckpointPolicy.RECOMPUTE:
            return function(*args, **kwargs)
        self.native, self._native_policy = name, policy
        try:
            return function(*args, **kwargs)
        finally:
            self.native, self._native_policy = "", CheckpointPolicy.SAVE

    def note_op(self, record: Record, outputs: Sequence[torch.Tensor]) -> None:
        """Note an op with a handle and policy SAVE, once its body is over."""
        self.skipped_op = None
        call = SkippedOp(record, described(list(outputs), None), UNKNOWN)
        if record.policy is CheckpointPolicy.OFFLOAD:
            call.away = call.saved
        self._storages.note_made(call, outputs)
        self._calls.append(call)
        self.results.note(call, outputs)

    def _decide(self, call: PolicyCall, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        said = self._decider.decide(OpContext(result, call.labels), call.op, args, kwargs)
        if call.effects.viewed is not None or call.effects.reshapes:
            return
        # An op that changes what lies outside is not repeated, so that what else it makes cannot be made again.
        if call.native or (call.outside and call.made):
            call.saved = call.all_places()
            if self._native_policy is CheckpointPolicy.OFFLOAD:
                call.away = call.saved
        elif len(said) == 1:
            if said[0].keeps:
                call.saved = FIRST if type(call.results) is Meta and not call.writes else call.all_places()
                if said[0].offloads:
                    call.away = call.saved
        else:
            places = [place for place, decision in enumerate(said) if decision.keeps]
            if places:
                call.saved = frozenset((WRITTEN, *places))
                call.away = frozenset(place for place in places if said[place].offloads)

    def pack(self, tensor: torch.Tensor) -> OpHolder | None:
        """Return the holder for a tensor that the policy keeps; None for one that replay makes again, or has."""
        if self.results.unread:
            self.results.read_versions()
        if type(tensor) is Parameter and not self._storages.has_writes:
            return None
        key = key_of(tensor)
        writer = self._storages.writers.get(key)
        if writer is None:
            if type(tensor) is not torch.Tensor:
                self._roots += [(len(self._saved), key_of(part), len(self._calls)) for part in parts_of(tensor)]
            return None
        call, place = writer
        if place not in call.packed:
            call.packed = FIRST if place == 0 and not call.packed else call.packed | {place}
        if place not in call.saved:
            self._roots.append((len(self._saved), key, len(self._calls)))
            return None
        away = place in call.away
        policy = CheckpointPolicy.OFFLOAD if away else CheckpointPolicy.SAVE
        holder = self._ops.resident(call.native, call.label(place), tensor, policy, self._allow_mutation)
        if call.kind == ONE and not (away or self._allow_mutation) and holder.value is not None:
            self.results.note_alias(call, tensor, holder.value)
        return holder

    def runs_writer(self, tensor: torch.Tensor) -> bool:
        """Whether what wrote a tensor's storage last, as far as that was seen, runs in replay in any case."""
        writer = self._storages.writers.get(key_of(tensor))
        return writer is None or writer[0].always

    def give_name(self, tensor: torch.Tensor, name: str) -> None:
        """Give a tensor a name by hand, and keep it if the policy says so."""
        decision = self._decider.decide_name(name)
        writer = self._storages.writers.get(key_of(tensor))
        if writer is None:
            return
        call, place = writer
        call.names = {**call.names, place: name}
        if not decision.keeps or (place == WRITTEN and place not in call.saved and len(call.writes) > 1):
            return  # of several that an op has written, all would have to be at hand
        call.saved |= {place}
        if decision.offloads:
            call.away |= {place}
        self.results.note_named(call, place, tensor)

    def finish(self) -> None:
        """At the end of forward: keep what replay or backward needs; raise `PolicyError` for unmatched entries."""
        error = self._decider.unmatched(names_of(self._calls))
        if error is not None:
            raise PolicyError(error.what, region=self._ops.region.name, tensor=error.tensor, remedy=error.remedy)
        if self.results.unread:
            self.results.read_versions()
        if self._departures.waiting:
            self._departures.send()
        self.results.let_go_of_graph()
        tape, hooks, calls = self._ops.region.tape, self._ops.region.hooks, self._calls
        roots = [
            # An op may fill what it has saved just before (``F.rrelu`` its noise).
            (storage, after + 1 if after < len(calls) and storage in calls[after].writes else after)
            for place, storage, after in self._roots
            if tape.may_need(place, hooks)
        ]
        if self.compiled_code.ran:
            tape.ran_compiled = True
            # It may read whatever there is, so that replay runs all ops and has the results of the others.
            for at, call in enumerate(calls):
                if type(call) is SkippedOp:
                    roots += [(storage, at + 1) for _, storage in call.made]
                else:
                    call.always = True
        for call, places in find_needs(calls, roots):
            self.results.keep(call, places)
        for call in self._calls:
            if type(call) is SkippedOp:
                self.results.keep_views(call)
        self.earlier.keep(self._ops.departures)
        if self._storages.has_writes and (inputs := self._ops.region.inputs) is not None:
            # Replay writes none of them again.
            inputs.accept_changes(lambda tensor, _: self._storages.has_changed(tensor))
        if self._has_random:
            keep_random(self._ops.region, self._calls)
        tape.calls = self._calls
