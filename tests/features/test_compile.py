"""Compiled code that contains regions, and regions that contain compiled code."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
import torch._dynamo
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SelectiveCheckpointContext, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.helpers import (
    Mlp,
    Stack,
    assert_same,
    checkpointed,
    leaf,
    no_other_regions,
    pairwise,
    parameter_gradients,
    plain,
    shown,
)
from torch_remat._compat import CompiledCode

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


def test_inductor_has_equal_gradients():
    expected = train_step(*build(plain))
    model, x = build(checkpointed)
    compiled = torch.compile(model, backend="inductor", fullgraph=True)
    for _ in range(2):
        actual = train_step(compiled, x)
        for one, other in zip(expected, actual, strict=True):
            torch.testing.assert_close(one, other)


def test_compiled_region_recomputes_in_backward():
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


RECOMPUTE, OFFLOAD = remat.CheckpointPolicy.RECOMPUTE, remat.CheckpointPolicy.OFFLOAD
EXP = torch.ops.aten.exp.default
MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
GELU = torch.ops.aten.gelu.default
READY = remat.policies.save_matmuls
BOTH = READY | [GELU]


def by_function(ctx, op, *args, **kwargs):
    return remat.CheckpointPolicy.SAVE if op in MATMULS else None


class ByObject:
    def __call__(self, ctx, op, *args, **kwargs):
        return op in MATMULS


by_object = ByObject()
POLICIES = {
    "list": lambda: MATMULS,
    "set": lambda: frozenset(MATMULS),
    "op": lambda: torch.ops.aten.addmm.default,
    "ready": lambda: READY,
    "combined outside": lambda: BOTH,
    "combined inside": lambda: READY | [GELU],
    "combined from the right": lambda: [GELU] | READY,
    "function": lambda: by_function,
    "partial": lambda: functools.partial(by_function),
    "object": lambda: by_object,
    "decisions of torch": lambda: remat.policies.save_every_other_matmul,
}


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8))


def one_graph(function, *args, backend="aot_eager"):
    """Compile and run a function forward and backward; return the gradients if that made one graph."""
    counter = CompileCounterWithBackend(backend)
    results = torch.compile(function, backend=counter, fullgraph=True)(*args)
    gradients = torch.autograd.grad(results.sum(), args)
    assert counter.frame_count == 1
    return gradients


@pairwise(backend=["aot_eager", "inductor"], kind=POLICIES)
def test_region_with_a_policy_compiles_to_one_graph(kind, backend):
    model, x = mlp(), leaf(4, 8)
    gradients = one_graph(lambda x: remat.checkpoint(policy=POLICIES[kind]())(model)(x.sin()).cos(), x, backend=backend)
    expected = torch.autograd.grad(model(x.sin()).cos().sum(), [x])
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(
            one, other, rtol=0 if backend == "aot_eager" else None, atol=0 if backend == "aot_eager" else None
        )


class Scale(torch.autograd.Function):
    @staticmethod
    @remat.auto_forward("y")
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return y * grad


class NamedScale(torch.autograd.Function):
    @staticmethod
    @remat.auto_forward("y")
    def forward(ctx, x, op_name, remat_policy):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return y * grad, None, None


class ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, op_name, remat_policy):
        handle = remat.get_handle(ctx, op_name, remat_policy)
        if (ret := handle.maybe_load_saved()) is not None:
            return ret
        x = handle.save_or_load_inputs(x)
        y = x.exp()
        handle.save_for_backward({"y": y})
        return handle.record_outputs(y)

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return y * grad, None, None


def in_scope(x):
    with remat.name_scope("block"):
        return remat.native_save_region("op", torch.exp, x)


offloader = remat.CpuOffloader()


def offloaded(x):
    with remat.offload_to(offloader):
        return remat.checkpoint(offload_inputs=True)(torch.exp)(x)


@remat.op(name="op")
def decorated(x):
    return x.exp()


def several(x, keep=remat.native_save_region):
    found = keep("op", lambda x: (x.sin(), {"a": x.exp(), "b": None}, 3), x)
    return found[1]["a"] + 0 * found[0] * found[2]


# Each is exp, so that one test knows the gradient of all.
FORMS = {
    "native_save_region, a function of torch's": lambda x: remat.native_save_region("op", torch.exp, x),
    "native_save_region, a Python function": lambda x: remat.native_save_region("op", lambda: x.exp()),
    "native_save_region, several results": several,
    "native_region": lambda x: remat.native_save_region("op", torch.exp, x),
    "native_region, recomputed": lambda x: remat.op(torch.exp, "op", policy=RECOMPUTE)(x),
    "native_region, offloaded": lambda x: remat.op(torch.exp, "op", policy=OFFLOAD)(x),
    "region": lambda x: remat.op(torch.exp, "op")(x),
    "region, a Python function": lambda x: remat.op(lambda: x.exp(), "op")(),
    "region, several results": lambda x: several(x, lambda name, function, *args: remat.op(function, name)(*args)),
    "region, opaque": lambda x: remat.op(lambda y: y.exp(), "op", opaque=True)(x),
    "region, recomputed": lambda x: remat.op(torch.exp, "op", policy=RECOMPUTE)(x),
    "region, offloaded": lambda x: remat.op(torch.exp, "op", policy=OFFLOAD)(x),
    "region, a decorated function": lambda x: decorated(x),
    "recompute_needs_tensor": lambda x: remat.recompute_needs_tensor(x) or x.exp(),
    "name_scope": in_scope,
    "op": lambda x: remat.op(Scale.apply, "op")(x),
    "op, recomputed": lambda x: remat.op(Scale.apply, "op", policy=remat.CheckpointPolicy.RECOMPUTE)(x),
    "auto_forward": lambda x: NamedScale.apply(x, "op", remat.CheckpointPolicy.SAVE),
    "get_handle": lambda x: ByHand.apply(x, "op", remat.CheckpointPolicy.SAVE),
    "checkpoint_name": lambda x: remat.checkpoint_name(x.exp(), "name"),
    "is_recomputing": lambda x: x.exp() if not remat.is_recomputing() else x,
    "partial": lambda x: remat.checkpoint()(functools.partial(torch.exp))(x),
    "partial of a method": lambda x: remat.checkpoint()(functools.partial(torch.Tensor.exp, x))(),
    "checkpoint_sequential": lambda x: remat.checkpoint_sequential([torch.exp, lambda x: x * 1, lambda x: x + 0], 2, x),
    "offload_to": offloaded,
}  # fmt: skip


@pairwise(where=["alone", "in a region", "in a region with a policy", "in two regions"], form=FORMS)
def test_form_compiles_to_one_graph(form, where):
    def program(x):
        def body(x):
            return FORMS[form](x.sin()).cos()

        if where == "alone":
            return body(x)
        if where == "in a region":
            return remat.checkpoint()(body)(x)
        if where == "in two regions":
            return remat.checkpoint()(lambda x: remat.checkpoint()(body)(x.tanh()))(x)
        return remat.checkpoint(policy=[torch.ops.aten.cos.default])(body)(x)

    x = leaf(4)
    y = x.tanh() if where == "in two regions" else x
    assert_same(one_graph(program, x), torch.autograd.grad(y.sin().exp().cos().sum(), [x]))


def with_all_forms(x):
    for form in FORMS.values():
        x = form(x.cos())
    return x


def test_all_forms_compile_with_inductor():
    x = leaf(4)
    gradients = one_graph(lambda x: remat.checkpoint()(with_all_forms)(x), x, backend="inductor")
    y = x
    for _ in FORMS:
        y = y.cos().exp()
    torch.testing.assert_close(gradients, torch.autograd.grad(y.sum(), [x]))


def kept_and_rerun(function, *args):
    """Return the bytes that the compiled forward hands to its backward, and the ops that backward runs."""
    found = {}

    def forward(graph, example_inputs):
        (outputs,) = (node for node in graph.graph.nodes if node.op == "output")
        values = [node.meta["val"] for node in outputs.args[0][1:] if node.meta["val"] is not None]
        found["bytes"] = sum(value.numel() * value.element_size() for value in values)
        return graph.forward

    def backward(graph, example_inputs):
        found["ops"] = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        return graph.forward

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition)
    torch.compile(function, backend=backend, fullgraph=True)(*args).sum().backward()
    return found["bytes"], found["ops"]


def matmuls_first(ctx, op, *args, **kwargs):
    decisions = torch.utils.checkpoint.CheckpointPolicy
    return decisions.MUST_SAVE if op in MATMULS else decisions.PREFER_RECOMPUTE


@pytest.mark.parametrize("policy", [MATMULS, READY, by_function, matmuls_first, [GELU]], ids=shown)
def test_compiled_region_keeps_what_selective_checkpointing_of_torch_keeps(policy):
    model, x = mlp(), leaf(4, 8)
    for_torch = [GELU] if policy == [GELU] else MATMULS
    contexts = functools.partial(create_selective_checkpoint_contexts, for_torch)
    theirs = kept_and_rerun(lambda x: torch_checkpoint(model, x, use_reentrant=False, context_fn=contexts).cos(), x)
    ours = kept_and_rerun(lambda x: remat.checkpoint(policy=policy)(model)(x).cos(), x)
    nothing = kept_and_rerun(lambda x: remat.checkpoint()(model)(x).cos(), x)
    assert ours == theirs
    assert ours[0] > nothing[0]
    assert len(ours[1]) < len(nothing[1])


def saving(how):
    def body(x, w):
        if how == "native":
            return remat.native_save_region("op", lambda x: (x @ w).sigmoid(), x)
        if how == "offloaded":
            return remat.op(lambda x: (x @ w).sigmoid(), "op", policy=remat.CheckpointPolicy.OFFLOAD)(x)
        if how == "region":
            return remat.op(lambda x: (x @ w).sigmoid(), "op")(x)
        if how == "region, offloaded":
            return remat.op(lambda x: (x @ w).sigmoid(), "op", policy=OFFLOAD)(x)
        if how == "op":
            return remat.op(MatmulSigmoid.apply, "op")(x, w)
        if how == "op in a native region":
            return remat.native_save_region("around", lambda x: remat.op(MatmulSigmoid.apply, "op")(x, w), x)
        return (x @ w).sigmoid()

    return body


class MatmulSigmoid(torch.autograd.Function):
    @staticmethod
    @remat.auto_forward("x", "w", "y")
    def forward(ctx, x, w):
        y = (x @ w).sigmoid()
        ctx.save_for_backward(x, w, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, w, y = ctx.saved_tensors
        grad = grad * y * (1 - y)
        return grad @ w.T, x.T @ grad


class ByHandMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, op_name, remat_policy):
        handle = remat.get_handle(ctx, op_name, remat_policy)
        if (ret := handle.maybe_load_saved()) is not None:
            return ret
        x, w = handle.save_or_load_inputs(x, w)
        y = (x @ w).sigmoid()
        handle.save_for_backward({"x": x, "w": w, "y": y})
        return handle.record_outputs(y)

    @staticmethod
    def backward(ctx, grad):
        x, w, y = ctx.saved_tensors
        grad = grad * y * (1 - y)
        return grad @ w.T, x.T @ grad, None, None


@pytest.mark.parametrize("around", ["nothing", "native", "region"])
def test_handle_by_hand_in_a_compiled_region_is_kept_by_the_call_around_it_only(around):
    def by_hand(x, w):
        return ByHandMatmul.apply(x, w, "op", remat.CheckpointPolicy.SAVE)

    parts = {
        "nothing": by_hand,
        "native": lambda x, w: remat.native_save_region("around", by_hand, x, w),
        "region": lambda x, w: remat.op(by_hand, "around")(x, w),
    }

    def program(part):
        return lambda x, w: remat.checkpoint()(lambda x: (part(x.sin(), w) @ w).exp().cos())(x)

    x, w = leaf(8, 8), leaf(8, 8)
    runs_again = torch.ops.aten.sigmoid.default in kept_and_rerun(program(parts[around]), x, w)[1]
    assert runs_again == (around == "nothing")
    expected = torch.autograd.grad((by_hand(x.sin(), w) @ w).exp().cos().sum(), [x, w])
    assert_same(one_graph(program(parts[around]), x, w), expected)


@pytest.mark.parametrize("options", [{}, {"policy": [torch.ops.aten.exp.default]}], ids=["plain", "policy"])
@pytest.mark.parametrize("how", ["native", "offloaded", "region", "region, offloaded", "op", "op in a native region"])
def test_what_is_saved_inside_a_compiled_region_does_not_run_again(how, options):
    def program(how):
        return lambda x, w: remat.checkpoint(**options)(lambda x: (saving(how)(x.sin(), w) @ w).exp().cos())(x)

    def count(found):
        return [found[1].count(op) for op in (torch.ops.aten.mm.default, torch.ops.aten.sigmoid.default)]

    x, w = leaf(8, 8), leaf(8, 8)
    nothing = kept_and_rerun(program("nothing"), x, w)
    found = kept_and_rerun(program(how), x, w)
    assert [before - after for before, after in zip(count(nothing), count(found), strict=True)] == [1, 1]
    assert found[0] > nothing[0]
    expected = torch.autograd.grad((saving(how)(x.sin(), w) @ w).exp().cos().sum(), [x, w])
    assert_same(one_graph(program(how), x, w), expected)


@pytest.mark.parametrize("form", ["native", "region", "region, a closure", "region, opaque"])
def test_what_is_saved_keeps_no_more_than_torchs_must_save_of_the_same_ops(form):
    def inside(x, w):
        return (x @ w).sigmoid().tanh()

    forms = {
        "native": lambda x, w: remat.native_save_region("op", inside, x, w),
        "region": lambda x, w: remat.op(inside, "op")(x, w),
        "region, a closure": lambda x, w: remat.op(lambda: inside(x, w), "op")(),
        "region, opaque": lambda x, w: remat.op(inside, "op", opaque=True)(x, w),
    }
    ops = [getattr(torch.ops.aten, name).default for name in ("mm", "sigmoid", "tanh")]  # that occur nowhere else
    contexts = functools.partial(create_selective_checkpoint_contexts, ops)
    x, w = leaf(8, 8), leaf(8, 8)
    theirs = kept_and_rerun(
        lambda x, w: torch_checkpoint(
            lambda x: inside(x.sin(), w).exp().cos(), x, use_reentrant=False, context_fn=contexts
        ),
        x,
        w,
    )
    ours = kept_and_rerun(lambda x, w: remat.checkpoint()(lambda x: forms[form](x.sin(), w).exp().cos())(x), x, w)
    nothing = kept_and_rerun(lambda x, w: remat.checkpoint()(lambda x: inside(x.sin(), w).exp().cos())(x), x, w)
    assert nothing[0] < ours[0] <= theirs[0]
    assert not {"sigmoid", "tanh"} & {str(op).split(".")[1] for op in ours[1]}


def contexts_for_matmuls():
    return create_selective_checkpoint_contexts(MATMULS)


@pytest.mark.parametrize("made", ["partial", "function"])
def test_contexts_of_selective_checkpointing_are_handed_on(made):
    contexts = functools.partial(create_selective_checkpoint_contexts, MATMULS)
    context_fn = contexts if made == "partial" else contexts_for_matmuls
    model, x = mlp(), leaf(4, 8)
    theirs = kept_and_rerun(lambda x: torch_checkpoint(model, x, use_reentrant=False, context_fn=contexts).cos(), x)
    assert kept_and_rerun(lambda x: remat.checkpoint(context_fn=context_fn)(model)(x).cos(), x) == theirs


def test_reports_around_compiled_code_see_no_regions_in_it():
    model, x = mlp(), leaf(4, 8)
    compiled = torch.compile(lambda x: remat.checkpoint(region_name="r")(model)(x), backend="aot_eager")
    compiled(x)
    with no_other_regions():
        report = remat.memory_report(compiled(x), model)
    assert not report.regions
    assert report.bytes == x.nbytes
    with remat.trace() as trace:
        compiled(x).sum().backward()
    assert not trace.spans
    assert trace.peak.total_bytes > 0


def test_explain_and_list_names_run_compiled_code_as_it_is_written():
    model, x = mlp(), leaf(4, 8)
    compiled = torch.compile(lambda x: remat.checkpoint(region_name="r")(model)(x), backend="aot_eager")
    compiled(x)
    assert "r\n  keeps 128 B, of which 128 B inputs" in str(remat.explain(compiled)(x))
    assert sum(row.op == "aten.addmm.default" for row in remat.list_names(compiled)(x)) == 3


class Chain(nn.Module):
    """Two blocks, each a region."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([mlp(), mlp()])

    def forward(self, x):
        for block in self.blocks:
            x = remat.checkpoint()(block)(x)
        return x.exp()


