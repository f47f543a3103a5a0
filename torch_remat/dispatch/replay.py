"""Replay: a region's function runs again in backward and fills the empty holders.

In: a region whose tape has empty holders. Kept: nothing past the replay. Out: filled holders, or an error; the replay's
own autograd graph dies with it.

NOTE [ How a replay ends ]
1. Once the last empty holder is filled, `StopReplay` ends the function, unless ``early_stop=False``. It derives from
   BaseException, so that ``except Exception`` in user code does not swallow it. It is raised once: code that catches
   it all the same (``except:``, ``finally:``) runs on undisturbed, and its result is thrown away.
2. The pack hook runs before its op does, and an op may save a buffer that it is about to fill (``F.rrelu`` its noise).
   Such a buffer is a tensor of floats that needs no gradient. Where the last op to save anything saves one, the
   function runs to its end. Elsewhere the op itself is spared, which for a last matrix product is much.
3. An error found in the pack hook is kept and raised after the function was left, so that user code cannot swallow
   it either.
4. A replay that has something to fill goes on until each live anchored holder has met its parameter again: where
   parameters were replaced, what was filled is wrong.
5. A replay that fails empties again what it filled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter

from torch_remat._compat import sequence_number, set_grad_enabled, without_dispatch_modes
from torch_remat.dispatch.comparison import what_differs
from torch_remat.dispatch.determinism import Values, value_function
from torch_remat.dispatch.holder import AUTOCAST_DTYPES, Holder, OpHolder, ResidentRef, metadata_of, parameter_behind
from torch_remat.dispatch.inner_ops import check_inner, missing_inner
from torch_remat.dispatch.mismatch import another_parameter, fewer_saved, more_saved, other_value
from torch_remat.dispatch.mode import RematMode, StopReplay
from torch_remat.dispatch.naming import scope, scope_restored
from torch_remat.dispatch.observe import Watch, is_watched
from torch_remat.dispatch.options import DEFAULTS
from torch_remat.dispatch.parameters import check_parameters
from torch_remat.dispatch.placeholder import Packed, Placeholder, add_note, last_refusal, real, unpack
from torch_remat.dispatch.policy_replay import PolicyReplay
from torch_remat.dispatch.replay_ops import ReplayOps
from torch_remat.errors import MismatchError, RematError

if TYPE_CHECKING:
    from torch_remat.dispatch.region import Region


class Filling(RematMode):
    """The replay of a region. Its pack hook gives each empty holder its value, in the order of forward."""

    replaying = True
    inner_next = 0  # the place of the next op of an inner region
    ops: ReplayOps | None

    def __init__(self, region: Region, empty: list[Holder]) -> None:
        self.region = region
        self._empty = empty
        self._error: RematError | None = None
        self.over = False
        self._values: Values | None = None
        self.watcher = None
        self._unfilled_number = -1  # of the latest op that may yet fill what it saved
        self._saved = region.tape.saved
        self._limit = len(self._saved)  # 0 once the replay is over, so that the pack hook has one thing to look at
        # Where early stop may end the replay; without it, past the end.
        self._last = region.tape.last_needed() if region.options.early_stop else self._limit
        self._waiting = sum([type(holder) is OpHolder for holder in empty]) if region.tape.elided else 0
        self.ops = ReplayOps(self) if region.tape.records else None
        self.position = 0
        self._first_number = sequence_number()
        if region.options is not DEFAULTS:
            value_of = value_function(region.options.determinism_check)
            self._values = None if value_of is None else Values(value_of)

    def replay(self) -> None:
        """Run the function as far as it is needed; the caller holds the region's lock.

        Raises:
            MutationError: A region input was changed in place.
            MismatchError: Replay did something else than forward.
        """
        region = self.region
        assert region.function is not None
        assert region.inputs is not None
        if last_refusal.get() is not None:
            last_refusal.set(None)
        grad_enabled = torch.is_grad_enabled()
        try:
            if region.parameters:
                check_parameters(region, region.parameters)
            args, kwargs = region.inputs.restore(region)
            set_grad_enabled(True)
            try:
                self.run(region.function, args, kwargs, (self.pack_hook(), unpack), self._contexts())
            except StopReplay as stop:
                if stop.replay is not self:
                    raise
            except Exception as error:
                # What user code made of a stop, or of an error of ours that passed through it, does not count.
                if not self.over:
                    add_note(error, region.name)
                    raise
            set_grad_enabled(grad_enabled)
            self._check()
        except BaseException:
            for holder in self._empty:
                holder.value = None
            raise
        finally:
            set_grad_enabled(grad_enabled)
            if self.ops is not None:
                self.ops.forget()
                self.ops = None  # which knows this mode
            self.observed = None
            if last_refusal.get() is not None:
                last_refusal.set(None)

    def _contexts(self) -> list[AbstractContextManager[Any]]:
        region = self.region
        contexts: list[AbstractContextManager[Any]] = region.ambient.contexts()
        if is_watched():
            self.observed = Watch(self)
            contexts.insert(0, self.observed)
        if scope.get() != region.scope:
            contexts.append(scope_restored(region.scope))
        if region.options is DEFAULTS and region.rng is None:
            return contexts
        if region.rng is not None:
            contexts.append(region.rng.replayed())
        if region.replay_context is not None:
            contexts.append(region.replay_context)
        if region.op_log is not None:
            contexts.append(self.watch(region.op_log.begin_replay()))
        if region.tape.calls:
            self.ops = self.ops or ReplayOps(self)
            self.ops.policy = PolicyReplay(self, self.ops.suppressed)
            self.opening = self.ops.policy.answer
        return contexts

    def pack_hook(self) -> Callable[[torch.Tensor], torch.Tensor | Packed]:
        """Return the pack hook: it takes the value for the next holder and returns what the replay's own graph keeps.

        Like that of forward it is a closure that leaves to `pack` what is not plain.
        """
        saved, last, values = self._saved, self._last, self._values

        def pack(tensor: torch.Tensor) -> torch.Tensor | Packed:
            position = self.position
            ops = self.ops
            if position >= self._limit or values is not None or (ops is not None and ops.suppressed.pending):
                return self.pack(tensor)
            entry = saved[position]
            if type(entry) is ref:
                holder = entry()
                if (
                    holder is not None
                    and holder.plain
                    and holder.value is None
                    and type(tensor) is Tensor
                    and metadata_of(tensor) == holder.metadata
                    # What came from a slot has no history.
                    and (type(tensor.grad_fn) is holder.producer or (ops is not None and ops.has_loaded(tensor)))
                ):
                    self.position = position + 1
                    if self.watcher is None:
                        holder.value = value = tensor.detach()
                    else:
                        with without_dispatch_modes():
                            holder.value = value = tensor.detach()
                    if position == last:
                        self._stop_at(position)
                    return value
            elif position == last:
                pass
            elif entry is tensor and type(tensor) is Parameter:
                self.position = position + 1
                return tensor
            elif type(entry) is ResidentRef and type(tensor) is Tensor:
                self.position = position + 1
                return entry.value_like(tensor)
            return self.pack(tensor)

        return pack

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | Packed:
        """Do what the pack hook does, for any tensor."""
        position = self.position
        self.position = position + 1
        if self.ops is not None and self.ops.suppressed.pending:
            self.ops.suppressed.restore()
        if type(tensor) is Placeholder:
            entry = self._saved[position] if position < self._limit else None
            if type(entry) is not ref or (holder := entry()) is None or holder.value is not None:
                if self._limit:
                    self._stop_at(position)
                return Packed.of(tensor)
            if tensor.compute is not None:
                if self.ops is not None and self.ops.compares():  # likely for another op than forward's
                    self.after_next_op(partial(self._fill_late, holder, tensor, position))
                    return Packed.of(tensor)
                tensor = tensor.compute("saving it for backward")
                self.note_loaded(tensor)
        owner: torch.Tensor | None
        origin: torch.Tensor | None
        value: torch.Tensor
        if type(tensor) is Parameter:
            owner = origin = value = tensor
        else:
            owner = tensor._base
            if owner is None:
                owner = tensor
            origin = None
            if type(owner) is not torch.Tensor or tensor.dtype in AUTOCAST_DTYPES:
                origin = parameter_behind(owner)
            if origin is tensor:
                value = tensor
            elif self.watcher is None or type(tensor) is not torch.Tensor:
                value = tensor.detach()
            else:
                with without_dispatch_modes():
                    value = tensor.detach()
        if position >= self._limit:
            return value
        entry = self._saved[position]
        if type(entry) is ref:
            holder = entry()
            if holder is None:
                return value
            if (
                origin is not holder.origin
                or metadata_of(tensor) != holder.metadata
                or (
                    type(owner.grad_fn) is not holder.producer
                    and not (self.ops is not None and self.ops.has_loaded(owner))  # a slot has no history
                )
            ):
                self.explain(holder, tensor, owner, origin)
                if self.over:
                    return value
            if holder.value is None:
                holder.value = value
                if self._values is not None:
                    with self.unwatched():
                        self._values.add(holder, value, self._compare_value)
                if not tensor.requires_grad and value.is_floating_point():
                    self._unfilled_number = sequence_number()
        elif isinstance(entry, torch.Tensor) and origin is not entry:
            self.fail(another_parameter(self.region, f"saved tensor {position}", None, entry, tensor))
        if type(value) is not Placeholder:  # else its reader comes next, which the error is to name
            self._stop_at(position)
        return value

    def _fill_late(self, holder: Holder, placeholder: Placeholder, position: int) -> None:
        value = real(placeholder, "saving it for backward")
        self.note_loaded(value)
        self.explain(holder, value, value, None)
        holder.value = value.detach()
        self._stop_at(position)

    def _stop_at(self, position: int) -> None:
        if position == self._last and not self._waiting and self._unfilled_number != sequence_number():
            self.stop()

    def ops_now(self) -> ReplayOps | None:
        """Return the ops of this replay; None once it is over, when user code goes on all the same."""
        if self.ops is None and not self.over:
            self.ops = ReplayOps(self)
        return None if self.over else self.ops

    def give_name(self, tensor: torch.Tensor, name: str) -> None:
        """Replay keeps what forward has chosen."""

    def note_loaded(self, tensor: torch.Tensor) -> None:
        """Note a tensor that was kept, so that it has no history in replay."""
        assert self.ops is not None
        self.ops.note_loaded(tensor)

    def fill_elided(self, holder: Holder, value: torch.Tensor) -> None:
        """Give a holder of a skipped op its value."""
        if self.region.hooks is not None:  # what they restored may count its versions anew
            holder.metadata = (value._version, *holder.metadata[1:])
        holder.value = value
        if self._values is not None:
            with self.unwatched():
                self._values.add(holder, value, self._compare_value)
        self._waiting -= 1
        if not self._waiting and self.position > self._last:
            self.stop()

    def stop(self) -> NoReturn:
        """End the replay; see NOTE [ How a replay ends ]."""
        self.over = True
        self._limit = 0
        raise StopReplay(self)

    def fail(self, error: RematError) -> NoReturn:
        """Keep an error and end the replay with it."""
        self._error = (missing_inner(self) if type(error) is MismatchError else None) or error  # it explains all else
        self.stop()

    def explain(self, holder: Holder, tensor: torch.Tensor, owner: torch.Tensor, origin: torch.Tensor | None) -> None:
        """Tell apart what differs from forward, and fail unless it is harmless."""
        loaded = self.ops is not None and self.ops.has_loaded(owner)
        error = what_differs(holder, tensor, owner, origin, self._first_number, loaded)
        if error is not None:
            name = None if self.ops is None or type(holder) is OpHolder else self.ops.next_name()
            if name is not None and type(error) is MismatchError:
                error.what += f" (op {name!r} of forward has not come yet)"
            if self.ops is not None and self.ops.compares() and type(error) is MismatchError:
                self._error, self.over, self._limit = error, True, 0
                self.after_next_op(partial(self.fail, error))  # if that is another op, it says more
            else:
                self.fail(error)

    def _compare_value(self, holder: Holder, value: Any) -> None:
        # Before forward has ended, the last ones have no value yet.
        if getattr(holder, "fingerprint", value) != value and self._error is None:
            self._error = other_value(self.region, holder, value)

    def _take_error(self) -> RematError:
        # Neither the mode nor a frame may know an error whose traceback knows them.
        error, self._error = self._error, None
        assert error is not None
        return error

    def _check(self) -> None:
        """Raise what the pack hook found, and check that replay saved as much as forward did."""
        if self._values is not None:
            self._values.flush(self._compare_value)
        if self._error is not None:
            raise self._take_error()
        refusal = last_refusal.get()
        if refusal is not None:
            raise refusal.error()
        region = self.region
        if self.over or region.finished:
            if self.ops is not None:
                self.ops.check_passed(self._last) if self.over else self.ops.finish()
            check_inner(self, self._last if self.over else len(self._saved))
        for holder in self._empty:
            if holder.value is None:
                raise fewer_saved(region, holder, self.position)
        if region.finished and not region.options.early_stop and self.position != len(self._saved):
            raise more_saved(region, self.position)
