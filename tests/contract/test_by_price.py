"""What is kept by price: programs equal plain autograd on each rung of their ladders, and with acts drawn by chance."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import random
import warnings
from dataclasses import replace
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_remat as remat
from tests.contract.test_functions import NAMED, WAYS
from tests.function_programs import PROGRAMS, gradients
from tests.helpers import CountOps, LiveStorages, assert_same, leaf
from tests.programs.priced import Chance
from torch_remat.dispatch.call.answerer import Answerer
from torch_remat.dispatch.call.functions import can_be_kept
from torch_remat.dispatch.call.lowering import lower
from torch_remat.dispatch.region import forward
from torch_remat.errors import PolicyError
from torch_remat.ladders import kinds, ladder
from torch_remat.policies.by_price import MemoryBudget

SEVERAL = ["alone", "to the end", "values compared", "autocast", "in a region", "in torch's checkpoint"]
STEPS = 5  # of which the first are recorded
# What autograd saves there, a call writes or makes that replay has to run: nothing or all is kept.
ALL_OR_NOTHING = {
    "written_through_data", "written_by_dlpack", "given_other_data",
    "returns_a_view", "returns_its_argument", "returns_lists_of_views", "may_return_its_argument", "sparse_argument",
    "with_a_gradient_taken_inside",
}  # fmt: skip
NEVER_ANSWERED = {
    "given_other_data", "returns_a_view", "returns_its_argument", "returns_lists_of_views", "sparse_argument"
}  # fmt: skip


class Rungs(MemoryBudget):
    """A policy that takes the rungs of a ladder in turn."""

    def __init__(self):
        super().__init__(0.5)
        self.number, self.seen, self.kept = -1, 0, 0

    def choose(self, ladder):
        rungs = [rung for rung in ladder.rungs if not rung.is_plain]
        self.number, self.seen = self.number + 1, len(rungs)
        rung = rungs[self.number % len(rungs)] if rungs else ladder.rungs[0]
        self.kept += sum(len(numbers) for numbers in rung.acts.values())
        return rung


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch):
    for cost in ("_ACT_NS", "_SEEN_NS", "_REGION_NS"):  # so that small calls are worth it, too
        monkeypatch.setattr(ladder, cost, 0)
    kinds.forget_kinds()
    yield
    kinds.forget_kinds()


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("way", SEVERAL)
def test_program_equals_plain_autograd_on_each_rung(name, way):
    function, _ = PROGRAMS[name]
    expected = gradients(torch.autocast("cpu", torch.bfloat16)(function) if "autocast" in way else function)
    policy = Rungs()
    for step in itertools.count():
        run = WAYS[way](function, policy=policy)
        with warnings.catch_warnings():
            warnings.simplefilter("error", remat.RematWarning)
            warnings.filterwarnings("ignore", "(?s).*transform of")
            if name in ("beside_a_batch_norm", "called_more_often_in_replay") and "in" in way.split():
                return  # see `OTHERWISE`
            assert_same(expected, gradients(run), f"step {step}")
        if step >= STEPS and policy.number + 1 >= policy.seen:
            break
    if "in" in way.split():  # a region inside of others recomputes everything
        assert policy.kept == 0
    elif name != "beside_a_batch_norm":  # which is to be run, unless replay ends before it
        assert bool(policy.kept) == (name not in ALL_OR_NOTHING)


@pytest.mark.parametrize("name", [name for name in NAMED if name != "with_a_gradient_taken_inside"])
@pytest.mark.parametrize("way", ["alone", "to the end", "autocast"])
def test_program_equals_plain_autograd_with_acts_by_chance(name, way, monkeypatch):
    monkeypatch.setattr(kinds, "_RESTARTS", 10**9)
    come_to, answered = Answerer.come_to, []
    monkeypatch.setattr(Answerer, "come_to", lambda *args: (answered.append(args[1].name), come_to(*args))[1])
    function, _ = PROGRAMS[name]
    expected = gradients(torch.autocast("cpu", torch.bfloat16)(function) if "autocast" in way else function)
    for seed in range(12):
        policy = Chance(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", remat.RematWarning)
            for _ in range(4):
                assert_same(expected, gradients(WAYS[way](function, policy=policy)), f"seed {seed}")
    assert bool(answered) == (name not in NEVER_ANSWERED)


def outcome(function):
    """Return what `gradients` does, or which error it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return gradients(function)
        except Exception as error:
            return type(error)


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
def test_program_does_what_it_does_in_a_plain_region_with_each_kind_of_acts(name, monkeypatch):
    monkeypatch.setattr(kinds, "_RESTARTS", 10**9)
    monkeypatch.setattr(kinds, "_SAMPLES", 1)
    function, _ = PROGRAMS[name]
    expected, plain = outcome(function), outcome(remat.checkpoint()(function))
    if not isinstance(plain, type):
        assert_same(expected, plain)
    policies = [Every(places, spared) for places, spared in itertools.product([(0,), ()], range(-1, 4))]
    policies += [Chance(seed) for seed in range(6)] + [Rungs()] * 4
    for at, policy in enumerate(policies):
        run = remat.checkpoint(policy=policy, early_stop=at % 3 > 0)(function)
        outcome(run)
        actual = outcome(run)
        if isinstance(plain, type) or isinstance(actual, type):
            assert plain is actual, f"policy {at}"
        else:
            assert_same(plain, actual, f"policy {at}")


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
        for _ in range(4):
            assert_same(expected, torch.autograd.grad(run(x).sum(), x))


