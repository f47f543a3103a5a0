"""A native region in replay: its function runs again, and none of its arithmetic.

In: each aten op that the function asks for. Kept: nothing past the replay. Out: placeholders inside; outside, what
the region returned: kept tensors where replay reads them, else placeholders that run the region once more if
something reads them after all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from torch_remat._compat import dispatch_state, set_version, storage_key
from torch_remat.dispatch.again import Again
from torch_remat.dispatch.calls import (
    Meta,
    another_call,
    another_shape,
    answered,
    changed_arguments,
    is_kept_out,
    placeholder_for,
    still_there,
)
from torch_remat.dispatch.loose import after_loose, is_mirrored, is_remade_view, place_of, run_loose
from torch_remat.dispatch.placeholder import Placeholder, Source, constant, last_refusal, real, refuse
from torch_remat.dispatch.real_run import RealRun, may_run, warn_of_real_run
from torch_remat.dispatch.region.inputs import leaves_of, with_leaves
from torch_remat.dispatch.schema import effects_of
from torch_remat.dispatch.suppressed import Suppressed
from torch_remat.dispatch.whole_call import warn_of_rerun

if TYPE_CHECKING:
    from torch_remat.dispatch.ambient import RngState
    from torch_remat.dispatch.record import NativeRecord, Slot
    from torch_remat.dispatch.region.replay import Filling

_NOTHING: frozenset[int] = frozenset()


class NativeReplay:
    """One native region with policy SAVE, in one replay.

    Args:
        mode: The replay's mode.
        record: The region's record.
        suppressed: The writes that are not done again.
        function: What runs inside.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(
        self,
        mode: Filling,
        record: NativeRecord,
        suppressed: Suppressed,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.record = record
        self._mode = mode
        self._region_name = mode.region.name
        self._calls = record.calls
        self._at = 0
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._written: list[tuple[torch.Tensor, Slot]] = []
        self._slots = {written.place: written.slot for written in record.written}
        self._remakes = False  # whether a placeholder was changed in place, whose views autograd makes anew
        self._suppressed = suppressed
        self._outside = still_there(written.storage for written in record.written) if record.written else _NOTHING
        self._again: Again | None = None
        self._real: RealRun | None = None
        self._start = mode.position, last_refusal.get()
        self._counted: list[tuple[torch.Tensor, int]] = []  # what was changed in place, with the versions from before
        rng = mode.region.rng
        present: RngState | None = None if record.drawn is None or rng is None else rng.present()
        self._began = present, dispatch_state(), torch.is_grad_enabled()

    def answer(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answer an op without running it."""
        effects = effects_of(op)
        if effects.plain and self._at < len(self._calls) and not (self._suppressed.pending or self._real):
            call = self._calls[self._at]
            if call.op is op and type(call.results) is Meta and not call.results.alias:
                if call.outside:
                    self._check_shapes(self._at, args)
                self._at += 1  # what most ops are, without the questions of the others
                slot = self.record.returned.get(call.returned)
                if slot is not None and (value := slot.unchanged()) is not None:
                    return value  # the region returns it, so that it need not go through a placeholder
                return self._stand_in(self._at - 1, 0, call.results)
        if is_kept_out(effects, args):
            return op(*args, **kwargs)
        calls = self._calls
        at = place_of(op, effects, calls, self._at)
        remade = self._remakes and at is not None and at < len(calls)
        if at is None or (remade and is_remade_view(calls[at], op, effects, args, kwargs)):
            return run_loose(op, args, kwargs)
        if at >= len(calls) or (calls[at].op is not op and not is_mirrored(calls[at].op, op)):
            self._mode.fail(another_call(self._mode.region, self.record.name, at, calls, op))
        self._at = at + 1
        if calls[at].outside and calls[at].op is op:
            self._check_shapes(at, args)
        if self._suppressed.pending:
            self._suppressed.restore()
        if effects.written or effects.namespace != "aten":
            written = changed_arguments(calls[at], effects, args, kwargs)
            self._suppressed.add(written, self._outside)
            for place, tensor in enumerate(written):
                if not tensor.is_inference():
                    self._counted.append((tensor, tensor._version))
                self._remakes = self._remakes or isinstance(tensor, Placeholder)
                slot = self._slots.get((at, place))
                if slot is not None:
                    self._written.append((tensor, slot))
        if self._real is not None:
            return self._real.run(op, args, kwargs, effects, calls[at].results)
        return answered(calls[at], effects, args, kwargs, partial(self._stand_in, at))

    def starts_over(self, error: Exception) -> bool:
        """Go back to the start, to run the ops, where an error may be of what placeholders lack; else return False."""
        record, region, (position, refusal) = self.record, self._mode.region, self._start
        if self._real is not None or record.once or not may_run(region, self._calls, error):
            return False
        if record.raised and self._at == len(self._calls) and last_refusal.get() is refusal:
            return False  # as in forward
        if not record.warned:
            record.warned = True
            warn_of_real_run(region.name, record.name, "this native region", error)
        last_refusal.set(refusal)
        self._suppressed.restore()
        for tensor, version in reversed(self._counted):
            set_version(tensor, version)
        present, state, grad_enabled = self._began
        if present is not None:
            present.restore()
        self._mode.position = position
        self._at = 0
        self._written = []
        self._real = RealRun(Again(self._function, self._args, self._kwargs, -1, None, state, grad_enabled))
        return True

    def arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the function's arguments, with the values of the placeholders among them that have one."""
        leaves = leaves_of(self._args, self._kwargs)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Placeholder) and leaf.compute is not None:
                leaves[place] = real(leaf, self.record.name).detach().requires_grad_(leaf.requires_grad)
                self._mode.note_loaded(leaves[place])
        return with_leaves(self._args, self._kwargs, leaves)

    def outside(self) -> Collection[int]:
        """Return what `key_of` gives for the tensors outside that forward has changed."""
        return self._outside

    def _check_shapes(self, at: int, args: Sequence[Any]) -> None:
        """Raise if an op gets a tensor from outside that is not the one of forward."""
        call = self._calls[at]
        for place, shape in call.outside:
            tensor = args[place] if place < len(args) else None
            if type(tensor) is torch.Tensor and tensor.shape != shape:
                self._mode.fail(another_shape(self._mode.region, self.record.name, at, call, shape, tensor.shape))

    def returns(self, result: Any) -> Any:
        """Return the function's result, with the kept tensors in place of their placeholders."""
        self._check_complete()
        self._end()
        returned = self.record.returned
        if isinstance(result, torch.Tensor):
            return self._load(0, result) if returned else result
        if not returned:
            return result
        leaves = leaves_of((result,), {})
        for place, leaf in enumerate(leaves):
            if place in returned:
                leaves[place] = self._load(place, leaf)
        return with_leaves((result,), {}, leaves)[0][0]

    def left_by_exception(self) -> None:
        """Note that an exception left the function; if one did in forward too, it must be at the same place."""
        if self.record.raised:
            self._check_complete()
            self._end()

    def forget(self) -> None:
        """Let go of the function and its arguments; a placeholder may outlive the replay and know them."""
        self._real = None
        self._counted = []
        self._function = _gone
        self._args, self._kwargs = (), {}
        self._again = None

    def _check_complete(self) -> None:
        self._at = after_loose(self._calls, self._at)
        if self._at != len(self._calls):
            self._mode.fail(another_call(self._mode.region, self.record.name, self._at, self._calls, None))

    def _end(self) -> None:
        """Leave the generators, and the recomputed tensors that the function changed, as forward left them."""
        record = self.record
        self._suppressed.restore()
        if record.drawn is not None:
            record.drawn.restore()
        for tensor, slot in self._written:
            if not isinstance(tensor, Placeholder):
                if storage_key(tensor) not in self._outside:
                    value = slot.load(self._mode.region, record.name, "written")
                    # Through `data`, since the change has been counted.
                    if tensor.shape == value.shape:
                        tensor.data.copy_(value)
                    else:  # it was resized
                        tensor.data = value.detach().clone()
            else:
                value = slot.load(self._mode.region, record.name, "written")
                tensor.compute = partial(constant, value)

    def _load(self, place: int, leaf: Any) -> Any:
        slot = self.record.returned.get(place)
        if slot is None or not (isinstance(leaf, Placeholder) or self._real):
            return leaf
        tensor = slot.load(self._mode.region, self.record.name, self.record.output_name(place))
        self._mode.note_loaded(tensor)
        return tensor

    def _stand_in(self, at: int, place: int, meta: Meta) -> torch.Tensor:
        source = Source(self._region_name, self.record.name, self._calls[at].label(place))
        made = placeholder_for(meta, source)
        made.compute = partial(self._compute, at, place)
        return made

    def compute_output(self, op: str, place: int, consumer: str) -> torch.Tensor:
        """Run the region once more, and return the output of an op with a handle in it."""
        outputs = self._run_again(f"{op}.{place}", consumer).outputs.get(op)
        if outputs is None:  # the second run ended before it came to the op
            refuse(Source(self._region_name, self.record.name, f"{op}.{place}"), consumer)
        return outputs[place]

    def _run_again(self, tensor: str, consumer: str) -> Again:
        """Run the region once more, as far as it has come."""
        if self._again is None or self._again.end < self._at:
            if self.record.once or self._function is _gone:
                refuse(Source(self._region_name, self.record.name, tensor), consumer)
            warn_of_rerun(self._region_name, self.record, tensor, consumer)
            self._again = Again(self._function, self._args, self._kwargs, self._at, *self._began)
            ops = self._mode.ops
            assert ops is not None
            ops.run_skipped(self._again)
        return self._again

    def _compute(self, at: int, place: int, consumer: str) -> torch.Tensor:
        result = self._run_again(self._calls[at].label(place), consumer).results[at]
        value: torch.Tensor = result if isinstance(result, torch.Tensor) else result[place]
        return value.detach()


def _gone() -> None:
    """Stand for the function once the replay is over."""
