"""The only file that names private torch symbols; each has its reason here.

Everything else of this package uses torch's public API, plus ``torch.utils._python_dispatch.TorchDispatchMode``,
which torch documents for use outside although its module has an underscore.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from operator import methodcaller
from typing import Any

import optree
import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import SUPPORTED_NODES

__all__ = [
    "PYTREE_NAMESPACE",
    "SavedTensorHooks",
    "TorchDispatchMode",
    "adopt_pytree_node",
    "forbid_data_access",
    "function_mode_depth",
    "graph_exec_group",
    "graph_is_kept",
    "graph_task",
    "make_wrapper_subclass",
    "negative_view",
    "node_number",
    "sequence_number",
    "set_conj",
    "set_neg",
    "top_saved_tensors_hooks",
    "without_torch_function",
]

# Whether the backward that runs now was called with retain_graph (True outside any backward). The contract of the
# README is that retain_graph is detected without an opt-in, and this is the one place where torch tells.
graph_is_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph

# Which backward this thread runs, -1 for none: a region with several outputs is replayed once for each.
graph_task: Callable[[], int] = torch._C._current_graph_task_id

# The number that the next autograd node of this thread will get. It tells nodes made inside a region from older
# ones, and one op's saved tensors from the next op's, without walking the graph.
sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr

# The depth of the torch-function mode stack: zero means that no device context can be active, which spares the
# slow public torch.get_default_device().
function_mode_depth: Callable[[], int] = torch._C._len_torch_function_stack


SavedTensorHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


# The innermost pair of saved-tensor hooks, or None. A region hands its inputs to the hooks around it without adding a
# node to the graph, and torch has no public way to ask for them.
top_saved_tensors_hooks: Callable[[], SavedTensorHooks | None]
top_saved_tensors_hooks = partial(torch._C._autograd._top_saved_tensors_default_hooks, False)

# The active torch.utils.checkpoint.GraphExecGroup, whose backwards share one replay; torch has no public way to ask.
graph_exec_group: Callable[[], object | None] = getattr(
    getattr(torch.utils.checkpoint, "GraphExecGroup", None), "_get_current_group", lambda: None
)


def adopt_pytree_node(kind: type) -> bool:
    """Make a container type that is registered with torch's own pytrees known to optree; return whether it was unknown.

    Users register their dataclasses where torch.export and FSDP look for them, and optree has another registry.
    """
    node = SUPPORTED_NODES.get(kind)
    if node is None:
        return False

    def unflatten(context: Any, children: Iterable[Any]) -> Any:
        return node.unflatten_fn(list(children), context)

    with contextlib.suppress(ValueError):  # another thread was faster
        optree.register_pytree_node(kind, node.flatten_fn, unflatten, namespace=PYTREE_NAMESPACE)
    return True


PYTREE_NAMESPACE = "torch_remat"

# The sequence number of an autograd node; see `sequence_number`. Called for each saved tensor.
node_number: Callable[[torch.autograd.graph.Node], int] = methodcaller("_sequence_nr")

# Runs a function on placeholders as on plain tensors; torch's own protocol would make real results placeholders.
without_torch_function: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass

# Makes a write to the data pointer of a tensor without data an error in C++ code too, instead of a crash.
forbid_data_access: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr

# The only way to make a tensor subclass without data; documented for subclass authors, though named as private.
make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass

# A lazy negative of a tensor, as autograd makes it for the imaginary part of a conjugate; conj() has a public name.
negative_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view

# The lazy conjugate and negative bits of a tensor, which a placeholder shows as the tensor that it stands for.
set_conj: Callable[[torch.Tensor, bool], None] = torch._C._set_conj
set_neg: Callable[[torch.Tensor, bool], None] = torch._C._set_neg