class Given(MemoryBudget):
    """A policy with these acts."""

    def __init__(self):
        super().__init__(0.5)
        self.acts, self.ladder = {}, None

    def choose(self, ladder):
        self.ladder = ladder
        return replace(ladder.rungs[0], acts=self.acts)


def drawn(ladder, chance, among=None):
    """Return acts by chance, of calls and results that others keep if there are others."""
    acts = {}
    for step in ladder.record.steps:
        results = range(len(step.results or ())) if among is None else among.get(step.function, {}).get(step.number)
        if can_be_kept(step.function) and results is not None and chance.random() < 0.75:
            acts.setdefault(step.function, {})[step.number] = tuple(one for one in results if chance.random() < 0.65)
    return acts


@pytest.mark.filterwarnings("ignore:.*replay")
@pytest.mark.parametrize("seed", range(30))
def test_region_that_is_lowered_keeps_no_more_than_one_that_began_so(seed, monkeypatch):
    monkeypatch.setattr(kinds, "_RESTARTS", 10**9)
    made, regions = forward.Region, []

    def noted(*args):
        regions.append(ref(region := made(*args)))
        return region

    monkeypatch.setattr(forward, "Region", noted)
    up, down = nn.Linear(16, 48), nn.Linear(48, 16)

    def function(x):
        h = F.gelu(up(x)).tanh()
        variance, mean = torch.var_mean(down(h), -1, keepdim=True)
        return (F.dropout(down(h), 0.1) * torch.rsqrt(variance + 1) - mean).exp().sigmoid()

    def gradients_of(function):
        torch.manual_seed(3)
        return torch.autograd.grad(function(x).square().sum(), [x, *up.parameters(), *down.parameters()])

    x, policy, chance = leaf(32, 16), Given(), random.Random(seed)
    expected, run = gradients_of(function), remat.checkpoint(policy=policy)(function)
    for _ in range(4):
        gradients_of(run)
    high = drawn(policy.ladder, chance)
    low, kept = drawn(policy.ladder, chance, high), []
    for policy.acts, then in ((low, None), (high, low)):
        torch.manual_seed(3)
        with LiveStorages() as live:
            y = run(x)
            assert then is None or lower(regions[-1](), then)
            kept.append(live.bytes())
        assert_same(expected, torch.autograd.grad(y.square().sum(), [x, *up.parameters(), *down.parameters()]))
        del y
    begun, lowered = kept
    assert lowered <= begun  # less where what is run now is given a placeholder: no ladder has such acts


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


def steps(blocks, count, width=32, rows=256):
    """Run steps of blocks; return the gradients and the bytes kept after forward of the last one."""
    x = torch.linspace(-1, 1, rows * width).view(rows, width).requires_grad_()
    for _ in range(count):
        torch.manual_seed(5)
        x.grad = None
        with LiveStorages() as live:
            y = x
            for block in blocks:
                y = block(y)
            kept = live.bytes() - y.nbytes
        y.square().mean().backward()
    return [x.grad], kept


