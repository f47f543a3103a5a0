"""The tensors of a block: true metadata, and data only where the runtime has it or makes it again.

In: metadata, and a handle on the memory. Kept: no data; the handle. Out: the data for what reads it without an op,
such as ``numpy``. When the block ends each of them becomes a plain tensor, the same object (see `_leaving`).
"""

from __future__ import annotations

import copy
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


class BlockTensor(torch.Tensor):
    """A tensor that a block made; what reads its data without an op reads it here."""

    _handle: Handle
    __torch_function__ = without_torch_function_ever

    def _read(self, reader: str, *, share: bool) -> torch.Tensor:
        """Return a plain tensor with the data; if it is shared, they stay where they are."""
        raise NotImplementedError

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

    def _plain_leaf(self) -> torch.Tensor:
        """Return a plain leaf on the same memory."""
        plain = self._read("pickle", share=False).detach()
        if isinstance(self, Parameter):
            return Parameter(plain, self.requires_grad)
        return plain.requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain_leaf().__reduce_ex__(protocol)

    def _copied(self, memo: dict[int, Any]) -> Any:
        """Return a deep copy of a leaf."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self.is_leaf:
            raise RuntimeError("only tensors that are leaves of the graph can be copied deeply; detach it first")
        if id(self) not in memo:
            memo[id(self)] = self._copied(memo)
        return memo[id(self)]


class EvictableTensor(BlockTensor):
    """A tensor that a budget's block made; the runtime may evict its data and make it again.

    Shape, stride, type, device and ``requires_grad`` are true and cost nothing to read. Inside the block it is used
    like any tensor; when the block ends it becomes a plain one.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse: ops of the block come to its mode, never here."""
        raise foreign_thread(str(func))

    def _read(self, reader: str, *, share: bool) -> torch.Tensor:
        return self._handle.buffer.owner.read(self, reader, share=share)

    def __array__(self, dtype: Any = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def data_ptr(self) -> int:
        """Return the address of the data, which are not evicted from now on."""
        return self._read("data_ptr", share=True).data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory, which is not evicted from now on."""
        return self._read("untyped_storage", share=True).untyped_storage()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._read("__dlpack__", share=True).__dlpack__(**kwargs)

    def _copied(self, memo: dict[int, Any]) -> Any:
        return self.detach().clone().requires_grad_(self.requires_grad)


class LeftTensor(BlockTensor):
    """A tensor with its data that has left its block and could not be made plain; see NOTE [How a tensor leaves].

    Its results are plain tensors. ``torch.nn.Parameter`` takes its ``detach()``, not the tensor itself.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op as on plain tensors."""
        with without_dispatch_modes():
            result = func(*args, **(kwargs or {}))
        return refilled(result, iter([_plain(leaf) for leaf in leaves(result)]))

    def _read(self, reader: str, *, share: bool) -> torch.Tensor:
        return self.detach()

    def _copied(self, memo: dict[int, Any]) -> Any:
        plain = self._plain_leaf()
        plain.grad = self.grad
        return copy.deepcopy(plain, memo)


def _plain(result: Any) -> Any:
    """Return a result of an op: a view takes over that its base is dispatched to Python, though its class is not."""
    if type(result) is not torch.Tensor or not is_dispatched(result):
        return result
    with without_dispatch_modes():
        return derive(result, place_of(result))


class LostTensor(torch.Tensor):
    """A tensor whose data could not be recomputed when its block ended, with an error."""

    __torch_function__ = without_torch_function_ever

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse."""
        raise RematError(
            f"{func} got a tensor whose data could not be recomputed when its budget's block ended",
            remedy="The error with which the block ended says why.",
        )

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"LostTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def foreign_thread(reader: str) -> RematError:
    """Return the error about a tensor that is used where its runtime is not.

    It is no TypeError: Python would take one from ``x + 1`` for the absence of an operator.
    """
    return RematError(
        f"{reader} got a tensor of a budget's block where the block's runtime is not active: in another thread, or "
        "where dispatch modes are switched off",
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
