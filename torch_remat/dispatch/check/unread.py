"""Tensors that a replay must not read: parameters and other tensors that are not as forward found them.

In: the parameters that a region's function reaches, and other tensors that its replay must not read. Kept: the
parameters themselves, which are not the region's memory, and their versions at the end of forward; nothing past the
replay. Out: an error where a parameter was replaced by another with other values, and at the first op of replay that
reads a tensor which is not as forward left it.

Autograd does not save a weight whose input needs no gradient, nor any bias, so the saved tensors alone do not show that
such a parameter was replaced or modified (`torch.func.functional_call` around the region, a reassigned attribute, an
optimizer step before backward). A region's function may reach a whole model and use only a part of it, so a change
elsewhere is not an error. The mode is on the stack only in a replay that must not read some tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from operator import attrgetter, is_
from typing import Any, NoReturn

import torch
from torch.nn import Parameter

from torch_remat._compat import CompiledCode, DispatchMode, is_wrapper_of_fsdp1
from torch_remat.dispatch.check.compare import REPLACED, described
from torch_remat.dispatch.keys import key_of, keys_of, tensors_in
from torch_remat.dispatch.ops.entry import written_arguments
from torch_remat.dispatch.ops.schema import WRITES_WITHOUT_SAYING, Effects, effects_of
from torch_remat.dispatch.reach import Reached, reach
from torch_remat.dispatch.region.outside import MakeErrorOf, Unreadable
from torch_remat.dispatch.region.region import Region
from torch_remat.errors import MismatchError, MutationError, RematError, at_user_line

MakeError = Callable[[], RematError]
# What writes all of its first argument, whatever was there.
_OVERWRITES = frozenset(("copy_", "fill_", "zero_"))


class Unread(DispatchMode):
    """Ends a replay that reads one of certain tensors.

    An in-place update of such a tensor is no read; an op that overwrites all of one may make it right.

    Args:
        fail: Ends the replay with an error.
        passed: Returns how many names have begun in the replay.

    Attributes:
        moved: The storages of tensors that were replaced or modified since forward ended.
        compiled_code: Notes whether compiled code runs, whose reads nobody sees.
    """

    # Compiled code must not run otherwise than in forward, where it cannot be seen: the replay is refused afterwards.
    lets_compiled_code_run = CompiledCode.is_noticed

    def __init__(self, fail: Callable[[RematError], NoReturn], passed: Callable[[], int]) -> None:
        super().__init__()
        self._fail = fail
        self._passed = passed
        self._parameters: Mapping[int, MakeError] = {}
        self._storages: dict[int, tuple[float, bool, MakeErrorOf]] = {}
        self.moved: set[int] = set()
        self.compiled_code = CompiledCode()

    def add(self, parameters: Mapping[int, MakeError], storages: Sequence[Unreadable]) -> None:
        """Note what must not be read: parameters, by id, and storages."""
        self._parameters = parameters
        for keys, until, may_be_overwritten, has_moved, error in storages:
            for key in keys:
                if until > self._storages.get(key, (0.0,))[0]:
                    self._storages[key] = until, may_be_overwritten, error
            if has_moved:
                self.moved.update(keys)

    def check_saved(self, tensor: torch.Tensor) -> None:
        """End the replay if forward saved something else: an op or a call that is skipped reads nothing."""
        if not self.moved.isdisjoint(keys_of(tensor)):
            self.read(tensor)

    def refuse_compiled_code(self) -> RematError | None:
        """Return, after the replay, the error about compiled code that ran in it."""
        if not self.compiled_code.ran:
            return None
        errors = [error() for error in self._parameters.values()]
        errors += [error(torch.empty(0)) for *_, error in self._storages.values()]
        return MutationError(
            "compiled code ran in this replay and may have read a tensor that is not as forward left it",
            region=errors[0].region,
            tensor=errors[0].tensor,
            remedy="Modify the tensor after backward, or compile the whole region.",
        )

    def read(self, tensor: torch.Tensor) -> None:
        """End the replay if it may not read this tensor now."""
        for key in keys_of(tensor):
            until, _, error = self._storages.get(key, (0, False, None))
            if error is not None and until > self._passed():
                self._fail(error(tensor))

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op that reads none of the tensors."""
        kwargs = kwargs or {}
        effects = effects_of(op)
        for tensor in tensors_in(args, kwargs):
            if (error := self._parameters.get(id(tensor))) is not None:
                self._fail(error())
        if self._storages and not (effects.ignored or effects.viewed or effects.reshapes or effects.factory):
            self._look_at(effects, args, kwargs)
        return op(*args, **kwargs)

    def _look_at(self, effects: Effects, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        written = written_arguments(effects, args, kwargs)
        if effects.name in WRITES_WITHOUT_SAYING and args[5]:
            args = [*args[:3], *args[5:]]
        for tensor in tensors_in(args, kwargs):
            if not any(tensor is one for one in written):
                self.read(tensor)
        if effects.name in _OVERWRITES:
            known = self._storages.get(key := key_of(written[0]))
            if known is not None and known[1] and written[0].nbytes == written[0].untyped_storage().nbytes():
                del self._storages[key]


def versions_of(tensors: Sequence[torch.Tensor | None]) -> Sequence[int]:
    """Return how often each tensor was modified in place; -1 where that is not counted."""
    try:
        return list(map(_version, tensors))
    except (AttributeError, RuntimeError):  # a parameter that is not set; a tensor of inference mode
        return [-1 if one is None or one.is_inference() else one._version for one in tensors]


_version = attrgetter("_version")
_requires_grad = attrgetter("requires_grad")


def flags_of(tensors: Sequence[torch.Tensor | None]) -> Sequence[bool | None]:
    """Return which tensors require a gradient; None for a parameter that is not set."""
    try:
        return list(map(_requires_grad, tensors))
    except AttributeError:
        return [None if one is None else one.requires_grad for one in tensors]


def give_flags(tensors: Sequence[torch.Tensor | None], flags: Sequence[bool | None]) -> Sequence[bool | None]:
    """Let tensors require a gradient or not; return which did, or nothing where all were so.

    What does not require a gradient is saved otherwise, so replay runs with the flags of forward. Those of the caller
    are what autograd goes by when it accumulates gradients, as without checkpointing.
    """
    before = flags_of(tensors)
    if before == flags:
        return ()
    for one, old, new in zip(tensors, before, flags, strict=False):
        if one is not None and new is not None and old != new and one.is_leaf:
            one.requires_grad_(new)
    return before


def check_parameters(region: Region) -> dict[int, MakeError]:
    """Compare the parameters with those of forward, at the start of a replay.

    Returns:
        The error about each that is another one now, or has other values, by its id: replay may not read it.

    Raises:
        MismatchError: A parameter is gone.
    """
    before: Sequence[torch.Tensor | None] = region.parameters
    if not before:
        return {}
    versions = versions_of(before)
    reached = _reached(region, parameters_alone=True)
    now = reached.parameters
    if versions == region.versions and len(now) == len(before) and all(map(is_, before, now)):
        return {}
    others: dict[int, MakeError] = {}
    known = set() if len(now) == len(before) else set(map(id, before))  # which only stand elsewhere
    leaves, leaves_now = _leaves(before), _leaves(now)
    # FSDP1 lists no parameters in backward, and has views in their place; what a module has not set stays.
    is_unsharded = len(leaves) > len(leaves_now) and any(map(is_wrapper_of_fsdp1, reached.modules))
    if is_unsharded:
        leaves = [one for one in leaves if one is not None]
        leaves_now = [one for one in leaves_now if one is not None]
    for place, (one, other) in enumerate(zip_longest(leaves, leaves_now)):
        if one is not other and not _may_stand_for(one, other):
            if other is None:
                if is_unsharded and place >= len(leaves_now):
                    continue
                raise _replaced(region, place, one, other)
            if id(other) not in known:
                others[id(other)] = partial(_replaced, region, place, one, other)
    for place, (one, old, new) in enumerate(zip(before, region.versions, versions, strict=True)):
        if one is not None and old != new and id(one) not in others and one.is_leaf:
            others[id(one)] = partial(_changed, region, place, one)
    return others


def _leaves(parameters: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    """Return the parameters without what FSDP1 lists in their place: views, which it makes anew for each forward."""
    return [one for one in parameters if one is None or one.is_leaf]


def _reached(region: Region, parameters_alone: bool = False) -> Reached:
    assert region.function is not None
    assert region.inputs is not None
    return reach(region.function, region.inputs.modules(), parameters_alone)


def _name_of(region: Region, place: int, parameter: torch.Tensor | None) -> str:
    """Return what an error calls a parameter: its place, and its name in the module that has it, if one has."""
    for module in _reached(region).modules:
        for name, other in module.named_parameters():
            if other is parameter:
                return f"parameter {place} ({name})"
    return f"parameter {place}"


def _replaced(region: Region, place: int, one: torch.Tensor | None, other: torch.Tensor | None) -> RematError:
    before, now = ("none" if it is None else described(it) for it in (one, other))
    how = f"{now}, with other values" if before == now else f"{before}, then {now}"
    reader = "" if other is None else f", and replay reads the new one{at_user_line()}"
    what = f"this parameter was replaced between forward and replay ({how}){reader}"
    return MismatchError(what, region=region.name, tensor=_name_of(region, place, other), remedy=REPLACED)


def _changed(region: Region, place: int, parameter: torch.Tensor) -> RematError:
    return MutationError(
        f"this parameter, {described(parameter)}, was modified in place since forward, and replay reads it"
        f"{at_user_line()}",
        region=region.name,
        tensor=_name_of(region, place, parameter),
        remedy="Modify parameters (optimizer step, weight averaging) after backward.",
    )


def _may_stand_for(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return False
    if not {type(one), type(other)} <= {torch.Tensor, Parameter}:
        return True  # sharded in one phase and not in the other: the wrapper that did it knows what it does
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
