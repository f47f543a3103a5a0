"""TorchTitan's own debug models, its full and selective checkpointing beside ours; gradients and buffers bit for bit.

torchtitan's requirements pull in more than the tests need, so no extra of ours has it. Into a folder of your choice:

    pip install --no-deps --target FOLDER torchtitan==0.3.0 triton tyro docstring_parser typeguard shtab \
        spmd_types==0.2.3 einops torchdata torch_checkpointing tensorboard rich markdown-it-py mdurl pygments
    PYTHONPATH=FOLDER make test PYTEST_ARGS='-m slow tests/integrations/test_torchtitan.py'

Its language models attend by flex attention, a higher-order op, compiled on GPUs; here its reference code runs.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention import flex_attention as flex

import torch_remat as remat
from tests.helpers import assert_same

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of many packages


@pytest.fixture(params=["flex", "sdpa"])
def attention(request, monkeypatch):
    """The attention of the models: flex attention on a CPU, or torch's own."""
    pytest.importorskip("torchtitan")
    common = importlib.import_module("torchtitan.models.common.attention")
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(common.FlexAttention, "_compiled_flex_attn", staticmethod(flex.flex_attention))
    for name in ("llama3", "deepseek_v3") if request.param == "sdpa" else ():
        package = importlib.import_module(f"torchtitan.models.{name}")
        monkeypatch.setattr(package, "get_attention_config", lambda _: common.ScaledDotProductAttention.Config())
    return request.param


def build(name, attention):
    package = importlib.import_module(f"torchtitan.models.{name}")
    kind = next(value for key, value in vars(package).items() if key.endswith("_configs"))["debugmodel"]
    given = {"attn_backend": "flex", "moe_comm_backend": "standard", "non_blocking_capacity_factor": None}
    config = kind(**{key: given[key] for key in inspect.signature(kind).parameters if key in given})
    config.layers = config.layers[:3]
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    return model.train()


def train(model, attention):
    """Take two steps; return the gradients of the second, and the buffers after it."""
    torch.manual_seed(5)
    tokens, positions = torch.randint(0, 500, (1, 128)), torch.cat([torch.arange(70), torch.arange(58)])[None]
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(1)
        masks = model.get_attention_masks(positions) if attention == "flex" else None
        model(tokens, positions=positions, attention_masks=masks).float().square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None], list(model.buffers())


def titan(kind):
    """Return what applies one of TorchTitan's ways, with `drop_in` in place of torch's checkpoint."""

    def apply(model, monkeypatch):
        ac = importlib.import_module("torchtitan.distributed.activation_checkpoint")
        drop_in = remat.drop_in()
        wrap = lambda module, **options: checkpoint_wrapper(module, checkpoint_fn=drop_in, **options)  # noqa: E731
        monkeypatch.setattr(ac, "ptd_checkpoint_wrapper", wrap)
        way = getattr(ac, kind)
        way(way.Config()).apply(model)

    return apply


def regions(**options):
    return lambda model, _: remat.checkpoint_modules(model, "layers.*", **options)


WAYS = {
    "titan's full": titan("FullAC"),
    "titan's selective": titan("SelectiveAC"),
    "checkpoint_modules": regions(),
    "save_attention": regions(policy=remat.policies.save_attention),
    "save_matmuls": regions(policy=remat.policies.save_matmuls),
    "names": regions(policy=remat.save_names("attention.*")),
    "bitwise": regions(determinism_check="bitwise"),
    "debug": regions(debug=True),
}


@pytest.mark.parametrize("name", ["llama3", "deepseek_v3"])
def test_gradients_and_buffers_are_equal(name, attention, monkeypatch):
    expected = train(build(name, attention), attention)
    for way, apply in WAYS.items():
        model = build(name, attention)
        with monkeypatch.context() as patch:
            apply(model, patch)
            assert_same(expected, train(model, attention), way)


@pytest.mark.parametrize("attention", ["flex"], indirect=True)
def test_selective_checkpointing_runs_no_saved_attention_again(attention, monkeypatch):
    module = sys.modules["torch._higher_order_ops.flex_attention"]
    runs, original = itertools.count(), module.math_attention
    monkeypatch.setattr(module, "math_attention", lambda *args, **kwargs: (next(runs), original(*args, **kwargs))[1])
    model = build("llama3", attention)
    WAYS["save_attention"](model, monkeypatch)
    train(model, attention)
    assert next(runs) == 2 * 3  # two steps, three layers
