"""Forward: a region's function runs for the first time, and its saved tensors become holders.

In: the user's function and arguments. Kept: a holder for each tensor that autograd saves. Out: the function's output;
of a region that keeps something, with a hook on each of its nodes that starts the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from sys import _getframe, getrefcount
from types import NoneType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from torch_remat._compat import (
    OF_TRACES,
    CompiledCode,
    graph_task,
    in_autocast,
    is_transformed,
    keep_from_compiler,
    node_number,
    sequence_number,
    top_saved_tensors_hooks,
    untraced,
    without_dispatch_modes,
)
from torch_remat.dispatch.call.ending import finish, judge
from torch_remat.dispatch.call.functions import Noting, noting, with_rung
from torch_remat.dispatch.call.recorder import Recorder
from torch_remat.dispatch.check.samples import (
    UNKNOWN_TO_PYTHON,
    last_sample,
    samples_of_carriers,
    takes_samples,
)
from torch_remat.dispatch.check.unread import flags_of, versions_of
from torch_remat.dispatch.check.values import note_checksums
from torch_remat.dispatch.holder import (
    CAST,
    NOBODY,
    UNKNOWN_LAYOUT,
    Anchor,
    Holder,
    OpHolder,
    ResidentRef,
    changed_in_place,
    is_parameter,
    layout_of,
    mark_changed,
    metadata_of,
    parameter_behind,
    read,
)
from torch_remat.dispatch.keys import key_of
from torch_remat.dispatch.mode import RematMode, current_mode, watch
from torch_remat.dispatch.naming import default_name
from torch_remat.dispatch.options import DEFAULTS, Begun, Options, is_watched
from torch_remat.dispatch.reach import boundary_nodes
from torch_remat.dispatch.region.inputs import leaves_of
from torch_remat.dispatch.region.region import Keeping, OpenRegion, Region, Tape, keeping
from torch_remat.dispatch.region.replay import fill
from torch_remat.errors import UsageError, warn
from torch_remat.offload.transfer import Placement
from torch_remat.policies.decision import CheckpointPolicy

if TYPE_CHECKING:
    from torch_remat.dispatch.call.survey import Survey


def run_region(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options) -> Any:
    """Run a function as a checkpointed region and return its output."""
    if is_transformed():
        return run_transformed(function, args, kwargs, options)
    for chosen in options.modules:
        chosen.enter(function, args)
    parent = current_mode()
    if isinstance(parent, Recording) and parent.region.inputs is not None:
        parent.region.inputs.note_histories()
    if parent is not None and parent.ops is not None and parent.ops.is_native():
        return function(*args, **kwargs)  # a plain call, which the native region keeps
    if parent is None or parent.function_mode is None:
        return _run(function, function, args, kwargs, options)
    run = partial(_run_user_code, parent, function)
    return parent.hidden(_run, function, run, args, kwargs, options)  # nothing here is a call of the enclosing region


def _run_user_code(mode: RematMode, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return mode.user_code(function, args, kwargs)


def _run(
    function: Callable[..., Any],
    run: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
) -> Any:
    """Do so; ``run`` is what runs the function."""
    parent, budget = current_mode(), keeping.get()
    is_part = False
    observed = None
    if parent is not None and parent.ops is not None:
        is_part = parent.ops.skips()
        if not is_part:
            args, kwargs = parent.ops.enter_region(args, kwargs)
    begun = begin(options, budget, function, args, kwargs)
    if begun is not None and begun.run is not None:
        return begun.run(run, args, kwargs)
    region = Region(function, args, kwargs, options, fill)
    if budget is not None and (parent is None or not parent.recomputing):
        region.keeper = budget.keeper(region, begun)
    mode = Recording(region)
    try:
        if begun is not None and not region.traced:
            mode.go_by_price(begun)
        is_plain = options is DEFAULTS and begun is None
        contexts: Sequence[AbstractContextManager[Any]] = () if is_plain else mode.contexts()
        if is_watched():
            mode.observed = observed = watch(mode)
            contexts = (observed, *contexts)
        seen = mode.functions or mode.survey
        run = run if seen is None else partial(seen.around, run)
        output = mode.run(run, args, kwargs, (mode.pack_hook(), read), contexts)
        nodes = mode.boundary(output)
        if isinstance(parent, Recording) and parent.survey is not None:
            parent.survey.note_saved(region.tape.saved)
        mode.finish(nodes)
        if region.tape.others and parent is not None and not is_part:
            parent.take_others(region.tape)
    except TypeError as error:
        if region.misuse is None or isinstance(error, UsageError):
            raise
        raise region.misuse() from None  # of which an operator such as `@` has made "unsupported operand"
    finally:
        mode.forget()
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
        observed.finish()
    return output


def begin(
    options: Options,
    budget: Keeping | None,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Begun | None:
    """Return what is known by price of a region that is about to begin; None if it does not go by price."""
    if (budget is None and options.price is None) or options.policy is not None:
        return None
    if top_saved_tensors_hooks() is not None:
        return None  # its forward may run again, and must keep the same
    from torch_remat.ladders.kinds import kind_of  # loaded only where it is used

    leaves = leaves_of(args, kwargs)
    kind, shapes = kind_of(function, leaves)
    if options.price is None:
        assert budget is not None
        return budget.begin(options, function, leaves, kind, shapes)
    is_new = kind.is_new(shapes) and not kind.communicates
    if is_new or options.functions is None or kind.communicates:
        return Begun(kind, shapes, is_new=is_new)
    ladder = kind.ladder(shapes, options.functions.decisions, options.functions.left_out)
    rung = None if ladder is None else options.price.choose(ladder)
    if ladder is not None and rung is not None and rung.is_plain and budget is not None:  # which counts regions
        rung = ladder.as_region()
    return Begun(kind, shapes, rung, run=_plain if rung is not None and rung.is_plain else None)


def _plain(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return function(*args, **kwargs)


def run_transformed(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options
) -> Any:
    """Run a function as it is, and warn once in this process: a transform's tensors do not live till backward."""
    if not _warned:
        _warned.append(True)
        name = options.region_name or default_name(function)
        warn(
            f"{name}: a transform of torch.func, or forward-mode differentiation, runs around this region, so it is a "
            "plain call and keeps its activations, as does every other region there; gradients are right. Take "
            "gradients by backward() or torch.autograd.grad to have them recomputed."
        )
    return function(*args, **kwargs)


