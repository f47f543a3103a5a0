"""`RematAC` of `docs/examples/torchtitan_ac.py`, on a stand-in for TorchTitan with the same classes and methods."""

from __future__ import annotations

import copy
import functools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import torch_remat as remat
from tests.helpers import CountOps, assert_same, no_other_regions, parameter_gradients

aten = torch.ops.aten
EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "torchtitan_ac.py"


class SelectiveAC:
    """A stand-in for TorchTitan's class: what of it is public, and what it does with its ops."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        preserve_rng_state: bool = True
        determinism_check: str = "default"
        debug: bool = False
        force_recompute_mm_shapes_by_fqns: list[str] = field(default_factory=lambda: ["moe.router.gate"])

    def __init__(self, config, dump_folder=""):
        self.config, self.dump_folder = config, dump_folder

    def get_save_ops(self):
        return {
            aten.mm.default,
            aten.linear.default,
            aten.topk.default,
            torch.ops._c10d_functional.all_to_all_single.default,
        }

    def apply(self, model):
        raise NotImplementedError


@pytest.fixture
def of_docs(monkeypatch):
    """The class in the docs."""
    module = ModuleType("torchtitan.distributed.activation_checkpoint")
    module.SelectiveAC = SelectiveAC
    for name in ("torchtitan", "torchtitan.distributed", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    names = {"__name__": "of_docs"}
    monkeypatch.setitem(sys.modules, "of_docs", ModuleType("of_docs"))  # dataclasses look the module up
    exec(compile(EXAMPLE.read_text(encoding="utf-8"), str(EXAMPLE), "exec"), names)
    return names["RematAC"]


class Layer(nn.Module):
    """Names as in TorchTitan: the gate is `moe.router.gate`."""

    def __init__(self):
        super().__init__()
        linear = functools.partial(nn.Linear, 8, bias=False)
        self.wq, self.wk, self.wo, self.up, self.down = (linear(8) for _ in range(5))
        self.moe = nn.ModuleDict({"router": nn.ModuleDict({"gate": linear(4)})})

    def forward(self, x):
        x = x + self.wo((self.wq(x).sigmoid() * self.wk(x)).tanh())
        scores = self.moe["router"]["gate"](x).topk(2).values.sum(-1, keepdim=True)
        return nn.functional.dropout((x + scores * self.down(self.up(x).relu())).tanh(), 0.2)


def step(model):
    torch.manual_seed(1)
    with no_other_regions():
        y = model(torch.randn(4, 8))
        names = [region.name for region in remat.memory_report(y).regions]
    with CountOps() as ops:
        y.square().sum().backward()
    return [y.detach(), *parameter_gradients(model)], ops.counts, names


def test_it_trains_as_without_and_products_that_the_policy_saves_do_not_run_again(of_docs):
    plain = nn.Sequential()
    plain.layers = nn.Sequential(*(Layer() for _ in range(3)))
    expected, before, _ = step(copy.deepcopy(plain))
    for config, layers in ((of_docs.Config(), 3), (of_docs.Config(keep_last=1), 2)):
        model = copy.deepcopy(plain)
        of_docs(config).apply(model)
        actual, counts, names = step(model)
        assert_same(expected, actual)
        assert names == [f"layers.{index}" for index in range(layers)]
        # Of wq, wk, wo, up, down the 1st, 3rd and 5th are saved; the gate is not counted, and only topk reads it.
        assert counts["mm"] - before["mm"] == 2 * layers
        assert counts["topk"] == 0
