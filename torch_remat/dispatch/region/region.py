"""A checkpointed region between its forward and its replay, with its tape: what forward noted, in order.

In: a function and the arguments of one call; holders, parameters and ops, as forward meets them. Kept: the arguments'
tensors, the ambient state, the holders weakly, the ops' slots strongly. Out: filled holders, by a replay when one is
needed.
"""

from __future__ import annotations

from _thread import RLock  # without the Python function around it that threading has
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from itertools import count
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol
from weakref import finalize, ref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat._compat import (
    count_of_modes,
    graph_exec_group,
    graph_is_kept,
    graph_task,
    sequence_number,
    top_saved_tensors_hooks,
    torch_function_is_on,
    trace_runs,
    with_torch_function,
)
from torch_remat.dispatch.ambient import Ambient, RngState, capture_ambient
from torch_remat.dispatch.call.entry import Call
from torch_remat.dispatch.holder import Holder, Layout, OpHolder, ResidentRef, is_parameter
from torch_remat.dispatch.naming import default_name, scope
from torch_remat.dispatch.options import Begun, Keeper, Options
from torch_remat.dispatch.reach import Reached, places_in, reach
from torch_remat.dispatch.region.inputs import RegionInputs
from torch_remat.dispatch.region.outside import Outside
from torch_remat.errors import MismatchError, ReleasedError, UsageError
from torch_remat.offload.sender import Sender

if TYPE_CHECKING:
    from torch_remat.dispatch.ops.entry import Entry
    from torch_remat.dispatch.slot import Slot
    from torch_remat.ladders.kinds import Kind

SAME_OPS = (
    "The function must do the same in both phases: look for state that changed in between (a counter, a cache, a "
    "module attribute, train/eval, a global), for random numbers from a source that torch does not know, and for "
    "branches on data."
)
# A holder, the tensor of another maker that was saved, and its version then.
Other = tuple[ref[Holder], ref[torch.Tensor], int]

# Weak references to all regions that are alive, for reports.
_regions: set[ref[Region]] = set()
next_serial = count().__next__


def live_regions() -> list[Region]:
    """Return the regions that are alive, oldest first."""
    alive = [region for entry in list(_regions) if (region := entry()) is not None]
    return sorted(alive, key=lambda region: region.serial)


def reached_by(function: Callable[..., Any], inputs: RegionInputs) -> Reached:
    """Return what a region's function reaches, with what is in objects among the arguments."""
    reached = reach(function, inputs.modules() if inputs.others else ())
    if inputs.others:
        reached.places += places_in(inputs.others)
    return reached