_warned: list[bool] = []  # that a region under a transform is a plain call


@untraced
def _reach(region: ref[Region], _grad_outputs: object) -> None:
    if (reached := region()) is not None:
        reached.reach()


class Recording(RematMode):
    """The forward of a region. Its pack hook makes the holders and notes them on the tape.

    NOTE [ Values till the end ]
    While forward runs each holder has its value, the saved tensor itself. So a gradient taken inside needs no replay,
    and autograd's rule is asked once, at the end: a version counter that has moved since the save makes every read an
    error. Then what is not kept is emptied, which also ends the cycle of a node with its own output; of what is kept an
    alias without a graph stays. An exception that leaves forward ends the cycles in the same way.
    """

    region: OpenRegion
    replaying = False
    ops: Recorder | None = None
    functions: Noting | None = None  # calls of functions, if the policy names some
    survey: Survey | None = None  # of all of them, if this forward is recorded

    def __init__(self, region: Region) -> None:
        self.region = region  # type: ignore[assignment]  # forward runs
        # The places of tensors that Python code knows; None where no values are compared.
        self._carriers: list[int] | None = [] if takes_samples(region.serial) else None
        self._casts: list[tuple[ref[Holder], torch.Tensor, int]] = []  # each with its leaf, and that one's version
        if (options := region.options) is not DEFAULTS and (
            options.determinism_check != "default"
            or options.allow_cache_entry_mutation
            or not options.preserve_rng_state
        ):
            self._carriers = None

    def contexts(self) -> list[AbstractContextManager[Any]]:
        """Return the contexts that forward runs in, besides the hooks."""
        region = self.region
        contexts: list[AbstractContextManager[Any]] = []
        if region.options.context_fn is not None:
            forward_context, region.replay_context = region.options.context_fn()
            contexts.append(forward_context)
        if (op_log := region.options.op_log) is not None:
            self.opening, self.lets_compiled_code_run = op_log.begin(region, "forward"), True
        if region.options.policy is not None:
            self.ops = Recorder(self, region)
            self.ops.watch_all(region.options.policy)
            self.lets_compiled_code_run = CompiledCode.is_noticed
        if (chosen := region.chosen) is not None and chosen.decisions:
            self.functions = self.function_mode = noting(self, self.ops_now, chosen)
        return contexts

    def go_by_price(self, begun: Begun) -> None:
        """Keep what a rung says, or record this forward for a ladder."""
        region = self.region
        region.kind = begun.kind
        if begun.rung is not None and begun.kind.keeps_calls:
            region.chosen = with_rung(region.chosen, begun.rung)
        elif begun.is_new:
            from torch_remat.dispatch.call.survey import Survey  # loaded only where it is used

            self.survey = self.function_mode = survey = Survey(self, begun.kind, begun.shapes)
            self.opening, self.lets_compiled_code_run = survey.see, CompiledCode.is_noticed
            region.surveyed, region.chosen = True, None

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
    def pack_hook(self) -> Callable[[torch.Tensor], Holder | Anchor | torch.Tensor]:
        """Return the pack hook: a closure, since it runs for each saved tensor; one of a trace stays as it is."""
        region, first_number = self.region, self.region.first_number
        tape, originals, bases = region.tape, region.inputs.originals, region.inputs.bases  # the graph keeps the hook
        entries, layouts, carriers = tape.saved, tape.layouts, self._carriers
        saved, nested = entries.append, region.hooks is not None

        def pack(tensor: torch.Tensor) -> Holder | Anchor | torch.Tensor:
            ops, saving = self.ops, None
            if ops is not None:
                if ops.saving is not None and (ops.number < 0 or ops.saves_now(tensor)):
                    saving = ops.saving
                elif ops.packs and (held := ops.pack_by_log(tensor)) is not None:
                    return held
            if (kind := type(tensor)) is Parameter:
                saved(tensor)
                return (tensor, tensor._version, region, NOBODY if ops is None else ops.saver(tensor))
            if kind is not Tensor and kind in OF_TRACES and not region.traced:
                return tensor
            owner, layout = tensor._base, None
            if owner is None:
                owner = tensor
            else:
                kind = type(owner) if kind is Tensor else kind
                # Replay's argument is no view of one of the inputs' bases.
                layout = UNKNOWN_LAYOUT if bases and id(owner) in bases else layout_of(tensor, owner)
            is_input = id(owner) in originals
            node = None if is_input else owner.grad_fn
            if (node is None and not is_input and owner.requires_grad) or (kind is not Tensor and is_parameter(owner)):
                if layout is not None:
                    layouts[len(entries)] = layout
                # The graph owns it, and so may a view of it. An argument that is one comes back without its base.
                saved(None if is_input else owner)
                kept = self.alias_of(tensor) if is_input else tensor
                return (kept, tensor._version, region, NOBODY if ops is None else ops.saver(tensor))
            if node is None and not (is_input or nested) and kind is Tensor:
                place = len(entries)
                if tensor.is_floating_point():
                    tape.buffers.add(place)
                if carriers is not None and getrefcount(tensor) > UNKNOWN_TO_PYTHON:
                    carriers.append(place if current_mode() is self else ~place)  # what an inner region hands up
            holder = Holder() if saving is None else OpHolder()
            holder.region = region
            holder.value, holder.origin = tensor, None
            holder.metadata, holder.layout = metadata_of(tensor), layout
            holder.producer = producer = NoneType if node is None else type(node)
            holder.plain = producer if kind is Tensor else None
            saved(ref(holder))
            if saving is not None:
                holder.op = saving.name  # type: ignore[misc]
            if node is not None:
                if producer is CAST or kind is not Tensor or node_number(node) < first_number:
                    self._note_origin(holder, tensor, owner, node)
            elif nested and not is_input:
                holder.plain = None
                tape.others.append((ref(holder), ref(owner), holder.metadata[0]))
            if nested and saving is not None and ops is not None:
                ops.alive.append(holder)
            return holder

        return pack

    def _note_origin(self, holder: Holder, tensor: torch.Tensor, owner: torch.Tensor, node: Node) -> None:
        """Note of a saved tensor what replay compares by identity: a leaf's cast, or one older than the region."""
        region, inputs = self.region, self.region.inputs
        holder.plain = None
        if (cast_of := parameter_behind(owner)) is not None:
            holder.origin = None if inputs.contains(cast_of) else cast_of
            self._casts.append((ref(holder), cast_of, cast_of._version))
            # Another one older than the region is the user's own, and need not follow the leaf.
            if type(holder) is OpHolder and (node_number(node) >= region.first_number or in_autocast()):
                holder.packed = (cast_of, cast_of._version, region, (holder.op, ""))
                view = None if owner is tensor else Placement.of(tensor)
                holder.unpack = partial(_cast, owner.dtype, view)
        elif inputs.is_made_as(owner, node):
            holder.producer = NoneType
        elif node_number(node) < region.first_number and graph_task() < 0:  # backward makes it anew for each reader
            holder.origin = ref(owner)
        if region.hooks is not None and holder.origin is not None:
            region.tape.others.append((ref(holder), ref(owner), holder.metadata[0]))

    def take_others(self, tape: Tape) -> None:
        """Note what an inner region has saved and not made."""
        self.region.tape.others += tape.others

    def ops_now(self) -> Recorder:
        """Return the ops of this forward."""
        if self.ops is None:
            self.ops = Recorder(self, self.region)
        return self.ops

    def name_saved(self, named: Sequence[tuple[str, torch.Tensor | None]]) -> None:
        """Give names to the tensors that autograd saves next, if a saved call makes them."""
        if self.ops is not None and self.ops.calling is not None:
            self.ops.named = (*self.ops.named, *named)

    def give_name(self, tensor: torch.Tensor, name: str) -> None:
        """Give a tensor a name by hand."""
        if self.ops is not None and self.ops.watch is not None:
            self.ops.watch.give_name(tensor, name)

    def boundary(self, output: Any) -> Sequence[Node]:
        """Return the nodes of the outputs, if something asks for them.

        A region without calls needs none of them: the first empty holder that is unpacked starts its replay.
        """
        if (self.ops is None or not self.region.tape.records) and self.region.keeper is None:
            return ()
        return boundary_nodes(output)

    def finish(self, boundary: Sequence[Node]) -> None:
        """Close forward: see NOTE [ Values till the end ], and forget random state that was not drawn from."""
        region = self.region
        if region.misuse is not None:
            raise region.misuse()  # also where user code swallowed it
        if self.ops is not None:
            judge(self.ops, boundary)
        if region.options.determinism_check == "bitwise":
            note_checksums(region.tape.holders_to_fill())
        if (carriers := self._carriers) is not None:
            if carriers:
                region.samples = samples_of_carriers(region.tape.saved, carriers, self._is_of_region)
            region.last_sample = last_sample(region.tape.saved, carriers, region.inputs)
        if self.survey is not None:
            self.survey.finish(region.tape)
        self._empty()
        region.end_number = sequence_number()
        region.versions, region.flags = versions_of(region.parameters), flags_of(region.parameters)
        for entry, leaf, version in self._casts:  # which replay makes of the leaf as it will be then
            if leaf._version != version and (holder := entry()) is not None and holder.value is None:
                mark_changed(holder)
        self._casts.clear()
        if self.ops is not None:
            finish(self.ops)
        if region.outside is not None:
            region.outside.finish(bool if self.ops is None else self.ops.storages.has_changed)
        if region.rng is not None and not ((self.ops and region.tape.has_drawn()) or region.rng.keep_drawn()):
            region.rng = None  # where a call drew, all states stay: it may have left a generator as it was
        if self.functions is not None:
            self.functions.finish()
        region.finished = True

    def _empty(self) -> None:
        """Empty the holders that replay fills; of the others an alias without a graph stays.

        Afterwards only what the region's outputs lead to is alive.
        """
        # What a call of a function returned, unless it is to leave: that does so as its result, and replay fills these.
        made: set[int] = set()
        for call in self.region.tape.functions.values():
            if call.is_saved and call.policy is not CheckpointPolicy.OFFLOAD:
                for _, key in call.made:
                    made.add(key)
        for entry in self.region.tape.saved:
            if type(entry) is ref:
                if (holder := entry()) is None or (value := holder.value) is None:
                    continue
                if value._version != holder.metadata[0]:
                    mark_changed(holder)
                if type(holder) is OpHolder:
                    stays = holder.resident and holder.unpack is None
                else:  # what a function made stays, as its result does
                    stays = bool(made) and key_of(value) in made
                holder.value = self.alias_of(value) if stays else None
            elif type(entry) is ResidentRef and (resident := entry()) is not None and resident.unpack is not None:
                resident.value = None

    def _is_of_region(self, place: int, tensor: torch.Tensor) -> bool:
        """Whether a saved tensor without a `grad_fn` was made or changed by the region, or saved in a native region."""
        if any(call.start <= place < call.end for call in self.region.tape.records.values()):
            return True
        if self.ops is not None and self.ops.storages.writer_of(tensor) is not None:
            return True
        return self.region.outside is not None and self.region.outside.has_changed(tensor)

    def forget(self) -> None:
        """Let go of what only forward needs; the graph may hold on to this mode, through its pack hook."""
        if not self.region.finished:  # an exception has left it, maybe one of a mode that raises again
            with without_dispatch_modes():
                for known in self.region.tape.saved:
                    holder = known() if type(known) is ref else None
                    if holder is not None and holder.value is not None:
                        holder.value = holder.value.detach()
            self.region.tape.forget_slots()
        self._casts.clear()
        self.region.inputs.end_forward()
        if self.ops is not None:
            self.ops.forget()
            self.ops = None
        self.functions = self.survey = self.function_mode = None
        if self.observed is not None:
            self.observed = self.watcher = None


def _cast(dtype: torch.dtype, view: Placement | None, anchor: Anchor) -> torch.Tensor:
    """Return autocast's copy of a leaf, or a view of it, made anew."""
    leaf, version, region, (op, name) = anchor
    if leaf._version != version:
        raise changed_in_place(region, "parameter", leaf.shape, name, op)
    with without_dispatch_modes():
        cast = leaf.detach().to(dtype)
        return cast if view is None else view.seen_in(cast)
