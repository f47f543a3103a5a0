"""The log of one region's forward: its calls, under a policy its ops, and what autograd saves of them.

In: calls and ops as they run, and the tensors that autograd saves. Kept: calls and entries on the tape; until forward
ends, what saved entries returned, and what `ending` asks then. Out: residents.

NOTE [ What is kept ]
1. What a saved call saves is its *range* of the tape. Its holders keep their values past forward, but those of tensors
   that replay has as an argument or a variable of the call *wait*: they are filled when replay comes to the call.
   Outside of calls, a tensor that a saved call or op made is *resident*: its holder has the value from the start. A
   leaf that requires a gradient is never kept: the graph has it.
2. What a call returned is kept if replay goes on past the call: nobody asks who reads it. Under a policy, a result is
   kept only if an entry that runs in replay reads it (`needs`).
3. A policy does not see readers that are no ops. If there is one, replay starts over and runs every entry.
4. Without a policy, the output of a handle is kept by the handle, call or inner region that reads it, as its argument:
   for a native reader it is a placeholder, whose error says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any
from weakref import ref

from torch import Tensor, strided
from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat._compat import (
    OF_TRACES,
    is_traceable_wrapper,
    node_number,
    sequence_number,
    storage_key,
)
from torch_remat.dispatch.call.call import RunningCall, is_builtin, is_whole_call
from torch_remat.dispatch.call.entry import Call, Given, Origin, Waiting
from torch_remat.dispatch.call.handle import ForwardOp, SavedOp
from torch_remat.dispatch.call.log import Log, Running
from torch_remat.dispatch.call.native import RunningNative
from torch_remat.dispatch.call.result import Left, identity_of
from torch_remat.dispatch.holder import (
    AUTOCAST_DTYPES,
    NOBODY,
    UNKNOWN_LAYOUT,
    Anchor,
    Holder,
    Layout,
    OpHolder,
    Saver,
    parameter_behind,
)
from torch_remat.dispatch.keys import key_of
from torch_remat.dispatch.mode import RematMode
from torch_remat.dispatch.naming import ModulePath
from torch_remat.dispatch.ops.record import OpRecorder
from torch_remat.dispatch.placeholder import new_tuple
from torch_remat.dispatch.region.inputs import leaves_of
from torch_remat.dispatch.region.region import OpenRegion
from torch_remat.errors import UsageError
from torch_remat.policies.decision import CheckpointPolicy
from torch_remat.policies.policy import OpPolicy

_RECOMPUTE, _OFFLOAD = CheckpointPolicy.RECOMPUTE, CheckpointPolicy.OFFLOAD
_new = object.__new__  # without a call of `__init__`, which would be a tenth of what a handle costs
_INPUT = (None, NoneType)  # of a holder's `plain`, where the tensor may be something else than the result of an op


class Recorder(Log):
    """The log of one region's forward, and what runs its calls.

    Attributes:
        watch: The ops, under a policy.
        left: The saved calls that made more nodes than their results have.
        pointed: The storages to whose memory there was access, if the policy names functions.
        packs: Whether it has to be asked about each tensor that autograd saves.
        alive: What the call has saved that saves now, where hooks around the region must meet all of it.
    """

    def __init__(self, forward: RematMode, region: OpenRegion) -> None:
        super().__init__(forward, region)
        region.running = self.running
        self.watch: OpRecorder | None = None
        self.left: list[Left] = []
        self.pointed: dict[int, StorageWeakRef | None] = {}  # whose references keep addresses from coming again
        self.packs = False
        self.alive: list[Holder] = []

    # What is asked while forward runs.

    def free_name(self, name: str) -> str:
        """Return a name that no call has yet."""
        records, number = self.region.tape.records, 0
        own = name
        while own in records:
            number += 1
            own = f"{name}_{number}"
        return own

    def skips(self) -> bool:
        """Whether a call runs that replay skips."""
        return self.calling is not None

    def is_native(self) -> bool:
        """Whether a native region runs."""
        return type(self.calling) is RunningNative

    def running(self) -> str | None:
        """Return the name of the call that runs now; None outside of calls."""
        if self.calling is not None:
            return self.calling.call.name
        return self.saving.name if self.saving is not None and self.saving.function is not None else None

    def saver(self, tensor: Tensor) -> Saver:
        """Return the call that saves a tensor now, and what it calls it."""
        call = self.saving if self.calling is None else self.calling.call
        return NOBODY if call is None else (call.name, self.name_of(tensor, "") if self.named else "")

    # What autograd saves.

    def saves_now(self, tensor: Tensor) -> bool:
        """Whether a tensor that autograd saves is the next one of the handle that saves, before any other node.

        Also torch's checkpoint saves tensors, without a node.
        """
        if self.awaited and self.awaited[-1] is tensor and sequence_number() == self.number:
            self.awaited.pop()
            return True
        self.settle()
        return False

    def pack_by_log(self, tensor: Tensor) -> Holder | Anchor | None:
        """Return the holder for a tensor that no call saves itself; None if replay recomputes it, or has it."""
        if type(tensor) in OF_TRACES and not self.region.traced:
            return None
        calling = self.calling
        return calling.pack(tensor) if type(calling) is RunningNative else self.pack(tensor)

    def open(self, call: Call, leaves: Sequence[Any], keys: Sequence[int]) -> None:
        """Begin the range of a call, which has these arguments, in these storages."""
        if self.number >= 0:
            self.settle()
        call.start = len(self.region.tape.saved)
        self.saving, self.given = call, Given(None, leaves, keys)

    def settle(self) -> None:
        """End the range of the call that saves: what replay has as an argument or variable waits, the rest is kept."""
        call, given = self.saving, self.given
        if call is None:
            return
        saved = self.region.tape.saved
        call.end = len(saved)
        count = 0
        for place in range(call.start, call.end):
            entry = saved[place]
            if type(entry) is not ref:
                continue  # a leaf, which the graph owns
            count += 1
            holder = entry()
            if type(holder) is not OpHolder or (tensor := holder.value) is None:
                continue
            holder.tensor_name = f"saved_{count - 1}"
            if self.named:
                holder.tensor_name = self.name_of(tensor, holder.tensor_name)
            if holder.unpack is not None:
                continue  # a leaf's cast, made anew when it is read
            if given is not None and self._waits(call, holder, tensor, given):
                holder.resident = False
            elif tensor._version != holder.metadata[0]:
                continue  # an error where it is read: no hook may take it for what was saved
            elif self.region.hooks is not None:
                self._give_to_hooks(holder, tensor)
            elif call.policy is _OFFLOAD and not self._stays(tensor):
                self.departures.waiting.append((holder, tensor))
        self.saving = self.given = None
        self.named, self.number = (), -1
        self.alive.clear()
        self.awaited.clear()
        if self.departures.waiting:
            self.departures.send()

    def _stays(self, tensor: Tensor) -> bool:
        """Whether a call of a function has made a tensor that stays on the device, so that its readers keep no copy."""
        maker = self.storages.writers.get(key_of(tensor)) if self.storages.writers else None
        entry = None if maker is None else maker[0]
        return type(entry) is Call and len(entry.kept) > 0 and entry.policy is CheckpointPolicy.SAVE

    def _waits(self, call: Call, holder: OpHolder, tensor: Tensor, given: Given) -> bool:
        """Let replay take a saved tensor from an argument or a variable; return whether it can."""
        region, inputs, calling = self.region, self.region.inputs, self.calling
        key = storage_key(tensor) if type(tensor) is Tensor and tensor.layout is strided else key_of(tensor)
        if type(calling) is RunningNative and calling.has_made(key):
            return False  # what a handle inside saves is a placeholder in replay
        owner = tensor if tensor._base is None else tensor._base
        maker = self.storages.writers.get(key)
        if maker is None and holder.plain not in _INPUT and region.hooks is None and key not in self.by_handles:
            # What most are that a call has not made: an argument, no view, that an op of the region has made, or one
            # view of it, such as a product takes of what has three dimensions.
            for at, leaf in enumerate(given.leaves):
                if (
                    leaf is owner
                    and (leaf is tensor or _is_laid_out(tensor, leaf, holder.layout))
                    and leaf.layout is strided
                    and not (given.before and given.has_changed(leaf))
                    and holder.metadata[0] == tensor._version
                ):
                    view = (None, None) if leaf is tensor else (holder.layout, leaf.shape)
                    call.waiting = [*call.waiting, new_tuple(Waiting, (ref(holder), at, *view, None))]
                    return True
        if id(owner) in inputs.originals or (inputs.packed and inputs.shares(owner)):
            return False  # the inputs have its memory
        if holder.metadata[0] != tensor._version:
            return False
        is_kept = key in self.by_handles or (
            maker is not None
            and (isinstance(maker[0], Call) or maker[1] in maker[0].saved or self.storages.has_changed(tensor))
        )
        is_by_price = maker is not None and isinstance(maker[0], Call) and maker[0].is_by_price
        if is_kept and not is_by_price:
            return False  # replay will not have it
        found = given.find(tensor, key)
        if found is None or found[1].layout is not strided:
            return False
        place, source = found
        if given.before and given.has_changed(source):
            return False
        if self.is_state(source) and region.outside is not None and region.outside.has_changed(source):
            return False  # a batch norm modifies it, and moves no version counter
        if region.hooks is not None and source.grad_fn is None:
            return False  # replay of an enclosing region may skip what changed it
        origin = None
        if source is not tensor:
            if is_traceable_wrapper(source) or is_traceable_wrapper(tensor):
                return False  # a wrapper is no strided view of what it wraps
            base = source if source._base is None else source._base
            if inputs.shares(base):
                return False  # a view without a base, such as a detached one, does
            origin = _origin_of(base, region.first_number)
        waiting = Waiting.of(tensor, holder, place, source, origin)
        if is_kept:  # as long as replay does not run what makes it
            assert maker is not None
            call.may_wait = [*call.may_wait, (maker[0], waiting)]
            return False
        call.waiting = [*call.waiting, waiting]
        if maker is not None:
            self.needed.append((key, len(self.entries)))
        return True

    def give_up(self, call: Call) -> None:
        """Keep nothing of a call that replay runs: its holders are filled as if nobody had named it."""
        if self.saving is call:
            call.end = len(self.region.tape.saved)
            self.saving = self.given = None
            self.alive.clear()
        call.let_run(self.region.tape.saved)

    # What runs.

    def watch_all(self, policy: OpPolicy) -> None:
        """Watch the ops of the whole region, under a policy."""
        self.packs = True
        decider = policy.begin()
        self._notes_packed = decider.notes_packed
        self.watch = OpRecorder(self, decider, ModulePath(self.region.function))

    def note_call(self, call: Call) -> None:
        """Note what has a name, which must be a new one."""
        calls = self.region.tape.records
        if call.name in calls:
            raise UsageError(
                "the region already has an op with this name",
                region=self.region.name,
                op=call.name,
                remedy="Give each call its own name; remat.name_scope('block.0') prefixes the names inside it.",
            )
        calls[call.name] = call
        call.start = len(self.region.tape.saved)

    def run(
        self, is_native: bool, name: str, policy: CheckpointPolicy, function: Callable[..., Any],
        args: Sequence[Any], kwargs: Mapping[str, Any],
    ) -> Any:  # fmt: skip
        """Run a native region, or a call of `op`; see `RematMode.run_native`."""
        if self.number >= 0:
            self.settle()
        if self.calling is not None or (self.opened and self.is_in_skipped_body()):
            return self.mode.user_code(function, args, kwargs)
        call = Call(name, policy, identity_of(function))
        self.note_call(call)
        if self.results.unread:  # before the call modifies them, too
            self.results.read_versions()
        if policy is _RECOMPUTE:
            call.inputs = self.inputs_from_handles(leaves_of(args, kwargs))
            return self.mode.user_code(function, args, kwargs)
        is_whole = is_whole_call(function, args, kwargs)
        of_torch = is_whole and is_builtin(function)
        is_native = is_native and not is_whole
        self.packs = True
        running: Running
        if is_native:
            running = RunningNative(self, call, function, args, kwargs)
        else:
            running = RunningCall(self, call, function, args, kwargs, of_torch)
            self.saving, self.given = call, running.given
        call.inputs = self.inputs_from_handles(running.given.leaves, True)  # it may run whole
        self.calling = running
        before = None if of_torch or self.region.outside is None else self.region.outside.before()
        drawn = None if self.watch is None else self.watch.drawn_so_far()
        compiled = None if self.watch is None else self.watch.compiled_code.so_far()
        try:
            if type(running) is RunningNative:
                result = self.mode.watched(running.watch, function, args, kwargs)
            elif self.mode.watcher is None:
                result = self.mode.user_code(function, args, kwargs)
            else:
                with self.mode.unwatched():
                    result = self.mode.user_code(function, args, kwargs)
            self.settle()
            if before is not None:
                self.note_outside(call, before)
            running.returns(result)
            if running.outputs is not None:
                self.left.append(Left(call, running.first, running.last, running.outputs))
            if call.why or (self.has_policy and not (of_torch or is_native)):  # what it reads where it runs whole
                call.reads = [*call.reads, *running.given.keys()]
            if self.watch is not None and drawn is not None and call.drawn is not None:
                self.watch.note_draws(call, drawn)
        except BaseException:
            self.settle()
            running.raises()
            raise
        finally:
            self.calling = None
            call.end = len(self.region.tape.saved)
            if self.watch is not None and compiled is not None:  # it reads nothing that replay does not give the call
                self.watch.compiled_code.forget_since(compiled)
        return result

    def enter_region(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Keep what an inner region gets from handles; a policy sees what it reads."""
        if self.number >= 0:
            self.settle()
        if self.region.tape.records:
            self.region.tape.entered.append(self.inputs_from_handles(leaves_of(args, kwargs)))
        return args, kwargs

    def begin(self, name: str, policy: CheckpointPolicy, ctx: Any) -> ForwardOp | None:
        """Begin a handle; None if it is part of a call that replay skips. Only `get_handle` calls it."""
        if self.number >= 0:
            self.settle()
        calling = self.calling
        if calling is not None and type(calling) is not RunningNative:
            return None  # it is part of the call
        if self.opened and self.is_in_skipped_body():
            return None
        if calling is not None:
            policy = CheckpointPolicy.SAVE  # it follows the enclosing native region
        op: ForwardOp
        call: Call = _new(Call)
        # What is read of it is set, also where the class has the same: Python finds the former far sooner.
        call.name = call.group = name
        call.policy = policy
        call.waiting = ()
        call.drawn = call.function = None
        if policy is _RECOMPUTE:
            op = _new(ForwardOp)
        else:
            op = _new(SavedOp)
            op.entered = len(self.region.tape.entered)
            call.plain = ()
            if self.draws is not None and calling is None:
                self.draws.begin()
            if self.region.outside is not None and calling is None:
                op.before = self.region.outside.before()
        tape = self.region.tape
        if name in tape.records:
            self.note_call(call)
        else:  # what it does, for the usual op
            tape.records[name] = call
            call.start = len(tape.saved)
        op._ctx = ctx
        op._name = name
        op._step = -1
        op.args = ()
        op.ops = self
        op.call = call
        op.depth = len(self.opened)
        self.opened.append((ref(ctx), call))
        return op

    # The end.

    def forget(self) -> None:
        """Let go of what an exception has left open, and of the graph."""
        self.region.running = self.watch = None
        self.opened, self.left, self.calling = [], [], None
        self.by_handles, self.known = {}, []
        self.saving = self.given = None
        self.named = ()
        del self.mode, self.departures


def _is_laid_out(view: Tensor, base: Tensor, layout: Layout | None) -> bool:
    """Whether a layout and a shape tell all of what is a view of a tensor."""
    if layout is None or layout is UNKNOWN_LAYOUT or view.dtype is not base.dtype:
        return False
    return not (view.is_conj() or view.is_neg())


def _origin_of(owner: Tensor, first_number: int) -> Origin:
    """Return what made an input, and where it comes from, which replay compares as it does for what is recomputed."""
    node, leaf = owner.grad_fn, None
    if type(owner) is not Tensor or owner.dtype in AUTOCAST_DTYPES:
        leaf = parameter_behind(owner)
    outside = owner.requires_grad if node is None else node_number(node) < first_number
    return type(node), ref(owner) if outside and leaf is None else leaf
