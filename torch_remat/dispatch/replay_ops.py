"""The ops of a region in replay: placeholders, slots, and the tensors that SAVE ops wait for.

In: the tape's records. Kept: nothing past the replay. Out: the same ops in the same order, or an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from torch_remat.dispatch.inputs import leaves_of, with_leaves
from torch_remat.dispatch.mismatch import mismatched
from torch_remat.dispatch.op import Op
from torch_remat.dispatch.placeholder import Placeholder, Source, refuse
from torch_remat.dispatch.policy import CheckpointPolicy
from torch_remat.dispatch.record import Elided, Record
from torch_remat.errors import MismatchError

if TYPE_CHECKING:
    from torch_remat.dispatch.replay import Filling

_SAME_ORDER = (
    "The ops of a region must have the same names and policies in the same order in both phases: derive names from the "
    "code's structure, not from counters or other state."
)


class ReplayOps:
    """The ops of one replay.

    Args:
        mode: The replay's mode.
    """

    def __init__(self, mode: Filling) -> None:
        self.region = mode.region
        self._mode = mode
        self._records = list(mode.region.tape.records.values())
        self._next = 0
        self._loaded: dict[int, torch.Tensor] = {}  # by id, kept so that no other tensor gets the id
        self._regions = 0

    def begin(self, name: str, policy: CheckpointPolicy) -> Op:
        """Begin an op; see `RematMode.begin_op`."""
        place = self._next
        expected = self._records[place] if place < len(self._records) else None
        if expected is None or expected.name != name:
            return self._mode.fail(self._another_op(name, expected))
        if expected.policy is not policy:
            self._mode.fail(
                mismatched(
                    self.region,
                    f"this op has policy {policy.name} in replay and had {expected.policy.name} in forward",
                    _SAME_ORDER,
                    op=name,
                )
            )
        self._next = place + 1
        return ReplayOp(self, expected)

    def finish(self) -> None:
        """Raise if the replay ended before it came to each op."""
        if self._next < len(self._records):
            missing = self._records[self._next]
            raise mismatched(self.region, "this op of forward is missing in replay", _SAME_ORDER, op=missing.name)

    def load_inputs(self, record: Record, args: Iterable[Any], consumer: str) -> list[Any]:
        """Return inputs with the placeholders among them replaced by what the slots keep.

        Raises:
            PlaceholderError: An input is a placeholder that forward did not foresee.
            MutationError: A kept input was changed in place.
        """
        loaded = list(args)
        slots = record.slots
        for place, arg in enumerate(loaded):
            slot = slots.get(place) if slots else None
            if slot is not None:
                tensor = slot.load(self.region, record.name or consumer, place)
                loaded[place] = self._loaded[id(tensor)] = tensor
            elif isinstance(arg, Placeholder):
                refuse(arg.source, consumer)
        return loaded

    def has_loaded(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor came from a slot, so that it has no history in replay."""
        return id(tensor) in self._loaded

    def enter_region(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return an inner region's arguments with the placeholders among them replaced."""
        if self._next == 0:
            return args, kwargs  # before the first op there is nothing that replay would not have
        place = self._regions
        self._regions = place + 1
        regions = self.region.tape.regions
        if place >= len(regions):
            self._mode.fail(mismatched(self.region, "replay runs more inner regions than forward", _SAME_ORDER))
        if not regions[place].slots:
            return args, kwargs
        leaves = self.load_inputs(regions[place], leaves_of(args, kwargs), "inner region")
        return with_leaves(args, kwargs, leaves)

    def fill_elided(self, waiting: Iterable[Elided], sources: tuple[Any, ...]) -> None:
        """Give the holders that wait for an op's inputs or outputs their values."""
        for elided in waiting:
            holder = elided.holder()
            if holder is not None and holder.value is None:
                source = sources[elided.place]
                if isinstance(source, Placeholder):
                    refuse(source.source, f"op {holder.op!r}")
                self._mode.fill_elided(holder, elided.value(source))

    def _another_op(self, name: str, expected: Record | None) -> MismatchError:
        if expected is None or name not in self.region.tape.records:
            return mismatched(self.region, "replay runs this op, forward did not", _SAME_ORDER, op=name)
        return mismatched(
            self.region,
            f"replay runs this op where forward ran {expected.name!r}",
            _SAME_ORDER,
            op=name,
        )


class ReplayOp(Op):
    """An op in replay."""

    def __init__(self, ops: ReplayOps, record: Record) -> None:
        self._ops = ops
        self._record = record

    def load(self, ctx: Any, args: tuple[Any, ...]) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
        """Return placeholders for the outputs of a SAVE op, and leave the generators where its body left them."""
        record = self._record
        if record.policy is not CheckpointPolicy.SAVE:
            return None
        if record.elided_inputs:
            self._ops.fill_elided(record.elided_inputs, args)
        if record.drawn is not None:
            record.drawn.restore()
        region = self._ops.region.name
        outputs = tuple([output.placeholder(region, record.name) for output in record.outputs])
        plain = [out for out, kept in zip(outputs, record.outputs, strict=True) if not kept.differentiable]
        if plain:
            ctx.mark_non_differentiable(*plain)
        # The graph of the replay has nothing that this op's backward could work on.
        source = Source(region, record.name, record.outputs[0].name)
        ctx.register_prehook(partial(_refuse_backward, source))
        return outputs if record.as_tuple else outputs[0]

    def inputs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace the inputs that are placeholders by the kept ones."""
        return tuple(self._ops.load_inputs(self._record, args, self._record.name))

    def outputs(self, ctx: Any, outputs: tuple[torch.Tensor, ...], as_tuple: bool) -> tuple[torch.Tensor, ...]:
        """Fill the holders that wait for these outputs."""
        if self._record.elided_outputs:
            self._ops.fill_elided(self._record.elided_outputs, outputs)
        return outputs


def _refuse_backward(source: Source, _grad_outputs: Sequence[torch.Tensor | None]) -> None:
    refuse(source, "a gradient taken inside the region")
