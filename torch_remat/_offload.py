"""`offload_to`: which offloader the regions inside use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.compiler import is_compiling

from torch_remat.errors import UsageError, shown
from torch_remat.offload.protocol import Offloader, chosen

OFFLOADER = "an object with the methods offload, prefetch, onload and release, such as remat.CpuOffloader()"


@contextmanager
def offload_to(offloader: Offloader) -> Iterator[None]:
    """Let all regions that are called inside use an offloader, but for those that name one themselves.

    It only says where to: what is offloaded is said by `CheckpointPolicy.OFFLOAD` and by
    ``checkpoint(offload_inputs=True)``. Backward may run outside.

    Args:
        offloader: A `CpuOffloader`, a `DiskOffloader` or another `Offloader`. It lives at least as long as the
            tensors that it has.

    Yields:
        None.

    Raises:
        UsageError: It is no offloader.

    Example:
        >>> import tempfile
        >>> import torch
        >>> import torch_remat as remat
        >>> block = remat.checkpoint(offload_inputs=True)(torch.nn.Linear(8, 8))
        >>> with tempfile.TemporaryDirectory() as directory, remat.offload_to(remat.DiskOffloader(directory)):
        ...     y = block(torch.randn(4, 8))
        ...     y.sum().backward()
    """
    if not is_offloader(offloader):
        raise UsageError(f"offload_to({shown(offloader)}) is not possible", remedy=f"It takes {OFFLOADER}.")
    if is_compiling():  # where nothing is offloaded
        yield
        return
    token = chosen.set(offloader)
    try:
        yield
    finally:
        chosen.reset(token)


def is_offloader(value: object) -> bool:
    """Whether a value has the methods of an offloader; a class does not count."""
    return isinstance(value, Offloader) and not isinstance(value, type)
