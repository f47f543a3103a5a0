"""A skipped stretch of code, run after all because something in replay reads what it made.

In: a function that forward ran while its ops were watched. Kept: the results of its ops, until the replay is over.
Out: the same results. Tensors from outside are not changed again: the ops that would do so change copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import optree
import torch

from torch_remat._compat import DispatchState, storage_key, with_dispatch_state
from torch_remat.dispatch.calls import is_kept_out, written_arguments
from torch_remat.dispatch.op import RematHandle
from torch_remat.dispatch.placeholder import real
from torch_remat.dispatch.schema import WRITES_WITHOUT_SAYING, effects_of

if TYPE_CHECKING:
    from torch_remat.dispatch.ambient import RngState
    from torch_remat.dispatch.mode import RematMode


class _Reached(BaseException):
    """Ends the function once it has come as far as it must."""


class Again:
    """A function that runs once more, for the results of its ops.

    Args:
        function: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        end: After how many ops it ends.
        rng: The generators as they were when it began; None if it draws nothing.
        state: The dispatch keys that were in force then.
        grad_enabled: Whether gradients were enabled then.
        check: Is called before each op with its place, arguments and keyword arguments; may raise.

    Attributes:
        results: What each op returned.
        outputs: What each op with a handle returned, by its name.
        end: After how many ops it ends.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        end: int,
        rng: RngState | None,
        state: DispatchState,
        grad_enabled: bool,
        check: Callable[[int, Sequence[Any], Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.results: list[Any] = []
        self.end = end
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._rng = rng
        self._state = state
        self._grad_enabled = grad_enabled
        self._check = check
        self._copies: dict[int, torch.UntypedStorage] = {}
        self._born: set[int] = set()
        self._reached = False
        self.outputs: dict[str, Sequence[torch.Tensor]] = {}
        self._in_op = 0  # whether the body of such an op runs, and how deep: its aten ops are none of the sequence

    def run(self, mode: RematMode) -> None:
        """Run the function."""
        present = None if self._rng is None else self._rng.present()
        try:
            if self._rng is not None:
                self._rng.restore()
            # As in forward, since some functions choose their ops by whether gradients are enabled.
            with with_dispatch_state(self._state), torch.set_grad_enabled(self._grad_enabled):
                mode.watched(self.watch, self._function, self._args, self._kwargs)
        except _Reached:
            pass
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            # It may end by an exception, as it did in forward; what is needed has been made by then.
            if len(self.results) < self.end:
                raise
        finally:
            if present is not None:
                present.restore()

    def watch(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an op."""
        effects = effects_of(op)
        if is_kept_out(effects, args):
            return op(*args, **kwargs)
        if self._in_op:
            return op(*args, **kwargs)
        if len(self.results) == self.end:
            if not self._reached:
                self._reached = True
                raise _Reached
        elif self._check is not None:
            self._check(len(self.results), args, kwargs)
        for tensor in written_arguments(effects, args, kwargs):
            key = storage_key(tensor)
            if key not in self._born and key not in self._copies:
                copy = self._copies[key] = tensor.untyped_storage().clone()
                self._born.add(copy._cdata)
        if effects.name in WRITES_WITHOUT_SAYING:
            args = [None if place in (3, 4) and args[5] else arg for place, arg in enumerate(args)]
        given: Any = (tuple(args), dict(kwargs))
        consumer = str(op)
        arguments: Any = optree.tree_map(lambda leaf: self._own(real(leaf, consumer)), given)
        try:
            result = op(*arguments[0], **arguments[1])
        except Exception:
            self._note(None)
            raise
        self._note(result)
        if effects.viewed is None and not effects.written:
            for item in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(item, torch.Tensor):
                    self._born.add(storage_key(item))
        return result

    def _note(self, result: Any) -> None:
        if not self._reached:  # else user code runs on, in ``finally:``
            self.results.append(result)

    def begin_op(self, name: str, ctx: Any) -> AgainOp:
        """Begin an op with a handle."""
        self._in_op += 1
        return AgainOp(self, name, ctx)

    def end_op(self, name: str, outputs: Sequence[torch.Tensor]) -> None:
        """End an op with a handle."""
        self._in_op -= 1
        self.outputs.setdefault(name, outputs)
        self._born.update(storage_key(tensor) for tensor in outputs if tensor._base is None)

    def _own(self, leaf: Any) -> Any:
        """Return the copy in place of a tensor from outside that the function has changed."""
        if not self._copies or not isinstance(leaf, torch.Tensor):
            return leaf
        storage = self._copies.get(storage_key(leaf))
        if storage is None:
            return leaf
        copy = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        return copy.set_(storage, leaf.storage_offset(), leaf.shape, leaf.stride())


class AgainOp(RematHandle):
    """An op with a handle in such a stretch of code; its body runs."""

    __slots__ = ("_again",)

    def __init__(self, again: Again, name: str, ctx: Any) -> None:
        super().__init__(ctx, name)
        self._again = again

    def record(self, outs: tuple[torch.Tensor, ...], as_tuple: bool) -> Any:
        """Note the outputs."""
        self._end(outs)
        self._again.end_op(self._name, outs)
        return outs if as_tuple else outs[0]
