"""What the runtime must know of an op before it runs it: read once from its schema, then looked up.

In: an op of the dispatcher. Kept: one `Kind` for each op seen. Out: how the runtime treats the op. All that this
package needs of torch_remat's other rooms, but for errors and `_compat`, is imported here.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_remat._compat import has_effect
from torch_remat.dispatch.ambient import capture_ambient
from torch_remat.dispatch.log.schema import LIFT, WRITES_WITHOUT_SAYING, argument, effects_of

__all__ = ["Kind", "argument", "capture_ambient", "kind_of"]

_COLLECTIVES = frozenset(("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "symm_mem"))
# Batch norms in training write their running statistics and do not read them: (name, place of `training`, or -1 for
# one that always trains). Their other results can be made again without writing the statistics twice.
_BATCH_NORMS = {
    "native_batch_norm": 5,
    "cudnn_batch_norm": 5,
    "miopen_batch_norm": 5,
    "_native_batch_norm_legit": 5,
    "_batch_norm_with_update": -1,
}
_STATISTICS = ((3, "running_mean"), (4, "running_var"))
# What autograd calls, in the node of a leaf, to make the leaf's gradient.
_ACCUMULATING = frozenset(("detach", "clone", "add", "new_empty", "new_empty_strided", "view_as", "view", "copy_"))
# These return their argument, or parts of it, though their schemas promise a new tensor.
_SILENT_VIEWS = frozenset(("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"))


class Kind:
    """How the runtime treats an op.

    Attributes:
        name: For people: ``aten.mm``.
        number: Stands for the op in the keys of what was measured.
        view: Whether its results are views of its first argument, and it does nothing else.
        reshapes: Whether it changes only where its tensor lies in its storage, as ``squeeze_`` does.
        factory: Whether it needs nothing but the metadata of its one tensor.
        written: The arguments that it writes, by place and name.
        returned: For each result, which of the written arguments it is; -1 for a new one.
        random: Whether it may draw random numbers.
        once: Whether it must not run twice.
        lifts: Whether it is how a tensor made of Python values enters.
        training: Where a batch norm's ``training`` stands, -1 if it always trains; None for other ops.
        accumulates: Whether autograd may call it to make the gradient of a leaf.
        adds: Whether it is the addition of two tensors.
        higher: Whether it is a higher-order op, which may take anything.
    """

    __slots__ = (
        "accumulates", "adds", "factory", "higher", "lifts", "name", "number", "once", "random", "reshapes", "returned",
        "training", "view", "written",
    )  # fmt: skip

    def __init__(self, op: Any, number: int) -> None:
        effects = effects_of(op)
        self.number = number
        self.higher = getattr(op, "_schema", None) is None
        self.name = str(op).removesuffix(".default") if not self.higher else effects.name
        torchs = effects.namespace in ("aten", "prims", "prim")
        self.view = effects.viewed is not None or effects.name in _SILENT_VIEWS
        self.reshapes = effects.reshapes
        self.factory = effects.factory
        self.written = _STATISTICS if effects.name in WRITES_WITHOUT_SAYING else effects.written
        self.returned = effects.returned
        self.random = effects.random
        self.once = self.higher or effects.namespace in _COLLECTIVES or (not torchs and has_effect(op))
        self.lifts = op is LIFT
        self.training = _BATCH_NORMS.get(effects.name)
        self.adds = op is torch.ops.aten.add.Tensor
        self.accumulates = effects.name in _ACCUMULATING


def kind_of(op: Any) -> Kind:
    """Return how to treat an op."""
    kind = _kinds.get(id(op))  # ops hash themselves in Python
    if kind is None:
        _known.append(op)  # so that its id stays its own
        kind = _kinds[id(op)] = Kind(op, len(_known))
    return kind


_kinds: dict[int, Kind] = {}
_known: list[Any] = []


def leaves(result: Any) -> list[Any]:
    """Return the parts of an op's result, in order: tensors, numbers, None."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [leaf for part in result for leaf in leaves(part)]
    return [result]


def refilled(result: Any, parts: Any) -> Any:
    """Return a result of the same form with other parts, taken from an iterator."""
    if isinstance(result, (tuple, list)):
        made = [refilled(part, parts) for part in result]
        return made if isinstance(result, list) else tuple(made)
    return next(parts)
