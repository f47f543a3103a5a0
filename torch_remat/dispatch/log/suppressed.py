"""In-place changes that replay does not do again.

In: tensors that an op would change. Kept: their version counters, until the op is over. Out: the counters as they were,
since autograd counts a change that did not happen too.
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
