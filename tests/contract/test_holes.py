"""Programs that would be wrong if one check of a kept or skipped call were missing: in turn with all acts."""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

import torch_remat as remat
from tests.contract.test_by_price import Chance, Rungs
from tests.helpers import assert_same
from torch_remat.ladders import kinds, ladder
from torch_remat.policies.by_price import MemoryBudget

PROGRAMS = {}
OTHERS = torch.linspace(0.3, -1.4, 16, dtype=torch.float64).view(4, 4)
NORM = nn.BatchNorm1d(4).double()
TABLE = nn.Embedding(4, 4, max_norm=0.5).double()
MEMORY = nn.LSTM(4, 4, 2, dropout=0.3).double()
FLOAT = nn.Linear(4, 4)
MODULES = nn.ModuleList([NORM, TABLE, MEMORY, FLOAT])


def program(function):
    PROGRAMS[function.__name__] = function
    return function


class Calls:
    """State of a program: how often it ran in a step, and what it remembers."""

    count, cache = 0, None


# --- What reads results without an op, whose error user code may swallow.


@program
def an_error_is_swallowed_numpy(x, w):
    a, k = x * 2, 3.0
    with contextlib.suppress(Exception):
        k = float(a.detach().numpy().sum() > -1e9) * 2
    return (x @ w) + (x * k).exp()


@program
def an_error_is_swallowed_list(x, w):
    a, k = x * 2, 3.0
    with contextlib.suppress(Exception):
        k = float(sum(a.detach().tolist()[0]) > -1e9) * 2
    return (x @ w) + (x * k).exp()


@program
def an_error_is_swallowed_number(x, w):
    a, k = x * 2, 3.0
    with contextlib.suppress(Exception):
        k = 2.0 if float(a.detach().sum()) > -1e9 else 1.0
    return (x @ w) + (x * k).exp()


@program
def an_error_of_linalg_is_swallowed(x, w):
    a, k = x * 2, 2.0
    with contextlib.suppress(RuntimeError):
        torch.linalg.cholesky(a.detach() - 10 * torch.eye(4, dtype=x.dtype))
        k = 1.0
    return (a * k).exp()


@program
def the_address_is_read(x, w):
    a = x * 2
    return (x @ w) + (x * (2.0 if a.data_ptr() else 3.0)).exp()


@program
def the_type_is_read(x, w):
    a = x * 2
    return (x @ w) + (x * (2.0 if isinstance(a, Tensor) and a.is_floating_point() else 3.0)).exp()


@program
def the_history_is_read(x, w):
    a = x @ w
    return a + (x * (2.0 if a.requires_grad else 3.0)).exp()


@program
def the_identity_is_read(x, w):
    a = x * 2
    seen = {id(a): 1.0}
    return (a * seen.get(id(a), 3.0)).exp()


@program
def a_comparison_with_a_number(x, w):
    a = (x * 2).detach()
    return torch.where((a != 1) & (a == a) & (a >= -9) & a.__le__(9), x, x * 3).exp()


# --- What is written, and when.


@program
def a_storage_is_shared(x, w):
    a = (x @ w).detach()
    torch.empty(0, dtype=x.dtype).set_(a.untyped_storage()).mul_(2.0)
    return (x * a).exp()


@program
def a_detached_result_is_written(x, w):
    a = x * 2
    d = a.detach()
    a.data.mul_(0.5)
    return (d * x).exp()


@program
def a_dropout_is_written(x, w):
    a = F.dropout(x @ w, 0.4)
    a += x
    return F.relu(a, inplace=True) * (x * 2).tanh()


@program
def a_mask_requires_a_gradient(x, w):
    with torch.no_grad():
        mask = x @ w
    return (mask.requires_grad_() * x).exp()


@program
def a_result_is_assigned_to(x, w):
    a = torch.zeros_like(x)
    a[1:3] = (x @ w)[1:3].sin()
    a[:, 0] = x[0].exp()
    return a * a.tanh()


@program
def statistics_are_read_after_the_norm(x, w):
    y = NORM(x * 1.0)
    return (y * NORM.running_mean).exp() + y.sin()


