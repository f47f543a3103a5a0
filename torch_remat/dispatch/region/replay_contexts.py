"""What a replay runs in, besides the hooks: the state of forward, and what watches its ops.

In: a replay that is about to begin. Kept: nothing. Out: contexts for its function.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch_remat.dispatch.ambient import capture_ambient
from torch_remat.dispatch.naming import scope, scope_restored
from torch_remat.dispatch.observe import Watch, is_watched
from torch_remat.dispatch.options import DEFAULTS
from torch_remat.dispatch.replay_ops import ReplayOps

if TYPE_CHECKING:
    from torch_remat.dispatch.region.replay import Filling


def contexts_of(replay: Filling) -> list[AbstractContextManager[Any]]:
    """Return the contexts, and set up what watches the ops, where something does."""
    region = replay.region
    contexts: list[AbstractContextManager[Any]] = []
    if capture_ambient() is not region.ambient:
        contexts += region.ambient.contexts()
    if is_watched():
        replay.observed = Watch(replay)
        contexts.insert(0, replay.observed)
    if scope.get() != region.scope:
        contexts.append(scope_restored(region.scope))
    if replay.stale is not None:
        replay.opening = replay.stale.watch
    if region.options is DEFAULTS and region.rng is None:
        return contexts
    if region.rng is not None:
        contexts.append(region.rng.replayed())
    if region.replay_context is not None:
        contexts.append(region.replay_context)
    if region.op_log is not None:
        log = region.op_log.begin_replay()
        contexts.append(replay.watch(log))
        if replay.stale is not None:
            replay.stale.run = log
    if region.tape.calls:
        replay.ops = replay.ops or ReplayOps(replay)
        replay.ops.policy = replay.policy_replay(replay, replay.ops.suppressed)
        replay.opening = replay.ops.policy.answer
    return contexts
