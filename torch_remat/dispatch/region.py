"""A checkpointed region between its forward and its replay.

In: a function and the arguments of one call. Kept: the arguments' tensors, the ambient state, and weak references
to the holders. Out: filled holders, by a replay when one is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from threading import RLock
from typing import Any
from weakref import finalize

import torch

from torch_remat._compat import graph_exec_group, graph_is_kept, graph_task, sequence_number, top_saved_tensors_hooks
from torch_remat.dispatch.ambient import RngState, capture_ambient
from torch_remat.dispatch.holder import Holder
from torch_remat.dispatch.inputs import RegionInputs
from torch_remat.dispatch.naming import default_name, scope
from torch_remat.dispatch.oplog import OpLog
from torch_remat.dispatch.options import Options
from torch_remat.dispatch.parameters import parameters_of
from torch_remat.dispatch.replay import replay
from torch_remat.dispatch.tape import Tape
from torch_remat.errors import ReleasedError


class Region:
    """One call of a checkpointed function.

    Args:
        function: What runs in both phases.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        options: What the user chose.
    """

    __slots__ = (
        "__weakref__",
        "_lock",
        "_past_name",
        "_replayed_in",
        "ambient",
        "finished",
        "first_number",
        "function",
        "hooks",
        "inputs",
        "op_log",
        "options",
        "parameters",
        "replay_context",
        "rng",
        "scope",
        "tape",
    )

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options
    ) -> None:
        self.function: Callable[..., Any] | None = function
        self.options = options
        self.hooks = top_saved_tensors_hooks()
        self.inputs: RegionInputs | None = RegionInputs(args, kwargs, self.hooks)
        self.parameters = parameters_of(function)
        self.ambient = capture_ambient()
        self.rng = RngState(self.inputs.generators()) if options.preserve_rng_state else None
        self.tape = Tape()
        self.finished = False
        self.first_number = sequence_number()
        self.replay_context: AbstractContextManager[Any] | None = None
        self.op_log = OpLog() if options.debug else None
        self.scope = scope.get()
        self._lock = RLock()
        self._replayed_in = -1  # the latest backward that came here

    @property
    def name(self) -> str:
        """The name that messages and reports use."""
        return self.options.region_name or (default_name(self.function) if self.function else self._past_name)

    def reach(self, _grad_outputs: Sequence[torch.Tensor | None]) -> None:
        """Prehook of the region's boundary: replay if a holder needs it, before any inner backward runs."""
        if self.inputs is not None:
            with self._lock:
                # What this backward has filled and read already, it does not need again.
                if self._replayed_in != graph_task():
                    self._fill()

    def refill(self, holder: Holder) -> torch.Tensor:
        """Return the value of a holder that was found empty, by a replay.

        Raises:
            ReleasedError: An earlier backward freed the region's inputs.
        """
        with self._lock:
            if holder.value is None:
                if self.inputs is None:
                    raise ReleasedError(
                        "backward needs this tensor again, but an earlier backward freed what replay starts from",
                        region=self.name,
                        tensor=holder.name,
                        remedy="Pass retain_graph=True to each backward but the last.",
                    )
                self._fill()
            value = holder.value
        assert value is not None  # replay fills every live holder or raises
        return value

    def _fill(self) -> None:
        # Another thread may have replayed, and released, while this one waited for the lock.
        if self.inputs is None:
            return
        if empty := self.tape.empty():
            replay(self, empty)
        self._replayed_in = graph_task()
        if not self.finished:
            return
        if not graph_is_kept():
            self._release()
        elif (group := graph_exec_group()) is not None:
            finalize(group, self.tape.forget_values).atexit = False

    def _release(self) -> None:
        """Drop what only a further replay would need."""
        # Of the function no more than a name: it may own tensors.
        self._past_name = self.name
        self.parameters = ()
        self.tape.forget_slots()
        self.inputs = self.function = self.hooks = self.rng = self.replay_context = self.op_log = None
