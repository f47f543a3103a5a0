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

from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ref

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from torch_remat._compat import node_number, sequence_number
from torch_remat.dispatch.determinism import Values, value_function
from torch_remat.dispatch.holder import (
    AUTOCAST_DTYPES,
    CHANGED,
    Holder,
    OpHolder,
    metadata_of,
    parameter_behind,
)
from torch_remat.dispatch.mismatch import (
    another_parameter,
    fewer_saved,
    more_saved,
    other_metadata,
    other_producer,
    other_value,
    outside_changed,
)
from torch_remat.dispatch.mode import RematMode
from torch_remat.dispatch.naming import scope, scope_restored
from torch_remat.dispatch.op import Op
from torch_remat.dispatch.options import DEFAULTS
from torch_remat.dispatch.parameters import check_parameters
from torch_remat.dispatch.placeholder import Placeholder, last_refusal, refuse
from torch_remat.dispatch.policy import CheckpointPolicy
from torch_remat.dispatch.replay_ops import ReplayOps
from torch_remat.errors import RematError

if TYPE_CHECKING:
    from torch_remat.dispatch.region import Region


class StopReplay(BaseException):
    """Ends the function of a replay that has filled what it had to; see NOTE [ How a replay ends ]."""

    def __init__(self, replay: Filling) -> None:
        self.replay = replay


def replay(region: Region, empty: list[Holder]) -> None:
    """Run a region's function again and fill its empty holders; the caller holds the region's lock.

    Raises:
        MutationError: A region input was changed in place.
        MismatchError: Replay did something else than forward.
    """
    mode = Filling(region, empty)
    try:
        mode.replay()
    except BaseException:
        for holder in empty:
            holder.value = None
        raise
    finally:
        mode.ops = None  # which knows the mode
        last_refusal.set(None)


