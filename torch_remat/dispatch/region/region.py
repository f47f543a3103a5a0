"""A checkpointed region between its forward and its replay.

In: a function and the arguments of one call. Kept: the arguments' tensors, the ambient state, and weak references
to the holders. Out: filled holders, by a replay when one is needed.
"""

from __future__ import annotations

from _thread import RLock  # without the Python function around it that threading has
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from types import FunctionType
from typing import Any, NoReturn
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
from torch_remat.dispatch.holder import Holder, OpHolder, read
from torch_remat.dispatch.keeping import Keeper
from torch_remat.dispatch.mode import unseen
from torch_remat.dispatch.naming import default_name, scope
from torch_remat.dispatch.offloading import sender_of
from torch_remat.dispatch.options import DEFAULTS, OpLog, Options
from torch_remat.dispatch.part import own_hooks
from torch_remat.dispatch.placeholder import unpack
from torch_remat.dispatch.reach import reach
from torch_remat.dispatch.region.inputs import RegionInputs
from torch_remat.dispatch.region.outside import Outside
from torch_remat.dispatch.tape import Tape
from torch_remat.errors import ReleasedError, UsageError
from torch_remat.offload.sender import Sender

# Weak references to all regions that are alive, for reports.
_regions: set[ref[Region]] = set()
_next_serial = count().__next__


def live_regions() -> list[Region]:
    """Return the regions that are alive, oldest first."""
    alive = [region for entry in list(_regions) if (region := entry()) is not None]
    return sorted(alive, key=lambda region: region.serial)


class Region:
    """One call of a checkpointed function.

    Args:
        function: What runs in both phases.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        options: What the user chose.
        replay: Makes what fills a region's empty holders, up to a place on its tape, by its method `replay`.
        is_part: Whether it runs in a native region that replay skips; see `part`.
    """

    values: Values | None = None  # of the determinism check, while forward takes them
    versions: Sequence[int] = ()  # of its parameters at the end of forward
    finished = False  # whether forward is over
    filling = False  # whether a replay runs
    end_number = -1  # where autograd stood when forward ended
    last_number = -1  # of the autograd nodes that lead to its outputs, if something asked for them
    replay_context: AbstractContextManager[Any] | None = None
    op_log: OpLog | None = None
    offloading: Sender | None = None
    outside: Outside | None = None  # what outlives it and may change
    keeper: Keeper | None = None  # inside of a budget
    recorder: Any = None  # of names and ops, while forward runs
    replayed_in = -1  # the latest backward that came here
    misuse: Callable[[], UsageError] | None = None  # a gradient inside forward that was refused

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: Options,
        replay: Callable[[Region, int], Any],
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
            generators = reached.generators
            if inputs.others:
                generators += [other for other in inputs.others if isinstance(other, torch.Generator)]
            self.rng = RngState(generators)
        self.hooks = own_hooks(self.name) if is_part and hooks is not None and hooks[1] in (read, unpack) else hooks
        self.ambient = capture_ambient()
        self.modes = count_of_modes()
        self.tape = Tape()
        self.first_number = sequence_number()  # of the autograd nodes that it makes
        self.scope = scope.get()
        if options is not DEFAULTS:
            if options.op_log is not None:
                self.op_log = options.op_log()
            if options.offload_inputs and hooks is None:
                inputs.give_away(sender_of(self).send)
        self.lock = RLock()
        self.serial = _next_serial()
        _regions.add(ref(self, _regions.discard))

    @property
    def name(self) -> str:
        """The name that messages and reports use."""
        if self.options.region_name is not None:
            return self.options.region_name
        return default_name(self._past_name if self.function is None else self.function)

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
        """Note a gradient that is taken before forward ends, and refuse one through a call, which replay leaves out.

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
                "Pass to the region what both were made of, or take the gradient outside of the region.",
            )

    def _variables(self) -> Iterable[torch.Tensor | None]:
        return () if self.outside is None else [state.tensor for state in self.outside.states()]

    def refuse(
        self,
        what: str,
        op: str | None,
        remedy: str = "Take the gradient outside of the region, or give what it passes through the policy RECOMPUTE.",
    ) -> NoReturn:
        """Raise an error about a gradient that is taken before forward ends, here and at the end of forward."""
        self.misuse = partial(UsageError, what, region=self.name, op=op, remedy=remedy)
        raise self.misuse()

    def refill(self, holder: Holder) -> torch.Tensor:
        """Return the value of a holder that is empty, by a replay, or that is read before forward is over.

        Raises:
            ReleasedError: An earlier backward freed the region's inputs.
        """
        with self.lock:
            if not (self.finished or self.filling or self.hooks is None or self.keeper is None):
                self.keeper.let_go()  # in a replay of what is around, an inner region keeps nothing: do the same here
            argument: torch.Tensor | None = None
            if not self.finished and self.recorder is not None:
                argument = self.recorder.argument_of(holder)
            if argument is not None:
                return argument
            while (value := holder.value) is None:  # another thread's backward may read what this one fills
                if self.inputs is None:
                    raise ReleasedError(
                        "backward needs this tensor again, but an earlier backward freed what replay starts from",
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
            self.refuse("a gradient is taken inside of this, through what the region would have to recompute", op)
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
        if self.tape.records or self.tape.regions or self.tape.calls or self.tape.inner:
            self.tape.forget_slots()
        self.inputs = self.function = self.hooks = self.rng = self.replay_context = self.op_log = None
        self.outside = None