def explain(function, x):
    assert len(remat.explain(function)(x).regions) == 2


def run_in_a_budget(function, x):
    with remat.dtr.budget("64 MiB"):
        function(x).sum().backward()


@pytest.mark.parametrize("tool", [explain, run_in_a_budget])
@pytest.mark.parametrize("compiles", ["before", "inside"])
def test_what_runs_as_it_is_written_under_a_tool_still_compiles_afterwards(tool, compiles):
    def compiled(model):
        return torch.compile(model, backend="aot_eager", fullgraph=True)

    first, second, x = Chain(), Chain(), leaf(4, 8)
    expected = train_step(second, x)
    call = compiled(first) if compiles == "before" else lambda x: compiled(first)(x)
    tool(call, x)
    x.grad = None
    assert_same(expected, train_step(compiled(second), x))
    checkpointed(compiled(first.blocks[0]))(x).sum().backward()


@pytest.mark.parametrize("report", [remat.print_current_memory_report, remat.format_current_memory_report])
def test_report_on_the_current_region_in_compiled_code_is_an_error_that_says_so(report):
    def block(x):
        h = x.sin()
        report()
        return h.exp()

    with pytest.raises(remat.UsageError, match=r"outside of any region.*\n.*torch\.compile"):
        torch.compile(lambda x: remat.checkpoint()(block)(x), backend="aot_eager")(leaf(4))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_policy_by_name_is_an_error_of_ours_under_the_compiler(fullgraph):
    model = mlp()
    region = torch.compile(
        lambda x: remat.checkpoint(policy=remat.save_names("*") | MATMULS)(model)(x),
        backend="aot_eager",
        fullgraph=fullgraph,
    )
    with pytest.raises(remat.PolicyError, match=r"(?s)policy by name .* no names.*Use a list of ops"):
        region(leaf(4, 8))


