"""Forward: a region's function runs for the first time, and its saved tensors become holders.

In: the user's function and arguments. Kept: a holder for each tensor that autograd saves. Out: the function's output,
with a hook on each of its nodes that starts the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter

from torch_remat._compat import node_number, without_dispatch_modes
from torch_remat.dispatch.check.parameters import versions_of
from torch_remat.dispatch.check.values import TrainedStatistics, Values, keep_value, value_function
from torch_remat.dispatch.forward_ops import ForwardOps
from torch_remat.dispatch.holder import (
    AUTOCAST_DTYPES,
    Anchor,
    Holder,
    layout_of,
    mark_changed,
    metadata_of,
    parameter_behind,
    read,
)
from torch_remat.dispatch.mode import RematMode, current_mode
from torch_remat.dispatch.observe import Watch, is_watched
from torch_remat.dispatch.options import DEFAULTS, Options
from torch_remat.dispatch.policy_forward import PolicyForward
from torch_remat.dispatch.region.module_path import ModulePath
from torch_remat.dispatch.region.outputs import boundary_nodes, node_of, tensors_of
from torch_remat.dispatch.region.region import Region
from torch_remat.policies.kinds import OpPolicy


def run_region(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options) -> Any:
    """Run a function as a checkpointed region and return its output."""
    parent = current_mode()
    is_part = False
    earlier = None
    if parent is not None and parent.ops is not None:
        if isinstance(parent, Recording) and parent.ops.policy is not None:
            earlier = parent.ops.policy.earlier
            earlier.enter(options.policy is not None)
        is_part = parent.ops.skips()
        if not is_part:
            args, kwargs = parent.ops.enter_region(args, kwargs)
    region = Region(function, args, kwargs, options, is_part)
    mode = Recording(region)
    try:
        contexts: Sequence[AbstractContextManager[Any]] = () if options is DEFAULTS else mode.contexts()
        if is_watched():
            mode.observed = Watch(mode)
            contexts = (mode.observed, *contexts)
        output = mode.run(function, args, kwargs, (mode.pack_hook(), read), contexts)
        nodes = [node_of(output)] if type(output) is Tensor else boundary_nodes(tensors_of(output))
        mode.finish(nodes)
        observed = mode.observed
    finally:
        mode.forget()
        if earlier is not None:
            earlier.leave()
    for node in nodes:
        # An output that is an input, or comes from outside, has an older node: a hook there would tie the region
        # to a graph that it may own through its function.
        if node is not None and (number := node_number(node)) >= region.first_number:
            node.register_prehook(region.reach)
            if number > region.last_number:
                region.last_number = number
    if observed is not None:
        observed.finish(nodes)
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
    ops: ForwardOps | None

    def __init__(self, region: Region) -> None:
        self.region = region
        self.ops = None
        self._values: Values | None = None
        self.watcher = None
        self._first_number = region.first_number
        self._saved = region.tape.saved
        self._counters: list[torch.Tensor] = []
        self._any_version = 0
        if region.options is not DEFAULTS:
            value_of = value_function(region.options.determinism_check)
            self._values = region.values = None if value_of is None else Values(value_of, keep_value)

    def contexts(self) -> list[AbstractContextManager[Any]]:
        """Return the contexts that forward runs in, besides the hooks."""
        region = self.region
        contexts: list[AbstractContextManager[Any]] = []
        if region.options.context_fn is not None:
            forward_context, region.replay_context = region.options.context_fn()
            contexts.append(forward_context)
        if region.op_log is not None:
            contexts.append(self.watch(region.op_log.forward))
        if self._values is not None:
            contexts.append(TrainedStatistics(self._values))
        if region.options.policy is not None:
            contexts += self._policy_contexts(region.options.policy)
        return contexts

    def _policy_contexts(self, policy: OpPolicy) -> list[AbstractContextManager[Any]]:
        region = self.region
        assert region.function is not None
        path = ModulePath(region.function)
        self.ops = ForwardOps(self)
        self.ops.policy = PolicyForward(
            self.ops, policy, path, region.options.allow_cache_entry_mutation, region.options.observer
        )
        self.opening = self.ops.policy.watch
        return [path]

    def pack_hook(self) -> Callable[[torch.Tensor], Holder | Anchor]:
        """Return the pack hook: it makes what autograd keeps instead of a tensor.

        It is a closure over local names, since it runs for each saved tensor. It does itself what a plain small tensor
        needs, and leaves all others to `pack`.
        """
        region, first_number = self.region, self._first_number
        saved, count, values = self._saved.append, self._counters.append, self._values

        def pack(tensor: torch.Tensor) -> Holder | Anchor:
            ops = self.ops
            if ops is not None:
                held: Holder | Anchor | None = None
                if ops.expected is not None:
                    held = ops.pack(tensor)
                elif ops.policy is not None:
                    held = ops.policy.pack(tensor)
                elif ops.natives is not None:
                    held = ops.natives.pack(tensor)
                if held is not None:
                    return held
            if values is not None:
                return self.pack(tensor)
            try:
                small = type(tensor) is Tensor and tensor._base is None and tensor.nbytes <= SMALL_BYTES
            except RuntimeError:
                small = False  # sparse tensors have no such number
            if small:
                node = tensor.grad_fn
                metadata = metadata_of(tensor)
                if (
                    node is not None
                    and not metadata[0]
                    and node_number(node) >= first_number
                    and metadata[2] not in AUTOCAST_DTYPES
                ):
                    holder = Holder()
                    holder.region = region
                    holder.value = holder.origin = None
                    holder.metadata = metadata
                    holder.producer = type(node)
                    holder.plain = True
                    saved(ref(holder))
                    count(tensor)
                    return holder
            elif type(tensor) is Parameter:
                saved(tensor)
                return (tensor, tensor._version, region)
            return self.pack(tensor)

        return pack

    def pack(self, tensor: torch.Tensor) -> Holder | Anchor:
        """Do what the pack hook does, for any tensor that is not saved by a SAVE op."""
        if type(tensor) is Parameter:
            self._saved.append(tensor)
            return (tensor, tensor._version, self.region)
        inputs = self.region.inputs
        assert inputs is not None
        owner = tensor._base
        if owner is None:
            owner = tensor
        elif inputs.is_base(owner):  # replay will not know it
            self.region.tape.layouts[len(self._saved)] = None
        elif (layout := layout_of(tensor, owner)) is not None:
            self.region.tape.layouts[len(self._saved)] = layout
        origin = None
        if type(owner) is not torch.Tensor or tensor.dtype in AUTOCAST_DTYPES:
            origin = parameter_behind(owner)
            if origin is owner:
                # An argument that is a view of a parameter comes back from the inputs without its base.
                self._saved.append(None if inputs.contains(owner) else owner)
                return (tensor if tensor is owner else self._alias_of(tensor), tensor._version, self.region)
        holder = Holder()
        self._saved.append(ref(holder))
        holder.region = self.region
        holder.value = None
        holder.origin = origin
        holder.plain = False
        holder.metadata = metadata = metadata_of(tensor)
        if metadata[0]:
            self._any_version = 1
        node = owner.grad_fn
        holder.producer = type(node)
        if owner.requires_grad if node is None else node_number(node) < self._first_number:
            self._look_outside(holder, owner)
        self._counters.append(self._counter_of(owner))
        if self._values is not None:
            self.note_value(holder, tensor)
        return holder

    def note_value(self, holder: Holder, tensor: torch.Tensor) -> None:
        """Take the value that the determinism check compares, if it compares values."""
        if self._values is not None:
            with self.unwatched():
                self._values.add(holder, tensor)

    def _counter_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that shares the version counter of another, but not its data."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.nbytes <= SMALL_BYTES:
            return tensor
        if self.watcher is None:
            return _without_data(tensor)
        with without_dispatch_modes():
            return _without_data(tensor)

    def _alias_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.watcher is None or type(tensor) is not Tensor:
            return tensor.detach()
        with without_dispatch_modes():
            return tensor.detach()

    def _look_outside(self, holder: Holder, owner: torch.Tensor) -> None:
        """Note where a saved tensor comes from that is older than the region, or a leaf."""
        inputs = self.region.inputs
        assert inputs is not None
        if inputs.contains(owner):
            holder.producer = type(None)  # replay passes inputs without their history
            holder.origin = None
        elif holder.origin is None:
            holder.origin = ref(owner)

    def ops_now(self) -> ForwardOps:
        """Return the ops of this forward."""
        if self.ops is None:
            self.ops = ForwardOps(self)
        return self.ops

    def give_name(self, tensor: torch.Tensor, name: str) -> None:
        """Give a tensor a name by hand."""
        if self.ops is not None and self.ops.policy is not None:
            self.ops.policy.give_name(tensor, name)

    def finish(self, boundary: Sequence[torch.autograd.graph.Node | None]) -> None:
        """Close forward: see NOTE [ Changes after the save ], and forget random state that was not drawn from."""
        region = self.region
        if self._values is not None:
            self._values.flush()
        if self._any_version or any(map(_version_of, self._counters)):
            self._find_changed()
        self._counters.clear()  # before the ops look for what is alive
        if self.ops is not None:
            self.ops.finish(boundary)
        if region.rng is not None and not region.rng.keep_drawn(region.tape.drawn_by_ops()):
            region.rng = None
        if region.parameters:
            region.versions = versions_of(region.parameters)
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
        if self._values is not None:
            self._values.forget()
            self._values = self.region.values = None
        self.ops = self.observed = None


_version_of = attrgetter("_version")
SMALL_BYTES = 4096
_NOTHING = torch.empty(0)


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    alias = tensor.detach()
    alias.data = _NOTHING
    return alias
