"""The arguments of an op: taken apart before it runs, and put together for a run.

In: arguments in which tensors of the block stand. Kept: nothing. Out: what a recorded op keeps of them, the key of what
is known of the op, plain arguments, the state of the generator that the op may draw from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_remat.dtr._kinds import Kind, leaves
from torch_remat.dtr._ops import Const, Op, plain
from torch_remat.dtr._storage import Version
from torch_remat.dtr._tensor import EvictableTensor

_MOST_TERMS = 4  # of a sum of gradients that is made again rather than pinned


class Found:
    """The arguments of an op, taken apart."""

    __slots__ = ("consts", "inputs", "key", "ready", "tensors")

    def __init__(self, kind: Kind) -> None:
        self.key: list[Any] = [kind.number]  # what its results' sizes and its cost depend on
        self.inputs: list[Version] = []  # each once
        self.consts: list[Const] = []
        self.tensors: list[EvictableTensor] = []
        self.ready = True  # whether all inputs are resident


def plain_arguments(op: Op, roots: Mapping[Version, torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of an op as it gets them."""
    kind = op.kind
    return [plain(value, kind, roots) for value in op.args], {
        name: plain(value, kind, roots) for name, value in op.kwargs.items()
    }


def of_metadata(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a factory with its tensor replaced by one without data."""
    tensor = args[0]
    device = kwargs.get("device")
    return (tensor._handle.look.on_meta(), *args[1:]), {**kwargs, "device": tensor.device if device is None else device}


def random_state(
    kind: Kind, values: Sequence[Any], named: Mapping[str, Any]
) -> tuple[torch.Generator, torch.Tensor] | None:
    """Return the generator that an op may draw from, and its present state."""
    for value in (*values, *named.values()):
        if isinstance(value, torch.Generator):
            return value, value.get_state()
    device = named.get("device")
    if device is None:
        device = next((leaf.device for leaf in leaves(list(values)) if isinstance(leaf, torch.Tensor)), "cpu")
    generator = generator_of(torch.device(device))
    return generator, generator.get_state()


def generator_of(device: torch.device) -> torch.Generator:
    """Return the default generator of a device."""
    module: Any = getattr(torch, device.type, None)
    generators = getattr(module, "default_generators", ())
    if not generators:
        return torch.default_generator
    found: torch.Generator = generators[module.current_device() if device.index is None else device.index]
    return found


def adds_many(op: Op) -> bool:
    """Whether an op of backward adds a gradient to a sum of several, as autograd does for weights used many times.

    To make such a sum again takes most of backward, and all that it reads would have to stay known until then.
    """
    op.terms = sum(
        one.op.terms if one.op is not None and one.op.kind.adds else 1 for one in op.inputs if one.op or one.pin
    )
    return op.terms > _MOST_TERMS or any(one.pin == "a sum of many gradients" for one in op.inputs)