def test_policy_that_returns_something_else_is_an_error_of_ours_under_the_compiler():
    region = torch.compile(
        lambda x: remat.checkpoint(policy=lambda *_, **__: "save")(torch.exp)(x), backend="aot_eager"
    )
    with pytest.raises(remat.RematError, match="the policy returned 'save'"):
        region(leaf(4, 8))


AROUND_COMPILED = {
    "plain": lambda f: remat.checkpoint()(lambda x: f(x.sin()).exp()),
    "policy": lambda f: remat.checkpoint(policy=READY)(lambda x: f(x.sin()).exp()),
    "policy for another op": lambda f: remat.checkpoint(policy=[torch.ops.aten.exp.default])(
        lambda x: f(x.sin()).exp()
    ),
    "policy for all ops": lambda f: remat.checkpoint(policy=lambda *_, **__: True)(lambda x: f(x.sin()).exp()),
    "policy by name": lambda f: remat.checkpoint(policy=remat.save_names("sin*"))(lambda x: f(x.sin()).exp()),
    "debug": lambda f: remat.checkpoint(debug=True)(lambda x: f(x.sin()).exp()),
    "bitwise": lambda f: remat.checkpoint(determinism_check="bitwise")(lambda x: f(x.sin()).exp()),
    "native region": lambda f: remat.checkpoint()(lambda x: remat.native_save_region("f", f, x.sin()).exp()),
    "native region, recomputed": lambda f: remat.checkpoint()(
        lambda x: remat.op(f, "f", policy=remat.CheckpointPolicy.RECOMPUTE)(x.sin()).exp()
    ),
    "region": lambda f: remat.checkpoint()(lambda x: remat.op(f, "f")(x.sin()).exp()),
    "region, opaque": lambda f: remat.checkpoint()(lambda x: remat.op(f, "f", opaque=True)(x.sin()).exp()),
    "region, recomputed": lambda f: remat.checkpoint()(lambda x: remat.op(f, "f", policy=RECOMPUTE)(x.sin()).exp()),
    "region under a policy": lambda f: remat.checkpoint(policy=[torch.ops.aten.exp.default])(
        lambda x: remat.op(f, "f")(x.sin()).exp()
    ),
    "native region under a policy": lambda f: remat.checkpoint(policy=[torch.ops.aten.exp.default])(
        lambda x: remat.native_save_region("f", f, x.sin()).exp()
    ),
}


