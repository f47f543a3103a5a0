"""A region with a policy, in a replay that runs all its ops; see NOTE [ Where placeholders will not do ].

In: the region, and the error that its replay has raised. Kept: nothing past the replay. Out: filled holders, or an
error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torch_remat.dispatch.again import Again
from torch_remat.dispatch.calls import another_call, changed_arguments, is_kept_out, still_there
from torch_remat.dispatch.holder import read
from torch_remat.dispatch.loose import is_mirrored, place_of, run_loose
from torch_remat.dispatch.placeholder import unpack
from torch_remat.dispatch.policy_call import PolicyCall, SkippedOp
from torch_remat.dispatch.policy_replay import PolicyReplay
from torch_remat.dispatch.real_run import RealRun, may_run, warn_of_real_run
from torch_remat.dispatch.region.replay import Filling
from torch_remat.dispatch.schema import effects_of

if TYPE_CHECKING:
    from torch_remat.dispatch.holder import Holder
    from torch_remat.dispatch.region.region import Region
    from torch_remat.dispatch.suppressed import Suppressed


def replay_with_policy(region: Region, empty: list[Holder]) -> None:
    """Replay a region with a policy, and once more with all its ops where placeholders would not do."""
    try:
        Filling(region, empty).replay()
        return
    except Exception as error:
        if not _may_run(region, error):
            raise
        warn_of_real_run(region.name, None, "what the region's policy keeps or nothing needs", error)
    _RealFilling(region, empty).replay()


def _may_run(region: Region, error: Exception) -> bool:
    if region.replay_context is not None:
        return False
    if region.hooks is not None and region.hooks[1] not in (read, unpack):
        return False  # they may give each tensor once, as those of `torch.utils.checkpoint` do
    calls = [call for call in region.tape.calls if type(call) is not SkippedOp]
    if any(call.earlier or (call.outside and len(call.kept) < len(call.made)) for call in calls):
        return False  # what such an op made depends on what it wrote, or on what was there before another wrote
    return may_run(region, calls, error) and not _reads_what_it_wrote(calls)


def _reads_what_it_wrote(calls: Sequence[PolicyCall]) -> bool:
    """Whether a call makes something of what one before it has changed outside of the region."""
    written: set[int] = set()
    for call in calls:
        makes = call.made or call.kind or len(call.outside) < len(call.writes)
        if makes and call.effects.viewed is None and written.intersection(call.reads):
            return True
        written.update(storage.cdata for storage in call.outside)
    return False


class _RealReplay(PolicyReplay):
    """The ops of a replay that runs them all."""

    def __init__(self, mode: Filling, suppressed: Suppressed) -> None:
        super().__init__(mode, suppressed)
        self._real = RealRun(Again(_nothing, (), {}, -1, None, self._state, True))

    def answer(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an op."""
        effects = effects_of(op)
        if is_kept_out(effects, args):
            return op(*args, **kwargs)
        self._suppressed.restore()
        calls = self._calls
        at = place_of(op, effects, calls, self._at)
        if at is None:
            return run_loose(op, args, kwargs)
        if at >= len(calls) or (calls[at].op is not op and not is_mirrored(calls[at].op, op)):
            self._mode.fail(another_call(self._region, None, at, calls, op))
        self._at = at + 1
        call = calls[at]
        if not call.outside and effects.viewed is None:
            self._check_versions(call, args, kwargs)
        if effects.written or effects.namespace != "aten":
            self._suppressed.add(changed_arguments(call, effects, args, kwargs), still_there(call.outside))
        return self._kept_of(call, self._real.run(op, args, kwargs, effects, call.results))

    def _kept_of(self, call: PolicyCall, result: Any) -> Any:
        """Return the results of a call, with those that are kept as they were in forward."""
        if not call.kept:
            return result
        if isinstance(result, torch.Tensor):
            return self._value(call, 0, call.kept[0])
        made = list(result)
        for place, slot in call.kept.items():
            made[place] = self._value(call, place, slot)
        return made if isinstance(result, list) else tuple(made)


class _RealFilling(Filling):
    """A replay that runs all ops."""

    policy_replay = _RealReplay


def _nothing() -> None:
    """Stand for the function, which the mode runs."""
