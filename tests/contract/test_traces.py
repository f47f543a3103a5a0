"""What torch traces inside a region, by tensors without memory, is no part of the region."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torch_remat as remat
from tests.helpers import assert_same, checkpointed, leaf
from tests.ways import BY_NATIVE_REGION, BY_OP, PLAIN_AUTOGRAD, RECOMPUTED, Way, everything

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning:torch", "ignore::FutureWarning"
)

SAVE_MM = Way("a product saved", RECOMPUTED.keep, {"policy": [torch.ops.aten.mm]})
SAVE_ALL = Way("all saved", RECOMPUTED.keep, {"policy": everything})
BITWISE = Way("bitwise", RECOMPUTED.keep, {"determinism_check": "bitwise"})
DEBUG = Way("debug", RECOMPUTED.keep, {"debug": True})
NESTED = Way("nested", lambda _, function, *args: checkpointed(function)(*args))
WAYS = [RECOMPUTED, NESTED, BY_OP, BY_NATIVE_REGION, SAVE_MM, SAVE_ALL, BITWISE, DEBUG]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(way, function, *, traced_again=2):
    x, weight = leaf(4, 4), leaf(4, 4)
    results = []
    for _ in range(traced_again):
        y = way.region(lambda x: way.keep("traces", function, x.exp(), weight).sin())(x)
        results += torch.autograd.grad(y.sum(), [x, weight], allow_unused=True)
    return [result for result in results if result is not None]


def assert_same_gradients(way, function):
    torch.manual_seed(1)
    expected = gradients(PLAIN_AUTOGRAD, function)
    torch.manual_seed(1)
    assert_same(expected, gradients(way, function))


def in_make_fx(mode):
    sample = torch.ones(4, 4, requires_grad=True)

    def function(x, weight):
        def traced(x, weight):
            y = (x.sin() @ weight).exp() * torch.ones(4) + torch.tensor(1.5)
            return torch.autograd.grad(y.sum(), x)[0] * torch.full((4,), 2.0)

        graph = make_fx(traced, tracing_mode=mode)(sample, weight)
        return graph(x.detach().requires_grad_(), weight.detach()).detach() * (x @ weight)

    return function


def traced_without_gradient(x, weight):
    traced = lambda x, weight: ((x.sin() @ weight).exp() * torch.ones(4) + torch.tensor(1.5)).sin()  # noqa: E731
    return make_fx(traced, tracing_mode="fake")(x, weight)(x, weight)


def in_fake_mode(x, weight):
    with FakeTensorMode():
        a = torch.empty(x.shape, requires_grad=True)
        ((a.sin() @ a.exp()) * torch.full((4,), 1.0) + torch.tensor(2.0)).sum().backward()
    return (x @ weight) * a.grad.shape[0]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("function", [*map(in_make_fx, ["fake", "symbolic"]), traced_without_gradient, in_fake_mode])
def test_trace_inside_a_region_is_no_part_of_it(function, way):
    assert_same_gradients(way, function)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_gradient_of_real_tensors_that_make_fx_traces_is_refused(way):
    """It would take what backward reads for constants; torch's checkpoint has an error of its own."""
    with pytest.raises(remat.UsageError, match="make_fx traces a gradient"):
        gradients(way, in_make_fx("real"))


def cond(x, weight):
    return torch.cond(x.sum() > 0, lambda x: x.sin() @ weight, lambda x: x.cos(), (x,))


def mapped(x, weight):
    return map_rows(lambda row, factor: (row.sin() * factor).exp(), x, weight[0].sin())


def scanned(x, weight):
    return scan(lambda carry, row: ((carry * row).sin(), carry * row), x[0].exp(), x @ weight)[1]


def looped(x, weight):
    with torch.no_grad():
        _, y = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 1.1), (torch.tensor(0), x.detach()))
    return (x * y) @ weight