@pytest.mark.skipif(not CompiledCode.is_noticed, reason="before torch 2.13 it runs as it is written")
@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # of torch, where hooks follow the modules
@pairwise(warm=[False, True], backend=["eager", "aot_eager", "inductor"], around=AROUND_COMPILED)
def test_compiled_code_in_a_region_runs_compiled(around, backend, warm):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 8))
    compiled, x, runs = torch.compile(model, backend=backend), leaf(4, 8), CompiledCode()

    def step(function):
        model.zero_grad()
        x.grad = None
        torch.manual_seed(3)
        with runs:
            y = function(x)
        y.sum().backward()
        return [y, x.grad, *parameter_gradients(model), torch.get_rng_state()]

    expected = step(lambda x: compiled(x.sin()).exp()) if warm else None
    actual = step(AROUND_COMPILED[around](compiled))
    assert runs.ran
    assert_same(expected or step(lambda x: compiled(x.sin()).exp()), actual)


@pytest.mark.parametrize(
    "keep",
    [
        lambda f, x: remat.native_save_region("f", f, x),
        lambda f, x: remat.op(f, "f")(x),
        lambda f, x: remat.op(f, "f", opaque=True)(x),
        lambda f, x: remat.op(lambda x: f(x).tanh(), "f", opaque=True)(x),
    ],
    ids=["native_save_region", "region", "region, opaque", "region of a function, opaque"],
)
def test_saved_call_of_compiled_code_runs_once(keep):
    runs = []

    def backend(graph, example_inputs):
        return lambda *args: runs.append(1) or graph.forward(*args)

    compiled = torch.compile(torch.nn.Sequential(nn.Linear(8, 8), nn.GELU()), backend=backend)
    x = leaf(4, 8)
    remat.checkpoint()(lambda x: keep(compiled, x).sin())(x).sum().backward()
    assert len(runs) == 1


