"""What is to hold of budgets over ranks; `engines_worker.py` runs these as cells `check:NAME`."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torch_remat as remat
from tests.features.distributed.engines import (
    BATCH,
    CHECKS,
    ENGINES,
    LENGTH,
    PRODUCTS,
    WAYS,
    WIDTH,
    Apply,
    Engine,
    Model,
    check,
    compare,
    modules,
)
from tests.helpers import OLDEST
from torch_remat.budgets import group
from torch_remat.dispatch.region.region import live_regions
from torch_remat.ladders import kinds, ladder

WITH_COLLECTIVES = ("tp", "sp", "fsdp2_children", "cp")
WITHOUT = ("ddp", "fsdp2", "fsdp2_after")
# Torch 2.10 sets up neither zero-bubble schedule over gloo after others of the process, without regions either.
PIPELINES = ("gpipe", "1f1b", *([] if OLDEST else ["zero_bubble", "zbv"]))


def slow_rank(model: nn.Module) -> None:
    """Have one rank take ten times as long."""
    seconds = 0.002 if dist.get_rank() == 0 else 0.02
    for block in model.layers.values():
        block.mlp.squash = lambda x: (time.sleep(seconds), torch.tanh(x))[1]


def uneven_ranks(model: nn.Module, more: int = 2) -> None:
    """Have one rank save more."""
    for block in model.layers.values():
        block.mlp.squash = lambda x: functools.reduce(
            lambda h, _: h * h.sigmoid(), range(1 + more * dist.get_rank()), x
        )


@contextlib.contextmanager
def calls_that_cost_nothing() -> Iterator[None]:
    """Let it be worth the while to keep calls of small models."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_ACT_NS", "_SEEN_NS", "_REGION_NS"):
            patch.setattr(ladder, name, 0)
        kinds.forget_kinds()
        yield
    kinds.forget_kinds()


def keeps(entry: remat.budgets.Planned) -> bool:
    """Whether a region keeps more than its arguments."""
    return entry.is_plain or bool(entry.acts)


@calls_that_cost_nothing()
def agree(name: str, alter: Apply = lambda model: None, lengths: Sequence[int] = (LENGTH,)) -> None:
    """Compare an engine in a budget with itself without checkpointing, and look at the plan on which ranks agree."""

    def engine_with(way: Apply) -> Engine:
        def apply(model: nn.Module) -> None:
            alter(model)
            way(model)

        return ENGINES[name](apply)

    def train(engine: Engine, around: AbstractContextManager) -> list[list[Tensor]]:
        found = []
        for step in range(6 * len(lengths)):
            with around:
                found.append(engine.step(step, lengths[step % len(lengths)]))
        return found

    budget = remat.budget("50%", group=dist.group.WORLD)
    expected = train(engine_with(WAYS["none"]), nullcontext())
    compare(expected, train(engine_with(modules()), budget))
    plan = budget.plan()
    plans: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(plans, plan.to_json())
    assert len(set(plans)) == 1, plans
    assert len(plan) == 4, plan
    assert any(map(keeps, plan.values())), plan
    assert not all(entry.is_plain for entry in plan.values()), plan
    keeps_calls = name not in WITH_COLLECTIVES and alter is not uneven_ranks
    assert any(entry.acts for entry in plan.values()) == keeps_calls, plan
    assert budget.kept_bytes == 0
    assert all(step.most_bytes <= step.limit_bytes for step in list(budget.steps)[-2:])
    again = remat.budgets.Plan.from_json(plan.to_json())
    planned = engine_with(modules(plan=again))
    compare(expected, train(planned, nullcontext()))
    again.world = (3, (("default_pg", 3),))
    again._fits = False
    with pytest.raises(remat.UsageError, match="a world of 3 ranks"):
        planned.step(0)


@check
@calls_that_cost_nothing()
def without_a_group() -> None:
    """A budget without a group refuses regions with collectives inside, and nothing else."""
    for name in WITH_COLLECTIVES:
        engine = ENGINES[name](modules())
        refused = pytest.raises(remat.UsageError, match=r"layers.0: this region (?s:.*)group=.*plan=plan")
        with refused, remat.budget("4 KiB"):
            engine.step(0)
        for share in ("100%", "0%"):  # in which nothing is ever decided
            with remat.budget(share):
                ENGINES[name](modules()).step(0)
    with remat.budget("4 KiB"):  # a policy decides the same on each rank
        ENGINES["tp"](WAYS["list"]).step(0)
    for name in (*WITHOUT, *PIPELINES):  # FSDP's hooks around and inside of regions do not run again
        engines = [ENGINES[name](way) for way in (WAYS["none"], modules())]
        budget = remat.budget(f"{300 * (1 + dist.get_rank())} KiB")
        for step in range(6):
            expected = engines[0].step(step)
            with budget:
                compare([expected], [engines[1].step(step)])


def small_model() -> tuple[Model, Tensor]:
    """Return a model of regions without collectives, in which no library could help, and its input."""
    model = Model()
    modules()(model)
    return model, torch.randn(2, 8, WIDTH)


@check
def rank_that_raises() -> None:
    """Have one rank raise in its last region: the others do not wait for it."""
    model, x = small_model()
    budget = remat.budget("50%", group=dist.new_group())  # of its own: one rank waits in it afterwards

    def failing() -> None:
        model.layers["0"](x)
        raise KeyError

    for step in range(6):
        with budget:
            model(x).square().mean().backward()
        if step == 4:  # on all ranks: they go on
            with pytest.raises(KeyError), budget:
                failing()
    if dist.get_rank() == 1:
        with pytest.raises(KeyError), budget:
            failing()
    else:
        with budget:
            model(x).square().mean().backward()
        with pytest.raises(remat.RematError, match="rank 1 raised KeyError in a block"), budget:
            model(x)
    assert budget.kept_bytes == 0
    y = remat.checkpoint()(torch.sin)(x.requires_grad_())
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], x.cos())


