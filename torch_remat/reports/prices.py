"""What a region keeps and what its replay computes, from a log of its forward, whatever policies its calls have.

In: the steps of forward, as `notes` saw them, with the storages that each reads, makes and saves. Kept: nothing. Out:
bytes and FLOPs under the policies that are asked for. No code of the user's runs again.

The rules are those of `dispatch`:
1. Replay has the region's inputs, and what the steps make that it runs.
2. A call that it skips keeps what it saves, but for what replay has in place; and those of its results that replay
   reads.
3. Without a policy for aten ops replay runs all that it does not skip, up to the last tensor that backward needs; with
   one it runs what makes something that is needed.
Not in the prices: random state, and that an offloader may decline a tensor for another reason than its size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch_remat.policies.decision import CheckpointPolicy


@dataclass
class Step:
    """One aten op of a region's forward that computes something; storages have numbers of their own."""

    op: str  # as ``aten.mm.default``; empty for the end of a call, at which a custom Function saves
    call: str  # the call that it ran in; empty outside of any
    inner: bool = False  # whether it ran in a region inside
    line: str = ""  # where the user's code called it, as ``model.py:12``
    reads: Collection[int] = ()  # the storages of its arguments
    makes: Collection[int] = ()  # those of its new results
    before: set[int] = field(default_factory=set)  # what autograd saved of its arguments, before it ran
    after: set[int] = field(default_factory=set)  # what it saved of results, or a call that ends here
    flops: int = 0

    def as_reader(self) -> str:
        """Return in words what reads something here in replay."""
        if self.call:
            return f"the replay of {self.call}"
        return "the replay of an inner region" if self.inner else f"{SOME_OP} ({self.op.split('.')[1]})"


SOME_OP = "an op in replay"
"""The reader of a tensor, where no more is known of it."""


class Cost(NamedTuple):
    """What a region keeps under some policies, without its inputs, and what its replay runs."""

    bytes: int  # in place
    offloaded_bytes: int
    flops: int  # of replay
    ran: Sequence[Step]  # to which replay comes, in order; of the last it may need no more than what is saved
    # A step of replay that would read the result of a handle, which is an error, and that handle.
    refused: tuple[Step, str] | None = None


class Prices(NamedTuple):
    """The log of a region's forward."""

    steps: Sequence[Step]
    sizes: Mapping[int, int]  # the bytes of each storage
    inputs_away: Collection[int]  # the region's inputs that are elsewhere
    by_policy: Mapping[int, bool] | None  # what a policy for aten ops keeps, and whether elsewhere; None without one
    handles: Collection[str]  # the calls whose results only calls may read in replay
    least: int  # from how many bytes on tensors are offloaded

    def under(self, policies: Mapping[str, CheckpointPolicy]) -> Cost:
        """Return what the region costs with policies for its calls, by name."""
        lacks: dict[int, Step] = {}  # what skipped steps have made
        kept: set[tuple[int, bool]] = {(number, True) for number in self.inputs_away}
        kept_by_policy = self.by_policy or {}

        def keep(number: int, step: Step) -> None:
            away = policies.get(step.call) is CheckpointPolicy.OFFLOAD and self.sizes[number] >= self.least
            kept.add((number, away if step.call else kept_by_policy.get(number, False)))

        def skips(step: Step) -> bool:
            if step.call:
                return policies.get(step.call) is not CheckpointPolicy.RECOMPUTE
            return any(number in kept_by_policy for number in step.makes)

        for step in self.steps:
            if skips(step):
                lacks.update(dict.fromkeys(step.makes, step))
                for number in step.before | step.after:
                    if number in lacks or number in self.inputs_away:
                        keep(number, step)
        needed: set[int] = set()
        ran: list[Step] = []
        flops, refused, reached = 0, None, False
        for step in self.steps[::-1]:
            if skips(step):
                elided = (step.before | step.after) - lacks.keys() - set(self.inputs_away)
                for number in needed.intersection(step.makes):
                    keep(number, step)
                needed |= elided
                reached = reached or bool(elided)
                continue
            runs = reached if self.by_policy is None else not needed.isdisjoint(step.makes)
            needed |= step.before | step.after
            if runs or step.before or step.after:
                ran.append(step)
            if runs or step.after:
                flops += step.flops
                needed.update(step.reads)
                read = (lacks[number].call for number in step.reads if number in lacks)
                if self.by_policy is None and not (step.call or step.inner):
                    refused = next(((step, call) for call in read if call in self.handles), refused)
            reached = reached or runs or bool(step.before or step.after)
        in_place, away = (sum(self.sizes[one] for one, is_away in kept if is_away is where) for where in (False, True))
        return Cost(in_place, away, flops, ran[::-1], refused)
