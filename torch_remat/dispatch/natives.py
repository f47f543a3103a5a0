"""The native regions of one region's forward, and which of their results replay reads.

In: native regions as they run, and the tensors that autograd saves in between. Kept until forward ends: aliases of
what they returned. Out: slots on the tape for what replay reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from torch_remat._compat import node_number, sequence_number
from torch_remat.dispatch.calls import key_of
from torch_remat.dispatch.holder import Anchor, Holder, OpHolder
from torch_remat.dispatch.native import Native
from torch_remat.dispatch.native_forward import NativeForward
from torch_remat.dispatch.readers import read_outputs
from torch_remat.dispatch.whole_call import WholeCall

if TYPE_CHECKING:
    from torch_remat.dispatch.forward_ops import ForwardOps
    from torch_remat.dispatch.record import NativeRecord, WholeCallRecord
    from torch_remat.policies.decision import CheckpointPolicy


class Natives:
    """The native regions of one forward.

    Args:
        ops: The ops of the region.

    Attributes:
        running: The native region that runs.
        skipped: The ranges of sequence numbers of autograd nodes that replay skips, so that they read nothing.
    """

    def __init__(self, ops: ForwardOps) -> None:
        self.running: Native | None = None
        self.skipped: list[tuple[int, int]] = []
        self._ops = ops
        self._finished: list[Native] = []
        # For each tensor that is saved outside: its place on the tape, and the number of the first autograd node that
        # replay does not come to if this is the last tensor that it fills.
        self._stops: list[tuple[int, int]] = []
        self._returned: dict[int, list[tuple[Native, int]]] = {}  # by their storages
        # What replay fills from inputs and outputs of ops, likewise; at that node it has come by them.
        self._elided: list[tuple[ref[OpHolder], int]] = []
        # Returned tensors that are saved outside, each with that number.
        self._saved: list[tuple[int, Native, int]] = []

    def run(
        self,
        record: NativeRecord,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a native region with policy SAVE."""
        native = NativeForward(self._ops, record)
        self.running = native
        try:
            result = self._ops.mode.watched(native.watch, function, args, kwargs)
            native.returns(result)
        except BaseException as error:
            native.left_by(error)
            raise
        finally:
            self._end(native)
        return result

    def run_whole(
        self, record: WholeCallRecord, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a native region with policy SAVE that is one call of a function of torch's own."""
        native = WholeCall(self._ops, record, args, kwargs)
        self.running = native
        try:
            result = function(*args, **kwargs)
            native.returns(result)
        except BaseException as error:
            native.left_by(error)
            raise
        finally:
            self._end(native)
        return result

    def _end(self, native: Native) -> None:
        self.running = None
        if native.views:
            return
        self.skipped.append((native.first_number, native.last_number))
        self._finished.append(native)
        for index, returned in enumerate(native.returned):
            self._returned.setdefault(returned.key, []).append((native, index))

    def maker_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the native region that returned a tensor, or one that shares its storage."""
        returned = self._returned.get(key_of(tensor))
        return returned[0][0].record.name if returned else None

    def source_of(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """Return the name of that native region, and the tensor's place among what it returned."""
        returned = self._returned.get(key_of(tensor))
        if not returned:
            return None
        native, index = returned[0]
        return native.record.name, native.returned[index].place

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether a native region made a tensor: one that has run and returned it, or the one that runs."""
        return self.maker_of(tensor) is not None or (self.running is not None and self.running.made(tensor))

    def pack(self, tensor: torch.Tensor) -> Holder | Anchor | None:
        """Return the holder for a tensor that a running native region keeps, else None."""
        if self.running is not None:
            return self.running.pack(tensor)
        place = len(self._ops.region.tape.saved)
        node = tensor.grad_fn
        number = sequence_number()
        # A result is saved once its op has run, all else before. Of a tensor without a history nobody knows.
        has_run = node is None or node_number(node) == number - 1
        number = number if has_run else number - 1
        self._stops.append((place, number))
        for native, index in self._returned.get(key_of(tensor), ()):
            self._saved.append((number, native, index))
        return None

    def note_elided(self, holder: OpHolder) -> None:
        """Note a holder that replay fills from an input or an output of an op, which is over by now."""
        self._elided.append((ref(holder), sequence_number()))

    def undecided(self) -> Iterator[tuple[str, str, torch.Tensor, CheckpointPolicy]]:
        """Yield op, name, tensor and policy of what the native regions that are over have returned."""
        for native in self._finished:
            record = native.record
            for returned in native.returned:
                yield record.name, record.output_name(returned.place), returned.tensor, record.policy

    def keep_returned(self, boundary: Sequence[torch.autograd.graph.Node | None]) -> None:
        """At the end of forward: keep what replay reads of what the native regions returned."""
        tape = self._ops.region.tape
        hooks = self._ops.region.hooks
        last = tape.last_that_may_be_needed(hooks)
        stop = self._stop(last)
        for number, native, index in self._saved:
            if number <= stop:  # also where the graph of what saved it is gone: replay runs it all the same
                native.read.add(index)
        outputs = {
            (returned.node, returned.output): (native, index)
            for native in self._finished
            for index, returned in enumerate(native.returned)
            if returned.node is not None and index not in native.read
        }
        if outputs and stop:
            first = self._finished[0].first_number
            for native, index in read_outputs(boundary, outputs, first, stop, self.skipped):
                native.read.add(index)
        for native in self._finished:
            native.keep(stop)
        self._accept_changes()

    def _accept_changes(self) -> None:
        """Let the region's inputs be as native regions have left them: replay does not change them again."""
        changes: dict[int, int] = {}
        for native in self._finished:
            for key, times in native.changes.items():
                changes[key] = changes.get(key, 0) + times
        if changes and self._ops.region.inputs is not None:
            self._ops.region.inputs.accept_changes(lambda tensor, times: changes.get(key_of(tensor)) == times)

    def _stop(self, last: int) -> int:
        """Return the number of the first autograd node that replay does not come to."""
        region = self._ops.region
        hooked = region.hooks is not None
        elided = [number for holder, number in self._elided if hooked or holder() is not None]
        if not region.options.early_stop and (last >= 0 or (region.tape.elided if hooked else self._any_elided())):
            return sequence_number()
        return max([number for place, number in self._stops if place <= last] + elided, default=0)

    def _any_elided(self) -> bool:
        return any(holder() is not None for holder in self._ops.region.tape.elided)
