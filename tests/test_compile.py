"""Compiled code that contains regions, and regions that contain compiled code."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
import torch._dynamo
from helpers import Mlp, Stack, assert_same, checkpointed, leaf, parameter_gradients, plain
from torch import nn
from torch.utils.checkpoint import SelectiveCheckpointContext

import torch_remat as remat

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::UserWarning:torch",
    r"ignore:Guards may run slower on Python 3\.13\.0:RuntimeWarning",
)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Recording:
    """A backend that keeps the traced graphs and runs them as they are."""

    def __init__(self):
        self.graphs = []

    def __call__(self, module, example_inputs):
        self.graphs.append(module)
        return module.forward

    def targets(self):
        return [str(node.target) for graph in self.graphs for node in graph.graph.nodes]


def train_step(model, x):
    y = model(x)
    y.square().mean().backward()
    results = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
    x.grad = None
    model.zero_grad()
    return results


def build(wrap, dropout=0.0):
    torch.manual_seed(0)
    model = Stack(wrap, depth=1)
    model.blocks[0].dropout = dropout
    return model, torch.randn(2, 4, 8, requires_grad=True)


def test_region_is_traced_into_one_graph_as_a_checkpoint_that_the_compiler_knows():
    backend = Recording()
    model, x = build(checkpointed)
    expected = train_step(*build(plain))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert_same(expected, train_step(compiled, x))
    assert len(backend.graphs) == 1
    assert sum("tag_activation_checkpoint" in target for target in backend.targets()) == 2


def test_aot_eager_has_equal_gradients():
    expected = train_step(*build(plain))
    model, x = build(checkpointed)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert_same(expected, train_step(compiled, x))


def test_inductor_has_equal_gradients():
    expected = train_step(*build(plain))
    model, x = build(checkpointed)
    compiled = torch.compile(model, backend="inductor", fullgraph=True)
    for _ in range(2):
        actual = train_step(compiled, x)
        for one, other in zip(expected, actual, strict=True):
            torch.testing.assert_close(one, other)


def test_compiled_region_recomputes_in_backward():
    from torch._dynamo.backends.common import aot_autograd

    matmuls = {}

    def count(name):
        def compiler(graph, example_inputs):
            matmuls[name] = sum(str(node.target) == "aten.mm.default" for node in graph.graph.nodes)
            return graph.forward

        return compiler

    for wrap in (plain, checkpointed):
        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=count(f"forward {wrap.__name__}"), bw_compiler=count(wrap.__name__))
        x, w = leaf(3, 3), leaf(3, 3)
        function = torch.compile(lambda x, w, wrap=wrap: wrap(lambda x: ((x @ w).sin() @ w).cos())(x), backend=backend)
        function(x, w).sum().backward()
    assert matmuls["forward plain"] == matmuls["forward checkpointed"] == 2
    assert matmuls["plain"] == 4
    assert matmuls["checkpointed"] > 4


def test_dropout_in_a_compiled_region_has_the_same_mask_in_both_phases():
    region = remat.checkpoint()(lambda x: nn.functional.dropout(x * 1, 0.5))
    compiled = torch.compile(lambda x: region(x).exp(), backend="aot_eager")
    x = torch.ones(200, requires_grad=True)
    y = compiled(x)
    y.sum().backward()
    kept = y.detach() > 1
    assert 40 < kept.sum() < 160
    assert torch.equal(x.grad != 0, kept)


def test_options_that_the_compiler_needs_not_know_are_accepted():
    options = {"region_name": "block", "determinism_check": "bitwise", "early_stop": False, "debug": True}
    x = leaf(4)
    region = remat.checkpoint(**options)(lambda x, *, scale: (x * scale).sin().exp())
    compiled = torch.compile(lambda x: region(x, scale=2.0), backend="aot_eager")
    compiled(x).sum().backward()
    assert_same(x.grad, torch.autograd.grad((x * 2.0).sin().exp().sum(), x)[0])


def test_keywords_containers_and_several_outputs_are_traced():
    def block(items, *, scale, debug=None):
        h = (items[0] * scale["s"]).sin()
        return {"h": h, "pair": (h.exp(), items[0].cos())}

    def program(wrap):
        def run(x, s):
            out = wrap(block)([x], scale={"s": s}, debug=3)
            return (out["h"] * out["pair"][0] + out["pair"][1]).sum()

        return run

    x, s = leaf(4), leaf(4)
    torch.compile(program(checkpointed), backend="aot_eager", fullgraph=True)(x, s).backward()
    assert_same([x.grad, s.grad], torch.autograd.grad(program(plain)(x, s), [x, s]))


def test_nested_regions_are_traced():
    def program(wrap):
        inner = wrap(lambda x: x.sin().exp())
        return wrap(lambda x: inner(x.cos()).tanh())

    x = leaf(4)
    torch.compile(program(checkpointed), backend="aot_eager")(x).sum().backward()
    assert_same(x.grad, torch.autograd.grad(program(plain)(x).sum(), x)[0])


def test_compiled_model_without_gradients_gives_equal_outputs():
    model, x = build(checkpointed)
    compiled = torch.compile(model.eval(), backend="aot_eager")
    with torch.no_grad():
        assert_same(compiled(x), build(plain)[0].eval()(x))


@pytest.mark.parametrize("retain_graph", [False, True])
def test_region_around_compiled_code_is_equal(retain_graph):
    mlp = Mlp(4)
    x = leaf(2, 4)
    compiled = torch.compile(mlp, backend="aot_eager")
    y = checkpointed(lambda x: compiled(x.sin()).exp())(x)
    for _ in range(1 + retain_graph):
        x.grad = None
        mlp.zero_grad()
        y.sum().backward(retain_graph=retain_graph)
    actual = [y, x.grad, *parameter_gradients(mlp)]
    x.grad = None
    mlp.zero_grad()
    expected = mlp(x.sin()).exp()
    expected.sum().backward()
    assert_same([expected, x.grad, *parameter_gradients(mlp)], [actual[0], *actual[1:]])


def test_graph_break_inside_a_region_is_equal():
    def block(x):
        h = x.sin()
        torch._dynamo.graph_break()
        return h.exp().cos()

    x = leaf(4)
    compiled = torch.compile(lambda x: checkpointed(block)(x).tanh(), backend="aot_eager")
    compiled(x).sum().backward()
    assert_same(x.grad, torch.autograd.grad(block(x).tanh().sum(), x)[0])


def test_decorated_function_compiles():
    @functools.partial(torch.compile, backend="aot_eager")
    @remat.checkpoint(region_name="decorated")
    def block(x):
        return x.sin().exp()

    x = leaf(4)
    block(x).sum().backward()
    assert_same(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


@pytest.mark.parametrize("kind", ["list", "function"])
def test_policy_for_ops_is_handed_to_the_compilers_checkpoint(kind):
    mm = torch.ops.aten.mm.default
    policy = [mm] if kind == "list" else lambda ctx, op, *args, **kwargs: op is mm
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8, requires_grad=True)

    def function(x):
        return torch.sin(x @ weight).exp()

    def region(x):
        return remat.checkpoint(policy=policy)(function)(x)

    expected = torch.autograd.grad(function(x).sum(), [x, weight])
    actual = torch.autograd.grad(torch.compile(region, backend="aot_eager")(x).sum(), [x, weight])
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(one, other)


def by_output(ctx, op, *args, **kwargs):
    return isinstance(ctx.op_output, torch.Tensor) and op is torch.ops.aten.mm.default


# Torch 2.10 and 2.11 ask a policy before the op runs. (Before 2.13 the mode stays active until the error is gone, so
# that no tensor can be printed.)
TELLS_OUTPUT = hasattr(SelectiveCheckpointContext(is_recompute=False), "op_output")
REFUSED = {"ops have no names": remat.save_names("mm_0_0")}
if not TELLS_OUTPUT:
    REFUSED["asks before an op runs"] = by_output


@pytest.mark.parametrize("message", REFUSED)
def test_policy_that_cannot_be_asked_under_the_compiler_is_an_error_that_says_so(message):
    def region(x):
        return remat.checkpoint(policy=REFUSED[message])(lambda x: torch.sin(x @ x))(x)

    said = []
    try:
        torch.compile(region, backend="aot_eager")(leaf(4, 4))
    except RuntimeError as error:
        said.append(str(error))
    gc.collect()
    assert message in said[0]


@pytest.mark.skipif(not TELLS_OUTPUT, reason="torch 2.10 and 2.11 ask a policy before the op runs")
def test_policy_under_the_compiler_may_go_by_the_output():
    x = leaf(4, 4)
    region = torch.compile(
        lambda x: remat.checkpoint(policy=by_output)(lambda x: (x @ x).sin())(x), backend="aot_eager"
    )
    expected = torch.autograd.grad((x @ x).sin().sum(), x)
    torch.testing.assert_close(torch.autograd.grad(region(x).sum(), x), expected)


def test_handler_of_a_region_with_a_policy_is_not_compiled():
    backend = Recording()
    compiled = torch.compile(lambda x: x.sin().cos(), backend=backend)
    x = leaf(3)
    y = remat.checkpoint(policy=[torch.ops.aten.sin.default])(compiled)(x)
    y.sum().backward()
    assert_same(torch.cos(torch.sin(x)), y)
    assert not any("aten." in target for target in backend.targets())  # ops one by one, as the handler runs them
