"""A checkpointed region between its forward and its replay, with its tape: what forward noted, in order.

In: a function and the arguments of one call; holders, parameters and ops, as forward meets them. Kept: the arguments'
tensors, the ambient state, the holders weakly, the ops' slots strongly. Out: filled holders, by a replay when one is
needed.
"""

from __future__ import annotations

from _thread import RLock  # without the Python function around it that threading has
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol
from weakref import finalize, ref

import torch

from torch_remat._compat import (
    count_of_modes,
    graph_exec_group,
    graph_is_kept,
    graph_task,
    sequence_number,
    top_saved_tensors_hooks,
    torch_function_is_on,
    with_torch_function,
)
from torch_remat.dispatch.ambient import RngState, capture_ambient
from torch_remat.dispatch.check.values import Values
from torch_remat.dispatch.holder import Holder, InnerOp, Layout, OpHolder, ResidentRef, read
from torch_remat.dispatch.log.entry import Call
from torch_remat.dispatch.log.slot import own_hooks
from torch_remat.dispatch.log.storages import Storages
from torch_remat.dispatch.mode import Replaying, unseen
from torch_remat.dispatch.naming import default_name, scope
from torch_remat.dispatch.options import Keeper, Options
from torch_remat.dispatch.placeholder import unpack
from torch_remat.dispatch.reach import reach
from torch_remat.dispatch.region.inputs import RegionInputs
from torch_remat.dispatch.region.outside import Outside
from torch_remat.errors import ReleasedError, UsageError
from torch_remat.offload.sender import Sender

if TYPE_CHECKING:
    from torch_remat.dispatch.log.entry import Entry

# Weak references to all regions that are alive, for reports.
_regions: set[ref[Region]] = set()
next_serial = count().__next__


def live_regions() -> list[Region]:
    """Return the regions that are alive, oldest first."""
    alive = [region for entry in list(_regions) if (region := entry()) is not None]
    return sorted(alive, key=lambda region: region.serial)


