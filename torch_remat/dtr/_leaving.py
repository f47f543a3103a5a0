"""The end of a block: its tensors become plain.

In: the tensors that are alive. Kept: nothing. Out: the same objects, plain, with their data; an error if data could not
be recomputed, or if a tensor cannot be made plain.

NOTE [How a tensor leaves]
Torch cannot make the C++ tensor of a wrapper subclass plain. So the Python object exchanges its C++ tensor for a plain
one with the same memory, version counter, `grad_fn` and output number. Where autograd's graph has saved the old one,
that stays alive there with its data, as a `SavedTensor`. Refused is what belongs to the C++ tensor itself: the node of
a leaf and its hooks, `retain_grad`, a tangent of forward-mode AD. So is a view that the block has used while the graph
is alive: a new view has another `grad_fn`, and ``torch.autograd.grad`` would miss what comes to the old one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import Parameter

from torch_remat._compat import (
    below_autograd,
    set_conj,
    set_neg,
    swap_identity,
    use_count,
    without_dispatch_modes,
    without_modes,
)
from torch_remat.dtr._block_memory import BlockMemory
from torch_remat.dtr._storage import derive, place_of
from torch_remat.dtr._tensor import EvictableTensor, SavedTensor
from torch_remat.errors import UsageError


def make_plain(memory: BlockMemory, leaving: Sequence[torch.Tensor]) -> BaseException | None:
    """Make tensors of a block plain, and return the first error on the way; an interrupted call can be repeated."""
    with below_autograd():
        failure = _compute(memory, leaving)
        for tensor in leaving:
            if type(tensor) is EvictableTensor and tensor._handle.buffer.storage.resident:
                _fill(tensor)
    with without_modes(), torch.inference_mode(False):
        return _exchange_all([tensor for tensor in leaving if type(tensor) is SavedTensor]) or failure


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
    return storage.data() if handle.place is None else derive(storage.data(), handle.place)


def _fill(tensor: EvictableTensor) -> None:
    """Give a tensor its data for good."""
    *place, conj, neg = tensor._handle.place or place_of(tensor)
    set_conj(tensor, False)  # else torch resolves the lazy bits first, which reads the memory that is missing
    set_neg(tensor, False)
    with without_dispatch_modes(), torch.inference_mode(tensor.is_inference()):
        tensor.data = derive(value_of(tensor), (*place, False, False))
    set_conj(tensor, conj)
    set_neg(tensor, neg)
    tensor.__class__ = SavedTensor  # type: ignore[assignment]


def _exchange_all(leaving: Sequence[torch.Tensor]) -> UsageError | None:
    """Make tensors plain that have their data; return an error about those that cannot be."""
    # As Python objects, which stay the same when their C++ tensors are exchanged.
    gradients = [(tensor, tensor.grad) for tensor in leaving if tensor.is_leaf]
    families: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
    for tensor in leaving:
        base: torch.Tensor = tensor if tensor._base is None else tensor._base
        families.setdefault(id(base), (base, []))[1].append(tensor)
    refused = []
    for base, members in families.values():
        alone = len(members) == 1
        try:
            _exchange_family(
                members[0] if alone else base, [] if alone else [one for one in members if one is not base]
            )
        except RuntimeError as error:
            refused.append(f"one of shape {tuple(members[0].shape)} ({error})")
    for tensor, gradient in gradients:
        if gradient is not None:
            tensor.grad = gradient
    for tensor in leaving:
        tensor.__dict__.pop("_handle", None)
    if not refused:
        return None
    return UsageError(
        f"tensors that a budget's block made cannot leave it: {'; '.join(refused[:3])}{' ...' * (len(refused) > 3)}",
        remedy="Run backward in the block, create leaves before it, and keep tensor.detach() of others.",
    )


def _exchange_family(base: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
    """Make a tensor and its views plain.

    Raises:
        RuntimeError: One of them cannot be.
    """
    for tensor in (base, *views):
        _check(tensor)
    twins = [_twin(base)]
    view: Any
    for view in views:
        shape, stride, offset, *read_as = place_of(view)
        if (*read_as,) != place_of(base)[3:]:
            raise RuntimeError("a view of it has another dtype, or is conjugate or negative")
        if view.grad_fn is not None and (view._backward_hooks or (view._handle.used and not _is_freed(view.grad_fn))):
            raise RuntimeError("backward may still come to a view of it")
        with torch.set_grad_enabled(view.requires_grad or not base.requires_grad):
            twins.append(twins[0].as_strided(shape, stride, offset))
    for tensor, twin in zip((base, *views), twins, strict=True):
        _exchange(tensor, twin)


def _check(tensor: Any) -> None:
    """Raise if something belongs to the C++ tensor itself, or its data are missing."""
    if type(tensor) is not SavedTensor:
        raise RuntimeError("its data could not be recomputed")
    if tensor.retains_grad or forward_ad.unpack_dual(tensor).tangent is not None:
        raise RuntimeError("with retain_grad() or a tangent")
    hooks = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
    if tensor.is_leaf and tensor.requires_grad and (use_count(tensor) > 1 or hooks):
        raise RuntimeError("a leaf that a graph holds, or that has hooks")


def _is_freed(node: torch.autograd.graph.Node) -> bool:
    """Whether a backward has freed what the graph above a node saved: then no other can come through."""
    seen, todo = {node}, [node]
    for one in todo:
        for name in dir(one):
            if name.startswith("_saved_"):
                try:
                    saved = getattr(one, name)
                except RuntimeError as error:
                    return "second time" in str(error)
                if isinstance(saved, torch.Tensor):
                    return False
        above = {node for node, _ in one.next_functions if node is not None} - seen
        seen |= above
        todo += above
    return False


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor with the memory, the version counter and the gradient edge of a tensor.

    `detach` shares memory and version counter. Autograd itself makes a tensor with a given edge: it gives the edge of a
    saved tensor to what an unpack hook returns.
    """
    with torch.inference_mode(tensor.is_inference()):
        plain = tensor.detach()
    if tensor.grad_fn is None:
        return plain.requires_grad_(tensor.requires_grad)
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


def _exchange(tensor: torch.Tensor, twin: torch.Tensor) -> None:
    """Let two Python objects exchange their C++ tensors, and their classes.

    A C++ tensor that others hold too owns a reference to its Python object, which `swap_identity` does not count. So
    both have to be held by others, or neither. `swap_identity` refuses tensors with weak references in C++, such as
    autocast's cache keeps.
    """
    held = [_save(tensor), _save(twin)] if (use_count(tensor) > 1) != (use_count(twin) > 1) else []
    swap_identity(tensor, twin)
    tensor.__class__ = Parameter if getattr(tensor, "_is_param", False) else torch.Tensor
    twin.__class__ = SavedTensor
    held.clear()
