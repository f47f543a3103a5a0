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
from torch.utils.checkpoint import SelectiveCheckpointContext, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.helpers import (
    OLDEST,
    assert_same,
    checkpointed,
    leaf,
    no_other_regions,
    parameter_gradients,
    train_step,
)
from tests.ways import PLAIN_AUTOGRAD, WAYS
from torch_remat._compat import CompiledCode

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::UserWarning:torch",
    "ignore:this torch has no tag:torch_remat.RematWarning",  # torch 2.10
)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_dropout_in_a_compiled_region_has_the_same_mask_in_both_phases():
    region = remat.checkpoint()(lambda x: nn.functional.dropout(x * 1, 0.5))
    compiled = torch.compile(lambda x: region(x).exp(), backend="aot_eager")
    x = torch.ones(200, requires_grad=True)
    y = compiled(x)
    y.sum().backward()
    kept = y.detach() > 1
    assert 40 < kept.sum() < 160
    assert torch.equal(x.grad != 0, kept)


RECOMPUTE, OFFLOAD = remat.CheckpointPolicy.RECOMPUTE, remat.CheckpointPolicy.OFFLOAD
EXP, COS = torch.ops.aten.exp.default, torch.ops.aten.cos.default
MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
GELU = torch.ops.aten.gelu.default
READY = remat.policies.save_matmuls


def by_output(ctx, op, *args, **kwargs):
    return isinstance(ctx.op_output, torch.Tensor) and op in MATMULS


def by_function(ctx, op, *args, **kwargs):
    return remat.CheckpointPolicy.SAVE if op in MATMULS else None


class ByObject:
    def __call__(self, ctx, op, *args, **kwargs):
        return op in MATMULS


BY_OBJECT = ByObject()
POLICIES = {
    "none": lambda: None,
    "set": lambda: frozenset(MATMULS),
    "op": lambda: torch.ops.aten.addmm.default,
    "ready": lambda: READY,
    "combined": lambda: READY | [GELU],
    "function": lambda: by_function,
    "partial": lambda: functools.partial(by_function),
    "object": lambda: BY_OBJECT,
    "decisions of torch": lambda: remat.policies.save_every_other_matmul,
    "dict": lambda: {nn.functional.linear: remat.CheckpointPolicy.SAVE, nn.functional.gelu: OFFLOAD, COS: None},
}
# Torch 2.10 and 2.11 ask a policy before the op runs.
TELLS_OUTPUT = hasattr(SelectiveCheckpointContext(is_recompute=False), "op_output")
POLICIES |= {"output": lambda: by_output} if TELLS_OUTPUT else {}


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


@pytest.mark.parametrize("kind", POLICIES)
def test_region_with_a_policy_compiles_to_one_graph(kind):
    model, x = mlp(), leaf(4, 8)
    expected = torch.autograd.grad(model(x.sin()).cos().sum(), [x])

    def program(x):
        return remat.checkpoint(policy=POLICIES[kind]())(model)(x.sin()).cos()

    region = remat.checkpoint(policy=POLICIES[kind]())(model)
    assert_same(expected, one_graph(program, x))
    assert_same(expected, one_graph(lambda x: region(x.sin()).cos(), x))
    if kind in ("none", "function"):
        torch.testing.assert_close(list(one_graph(program, x, backend="inductor")), list(expected))


@pytest.mark.skipif(TELLS_OUTPUT, reason="this torch tells policies what an op returned")
def test_policy_that_goes_by_the_output_is_an_error_where_torch_tells_it_to_none():
    said = ""
    try:
        torch.compile(remat.checkpoint(policy=by_output)(torch.mm), backend="aot_eager")(leaf(4, 4), leaf(4, 4))
    except RuntimeError as error:  # whose frames keep the mode active: no tensor can be printed
        said = str(error)
    gc.collect()
    assert "asks before an op runs" in said


def test_graph_break_inside_a_region_is_equal():
    def block(x):
        h = x.sin()
        torch._dynamo.graph_break()
        return h.exp().cos()

    x = leaf(4)
    compiled = torch.compile(lambda x: checkpointed(block)(x).tanh(), backend="aot_eager")
    assert_same(torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(block(x).tanh().sum(), x))


