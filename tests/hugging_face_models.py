"""Models of `transformers`: one of each family, tiny, with random weights and dropout, and an input for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

VOCABULARY = 32
_SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT = {**_SIZES, "vocab_size": VOCABULARY}
_GROUPED = {**_TEXT, "num_key_value_heads": 1, "attention_dropout": 0.1}
_TWO_STACKS = dict.fromkeys(
    ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 2
)
_TWO_STACKS |= {"vocab_size": VOCABULARY, "d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
_TWO_STACKS |= dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.1)
_SOUND = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2, **_TEXT}
_SOUND |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "mask_time_prob": 0.0}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def _tokens(length: int = 6) -> Tensor:
    return torch.randint(VOCABULARY, (2, length))


def _text() -> dict[str, Any]:
    return {"input_ids": _tokens(), "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2]), "use_cache": False}


def _no_cache() -> dict[str, Any]:
    return {"input_ids": _tokens(), "use_cache": False}


def _pair() -> dict[str, Any]:
    return {**_text(), "decoder_input_ids": _tokens(5)}


class Family(NamedTuple):
    """How a model of one family is built.

    Attributes:
        sizes: Arguments of its configuration.
        inputs: Makes its input.
        layers: A pattern for each of its stacks of layers.
        options: Arguments of the model besides the configuration.
    """

    sizes: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]
    layers: tuple[str, ...] = ("layers.*",)
    options: Mapping[str, Any] = MappingProxyType({})


FAMILIES = {
    "Llama": Family(_GROUPED, _no_cache),
    "GPTNeoX": Family({**_TEXT, "hidden_dropout": 0.1, "attention_dropout": 0.1}, _text),
    "Bert": Family(_TEXT, lambda: {**_text(), "use_cache": None}, ("encoder.layer.*",)),
    "T5": Family(
        {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
        _pair,
        ("encoder.block.*", "decoder.block.*"),
    ),
    "Bart": Family({**_TWO_STACKS, "max_position_embeddings": 16}, _pair, ("encoder.layers.*", "decoder.layers.*")),
    "Mixtral": Family({**_GROUPED, "num_local_experts": 4}, _no_cache),
    "Mamba": Family({"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}, _no_cache),
    "ViT": Family(
        {**_SIZES, "image_size": 8, "patch_size": 4, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
        lambda: {"pixel_values": torch.randn(2, 3, 8, 8)},
        options={"add_pooling_layer": False},
    ),
    "Wav2Vec2": Family(_SOUND, lambda: {"input_values": torch.randn(2, 200)}, ("encoder.layers.*",)),
    "Whisper": Family(
        {**_TWO_STACKS, **_SPECIAL, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16},
        lambda: {"input_features": torch.randn(2, 8, 16), "decoder_input_ids": _tokens(5), "use_cache": False},
        ("encoder.layers.*", "decoder.layers.*"),
    ),
}


def build(transformers: Any, name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model in training mode, and its input."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**family.sizes)
    model: nn.Module = getattr(transformers, f"{name}Model")(config, **family.options)
    return model.train(), family.inputs()


def train_step(model: nn.Module, inputs: dict[str, Any], autocast: bool = False) -> list[Tensor]:
    """Return loss and gradients of one step from a fixed seed; NaN stands for no gradient."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(**inputs)
        loss = output[0].float().square().mean()
    loss.backward()
    gradients = [torch.tensor(torch.nan) if p.grad is None else p.grad for p in model.parameters()]
    return [loss.detach(), *gradients]