class Filling(RematMode):
    """The replay of a region. Its pack hook gives each empty holder its value, in the order of forward."""

    replaying = True
    ops: ReplayOps | None = None
    _error: RematError | None = None
    _over = False
    _values: Values | None = None
    _unfilled_number = -1  # of the latest op that may yet fill what it saved

    def __init__(self, region: Region, empty: list[Holder]) -> None:
        self.region = region
        self._empty = empty
        self._saved = region.tape.saved
        self._limit = len(self._saved)  # 0 once the replay is over, so that the pack hook has one thing to look at
        # Where early stop may end the replay; without it, past the end.
        self._last = region.tape.last_needed() if region.options.early_stop else self._limit
        self._waiting = sum(type(holder) is OpHolder for holder in empty)
        self.ops = ReplayOps(self) if region.tape.records else None
        self._position = 0
        self._first_number = sequence_number()
        if region.options is not DEFAULTS:
            value_of = value_function(region.options.determinism_check)
            self._values = None if value_of is None else Values(value_of)

    def replay(self) -> None:
        """Run the function as far as it is needed, and raise what was found wrong."""
        region = self.region
        assert region.function is not None
        assert region.inputs is not None
        if region.parameters:
            check_parameters(region, region.parameters)
        args, kwargs = region.inputs.restore(region)
        hooks = saved_tensors_hooks(self.pack, _identity)
        last_refusal.set(None)
        try:
            with torch.enable_grad():
                self.run(region.function, args, kwargs, hooks, self._contexts())
        except StopReplay as stop:
            if stop.replay is not self:
                raise
        except Exception as error:
            # What user code made of a stop, or of an error of ours that passed through it, does not count.
            if not self._over:
                _add_note(error, f"This was raised while region {region.name!r} was replayed in backward.")
                raise
        self._check()

    def _contexts(self) -> list[AbstractContextManager[Any]]:
        region = self.region
        contexts = region.ambient.contexts()
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
        return contexts

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the value for the next holder; return what the replay's own graph keeps."""
        position = self._position
        self._position = position + 1
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
            value = tensor.detach() if origin is not tensor else tensor
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
                self._explain(holder, tensor, owner, origin)
            if holder.value is None:
                holder.value = value
                if self._values is not None:
                    self._values.add(holder, value, self._compare_value)
                if not tensor.requires_grad and value.is_floating_point():
                    self._unfilled_number = sequence_number()
        elif isinstance(entry, torch.Tensor) and origin is not entry:
            self.fail(another_parameter(self.region, position, entry, tensor))
        if position == self._last and not self._waiting and self._unfilled_number != sequence_number():
            self._stop()
        return value

    def begin_op(self, name: str, policy: CheckpointPolicy, ctx: Any, body: FrameType) -> Op:
        """Begin an op in replay."""
        if self._over:
            return Op()
        if self.ops is None:
            self.ops = ReplayOps(self)
        return self.ops.begin(name, policy)

    def fill_elided(self, holder: Holder, value: torch.Tensor) -> None:
        """Give a holder that waits for an op's output its value."""
        if self.region.hooks is not None:  # what they restored may count its versions anew
            holder.metadata = (value._version, *holder.metadata[1:])
        holder.value = value
        self._waiting -= 1
        if not self._waiting and self._position > self._last:
            self._stop()

    def _stop(self) -> None:
        self._over = True
        self._limit = 0
        raise StopReplay(self)

    def fail(self, error: RematError) -> NoReturn:
        """Keep an error and end the replay with it; see NOTE [ How a replay ends ]."""
        self._error = error
        self._over = True
        self._limit = 0
        raise StopReplay(self)

    def _explain(self, holder: Holder, tensor: torch.Tensor, owner: torch.Tensor, origin: torch.Tensor | None) -> None:
        """Tell apart what differs from forward, and fail unless it is harmless."""
        if isinstance(owner, Placeholder):
            refuse(owner.source, "saving it for backward")
        region = self.region
        version, *metadata = holder.metadata
        if version == CHANGED:
            return  # an error if backward reads it, as in plain autograd
        if self._is_another(holder, owner, origin):
            self.fail(another_parameter(region, region.tape.position_of(holder), None, tensor))
        if region.options.determinism_check in ("default", "bitwise"):
            if metadata != [tensor.shape, tensor.dtype, tensor.device]:
                self.fail(other_metadata(region, holder, tensor))
            if self._is_by_another_op(holder, owner):
                self.fail(other_producer(region, holder, owner))
        if version != tensor._version:
            # Inputs that hooks around the region restored may count their versions anew.
            if region.inputs is None or not region.inputs.packed:
                self.fail(outside_changed(region, holder))
            holder.metadata = (tensor._version, *holder.metadata[1:])

    def _is_another(self, holder: Holder, owner: torch.Tensor, origin: torch.Tensor | None) -> bool:
        """Whether a parameter, or another tensor from outside the region, is not the one that forward used."""
        if origin is not None or not isinstance(holder.origin, ref):
            return origin is not holder.origin
        before = holder.origin()
        if before is owner:
            return False
        node = owner.grad_fn
        if node is not None:
            # One that the replay itself made is a recomputation of it.
            return node_number(node) < self._first_number
        # A leaf: from outside, or made in the region. If forward's is still there, the values tell.
        return before is not None and (before.grad_fn is not None or not torch.equal(before, owner))

    def _is_by_another_op(self, holder: Holder, owner: torch.Tensor) -> bool:
        """Whether a tensor was made by another op than in forward; only ops of torch itself are compared.

        Hooks of wrappers such as FSDP pass tensors through Functions of their own in one phase and not in the other.
        """
        node = owner.grad_fn
        if node is not None and node_number(node) < self._first_number:
            return False  # from outside: `_is_another` has judged it
        if self.ops is not None and self.ops.has_loaded(owner):
            return False
        kinds = {holder.producer, type(node)}
        return len(kinds) > 1 and not any(issubclass(kind, BackwardCFunction) for kind in kinds)

    def _compare_value(self, holder: Holder, value: Any) -> None:
        if holder.fingerprint != value and self._error is None:
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
        if self.ops is not None and not self._over and region.finished:
            self.ops.finish()
        missing = next((holder for holder in self._empty if holder.value is None), None)
        if missing is not None:
            raise fewer_saved(region, missing, self._position)
        if region.finished and not region.options.early_stop and self._position != len(self._saved):
            raise more_saved(region, self._position)


def _identity(value: torch.Tensor) -> torch.Tensor:
    return value


def _add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)