@pytest.fixture
def dear(monkeypatch):
    """Let each kernel take so long that calls are worth keeping, though tests have small ones."""
    monkeypatch.setattr(ladder, "_ACT_NS", 1000)


def test_bytes_rise_with_the_share_and_are_those_of_the_rung(dear):
    torch.manual_seed(0)
    block = Block()
    expected, whole = steps([block], 1)
    found = {}
    for share in (0.0, 0.25, 0.5, 0.75, 0.9):
        kinds.forget_kinds()
        run = remat.checkpoint(policy=remat.policies.memory_budget(share))(block)
        actual, found[share] = steps([run], 5)
        assert_same(expected, actual)
        (timed,) = kinds._timed.values()
        ((_, ladder),) = timed.ladders.items()
        rung = ladder.at_share(share)
        states = 5056 * bool(rung.acts)  # what a skipped dropout leaves, if something runs after it
        x_bytes = 256 * 32 * 4  # the argument is not the block's
        assert rung.bytes - x_bytes <= found[share] <= rung.bytes - x_bytes + states
        assert found[share] <= share * whole + 5056
    kept = list(found.values())
    assert kept == sorted(kept)
    assert kept[0] == 0
    assert len(set(kept)) >= 2


def test_first_steps_keep_nothing():
    block = Block()
    run = remat.checkpoint(policy=remat.policies.memory_budget(0.9))(block)
    assert [steps([run], 1)[1] for _ in range(3)] == [0, 0, 0]
    assert steps([run], 1)[1] > 0


def test_share_of_one_is_plain_code():
    block = Block()
    run = remat.checkpoint(policy=remat.policies.memory_budget(1))(block)
    steps([run], 4)
    x = torch.randn(8, 32, requires_grad=True)
    steps([run], 1)
    assert steps([run], 1)[1] == steps([block], 1)[1]
    assert run(x).grad_fn is not None


def test_equal_blocks_have_one_ladder():
    blocks = [Block() for _ in range(4)]
    policy = remat.policies.memory_budget(0.5)
    runs = [remat.checkpoint(policy=policy)(block) for block in blocks]
    expected, _ = steps(blocks, 1)
    actual, _ = steps(runs, 2)  # four forwards of the first step are enough
    assert_same(expected, actual)
    assert len(kinds._timed) == 1
    assert len(next(iter(kinds._timed.values())).ladders) == 1


def test_dearest_is_kept(dear):
    """Of two results of one size that is kept which takes longer."""

    def function(x):
        return torch.matrix_exp(x).sin() + (x * 2).cos()

    policy = remat.policies.memory_budget(0.6)
    x = leaf(64, 64)
    for _ in range(4):
        remat.checkpoint(policy=policy)(function)(x).sum().backward()
    (timed,) = kinds._timed.values()
    (ladder,) = timed.ladders.values()
    assert [name for name, _ in ladder.at_share(0.6).kept] == ["matrix_exp_0"]


@pytest.mark.parametrize(("last", "is_run"), [(torch.sin, False), (torch.exp, True)])  # argument saved; result saved
def test_the_last_call_costs_what_replay_runs_of_it(last, is_run, monkeypatch):
    monkeypatch.setattr(ladder, "_ACT_NS", 10**9)  # no call is worth it
    x = leaf(64, 64)
    for _ in range(4):
        y = remat.checkpoint(policy=remat.policies.memory_budget(0))(lambda x: last(torch.matrix_exp(x)))(x)
        with CountOps() as ops:
            y.sum().backward()
    assert ops.counts[last.__name__] == is_run
    (timed,) = kinds._timed.values()
    (found,) = timed.ladders.values()
    assert [name for name, _ in found.rungs[0].runs] == ["matrix_exp_0"] + ["exp_0"] * is_run


def test_lengths_that_change_take_the_ladder_of_known_ones():
    block = Block()
    run = remat.checkpoint(policy=remat.policies.memory_budget(0.5))(block)
    for rows in (64, 64, 64, 128, 96, 32, 200, 7, 64):
        expected, _ = steps([block], 1, rows=rows)
        actual, _ = steps([run], 1, rows=rows)
        assert_same(expected, actual)
    ((kind),) = kinds._kinds.values()
    assert len(kind._by_shapes) == 3


