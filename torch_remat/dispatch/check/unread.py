"""Tensors that a replay must not read: parameters and other tensors that are not as forward found them.

In: the tensors, each with its error. Kept: nothing past the replay. Out: the error, at the first op that reads one.

A region's function may reach a whole model and use a part of it, so that what changed elsewhere is no error. The mode
is on the stack only in a replay that has such a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from torch_remat._compat import CompiledCode, DispatchMode
from torch_remat.dispatch.log.entry import written_arguments
from torch_remat.dispatch.log.meta import key_of, keys_of, tensors_in
from torch_remat.dispatch.log.schema import WRITES_WITHOUT_SAYING, Effects, effects_of
from torch_remat.errors import MutationError, RematError

MakeError = Callable[[], RematError]
MakeErrorOf = Callable[[torch.Tensor], RematError]  # of the tensor that is read
# What writes all of its first argument, whatever was there.
_OVERWRITES = frozenset(("copy_", "fill_", "zero_"))


class Unread(DispatchMode):
    """Ends a replay that reads one of certain tensors.

    An in-place update of such a tensor is no read; an op that overwrites all of one may make it right.

    Args:
        fail: Ends the replay with an error.
        passed: Returns how many names have begun in the replay.

    Attributes:
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
        self.compiled_code = CompiledCode()

    def add(
        self,
        parameters: Mapping[int, MakeError],
        tensors: Sequence[tuple[torch.Tensor, float, bool, MakeErrorOf]],
        storages: Sequence[tuple[int, float, MakeErrorOf]],
    ) -> None:
        """Note what must not be read.

        Args:
            parameters: By the id of each parameter its error.
            tensors: Each with how many names must have begun before it may be read, and whether an op that overwrites
                all of it makes it right.
            storages: The same for storages, as `key_of` names them, which no such op makes right.
        """
        self._parameters = parameters
        for tensor, until, may_be_overwritten, error in tensors:
            for key in keys_of(tensor):
                self._add(key, until, may_be_overwritten, error)
        for key, until, error in storages:
            self._add(key, until, False, error)

    def _add(self, key: int, until: float, may_be_overwritten: bool, error: MakeErrorOf) -> None:
        if until > self._storages.get(key, (0.0,))[0]:
            self._storages[key] = until, may_be_overwritten, error

    def refuse_compiled_code(self) -> RematError | None:
        """Return, after the replay, the error about compiled code that ran in it."""
        if not self.compiled_code.ran:
            return None
        errors = [error() for error in self._parameters.values()]
        errors += [error(torch.empty(0)) for *_, error in self._storages.values()]
        return MutationError(
            "compiled code ran in this replay, and may have read a tensor that is not as forward left it",
            region=errors[0].region,
            tensor=errors[0].tensor,
            remedy="Change the tensor after backward, or compile the whole region.",
        )

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
        for tensor in _read(effects, args, kwargs, written):
            for key in keys_of(tensor):
                until, _, error = self._storages.get(key, (0, False, None))
                if error is not None and until > self._passed():
                    self._fail(error(tensor))
        if effects.name in _OVERWRITES:
            key = key_of(written[0])
            known = self._storages.get(key)
            is_whole = written[0].nbytes == written[0].untyped_storage().nbytes() if known is not None else False
            if known is not None and known[1] and is_whole:
                del self._storages[key]


def _read(
    effects: Effects, args: Sequence[Any], kwargs: Mapping[str, Any], written: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Yield the tensors that an op reads, without those that it updates."""
    if effects.name in WRITES_WITHOUT_SAYING and args[5]:
        args = [*args[:3], *args[5:]]
    for tensor in tensors_in(args, kwargs):
        if not any(tensor is one for one in written):
            yield tensor
