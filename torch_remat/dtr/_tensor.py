"""The tensors of a block: true metadata, and data only where the runtime has it or makes it again.

In: metadata, and a handle on the memory. Kept: no data; the handle. Out: the data for what reads it without an op,
such as ``numpy``. When the block ends each of them becomes a plain tensor, the same object (see `_leaving`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.nn import Parameter

from torch_remat._compat import (
    is_dispatched,
    make_wrapper_subclass,
    set_conj,
    set_neg,
    without_dispatch_modes,
    without_torch_function_ever,
)
from torch_remat.dtr._ops import leaves, refilled
from torch_remat.dtr._storage import Handle, derive, place_of
from torch_remat.errors import RematError

Form = TypeVar("Form", bound=torch.Tensor)


class EvictableTensor(torch.Tensor):
    """A tensor that a budget's block made; the runtime may evict its data and recompute it.

    Shape, stride, type, device and ``requires_grad`` are true and cost nothing to read. Inside the block it is used
    like any tensor; when the block ends it becomes a plain one.
    """

    _handle: Handle
    __torch_function__ = without_torch_function_ever

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse: ops of the block come to its mode, never here."""
        raise not_active(str(func))

    def _read(self, reader: str, *, share: bool) -> torch.Tensor:
        """Return a plain tensor with the data; if it is shared, they stay where they are."""
        return self._handle.buffer.owner.read(self, reader, share=share)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        """Show the values."""
        text = repr(self._read("repr", share=False))
        grad = f", grad_fn=<{self.grad_fn.name()}>" if self.grad_fn is not None else ""
        if not grad and self.requires_grad:
            grad = ", requires_grad=True"
        return f"{text[:-1]}{grad})" if text.endswith(")") else text

    def __format__(self, spec: str) -> str:
        return format(self._read("format", share=False), spec)

    def tolist(self) -> Any:
        """Return the values as Python numbers."""
        return self._read("tolist", share=False).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array that shares memory with the tensor, which is not evicted from now on."""
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self._read("numpy", share=True).numpy(force=force)

    def data_ptr(self) -> int:
        """Return the address of the data, which are not evicted from now on."""
        return self._read("data_ptr", share=True).data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory, which is not evicted from now on."""
        return self._read("untyped_storage", share=True).untyped_storage()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._read("__dlpack__", share=True).__dlpack__(**kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self._read("pickle", share=False).detach().requires_grad_(self.requires_grad)
        return (Parameter(plain, self.requires_grad) if isinstance(self, Parameter) else plain).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self.is_leaf:
            raise RuntimeError("only tensors that are leaves of the graph can be copied deeply; detach it first")
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return memo[id(self)]


class SavedTensor(torch.Tensor):
    """What the graph of a block has saved and still holds after the block, with its data; ops on it give plain ones."""

    __torch_function__ = without_torch_function_ever

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op as on plain tensors."""
        with without_dispatch_modes():
            result = func(*args, **(kwargs or {}))
            # A view takes over that its base is dispatched to Python, though its class is not.
            plain = [
                derive(leaf, place_of(leaf)) if type(leaf) is torch.Tensor and is_dispatched(leaf) else leaf
                for leaf in leaves(result)
            ]
        return refilled(result, iter(plain))


def not_active(reader: str) -> RematError:
    """Return the error about a tensor that is used where its runtime is not.

    It is no TypeError: Python would take one from ``x + 1`` for the absence of an operator.
    """
    return RematError(
        f"{reader} got a tensor of a budget's block where the block's runtime is not active: in another thread, where "
        "dispatch modes are switched off, or after the block, which could not recompute it",
        remedy="Use tensors of a block in the thread that runs it, or hand them on after the block, when they are "
        "plain.",
    )


def make_tensor(like: torch.Tensor, form: type[Form] = EvictableTensor) -> Form:  # type: ignore[assignment]
    """Return a tensor without data that looks like another one, by position, which takes a sixth less time."""
    made: Form = make_wrapper_subclass(
        form, like.shape, like.stride(), like.storage_offset(), None, like.dtype, torch.strided, like.device
    )
    if like.is_conj():
        set_conj(made, True)
    if like.is_neg():
        set_neg(made, True)
    return made