@check
def rank_that_comes_late() -> None:
    """The others say what they wait for."""
    patience, group.PATIENCE_SECONDS = group.PATIENCE_SECONDS, 0.1
    budget, x = remat.budget("50%", group=dist.group.WORLD), torch.randn(2, 8, WIDTH, requires_grad=True)
    is_late = dist.get_rank() == 1
    if is_late:
        time.sleep(0.5)
    with nullcontext() if is_late else pytest.warns(remat.RematWarning, match="waited for other ranks"), budget:
        remat.checkpoint()(torch.sin)(x).sum().backward()
    group.PATIENCE_SECONDS = patience


@check
def rank_that_runs_one_region_less() -> None:
    """All ranks get an error that says where they part."""
    model, x = small_model()
    budget = remat.budget("50%", group=dist.group.WORLD)
    if dist.get_rank() == 0:
        del model.layers["3"]
    with budget:
        model(x).square().mean().backward()
    with pytest.raises(remat.UsageError, match=r"no further region on rank 0, layers\.3 on rank 1"), budget:
        model(x)


@check
def rank_that_passes_the_limit() -> None:
    """All recompute, and agree on a plan that fits."""
    budget = remat.budget("2 MiB", group=dist.group.WORLD)
    engine = ENGINES["cp"](modules())
    size, head = 64, engine.model.head.forward

    @remat.checkpoint(policy=PRODUCTS, region_name="more")
    def more(x: Tensor) -> Tensor:
        w = torch.ones(size, size, requires_grad=True)
        return head(x) + (w @ w).sin().mean()

    engine.model.head.forward = more
    kept = []
    for step in range(10):
        if step == 4 and dist.get_rank() == 1:
            size = 512
        with budget:
            engine.step(step)
        kept.append([row.is_plain for row in budget.steps[-1].rows if row.name != "more"])
    none = [False] * 4
    assert kept[:3] == [none] * 3, kept
    assert kept[3] == kept[4] != none, kept
    assert kept[5] == none, kept
    assert sum(kept[-1]) < sum(kept[3]), kept
    assert budget.steps[-1].most_bytes <= budget.limit


@check
@calls_that_cost_nothing()
def policies_by_price() -> None:
    """Shares of each region: nothing waits, gradients are equal, and of what communicates nothing is kept."""
    for name in (*WITH_COLLECTIVES, *WITHOUT, "tp_fsdp2", *PIPELINES):
        engines = [ENGINES[name](way) for way in (WAYS["none"], WAYS["price"])]
        compare(*([engine.step(step + dist.get_rank()) for step in range(5)] for engine in engines))
        if name in PIPELINES:
            continue
        loss = engines[1].forward(torch.randn(BATCH // engines[1].parts, LENGTH, WIDTH)).square().mean()
        kept = [len(region.tape.functions) for region in live_regions()[-4:]]
        loss.backward()
        if name in WITHOUT or dist.get_world_size() > 1:
            assert any(kept) == (name in WITHOUT), (name, kept)


@check
def policies_by_function() -> None:
    """What these keep of regions that communicate is kept, with a group or without, and nothing by price."""
    policy = [nn.functional.linear]
    for around in (nullcontext(), remat.budget("50%"), remat.budget("50%", group=dist.group.WORLD)):
        engines = [ENGINES["cp"](way) for way in (WAYS["none"], modules(policy=policy))]
        expected = [engines[0].step(step) for step in range(6)]
        for step in range(6):
            torch.manual_seed(step)
            with around:
                compare([expected[step]], [engines[1].step(step)])
        with around:
            loss = engines[1].forward(torch.randn(BATCH // engines[1].parts, LENGTH, WIDTH)).square().mean()
            kept = [len(region.tape.functions) for region in live_regions()[-4:]]
            loss.backward()
        assert kept == [kept[0]] * 4 != [0] * 4, kept


@check
def shapes_that_only_some_ranks_know() -> None:
    """A rank whose regions have other shapes in each step does as the others do."""
    model = Model(depth=4)
    modules()(model)
    budget = remat.budget("50%", group=dist.group.WORLD)
    other = remat.checkpoint(region_name="other")(lambda x: x.sin().exp().cos().mean())
    for step in range(12):
        x, more = torch.randn(2, 8, WIDTH), torch.randn(32 + step * dist.get_rank(), 8, requires_grad=True)
        with budget:
            (model(x).square().mean() + other(more)).backward()
        assert torch.equal(more.grad, _plain_gradient(more)), step
    assert any(map(keeps, budget.plan().values())), budget.plan()


def _plain_gradient(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    x.sin().exp().cos().mean().backward()
    return x.grad


AGREE = {
    **{f"agree_{name}": functools.partial(agree, name) for name in WITH_COLLECTIVES},
    **{
        f"agree_{name}": functools.partial(agree, name)
        for name in (*WITHOUT, "fsdp1", "fsdp2_bf16", "fsdp2_accumulate")
    },
    "agree_ddp_lengths": functools.partial(agree, "ddp", lengths=(LENGTH, 16, 32)),
    "agree_ddp_slow_rank": functools.partial(agree, "ddp", slow_rank),
    "agree_ddp_uneven_ranks": functools.partial(agree, "ddp", uneven_ranks),
    "agree_lengths": functools.partial(agree, "cp", lengths=(LENGTH, 16, 32)),
    "agree_slow_rank": functools.partial(agree, "cp", slow_rank),
    "agree_uneven_ranks": functools.partial(agree, "cp", uneven_ranks),
}
CHECKS.update(AGREE)