@pytest.mark.skipif(not CompiledCode.is_noticed, reason="before torch 2.13 it runs as it is written")
@pytest.mark.parametrize("options", [{}, {"policy": READY}, {"debug": True}], ids=["plain", "policy", "debug"])
def test_compiler_leaves_the_library_alone(options):
    def block(x):
        for _ in range(2):  # the compiler gives up on what breaks the graph in a loop, and looks at all that is called
            x = (x @ x).sin().t()
            torch._dynamo.graph_break()
        return x @ x

    backend = Recording()
    compiled, x = torch.compile(block, backend=backend), leaf(4, 4)
    for _ in range(2):
        y = remat.checkpoint(**options)(lambda x: compiled(x.sin()).exp())(x)
        actual = torch.autograd.grad(y.sum(), x)
    assert_same(actual, torch.autograd.grad(block(x.sin()).exp().sum(), x))
    assert not backend.graphs


@pytest.mark.skipif(not CompiledCode.is_noticed, reason="before torch 2.13 it runs as it is written")
def test_ops_around_compiled_code_run_again_and_what_the_policy_names_is_kept():
    model, x = mlp(), leaf(4, 8)
    compiled = torch.compile(lambda x: model(x), backend="inductor")
    compiled(x)
    ran = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            ran.append(op)
            return op(*args, **(kwargs or {}))

        @classmethod
        def ignore_compile_internals(cls):
            return True

    y = remat.checkpoint(policy=[EXP])(lambda x: compiled(x.exp()).sin())(x)
    assert "exp" in str(remat.memory_report(y))
    with Watching():
        actual = torch.autograd.grad(y.sum(), x)
    assert ran.count(EXP) == 1  # compiled code reads what it will
    torch.testing.assert_close(actual[0], torch.autograd.grad(model(x.exp()).sin().sum(), x)[0])