class Exp(torch.autograd.Function):
    """As users write it."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return y * grad


class Aware(Exp):
    """The same, remat-aware."""

    forward = staticmethod(remat.auto_forward("y")(Exp.forward))


class ByHand(torch.autograd.Function):
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


def several(x):
    found = remat.op(lambda x: (x.sin(), {"a": x.exp(), "b": None}, 3), "op")(x)
    return found[1]["a"] + 0 * found[0] * found[2]


# Each is exp, so that one test knows the gradient of all.
FORMS = {
    "native_save_region": lambda x: remat.native_save_region("op", torch.exp, x),
    "op": lambda x: remat.op(torch.exp, "op")(x),
    "op, a closure": lambda x: remat.op(lambda: x.exp(), "op")(),
    "op, several results": several,
    "op, recomputed": lambda x: remat.op(torch.exp, "op", policy=RECOMPUTE)(x),
    "op, offloaded": lambda x: remat.op(torch.exp, "op", policy=OFFLOAD)(x),
    "op, a decorated function": lambda x: decorated(x),
    "op, a custom Function": lambda x: remat.op(Exp.apply, "op")(x),
    "native_save_region, a custom Function": lambda x: remat.native_save_region("op", Exp.apply, x),
    "op, a remat-aware Function": lambda x: remat.op(Aware.apply, "op")(x),
    "op, a recomputed Function": lambda x: remat.op(Aware.apply, "op", policy=RECOMPUTE)(x),
    "recompute_needs_tensor": lambda x: remat.recompute_needs_tensor(x) or x.exp(),
    "name_scope": in_scope,
    "checkpoint_name": lambda x: remat.checkpoint_name(x.exp(), "name"),
    "is_recomputing": lambda x: x.exp() if not remat.is_recomputing() else x,
    "partial of a method": lambda x: remat.checkpoint()(functools.partial(torch.Tensor.exp, x))(),
    "checkpoint_sequential": lambda x: remat.checkpoint_sequential([torch.exp, lambda x: x * 1, lambda x: x + 0], 2, x),
    "offload_to": offloaded,
}


@pytest.mark.parametrize("form", FORMS)
def test_form_compiles_to_one_graph(form):
    def body(x):
        return FORMS[form](x.sin()).cos()

    def in_regions(x):
        return remat.checkpoint(policy=[COS])(lambda x: remat.checkpoint()(body)(x.tanh()))(x)

    x = leaf(4)
    assert_same(one_graph(body, x), torch.autograd.grad(x.sin().exp().cos().sum(), [x]))
    torch._dynamo.reset()
    assert_same(one_graph(in_regions, x), torch.autograd.grad(x.tanh().sin().exp().cos().sum(), [x]))


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


SAC = functools.partial(create_selective_checkpoint_contexts, MATMULS)


@pytest.mark.parametrize(
    "options",
    [{"policy": MATMULS}, {"policy": matmuls_first}, {"context_fn": SAC}, {"context_fn": lambda: SAC()}],
    ids=["ops", "function", "contexts", "contexts of a function"],
)
def test_compiled_region_keeps_what_selective_checkpointing_of_torch_keeps(options):
    model, x = mlp(), leaf(4, 8)
    theirs = kept_and_rerun(lambda x: torch_checkpoint(model, x, use_reentrant=False, context_fn=SAC).cos(), x)
    region = remat.checkpoint(**options)(model)
    ours = kept_and_rerun(lambda x: region(x).cos(), x)
    nothing = kept_and_rerun(lambda x: remat.checkpoint()(model)(x).cos(), x)
    assert ours == theirs
    assert ours[0] > nothing[0]
    assert len(ours[1]) < len(nothing[1])


def call_by_hand(x, w):
    return ByHand.apply(x, w, "op", remat.CheckpointPolicy.SAVE)


SAVING = {
    "native": lambda x, w: remat.native_save_region("op", lambda x: (x @ w).sigmoid(), x),
    "op": lambda x, w: remat.op(lambda x: (x @ w).sigmoid(), "op")(x),
    "op, offloaded": lambda x, w: remat.op(lambda x: (x @ w).sigmoid(), "op", policy=OFFLOAD)(x),
    "a handle in an op": lambda x, w: remat.op(call_by_hand, "around")(x, w),
    "a handle in a native region": lambda x, w: remat.native_save_region("around", call_by_hand, x, w),
    "a handle alone": call_by_hand,  # whose policy the compiler does not see
}


@pytest.mark.parametrize(("how", "options"), [*((how, {}) for how in SAVING), ("op", {"policy": [EXP]})], ids=str)
def test_what_is_saved_inside_a_compiled_region_does_not_run_again(how, options):
    def block(inside):
        return lambda x, w: inside(x.sin(), w).exp().cos()

    def program(inside):
        return lambda x, w: remat.checkpoint(**options)(lambda x: block(inside)(x, w))(x)

    def nothing(x, w):
        return (x @ w).sigmoid()

    def theirs(x, w):
        contexts = functools.partial(create_selective_checkpoint_contexts, [MATMULS[0], torch.ops.aten.sigmoid.default])
        return torch_checkpoint(lambda x: block(nothing)(x, w), x, use_reentrant=False, context_fn=contexts)

    if OLDEST and (options or how == "a handle alone"):
        pytest.skip("torch 2.10 takes the tags of the outer region, and its partitioner keeps what has none")
    x, w = leaf(8, 8), leaf(8, 8)
    before, found = (kept_and_rerun(program(inside), x, w) for inside in (nothing, SAVING[how]))
    fewer = [before[1].count(op) - found[1].count(op) for op in (MATMULS[0], torch.ops.aten.sigmoid.default)]
    assert fewer == ([0, 0] if how == "a handle alone" else [1, 1])
    if not options:  # torch's keeps the same ops
        assert found[0] <= kept_and_rerun(theirs, x, w)[0]
    expected = torch.autograd.grad(block(SAVING[how])(x, w).sum(), [x, w])
    assert_same(one_graph(program(SAVING[how]), x, w), expected)


def test_reports_around_compiled_code_see_no_regions_in_it_or_run_it_as_it_is_written():
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
    assert trace.has_compiled == ("compiled code ran" in str(trace)) == CompiledCode.is_noticed
    assert "r\n  keeps 128 B, of which 128 B inputs" in str(remat.explain(compiled)(x))
    assert sum(row.op == "aten.addmm.default" for row in remat.list_names(compiled)(x)) == 3


def explain(function, x):
    assert len(remat.explain(function)(x).regions) == 1


def run_in_a_budget(function, x):
    with remat.dtr.budget("64 MiB"):
        function(x).sum().backward()


@pytest.mark.parametrize("tool", [explain, run_in_a_budget])
def test_what_runs_as_it_is_written_under_a_tool_still_compiles_afterwards(tool):
    def compiled(model):
        return torch.compile(model, backend="aot_eager", fullgraph=True)

    first, second, x = nn.Sequential(mlp()), nn.Sequential(mlp()), leaf(4, 8)
    for model in (first, second):
        remat.checkpoint_modules(model, "0")
    expected = train_step(second, x)
    for call in (compiled(first), lambda x: compiled(first)(x)):  # compiled before, and inside
        tool(call, x)
        assert_same(expected, train_step(compiled(second), x))
        checkpointed(compiled(first[0]))(x).sum().backward()
        torch._dynamo.reset()


def test_report_on_the_current_region_in_compiled_code_is_an_error_that_says_so():
    def block(x):
        h = x.sin()
        remat.print_current_memory_report()
        return h.exp()

    with pytest.raises(remat.UsageError, match=r"outside of any region.*\n.*torch\.compile"):
        torch.compile(lambda x: remat.checkpoint()(block)(x), backend="aot_eager")(leaf(4))


def test_policy_that_the_compiler_cannot_use_is_an_error_of_ours():
    def compiled(policy, fullgraph=False):
        region = remat.checkpoint(policy=policy)(torch.sin)
        return torch.compile(lambda x: region(x), backend="aot_eager", fullgraph=fullgraph)

    for fullgraph in (False, True):
        with pytest.raises(remat.PolicyError, match=r"(?s)policy by name .* no names.*Use a list of ops"):
            compiled(remat.save_names("*") | MATMULS, fullgraph)(leaf(4))
    if not OLDEST:  # whose tracer leaves its dispatch mode on the stack
        with pytest.raises(remat.RematError, match="the policy returned 'save'"):
            compiled(lambda *_, **__: "save")(leaf(4))


AROUND_COMPILED = {
    "plain": ({}, lambda f, x: f(x)),
    "policy": ({"policy": READY}, lambda f, x: f(x)),
    "policy for all ops": ({"policy": lambda *_, **__: True}, lambda f, x: f(x)),
    "policy by name": ({"policy": remat.save_names("sin*")}, lambda f, x: f(x)),
    "debug": ({"debug": True}, lambda f, x: f(x)),
    "bitwise": ({"determinism_check": "bitwise"}, lambda f, x: f(x)),
    "native region": ({}, lambda f, x: remat.native_save_region("f", f, x)),
    "op": ({}, lambda f, x: remat.op(f, "f")(x)),
    "op, recomputed": ({}, lambda f, x: remat.op(f, "f", policy=RECOMPUTE)(x)),
    "op under a policy": ({"policy": [EXP]}, lambda f, x: remat.op(f, "f")(x)),
}


@pytest.mark.skipif(not CompiledCode.is_noticed, reason="before torch 2.13 it runs as it is written")
@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # of torch, where hooks follow the modules
@pytest.mark.parametrize(
    ("around", "backend"),
    [*((around, "aot_eager") for around in AROUND_COMPILED), ("plain", "inductor"), ("op under a policy", "inductor")],
)
def test_compiled_code_in_a_region_runs_compiled(around, backend):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 8))
    compiled, x, runs = torch.compile(model, backend=backend), leaf(4, 8), CompiledCode()

    def step(function):
        model.zero_grad()
        x.grad = None
        torch.manual_seed(3)
        with runs:
            y = function(x)
        y.sum().backward()
        return [y, x.grad.clone(), *map(torch.clone, parameter_gradients(model)), torch.get_rng_state()]

    options, call = AROUND_COMPILED[around]
    region = remat.checkpoint(**options)(lambda x: call(compiled, x.sin()).exp())
    actual = [step(region), step(region)]  # cold and warm
    assert runs.ran
    assert_same([step(lambda x: compiled(x.sin()).exp())] * 2, actual)


def test_saved_call_of_compiled_code_runs_once():
    runs = []

    def backend(graph, example_inputs):
        return lambda *args: runs.append(1) or graph.forward(*args)

    calls = [AROUND_COMPILED[form][1] for form in ("native region", "op")]
    calls.append(lambda f, x: remat.op(lambda x: f(x).tanh(), "f")(x))
    compiled, x = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU()), backend=backend), leaf(4, 8)
    for number, call in enumerate(calls, 1):
        remat.checkpoint()(lambda x, call=call: call(compiled, x).sin())(x).sum().backward()
        assert len(runs) == number


@pytest.mark.skipif(not CompiledCode.is_noticed, reason="before torch 2.13 it runs as it is written")
@pytest.mark.parametrize("options", [{}, {"policy": READY}], ids=["plain", "policy"])
def test_compiler_leaves_the_library_alone(options):
    def block(x):
        for _ in range(2):  # the compiler gives up on what breaks the graph in a loop, and looks at all that is called
            x = (x @ x).sin().t()
            torch._dynamo.graph_break()
        return x @ x

    backend = CompileCounterWithBackend("eager")
    compiled, x = torch.compile(block, backend=backend), leaf(4, 4)
    for _ in range(2):
        y = remat.checkpoint(**options)(lambda x: compiled(x.sin()).exp())(x)
        actual = torch.autograd.grad(y.sum(), x)
    assert_same(actual, torch.autograd.grad(block(x.sin()).exp().sum(), x))
    assert not backend.graphs


@pytest.mark.parametrize("keep", [remat.op, lambda f, name: functools.partial(remat.native_save_region, name, f)])
def test_compiled_code_that_changes_its_argument_is_recomputed(keep):
    changes = lambda x: x.mul_(2).sin()  # noqa: E731
    compiled, x = torch.compile(changes, backend="aot_eager"), leaf(4)
    y = remat.checkpoint()(lambda x: keep(compiled, "op")(x.cos() * 3).sin().exp())(x)
    with pytest.warns(remat.RematWarning, match="replay recomputes this call"):
        (found,) = torch.autograd.grad(y.sum(), x)
    assert_same(torch.autograd.grad(changes(x.cos() * 3).sin().exp().sum(), x)[0], found)


EAGER = {
    "memory_report": lambda x: remat.memory_report(x),
    "list_names": lambda x: remat.list_names(torch.sin)(x),
    "explain": lambda x: remat.explain(torch.sin)(x),
    "trace": lambda x: remat.trace().__enter__(),
    "budget": lambda x: remat.budget("1 GiB").__enter__(),
}


@pytest.mark.parametrize("name", EAGER)
def test_what_is_for_eager_code_says_so_in_compiled_code(name):
    use = EAGER[name]
    with pytest.raises(Exception, match=f"remat.{name} is for eager code"):
        torch.compile(lambda x: (use(x.sin()), x.cos())[1], backend="aot_eager", fullgraph=True)(leaf(3))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_compiled_autograd_leaves_the_replay_alone(way, backend):
    def program(way, backward):
        torch.manual_seed(0)
        linear, x = nn.Linear(8, 8), leaf(4, 8)
        inner = way.region(lambda x: nn.functional.dropout(x.sin()))
        layer = lambda x, weight, bias: nn.functional.linear(x, weight, bias).tanh()  # noqa: E731
        y = way.region(lambda x: inner(way.keep("kept", layer, x, *linear.parameters())))(x * 2)
        backward(y.sum())
        return [x.grad, *parameter_gradients(linear)]

    expected = program(PLAIN_AUTOGRAD, lambda y: y.backward())
    with torch._dynamo.config.patch(compiled_autograd=True):
        actual = program(way, torch.compile(lambda y: y.backward(), backend=backend))
    assert not remat.is_recomputing()
    assert_same(expected, actual)


@pytest.mark.skipif(not hasattr(torch.autograd.graph, "region_activation_memory_budget"), reason="older torch lacks it")
@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("options", [{}, {"policy": remat.policies.save_matmuls}], ids=["recomputed", "policy"])
def test_the_compilers_own_budget_works_around_regions(options, budget):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)))
    x = leaf(4, 8)
    expected = train_step(model, x)
    remat.checkpoint_modules(model, "?", **options)

    def run(model, x):
        with torch.autograd.graph.region_activation_memory_budget(budget):
            return model(x)

    assert_same(expected, train_step(model, x, torch.compile(run, backend="aot_eager", fullgraph=True)))
