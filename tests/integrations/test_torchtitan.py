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
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex

import torch_remat as remat
from tests.helpers import assert_same

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of many packages

DOCS = Path(__file__).parents[2] / "docs"


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


def page(part):
    """Return what applies a class of the docs: parts 0 and 1 are blocks of the page, 2 is the example that it shows."""

    def apply(model, monkeypatch):
        ac = importlib.import_module("torchtitan.distributed.activation_checkpoint")
        monkeypatch.setattr(ac, "ptd_checkpoint_wrapper", ac.ptd_checkpoint_wrapper)  # restored afterwards
        module = ModuleType("of_docs")
        monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look it up
        text = (DOCS / "torchtitan.md").read_text(encoding="utf-8")
        codes = re.findall(r"^<!-- not run -->\n```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        codes.append((DOCS / "examples" / "torchtitan_ac.py").read_text(encoding="utf-8"))
        exec(compile(codes[part], "of_docs", "exec"), vars(module))
        kind = next((value for name, value in vars(module).items() if name in ("RegionsAC", "RematAC")), ac.FullAC)
        kind.Config().build(dump_folder="").apply(model)

    return apply


WAYS = {
    "titan's full": titan("FullAC"),
    "titan's selective": titan("SelectiveAC"),
    "RegionsAC": page(0),
    "titan's full, by the page": page(1),
    "RematAC": page(2),
    "functions": regions(policy=[F.linear] | remat.policies.save_attention),
    "modules": regions(policy=remat.save_modules("attention")),
    "names": regions(policy=remat.save_names("attention.*")),
    "bitwise": regions(determinism_check="bitwise", debug=True),
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
def test_experts_get_the_biases_of_no_checkpointing_unless_the_wrapper_of_torch_is_on_the_layers(
    attention, monkeypatch
):
    balance = importlib.import_module("torchtitan.components.optimizer.optimizer").register_moe_load_balancing_hook
    ranks = SimpleNamespace(get_optional_mesh=lambda name: None, ep_enabled=False, tp=1)

    def trained(apply):
        """Return the counts of the first step, and the weights and biases after eight."""
        model, hooks, counts = build("deepseek_v3", attention), [], []
        apply(model, monkeypatch)
        balance(SimpleNamespace(register_step_pre_hook=hooks.append), [model], ranks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        positions = torch.cat([torch.arange(70), torch.arange(58)])[None]
        torch.manual_seed(5)
        for tokens in torch.randint(0, 500, (8, 1, 128)):
            optimizer.zero_grad()
            masks = model.get_attention_masks(positions)
            model(tokens, positions=positions, attention_masks=masks).float().square().mean().backward()
            counts.append([int(b.sum()) for name, b in model.named_buffers() if "tokens_per_expert" in name])
            hooks[0]()
            optimizer.step()
        biases = [b.clone() for name, b in model.named_buffers() if "expert_bias" in name]
        return counts[0], [*model.parameters()], biases

    def by_torch(model, _):
        ac = importlib.import_module("torchtitan.distributed.activation_checkpoint")
        ac.FullAC(ac.FullAC.Config()).apply(model)

    count, weights, biases = trained(lambda model, _: None)
    assert count == [384, 384]
    for apply, expected in ((by_torch, 768), (WAYS["RegionsAC"], 384), (WAYS["RematAC"], 384)):
        found = trained(apply)
        assert_same([weights, biases], found[1:])
        assert found[0] == [expected] * 2
    count, _, biases_of_halves = trained(WAYS["titan's full"])  # the counts are right, and TorchTitan halves them
    assert count == [384, 384]
    assert not all(map(torch.equal, biases, biases_of_halves))