def test_compiled_code_that_changes_the_argument_of_its_native_region_is_an_error():
    compiled, x = torch.compile(lambda x: x.mul_(2).sin(), backend="aot_eager"), leaf(4)
    with pytest.raises(remat.UsageError, match=r"::op: .*modified an argument in place unwatched") as caught:
        remat.checkpoint()(lambda x: remat.native_save_region("op", compiled, x.exp()))(x)
    assert caught.value.op == "op"


def test_native_region_of_compiled_code_with_buffers_and_dropout_is_equal():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.GELU())
    x = leaf(4, 8)
    compiled = torch.compile(model, backend="aot_eager")
    results = []
    for wrap in (plain, checkpointed):
        torch.manual_seed(1)
        model[1].reset_running_stats()
        y = wrap(lambda x: torch.nn.functional.dropout(remat.native_save_region("op", compiled, x.sin()).exp()))(x)
        y.sum().backward()
        results.append([y, x.grad, *parameter_gradients(model), *model[1].buffers(), torch.get_rng_state()])
        results[-1] = [tensor.clone() for tensor in results[-1]]
        x.grad = None
        model.zero_grad()
    assert_same(*results)


@pytest.mark.parametrize("name", ["memory_report", "list_names", "explain", "trace", "budget"])
def test_what_is_for_eager_code_says_so_in_compiled_code(name):
    def program(x):
        if name == "memory_report":
            remat.memory_report(x.sin())
        elif name in ("trace", "budget"):
            with remat.trace() if name == "trace" else remat.budget("1 GiB"):
                return x.cos()
        else:
            getattr(remat, name)(torch.sin)(x)
        return x.cos()

    x = leaf(3)
    with pytest.raises(Exception, match=f"remat.{name} is for eager code"):
        torch.compile(program, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.skipif(not CompiledCode.is_noticed, reason="before torch 2.13 it runs as it is written")
def test_call_around_compiled_code_in_a_region_with_a_policy_is_skipped():
    compiled, x, runs = torch.compile(torch.sin, backend="eager"), leaf(4), []

    def call(t):
        runs.append(remat.is_recomputing())
        return compiled(t) * 2

    def block(x):
        return remat.op(call, "k")(x.exp()).tanh() * x

    y = remat.checkpoint(policy=[torch.ops.aten.tanh.default])(block)(x)
    actual = torch.autograd.grad(y.sum(), x)[0]
    assert runs == [False]
    assert torch.equal(actual, torch.autograd.grad(block(x).sum(), x)[0])