@program
def a_table_renorms_its_rows(x, w):
    return TABLE(torch.tensor([0, 1, 2, 3])) * x + (x * 2).exp()


def _of_others(x, held):
    if has_torch_function((x, held)):
        return handle_torch_function(_of_others, (x, held), x, held)
    with torch.no_grad():
        held.mul_(2.0)
    return x.sin()


@program
def a_function_of_others_writes_an_argument(x, w):
    held = x.detach() * 1.0
    y = _of_others(x * 1.0, held)
    return (x * held).exp() + y * held


@program
def a_later_call_takes_the_place_of_another(x, w):
    Calls.count += 1
    if Calls.count % 2 == 0:
        _ = x.detach() @ OTHERS
    a = x.detach() @ w.detach()
    return (a * x).exp() * a.sin()


# --- What is drawn, where it is called.


@program
def a_draw_is_skipped_before_another(x, w):
    a = F.dropout(x * 1.0, 0.5)
    return a * 2 + (x + torch.randn(4, 4, dtype=x.dtype)).exp() + F.dropout(x.sin(), 0.1)


@program
def noise_of_like(x, w):
    a = torch.rand_like(x) * x
    return (a + torch.bernoulli(torch.full_like(x, 0.3))).exp() * torch.randperm(4)


@program
def in_another_thread(x, w):
    out, a = [], x * 2

    def work():
        with contextlib.suppress(remat.PlaceholderError), torch.enable_grad():
            out.append((a.sin() * a).exp())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return out[0] + (x @ w).sin() * a


class Keeps(torch.autograd.Function):
    """Runs functions in its forward, and saves what they make."""

    @staticmethod
    def forward(ctx, x):
        y = x.sin()
        ctx.save_for_backward(y, y * 2)
        return y * 2 + 0.0

    @staticmethod
    def backward(ctx, grad):
        y, z = ctx.saved_tensors
        return grad * y * z


@program
def in_a_custom_function(x, w):
    return Keeps.apply(x + 1) * (x.sin() * 2).exp()


@program
def in_a_memory(x, w):
    return MEMORY(x[None])[0][0] @ w


@program
def in_autocast(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        h = x.float()
        a = FLOAT(h)
        return (a.double().sin() + (FLOAT(a) * 2).double().exp()) * FLOAT(h.sin()).double()


@program
def with_hooks_on_results(x, w):
    a = x * 2
    a.register_hook(lambda grad: grad * 3)
    a.retain_grad()
    return a.sin() + (a * 2).exp()


@program
def under_hooks_of_users(x, w):
    with torch.autograd.graph.save_on_cpu():
        a = (x @ w).sin()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        b = (a * x).exp()
    return b * a.tanh()


@program
def lists_and_views(x, w):
    a, b = torch.stack([x, x * 2]).unbind()
    c, d = torch.chunk(a.sin() @ w, 2)
    values, places = torch.topk(b.exp(), 2)
    return torch.cat([c, d]) * b + (values * places).sum() + torch.linalg.slogdet(a @ a + 9).logabsdet


# --- What is otherwise in replay.


@program
def a_cache_is_filled_in_forward(x, w):
    if Calls.cache is None:
        Calls.cache = x.detach() @ OTHERS
    a = x @ w
    return a.sin() + (a @ w).exp() + Calls.cache * x


@program
def a_cache_takes_the_place_of_another_call(x, w):
    if Calls.cache is None:
        Calls.cache = x.detach() @ OTHERS
    a = x.detach() @ w.detach()
    return (a * x).exp() + Calls.cache * x


@program
def a_constant_takes_the_place_of_another(x, w):
    if Calls.cache is None:
        Calls.cache = torch.full((4, 4), 2.0, dtype=x.dtype)
    return (x * torch.full((4, 4), 3.0, dtype=x.dtype)).exp() + Calls.cache * x


@program
def a_factor_takes_the_place_of_another(x, w):
    if Calls.cache is None:
        Calls.cache = x.detach() * 2
    return x * (x.detach() * 3) + Calls.cache.exp() * x


@program
def replay_calls_one_more(x, w):
    Calls.count += 1
    a = x @ w
    if Calls.count % 2 == 0:
        _ = x.detach() @ OTHERS
    b = x @ w.t()
    return a.sin() + b.exp() + (x * b).tanh()


def gradients(function):
    """Return what two backwards of a program give, and how it leaves buffers and generators."""
    torch.manual_seed(5)
    with torch.no_grad():
        NORM.reset_running_stats()
        TABLE.weight.copy_(OTHERS)
    Calls.count, Calls.cache = 0, None
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4).requires_grad_()
    w = torch.linspace(1, -2, 16, dtype=torch.float64).view(4, 4).t().contiguous().requires_grad_()
    y = function(x * 1.0, w)
    results, leaves = [y.detach().clone()], [x, w, *MODULES.parameters()]
    for keep in (True, False):
        found = torch.autograd.grad(y.double().cos().sum(), leaves, allow_unused=True, retain_graph=keep)
        results += [torch.zeros(()) if one is None else one for one in found]
    return [*results, *MODULES.buffers(), torch.get_rng_state()]


