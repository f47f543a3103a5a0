"""Models of `transformers` and `pytorchcv`: many families, tiny, with random weights, dropout and an input for each.

Those of `pytorchcv` have batch norm and in-place activations. `torchvision` and `timm` need the build of `torchvision`
that belongs to the build of torch: another one is an error on import, also when `transformers` is imported beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
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
_HIDDEN = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def _tokens(length: int = 6) -> Tensor:
    return torch.randint(VOCABULARY, (2, length))


def _text() -> dict[str, Any]:
    return {"input_ids": _tokens(), "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2]), "use_cache": False}


def _no_cache() -> dict[str, Any]:
    return {"input_ids": _tokens(), "use_cache": False}


def _pair() -> dict[str, Any]:
    return {**_text(), "decoder_input_ids": _tokens(5)}


def _bidirectional() -> dict[str, Any]:
    return {**_text(), "use_cache": None}


def _image(side: int = 8) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, side, side)}


def _images() -> dict[str, Any]:
    return {"x": torch.randn(4, 3, 32, 32)}


def _sound() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 200)}


class Family(NamedTuple):
    """How a model of one family is built.

    Attributes:
        sizes: Arguments of its configuration.
        inputs: Makes its input.
        layers: A pattern for each of its stacks of layers.
        own: Whether it has gradient checkpointing of its own, which runs these layers.
        module: The module of `pytorchcv.models` that has it; None for a model of `transformers`.
    """

    sizes: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]
    layers: tuple[str, ...] = ("layers.*",)
    own: bool = True
    module: str | None = None


_STACKS = ("encoder.layers.*", "decoder.layers.*")
_DECODERS = {
    "Llama": Family(_GROUPED, _no_cache),
    "GPT2": Family({"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, **_SPECIAL}, _text, ("h.*",)),
}
_ENCODERS = {
    "Bert": Family(_TEXT, _bidirectional, ("encoder.layer.*",)),
    "Albert": Family(  # one layer, run twice
        {**_TEXT, **_HIDDEN, "embedding_size": 8}, _bidirectional, ("encoder.albert_layer_groups.*",), own=False
    ),
    "DebertaV2": Family(
        {**_TEXT, **_HIDDEN, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4},
        _bidirectional,
        ("encoder.layer.*",),
    ),
}
_ENCODER_DECODERS = {
    "T5": Family(
        {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
        _pair,
        ("encoder.block.*", "decoder.block.*"),
    ),
    "Bart": Family({**_TWO_STACKS, "max_position_embeddings": 16}, _pair, _STACKS),
}
_MIXTURES = {
    "Mixtral": Family({**_GROUPED, "num_local_experts": 4}, _no_cache),
}
_STATES = {
    "Mamba": Family({"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}, _no_cache),
    "Jamba": Family(
        {
            **_GROUPED,
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
        _no_cache,
    ),
}
_VISION = {
    "Swin": Family(
        {
            **_HIDDEN,
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 4,
            "drop_path_rate": 0.2,
        },
        lambda: _image(16),
        ("encoder.layers.*.blocks.*",),
    ),
    "ConvNext": Family(
        {"hidden_sizes": [8, 8], "depths": [2, 2], "num_stages": 2, "patch_size": 2, "drop_path_rate": 0.2},
        lambda: _image(16),
        ("encoder.stages.*",),
        own=False,
    ),
    "MobileViT": Family(
        {"image_size": 32, "hidden_sizes": [8] * 3, "neck_hidden_sizes": [8] * 7, "num_attention_heads": 2, **_HIDDEN},
        lambda: _image(32),
        ("encoder.layer.[234]",),
    ),
    "CLIP": Family(
        {
            "text_config": {**_TEXT, **_SPECIAL, "attention_dropout": 0.1, "max_position_embeddings": 16},
            "vision_config": {**_SIZES, "image_size": 8, "patch_size": 4, "attention_dropout": 0.1},
            "projection_dim": 8,
        },
        lambda: {**_image(), "input_ids": _tokens()},
        ("vision_model.encoder.layers.*", "text_model.encoder.layers.*"),
    ),
}
_SPEECH = {
    "Wav2Vec2Conformer": Family({**_SOUND, "conv_depthwise_kernel_size": 3}, _sound, ("encoder.layers.*",)),
}
_UNITS = ("features.stage?.*",)  # residual units, and the transitions between dense blocks
_THREE_STAGES = {"channels": [[8, 8], [16], [16]], "init_block_channels": 8}
_CHOICES: dict[str, Any] = {key: [[0, 1], [1], [0]] for key in ("kernels3", "use_relu", "use_se")}
_CHOICES |= {"exp_channels": [[16, 16], [32], [32]], "first_stride": False, "final_use_se": False}
_CONVOLUTIONS = {
    "ResNet": Family(
        {**_THREE_STAGES, "bottleneck": False, "conv1_stride": True}, _images, _UNITS, own=False, module="resnet"
    ),
    "MobileNetV3": Family(
        {**_THREE_STAGES, **_CHOICES, "final_block_channels": 16, "classifier_mid_channels": 16},
        _images,
        _UNITS,
        own=False,
        module="mobilenetv3",
    ),
    "DenseNet": Family(
        {"channels": [[12, 16], [12, 16]], "init_block_channels": 8, "dropout_rate": 0.2},
        _images,
        ("features.stage?",),
        own=False,
        module="densenet",
    ),
}
FAMILIES = _DECODERS | _ENCODERS | _ENCODER_DECODERS | _MIXTURES | _STATES | _VISION | _SPEECH | _CONVOLUTIONS


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model in training mode, and its input; skip the test where its library is missing."""
    family = FAMILIES[name]
    if family.module is None:
        library = pytest.importorskip("transformers")
        torch.manual_seed(0)
        config = getattr(library, f"{name}Config")(**family.sizes)
        return getattr(library, f"{name}Model")(config).train(), family.inputs()
    library = pytest.importorskip(f"pytorchcv.models.{family.module}")
    torch.manual_seed(0)
    model: nn.Module = getattr(library, name)(**family.sizes, num_classes=4)
    model.features.final_pool = nn.AdaptiveAvgPool2d(1)  # theirs is for large images
    for parameter in model.parameters():  # biases and factors that are not all alike
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.train(), family.inputs()


def train_step(model: nn.Module, inputs: dict[str, Any], autocast: bool = False) -> list[Tensor]:
    """Return loss and gradients of one step from a fixed seed; NaN stands for no gradient.

    The mean of the squares of what a layer norm returned hardly depends on the weights; that of weighted ones does.
    """
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(**inputs)
        first = (output if isinstance(output, Tensor) else output[0]).float()
        loss = (first * torch.linspace(-1, 1, first.numel()).view_as(first)).square().mean()
    loss.backward()
    gradients = [torch.tensor(torch.nan) if p.grad is None else p.grad for p in model.parameters()]
    return [loss.detach(), *gradients]
