"""Policies by function: each program of the matrix equals plain autograd, and what must be kept is kept."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.function_programs import PROGRAMS, Quiet, gradients
from tests.helpers import LiveStorages, assert_same, leaf
from tests.native_programs import full, on_cpu
from tests.offloaders import Counting
from torch_remat._compat import casts_the_last_first
from torch_remat.errors import PolicyError
from torch_remat.policies.by_function import FunctionsPolicy
from torch_remat.policies.decision import Decision
from torch_remat.policies.policy import OpPolicy

WAYS = {
    "alone": lambda function, **options: remat.checkpoint(**options)(function),
    "to the end": lambda function, **options: remat.checkpoint(early_stop=False, **options)(function),
    "values compared": lambda function, **options: remat.checkpoint(determinism_check="bitwise", **options)(function),
    "in a region": lambda function, **options: remat.checkpoint()(
        lambda *given: remat.checkpoint(**options)(function)(*given) * 1.0
    ),
    "autocast and a policy by op around": lambda function, **options: torch.autocast("cpu", torch.bfloat16)(
        remat.checkpoint(policy=[torch.ops.aten.sin.default, torch.ops.aten.exp.default], early_stop=False)(
            lambda *given: remat.checkpoint(**options)(function)(*given) * 1.0
        )
    ),
    "in torch's checkpoint": lambda function, **options: full(remat.checkpoint(**options)(function)),
    "beside ops": lambda function, policy: remat.checkpoint(
        policy=[*policy, torch.ops.aten.sin.default, torch.ops.aten.tanh]
    )(function),
    "autocast": lambda function, **options: torch.autocast("cpu", torch.bfloat16)(
        remat.checkpoint(**options)(function)
    ),
    "offloaded hooks": lambda function, **options: on_cpu(remat.checkpoint(**options)(function)),
}


OTHERWISE = {
    ("beside_a_batch_norm", "in torch's checkpoint"),  # which updates statistics twice, and replays from the later ones
    ("called_more_often_in_replay", "in a region"),  # a MismatchError: the outer replay runs another inner forward
}


NAMED = [name for name, (_, functions) in PROGRAMS.items() if functions]


@pytest.mark.parametrize(("name", "way"), [one for one in itertools.product(NAMED, WAYS) if one not in OTHERWISE])
def test_program_equals_plain_autograd(name, way):
    function, policy = PROGRAMS[name]
    plain = torch.autocast("cpu", torch.bfloat16)(function) if "autocast" in way else function
    expected = gradients(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error", remat.RematWarning)
        warnings.filterwarnings("ignore", "(?s).*(did not run|selected nothing|recomputes this call|transform of)")
        warnings.filterwarnings("ignore", "(?s).*starts over")  # of the region around
        loud = "op" in way.split() or "ops" in way.split()  # where calls may be refused, or placeholders met
        with contextlib.suppress(*([remat.RematError] if loud else [])):
            actual = gradients(WAYS[way](function, policy=policy))
            assert_same(expected, actual)


class Tagged(torch.Tensor):
    """A subclass that does nothing."""


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("reader", [lambda m, b: m.gather(1, b.argsort(1)), lambda m, b: m.sin() * b])
def test_kept_result_of_a_subclass_is_known_in_each_replay(early_stop, reader):
    def gradients(wrap):
        torch.manual_seed(0)
        leaves = [leaf(4, 4).detach().as_subclass(Tagged).requires_grad_() for _ in range(2)]
        y = wrap(lambda a, b: reader(torch.mm(a.sin(), b), b))(*leaves)
        return [y, *[one for _ in range(2) for one in torch.autograd.grad(y.sum(), leaves, retain_graph=True)]]

    expected = gradients(lambda function: function)
    assert_same(expected, gradients(remat.checkpoint(policy=[torch.mm], early_stop=early_stop)))


# --- What is kept.


def chain(x, w):
    for _ in range(3):
        x = (x @ w).sin().exp()
    return x


def kept_bytes(policy, function=chain):
    x, w = leaf(16, 16), leaf(16, 16)
    with LiveStorages() as live:
        y = remat.checkpoint(policy=policy)(function)(x, w)
        kept = live.bytes() - y.untyped_storage().nbytes()
        y.sum().backward()
        assert live.bytes() - y.untyped_storage().nbytes() - sum(one.grad.nbytes for one in (x, w)) == 0
    return kept // 1024


def test_bytes_are_those_of_the_results_that_are_needed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat.RematWarning)
        assert kept_bytes([torch.logsumexp]) == 0
    assert kept_bytes([torch.matmul]) == 3
    assert kept_bytes([torch.matmul, torch.exp]) == 3 + 2  # the last is the region's output
    assert kept_bytes([torch.ops.aten.mm.default]) == 3


def ran_in_replay(policy, function=chain):
    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if remat.is_recomputing():
                ran.append(op.overloadpacket.__name__)
            return op(*args, **(kwargs or {}))

    ran = []
    x, w = leaf(4, 4), leaf(4, 4)
    y = remat.checkpoint(policy=policy)(function)(x, w)
    with Count():
        y.sum().backward()
    return ran


def test_a_chosen_function_does_not_run_in_replay_in_any_of_its_forms():
    def forms(x, w):
        return (torch.matmul(x, w).exp() @ w).exp().matmul(w).exp()

    assert "mm" not in ran_in_replay([torch.matmul], forms)
    assert "mm" not in ran_in_replay([torch.Tensor.matmul], forms)
    assert "sin" not in ran_in_replay([torch.sin, torch.matmul])
    assert "mm" in ran_in_replay([torch.sin])


@pytest.mark.parametrize("product", [torch.matmul, F.linear, torch.mm])
def test_a_chosen_function_does_not_run_in_replay_under_autocast(product):
    function = torch.autocast("cpu", torch.bfloat16)(lambda x, w: product(product(x.sin(), w).exp(), w).tanh())
    assert "mm" in ran_in_replay([torch.sin], function)
    assert "mm" not in ran_in_replay([product], function)


class Scaled(torch.autograd.Function):
    """Is saved, so that its output is a placeholder in replay."""

    @staticmethod
    def forward(ctx, x):
        handle = remat.get_handle(ctx, "scaled", remat.CheckpointPolicy.SAVE)
        if (made := handle.maybe_load_saved()) is not None:
            return made
        return handle.record_outputs(x * 2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def grown(x):
    return x.exp()  # of which an inner region takes a sample


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("before", [Scaled.apply, remat.checkpoint()(grown), remat.op(grown, "grown")])
def test_what_the_runtime_looks_at_is_no_access_of_the_regions(monkeypatch, before, samples):
    monkeypatch.setattr("torch_remat.dispatch.region.forward.takes_samples", lambda serial: samples)

    def function(x, w):
        return (before(x.sin()) @ w).sin().exp()

    assert "mm" not in ran_in_replay([torch.matmul], function)


@pytest.mark.parametrize("wrap", [remat.checkpoint(), lambda function: remat.op(function, "inner")])
def test_functions_in_what_is_inside_get_subclasses_in_both_phases(wrap):
    kinds = []

    def inner(x):
        kinds.append(type(x))
        return x.sin().exp()

    wrapped = wrap(inner)
    x = leaf(4).as_subclass(Tagged)
    remat.checkpoint(policy=[torch.cos])(lambda x: wrapped(x * 2).cos())(x).sum().backward()
    assert set(kinds) == {Tagged}


@pytest.mark.parametrize("product", [torch.matmul, F.linear])
def test_casts_of_one_tensor_add_up_as_under_autocast(product):
    function = torch.autocast("cpu", torch.bfloat16)(lambda x, w: product(s := x.sin(), s) * w + s.exp())
    x, w = leaf(8, 8), leaf(8, 8)
    expected = torch.autograd.grad(function(x, w).sum(), (x, w))
    y = remat.checkpoint(policy=[product])(function)(x, w)
    assert_same(expected, torch.autograd.grad(y.sum(), (x, w)))


def test_to_find_out_the_order_of_casts_leaves_the_casts_that_autocast_keeps():
    x, w = leaf(4, 4), leaf(4, 4)
    casts_the_last_first.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        before = torch.mm(x, w).grad_fn.next_functions
        casts_the_last_first()
        assert torch.mm(x, w).grad_fn.next_functions == before


def test_a_chosen_function_casts_what_a_handle_made_itself():
    function = torch.autocast("cpu", torch.bfloat16)(lambda x, w: (Scaled.apply(x.sin()) @ w).exp())
    assert "mm" not in ran_in_replay([torch.matmul], function)


def test_a_chosen_function_that_saves_nothing_does_not_run_in_replay_under_hooks():
    def function(x, w):
        return torch.add(Scaled.apply(x.sin()), w).sin() * torch.add(x, w).sin()

    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copy: copy):
        assert "add" not in ran_in_replay([torch.add], function)


def test_what_hooks_around_do_with_what_a_checkpoint_of_torch_saves_is_no_access_of_the_regions():
    def copied(tensor):
        return torch.empty(0).set_(tensor.untyped_storage().clone(), 0, tensor.shape, tensor.stride())

    def inner(x, w, product):
        h = product(x, w)
        h = torch_checkpoint(lambda h, _: h, h, h, use_reentrant=False)
        return torch.matmul(h, h)

    x, w = leaf(4, 4) * 1, nn.Parameter(leaf(4, 4))
    region = remat.checkpoint(policy=[torch.matmul])(inner)
    outer = remat.checkpoint(policy=[torch.ops.aten.mm.default])(
        lambda x, w: region(x, w, remat.op(torch.mm, "product")).tanh()
    )
    with torch.autograd.graph.saved_tensors_hooks(copied, lambda copy: copy):
        y = outer(x, w)
    assert_same(torch.autograd.grad(inner(x, w, torch.mm).tanh().sum(), x), torch.autograd.grad(y.sum(), x))


def test_functions_inside_of_functions_in_python_are_seen():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def function(x, w):
        return attention(x[None], x[None], x[None], need_weights=False)[0].exp() * w[:4, :1]

    x = leaf(4, 8)
    y = remat.checkpoint(policy=[F.linear, F.scaled_dot_product_attention])(function)(x, leaf(4, 4))
    names = [op.name for op in remat.memory_report(y).regions[0].ops]
    assert any("linear" in name for name in names)
    assert any("scaled_dot_product_attention" in name for name in names)


def test_names_tell_module_function_and_count():
    block = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.Tanh())
    y = remat.checkpoint(policy=[F.linear])(block)(leaf(4, 4))
    assert [op.name for op in remat.memory_report(y).regions[0].ops] == ["0.linear_0", "2.linear_0"]
    without = [F.linear, F.gelu]
    y = remat.checkpoint(policy=remat.policies.save_matmuls | without)(block)(leaf(4, 4))
    assert "1.gelu_0" in str(remat.memory_report(y))


def test_names_are_left_out():
    block = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.Tanh())
    policy = remat.policies.save_matmuls & ~remat.save_names("2.*")
    y = remat.checkpoint(policy=policy)(block)(leaf(4, 4))
    assert "0.addmm_0_0" in str(remat.memory_report(y))
    assert "2.addmm_0_0" not in str(remat.memory_report(y))


# --- Lists.


PICKLED = {
    "list": [F.linear, torch.matmul, torch.Tensor.exp, torch.ops.aten.sin],
    "functions": [torch.sin],
    "ready": remat.policies.save_attention,
    "combined": remat.policies.save_matmuls | [torch.sin],
}


@pytest.mark.filterwarnings("ignore::torch_remat.RematWarning")
@pytest.mark.parametrize("kind", PICKLED)
def test_a_region_is_pickled_and_copied_before_and_after_it_runs(kind):
    region = remat.checkpoint(policy=PICKLED[kind])(torch.sin)
    for _ in range(2):
        for same in (pickle.loads(pickle.dumps(region)), copy.deepcopy(region), region):
            x = leaf(4)
            same(x).sum().backward()
            assert torch.equal(x.grad, x.cos())
    if isinstance(policy := PICKLED[kind], OpPolicy):
        for same in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)):
            assert repr(same) == repr(policy)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (chain, "remat.op"),
        (Quiet.apply, "remat.op"),
        (nn.Linear, r"remat\.save_modules\(Linear\)"),
        (nn.Linear(2, 2), r"remat\.save_modules"),
        (F.batch_norm, "never kept"),
        (torch.Tensor.add_, "never kept"),
        (7, "neither an op nor a function"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_what_a_region_cannot_see_or_keep_is_refused_by_name(wrong, text):
    with pytest.raises(PolicyError, match=text):
        remat.checkpoint(policy=[F.linear, wrong])


@pytest.mark.parametrize("function", [F.max_pool2d, torch.max_pool2d, F.max_pool2d_with_indices, F.adaptive_max_pool2d])
def test_a_function_that_leaves_it_to_others_to_ask_for_overrides_is_kept(function):
    x, calls = leaf(1, 2, 8, 8), []

    def block(x):
        pooled = F.max_pool2d(x.exp(), 2, return_indices=function is F.max_pool2d_with_indices)
        if function is F.adaptive_max_pool2d:
            pooled = function(pooled, 2)
        return (pooled[0] if isinstance(pooled, tuple) else pooled).sin()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(str(func)) if remat.is_recomputing() else None
            return func(*args, **(kwargs or {}))

    y = remat.checkpoint(policy=[function])(block)(x)
    with Watch():
        found = torch.autograd.grad(y.sum(), x)
    assert_same(torch.autograd.grad(block(x).sum(), x), found)
    assert not any(function.__name__.removesuffix("_with_indices") in name for name in calls)


def test_a_function_that_does_not_run_is_told_once_with_near_ones():
    region = remat.checkpoint(policy=[torch.matmul, torch.logsumexp], region_name="block")(chain)
    match = r"block: the policy .*did not run: logsumexp\. Functions that ran: "
    with pytest.warns(remat.RematWarning, match=match) as told:
        _ = [region(leaf(4, 4), leaf(4, 4)).sum().backward() for _ in range(2)]
    assert len(told) == 1
    assert "checkpoint_modules(model, {pattern: {'policy': ...}}) gives each its own" in str(told[0].message)
    with pytest.warns(remat.RematWarning, match="selected nothing"):
        y = remat.checkpoint(policy=[torch.logsumexp])(chain)(leaf(4, 4), leaf(4, 4))
    assert "selected nothing" in str(remat.memory_report(y))


@pytest.mark.parametrize("policy", [lambda: [F.grouped_mm], lambda: remat.policies.save_matmuls])
def test_grouped_products_are_kept_by_the_name_that_users_call(policy):
    ran = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(func) if remat.is_recomputing() else None
            return func(*args, **(kwargs or {}))

    def gradient(wrap):
        torch.manual_seed(0)
        x, w = (torch.randn(*shape).bfloat16().requires_grad_() for shape in ((16, 16), (2, 16, 16)))
        offsets = torch.tensor([8, 16], dtype=torch.int32)
        y = wrap(lambda x: F.grouped_mm(x.sin(), w, offs=offsets).sin().cos())(x)
        with Watch():
            return torch.autograd.grad(y.sum(), (x, w))

    expected = gradient(lambda function: function)
    assert_same(expected, gradient(remat.checkpoint()))
    assert torch.ops.aten._grouped_mm.default in ran
    ran.clear()
    assert_same(expected, gradient(remat.checkpoint(policy=policy())))
    assert ran
    assert torch.ops.aten._grouped_mm.default not in ran


@pytest.mark.filterwarnings("ignore:.*did not run:torch_remat.RematWarning")
@pytest.mark.parametrize("lazy", [nn.LazyLinear, nn.LazyConv1d, nn.LazyBatchNorm1d])
def test_a_lazy_module_makes_its_parameters_in_a_region_with_a_policy(lazy):
    def gradients(wrap):
        torch.manual_seed(0)
        module, x = lazy(*((3,) if lazy is nn.LazyLinear else (3, 2) if lazy is nn.LazyConv1d else ())), leaf(2, 4, 8)
        y = wrap(lambda x: module(x.sin()).sin())(x)
        y.sum().backward()
        return y, x.grad, *[parameter.grad for parameter in module.parameters()], *module.buffers()

    found = gradients(remat.checkpoint(policy=[F.linear, F.conv1d, torch.sin]))
    assert_same(gradients(lambda function: function), found)


def test_functions_of_other_libraries_take_part():
    def doubled(x):
        if torch.overrides.has_torch_function((x,)):
            return torch.overrides.handle_torch_function(doubled, (x,), x)
        runs.append(1)
        return (x * 2).exp()

    runs = []
    x = leaf(4)
    expected = torch.autograd.grad(doubled(x).sin().exp().sum(), x)
    runs.clear()
    y = remat.checkpoint(policy=[doubled])(lambda x: doubled(x).sin().exp())(x)
    assert_same(expected, torch.autograd.grad(y.sum(), x))
    assert runs == [1]


def test_a_region_that_is_compiled_keeps_the_ops_of_its_functions():
    region = remat.checkpoint(policy=[torch.matmul, torch.sin])(chain)
    x, w = leaf(4, 4), leaf(4, 4)
    expected = torch.autograd.grad(chain(x, w).sum(), [x, w])
    y = torch.compile(region, backend="aot_eager", fullgraph=True)(x, w)
    assert_same(expected, torch.autograd.grad(y.sum(), [x, w]))


def test_what_is_offloaded_comes_back():
    policy = FunctionsPolicy([torch.matmul], Decision.MUST_OFFLOAD)
    x, w = leaf(16, 16), leaf(16, 16)
    expected = torch.autograd.grad(chain(x, w).sum(), [x, w])
    y = remat.checkpoint(policy=policy, offloader=Counting())(chain)(x, w)
    assert remat.memory_report(y).offloaded_bytes > 0
    assert_same(expected, torch.autograd.grad(y.sum(), [x, w]))


def test_listed_function_that_modifies_its_argument_runs_again_without_a_warning():
    def program(region):
        x = leaf(4, 4)
        y = region(lambda x: F.relu(x.sin(), inplace=True).exp())(x)
        y.sum().backward()
        return y, x.grad

    torch.manual_seed(0)
    expected = program(lambda function: function)
    torch.manual_seed(0)
    assert_same(expected, program(remat.checkpoint(policy=[F.relu])))
