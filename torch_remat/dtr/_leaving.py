"""The end of a block: its tensors become plain.

In: the tensors that are alive. Kept: nothing. Out: the same objects, plain, with their data; an error, if data could
not be computed again.

NOTE [How a tensor leaves]
Torch cannot make the C++ tensor of a wrapper subclass plain. So the Python object exchanges its C++ tensor for a plain
one with the same memory, version counter, `grad_fn` and output number. Where autograd's graph has saved the old one, it
stays alive there with its data, as a `LeftTensor`. Some tensors cannot be exchanged, and become `LeftTensor`s
themselves:
1. A leaf whose `AccumulateGrad` node is alive, or that has hooks: both belong to the C++ tensor. So do the gradient of
   ``retain_grad`` and a tangent of forward-mode AD.
2. A tensor and its views, if the block has used one of the views and the graph is alive. A new view would have another
   `grad_fn`, which ``torch.autograd.grad`` would not find in the graph. A plain tensor with the view's `grad_fn` would
   not be a view: an in-place modification of the base would not change its gradient.
   The same holds where the view has another dtype, and the base does not have the shape for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import Parameter

from torch_remat._compat import (
    below_autograd,
    negative_view,
    set_conj,
    set_neg,
    swap_identity,
    use_count,
    without_dispatch_modes,
    without_modes,
)
from torch_remat.dtr._block_memory import BlockMemory
from torch_remat.dtr._storage import Place, derive, place_of
from torch_remat.dtr._tensor import EvictableTensor, LeftTensor, LostTensor


def make_plain(memory: BlockMemory, leaving: Sequence[torch.Tensor]) -> BaseException | None:
    """Make tensors of a block plain, and return the first error on the way; an interrupted call can be repeated."""
    with below_autograd():
        failure = _compute(memory, leaving)
        for tensor in leaving:
            if type(tensor) is EvictableTensor:
                _fill(tensor)
    with without_modes(), torch.inference_mode(False):
        _exchange_all([tensor for tensor in leaving if type(tensor) is LeftTensor])
    return failure


def _exchange_all(leaving: Sequence[LeftTensor]) -> None:
    """Make tensors plain that have their data."""
    # As Python objects, which stay the same when their C++ tensors are exchanged.
    gradients = [(tensor, tensor.grad) for tensor in leaving if tensor.is_leaf or tensor.retains_grad]
    families: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
    for tensor in leaving:
        base: torch.Tensor = tensor if tensor._base is None else tensor._base
        families.setdefault(id(base), (base, []))[1].append(tensor)
    for base, members in families.values():
        if len(members) == 1:
            _exchange_one(members[0])
        else:
            _exchange_family(base, [tensor for tensor in members if tensor is not base])
    for tensor, gradient in gradients:
        if gradient is not None:
            tensor.grad = gradient
    for tensor in leaving:
        tensor.__dict__.pop("_handle", None)


def _compute(memory: BlockMemory, leaving: Sequence[torch.Tensor]) -> BaseException | None:
    """Compute the data of tensors where they were evicted; return the first error."""
    storages = dict.fromkeys(tensor._handle.buffer.storage for tensor in leaving if type(tensor) is EvictableTensor)
    failure: BaseException | None = None
    for storage in sorted(storages, key=lambda one: not one.resident):
        memory.lock(storage)
        for _ in range(2):  # what has failed once need not fail again, and this is the last chance
            try:
                memory.resident([storage])
                break
            except Exception as error:
                failure = failure or error
    return failure


def value_of(tensor: EvictableTensor) -> torch.Tensor:
    """Return the value of a resident tensor."""
    handle = tensor._handle
    storage = handle.buffer.storage
    if handle.place is not None:
        return storage.at(handle.place)
    return storage.data()


def _fill(tensor: EvictableTensor) -> None:
    """Give a tensor its data for good."""
    if tensor._handle.buffer.storage.tensor is None:
        del tensor._handle
        tensor.__class__ = LostTensor  # type: ignore[assignment]
        return
    *place, conj, neg = tensor._handle.place or place_of(tensor)
    set_conj(tensor, False)  # else torch resolves the lazy bits first, which reads the memory that is missing
    set_neg(tensor, False)
    with without_dispatch_modes(), torch.inference_mode(tensor.is_inference()):
        tensor.data = derive(value_of(tensor), (*place, False, False))
    set_conj(tensor, conj)
    set_neg(tensor, neg)
    tensor.__class__ = LeftTensor  # type: ignore[assignment]


def _exchange_one(tensor: torch.Tensor) -> None:
    """Make a tensor plain that is neither the base nor a view of another tensor that leaves."""
    hooks = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
    if not (tensor.is_leaf and tensor.requires_grad and (use_count(tensor) > 1 or hooks)):
        _exchange(tensor, _twin(tensor))


def _exchange_family(base: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
    """Make a tensor and its views plain."""
    if type(base) is not LeftTensor or (base.is_leaf and base.requires_grad) or not all(map(_is_unknown, views)):
        return
    twin = _twin(base)
    twins = []
    try:
        for view in views:
            with torch.set_grad_enabled(view.requires_grad or not base.requires_grad):
                twins.append(_view(twin, place_of(view)))
    except RuntimeError:  # such as a view with another dtype, whose shape is not possible for the base
        return
    if _exchange(base, twin):
        for view, one in zip(views, twins, strict=True):
            _exchange(view, one)


def _view(base: torch.Tensor, place: Place) -> torch.Tensor:
    """Return the view of a plain tensor at a place in its storage."""
    shape, stride, offset, dtype, conj, neg = place
    view = base.conj() if base.is_conj() else base
    view = negative_view(view) if view.is_neg() else view
    if dtype.is_complex and not view.is_complex():
        view = torch.view_as_complex(view)
    elif view.is_complex() and not dtype.is_complex:
        view = torch.view_as_real(view)
    if dtype != view.dtype:
        view = view.view(dtype)
    view = view.as_strided(shape, stride, offset)
    view = view.conj() if conj else view
    return negative_view(view) if neg else view


def _is_unknown(view: torch.Tensor) -> bool:
    """Whether no backward can come to the `grad_fn` of a view from an op of the block."""
    if not view.requires_grad:
        return True
    if view.grad_fn is None or view.retains_grad or view._backward_hooks:
        return False
    return not view._handle.used or _is_freed(view.grad_fn)  # type: ignore[attr-defined]


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor with the memory, the version counter and the gradient edge of a tensor.

    `detach` shares memory and version counter. Autograd itself makes a tensor with a given edge: it gives the edge of a
    saved tensor to what an unpack hook returns.
    """
    with torch.inference_mode(tensor.is_inference()):
        plain = tensor.detach()
    if tensor.grad_fn is None:
        return plain.requires_grad_() if tensor.requires_grad else plain
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: None, lambda _: plain):
        saved = _save(tensor)
    twin: torch.Tensor = saved.grad_fn.saved_tensors[0]  # type: ignore[union-attr]
    return twin


