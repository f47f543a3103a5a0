"""The ops of a region in replay: placeholders, slots, and the tensors that SAVE ops wait for.

In: the tape's records. Kept: nothing past the replay. Out: the same ops in the same order, or an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from torch_remat.dispatch.aftermath import Aftermath
from torch_remat.dispatch.again import Again
from torch_remat.dispatch.check.mismatch import SAME_ORDER, mismatched, other_source
from torch_remat.dispatch.elided import Elided
from torch_remat.dispatch.holder import parameter_behind
from torch_remat.dispatch.mode import StopReplay
from torch_remat.dispatch.native_replay import NativeReplay
from torch_remat.dispatch.op import RematHandle
from torch_remat.dispatch.placeholder import Placeholder, last_refusal, real, unpack
from torch_remat.dispatch.policy_replay import PolicyReplay
from torch_remat.dispatch.record import NativeRecord, Record, WholeCallRecord
from torch_remat.dispatch.region.inputs import leaves_of, with_leaves
from torch_remat.dispatch.replay_op import ReplayOp
from torch_remat.dispatch.suppressed import Suppressed
from torch_remat.dispatch.whole_call import WholeCallReplay
from torch_remat.errors import MismatchError
from torch_remat.policies.decision import CheckpointPolicy

if TYPE_CHECKING:
    from torch_remat.dispatch.region.replay import Filling


class ReplayOps:
    """The ops of one replay.

    Args:
        mode: The replay's mode.
    """

    def __init__(self, mode: Filling) -> None:
        self.region = mode.region
        self.region_name = mode.region.name
        self._mode = mode
        self._records = list(mode.region.tape.records.values())
        self._next = 0
        self._loaded: dict[int, torch.Tensor] = {}  # by id, kept so that no other tensor gets the id
        self._regions = 0
        self.made: dict[str, list[tuple[Elided, Any]]] = {}  # by the SAVE ops that have saved it
        self.suppressed = Suppressed()
        self.policy: PolicyReplay | None = None
        self._in_skipped = False  # whether the body of a native region runs
        self._again: Again | None = None  # if such a body runs once more, in full
        self.native: NativeReplay | None = None  # the one that runs
        self._natives: list[NativeReplay | WholeCallReplay] = []

    def begin(self, name: str, policy: CheckpointPolicy, ctx: Any) -> RematHandle | None:
        """Begin an op; see `RematMode.begin_op`."""
        if self._again is not None:
            return self._again.begin_op(name, ctx)
        if self._in_skipped:
            policy = CheckpointPolicy.SAVE  # it follows the native region around it
        place = self._next
        records = self._records
        if place < len(records) and (record := records[place]).name == name and record.policy is policy:
            self._next = place + 1
            return ReplayOp(self, record, ctx)
        if self._mode.stopped:
            return None
        return ReplayOp(self, self._next_record(name, policy), ctx)

    def run_native(
        self,
        name: str,
        policy: CheckpointPolicy,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a native region; see `RematMode.run_native`."""
        if self._in_skipped:
            return function(*args, **kwargs)
        record = self._next_record(name, policy)
        if self.policy is not None:
            self._in_skipped = policy is not CheckpointPolicy.RECOMPUTE
            try:
                return function(*args, **kwargs)
            finally:
                self._in_skipped = False
        if isinstance(record, WholeCallRecord):
            call = WholeCallReplay(self._mode, self, record, function, args, kwargs)
            self._natives.append(call)
            return call.result()
        if not isinstance(record, NativeRecord):
            if record.slots:
                leaves = self.load_inputs(record, leaves_of(args, kwargs), name)
                args, kwargs = with_leaves(args, kwargs, leaves)
            return function(*args, **kwargs)
        native = NativeReplay(self._mode, record, self.suppressed, function, args, kwargs)
        self._natives.append(native)
        self._in_skipped = True
        self.native = native
        place = self._next
        try:
            while True:
                try:
                    result = self._mode.watched(native.answer, function, args, kwargs)
                except BaseException as error:
                    if not isinstance(error, Exception) or not native.starts_over(error):
                        if not isinstance(error, StopReplay):
                            native.left_by_exception()
                        raise
                else:
                    refusal = last_refusal.get()
                    if refusal is None or not native.starts_over(refusal.error()):
                        break
                self._next = place
                args, kwargs = native.arguments()
        finally:
            self._in_skipped = False
            self.native = None
        return native.returns(result)

    def aftermath(self) -> Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]:
        """Return what watches the ops of user code that runs on when the replay is over."""
        watched = self.native or self.policy
        return Aftermath(self.suppressed, watched.outside if watched is not None else set).watch

    def skips(self) -> bool:
        """Whether a native region runs that replay skips."""
        return self._in_skipped

    def passes_over(self) -> bool:
        """Whether what runs now has come in this replay before."""
        return self._again is not None

    def run_skipped(self, again: Again) -> None:
        """Run the body of a skipped op after all; the ops in it are part of it."""
        before = self._in_skipped, self._again
        self._in_skipped, self._again = True, again
        try:
            # It saves nothing, but user code may enable gradients.
            with self._mode.current(), saved_tensors_hooks(torch.detach, unpack):
                again.run(self._mode)
        finally:
            self._in_skipped, self._again = before

    def forget(self) -> None:
        """At the end of the replay: let go of what placeholders that outlive it may know."""
        self.suppressed.restore()
        self.made.clear()
        if self.policy is not None:
            self.policy.forget()
        for native in self._natives:
            native.forget()

    def note_loaded(self, tensor: torch.Tensor) -> None:
        """Note a tensor that was kept, so that it has no history in replay."""
        self._loaded[id(tensor)] = tensor

    def _next_record(self, name: str, policy: CheckpointPolicy) -> Record:
        place = self._next
        expected = self._records[place] if place < len(self._records) else None
        if expected is None and not self.region.finished:
            self._mode.stop()  # a backward inside forward, which has not come so far itself
        if expected is None or expected.name != name:
            self._mode.fail(self._another_op(name, expected))
        if expected.policy is not policy:
            self._mode.fail(
                mismatched(
                    self.region,
                    f"this op has policy {policy.name} in replay and had {expected.policy.name} in forward",
                    SAME_ORDER,
                    op=name,
                )
            )
        self._next = place + 1
        return expected

    def finish(self) -> None:
        """Raise if the function ended before it came to each op."""
        if self.policy is not None:
            self.policy.finish()
        self.check_passed(len(self.region.tape.saved))

    def check_passed(self, last: int) -> None:
        """Raise if an op has not come that had begun in forward before the tensor at a place was saved."""
        if self._next < len(self._records) and (missing := self._records[self._next]).saved_before <= last:
            raise mismatched(self.region, "this op of forward is missing in replay", SAME_ORDER, op=missing.name)

    def load_inputs(self, record: Record, args: Iterable[Any], consumer: str) -> list[Any]:
        """Return inputs with the placeholders among them replaced by what the slots keep.

        Raises:
            PlaceholderError: An input is a placeholder that forward did not foresee.
            MutationError: A kept input was changed in place.
        """
        loaded = list(args)
        slots = record.slots
        for place, arg in enumerate(loaded):
            slot = slots.get(place) if slots else None
            if slot is not None:
                tensor = slot.load(self.region, record.name or consumer, f"input {place}")
                loaded[place] = self._loaded[id(tensor)] = tensor
            elif isinstance(arg, Placeholder):
                tensor = real(arg, consumer).detach().requires_grad_(arg.requires_grad)
                loaded[place] = self._loaded[id(tensor)] = tensor
        return loaded

    def compares(self) -> bool:
        """Whether the aten ops that run are compared with those of forward."""
        return self.native is not None or self.policy is not None

    def begun(self) -> int:
        """Return how many ops have begun."""
        return self._next

    def may_fill(self) -> bool:
        """Whether the op that saves a tensor may be about to fill it; under a policy its place tells."""
        return self.policy is None or self.policy.may_fill()

    def next_name(self) -> str | None:
        """Return the name of the next op of forward, if there is one."""
        return self._records[self._next].name if self._next < len(self._records) else None

    def has_loaded(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor came from a slot, so that it has no history in replay."""
        return id(tensor) in self._loaded

    def enter_region(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return an inner region's arguments with the placeholders among them replaced."""
        if self._next == 0 or self.policy is not None or self._again is not None:
            return args, kwargs  # before the first op there is nothing that replay would not have
        place = self._regions
        self._regions = place + 1
        regions = self.region.tape.regions
        if place >= len(regions):
            self._mode.fail(mismatched(self.region, "replay runs more inner regions than forward", SAME_ORDER))
        if not regions[place].slots:
            return args, kwargs
        leaves = self.load_inputs(regions[place], leaves_of(args, kwargs), "inner region")
        return with_leaves(args, kwargs, leaves)

    def note_made(self, record: Record, outputs: Sequence[torch.Tensor]) -> None:
        """Note the outputs of an op that SAVE ops wait for; see NOTE [ When an elided tensor is complete ]."""
        for elided in record.elided_outputs:
            holder = elided.holder()
            if holder is not None and holder.value is None:
                source = outputs[elided.place] if elided.place < len(outputs) else None
                self.made.setdefault(holder.op, []).append((elided, source))

    def fill_elided(self, record: Record, args: Sequence[Any]) -> None:
        """Give the holders of a skipped op their values that wait for its inputs, or for what was made before."""
        if self.made:
            for elided, source in self.made.pop(record.name, ()):
                self._fill(elided, source, False)
        for elided in record.elided_inputs:
            self._fill(elided, args[elided.place] if elided.place < len(args) else None, True)

    def _fill(self, elided: Elided, source: Any, is_input: bool) -> None:
        holder = elided.holder()
        if holder is None or holder.value is not None:
            return
        loaded = type(source) is Placeholder
        if loaded:
            source = real(source, f"op {holder.op!r}")
        value = elided.value(source) if isinstance(source, torch.Tensor) else None
        if value is None or (value.shape, value.dtype, value.device) != holder.metadata[1:]:
            self._mode.fail(other_source(self.region, holder, source, is_input))
        if is_input and not loaded:
            owner = source if source._base is None else source._base
            if type(owner.grad_fn) is not holder.producer or holder.origin is not None or type(owner) is not Tensor:
                self._mode.explain(holder, value, owner, parameter_behind(owner))
        self._mode.fill_elided(holder, value)

    def fail_returned(self, record: Record) -> NoReturn:
        """End the replay, since an op returned whose body has raised in forward."""
        what = "this op raised an exception in forward and returned in replay"
        self._mode.fail(mismatched(self.region, what, SAME_ORDER, op=record.name))

    def _another_op(self, name: str, expected: Record | None) -> MismatchError:
        if expected is None or name not in self.region.tape.records:
            return mismatched(self.region, "replay runs this op, forward did not", SAME_ORDER, op=name)
        return mismatched(
            self.region,
            f"replay runs this op where forward ran {expected.name!r}",
            SAME_ORDER,
            op=name,
        )