def test_lengths_that_never_come_again_have_a_ladder_too(dear):
    run, nothing = (remat.checkpoint(policy=policy)(Block()) for policy in (remat.policies.memory_budget(0.5), None))
    for rows in range(96, 99):
        _, kept = steps([run], 1, rows=rows)
    assert kept == steps([nothing], 1, rows=98)[1]
    assert steps([run], 1, rows=99)[1] > steps([nothing], 1, rows=99)[1]


def test_functions_and_modules_are_kept_beside_and_names_are_not(dear):
    block = Block()
    expected, _ = steps([block], 1)
    budget = remat.policies.memory_budget(0.3)
    for policy in (
        budget | [F.linear],
        [F.gelu] | budget,
        budget & ~remat.save_names("up.*"),
        budget | remat.save_modules("norm"),
        (budget | remat.policies.save_matmuls) & ~remat.save_names("down.*"),
    ):
        kinds.forget_kinds()
        run = remat.checkpoint(policy=policy)(block)
        actual, kept = steps([run], 5)
        assert_same(expected, actual)
        assert kept > 0


def test_left_out_calls_are_not_kept(dear):
    block = Block()
    run = remat.checkpoint(policy=remat.policies.memory_budget(0.9) & ~remat.save_names("up.*"))(block)
    steps([run], 5)
    (timed,) = kinds._timed.values()
    (ladder,) = timed.ladders.values()
    assert not any(name.startswith("up.") for rung in ladder.rungs for name, _ in rung.kept)


def test_parts_of_a_model_have_shares_of_their_own():
    model = nn.ModuleDict({"a": Block(), "b": Block()})
    reference = copy.deepcopy(model)
    budget = remat.policies.memory_budget
    remat.checkpoint_modules(model, {"a": {"policy": budget(0.9)}, "b": {"policy": budget(0)}})
    expected, _ = steps(reference.values(), 1)
    actual, _ = steps(model.values(), 4)
    assert_same(expected, actual)


@pytest.mark.parametrize("share", [-0.1, 1.5, "50%", None, True, float("nan")])
def test_what_is_no_share_is_refused(share):
    with pytest.raises(PolicyError, match="is not a share"):
        remat.policies.memory_budget(share)


def test_ops_beside_it_are_refused():
    for other in ([torch.ops.aten.mm.default], remat.save_names("up.*"), lambda ctx, op, *args: False):
        with pytest.raises(PolicyError, match="decides about ops"):
            remat.checkpoint(policy=remat.policies.memory_budget(0.5) | other)(Block())
    with pytest.raises(PolicyError, match="two memory budgets"):
        remat.checkpoint(policy=remat.policies.memory_budget(0.5) | remat.policies.memory_budget(0.2))(Block())


def test_policy_and_its_regions_are_pickled_and_copied():
    run = remat.checkpoint(policy=remat.policies.memory_budget(0.5))(Block())
    expected, _ = steps([run], 4)
    assert repr(pickle.loads(pickle.dumps(remat.policies.memory_budget(0.5)))) == "memory_budget(0.5)"
    for other in (copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
        assert_same(expected, steps([other], 4)[0])


def test_an_exception_in_a_recorded_forward_leaves_nothing():
    def function(x):
        y = x.sin()
        if fails:
            raise ValueError("of the user")
        return y.exp()

    fails = True
    run = remat.checkpoint(policy=remat.policies.memory_budget(0.5))(function)
    x = leaf(4)
    for _ in range(2):
        with contextlib.suppress(ValueError):
            run(x)
    fails = False
    for _ in range(5):
        x.grad = None
        run(x).sum().backward()
    assert_same(torch.autograd.grad(function(x).sum(), x)[0], x.grad)


def test_a_kind_that_starts_over_twice_keeps_nothing():
    """A function that does something else from step to step costs two second runs, not one in each step."""
    runs = [0]

    def function(x):
        runs[0] += 1
        y = (x @ x).exp() if runs[0] < 7 else (x @ x).sin()
        return (y @ y).tanh().exp()

    policy = Chance(1)
    x = leaf(8, 8)
    for _ in range(20):
        x.grad = None
        remat.checkpoint(policy=policy)(function)(x).sum().backward()
    assert next(iter(kinds._kinds.values())).restarts <= 2
