"""The runtime of a region in one phase, and which one is current in this thread.

In: a region and a phase. Kept: nothing but the parent mode. Out: `current_mode()`, which handles, native regions and
error messages ask *which region, which phase, which op*.

Being current costs a context variable. The mode goes on torch's dispatch stack, where every op pays for it, only
while it has something to watch (``mode.watched``).

NOTE [ How a replay ends ]
1. Once the last empty holder is filled, `StopReplay` ends the function, unless ``early_stop=False``. It derives from
   BaseException, so that ``except Exception`` in user code does not swallow it; inside a module that has a forward
   hook with ``always_call=True`` also from Exception, so that the hook is called. It is raised once: code that catches
   it anyway (``except:``, ``finally:``) runs on, its ops run, and its result is thrown away.
2. The pack hook runs before its op does, and an op may save a buffer that it is about to fill (``F.rrelu`` its noise).
   Such a buffer is a tensor of floats that needs no gradient. Where the last op to save anything saves one, the
   function runs on to the next native region or to its end, unless a policy's calls tell that this op fills nothing.
   Elsewhere the op itself is skipped, which saves much if it is a matrix product. If only a few small ops would follow
   that write nothing, they run unwatched: an exception would take longer.
3. An error found in the pack hook is kept and raised after the function was left, so that user code cannot swallow
   it either.
4. A replay that has something to fill goes on until each live anchored holder has met its parameter again: where
   parameters were replaced, what was filled is wrong.
5. A replay that fails empties again what it filled.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch.overrides import TorchFunctionMode

from torch_remat._compat import (
    OF_TRACES,
    DispatchMode,
    Handler,
    SavedTensorHooks,
    active_modes,
    count_of_modes,
    detached,
    innermost_function_mode,
    is_transformed,
    pop_function_mode,
    pop_mode,
    pop_region_hooks,
    push_function_mode,
    push_mode,
    push_region_hooks,
    run_fsdp_in,
)
from torch_remat.dispatch.holder import Holder
from torch_remat.dispatch.options import Watch
from torch_remat.dispatch.region.region import Region, Tape
from torch_remat.errors import Carried

if TYPE_CHECKING:
    from torch_remat.policies.decision import CheckpointPolicy

_current: ContextVar[RematMode | None] = ContextVar("torch_remat_mode", default=None)
# Return the mode of the region that runs in this thread; None outside of regions.
current_mode: Callable[[], RematMode | None] = _current.get


class StopReplay(BaseException):
    """Ends the function of a replay that has filled what it had to; see NOTE [ How a replay ends ]."""

    def __init__(self, replay: RematMode) -> None:
        self.replay = replay


class StopUnderHooks(StopReplay, Exception):
    """Does so where modules have forward hooks with ``always_call=True``, which torch calls for an Exception alone."""


class Ops(Protocol):
    """The log of a region in one phase: a `Recorder` in forward, an `Answerer` in replay."""

    def begin(self, name: str, policy: CheckpointPolicy, ctx: Any) -> Any:
        """Begin an op with a handle, and return the handle; None if it is plain autograd."""

    def run(
        self, is_native: bool, name: str, policy: CheckpointPolicy, function: Callable[..., Any],
        args: Sequence[Any], kwargs: Mapping[str, Any], /,
    ) -> Any:  # fmt: skip
        """Run a native region, or a call of `op`; see `RematMode.run_native`."""

    def free_name(self, name: str) -> str:
        """Return the name of the call that comes next, given what all calls of its kind are called."""

    def skips(self) -> bool:
        """Whether a call runs that replay skips."""

    def is_native(self) -> bool:
        """Whether a native region runs."""

    def enter_region(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments that an inner region is to have."""


