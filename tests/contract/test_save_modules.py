"""`save_modules`: calls of modules that a region keeps; plain code elsewhere, and equal everywhere."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_remat as remat
from tests.helpers import assert_same, leaf
from tests.native_programs import replayed_ops
from torch_remat.errors import PolicyError


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, scale=1.0):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v * scale))


class Block(nn.Module):
    """Calls its attention twice."""

    def __init__(self, width=8):
        super().__init__()
        self.self_attn, self.norm = Attention(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x + self.self_attn(x) + self.self_attn(x * 0.5, scale=2.0)))


def step(model, x):
    torch.manual_seed(1)
    y = model(x)
    names = [[op.name for op in region.ops] for region in remat.memory_report(y).regions]
    return [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])], names


POLICIES = {
    "path": (remat.save_modules("self_attn"), ["self_attn", "self_attn_1"]),
    "paths": (remat.save_modules("mlp.0", "*.out"), ["self_attn.out", "self_attn.out_1", "mlp.0"]),
    "class": (remat.save_modules(nn.LayerNorm), ["norm"]),
    "with functions": (remat.save_modules("self_attn") | [F.gelu], ["self_attn", "self_attn_1", "mlp.1.gelu_0"]),
    "with ops": (remat.save_modules("self_attn") | [torch.ops.aten.gelu], ["self_attn", "self_attn_1"]),
    "inside of another": (remat.save_modules("self_attn", nn.Linear), ["self_attn", "self_attn_1", "mlp.0", "mlp.3"]),
}


@pytest.mark.parametrize("kind", POLICIES)
def test_model_and_its_copies_are_equal_and_keep_these_calls(kind):
    policy, names = POLICIES[kind]
    model, x = nn.Sequential(*(Block() for _ in range(2))), leaf(2, 4, 8)
    expected, _ = step(model, x)
    with remat.checkpoint_modules(model, "*", policy=policy):
        for _ in range(2):  # the second copies are of a model that has run
            for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
                for _ in range(2):
                    actual, found = step(one, x)
                    assert_same(expected, actual)
                    assert found == [names] * 2
    assert not any("forward" in vars(module) for module in model.modules())
    assert_same(expected, step(model, x)[0])


def test_a_kept_module_does_not_run_in_replay_and_runs_plainly_elsewhere():
    block, x = Block(), leaf(2, 4, 8)
    region = remat.checkpoint(policy=remat.save_modules("self_attn"))
    ran = replayed_ops(block, region, [x], list(block.parameters()))
    whole = replayed_ops(block, remat.checkpoint(), [x], [])
    attention = {name for name in whole if name == "bmm" or "attention" in name}  # which of them depends on torch
    assert attention
    assert attention.isdisjoint(ran)
    assert "native_layer_norm" in ran
    assert_same(block.self_attn(x), Attention.forward(block.self_attn, x))


@pytest.mark.parametrize(
    "function",
    [
        lambda block: block,
        lambda block: block.forward,
        lambda block: lambda x: block(x),
        lambda block: lambda x: BLOCK(x),
    ],
    ids=["module", "method", "closure", "global"],
)
def test_modules_are_found_below_whatever_the_region_runs(function, monkeypatch):
    block, x = Block(), leaf(2, 4, 8)
    monkeypatch.setitem(globals(), "BLOCK", block)
    y = remat.checkpoint(policy=remat.save_modules("self_attn"))(function(block))(x)
    assert [op.name for op in remat.memory_report(y).regions[0].ops] == ["self_attn", "self_attn_1"]
    y.sum().backward()


BLOCK = Block()


def test_a_decorated_method_has_its_module():
    class Decorated(Block):
        forward = remat.checkpoint(policy=remat.save_modules("mlp"))(Block.forward)

    block, x = Decorated(), leaf(2, 4, 8)
    y = block(x)
    assert [op.name for op in remat.memory_report(y).regions[0].ops] == ["mlp"]
    y.sum().backward()


def test_a_pattern_that_matches_nothing_is_an_error_at_once_with_near_paths():
    model = nn.Sequential(Block(), Block())
    for wrong in ("selfattn", nn.Conv1d):
        with pytest.raises(PolicyError, match=r"matches no module") as caught:
            remat.checkpoint_modules(model, "*", policy=remat.save_modules("mlp", wrong))
        assert "self_attn" in str(caught.value) or "Attention" in str(caught.value)
        assert not any("forward" in vars(module) for module in model.modules())
        with pytest.raises(PolicyError, match=r"(?s)matches no module.*remat\.checkpoint_modules\(model, patterns"):
            remat.checkpoint(policy=remat.save_modules(wrong))(model[0])(leaf(2, 4, 8))
    with pytest.raises(PolicyError, match="no module's"):
        remat.checkpoint(policy=remat.save_modules("mlp"))(torch.sin)(leaf(3))
    for wrong in ((), ("",), (3,), (Block(),)):
        with pytest.raises(PolicyError, match="save_modules"):
            remat.save_modules(*wrong)


def test_what_replay_cannot_skip_is_an_error_as_for_an_op():
    class Leaves(nn.Module):
        def forward(self, x, into):
            into.append(x.exp())
            return x.sin()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Leaves()

        def forward(self, x):
            into = []
            return self.inner(x, into) + into[0]

    with pytest.raises(remat.UsageError, match="Outer::inner"):
        remat.checkpoint(policy=remat.save_modules("inner"))(Outer())(leaf(3))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_wrapped_module_is_found_by_its_own_path():
    block, x = Block(), leaf(2, 4, 8)
    block.self_attn = torch.compile(block.self_attn, backend="eager")
    expected = torch.autograd.grad(block.eval()(x).sum(), x)
    y = remat.checkpoint(policy=remat.save_modules("self_attn"))(block)(x)
    assert [op.name for op in remat.memory_report(y).regions[0].ops] == ["self_attn", "self_attn_1"]
    assert_same(expected, torch.autograd.grad(y.sum(), x))


def test_a_region_that_is_compiled_keeps_the_module():
    torch._dynamo.reset()  # it compiles one code for so many functions, and other tests may have used them up
    block, x = Block().eval(), leaf(2, 4, 8)
    expected = torch.autograd.grad(block(x).sum(), x)
    region = remat.checkpoint(policy=remat.save_modules("self_attn"))(block)
    assert_same(expected, torch.autograd.grad(region(x).sum(), x))
    y = torch.compile(region, backend="aot_eager", fullgraph=True)(x)
    assert_same(expected, torch.autograd.grad(y.sum(), x))


def test_a_region_that_is_compiled_before_it_ever_ran_keeps_the_module():
    torch._dynamo.reset()
    kept = {}
    for name, policy in (("nothing", None), ("linear", remat.save_modules("0"))):
        block, x = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), leaf(4, 8)
        y = torch.compile(remat.checkpoint(policy=policy)(block), backend="aot_eager", fullgraph=True)(x)
        kept[name] = remat.memory_report(y).bytes
    assert kept["linear"] == kept["nothing"] + 4 * 32 * 4


def test_a_pattern_that_begins_with_any_path_is_for_modules_at_the_top_of_a_region_too():
    model, x = nn.Sequential(Block(), nn.Sequential(Block())), leaf(2, 4, 8)
    with remat.checkpoint_modules(model, ["0", "1"], policy=remat.save_modules("*.self_attn")):
        regions = remat.memory_report(model(x)).regions
    assert [region.ops[0].name for region in regions] == ["self_attn", "0.self_attn"]


class Experts(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.experts = nn.Linear(width, width)

    def forward(self, x):
        return self.experts(x).sin()


@pytest.mark.parametrize("patterns", ["*", ["0", "1"], [Block, Experts]])
def test_a_pattern_may_match_in_some_regions_of_a_model_only(patterns):
    """The first layers of many mixtures of experts are dense."""
    model, x = nn.Sequential(Block(), Experts()), leaf(2, 4, 8)
    expected, _ = step(model, x)
    with remat.checkpoint_modules(model, patterns, policy=remat.save_modules("experts")):
        actual, found = step(model, x)
    assert_same(expected, actual)
    assert found == [[], ["experts"]]
    with pytest.raises(PolicyError, match="matches no module with a forward in "):
        remat.checkpoint_modules(model, patterns, policy=remat.save_modules("expert"))
