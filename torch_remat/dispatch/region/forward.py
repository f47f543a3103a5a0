"""Forward: a region's function runs for the first time, and its saved tensors become holders.

In: the user's function and arguments. Kept: a holder for each tensor that autograd saves. Out: the function's output;
of a region that keeps something, with a hook on each of its nodes that starts the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from sys import _getframe
from types import NoneType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from torch_remat._compat import (
    CompiledCode,
    graph_task,
    keep_from_compiler,
    node_number,
    sequence_number,
    without_dispatch_modes,
)
from torch_remat.dispatch.call.ending import finish
from torch_remat.dispatch.call.recorder import Recorder
from torch_remat.dispatch.check.unread import versions_of
from torch_remat.dispatch.check.values import LeftOut, Values, value_function
from torch_remat.dispatch.holder import (
    CAST,
    NOBODY,
    UNKNOWN_LAYOUT,
    Anchor,
    Holder,
    is_parameter,
    layout_of,
    mark_changed,
    metadata_of,
    parameter_behind,
    read,
)
from torch_remat.dispatch.log.slot import counter_of
from torch_remat.dispatch.mode import RematMode, current_mode
from torch_remat.dispatch.options import DEFAULTS, Options, is_watched, keeping, watch
from torch_remat.dispatch.reach import boundary_nodes, tensors_of
from torch_remat.dispatch.region.outside import Outside
from torch_remat.dispatch.region.region import OpenRegion, Region
from torch_remat.dispatch.region.replay import Filling
from torch_remat.errors import UsageError


def run_region(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options) -> Any:
    """Run a function as a checkpointed region and return its output."""
    parent, budget = current_mode(), keeping.get()
    if budget is not None and parent is None and (run := budget.runner(options, function, args, kwargs)) is not None:
        return run(function, args, kwargs)
    is_part = False
    observed = None
    if isinstance(parent, Recording) and parent.region.inputs is not None:
        parent.region.inputs.note_histories()
    if parent is not None and parent.ops is not None:
        is_part = parent.ops.skips()
        if not is_part:
            args, kwargs = parent.ops.enter_region(args, kwargs)
    region = Region(function, args, kwargs, options, Filling, is_part)
    if budget is not None and (parent is None or not parent.recomputing):
        region.keeper = budget.begin(region)
    mode = Recording(region)
    try:
        contexts: Sequence[AbstractContextManager[Any]] = () if options is DEFAULTS else mode.contexts()
        if is_watched():
            mode.observed = observed = watch(mode)
            contexts = (observed, *contexts)
        output = mode.run(function, args, kwargs, (mode.pack_hook(), read), contexts)
        nodes = mode.boundary(output)
        mode.finish(nodes)
    except TypeError as error:
        if region.misuse is None or isinstance(error, UsageError):
            raise
        raise region.misuse() from None  # of which an operator such as `@` has made "unsupported operand"
    finally:
        mode.forget()
    if region.outside is not None:
        if isinstance(parent, Recording) and not is_part:
            parent.region.outside = parent.region.outside or Outside()
            parent.region.outside.take_over(region.outside)
        region.outside.let_go()
    if region.keeper is not None:
        region.keeper.finish()  # counts what is left
    for node in nodes:
        # An output that is an input, or comes from outside, has an older node: a hook there would tie the region
        # to a graph that it may own through its function.
        if (number := node_number(node)) >= region.first_number:
            # The graph's holders own the region: an output that is held after backward keeps nothing of it.
            node.register_prehook(partial(_reach, ref(region)))
            if number > region.last_number:
                region.last_number = number
    if observed is not None:
        observed.finish(nodes)
    return output


def _reach(region: ref[Region], _grad_outputs: object) -> None:
    if (reached := region()) is not None:
        reached.reach()


class Recording(RematMode):
    """The forward of a region. Its pack hook makes the holders and notes them on the tape.

    NOTE [ Changes after the save ]
    Autograd refuses a saved tensor that was modified in place later. A replay that stops early may not come to the
    change, so forward looks for it: at its end the version counter of each saved tensor must stand where it stood. A
    counter lives as long as a tensor that shares it. Until then small tensors are simply kept, larger ones up to a
    budget, and subclasses; of another large one a detached alias without data is.
    """

    region: OpenRegion
    replaying = False
    ops: Recorder | None = None
    _values: Values | None = None
    _any_version = 0
    _keep: Callable[[Holder, ref[Holder], Tensor, Any], None] | None = None  # what a budget does with each saved tensor

    def __init__(self, region: Region) -> None:
        self.region = region  # type: ignore[assignment]  # forward runs
        self._counters: list[torch.Tensor] = []
        self._casts: list[tuple[ref[Holder], torch.Tensor, int]] = []  # each with its leaf, and that one's version
        if region.keeper is not None and region.keeper.keeps:
            self._keep = region.keeper.keep
        if region.options is not DEFAULTS:
            check = region.options.determinism_check
            value_of = None if check == DEFAULTS.determinism_check else value_function(check)
            self._values = region.values = None if value_of is None else Values(value_of)

    def contexts(self) -> list[AbstractContextManager[Any]]:
        """Return the contexts that forward runs in, besides the hooks."""
        region = self.region
        contexts: list[AbstractContextManager[Any]] = []
        if region.options.context_fn is not None:
            forward_context, region.replay_context = region.options.context_fn()
            contexts.append(forward_context)
        if (op_log := region.options.op_log) is not None:
            self.opening, self.lets_compiled_code_run = op_log.begin(region, "forward"), True
        if self._values is not None:
            contexts.append(LeftOut(self._values))
        if region.options.policy is not None:
            self.ops = Recorder(self, region)
            self.ops.watch_all(region.options.policy)
            self.lets_compiled_code_run = CompiledCode.is_noticed
        return contexts

    def _call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the function, and show its ops to the policy, if there is one."""
        if self.ops is None or (watch := self.ops.watch) is None:
            return super()._call(function, args, kwargs)
        path = watch.path
        path.end = _getframe()
        try:
            with watch.compiled_code:
                return self.watched(watch.watch, function, args, kwargs)
        finally:
            path.end = None

    @keep_from_compiler
    def pack_hook(self) -> Callable[[torch.Tensor], Holder | Anchor]:
        """Return the pack hook: a closure, since it runs for each saved tensor.

        It does itself what a leaf needs, an input, a result with a gradient, and a view of one of these. `pack` does
        the same for any tensor.
        """
        region, first_number, compares_values = self.region, self.region.first_number, self._values is not None
        tape, originals, bases = region.tape, region.inputs.originals, region.inputs.bases  # the graph keeps the hook
        entries, layouts, count = tape.saved, tape.layouts, self._counters.append
        saved, keep, room, strided = entries.append, self._keep, ROOM_BYTES, torch.strided

        def pack(tensor: torch.Tensor) -> Holder | Anchor:
            nonlocal room
            ops = self.ops
            if ops is not None and (ops.packs or ops.expected is not None):
                pack_by_op = ops.calling.pack if ops.calling else ops.pack_expected if ops.expected else ops.pack
                if (held := pack_by_op(tensor)) is not None:
                    return held
            if (kind := type(tensor)) is not Tensor or compares_values:
                if kind is not Parameter:
                    return self.pack(tensor)
                saved(tensor)
                return (tensor, tensor._version, region, NOBODY if ops is None or not ops.calling else ops.saver())
            owner, layout = tensor._base, None
            if owner is None:
                owner = tensor
            elif type(owner) is Tensor or (
                type(owner) is Parameter and owner.requires_grad and id(owner) not in originals
            ):
                layout = UNKNOWN_LAYOUT if bases and id(owner) in bases else layout_of(tensor, owner)
            else:
                return self.pack(tensor)
            producer: type = NoneType
            if id(owner) in originals:
                pass  # replay passes inputs without their `grad_fn`
            elif (node := owner.grad_fn) is not None:
                producer = type(node)
                if producer is CAST or node._sequence_nr() < first_number:  # type: ignore[attr-defined,unused-ignore]
                    return self.pack(tensor)
            elif owner.requires_grad:
                if layout is not None:
                    layouts[len(entries)] = layout
                saved(owner)  # the graph owns it, and so may a view of it
                return (tensor, tensor._version, region, NOBODY if ops is None or not ops.calling else ops.saver())
            elif tensor.is_floating_point():
                tape.buffers.add(len(entries))
            metadata = metadata_of(tensor)
            if metadata[0] or owner.layout is not strided:
                return self.pack(tensor)
            if keep is None:
                if (size := owner.nbytes) > SMALL_BYTES:
                    room -= size
                count(owner if size <= SMALL_BYTES or room > 0 else _counter_of(owner))
            holder = Holder()
            holder.region = region
            holder.value = holder.origin = None
            holder.metadata, holder.layout = metadata, layout
            holder.producer = holder.plain = producer
            saved(entry := ref(holder))
            if keep is not None:
                keep(holder, entry, self.alias_of(tensor), ops)
            return holder

        return pack

    def pack(self, tensor: torch.Tensor) -> Holder | Anchor:
        """Do what the pack hook does, for any tensor that is not saved by a SAVE op."""
        region = self.region
        place = len(region.tape.saved)
        inputs = region.inputs
        owner, layout = tensor._base, None
        if owner is None:
            owner = tensor
        else:  # replay's argument is no view of one of the inputs' bases
            layout = UNKNOWN_LAYOUT if id(owner) in inputs.bases else layout_of(tensor, owner)
        node, is_input = owner.grad_fn, inputs.contains(owner)
        if is_parameter(owner) or (node is None and owner.requires_grad and not is_input):
            # An argument that is a view of a parameter comes back from the inputs without its base.
            if layout is not None:
                region.tape.layouts[place] = layout
            region.tape.saved.append(None if is_input else owner)
            saver = NOBODY if self.ops is None else self.ops.saver()
            return (tensor if tensor is owner else self.alias_of(tensor), tensor._version, region, saver)
        holder = Holder()
        region.tape.saved.append(ref(holder))
        holder.region = region
        holder.value = holder.origin = None
        holder.metadata = metadata = metadata_of(tensor)
        if metadata[0]:
            self._any_version = 1
        holder.plain = None
        holder.layout = layout
        holder.producer = NoneType if is_input else type(node)
        if node is not None and not is_input:
            cast_of = parameter_behind(owner)
            if cast_of is not None:
                holder.origin = None if inputs.contains(cast_of) else cast_of
                self._casts.append((ref(holder), cast_of, cast_of._version))
            elif inputs.is_made_as(owner, node):
                holder.producer = NoneType
            elif node_number(node) < region.first_number and graph_task() < 0:  # backward makes it anew for each reader
                holder.origin = ref(owner)
        if self._keep is not None:
            self._keep(holder, ref(holder), self.alias_of(tensor), self.ops)
        else:
            self._counters.append(_counter_of(owner))
        if self._values is not None:
            self._values.add(holder, tensor)
        return holder

    def ops_now(self) -> Recorder:
        """Return the ops of this forward."""
        if self.ops is None:
            self.ops = Recorder(self, self.region)
        return self.ops

    def name_saved(self, named: Sequence[tuple[str, torch.Tensor | None]]) -> None:
        """Give names to the tensors that autograd saves next, if a saved call makes them."""
        if self.observed is not None:
            self.observed.name_saved(named)
        if self.ops is not None and (call := self.ops.calling) is not None:
            call.named = named

    def give_name(self, tensor: torch.Tensor, name: str) -> None:
        """Give a tensor a name by hand."""
        if self.ops is not None and self.ops.watch is not None:
            self.ops.watch.give_name(tensor, name)

    def boundary(self, output: Any) -> Sequence[Node]:
        """Return the nodes of the outputs, if something asks for them.

        A region without calls needs none of them: the first empty holder that is unpacked starts its replay.
        """
        if (self.ops is None or not self.region.tape.records) and self.observed is None and self.region.keeper is None:
            return ()
        return boundary_nodes(tensors_of(output))

    def finish(self, boundary: Sequence[Node]) -> None:
        """Close forward: see NOTE [ Changes after the save ], and forget random state that was not drawn from."""
        region = self.region
        if region.misuse is not None:
            raise region.misuse()  # also where user code swallowed it
        if self._values is not None:
            self._values.flush()
        keeper = region.keeper
        if keeper is not None and self._keep is not None:
            keeper.end()
        elif self._any_version or any(map(_version_of, self._counters)):
            self._find_changed()
        region.end_number = sequence_number()
        region.versions = versions_of(region.parameters)
        for entry, leaf, version in self._casts:  # which replay makes of the leaf as it will be then
            if leaf._version != version and (holder := entry()) is not None and holder.value is None:
                mark_changed(holder)
        self._counters.clear()  # before the ops look for what is alive
        self._casts.clear()
        if region.outside is not None:
            region.outside.finish(None if self.ops is None else self.ops.storages.has_changed)
        if self.ops is not None:
            if keeper is None:
                finish(self.ops, boundary)
            else:
                with keeper.set_aside():
                    finish(self.ops, boundary)
        if region.rng is not None and not region.rng.keep_drawn(region.tape.drawn_by_ops() if self.ops else ()):
            region.rng = None
        region.finished = True

    def _find_changed(self) -> None:
        counters = iter(self._counters)
        for entry in self.region.tape.saved:
            if type(entry) is ref:
                counter, holder = next(counters), entry()
                if holder is not None and counter._version != holder.metadata[0]:
                    mark_changed(holder)

    def forget(self) -> None:
        """Let go of what only forward needs; the graph may hold on to this mode, through its pack hook."""
        self._counters.clear()
        self._casts.clear()
        self.region.inputs.end_forward()
        if self.ops is not None:
            self.ops.forget()
            self.ops = None
        if self._values is not None:
            self._values.forget()
            self._values = self.region.values = None
        if self.observed is not None:
            self.observed = self.watcher = None


_version_of = attrgetter("_version")
# What is so small is kept until forward ends rather than described, and of what is larger so much in a region.
SMALL_BYTES = 4096
ROOM_BYTES = 1 << 20


def _counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or what shares its version counter but not its data if that is large."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.nbytes <= SMALL_BYTES:
        return tensor
    with without_dispatch_modes():
        return counter_of(tensor)