class RematMode(DispatchMode):
    """The runtime of one phase of one region: `Recording` in forward, `Filling` in replay.

    Attributes:
        opening: What watches the region's ops from its start, if something does.
        watcher: What sees each aten op now, if something does; set by `show_ops_to`.
        function_mode: The mode for torch functions that sees what the region calls, if one does.
        hidden_mode: The same while it sees nothing, since what runs is the runtime's own.
        below: How many modes are active while an op is handled, unless code is traced inside the region.
    """

    # No `__init__`: `DispatchMode` sets up its own state when it is entered, which a plain region never does.
    region: Region
    replaying: bool
    parent: RematMode | None = None
    ops: Ops | None = None
    observed: Watch | None = None
    opening: Handler | None = None
    watcher: Handler | None = None
    function_mode: TorchFunctionMode | None = None
    hidden_mode: TorchFunctionMode | None = None
    below = 0

    @property
    def recomputing(self) -> bool:
        """Whether this phase, or one around it, is a replay."""
        return self.replaying or (self.parent is not None and self.parent.recomputing)

    @property
    def answers(self) -> bool:
        """Whether each aten op that comes now is answered from the log. Placeholders ask, which are below this room."""
        return self.replaying and self.watcher is not None and getattr(self.ops, "ops", None) is not None

    def is_in(self, region: Region) -> bool:
        """Whether this phase belongs to a region, or is inside one of its phases."""
        return self.region is region or (self.parent is not None and self.parent.is_in(region))

    def run(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        hooks: SavedTensorHooks,
        contexts: Sequence[AbstractContextManager[Any]],
    ) -> Any:
        """Run a function with this as the current mode, under a pair of saved-tensor hooks and other contexts."""
        push_region_hooks(*hooks)  # raises where the caller has disabled hooks: nothing is to be undone then
        self.parent = parent = _current.get()
        _current.set(self)
        try:
            if contexts:
                return self._within(contexts, function, args, kwargs)
            if self.ops is None and self.opening is None:
                return function(*args, **kwargs)
            return self._call(function, args, kwargs)
        except Carried as carried:
            raise carried.take(self.region.name) from None
        finally:
            self.opening = None
            pop_region_hooks(hooks[0])
            _current.set(parent)
            self.parent = None

    def _within(
        self,
        contexts: Sequence[AbstractContextManager[Any]],
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a function in contexts, the first outermost."""
        if not contexts:
            return self._call(function, args, kwargs)
        with contexts[0]:
            return self._within(contexts[1:], function, args, kwargs)

    def _call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.opening is None:
            return function(*args, **kwargs)
        return self.watched(self.opening, function, args, kwargs)

    @abstractmethod
    def ops_now(self) -> Ops | None:
        """Return the ops of this phase; None where ops are plain autograd."""

    def run_native(
        self,
        name: str,
        policy: CheckpointPolicy,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        is_native: bool = True,
    ) -> Any:
        """Run a native region in this phase, or a call of `op`, and return what the function returns.

        Args:
            name: The op's name.
            policy: Its policy.
            function: What runs.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            is_native: Whether its Python runs in replay too, as that of a native region; not that of a call.

        Raises:
            UsageError: The region already has an op of that name, or the op before it was not ended.
            MismatchError: In replay, this is not the op that forward had here, or other ops ran inside.
        """
        ops = self.ops or self.ops_now()
        if ops is None or is_transformed():
            return function(*args, **kwargs)
        if self.observed is None and self.function_mode is None:
            return ops.run(is_native, name, policy, function, args, kwargs)
        run = partial(ops.run, is_native)
        if self.function_mode is not None:
            run = partial(self.hidden, run)
        if self.observed is None:
            return run(name, policy, function, args, kwargs)
        return self.observed.run_native(run, name, policy, function, args, kwargs)

    def hidden(self, run: Callable[..., Any], *args: Any) -> Any:
        """Show nothing to the region's mode for torch functions but what `user_code` runs."""
        if not self._hide():
            return run(*args)
        try:
            return run(*args)
        finally:
            self._show()

    def _hide(self) -> bool:
        """Take the region's mode for torch functions off the stack, if it is there to see what comes now."""
        seen = self.function_mode
        if seen is None or innermost_function_mode() is not seen:
            return False
        self.hidden_mode = pop_function_mode()
        return True

    def _show(self) -> None:
        assert self.hidden_mode is not None
        push_function_mode(self.hidden_mode)
        self.hidden_mode = None

    def user_code(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function of the user's."""
        if (seen := self.hidden_mode) is None:
            return function(*args, **kwargs)
        self.hidden_mode = None
        push_function_mode(seen)
        try:
            return function(*args, **kwargs)
        finally:
            self.hidden_mode = pop_function_mode()

    def run_named(
        self,
        name: str,
        policy: CheckpointPolicy,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a call of `op` whose name may have come before; the later ones get a number."""
        ops = self.ops or self.ops_now()
        own = name if ops is None else ops.free_name(name)
        return self.run_native(own, policy, function, args, kwargs, is_native=False)

    @abstractmethod
    def take_others(self, tape: Tape) -> None:
        """Take, at the end of an inner region's forward, what that saved and did not make."""

    def name_saved(self, named: Sequence[tuple[str, torch.Tensor | None]]) -> None:
        """Give names to the tensors that autograd saves next, if a saved call makes them; replay has them."""

    def give_name(self, tensor: torch.Tensor, name: str) -> None:
        """Give a tensor a name by hand, by which forward's policy can save it; replay keeps what forward has chosen."""

    def watched(
        self, watcher: Handler, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a function and show every aten op in it to a watcher; which returns its result."""
        run_fsdp_in(unseen)
        previous = self.watcher
        self.show_ops_to(watcher)
        try:
            if previous is None or not any(mode is self for mode in active_modes()):
                self.below = count_of_modes()
                before = push_mode(self)
                try:
                    return self.user_code(function, args, kwargs)
                finally:
                    pop_mode(before)
            if self.lets_compiled_code_run:
                with DispatchMode():  # compiled code runs as it is written, where something watches its ops inside
                    return self.user_code(function, args, kwargs)
            return self.user_code(function, args, kwargs)
        finally:
            self.show_ops_to(previous)

    def is_foreign(self, types: Sequence[type]) -> bool:
        """Whether an op on tensors of these subclasses is one of a trace inside the region, which is no part of it.

        The modes that trace are below all others, and what makes a tensor from numbers shows nothing else of a trace.
        """
        return not self.region.traced and (count_of_modes() > self.below or not OF_TRACES.isdisjoint(types))

    def show_ops_to(self, watcher: Handler | None) -> None:
        """Let a watcher, or none, be the handler that torch calls: a fifth of what an op costs is a handler between."""
        self.watcher = watcher
        if watcher is None:
            self.__dict__.pop("__torch_dispatch__", None)
        else:
            self.__dict__["__torch_dispatch__"] = MethodType(watcher, self)

    def alias_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor without its `grad_fn`, and show no watcher how it is made."""
        if self.watcher is None or type(tensor) is not torch.Tensor:
            return tensor.detach()
        return detached(tensor)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Show no op and no function that runs inside to what watches the region: hooks of users run here."""
        previous, is_hidden = self.watcher, self._hide()
        self.show_ops_to(None)
        try:
            yield
        finally:
            self.show_ops_to(previous)
            if is_hidden:
                self._show()


class Replaying(RematMode):
    """What lower rooms ask of a replay; see `region.replay.Filling`.

    Attributes:
        stopped: Whether `StopReplay` was raised: what user code runs from there on counts for nothing.
        over: Whether it takes no more tensors.
        position: The place of the next tensor to be saved.
    """

    replaying = True
    stopped = over = False
    position = 0

    @abstractmethod
    def fill(self, holder: Holder, value: torch.Tensor) -> None:
        """Give a holder its value."""

    @abstractmethod
    def explain(self, holder: Holder, tensor: torch.Tensor, owner: torch.Tensor, origin: torch.Tensor | None) -> None:
        """Tell apart what differs from forward, and fail unless it is harmless."""

    @abstractmethod
    def stop_if_filled(self) -> None:
        """End the replay if no holder is left to fill: by now an op has filled what it had saved before."""

    @abstractmethod
    def fail(self, error: Exception) -> NoReturn:
        """Keep an error and end the replay with it."""


@contextmanager
def unseen() -> Iterator[None]:
    """Show no op to the modes of regions: what runs inside is no part of any."""
    with ExitStack() as stack:
        for mode in active_modes():
            if isinstance(mode, RematMode):
                stack.enter_context(mode.unwatched())
        yield


def watch_by(make: Callable[[RematMode], Watch]) -> None:
    """Let a function make what watches the phase of a mode."""
    global _make
    _make = make


def watch(mode: RematMode) -> Watch:
    """Return what watches the phase of a mode."""
    assert _make is not None
    return _make(mode)


_make: Callable[[RematMode], Watch] | None = None
