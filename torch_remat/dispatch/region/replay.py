"""Replay: a region's function runs again in backward and fills the empty holders.

In: a region whose tape has empty holders. Kept: nothing past the replay. Out: filled holders, or an error; the replay's
own autograd graph dies with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import NoneType
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor

from torch_remat._compat import (
    OF_TRACES,
    CompiledCode,
    count_of_modes,
    detached,
    is_under_always_called_hooks,
    keep_from_compiler,
    sequence_number,
    set_grad_enabled,
)
from torch_remat.dispatch.call.answerer import Answerer
from torch_remat.dispatch.call.functions import Functions, Giving
from torch_remat.dispatch.check.compare import (
    another_parameter,
    is_same_leaf,
    lies_otherwise,
    modified_since,
    saved_otherwise,
    what_differs,
)
from torch_remat.dispatch.check.samples import has_other_values, other_values
from torch_remat.dispatch.check.unread import Unread, check_parameters, give_flags
from torch_remat.dispatch.check.values import first_difference
from torch_remat.dispatch.holder import (
    AUTOCAST_DTYPES,
    CHANGED,
    Holder,
    Layout,
    OpHolder,
    ResidentRef,
    is_parameter,
    layout_of,
    metadata_of,
    parameter_behind,
)
from torch_remat.dispatch.keys import UNCOUNTED
from torch_remat.dispatch.mode import RematMode, Replaying, StopReplay, StopUnderHooks, watch
from torch_remat.dispatch.naming import scope, scope_restored
from torch_remat.dispatch.options import is_watched
from torch_remat.dispatch.placeholder import Packed, Placeholder, Refusal, add_note, last_refusal, unpack
from torch_remat.dispatch.reach import Place
from torch_remat.dispatch.region.inputs import fresh_alias, leaves_of, with_leaves
from torch_remat.dispatch.region.outside import State, Unreadable, put_back
from torch_remat.dispatch.region.region import OpenRegion, Region, Tape, reached_by
from torch_remat.errors import MismatchError, PlaceholderError, at_user_line


def fill(region: Region, last: int) -> None:
    """Fill the empty holders of a region, up to a place on its tape; the caller holds its lock."""
    Filling(region, last).replay()


class Filling(Replaying):
    """The replay of a region. Its pack hook gives each empty holder its value, in the order of forward.

    Attributes:
        unread: What the replay must not read, where there is anything.
    """

    region: OpenRegion
    unread: Unread | None = None
    ops: Answerer | None = None
    _last = _last_empty = -1
    _error: Exception | None = None
    _suspects: Sequence[tuple[int, str]] = ()  # places with other values than in forward, and where they were saved
    _refusal: Refusal | None = None  # the latest when `StopReplay` was raised
    _first_number = 0  # where autograd stood when the function began
    _unfilled_number = -1  # of the latest op that may yet fill what it saved
    _sees_modes_of_forward = True  # also how many modes: ops of C++ write into their tensors where no mode is active
    _others_next = 0  # the place of the next tensor that inner regions save and have not made
    _before: Sequence[tuple[Place, State]] = ()  # what outlives the region, as the replay found it
    _bound: Sequence[tuple[Place, State]] = ()  # to which tensors places were bound, where it binds placeholders

    def __init__(self, region: Region, last: int) -> None:
        self.region = region  # type: ignore[assignment]  # its caller has seen that it can run
        tape = region.tape
        self._saved = tape.saved
        self._limit = len(tape.saved)  # 0 once the replay is over, so that the pack hook has one thing to look at
        self._end_at(last)
        if tape.records or tape.calls or tape.functions:
            self.ops = Answerer(self, self.region)

    def _end_at(self, last: int) -> None:
        """Note the place of the last holder to fill, and where replay may end: without early stop, past the end."""
        self._last_empty = self._last = last
        if not self.region.options.early_stop:
            self._last = self._limit
        elif last != self._limit - 1:
            self._last = self.region.tape.with_parameters(last)

    def replay(self) -> None:
        """Run the function as far as it is needed; the caller holds the region's lock.

        Raises:
            MutationError: A region input was modified in place.
            MismatchError: Replay did something else than forward.
        """
        region = self.region
        if (earlier := last_refusal.get()) is not None:  # of a region in the forward of which this one is replayed
            last_refusal.set(None)
        grad_enabled, parameters = torch.is_grad_enabled(), region.parameters
        flags = give_flags(parameters, region.flags)
        try:
            contexts = self._go_back()
            self._sees_modes_of_forward = not contexts and region.modes == count_of_modes()
            if region.surveyed:  # ops of C++ write into their tensors where no mode is active
                self.opening, self.lets_compiled_code_run = RematMode.__torch_dispatch__, CompiledCode.is_noticed
            args, kwargs = region.inputs.restore(region.name)
            set_grad_enabled(True)
            try:
                contexts = self._contexts() + contexts
                self._first_number = sequence_number()
                function = region.function
                if (chosen := region.chosen) is not None and chosen.decisions:
                    # Also where nothing is kept: what the compiler does depends on modes.
                    seen = Functions(chosen) if self.ops is None else Giving(self, self.ops, chosen)
                    self.function_mode = seen
                    function = partial(seen.around, function)
                self.run(function, args, kwargs, (self.pack_hook(), unpack), contexts)
            except StopReplay as stop:
                if stop.replay is not self:
                    raise
            except Exception as error:
                # What user code made of a stop, or of an error of ours that passed through it, does not count.
                if not self.over:
                    self._explained(error)
                    add_note(error, region.name, () if region.outside is None else region.outside.changes())
                    raise
            set_grad_enabled(grad_enabled)
            self._check()
            if self.ops is not None:
                self.ops.warn()
        except BaseException:
            region.tape.forget_values()
            raise
        finally:
            set_grad_enabled(grad_enabled)
            if flags:
                give_flags(parameters, flags)
            if self._bound:
                put_back(self._bound)
            if self._before:
                put_back(self._before)
            if self.ops is not None:
                self.ops.forget()
                self.ops = None  # which knows this mode
            self.observed = self.unread = self.function_mode = None
            # A tensor of the replay that outlives it owns its graph, which knows this mode through its pack hook.
            self._before = self._bound = ()
            if earlier is not None or last_refusal.get() is not None:
                last_refusal.set(earlier)

    def _contexts(self) -> list[AbstractContextManager[Any]]:
        """Return the contexts, and set up what watches the ops, where something does."""
        region = self.region
        contexts: list[AbstractContextManager[Any]] = region.ambient.contexts()
        if is_watched():
            self.observed = watch(self)
            contexts.insert(0, self.observed)
        if scope.get() != region.scope:
            contexts.append(scope_restored(region.scope))
        if region.rng is not None:
            contexts.append(region.rng.replayed())
        if region.replay_context is not None:
            contexts.append(region.replay_context)
        if (op_log := region.options.op_log) is not None:
            self.opening, self.lets_compiled_code_run = op_log.begin(region, "replay"), True
        return contexts

    def _go_back(self) -> list[AbstractContextManager[Any]]:
        """Let what outlives the region be as the replay needs it; see NOTE [ Outside ].

        Returns:
            The contexts that end a replay that reads what it must not read.
        """
        region, ops = self.region, self.ops
        parameters = check_parameters(region)
        if ops is not None and ops.has_placeholders():
            self._bound = _bound_now(region)
        storages: list[Unreadable] = []
        if region.outside is not None:
            self._before, storages = region.outside.go_back(region.name)
        if ops is not None:
            storages += ops.changed_later()
        if not (parameters or storages):
            return []
        self.unread = unread = Unread(self.fail, (lambda: 0) if ops is None else ops.passed)
        unread.add(parameters, storages)
        return [unread.compiled_code, unread]

    @keep_from_compiler
    def pack_hook(self) -> Callable[[torch.Tensor], torch.Tensor | Packed]:
        """Return the pack hook: it takes a value for the next holder and returns what replay's own graph keeps.

        It does itself what an ordinary tensor needs, and leaves all others to `pack`.
        """
        if self.unread is not None and self.unread.moved:
            return lambda tensor: self.pack(tensor)  # no bound method: hooks are marked by attributes
        tape, last = self.region.tape, self._last
        saved, layouts, buffers = tape.saved, tape.layouts, tape.buffers

        def pack(tensor: torch.Tensor) -> torch.Tensor | Packed:
            position, ops = self.position, self.ops
            if position >= self._limit or (ops is not None and ops.suppressed.pending):
                return self.pack(tensor)
            entry = saved[position]
            if type(entry) is ref:
                holder = entry()
                if (
                    holder is not None
                    and holder.value is None
                    and type(tensor) is Tensor
                    and metadata_of(tensor) == holder.metadata
                ):
                    owner = tensor._base
                    if (
                        holder.layout is None
                        and (
                            type(tensor.grad_fn) is holder.plain
                            or (ops is not None and holder.plain is not None and ops.has_loaded(tensor))
                        )
                        if owner is None
                        else type(owner.grad_fn) is holder.plain and layout_of(tensor, owner) == holder.layout
                    ):
                        self.position = position + 1
                        if not tensor.requires_grad:  # a custom Function's backward may look at what it is
                            value = tensor
                        else:
                            value = tensor.detach() if self.watcher is None else detached(tensor)
                        holder.value = value
                        if position in buffers and (ops is None or ops.may_fill()):
                            self._unfilled_number = sequence_number()
                        if position == last:
                            self._stop_at(position)
                        return value
                elif holder is not None and ops is not None and ops.has_loaded(tensor) and holder.value is not None:
                    self.position = position + 1  # what a function made is kept, and so is what autograd saves of it
                    return holder.value
            elif position != last:
                if entry is tensor or (
                    isinstance(entry, Tensor)
                    and entry is tensor._base
                    and layout_of(tensor, entry) == layouts.get(position)
                ):
                    self.position = position + 1
                    return tensor
                if type(entry) is ResidentRef and type(tensor) is Tensor:
                    self.position = position + 1
                    return entry.value_like(tensor)
            return self.pack(tensor)

        return pack

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | Packed:
        """Do what the pack hook does, for any tensor; one of a trace is not ours, as in forward."""
        if type(tensor) in OF_TRACES and not self.region.traced:
            return tensor
        position = self.position
        self.position = position + 1
        if self.ops is not None and self.ops.suppressed.pending:
            self.ops.suppressed.restore()
        own = isinstance(tensor, Placeholder) and tensor.source.is_of(self.region)
        if isinstance(tensor, Placeholder) and own:
            if (holder := self._empty_holder_at(position)) is None:
                if self._limit:
                    self._stop_at(position)
                return Packed.of(tensor)
            if self.ops is not None and not self.ops.is_of_handle(tensor.source):  # else its reader refuses it
                tensor = self.ops.value_of(tensor, "saving it for backward")
                self.ops.note_loaded(tensor if tensor._base is None else tensor._base)  # what was kept has no `grad_fn`
                holder.expect_version_of(tensor)  # what was kept was changed less often than what it stands for
        owner = tensor._base
        if owner is None:
            owner = tensor
        value = tensor if is_parameter(tensor) or not tensor.requires_grad else self.alias_of(tensor)
        if position >= self._limit:
            return value
        entry = self._saved[position]
        if type(entry) is ref:
            holder = entry()
            if value is tensor and (holder is None or holder.metadata[0] == CHANGED):
                value = self.alias_of(tensor)  # modified in place by what comes from it, it would own its own graph
            if holder is None:
                return value
            is_again = self.ops is not None and self.ops.whole is not None  # what it keeps counts, if it is kept
            if is_again and type(holder) is OpHolder and (kept := holder.value) is not None:
                return kept if kept.shape == tensor.shape else value
            metadata = holder.metadata
            self._compare(position, holder, tensor, owner)
            if (kept := holder.value) is None:
                self.fill(holder, value)
                is_buffer = not tensor.requires_grad and value.is_floating_point()
                if is_buffer and (self.ops is None or self.ops.may_fill()):
                    self._unfilled_number = sequence_number()
            else:  # the version is that of its own value, which replay's graph need not hold twice
                holder.metadata, value = metadata, kept if kept._version == metadata[0] else value
            before = self.region.samples.get(position)
            if before is not None and has_other_values(before, tensor):
                self._suspects = (*self._suspects, (position, at_user_line()))
        elif isinstance(entry, torch.Tensor):
            loaded = self.ops is not None and self.ops.has_loaded(tensor)
            if owner is not entry and not loaded and not is_same_leaf(entry, owner, may_change=True):
                self.fail(another_parameter(self.region, f"saved tensor {position}", None, entry, tensor))
            self._compare_layouts(position, tensor, owner, self.region.tape.layouts.get(position))
        if not own or type(value) is not Placeholder:  # else its reader comes next, which the error is to name
            self._stop_at(position)
        return value

    def _empty_holder_at(self, position: int) -> Holder | None:
        """Return the holder at a place if it needs a value."""
        entry = self._saved[position] if position < self._limit else None
        holder = entry() if type(entry) is ref else None
        return holder if holder is not None and holder.value is None else None

    def _compare(self, position: int, holder: Holder, tensor: torch.Tensor, owner: torch.Tensor) -> None:
        """Compare what is saved with what forward saved at the same place, and fail where they differ."""
        origin = None
        if type(owner) is not torch.Tensor or tensor.dtype in AUTOCAST_DTYPES:
            origin = parameter_behind(owner)
            if holder.origin is None and origin is not None and not is_parameter(origin):
                origin = None  # an input, which is a leaf in replay
        if (
            origin is not holder.origin
            or metadata_of(tensor) != holder.metadata
            or (
                type(owner.grad_fn) is not holder.producer
                and not (self.ops is not None and self.ops.has_loaded(owner))  # a slot has no `grad_fn`
            )
        ):
            self.explain(holder, tensor, owner, origin)
        self._compare_layouts(position, tensor, owner, holder.layout)

    def fill(self, holder: Holder, value: torch.Tensor) -> None:
        """Give a holder its value."""
        if self.unread is not None and self.unread.moved:
            self.unread.check_saved(value)
        holder.value = value

    def _call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the function, a second time if replay starts over."""
        if self.ops is None:
            return super()._call(function, args, kwargs)
        given = leaves_of(args, kwargs)
        while True:
            if self.ops.ops is not None:
                self.opening, self.lets_compiled_code_run = self.ops.ops.answer, CompiledCode.is_noticed
            try:
                super()._call(function, args, kwargs)
            except StopReplay as stop:
                if stop.replay is not self or not self._starts_over_for(None):
                    raise
            except Exception as error:
                if not self._starts_over_for(error):
                    raise
            else:
                if not self._starts_over_for(None):
                    return None
            args, kwargs = self._begin_again(args, kwargs, given)

    def _refused(self) -> Refusal | None:
        """Return the latest refusal that counts, also if user code swallowed it."""
        return self._refusal if self.stopped else last_refusal.get()

    def _starts_over_for(self, error: Exception | None) -> bool:
        """Whether replay starts over, given the exception that left the function."""
        refusal = self._refused()
        assert self.ops is not None
        if refusal is None and (self.stopped or error is None):  # an error of ours, or the end
            return self.region.kind is not None and self._is_doubtful() and self.ops.runs_functions()
        if refusal is not None and refusal.source.is_of(self.region):
            return self.ops.starts_over_for(refusal.error(), refusal)
        return error is not None and self.ops.starts_over_for(error, None)

    def _is_doubtful(self) -> bool:
        """Whether what has run is an error, as far as it is known."""
        if self._error is not None or self.region.tape.empty():
            return True
        return self._other_sample(self.region.last_sample) is not None

    def _begin_again(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Forget what this replay has done; return its arguments, untouched."""
        assert self.ops is not None
        self.region.tape.forget_values()
        self.stopped = self.over = False
        self._error = self._refusal = None
        self._limit = len(self._saved)
        self._end_at(self.region.tape.last_needed())  # what a budget had kept is empty now, too
        self.position = self._others_next = 0
        self._unfilled_number, self._suspects = -1, ()
        last_refusal.set(None)
        self.ops.suppressed.restore()
        self.ops.begin_again()
        if self._before and self.region.outside is not None:
            put_back(self._before)
            self._before, _ = self.region.outside.go_back(self.region.name)
        if self.region.rng is not None:
            self.region.rng.restore()
        fresh = [
            fresh_alias(leaf, leaf.requires_grad, not leaf.is_leaf)
            if isinstance(leaf, Tensor) and not is_parameter(leaf)
            else leaf
            for leaf in given
        ]
        return with_leaves(args, kwargs, fresh)

    def _stop_at(self, position: int) -> None:
        if position < self._last or self._unfilled_number == sequence_number():
            return
        is_last = position == self._limit - 1 and count_of_modes() == (self.ops is not None)
        if not (is_last and self._tail_is_tiny(position)):
            self.stop()
        elif self.ops is not None:
            self._end() if self.ops.ends_soon() else self.stop()

    def _tail_is_tiny(self, position: int) -> bool:
        """Whether so little follows the last save that to stop here by an exception would take longer."""
        region = self.region
        left = region.end_number - region.first_number - sequence_number() + self._first_number
        if not 0 <= left <= TINY_NODES:
            return False
        kind: type = NoneType  # of the node that made the last saved tensor
        for entry in self._saved[max(position - TINY_NODES, 0) :]:
            holder = entry() if type(entry) is ref else None
            saved = entry if holder is None else holder.value
            if holder is not None:
                kind = holder.producer
            if isinstance(saved, Tensor) and (saved.layout is not torch.strided or saved.nbytes > TINY_BYTES):
                return False
        return kind is not NoneType

    def ops_now(self) -> Answerer | None:
        """Return the ops of this replay; None once it is over, when user code goes on anyway."""
        if self.ops is None and not self.over:
            self.ops = Answerer(self, self.region)
        return None if self.over else self.ops

    def take_others(self, tape: Tape) -> None:
        """Compare what an inner region has saved now and not made with what it saved in this region's forward."""
        noted, begin = self.region.tape.others, self._others_next
        self._others_next = begin + len(tape.others)
        for (holder, before, version), (_, now, version_now) in zip(noted[begin:], tape.others, strict=False):
            is_modified = version_now > version and before() is now() is not None and not self.over
            if is_modified and (known := holder()) is not None and known.metadata[0] != CHANGED:
                self.fail(modified_since(known))

    def stop_if_filled(self) -> None:
        """End the replay if no holder is left to fill: by now an op has filled what it had saved before."""
        if self.position > self._last and not self.over:
            self.stop()

    def stop(self) -> NoReturn:
        """End the replay; see NOTE [ How a replay ends ]."""
        self._end()
        raise (StopUnderHooks if is_under_always_called_hooks(_REPLAY) else StopReplay)(self)

    def _end(self) -> None:
        """Ignore what the function does from here on."""
        self.over, self._limit = True, 0
        if not self.stopped:
            self.stopped, self._refusal = True, last_refusal.get()
            if self.watcher is not None and self.ops is not None:
                self.ops.suppressed.restore()
                self.show_ops_to(None)

    def fail(self, error: Exception) -> NoReturn:
        """Keep an error, and end the replay with it."""
        if not self.stopped:
            self._error = error
        self.stop()

    def explain(self, holder: Holder, tensor: torch.Tensor, owner: torch.Tensor, origin: torch.Tensor | None) -> None:
        """Find what differs from forward, and fail unless it is harmless."""
        loaded = self.ops is not None and self.ops.has_loaded(owner)
        error = what_differs(self.region, holder, tensor, owner, origin, loaded, self._sees_modes_of_forward)
        if error is not None:
            name = None if self.ops is None or type(holder) is OpHolder else self.ops.next_name()
            if name is not None and type(error) is MismatchError:
                error.what += f" (replay has not reached op {name!r} of forward)"
            self.fail(error)

    def _compare_layouts(self, position: int, tensor: torch.Tensor, owner: torch.Tensor, before: Layout | None) -> None:
        """Fail if the placement of a view in its base differs from forward."""
        if tensor is owner and before is None:
            return
        if self.ops is not None and (self.ops.has_loaded(owner) or type(tensor) is Placeholder):
            return  # what was kept for replay has lost its base
        error = lies_otherwise(self.region, position, tensor, owner, before)
        if error is not None:
            self.fail(error)

    def _take_error(self) -> Exception:
        # Neither the mode nor a frame may know an error whose traceback knows them.
        error, self._error = self._error, None
        assert error is not None
        return error

    def _check(self) -> None:
        """Raise what the pack hook found, and check that replay saved as much as forward did."""
        if self._error is None and self.region.options.determinism_check == "bitwise":
            self._error = first_difference(self.region, self.region.tape.holders_to_fill())
        if self._error is not None:
            raise self._take_error()
        if self.unread is not None and (refused := self.unread.refuse_compiled_code()) is not None:
            raise refused
        if (refusal := self._refused()) is not None:
            raise self._explained(refusal.error())
        region = self.region
        if self.ops is not None:
            self.ops.check_passed(self._last) if self.over else self.ops.finish()
        # Where nothing is skipped, what replay came to is filled.
        if (self.ops is not None or self.position <= self._last_empty) and (empty := region.tape.empty()):
            raise saved_otherwise(region, self.position, empty[0])
        if not region.options.early_stop and self.position != len(self._saved):
            raise saved_otherwise(region, self.position)
        if region.last_sample is not None or self._suspects:
            error = self._other_sample(region.last_sample)
            if error is not None:
                raise error

    def _explained(self, error: Exception) -> Exception:
        """Return an error, with another remedy where a placeholder is read though everything has run."""
        if isinstance(error, PlaceholderError) and self.ops is not None and self.ops.started_over_for is not None:
            error.remedy = GROWN
        return error

    def _other_sample(self, last: tuple[int, bytes] | None) -> Exception | None:
        """Return the error about a value that differs from forward's; see NOTE [ Samples ]."""
        samples = [(position, self.region.samples[position], line) for position, line in self._suspects]
        if last is not None:
            samples.append((*last, ""))
        for position, before, line in samples:
            entry = self._saved[position]
            holder = entry() if type(entry) is ref else None
            if holder is not None and (value := holder.value) is not None and has_other_values(before, value):
                return other_values(self.region, holder, before, line)
        return None


def _bound_now(region: OpenRegion) -> list[tuple[Place, State]]:
    """Return the tensors that are at the places that a region's function reaches, also those that forward put there."""
    found = reached_by(region.function, region.inputs).tensors
    # A list may be shorter after replay, and in a tuple nothing is put.
    return [(place, State(place.tensor, UNCOUNTED)) for place in found if type(place.holder) not in (list, tuple)]


_REPLAY = Filling.replay.__code__

# A replay runs on where so few nodes on tensors of so many bytes follow.
TINY_NODES, TINY_BYTES = 2, 4096

# For what reads a placeholder again, after a replay that ran everything.
GROWN = (
    "Replay has started over and run every op and call, and a placeholder of its first start is still read: a list or "
    "cache that outlives the region grew with each start. Clear it in the function, or keep it outside the region: "
    "return what it is to keep."
)
