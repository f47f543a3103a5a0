"""In-place changes that replay does not do again, and ops that user code runs once a replay is over.

In: tensors that an op would change; ops in ``finally:``, in a context manager's exit, after ``except:``, to which
forward may not have come yet. Kept: version counters, until the op is over, since autograd counts a change that did
not happen too. Out: the counters as they were; of an op past the end its result, which nobody needs.

NOTE [ How a replay ends ]
1. Once the last empty holder is filled, `StopReplay` ends the function, unless ``early_stop=False``. It derives from
   BaseException, so that ``except Exception`` in user code does not swallow it. It is raised once: code that catches
   it all the same (``except:``, ``finally:``) runs on undisturbed (`Aftermath`), and its result is thrown away.
2. The pack hook runs before its op does, and an op may save a buffer that it is about to fill (``F.rrelu`` its noise).
   Such a buffer is a tensor of floats that needs no gradient. Where the last op to save anything saves one, the
   function runs on to the next native region or to its end, unless a policy's calls tell that this op fills nothing.
   Elsewhere the op itself is spared, which for a last matrix product is much.
3. An error found in the pack hook is kept and raised after the function was left, so that user code cannot swallow
   it either.
4. A replay that has something to fill goes on until each live anchored holder has met its parameter again: where
   parameters were replaced, what was filled is wrong.
5. A replay that fails empties again what it filled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any

import optree
import torch

from torch_remat._compat import keep_from_compiler, set_version, without_dispatch_modes
from torch_remat.dispatch.log.entry import written_arguments
from torch_remat.dispatch.log.meta import key_of
from torch_remat.dispatch.log.schema import argument, effects_of
from torch_remat.dispatch.placeholder import Placeholder


class Suppressed:
    """The in-place changes of one replay that are not done again.

    Attributes:
        pending: The tensors, with their version counters, whose op may still be counting.
    """

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: list[tuple[torch.Tensor, int]] = []

    def add(self, tensors: Iterable[torch.Tensor], outside: Container[int]) -> None:
        """Note those tensors of the present op whose storages are from outside the region."""
        for tensor in tensors:
            if any(tensor is noted for noted, _ in self.pending):
                continue
            if not isinstance(tensor, Placeholder) and not tensor.is_inference() and key_of(tensor) in outside:
                version = tensor._version
                self.pending.append((tensor, version))
                if version:  # autograd counts the change once the op is over
                    set_version(tensor, version - 1)

    def restore(self) -> None:
        """Put the counters back, once the op is over."""
        for tensor, version in self.pending:
            if tensor._version != version:  # a pack hook, in which this may run, must not touch what it is given
                set_version(tensor, version)
        self.pending = []


class Aftermath:
    """The ops after a replay's end; ``outside`` returns the storages outside that forward has changed."""

    def __init__(self, suppressed: Suppressed, outside: Callable[[], Collection[int]]) -> None:
        self._suppressed = suppressed
        self._outside = outside

    @keep_from_compiler
    def watch(self, _mode: Any, op: Any, _types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an op; what it would change outside, it changes in a copy."""
        self._suppressed.restore()
        effects = effects_of(op)
        written = written_arguments(effects, args, kwargs)
        outside = self._outside() if written else ()
        if not any(_lies_in(tensor, outside) for tensor in written):
            return op(*args, **kwargs)
        self._suppressed.add(written, outside)
        given: Any = (tuple(args), dict(kwargs))
        with without_dispatch_modes():
            copied: Any = optree.tree_map(lambda leaf: leaf.clone() if _lies_in(leaf, outside) else leaf, given)
        result = op(*copied[0], **copied[1])
        if len(effects.returned) == 1:
            at = effects.returned[0]
            return result if at < 0 else argument(effects.written[at], args, kwargs)
        return tuple(
            item if at < 0 else argument(effects.written[at], args, kwargs)
            for item, at in zip(result or (), effects.returned, strict=True)
        )


def _lies_in(leaf: Any, outside: Collection[int]) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, Placeholder) and key_of(leaf) in outside
