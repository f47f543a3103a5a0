"""What a call is given, and what the log keeps of it: something with a name that replay skips whole or runs whole.

In: its arguments, and what forward noted of it. Kept: metadata, slots for what replay needs, and which saved tensors
wait. Out: the values of these, once replay has the call's arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, MappingProxyType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module

from torch_remat.dispatch.ambient import RngState
from torch_remat.dispatch.holder import OpHolder
from torch_remat.dispatch.keys import key_of, keys_of, offset_in_bytes, version_of
from torch_remat.dispatch.ops.entry import Entry
from torch_remat.dispatch.ops.schema import UNKNOWN
from torch_remat.dispatch.placeholder import Placeholder, new_tuple
from torch_remat.dispatch.reach import Place, reach
from torch_remat.dispatch.slot import Slot
from torch_remat.offload.transfer import Placement
from torch_remat.policies.decision import CheckpointPolicy

_NONE: Mapping[int, Any] = MappingProxyType({})
# One that a call is given: the number of the argument, or that of the variable, with its key.
Source = int | tuple[int, Any]
# Of a source: the type of the node that made it, and the `origin` of a holder.
Origin = tuple[type, torch.Tensor | ref[torch.Tensor] | None]
# Where it leaves the random generators the call itself stores.
_OF_A_CALL = UNKNOWN._replace(random=False)


class Given:
    """The arguments of a call, then the variables that its function reaches, which are looked for when asked for.

    Args:
        function: The function; None if it has no variables.
        leaves: The leaves of the arguments.
        keys: The storages of all of them, if these are known.
    """

    before: Sequence[tuple[torch.Tensor, int]] = ()  # those that the call may modify, with their versions
    _places: Sequence[Place] | None = None
    _by_key: dict[int, Source] | None = None
    _has_keys_of_variables = False

    def __init__(self, function: Any, leaves: Sequence[Any], keys: Sequence[int] | None = None) -> None:
        self.leaves = leaves
        self._function = function
        self._all_keys = keys

    def place_at(self, key: int) -> Source | None:
        """Return which of them has a storage; None if none has. The variables are looked for if no argument has it."""
        if self._all_keys is not None and key not in self._all_keys:
            return None
        if self._by_key is None:
            self._by_key = {}
            for place, leaf in enumerate(self.leaves):
                for part in keys_of(leaf) if isinstance(leaf, torch.Tensor) else ():
                    self._by_key.setdefault(part, place)
        if key not in self._by_key and not self._has_keys_of_variables:
            self._has_keys_of_variables = True
            for at, variable in enumerate(self.places()):
                if variable.tensor is not None and variable.tensor.layout is torch.strided:
                    self._by_key.setdefault(key_of(variable.tensor), (at, variable.key))
        return self._by_key.get(key)

    def places(self) -> Sequence[Place]:
        """Return where the tensors are that the function reaches besides."""
        if self._places is None:
            self._places = [] if self._function is None else variables_of(self._function, self.leaves)
        return self._places

    def keys(self) -> Sequence[int]:
        """Return the storages of all of them."""
        self.place_at(-1)
        return () if self._by_key is None else list(self._by_key)

    def find(self, tensor: torch.Tensor, key: int) -> tuple[Source, torch.Tensor] | None:
        """Return which of them a tensor is, or else shares the storage of, and that one; None if it is new."""
        for place, leaf in enumerate(self.leaves):
            if leaf is tensor:
                return place, leaf
        found = self.place_at(key)
        return None if found is None else (found, self.at(found))

    def at(self, place: Source) -> Any:
        """Return one of them; None if it is not there, as it may be in replay."""
        if not isinstance(place, tuple):
            return self.leaves[place] if place < len(self.leaves) else None
        (at, key), found = place, self.places()
        return found[at].tensor if at < len(found) and found[at].key == key else None

    def has_changed(self, tensor: torch.Tensor) -> bool:
        """Whether the call has modified one of them so far."""
        return any(one is tensor and version_of(one) != version for one, version in self.before)

    def is_of_module(self, place: Source) -> bool:
        """Whether it is a buffer or an attribute of a module, which no region makes."""
        if not isinstance(place, tuple):
            return False
        variable = self.places()[place[0]]
        holder = variable.holder
        return variable.module is not None or (type(holder) is dict and "_parameters" in holder)


NOTHING = Given(None, ())


def variables_of(function: Any, leaves: Sequence[Any]) -> list[Place]:
    """Return where the tensors are that a call reaches besides its arguments, in the same order in both phases."""
    owner = getattr(function, "__self__", None)
    if type(function) is BuiltinFunctionType or isinstance(owner, type):  # or the ``apply`` of a custom Function
        return [Place(None, "self", owner, None)] if isinstance(owner, torch.Tensor) else []
    return reach(function, [leaf for leaf in leaves if isinstance(leaf, Module)]).tensors


class Call(Entry):
    """Something with a name: a call of `op`, a native region, or an op with a handle.

    Attributes:
        name: Its name, with its scopes.
        policy: Its policy.
        function: What identifies its function in both phases; None for a handle.
        results: For each leaf of the result a `Meta` or `WrapperMeta` if the call made the tensor; else where it comes
            from (`Passed`, `Again`), or the value itself. Alone if the result is one leaf.
        gradients: For each leaf that the call made, whether it needs a gradient.
        template: The form of the result, alone in a tuple; empty if it is one leaf.
        layout: Shape and strides of its tensor arguments.
        start: How many tensors the region had saved when the call began.
        end: How many when it ended, or had saved what it saves.
        waiting: Saved tensors that replay has: arguments and variables, or views of these.
        drawn: Where the call left the random generators, if it drew numbers.
        answers: The ops of a native region, in order, each with its results; None for other calls.
        plain: The outputs of a handle that are not differentiable.
        inputs: What is kept of those arguments that are outputs of handles, by their number, if replay runs the call.
        views: Which of them are views.
        touched: Whether it modified something created outside the region.
        wrote: The tensors created outside the region that it modified and that replay cannot put back, by name.
        modified: Arguments and variables that it modified, by place, with weak references to their storages: replay
            runs it whole if it has others there, which the region makes.
        higher: Whether a higher-order op ran in it that gets placeholders in replay, if it is a native region.
        why: Why replay runs it whole; empty if it skips it.
        listed: If a policy lists it, the function, and how many calls of that came before it.
        is_by_price: Whether a ladder says what becomes of it.
        may_wait: Saved tensors that are kept since a call by price made them, which would wait if replay ran that one.
        is_answered: Whether replay goes on past it, so that there is what it returned, or what stands in for that.
        casts: Which of its arguments autocast casts before it runs, by place; None without autocast.
        is_saved: Whether it keeps what it has saved; decided at the end of forward, if its policy says so.
    """

    is_call = True
    effects = _OF_A_CALL
    name = ""
    policy = CheckpointPolicy.SAVE
    function: Any = None
    results: Any = None
    gradients: Sequence[bool] = ()
    template: tuple[Any, ...] = ()
    layout: Sequence[Any] = ()
    start = end = 0
    waiting: Sequence[Waiting] = ()
    drawn: RngState | None = None
    answers: Sequence[Entry] | None = None
    plain: Sequence[int] = ()
    inputs: Mapping[int, Slot] = _NONE
    views: Sequence[int] = ()
    touched = higher = False
    wrote: Sequence[str] = ()
    modified: Sequence[tuple[Source, StorageWeakRef]] = ()
    why = ""
    listed: tuple[Any, int] | None = None
    is_by_price = is_answered = False
    may_wait: Sequence[tuple[Any, Waiting]] = ()
    casts: Sequence[int] | None = None
    is_saved = True

    def __init__(self, name: str, policy: CheckpointPolicy, function: Any = None) -> None:
        self.name = self.group = name
        self.policy = policy
        self.function = function

    @property
    def op(self) -> Call:
        """The call itself, by which the log knows it."""
        return self

    @property
    def is_skipped(self) -> bool:
        """Whether replay skips what it saved: its range of the tape."""
        return self.answers is None and self.policy is not CheckpointPolicy.RECOMPUTE and self.is_saved

    @property
    def is_handle(self) -> bool:
        """Whether it is an op with a handle."""
        return self.function is None

    def label(self, place: int) -> str:
        """Return the name of a result: ``out``, or its number if there are several."""
        return str(max(place, 0)) if self.template else "out"

    def let_run(self, saved: Sequence[object]) -> list[OpHolder]:
        """Let replay run it, which then fills its holders; return these. ``saved`` is what the region saved."""
        self.is_saved, self.waiting = False, ()
        entries = saved[self.start : self.end]
        holders = [found for one in entries if type(one) is ref and type(found := one()) is OpHolder]
        for holder in holders:
            holder.resident, holder.packed, holder.unpack = False, None, None
        return holders

    def forget(self) -> None:
        """Drop what only a further replay would need; reports still ask for the saved tensors that replay has."""
        if self.drawn is not None:
            self.drawn = self.before = None
        self.kept = self.inputs = _NONE
        if self.answers is not None:
            self.answers = ()


class Waiting(NamedTuple):
    """A saved tensor that is taken in replay from an argument or a variable of its call: its source.

    Attributes:
        holder: The holder that waits for it.
        place: Which argument or variable the source is.
        view: The tensor's placement in the source's storage, or its layout in a source that is no view itself; None if
            it is the source itself.
        source: The placement of the source, or its shape with a layout; None if it is the source itself.
        origin: Where the source comes from; None likewise: as its holder says.
    """

    holder: ref[OpHolder]
    place: Source
    view: Any
    source: Any
    origin: Origin | None = None

    @classmethod
    def of(
        cls, tensor: torch.Tensor, holder: OpHolder | None, place: Source, source: torch.Tensor, origin: Origin | None
    ) -> Waiting:
        """Describe a tensor that shares the storage of its source: a saved one, or a result, for which none waits."""
        places = (None, None) if source is tensor else (Placement.of(tensor), Placement.of(source))
        made: Waiting = new_tuple(cls, (holder and ref(holder), place, *places, origin))
        return made

    def value(self, source: torch.Tensor, with_history: bool = False) -> torch.Tensor | None:
        """Return the saved tensor, from replay's counterpart of its source; None if that lies otherwise in memory."""
        view, known = self.view, self.source
        if view is None:
            return source.detach()
        if type(known) is torch.Size:
            strides, offset, own = view
            if (holder := self.holder()) is None or source.shape != known or source.stride() != own:
                return None
            return source.detach().as_strided(holder.metadata[1], strides, source.storage_offset() + offset)
        if known._replace(offset_bytes=offset_in_bytes(source)) != Placement.of(source):
            # Hooks around the region may give its inputs back in another order.
            ordered = _laid_out(source, known)
            if ordered is None:
                return None
            source = ordered
        moved = offset_in_bytes(source) - known.offset_bytes
        if not isinstance(source, Placeholder) and not view.lies_within(source.untyped_storage().nbytes(), moved):
            return None
        value: torch.Tensor = view.seen_in(source if with_history else source.detach(), moved)
        return value


def _laid_out(tensor: torch.Tensor, like: Placement) -> torch.Tensor | None:
    """Return a copy of a tensor with other strides; None if it would not fill its memory, each element once."""
    now = Placement.of(tensor)
    if like != now._replace(stride=like.stride, offset_bytes=like.offset_bytes) or now.conjugated or now.negated:
        return None
    if like.span.stop - like.span.start != tensor.nbytes:
        return None
    with torch.no_grad():
        made = torch.empty_strided(like.shape, like.stride, dtype=tensor.dtype, device=tensor.device)
        return made.copy_(tensor)
