"""Forward: a region's function runs for the first time, and its saved tensors become holders.

In: the user's function and arguments. Kept: a holder for each tensor that autograd saves. Out: the function's output,
with a hook on each of its nodes that starts the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

import torch
from torch.autograd.graph import saved_tensors_hooks

from torch_remat._compat import node_number
from torch_remat.dispatch.determinism import Values, value_function
from torch_remat.dispatch.holder import AUTOCAST_DTYPES, Holder, mark_changed, metadata_of, parameter_behind, read
from torch_remat.dispatch.mode import RematMode
from torch_remat.dispatch.options import Options
from torch_remat.dispatch.outputs import boundary_nodes, tensors_of
from torch_remat.dispatch.region import Region


def run_region(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options) -> Any:
    """Run a function as a checkpointed region and return its output."""
    region = Region(function, args, kwargs, options)
    mode = Recording(region)
    try:
        output = mode.run(function, args, kwargs, saved_tensors_hooks(mode.pack, read), mode.contexts())
        outputs = tensors_of(output, region)
        mode.finish()
    finally:
        mode.forget()
    for node in boundary_nodes(outputs, region.first_number):
        node.register_prehook(region.reach)
    return output


class Recording(RematMode):
    """The forward of a region. Its pack hook makes the holders and notes them on the tape.

    NOTE [ Changes after the save ]
    Autograd refuses a saved tensor that was changed in place later. A replay that stops early may not come to the
    change, so forward looks for it: at its end the version counter of each saved tensor must stand where it stood. A
    counter lives as long as a tensor that shares it. Small tensors are simply kept until then; of a
    large one a detached alias without data is.
    """

    replaying = False

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        self._first_number = region.first_number
        self._holders = region.tape.holders
        self._counters: list[torch.Tensor] = []
        value_of = value_function(region.options.determinism_check)
        self._values = None if value_of is None else Values(value_of)

    def contexts(self) -> list[AbstractContextManager[Any]]:
        """Return the contexts that forward runs in, besides the hooks."""
        region = self.region
        contexts: list[AbstractContextManager[Any]] = []
        if region.options.context_fn is not None:
            forward_context, region.replay_context = region.options.context_fn()
            contexts.append(forward_context)
        if region.op_log is not None:
            contexts.append(self.watch(region.op_log.forward))
        return contexts

    def pack(self, tensor: torch.Tensor) -> Holder:
        """Return the holder that autograd keeps instead of the tensor."""
        holder = Holder()
        self._holders.append(ref(holder))
        holder.region = self.region
        holder.metadata = metadata_of(tensor)
        owner = tensor._base
        if owner is None:
            owner = tensor
        if type(owner) is torch.Tensor and tensor.dtype not in AUTOCAST_DTYPES:
            holder.value = holder.origin = None
            holder.anchored = False
        else:
            holder.origin = origin = parameter_behind(owner)
            holder.anchored = anchored = origin is owner
            holder.value = None if not anchored else tensor if tensor is owner else tensor.detach()
        node = owner.grad_fn
        holder.producer = type(node)
        if owner.requires_grad if node is None else node_number(node) < self._first_number:
            self._look_outside(holder, owner)
        self._counters.append(owner if owner.nbytes <= _SMALL_BYTES else _counter_of(owner))
        if self._values is not None:
            self._values.add(holder, tensor, _keep_value)
        return holder

    def _look_outside(self, holder: Holder, owner: torch.Tensor) -> None:
        """Note where a saved tensor comes from that is older than the region, or a leaf."""
        inputs = self.region.inputs
        assert inputs is not None
        if inputs.contains(owner):
            holder.producer = type(None)  # replay passes inputs without their history
        elif holder.origin is None:
            holder.origin = ref(owner)

    def finish(self) -> None:
        """Close forward: see NOTE [ Changes after the save ], and forget random state that was not drawn from."""
        region = self.region
        if self._values is not None:
            self._values.flush(_keep_value)
        if region.rng is not None and not region.rng.keep_drawn():
            region.rng = None
        for reference, counter in zip(self._holders, self._counters, strict=True):
            holder = reference()
            if holder is not None and counter._version != holder.metadata[0]:
                mark_changed(holder)
        region.finished = True

    def forget(self) -> None:
        """Let go of what only forward needs; the graph may hold on to this mode, through its pack hook."""
        self._counters.clear()
        self._values = None
        if self.region.inputs is not None:
            self.region.inputs.forget_originals()


_SMALL_BYTES = 4096
_NOTHING = torch.empty(0)


def _counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares the version counter of another, but not its data."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return tensor
    alias = tensor.detach()
    alias.data = _NOTHING
    return alias


def _keep_value(holder: Holder, value: Any) -> None:
    holder.fingerprint = value