class Tape:
    """What one region saved, in the order of forward.

    Attributes:
        saved: For each saved tensor a weak reference to its holder; for a parameter, or a view of one, the parameter;
            a `ResidentRef` for one that is kept, though replay saves it again; None for a view of a parameter that an
            argument brings.
        functions: The calls of torch functions that a policy keeps, by function and number.
        layouts: For views of parameters among these, by place, their layout there.
        buffers: The places of tensors without a `grad_fn`, which the op that saves them may fill later.
        records: The calls by name, in order.
        others: Of what it saved and did not make, under hooks of others, and of what inner regions did, in order:
            weak references to holder and tensor, and the tensor's version.
        entered: What inner regions got from handles, by the number of the argument: for each after the first call.
        calls: The entries of the log.
        early: Those created outside the region that replay must not read before a number of entries; see `early_reads`.
    """

    __slots__ = (
        "buffers",
        "calls",
        "early",
        "entered",
        "functions",
        "layouts",
        "others",
        "records",
        "saved",
    )

    def __init__(self) -> None:
        self.saved: list[ref[Holder] | ResidentRef | torch.Tensor | None] = []
        self.layouts: dict[int, Layout] = {}
        self.buffers: set[int] = set()
        self.records: dict[str, Call] = {}
        self.functions: dict[tuple[Any, int], Call] = {}
        self.others: list[Other] = []
        self.entered: list[Mapping[int, Slot]] = []
        self.calls: Sequence[Entry] = ()
        self.early: Sequence[tuple[StorageWeakRef, int, Entry]] = ()

    def last_place(self, hooks: object, early_stop: bool) -> int:
        """Return, at the end of forward, the place to which a replay goes; -1 if none is needed; see `may_need`."""
        skipped, waits, last = set[int](), -1, len(self.saved) - 1
        for call in self.ranges():
            skipped.update(range(call.start, call.end))
            for one in call.waiting:
                if hooks or one.holder():
                    waits = max(waits, call.start)
        while last >= 0 and (last in skipped or not self.may_need(last, hooks)):
            last -= 1
        if not early_stop and max(last, waits) >= 0:
            return len(self.saved)
        return max(self.with_parameters(last), waits)

    def ranges(self) -> list[Call]:
        """Return the calls over whose tensors replay passes."""
        functions = [call for call in self.functions.values() if call.is_saved]
        return [*(call for call in self.records.values() if call.is_skipped), *functions] if self.records else functions

    def holders_to_fill(self) -> Iterator[Holder]:
        """Yield the live holders that a replay fills, in order."""
        for entry in self.saved:
            if type(entry) is ref and (holder := entry()) is not None and not holder.resident:
                yield holder

    def named_holders(self) -> Iterator[OpHolder]:
        """Yield the live holders of all that has a name."""
        for entry in list(self.saved):
            if isinstance(entry, ref) and type(holder := entry()) is OpHolder:
                yield holder

    def empty(self) -> list[Holder]:
        """Return the live holders that a replay has to fill."""
        return [holder for holder in self.holders_to_fill() if holder.value is None]

    def has_values(self) -> bool:
        """Whether a live holder that replay fills has its value."""
        return any(holder.value is not None for holder in self.holders_to_fill())

    def forget_values(self) -> None:
        """Empty all holders that a replay can fill again."""
        for holder in self.holders_to_fill():
            holder.value = None

    def has_drawn(self) -> bool:
        """Whether a call drew random numbers."""
        return any(call.drawn is not None for call in (*self.records.values(), *self.functions.values()))

    def forget_slots(self) -> None:
        """Drop what only a further replay would need."""
        self.calls = self.early = ()
        self.entered = []
        for call in (*self.records.values(), *self.functions.values()):
            call.forget()

    def may_need(self, place: int, hooks: object) -> bool:
        """Whether, at the end of forward, a replay may have to fill the holder at a place.

        A dead holder needs nothing. But under hooks around the region, which may be those of another region, what is
        kept must be the same in that region's replay, where other tensors live longer.
        """
        entry = self.saved[place]
        if type(entry) is not ref:
            # A leaf that is no parameter: another region may make it there, or a placeholder of it.
            return hooks is not None and isinstance(entry, torch.Tensor) and not is_parameter(entry)
        return hooks is not None or ((holder := entry()) is not None and holder.value is None and not holder.resident)

    def last_needed(self) -> int:
        """Return the place of the last live empty holder (-1 if none)."""
        saved = self.saved
        for place in range(len(saved) - 1, -1, -1):
            entry = saved[place]
            if type(entry) is ref and (holder := entry()) is not None and holder.value is None and not holder.resident:
                return place
        return -1

    def with_parameters(self, place: int) -> int:
        """Return a place, or that of the last of the parameters that follow it within its call, or before the next."""
        saved = self.saved
        edges: set[int] | None = None
        while 0 <= place < len(saved) - 1 and isinstance(saved[place + 1], torch.Tensor):
            if edges is None:
                edges = {edge for call in self.ranges() for edge in (call.start, call.end)}
            if place + 1 in edges:
                break
            place += 1
        return place