def _save(tensor: torch.Tensor) -> torch.Tensor:
    """Return the result of a node that has saved a tensor: without it, torch 2.10 frees what the node has saved."""
    with torch.enable_grad():
        saved: torch.Tensor = _Save.apply(torch.empty(0, requires_grad=True), tensor)
    return saved


class _Save(torch.autograd.Function):
    """Saves a tensor; nobody calls its backward."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return torch.empty(0)


def _exchange(tensor: torch.Tensor, twin: torch.Tensor) -> bool:
    """Let two Python objects exchange their C++ tensors, and their classes; return whether torch can do it.

    A C++ tensor that others hold too owns a reference to its Python object, which `swap_identity` does not count. So
    both have to be held by others, or neither. `swap_identity` refuses tensors with weak references in C++, such as
    `retain_grad` and autocast's cache keep.
    """
    if tensor.retains_grad or forward_ad.unpack_dual(tensor).tangent is not None:
        return False
    held = [_save(tensor), _save(twin)] if (use_count(tensor) > 1) != (use_count(twin) > 1) else []
    try:
        swap_identity(tensor, twin)
    except RuntimeError:
        return False
    tensor.__class__ = Parameter if getattr(tensor, "_is_param", False) else torch.Tensor
    twin.__class__ = LeftTensor
    held.clear()
    return True


def _is_freed(node: torch.autograd.graph.Node) -> bool:
    """Whether a backward has freed what the graph above a node saved: then no other can come through."""
    seen, todo = {node}, [node]
    while todo:
        node = todo.pop()
        for name in dir(node):
            if name.startswith("_saved_"):
                try:
                    saved = getattr(node, name)
                except RuntimeError as error:
                    return "second time" in str(error)
                if isinstance(saved, torch.Tensor):
                    return False
        for above, _ in node.next_functions:
            if above is not None and above not in seen:
                seen.add(above)
                todo.append(above)
    return False
