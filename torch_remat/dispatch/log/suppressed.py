"""In-place changes that replay does not do again.

In: tensors that an op would change. Kept: version counters, until the op is over, since autograd counts a change that
did not happen too. Out: the counters as they were.

NOTE [ How a replay ends ]
1. Once the last empty holder is filled, `StopReplay` ends the function, unless ``early_stop=False``. It derives from
   BaseException, so that ``except Exception`` in user code does not swallow it. It is raised once: code that catches
   it all the same (``except:``, ``finally:``) runs on, its ops run, and its result is thrown away.
2. The pack hook runs before its op does, and an op may save a buffer that it is about to fill (``F.rrelu`` its noise).
   Such a buffer is a tensor of floats that needs no gradient. Where the last op to save anything saves one, the
   function runs on to the next native region or to its end, unless a policy's calls tell that this op fills nothing.
   Elsewhere the op itself is spared, which for a last matrix product is much. Where no more than a few small ops would
   follow, which write nothing, they run unwatched: an exception would take longer.
3. An error found in the pack hook is kept and raised after the function was left, so that user code cannot swallow
   it either.
4. A replay that has something to fill goes on until each live anchored holder has met its parameter again: where
   parameters were replaced, what was filled is wrong.
5. A replay that fails empties again what it filled.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch

from torch_remat._compat import set_version
from torch_remat.dispatch.log.meta import key_of
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
