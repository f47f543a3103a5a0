"""Dataclasses with two tensors: known to optree, known to torch's pytrees, known to neither."""

from __future__ import annotations

import dataclasses

import optree
import torch.utils._pytree as torch_pytree
from torch import Tensor

OPTREE_GLOBAL = getattr(optree.registry, "__GLOBAL_NAMESPACE")


@optree.register_pytree_node_class(namespace=OPTREE_GLOBAL)
@dataclasses.dataclass
class OptreeBatch:
    features: Tensor
    mask: Tensor
    name: str = "batch"

    def tree_flatten(self):
        return [self.features, self.mask], self.name, ["features", "mask"]

    @classmethod
    def tree_unflatten(cls, metadata, children):
        return cls(*children, name=metadata)


@dataclasses.dataclass
class TorchBatch:
    features: Tensor
    mask: Tensor


torch_pytree.register_dataclass(TorchBatch)


@dataclasses.dataclass
class OpaqueBatch:
    features: Tensor
    mask: Tensor
