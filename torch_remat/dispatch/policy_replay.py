"""A region with a policy for its ops, in replay: only the ops run whose results are needed and not kept.

In: each aten op that the region's function asks for. Kept: nothing past the replay. Out: kept and recomputed results,
placeholders for what nobody needs.

NOTE [ Writes to what outlives the region ]
A buffer, a cache or a counter that forward changed is changed already: replay does not change it again, also if it is
needed. It is the tensor whose storage is that of forward. Its version counter, which autograd moves on all the same, is
put back.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torch_remat._compat import dispatch_state, kernel_of
from torch_remat.dispatch.again import Again
from torch_remat.dispatch.calls import (
    Meta,
    another_call,
    answered,
    changed_arguments,
    is_kept_out,
    key_of,
    layout_of,
    other_arguments,
    placeholder_for,
    plain_layout,
    still_there,
    tensors_in,
)
from torch_remat.dispatch.earlier import as_it_was, earlier_label, with_tensors
from torch_remat.dispatch.loose import after_loose, is_mirrored, is_remade_view, place_of, run_loose
from torch_remat.dispatch.placeholder import Placeholder, Source, constant, real, refuse
from torch_remat.dispatch.policy_call import ONE, VIEW, PolicyCall, SkippedOp
from torch_remat.dispatch.record import Slot
from torch_remat.dispatch.same_storage import offset_in_bytes, view_of
from torch_remat.dispatch.schema import WRITES_WITHOUT_SAYING, effects_of
from torch_remat.dispatch.suppressed import Suppressed
from torch_remat.errors import MutationError, RematWarning, user_line

if TYPE_CHECKING:
    from torch_remat.dispatch.record import Record
    from torch_remat.dispatch.region.replay import Filling


class _Left(NamedTuple):
    """What a saved write left in all of a placeholder's storage.

    Attributes:
        source: What the placeholder stands for.
        value: What was written, and kept.
        offset_in_bytes: Where the written tensor lies in the storage.
    """

    source: Source
    value: torch.Tensor
    offset_in_bytes: int

    def seen_as(self, meta: Meta) -> torch.Tensor:
        """Return a view of it."""
        return view_of(self.value, self.offset_in_bytes, meta.geometry, meta.dtype, *meta.like)


class PolicyReplay:
    """The ops of one replay of a region with a policy.

    Args:
        mode: The replay's mode.
        suppressed: The writes that are not done again.
    """

    def __init__(self, mode: Filling, suppressed: Suppressed) -> None:
        self._mode = mode
        self._region = mode.region
        self._region_name = mode.region.name
        self._calls = mode.region.tape.calls
        self._at = 0
        self._suppressed = suppressed
        self._state = dispatch_state()
        self._again: Again | None = None
        # The second: whether a placeholder was changed in place, whose views autograd makes anew.
        self._over = self._remakes = False
        # What saved writes left in placeholders, by the identity of the source, which all views of one share.
        self._left: dict[int, _Left] = {}
        inputs = self._region.inputs
        self._restored = inputs is not None and inputs.packed  # by hooks, which may count versions anew
        # Hooks around the region may run a replay of their own, which cannot be done below autograd.
        self._loaded: dict[int, torch.Tensor] = {}
        if self._region.hooks is not None:
            for call in self._calls:
                for place, slot in (*call.kept.items(), *((-1 - at, slot) for at, slot in enumerate(call.written))):
                    self._loaded[id(slot)] = slot.load(self._region, call.native, call.label(max(place, 0)))
                for at, slot in call.earlier.items():
                    if id(slot) not in self._loaded:
                        self._loaded[id(slot)] = slot.load(self._region, call.native, earlier_label(call, at))

    def answer(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an op, or answer it without."""
        next_at = self._at
        call = self._calls[next_at] if next_at < len(self._calls) else None
        if call is not None and call.op is op and call.kind:
            # What most ops are, without the questions of the others.
            if self._suppressed.pending:
                self._suppressed.restore()
            if call.run:
                same = not call.versions or self._reads_the_same(call, args)
                if same and not call.kept and Placeholder not in map(type, args):
                    self._at = next_at + 1
                    return kernel_of(op)(*args, **kwargs)
            elif call.kind == VIEW:
                if type(args[0]) is not Placeholder:
                    self._at = next_at + 1
                    return kernel_of(op)(*args, **kwargs)
            elif call.kind == ONE and (not call.layout or call.layout == plain_layout(args)):
                self._at = next_at + 1
                if call.kept and not self._loaded and (value := call.kept[0].unchanged()) is not None:
                    return value
                return self._stand_in(call, 0, call.results)
        effects = effects_of(op)
        if effects.ignored or (effects.cast and is_kept_out(effects, args)):
            return op(*args, **kwargs)
        if self._suppressed.pending:
            self._suppressed.restore()
        calls = self._calls
        at = place_of(op, effects, calls, self._at)
        remade = self._remakes and at is not None and at < len(calls)
        if at is None or (remade and is_remade_view(calls[at], op, effects, args, kwargs)):
            return run_loose(op, args, kwargs)
        if at >= len(calls) or (calls[at].op is not op and not is_mirrored(calls[at].op, op)):
            self._mode.fail(another_call(self._region, None, at, calls, op))
        self._at = at + 1
        call = calls[at]
        if call.op is not op:
            args = args[::-1]  # a comparison with its operands swapped
        if call.layout and (args_layout := layout_of(args, kwargs)) and call.layout != args_layout:
            self._mode.fail(other_arguments(self._region, call.native, at, call, call.layout, args_layout))
        if effects.written and any(isinstance(tensor, Placeholder) for tensor in tensors_in(args, kwargs)):
            self._remakes = True
        if call.run:
            return self._run(call, args, kwargs)
        if call.written:
            self._restore_written(call, args, kwargs)
        elif effects.written:
            self._suppressed.add(changed_arguments(call, effects, args, kwargs), still_there(call.outside))
        result = answered(call, effects, args, kwargs, partial(self._stand_in, call))
        if not (effects.written or effects.reshapes):
            for place, made in enumerate(result if isinstance(result, (list, tuple)) else (result,)):
                if isinstance(made, Placeholder) and made.compute is not None:
                    made.compute = partial(self._compute, made.source, call, place)  # a view has that of its base
        return result

    def finish(self) -> None:
        """Check at the function's end that all ops of forward have come."""
        self._at = after_loose(self._calls, self._at)
        if self._at != len(self._calls):
            raise another_call(self._region, None, self._at, self._calls, None)

    def outside(self) -> set[int]:
        """Return what `key_of` gives for the tensors outside of the region that forward has changed."""
        return still_there(storage for call in self._calls for storage in call.outside)

    def _run(self, call: PolicyCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        effects = call.effects
        if call.before is not None:
            call.before.restore()
        if any(isinstance(arg, Placeholder) for arg in args) or kwargs or any(type(arg) is list for arg in args):
            args, kwargs = _real_arguments(call, args, kwargs)
        if call.outside:
            written = changed_arguments(call, effects, args, kwargs)
            outside = still_there(call.outside)
            if outside and all(key_of(tensor) in outside for tensor in written):
                self._suppressed.add(written, outside)
                return answered(call, effects, args, kwargs, partial(self._stand_in, call))
        self._check_versions(call, args, kwargs, call.earlier)
        if call.earlier:
            args, kwargs = self._as_earlier(call, args, kwargs)
        if effects.name in WRITES_WITHOUT_SAYING:
            args = [None if place in (3, 4) and args[5] else arg for place, arg in enumerate(args)]
        result = call.op(*args, **kwargs)
        if not call.kept:
            return result
        if isinstance(result, torch.Tensor):
            return self._value(call, 0, call.kept[0])
        made = list(result)
        for place, slot in call.kept.items():
            made[place] = self._value(call, place, slot)
        return made if isinstance(result, list) else tuple(made)

    def load_op(self, record: Record) -> list[torch.Tensor | None]:
        """Return the outputs of an op with a handle that are kept, in order, and None for the others."""
        at = after_loose(self._calls, self._at, record)
        if at >= len(self._calls) or self._calls[at].op is not record:
            self._mode.fail(another_call(self._region, record.name, self._at, self._calls, record.name))
        self._at = at + 1
        call = self._calls[at]
        return [
            self._value(call, place, call.kept[place]) if place in call.kept else None
            for place in range(call.count_of_results)
        ]

    def _reads_the_same(self, call: PolicyCall, args: Sequence[Any]) -> bool:
        """Whether a call of one of the kinds gets the tensors from outside as they were in forward."""
        if call.earlier:
            return False
        if self._restored:
            return True
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        return all(tensors[at]._version == version for at, version in call.versions)

    def _as_earlier(
        self, call: PolicyCall, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments of a call as they were before a later one changed them."""
        given = list(tensors_in(args, kwargs))
        tensors = {}
        for at, slot in call.earlier.items():
            loaded = self._loaded.get(id(slot))
            copy = slot.load(self._region, call.native, earlier_label(call, at)) if loaded is None else loaded
            tensors[at] = as_it_was(given[at], copy)
        return with_tensors(args, kwargs, tensors)

    def _check_versions(
        self, call: PolicyCall, args: Sequence[Any], kwargs: Mapping[str, Any], passed: Container[int] = ()
    ) -> None:
        """Raise if an op that runs again would read something else than in forward."""
        if not call.versions or self._restored:
            return
        tensors = list(tensors_in(args, kwargs))
        for at, version in call.versions:
            if tensors[at]._version != version and at not in passed:
                raise MutationError(
                    f"{call.op} runs again in replay and reads a tensor from outside the region (argument {at}, shape "
                    f"{tuple(tensors[at].shape)}), which was changed in place since it ran in forward",
                    region=self._region_name,
                    op=call.native,
                    tensor=call.label(0),
                    remedy="Let the op read a clone, or let the policy save its result.",
                )

    def _restore_written(self, call: PolicyCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Leave in the written arguments what forward left there."""
        outside = still_there(call.outside)
        for tensor, slot in zip(changed_arguments(call, call.effects, args, kwargs), call.written, strict=True):
            if isinstance(tensor, Placeholder):
                value = self._value(call, 0, slot)
                tensor.compute = partial(constant, value)
                self._left[id(tensor.source)] = _Left(tensor.source, value, offset_in_bytes(tensor))
            elif key_of(tensor) in outside:
                self._suppressed.add([tensor], outside)
            else:
                tensor.copy_(self._value(call, 0, slot))

    def _stand_in(self, call: PolicyCall, place: int, meta: Meta) -> torch.Tensor:
        slot = call.kept.get(place)
        if slot is not None:
            return self._value(call, place, slot)
        made = placeholder_for(meta, Source(self._region_name, call.native, call.label(place)))
        made.compute = partial(self._compute, made.source, call, place)
        return made

    def may_fill(self) -> bool:
        """Whether the op that comes next may write what was just saved for it."""
        call = self._calls[self._at] if self._at < len(self._calls) else None
        return call is not None and not call.kind

    def forget(self) -> None:
        """Let go of the region; a placeholder may outlive the replay."""
        self._over = True
        self._again = None
        self._left = {}

    def _compute(self, source: Source, call: PolicyCall, place: int, consumer: str) -> torch.Tensor:
        """Return what a placeholder stands for: what a saved write has left there, or the result of an op.

        For that the region's function runs once more, as far as it has come. Something reads the result past all ops,
        as ``tolist()`` does, so that forward did not see it.
        """
        left = self._left.get(id(source))
        if left is not None:
            meta = call.results[place] if type(call.results) is list else call.results
            return left.seen_as(meta)
        region = self._region
        ran = [known for known in self._calls[: self._at] if type(known) is not SkippedOp]
        if self._again is None or self._again.end < len(ran):
            random = any(known.effects.random for known in ran)
            if self._over or region.inputs is None or region.function is None or (random and region.rng is None):
                refuse(Source(self._region_name, call.native, call.label(place)), consumer)
            if _reads_what_it_wrote(ran) or any(known.earlier for known in ran):
                refuse(Source(self._region_name, call.native, call.label(place)), consumer)
            warn_of_policy_rerun(self._region_name, call.label(place), consumer)

            def check(at: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
                self._check_versions(ran[at], args, kwargs)

            args, kwargs = region.inputs.restore(region)
            self._again = Again(region.function, args, kwargs, len(ran), region.rng, self._state, True, check)
            ops = self._mode.ops
            assert ops is not None
            ops.run_skipped(self._again)
        result = self._again.results[ran.index(call)]
        value: torch.Tensor = result if isinstance(result, torch.Tensor) else result[place]
        return value.detach()

    def _value(self, call: PolicyCall, place: int, slot: Slot) -> torch.Tensor:
        loaded = self._loaded.get(id(slot))
        return slot.load(self._region, call.native, call.label(place)) if loaded is None else loaded.detach()


def _real_arguments(
    call: PolicyCall, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    consumer = str(call.op)

    def resolved(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [real(item, consumer) for item in value]
        return real(value, consumer)

    return [resolved(arg) for arg in args], {name: resolved(value) for name, value in kwargs.items()}


def _reads_what_it_wrote(calls: Sequence[PolicyCall]) -> bool:
    """Whether a call reads what one before it has changed outside of the region: it would read other values again."""
    written: set[int] = set()
    for call in calls:
        if written.intersection(call.reads):
            return True
        written.update(storage.cdata for storage in call.outside)
    return False


def warn_of_policy_rerun(region: str, tensor: str, consumer: str) -> None:
    """Tell the user that replay runs a region once more, past its policy."""
    file, line = user_line()
    warnings.warn(
        f"{region}::{tensor}: {consumer} at {file}:{line} reads this tensor past all ops, so that forward did not see "
        "it and the region's policy kept nothing: replay runs the region once more up to here. Let the policy "
        "save the tensor, or read it with .item(), which is an op.",
        RematWarning,
        stacklevel=3,
    )
