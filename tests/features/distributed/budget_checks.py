"""What is to hold of budgets over ranks; `engines_worker.py` runs these as cells `check:NAME`."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torch_remat as remat
from tests.features.distributed.engines import (
    CHECKS,
    ENGINES,
    LENGTH,
    WAYS,
    WIDTH,
    Apply,
    Engine,
    Model,
    check,
    compare,
    modules,
)
from torch_remat.budgets import group

WITH_COLLECTIVES = ("tp", "sp", "fsdp2_children", "cp")


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
    assert 0 < sum(not entry.evicted_tensors for entry in plan.values()) < len(plan) == 4, plan
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
def without_a_group() -> None:
    """A budget without a group refuses regions with collectives inside, and nothing else."""
    for name in WITH_COLLECTIVES:
        engine = ENGINES[name](modules())
        refused = pytest.raises(remat.UsageError, match=r"layers.0: this region (?s:.*)group=.*plan=plan")
        with refused, remat.budget("4 KiB"):
            engine.step(0)
        with remat.budget("100%"):  # in which nothing is ever evicted
            ENGINES[name](modules()).step(0)
    with remat.budget("4 KiB"):  # a policy decides the same on each rank
        ENGINES["tp"](WAYS["list"]).step(0)
    for name in ("ddp", "fsdp2", "fsdp2_after"):  # FSDP's hooks around and inside of regions do not run again
        engine = ENGINES[name](modules())
        with remat.budget(f"{1 + 100 * dist.get_rank()} KiB"):
            for step in range(4):
                engine.step(step)


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
    budget = remat.budget("1200 KiB", group=dist.group.WORLD)
    engine = ENGINES["cp"](modules())
    kept = []
    for step in range(10):
        if step == 4:  # while regions have holders
            uneven_ranks(engine.model, more=5)
        with budget:
            engine.step(step)
        kept.append([row.evicted_bytes == 0 for row in budget.steps[-1].rows])
    none = [False] * 4
    assert kept[:3] == [none] * 3, kept
    assert kept[3] == kept[4] != none, kept
    assert kept[5] == none, kept
    assert sum(kept[-1]) < sum(kept[3]), kept
    assert budget.steps[-1].most_bytes <= budget.limit


AGREE = {
    **{f"agree_{name}": functools.partial(agree, name) for name in WITH_COLLECTIVES},
    "agree_lengths": functools.partial(agree, "cp", lengths=(LENGTH, 16, 32)),
    "agree_slow_rank": functools.partial(agree, "cp", slow_rank),
    "agree_uneven_ranks": functools.partial(agree, "cp", uneven_ranks),
}
CHECKS.update(AGREE)
