"""Forward: a region's function runs for the first time, and its saved tensors become holders.

In: the user's function and arguments. Kept: a holder for each tensor that autograd saves. Out: the function's output,
with a hook on each of its nodes that starts the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from torch_remat._compat import node_number
from torch_remat.dispatch.determinism import Values, value_function
from torch_remat.dispatch.forward_ops import ForwardOps
from torch_remat.dispatch.holder import (
    AUTOCAST_DTYPES,
    Anchor,
    Holder,
    mark_changed,
    metadata_of,
    parameter_behind,
    read,
)
from torch_remat.dispatch.mode import RematMode, current_mode
from torch_remat.dispatch.op import Op
from torch_remat.dispatch.options import DEFAULTS, Options
from torch_remat.dispatch.outputs import boundary_nodes, tensors_of
from torch_remat.dispatch.policy import CheckpointPolicy
from torch_remat.dispatch.region import Region


def run_region(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options) -> Any:
    """Run a function as a checkpointed region and return its output."""
    parent = current_mode()
    if parent is not None and parent.ops is not None:
        args, kwargs = parent.ops.enter_region(args, kwargs)
    region = Region(function, args, kwargs, options)
    mode = Recording(region)
    try:
        contexts = () if options is DEFAULTS else mode.contexts()
        output = mode.run(function, args, kwargs, saved_tensors_hooks(mode.pack, read), contexts)
        nodes = [output.grad_fn] if type(output) is torch.Tensor else boundary_nodes(tensors_of(output, region))
        mode.finish()
    finally:
        mode.forget()
    for node in nodes:
        # An output that is an input, or comes from outside, has an older node: a hook there would tie the region
        # to a graph that it may own through its function.
        if node is not None and node_number(node) >= region.first_number:
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
    ops: ForwardOps | None = None
    _values: Values | None = None

    def __init__(self, region: Region) -> None:
        self.region = region
        self._first_number = region.first_number
        self._saved = region.tape.saved
        self._counters: list[torch.Tensor] = []
        self._any_version = 0
        if region.options is not DEFAULTS:
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

    def pack(self, tensor: torch.Tensor) -> Holder | Anchor:
        """Return what autograd keeps instead of the tensor."""
        if self.ops is not None and (held := self.ops.pack(tensor)) is not None:
            return held
        if type(tensor) is Parameter:
            self._saved.append(tensor)
            return (tensor, tensor._version, self.region)
        owner = tensor._base
        if owner is None:
            owner = tensor
        origin = None
        if type(owner) is not torch.Tensor or tensor.dtype in AUTOCAST_DTYPES:
            origin = parameter_behind(owner)
            if origin is owner:
                self._saved.append(owner)
                return (tensor if tensor is owner else tensor.detach(), tensor._version, self.region)
        holder = Holder()
        self._saved.append(ref(holder))
        holder.region = self.region
        holder.value = None
        holder.origin = origin
        holder.metadata = metadata = metadata_of(tensor)
        if metadata[0]:
            self._any_version = 1
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

    def begin_op(self, name: str, policy: CheckpointPolicy, ctx: Any, body: FrameType) -> Op:
        """Begin an op in forward."""
        if self.ops is None:
            self.ops = ForwardOps(self.region)
        return self.ops.begin(name, policy, ctx, body)

    def finish(self) -> None:
        """Close forward: see NOTE [ Changes after the save ], and forget random state that was not drawn from."""
        region = self.region
        if self.ops is not None:
            self.ops.finish()
        if self._values is not None:
            self._values.flush(_keep_value)
        if region.rng is not None and not region.rng.keep_drawn(region.tape.drawn_by_ops()):
            region.rng = None
        if self._any_version or any(map(_version_of, self._counters)):
            self._find_changed()
        if region.inputs is not None:
            region.inputs.forget_originals()
        region.finished = True

    def _find_changed(self) -> None:
        counters = iter(self._counters)
        for entry in self._saved:
            if type(entry) is ref:
                counter, holder = next(counters), entry()
                if holder is not None and counter._version != holder.metadata[0]:
                    mark_changed(holder)

    def forget(self) -> None:
        """Let go of what only forward needs; the graph may hold on to this mode, through its pack hook."""
        self._counters.clear()
        if self.ops is not None:
            self.ops.forget()
        self._values = self.ops = None


_version_of = attrgetter("_version")
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
