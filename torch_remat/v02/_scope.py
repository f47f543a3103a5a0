"""What is around a line of a checkpointed function while forward runs: its call of `checkpoint`, hooks, a saved call.

In: what `checkpoint`, `saved_tensors_hooks` and `region` enter. Kept: nothing once they have been left, but by a replay
the state that hooks took in forward. Out: `scope`, which these three, and `save_for_backward`, ask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import ref

import torch


class Hooks(NamedTuple):
    """A pair of saved-tensor hooks, and what tells the context in which a tensor was made."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]
    capture: Callable[[], Any] | None = None

    def context(self) -> Any:
        """Return the present context; None where nothing tells it."""
        return None if self.capture is None else self.capture()


@runtime_checkable
class RecomputeStateHook(Protocol):
    """State outside of tensors that replay is to find as forward did, such as a counter that seeds random numbers.

    The state is taken at the start of a region's forward and after each saved call in it, and put back at the same
    places of each replay. After the replay it is again what it was before.
    """

    def snapshot(self) -> Any:
        """Return the present state."""

    def restore(self, state: Any) -> None:
        """Bring back a state that `snapshot` has returned."""


class Output(NamedTuple):
    """Which hooks take what is kept of the results of a saved call, and their context when it ran."""

    region: Any
    name: str
    hooks: Hooks
    context: Any


class Run:
    """One call of a checkpointed function.

    Args:
        state_hooks: Its `RecomputeStateHook` objects.

    Attributes:
        entering: Whether the function has not begun, so that only inputs are packed.
        outputs: The saved calls whose results hooks take, until forward ends.
    """

    def __init__(self, state_hooks: Sequence[RecomputeStateHook]) -> None:
        self.entering = True
        self.outputs: list[Output] = []
        self._hooks = state_hooks
        self._region: Callable[[], Any] = _none
        self._entry: Sequence[Any] = ()
        self._exits: dict[str, Sequence[Any]] = {}

    def begin(self, region: Any) -> None:
        """Note that the function begins in forward."""
        self.entering = False
        self._region = ref(region)
        self._entry = self.present()

    def note_exit(self, region: Any, name: str) -> None:
        """Take the state after a saved call in forward."""
        if self._hooks and self._region() is region:
            self._exits[name] = self.present()

    def restore_exit(self, region: Any, name: str) -> None:
        """Bring back the state after a saved call, in replay."""
        if self._region() is region and (states := self._exits.get(name)) is not None:
            self.restore(states)

    def restore_entry(self) -> None:
        """Bring back the state at the start."""
        self.restore(self._entry)

    def present(self) -> Sequence[Any]:
        """Return the state of each hook."""
        return [hook.snapshot() for hook in self._hooks]

    def restore(self, states: Sequence[Any]) -> None:
        """Bring back a state of each hook."""
        for hook, state in zip(self._hooks, states, strict=True):
            hook.restore(state)


def _none() -> None:
    return None


class Call(NamedTuple):
    """A saved call that runs in forward.

    Attributes:
        name: Its name, with its scopes.
        named: What was saved by name in it: how many holders there were before, and the tensors.
    """

    name: str
    named: list[tuple[int, dict[str, torch.Tensor | None]]]


class Scope(NamedTuple):
    """What is around a line."""

    run: Run | None = None
    hooks: Hooks | None = None
    call: Call | None = None


_NOTHING = Scope()
scope: ContextVar[Scope] = ContextVar("torch_remat_v02_scope", default=_NOTHING)
