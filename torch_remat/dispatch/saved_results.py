"""The results that a policy saves, until the end of forward tells which of them are needed.

In: what saved calls returned and wrote. Kept, until forward ends: these tensors, and their version counters once their
op was over. Out: slots for those that replay reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch

from torch_remat._compat import without_dispatch_modes
from torch_remat.dispatch.calls import Meta, tensors_in
from torch_remat.dispatch.policy_call import ONE, WRITTEN, PolicyCall, SkippedOp
from torch_remat.dispatch.record import Slot
from torch_remat.dispatch.same_storage import in_same_storage
from torch_remat.policies.decision import CheckpointPolicy

if TYPE_CHECKING:
    from torch_remat.dispatch.forward_ops import ForwardOps
    from torch_remat.dispatch.storages import Storages


class SavedResults:
    """The saved results of one forward.

    Args:
        ops: The ops of the region.
        storages: The storages of the forward.
        allow_mutation: Whether a kept tensor may be changed in place.

    Attributes:
        unread: Calls whose changes autograd counts only once they are over.
    """

    __slots__ = (
        "_aliases",
        "_allow_mutation",
        "_changed",
        "_changed_ids",
        "_ops",
        "_results",
        "_storages",
        "_versions",
        "unread",
    )

    def __init__(self, ops: ForwardOps, storages: Storages, allow_mutation: bool) -> None:
        self.unread: list[PolicyCall] = []
        self._ops = ops
        self._storages = storages
        self._allow_mutation = allow_mutation
        # What saved calls returned and wrote, and the version counters of these tensors then, by their ids.
        self._results: dict[PolicyCall, Any] = {}
        self._changed: dict[PolicyCall, list[torch.Tensor]] = {}
        self._versions: dict[tuple[PolicyCall, int], int] = {}
        self._changed_ids: dict[int, bool] = {}  # whether they have been changed since, at the end of forward
        self._aliases: dict[PolicyCall, torch.Tensor] = {}  # of results that autograd has saved, without their history

    def note_new(self, call: PolicyCall, result: Any) -> None:
        """Note what a call returned that made new tensors and did nothing else."""
        self._results[call] = result
        for tensor in (result,) if call.kind == ONE else result:
            if not tensor.is_inference():
                self._versions[call, id(tensor)] = tensor._version

    def note(self, call: PolicyCall, result: Any, changed: list[torch.Tensor] | None = None) -> None:
        """Note what any other call returned, and the arguments that it changed."""
        self._results[call] = result
        self.unread.append(call)
        if changed is not None:
            self._changed[call] = changed

    def note_named(self, call: PolicyCall, place: int, tensor: torch.Tensor) -> None:
        """Note one result that is saved because of the name that it was given."""
        if place == WRITTEN:
            self._changed.setdefault(call, [tensor])
        elif call not in self._results:
            self._results[call] = {place: tensor}
        elif type(self._results[call]) is dict:
            self._results[call][place] = tensor
        self._versions[call, id(tensor)] = tensor._version

    def note_alias(self, call: PolicyCall, tensor: torch.Tensor, alias: torch.Tensor) -> None:
        """Note an alias that autograd keeps of a tensor, if it is the result of a call: the slot may keep the same."""
        if self._results.get(call) is tensor:
            self._aliases[call] = alias

    def read_versions(self) -> None:
        """Read the version counters, now that the calls are over."""
        for call in self.unread:
            for tensor in tensors_in([self._results.get(call), self._changed.get(call)], {}):
                self._versions[call, id(tensor)] = tensor._version
        self.unread = []

    def let_go_of_graph(self) -> None:
        """At the end of forward: hold results without their history, since what only they reach needs no replay."""
        for results in (self._results, self._changed):
            for call, kept in results.items():
                results[call] = self._without_history(call, kept)
        self._aliases = {}
        self._storages.let_go_of_graph()

    def _without_history(self, call: PolicyCall, kept: Any) -> Any:
        if isinstance(kept, torch.Tensor):
            alias = self._aliases.get(call) if self._aliases else None
            if alias is None or kept is not self._results.get(call):
                alias = kept.detach()
            if (version := self._versions.get((call, id(kept)))) is not None and kept._version != version:
                self._changed_ids[id(alias)] = True
            return alias
        if isinstance(kept, dict):
            return {place: self._without_history(call, item) for place, item in kept.items()}
        return [self._without_history(call, item) for item in kept] if isinstance(kept, (list, tuple)) else kept

    def undecided(self) -> Iterator[tuple[str, str, torch.Tensor, CheckpointPolicy]]:
        """Yield op, name, tensor and policy of each result."""
        for call, results in list(self._results.items()):
            if isinstance(results, torch.Tensor):
                results = [results]
            for place, result in results.items() if isinstance(results, dict) else enumerate(results):
                if isinstance(result, torch.Tensor):
                    policy = CheckpointPolicy.OFFLOAD if place in call.away else CheckpointPolicy.SAVE
                    yield call.native, call.label(place), result, policy

    def keep(self, call: PolicyCall, places: Collection[int]) -> None:
        """Keep results of a call, and what it wrote, in slots."""
        results = self._results.get(call, ())
        if call.kind == ONE:
            call.kept = {
                0: self._slot(call, 0, results if isinstance(results, torch.Tensor) else results[0], call.results)
            }
            return
        kept = dict(call.kept)
        for place in places:
            if place == WRITTEN:
                changed = self._changed[call]
                # What was given a name may be another view of what was written.
                meta = call.results if call.effects.returned == (0,) else None
                call.written = [self._slot(call, WRITTEN, tensor, meta) for tensor in changed]
                continue
            tensor = results if isinstance(results, torch.Tensor) else results[place]
            meta = call.results[place] if type(call.results) is list else call.results
            kept[place] = self._slot(call, place, tensor, meta)
        call.kept = kept

    def keep_views(self, call: SkippedOp) -> None:
        """Keep the outputs of an op with a handle that are views: replay would pass placeholders in their place."""
        made = {place for place, _ in call.made}
        for place, tensor in enumerate(self._results[call]):
            if place not in made:
                call.kept = {**call.kept, place: self._slot(call, place, tensor, call.results[place])}

    def _slot(self, call: PolicyCall, place: int, tensor: torch.Tensor, meta: Any = None) -> Slot:
        changed = self._changed_ids.get(id(tensor), False) or self._storages.is_changed(call, tensor)
        aliases = self._storages.aliases_of(tensor)
        if (
            call.kind == ONE and not (changed or aliases or call.away or self._allow_mutation)
            and self._ops.region.hooks is None and meta.describes(tensor)
        ):  # fmt: skip
            return Slot.of_alias(tensor)
        if type(meta) is Meta and not meta.describes(tensor):
            # It was reshaped since, or it is a view that was given a name: the name is that of the whole.
            with without_dispatch_modes(), torch.no_grad():
                tensor = in_same_storage(tensor.detach(), meta.geometry, meta.dtype, *meta.like)
        policy = CheckpointPolicy.OFFLOAD if place in call.away else CheckpointPolicy.SAVE
        slot = self._ops.departures.slot_for(
            call.native, call.label(place), tensor, policy, False, self._allow_mutation
        )
        if not self._allow_mutation:
            if aliases and self._ops.region.hooks is None:
                slot.watch(aliases)
            if changed:
                slot.mark_changed()
        return slot
