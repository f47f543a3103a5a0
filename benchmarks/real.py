"""Real models: those of ``transformers``, small and with random weights, every layer a region.

The layers are handed arguments by keyword, tuples of tensors and None, as their models call them. Nothing is
downloaded: models are built from their configurations. Each is measured twice: plain regions beside torch's checkpoint,
and all matrix products kept by a policy, as a list of ops, as a policy function, and by the functions that run them,
beside SAC with the same list.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .contenders import (
    FLOOR,
    NONE,
    OURS,
    OURS_CALLS,
    OURS_FUNCTION,
    OURS_POLICY,
    SAC,
    TORCH,
    UnavailableError,
    Wrap,
    full_recompute,
    versions,
)
from .kept import ways
from .workloads import Workload

aten = torch.ops.aten

MM, ADDMM, GROUPED_MM = aten.mm.default, aten.addmm.default, aten._grouped_mm.default
VOCABULARY = 128


@dataclass(frozen=True)
class Model:
    """How a model is built.

    Attributes:
        name: Of its classes in ``transformers``, which are ``<name>Config`` and ``<name>Model``.
        sizes: Arguments of its configuration.
        options: Arguments of the model besides that.
        tokens: Shape of its input, ``(batch, length)``; None for a model of images, which gets two of 32 x 32.
        matmuls: The matrix products in a layer.
    """

    name: str
    sizes: dict[str, Any]
    options: dict[str, Any]
    tokens: tuple[int, int] | None
    matmuls: list[Any]

    def build(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """Return the model and its input."""
        transformers = _transformers()
        config = getattr(transformers, f"{self.name}Config")(**self.sizes)
        model: nn.Module = getattr(transformers, f"{self.name}Model")(config, **self.options)
        if self.tokens is None:
            return model.train(), {"pixel_values": torch.randn(2, 3, 32, 32)}
        return model.train(), {"input_ids": torch.randint(VOCABULARY, self.tokens)}


_TINY = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
_TEXT = {**_TINY, "vocab_size": VOCABULARY}
_CAUSAL = {**_TEXT, "use_cache": False}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_NO_POOLING = {"add_pooling_layer": False}
_LLAMA = {**_CAUSAL, "num_key_value_heads": 4}

MODELS = {
    "llama": Model("Llama", _LLAMA, {}, (2, 16), [MM]),
    "neox": Model("GPTNeoX", {**_CAUSAL, "hidden_dropout": 0.0, "attention_dropout": 0.0}, {}, (2, 16), [ADDMM]),
    "bert": Model("Bert", {**_TEXT, **_NO_DROPOUT}, _NO_POOLING, (2, 16), [ADDMM]),
    "vit": Model("ViT", {**_TINY, **_NO_DROPOUT, "image_size": 32, "patch_size": 8}, _NO_POOLING, None, [ADDMM]),
    "mixtral": Model("Mixtral", {**_LLAMA, "num_local_experts": 4}, {}, (2, 16), [MM, GROUPED_MM]),
    "llama-256": Model("Llama", {**_LLAMA, "hidden_size": 256, "intermediate_size": 1024}, {}, (2, 128), [MM]),
}
_POLICIES = (OURS_POLICY, OURS_FUNCTION, OURS_CALLS)
TINY = tuple(name for name in MODELS if name != "llama-256")


class Layers:
    """The layers of a model, each a region; the way to checkpoint may change from forward to forward."""

    def __init__(self, model: nn.Module) -> None:
        self.wrap: Wrap = full_recompute()[NONE]
        layers = next(child for child in model.modules() if isinstance(child, nn.ModuleList))
        for index, layer in enumerate(layers):
            layers[index] = _Layer(layer, self)


class _Layer(nn.Module):
    def __init__(self, layer: nn.Module, way: Layers) -> None:
        super().__init__()
        self.layer = layer
        self.way = way

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Wrapped anew in each call, as a model's forward does it.
        return self.way.wrap(self.layer)(*args, **kwargs)


def plain(name: str) -> Workload:
    """Everything recomputed."""
    wraps = full_recompute()
    ours = versions(OURS)
    return _workload(f"real-{name}", name, {who: wraps[who] for who in (NONE, FLOOR, TORCH, *ours)}, (OURS,), TORCH)


def with_policy(name: str) -> Workload:
    """All matrix products kept."""
    wraps = full_recompute()
    kept = {who: way.wrap for who, way in ways(MODELS[name].matmuls, *_POLICIES).items()}
    contenders = {**{who: wraps[who] for who in (NONE, FLOOR)}, **kept}
    return _workload(f"real-{name}-policy", name, contenders, _POLICIES, SAC)


WORKLOADS: dict[str, dict[str, Callable[[], Workload]]] = {
    "real": {f"real-{name}": partial(plain, name) for name in MODELS},
    "real-policy": {f"real-{name}-policy": partial(with_policy, name) for name in MODELS},
}
"""By the name on the command line: workloads that are measured in the same rounds, by their own names."""


def _workload(name: str, which: str, wraps: dict[str, Wrap], ours: tuple[str, ...], twin: str) -> Workload:
    torch.manual_seed(0)
    model, inputs = MODELS[which].build()
    leaves = dict(model.named_parameters())
    layers = Layers(model)

    def forward(wrap: Wrap) -> Tensor:
        layers.wrap = wrap
        output: Tensor = model(**inputs)[0]
        return output

    sizes, tokens = MODELS[which].sizes, MODELS[which].tokens
    input_form = "2 images of 16 patches" if tokens is None else f"{tokens[0]} x {tokens[1]} tokens"
    kept = "; kept: matrix products" if twin == SAC else ""
    return Workload(
        name=name,
        about=f"{MODELS[which].name}, {sizes['hidden_size']} wide, {sizes['num_hidden_layers']} layers, "
        f"{input_form}; each layer a region{kept}",
        leaves=leaves,
        output_grad=torch.randn_like(forward(wraps[NONE])),
        forwards={who: partial(forward, wrap) for who, wrap in wraps.items()},
        ideal_retained_bytes=None,
        steps=1,
        ours=ours,
        twin=twin,
    )


def _transformers() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"  # read at its import: nothing can be fetched by mistake
    try:
        import transformers
    except ImportError as error:
        raise UnavailableError(f"needs transformers (pip install -e '.[bench]'): {error}") from error
    return transformers