@pytest.mark.parametrize("way", [RECOMPUTED, NESTED, BY_OP], ids=str)
@pytest.mark.parametrize("function", [cond, mapped, scanned, looped])
def test_control_flow_that_torch_traces_is_equal(function, way):
    assert_same_gradients(way, function)


@pytest.mark.parametrize("options", [{}, SAVE_ALL.options, BITWISE.options], ids=["plain", "policy", "bitwise"])
@pytest.mark.parametrize("in_mode", [True, False])
def test_region_that_is_itself_part_of_a_trace_recomputes(options, in_mode):
    runs = []

    def block(x):
        runs.append(remat.is_recomputing())
        return x.sin().exp()

    mode = FakeTensorMode()
    x = mode.from_tensor(leaf(4))
    if in_mode:
        with mode:
            checkpointed(block, **options)(x).sum().backward()
    else:
        checkpointed(block, **options)(x).sum().backward()
    assert x.grad.shape == (4,)
    assert runs == [False, True]


class Layers(torch.nn.Module):
    """Two compiled layers, each wrapped as a region, whose graphs have constants."""

    def __init__(self, wrap):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(4)])
        self._regions = [wrap(self._pair(at)) for at in (0, 2)]

    def _pair(self, at):
        first, second = self.layers[at : at + 2]
        run = torch.compile(lambda x: second(torch.tanh(first(x)) * torch.tensor(2.0)).sin(), backend="aot_eager")
        return lambda x: run(x).exp()

    def forward(self, x):
        for region in self._regions:
            x = region(x)
        return x.sum()


@pytest.mark.parametrize("way", [RECOMPUTED, BY_OP, BY_NATIVE_REGION, SAVE_MM, SAVE_ALL, BITWISE], ids=str)
def test_compiled_code_that_data_parallel_training_splits_is_equal(monkeypatch, way):
    """DDP has each graph traced again in parts, with FakeTensors, where the region runs."""
    dist = torch.distributed
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 100)

    def gradients(way):
        torch._dynamo.reset()
        net = Layers(lambda pair: way.region(lambda x: way.keep("pair", pair, x)))
        model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.0003)
        for _ in range(2):
            model(torch.ones(4, 8)).backward()
        return [parameter.grad for parameter in net.parameters()]

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert_same(gradients(PLAIN_AUTOGRAD), gradients(way))
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*(torch.jit.trace|torch.jit.trace_method).*:DeprecationWarning")
@pytest.mark.parametrize(
    "policy", [None, [torch.nn.functional.linear], [torch.ops.aten.addmm.default], remat.save_modules("0")]
)
def test_model_with_regions_is_traced_by_torch_jit_as_one_without(policy):
    """The tracer compares two traces, down to the names that Python has for each tensor."""

    def model(wraps):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2)]
        whole = nn.Sequential(*blocks)
        if wraps:
            remat.checkpoint_modules(whole, ["0", "1"], **({} if policy is None else {"policy": policy}))
        return whole

    x = leaf(4, 8)
    traced, plain = torch.jit.trace(model(True), x), model(False)
    (found,), (expected,) = (torch.autograd.grad(run(x).sum(), x) for run in (traced, plain))
    assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:.*(torch.jit.trace|torch.jit.trace_method).*:DeprecationWarning")
@pytest.mark.parametrize("policy", [None, [torch.nn.functional.gelu], [torch.ops.aten.gelu.default]])
def test_region_with_a_module_of_torch_jit_is_exact_once_that_has_run_twice(policy):
    """A scripted module has fewer attributes than others; in its first calls, torch only watches what it does."""
    x = leaf(4, 8)
    module = torch.jit.trace(nn.Linear(8, 8), torch.randn(4, 8))
    for _ in range(2):
        module(x).sum().backward()

    def block(x):
        return nn.functional.gelu(module(x.sin()))

    found, expected = (
        torch.autograd.grad(run(x).sum(), [x, module.weight]) for run in (remat.checkpoint(policy=policy)(block), block)
    )
    assert_same(found, expected)
