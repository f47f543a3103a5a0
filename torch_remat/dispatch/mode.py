"""The runtime of a region in one phase, and which one is current in this thread.

In: a region and a phase. Kept: nothing but the parent mode. Out: `current_mode()`, which handles, native regions and
error messages ask *which region, which phase, which op*.

Being current costs a context variable. The mode goes on torch's dispatch stack, where every op pays for it, only
while it has something to watch (``mode.watch``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch_remat._compat import TorchDispatchMode

if TYPE_CHECKING:
    from torch_remat.dispatch.forward_ops import ForwardOps
    from torch_remat.dispatch.op import Op
    from torch_remat.dispatch.policy import CheckpointPolicy
    from torch_remat.dispatch.region import Region
    from torch_remat.dispatch.replay_ops import ReplayOps

_Watcher = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]

_current: ContextVar[RematMode | None] = ContextVar("torch_remat_mode", default=None)


class RematMode(TorchDispatchMode):
    """The runtime of one phase of one region: `Recording` in forward, `Filling` in replay.

    Args:
        region: The region whose function runs.
    """

    replaying: bool
    parent: RematMode | None = None
    ops: ForwardOps | ReplayOps | None = None
    _watcher: _Watcher | None = None

    def __init__(self, region: Region) -> None:
        # TorchDispatchMode sets up its own state when it is entered, which a plain region never does.
        self.region = region

    @property
    def recomputing(self) -> bool:
        """Whether this phase, or one around it, is a replay."""
        return self.replaying or (self.parent is not None and self.parent.recomputing)

    def run(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        hooks: AbstractContextManager[None],
        contexts: Sequence[AbstractContextManager[Any]],
    ) -> Any:
        """Run a function with this as the current mode, under a pair of saved-tensor hooks and other contexts."""
        self.parent = parent = _current.get()
        _current.set(self)
        try:
            with hooks:
                if not contexts:
                    return function(*args, **kwargs)
                with ExitStack() as stack:
                    for context in contexts:
                        stack.enter_context(context)
                    return function(*args, **kwargs)
        finally:
            _current.set(parent)
            self.parent = None

    @abstractmethod
    def begin_op(self, name: str, policy: CheckpointPolicy, ctx: Any, body: FrameType) -> Op:
        """Begin an op in this phase.

        Args:
            name: The op's name, with its scopes.
            policy: Its policy.
            ctx: Its autograd context.
            body: The frame in which its body runs.

        Raises:
            UsageError: The region already has an op of that name, or the op before it was not ended.
            MismatchError: In replay, this is not the op that forward had here.
        """

    @contextmanager
    def watch(self, watcher: _Watcher) -> Iterator[None]:
        """Show every aten op that runs inside to ``watcher(op, args, kwargs)``, which returns the op's result."""
        previous, self._watcher = self._watcher, watcher
        try:
            with self:
                yield
        finally:
            self._watcher = previous

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Hand the op to the watcher."""
        if self._watcher is None:
            return op(*args, **(kwargs or {}))
        return self._watcher(op, args, kwargs or {})


def current_mode() -> RematMode | None:
    """Return the mode of the region that runs in this thread, or None outside of regions."""
    return _current.get()