def outcome(function):
    """Return what `gradients` does, or which error it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return gradients(function)
        except Exception as error:
            return type(error)


def assert_equal(expected, actual, what):
    if isinstance(expected, type) or isinstance(actual, type):
        assert expected is actual, f"{what}: {actual}"
    else:
        assert_same(expected, actual, what)


@pytest.fixture(autouse=True)
def _ladders_of_small_ops(monkeypatch):
    monkeypatch.setattr(kinds, "_RESTARTS", 10**9)
    monkeypatch.setattr(kinds, "_SAMPLES", 1)
    for cost in ("_ACT_NS", "_SEEN_NS", "_REGION_NS"):
        monkeypatch.setattr(ladder, cost, 0)
    kinds.forget_kinds()
    yield
    kinds.forget_kinds()


class Every(MemoryBudget):
    """Does the same with each call but one."""

    def __init__(self, places, spared):
        super().__init__(0.5)
        self._places, self._spared = places, spared

    def choose(self, ladder):
        acts = {}
        for at, step in enumerate(ladder.record.steps):
            if step.results is not None and at != self._spared:
                acts.setdefault(step.function, {})[step.number] = self._places
        return replace(ladder.rungs[0], acts=acts)


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_is_equal_with_each_kind_of_acts(name):
    function = PROGRAMS[name]
    plain = outcome(remat.checkpoint()(function))
    expected = outcome(function)
    if not isinstance(plain, type):
        assert_same(expected, plain)
    policies = [Every(places, spared) for places, spared in itertools.product([(0,), ()], range(-1, 4))]
    policies += [Chance(seed) for seed in range(6)] + [Rungs()] * 4
    for at, policy in enumerate(policies):
        run = remat.checkpoint(policy=policy, early_stop=at % 3 > 0)(function)
        outcome(run)
        assert_equal(plain, outcome(run), f"policy {at}")


def test_a_comparison_may_be_listed_and_kept():
    """Python's own method of that name stands among torch's ops, too."""
    run = remat.checkpoint(policy=[Tensor.__eq__])(lambda x: torch.where(x == x, x.sin(), x).exp())
    x = torch.ones(4, requires_grad=True)
    run(x).sum().backward()
    assert torch.equal(x.grad, x.sin().exp() * x.cos())


def test_a_function_in_python_is_found_again_when_replay_starts_over():
    """Calls are counted anew then, and those that run as `remat.op` have the numbers of forward."""

    def function(x):
        a = x * 2
        b = F.softplus(F.normalize((x + 1).sin()))
        return (F.normalize(b) * a.detach().numpy().max()).exp().sin()

    expected = torch.autograd.grad(function(x := torch.ones(4, 4, requires_grad=True)).sum(), x)
    for seed in range(4):
        kinds.forget_kinds()
        run = remat.checkpoint(policy=Chance(seed) | [F.normalize])(function)
        for _ in range(2):
            assert_same(expected, torch.autograd.grad(run(x).sum(), x))