class Region:
    """One call of a checkpointed function.

    Args:
        function: What runs in both phases.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        options: What the user chose.
        replay: Fills a region's empty holders, up to a place on its tape.
    """

    samples: Mapping[int, bytes] = MappingProxyType({})  # of what forward saved, by place; see `check.samples`
    last_sample: tuple[int, bytes] | None = None
    versions: Sequence[int] = ()  # of its parameters at the end of forward
    flags: Sequence[bool | None] = ()  # which of them require a gradient then
    finished = False  # whether forward is over
    traced = False  # whether the region itself is part of a trace, whose tensors are its own then
    filling = False  # whether a replay runs
    end_number = -1  # where autograd stood when forward ended
    last_number = -1  # of the autograd nodes that lead to its outputs, if something asked for them
    replay_context: AbstractContextManager[Any] | None = None
    _sender: Sender | None = None
    outside: Outside | None = None  # what outlives it and may change
    keeper: Keeper | None = None  # inside of a budget
    running: Callable[[], str | None] | None = None  # returns the name of the call that runs now in forward, if any
    replayed_in = -1  # the latest backward that came here
    kind: Kind | None = None  # if what it keeps goes by price
    surveyed = False  # whether its forward was recorded for that, under a dispatch mode
    misuse: Callable[[], UsageError] | None = None  # a gradient inside forward that was refused

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: Options,
        replay: Callable[[Region, int], None],
    ) -> None:
        self.function: Callable[..., Any] | None = function
        self.options = options
        self.chosen = options.functions  # with what a ladder says, from the start of forward
        self._replay = replay
        hooks = top_saved_tensors_hooks()
        inputs = RegionInputs(args, kwargs, hooks)
        self.inputs: RegionInputs | None = inputs
        reached = reached_by(function, inputs)
        self.parameters: Sequence[torch.Tensor | None] = reached.parameters
        if reached.places or reached.numbers:
            self.outside = Outside(reached, options.policy is not None)
        self.rng = None
        if options.preserve_rng_state:
            if inputs.others:
                reached.generators += [other for other in inputs.others if isinstance(other, torch.Generator)]
            self.rng = RngState(reached.generators)
        self.hooks = hooks
        self.ambient: Ambient | None = capture_ambient()
        self.modes = count_of_modes()
        if inputs.traced or (self.modes and trace_runs()):
            self.traced = True
        self.tape = Tape()
        self.first_number = sequence_number()  # of the autograd nodes that it makes
        self.scope = scope.get()
        if options.offload_inputs and hooks is None:
            inputs.give_away(self.sender().send)
        self.lock = RLock()
        self.serial = next_serial()
        _regions.add(ref(self, _regions.discard))

    @property
    def name(self) -> str:
        """The name that messages and reports use."""
        if self.options.region_name is not None:
            return self.options.region_name
        return default_name(self._past_name if self.function is None else self.function)

    def sender(self) -> Sender:
        """Return what sends its tensors away, made when the first of them is to leave."""
        if self._sender is None:
            given = () if self.inputs is None else self.inputs.parameters()
            self._sender = Sender(self.name, self.options.offloader, (*self.parameters, *given))
        return self._sender

    def place_of(self, holder: Holder) -> int:
        """Return the place of a live holder on the tape."""
        saved = self.tape.saved
        return next(place for place, entry in enumerate(saved) if type(entry) is ref and entry() is holder)

    def mismatch(
        self, what: str, remedy: str = SAME_OPS, tensor: str | None = None, op: str | None = None
    ) -> MismatchError:
        """Return the error about a replay that does something else, with both phases' ops if they were recorded."""
        if (op_log := self.options.op_log) is None:
            remedy += " checkpoint(debug=True) shows the ops of both phases side by side."
        else:
            remedy += "\n" + op_log.side_by_side(self)
        return MismatchError(what, region=self.name, op=op, tensor=tensor, remedy=remedy)

    def differs_at(self, holder: Holder, what: str, remedy: str = SAME_OPS) -> MismatchError:
        """Return the error about what replay saves, or does not save, at the position of a holder of forward."""
        return self.mismatch(what, remedy, holder.name, holder.op)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory stays with the inputs; asked only while forward runs."""
        return self.inputs is not None and self.inputs.holds(tensor if tensor._base is None else tensor._base)

    def reach(self) -> None:
        """Replay if a holder needs it: backward comes to the region, and has run nothing of it."""
        if self.inputs is not None:
            with self.lock:
                # What this backward has filled and read already, it does not need again. What an earlier one has left
                # may be all that this one reads: `read` asks for the rest.
                earlier = self.replayed_in
                if self.finished and earlier != graph_task() and (earlier < 0 or not self.tape.has_values()):
                    self._fill()

    def note_gradient(self, op: str | None, _grad_outputs: object = None) -> None:
        """Note a gradient that is taken before forward ends, and refuse one through a call, which replay skips.

        Args:
            op: The call that it passes through, if it is one.

        Raises:
            UsageError: It passes through one that does not run now.
        """
        if self.finished:
            return
        if trace_runs(of_values=True) and not self.traced:
            self.refuse(
                "make_fx traces a gradient of this region's tensors, and would take those that backward reads for "
                "constants",
                op or None,
                'Pass make_fx tracing_mode="fake" or "symbolic", or trace outside the region.',
            )
        if op and (self.running is None or self.running() != op):
            self.refuse("a gradient is taken through this call before the region's forward ends", op)
        if self.inputs is not None and self.inputs.is_left_by_gradient(self._variables):
            self.refuse(
                "a gradient is taken before the region's forward ends, leaves the region by one argument or variable "
                "and comes back by another",
                None,
                "Pass the region the tensor that both were computed from, or take the gradient outside the region.",
            )

    def note_gradient_of(self, holder: OpHolder) -> None:
        """Note one that reads what a call has saved; what is on the tape was saved by an op that replay runs."""
        is_recomputed = any(type(entry) is ResidentRef and entry() is holder for entry in self.tape.saved)
        self.note_gradient("" if is_recomputed else holder.op)

    def _variables(self) -> Iterable[torch.Tensor | None]:
        return () if self.outside is None else self.outside.tensors()

    def refuse(
        self,
        what: str,
        op: str | None,
        remedy: str = "Take the gradient outside the region, or give what it passes through the policy RECOMPUTE.",
    ) -> NoReturn:
        """Raise an error about a gradient that is taken before forward ends, here and at the end of forward."""
        self.misuse = partial(UsageError, what, region=self.name, op=op, remedy=remedy)
        raise self.misuse()

    def refill(self, holder: Holder) -> torch.Tensor:
        """Return the value of an empty holder, by a replay.

        Raises:
            ReleasedError: An earlier backward freed the region's inputs.
            MismatchError: Replay did not fill it.
        """
        with self.lock:
            replays = 0
            while (value := holder.value) is None:  # another thread's backward may have read what a replay filled
                if replays == 2 or (replays and self.inputs is None):
                    raise self.differs_at(holder, "backward needs this tensor, but replay ended without it")
                replays += 1
                if self.inputs is None:
                    raise ReleasedError(
                        "backward needs this tensor again, but an earlier backward freed the inputs of replay",
                        region=self.name,
                        op=holder.op,
                        tensor=holder.name,
                        remedy="Pass retain_graph=True to each backward but the last.",
                    )
                self._fill()
        return value

    def _fill(self) -> None:
        # Another thread may have replayed, and released, while this one waited for the lock.
        if self.inputs is None:
            return
        if self.keeper is not None:
            self.keeper.reach()
        last = self.tape.last_needed()
        if last >= 0:
            self.filling = True
            replay: Callable[[], None] = partial(self._replay, self, last)
            if self.keeper is not None:
                replay = partial(self.keeper.replay, replay)
            try:
                if torch_function_is_on():
                    replay()
                else:
                    with with_torch_function():
                        replay()
            finally:
                self.filling = False
        self.replayed_in = graph_task()
        if not graph_is_kept():
            self.release()
        elif (group := graph_exec_group()) is not None:
            finalize(group, self.tape.forget_values).atexit = False

    def release(self) -> None:
        """Drop what only a further replay would need."""
        function = self.function  # of which no more than a name stays: it may own tensors
        self._past_name = function.__qualname__ if type(function) is FunctionType else default_name(function)
        self.parameters, self.samples, self.last_sample = (), Region.samples, None
        if self.tape.records or self.tape.calls or self.tape.functions:
            self.tape.forget_slots()
        self.inputs = self.function = self.hooks = self.rng = self.replay_context = self.ambient = None
        self.outside = None


class OpenRegion(Region):
    """A region of which a phase runs, for type checkers: what the phase starts from is there."""

    function: Callable[..., Any]
    inputs: RegionInputs
    ambient: Ambient


class Keeping(Protocol):
    """What regions ask in the block of a budget.

    Attributes:
        registers: The budgets, innermost first.
    """

    registers: Sequence[Any]

    def begin(
        self, options: Options, function: Callable[..., Any], leaves: Sequence[Any], kind: Kind, shapes: Hashable
    ) -> Begun:
        """Say what a region keeps that is about to begin."""

    def keeper(self, region: Region, begun: Begun | None) -> Keeper | None:
        """Return the keeper of a region whose forward begins; ``begun`` is what was said of it."""


# What the regions of this thread ask; None outside of budgets.
keeping: ContextVar[Keeping | None] = ContextVar("torch_remat_keeping", default=None)