class Tape:
    """What one region saved, in the order of forward.

    Attributes:
        saved: For each saved tensor a weak reference to its holder; for a parameter, or a view of one, the parameter;
            a `ResidentRef` for one that is kept, though replay saves it again; None for a view of a parameter that an
            argument brings.
        numbers: For saved tensors, by place, where autograd stood, if something is kept: the sequence number; the
            number of the first node to which a replay that ends here does not come; whether its op may yet fill it.
        layouts: For views of parameters among these, by place, their layout there.
        buffers: The places of tensors without a `grad_fn`, which the op that saves them may fill later.
        elided: Weak references to the holders of saved calls that are filled from the calls' arguments or variables,
            each with the number of the first node after the op that saved it.
        holders: Weak references to the holders of all that has a name, for reports.
        records: The calls by name, in order.
        inner: The ops of inner regions, in the order in which they began.
        calls: The entries of the log.
        roots: The storages that replay must have, each after how many entries.
    """

    __slots__ = (
        "buffers",
        "calls",
        "elided",
        "holders",
        "inner",
        "layouts",
        "numbers",
        "records",
        "roots",
        "saved",
    )

    def __init__(self) -> None:
        self.saved: list[ref[Holder] | ResidentRef | torch.Tensor | None] = []
        self.layouts: dict[int, Layout] = {}
        self.buffers: set[int] = set()
        self.elided: list[tuple[ref[OpHolder], int]] = []
        self.holders: list[ref[OpHolder]] = []
        self.records: dict[str, Call] = {}
        self.inner: list[InnerOp] | tuple[()] = ()
        self.calls: Sequence[Entry] = ()
        self.roots: Sequence[tuple[int, int]] = ()
        self.numbers: dict[int, tuple[int, int, bool]] = {}

    def stop(self, hooks: object, early_stop: bool, begins: Iterable[int]) -> tuple[int, int]:
        """Return the number of the first node to which no replay comes, and where autograd stands when it ends.

        It ends while an op saves what it is given, and has run what has no node and comes before that. ``begins`` are
        the numbers at which native regions begin.
        """
        places = range(len(self.saved) - 1, -1, -1)
        last = self.with_parameters(next((place for place in places if self.may_need(place, hooks)), -1))
        elided = [number for holder, number in self.elided if hooks is not None or holder() is not None]
        if not early_stop and (last >= 0 or elided):
            return sequence_number(), sequence_number()  # to the function's end
        number, stop, _ = self.numbers.get(last, (0, 0, False))
        end = number
        if last >= 0 and any(  # the op itself is run, and then no native region is begun
            buffer and saved == number and place <= last and self.may_need(place, hooks)
            for place, (saved, _, buffer) in self.numbers.items()
        ):
            stop = end = min((begin for begin in begins if begin >= number), default=sequence_number())
        return max([stop, *elided]), max([end, *elided])

    def note_elided(self, holder: ref[OpHolder]) -> None:
        """Note a holder that replay fills from an input or an output of an op, which is over by now."""
        self.elided.append((holder, sequence_number()))

    def position_of(self, holder: Holder) -> int:
        """Return the place of a live holder."""
        return next(place for place, entry in enumerate(self.saved) if type(entry) is ref and entry() is holder)

    def empty(self) -> list[Holder]:
        """Return the live holders that a replay has to fill."""
        empty = [
            holder
            for entry in self.saved
            if type(entry) is ref and (holder := entry()) is not None and holder.value is None
        ]
        if self.elided:
            empty += [holder for entry, _ in self.elided if (holder := entry()) is not None and holder.value is None]
        return empty

    def empty_elided(self) -> int:
        """Return how many of the live holders of SAVE ops are filled from other ops' outputs, and are not yet."""
        return sum([(holder := entry()) is not None and holder.value is None for entry, _ in self.elided])

    def has_values(self) -> bool:
        """Whether a live holder that replay fills has its value."""
        return any(holder.value is not None for holder in self._alive())

    def forget_values(self) -> None:
        """Empty all holders that a replay can fill again."""
        for holder in self._alive():
            holder.value = None

    def drawn_by_ops(self) -> list[RngState]:
        """Return the states in which ops left the generators that they drew from."""
        return [record.drawn for record in self.records.values() if record.drawn is not None] if self.records else []

    def forget_slots(self) -> None:
        """Drop what only a further replay would need."""
        self.calls = self.inner = self.roots = ()
        for call in self.records.values():
            if call.kept or call.drawn is not None or call.answers is not None:  # of most handles nothing is
                call.forget()

    def may_need(self, place: int, hooks: object) -> bool:
        """Whether, at the end of forward, a replay may have to fill the holder at a place.

        A dead holder needs nothing. But under hooks around the region, which may be those of another region, what is
        kept must be the same in that region's replay, where other tensors live longer.
        """
        entry = self.saved[place]
        if type(entry) is not ref:
            return hooks is not None and type(entry) is torch.Tensor  # a leaf, which another region may make there
        return hooks is not None or ((holder := entry()) is not None and holder.value is None)

    def last_needed(self) -> int:
        """Return the place of the last live empty holder (-1 if none)."""
        saved = self.saved
        for place in range(len(saved) - 1, -1, -1):
            entry = saved[place]
            if type(entry) is ref and (holder := entry()) is not None and holder.value is None:
                return place
        return -1

    def with_parameters(self, place: int) -> int:
        """Return a place, or that of the last of the parameters that directly follow it."""
        saved = self.saved
        while 0 <= place < len(saved) - 1 and isinstance(saved[place + 1], torch.Tensor):
            place += 1
        return place

    def _alive(self) -> Iterator[Holder]:
        for entry in (*self.saved, *[holder for holder, _ in self.elided]):
            holder = entry() if type(entry) is ref else None
            if holder is not None:
                yield holder


