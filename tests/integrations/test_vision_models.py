"""Vision models with batch norm and in-place activations, whose blocks are regions, next to torch's own checkpoint.

They are those of `pytorchcv`, with few channels. `torchvision` and `timm` need the build of `torchvision` that belongs
to the build of torch: another one is an error on import, also when `transformers` is imported beside it.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.helpers import CountOps, assert_same, pairwise
from tests.integrations.hugging_face_models import FAMILIES
from tests.integrations.hugging_face_models import build as build_transformer
from tests.integrations.hugging_face_models import train_step as train_transformer


class Network(NamedTuple):
    """How a model is built.

    Attributes:
        module: The module of `pytorchcv.models` that has it.
        sizes: Arguments of its class.
        in_place: Ops that it runs in place.
    """

    module: str
    sizes: dict[str, Any]
    in_place: tuple[str, ...] = ("relu_",)


_THREE_STAGES = {"channels": [[8, 8], [16], [16]], "init_block_channels": 8}
_FINAL = {"final_block_channels": 16}
_WHETHER = [[0, 1], [1], [0]]
NETWORKS = {
    "ResNet": Network("resnet", {**_THREE_STAGES, "bottleneck": False, "conv1_stride": True}),
    "MobileNetV3": Network(
        "mobilenetv3",
        {
            **_THREE_STAGES,
            **_FINAL,
            "exp_channels": [[16, 16], [32], [32]],
            "classifier_mid_channels": 16,
            **dict.fromkeys(("kernels3", "use_relu", "use_se"), _WHETHER),
            "first_stride": False,
            "final_use_se": False,
        },
        ("relu_", "hardtanh_"),
    ),
    "DenseNet": Network("densenet", {"channels": [[12, 16], [12, 16]], "init_block_channels": 8, "dropout_rate": 0.2}),
}
BLOCKS = "features.stage?.*"  # residual units, and the transitions between dense blocks
POLICIES = {name: getattr(remat.policies, name) for name in remat.policies.__all__}


def build(name):
    """Return a model in training mode, and its input."""
    network = NETWORKS[name]
    module = pytest.importorskip(f"pytorchcv.models.{network.module}")
    torch.manual_seed(0)
    model = getattr(module, name)(**network.sizes, num_classes=4)
    model.features.final_pool = nn.AdaptiveAvgPool2d(1)  # theirs is for large images
    for parameter in model.parameters():  # biases and factors that are not all alike
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.train(), torch.randn(4, 3, 32, 32)


def train_step(model, x, autocast=False):
    """Return loss and gradients of one step from a fixed seed."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(x)
    loss = nn.functional.cross_entropy(output.float(), torch.arange(4))
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def buffers_of(model):
    return [buffer.clone() for buffer in model.buffers()]


def regions_by_torch(model, pattern):
    for path, layer in model.named_modules():
        if fnmatch.fnmatchcase(path, pattern) and path.count(".") == pattern.count("."):
            forward = type(layer).forward.__get__(layer)
            layer.forward = functools.partial(torch_checkpoint, forward, use_reentrant=False)


SAMPLES = [(None, BLOCKS), ("save_matmuls", "features.*"), (None, "features.*"), ("save_matmuls", BLOCKS)]
CASES = [
    pytest.param(
        name,
        autocast,
        policy,
        pattern,
        id=f"{name}-{'bf16' if autocast else 'fp32'}-{policy or 'plain'}-{pattern}",
        marks=() if not autocast and (policy, pattern) == SAMPLES[index % 4] else pytest.mark.slow,
    )
    for index, name in enumerate(NETWORKS)
    for autocast in (False, True)
    for policy in (None, *POLICIES)
    for pattern in (BLOCKS, "features.*")
]


@pytest.mark.parametrize(("name", "autocast", "policy", "pattern"), CASES)
def test_gradients_are_those_of_torch(name, autocast, policy, pattern):
    """Running statistics play no part in them: batch norm uses those of the batch."""
    model, x = build(name)
    with CountOps() as ops:
        expected = train_step(model, x, autocast)
    assert {"native_batch_norm", *NETWORKS[name].in_place} <= ops.counts.keys()
    model, x = build(name)
    regions_by_torch(model, pattern)
    assert_same(expected, train_step(model, x, autocast), "torch's own")
    model, x = build(name)
    options = {} if policy is None else {"policy": POLICIES[policy]}
    remat.checkpoint_modules(model, pattern, **options)
    assert_same(expected, train_step(model, x, autocast))


TRANSFORMERS = [name for name, family in FAMILIES.items() if family.statistics]


@pairwise(name=[*NETWORKS, *TRANSFORMERS], policy=[None, "save_matmuls", "never_replay_effects"])
def test_running_statistics_change_once_a_step(name, policy):
    """Those of a step without checkpointing; torch's own checkpoint changes them twice."""
    pattern, step = BLOCKS, train_step
    if name in NETWORKS:
        model, inputs = build(name)
    else:
        model, inputs = build_transformer(pytest.importorskip("transformers"), name)
        pattern, step = FAMILIES[name].layers, train_transformer
    before, plain = buffers_of(model), copy.deepcopy(model)
    step(plain, inputs)
    remat.checkpoint_modules(model, pattern, **({} if policy is None else {"policy": POLICIES[policy]}))
    step(model, inputs)
    assert not all(torch.equal(one, other) for one, other in zip(before, plain.buffers(), strict=True))
    assert_same(buffers_of(plain), buffers_of(model))