class RecorderLike(Protocol):
    """What a region asks of its log while forward runs; see `call.recorder.Recorder`."""

    @property
    def storages(self) -> Storages:
        """Who made and who modified a storage."""

    def running(self) -> str | None:
        """Return the name of the call that runs now; None outside of calls."""

    def argument_of(self, holder: Holder) -> torch.Tensor | None:
        """Return what an empty holder of the call that runs waits for, if it is an argument."""

    def adopt(self, holder: OpHolder, value: torch.Tensor) -> None:
        """Take what hooks around the region have made anew of a resident as what the resident's entry has made."""


class Region:
    """One call of a checkpointed function.

    Args:
        function: What runs in both phases.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        options: What the user chose.
        replay: Makes what fills a region's empty holders, up to a place on its tape, by its method `replay`.
        is_part: Whether it runs in a native region that replay skips; see `own_hooks`.
    """

    values: Values | None = None  # of the determinism check, while forward takes them
    versions: Sequence[int] = ()  # of its parameters at the end of forward
    finished = False  # whether forward is over
    filling = False  # whether a replay runs
    end_number = -1  # where autograd stood when forward ended
    last_number = -1  # of the autograd nodes that lead to its outputs, if something asked for them
    replay_context: AbstractContextManager[Any] | None = None
    _sender: Sender | None = None
    outside: Outside | None = None  # what outlives it and may change
    keeper: Keeper | None = None  # inside of a budget
    recorder: RecorderLike | None = None  # of names and ops, while forward runs
    replayed_in = -1  # the latest backward that came here
    misuse: Callable[[], UsageError] | None = None  # a gradient inside forward that was refused

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: Options,
        replay: Callable[[Region, int], Replaying],
        is_part: bool = False,
    ) -> None:
        self.function: Callable[..., Any] | None = function
        self.options = options
        self._replay = replay
        hooks = top_saved_tensors_hooks()
        inputs = RegionInputs(args, kwargs, hooks)
        self.inputs: RegionInputs | None = inputs
        reached = reach(function, inputs.modules() if inputs.others else ())
        self.parameters: Sequence[torch.Tensor | None] = reached.parameters
        if reached.places:
            self.outside = Outside(reached.places, options.policy is not None)
        self.rng = None
        if options.preserve_rng_state:
            if inputs.others:
                reached.generators += [other for other in inputs.others if isinstance(other, torch.Generator)]
            self.rng = RngState(reached.generators)
        self.hooks = hooks
        if is_part and hooks is not None and hooks[1] in (read, unpack):
            self.hooks = own_hooks(self.name)
        self.ambient = capture_ambient()
        self.modes = count_of_modes()
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
                if earlier != graph_task() and (earlier < 0 or not self.finished or not self.tape.has_values()):
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
        if op and (self.recorder is None or self.recorder.running() != op):
            self.refuse("a gradient is taken through this call before the region's forward ends", op)
        if self.inputs is not None and self.inputs.is_left_by_gradient(self._variables):
            self.refuse(
                "a gradient is taken before the region's forward ends, leaves the region by one argument or variable "
                "and comes back by another",
                None,
                "Pass the region the tensor that both were computed from, or take the gradient outside the region.",
            )

    def _variables(self) -> Iterable[torch.Tensor | None]:
        return () if self.outside is None else [state.tensor for state in self.outside.states()]

    def refuse(
        self,
        what: str,
        op: str | None,
        remedy: str = "Take the gradient outside the region, or give what it passes through the policy RECOMPUTE.",
        tensor: str | None = None,
    ) -> NoReturn:
        """Raise an error about a gradient that is taken before forward ends, here and at the end of forward."""
        self.misuse = partial(UsageError, what, region=self.name, op=op, tensor=tensor, remedy=remedy)
        raise self.misuse()

    def refill(self, holder: Holder) -> torch.Tensor:
        """Return the value of a holder that is empty, by a replay, or that is read before forward is over.

        Raises:
            ReleasedError: An earlier backward freed the region's inputs.
        """
        with self.lock:
            if not (self.finished or self.filling or self.hooks is None or self.keeper is None):
                self.keeper.let_go()  # in an enclosing replay an inner region keeps nothing: do the same here
            argument: torch.Tensor | None = None
            if not self.finished and self.recorder is not None:
                argument = self.recorder.argument_of(holder)
            if argument is not None:
                return argument
            while (value := holder.value) is None:  # another thread's backward may read what this one fills
                if self.inputs is None:
                    raise ReleasedError(
                        "backward needs this tensor again, but an earlier backward freed the inputs of replay",
                        region=self.name,
                        op=holder.op,
                        tensor=holder.name,
                        remedy="Pass retain_graph=True to each backward but the last.",
                    )
                if self.finished or graph_task() >= 0:
                    self._fill()
                else:
                    self._fill_for_reader(holder)
        return value

    def _fill_for_reader(self, holder: Holder) -> None:
        """Fill a holder that is read in forward outside of any backward, by user code or in a node creation hook."""
        refuse = partial(
            self.refuse,
            "this saved tensor is read before the region's forward ends, and would have to be recomputed",
            None if self.recorder is None else self.recorder.running(),
            "Read it after the region. A node creation hook can take the node's `_raw_saved_...` attribute for that.",
            holder.name,
        )
        if self.options.policy is not None or (self.recorder is not None and self.recorder.running() is not None):
            refuse()
        try:
            self._fill()
        except RuntimeError as error:
            if "node creation hook" in str(error):  # torch's error about the first node that replay makes
                refuse()
            raise

    def _fill(self) -> None:
        # Another thread may have replayed, and released, while this one waited for the lock.
        if self.inputs is None:
            return
        if self.keeper is not None:
            self.keeper.reach()
        last = self.tape.last_needed()
        if last >= 0 or (self.tape.elided and self.tape.empty_elided()):
            if self.values is not None:
                self.values.flush()
            self.filling = True
            try:
                if torch_function_is_on():
                    self._fill_up_to(last)
                else:
                    with with_torch_function():
                        self._fill_up_to(last)
            finally:
                self.filling = False
        self.replayed_in = graph_task()
        if not self.finished:
            return
        if not graph_is_kept():
            self.release()
        elif (group := graph_exec_group()) is not None:
            finalize(group, self.tape.forget_values).atexit = False

    def _fill_up_to(self, last: int) -> None:
        if not self.finished:
            self._replay_in_forward(last)
        elif self.keeper is None:
            self._replay(self, last).replay()
        else:
            self.keeper.replay(self._replay(self, last).replay)

    def _replay_in_forward(self, last: int) -> None:
        if self.recorder is not None and (op := self.recorder.running()) is not None:
            self.refuse("a gradient is taken inside this call, through what the region would have to recompute", op)
        if self.options.policy is not None:
            self.refuse("a gradient is taken before the region's forward ends, through an op that is not kept", None)
        with unseen(self):
            self._replay(self, last).replay()

    def unpack(self, holder: OpHolder) -> torch.Tensor:
        """Return a resident that hooks around have packed, in forward, where they may have made it anew.

        In a replay of what is around they give the resident itself. What is kept must be the same there: the value is
        taken as if it lay where the resident does, and what makes it is not this forward's.
        """
        assert self.inputs is not None
        assert holder.unpack is not None
        with unseen(self):
            value = holder.unpack(holder.packed)
        self.inputs.adopt(value, holder.key)
        if self.recorder is not None:
            self.recorder.adopt(holder, value)
        return value

    def release(self) -> None:
        """Drop what only a further replay would need."""
        function = self.function  # of which no more than a name stays: it may own tensors
        self._past_name = function.__qualname__ if type(function) is FunctionType else default_name(function)
        self.parameters = ()
        if self.tape.records or self.tape.calls or self.tape.inner:
            self.tape.forget_slots()
        self.inputs = self.function = self.hooks = self.rng = self.replay_context = None
        self.outside = None


class OpenRegion(Region):
    """A region of which a phase runs, for type checkers: what the phase starts from is there."""

    function: Callable[..., Any]
    inputs: RegionInputs
