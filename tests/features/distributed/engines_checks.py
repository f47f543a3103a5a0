"""What is to hold over ranks besides equal gradients; `engines_worker.py` runs these as cells `check:NAME`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_remat as remat
from tests.features.distributed.engines import ENGINES, WAYS, Block, Model, check, fsdp1, fsdp2
from tests.helpers import no_other_regions

SAVE, SAVE_COLLECTIVES = remat.policies.never_replay_effects, remat.policies.save_collectives(all_gathers=True)


@check
def hooks_and_names() -> None:
    """Sharded layers that are regions keep names and state, and their hooks run once a step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for after in (False, True):
        model, calls = Model(), []
        names = list(model.state_dict())
        apply = functools.partial(remat.checkpoint_modules, patterns="layers.*", policy=remat.policies.save_matmuls)
        engine = fsdp2(apply, after=after, mesh=mesh, model=model)
        model.layers["0"].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        assert list(model.state_dict()) == names
        with no_other_regions():
            y = model(torch.randn(2, 8, 64))
            assert [region.name for region in remat.memory_report(y).regions] == [f"layers.{at}" for at in range(4)]
            y.sum().backward()
        assert len(calls) == 1, "the hooks of a layer ran in replay"
        del engine


@check
def wrapped_blocks_have_the_names_of_the_model() -> None:
    """The first FSDP's wrappers are no part of the names, and regions go inside of them."""
    model = fsdp1(lambda model: None).model
    handle = remat.checkpoint_modules(model, "layers.*")
    assert "    layers.0\n" in str(handle), str(handle)
    assert all("forward" in vars(module) for module in model.modules() if isinstance(module, Block))


class Seen(TorchDispatchMode):
    """Counts the ops that gather parameters."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "allgather" in str(func) or func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


@check
def other_modes_see_what_fsdp_does() -> None:
    """A user's mode sees FSDP's work in a region, around it and inside of it; an op log does not."""
    counts = {}
    for name, options in {"plain": None, "policy": {"policy": remat.policies.save_matmuls}}.items():
        block = Block()
        fully_shard(block.mlp)
        around, inside = Seen(), Seen()

        def run(x: Tensor, block=block, inside=inside) -> Tensor:
            with inside:
                return block(x)

        region = run if options is None else remat.checkpoint(**options)(run)
        torch.manual_seed(0)
        with around:
            y = region(torch.randn(2, 8, 64, requires_grad=True))
        counts[name] = around.count, inside.count
        y.sum().backward()
        assert options is None or inside.count >= counts[name][1]
    assert counts["plain"] == counts["policy"], counts
    assert min(counts["plain"]) > 0, counts


def _runs(function: Callable, wrap: Callable, length: int) -> tuple[list[Tensor], list[str]]:
    x = torch.randn(4, length, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    w = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()
    with remat.testing.collectives() as collectives:
        y = wrap(functools.partial(function, w=w))(x)
        y = y.wait() if isinstance(y, funcol.AsyncCollectiveTensor) else y
        y.sum().backward()
    return [y.detach(), x.grad, torch.zeros(1) if w.grad is None else w.grad], collectives.names


@check
def saved_collectives_do_not_run_again() -> None:
    """Each kind of collective, along any dim: none runs in replay that the policy saves, and nothing warns."""
    world, group = dist.get_world_size(), dist.group.WORLD
    gather, scatter = funcol.all_gather_tensor_autograd, funcol.reduce_scatter_tensor_autograd
    programs: dict[str, Callable] = {
        **{f"gather{dim}": lambda x, w, dim=dim: (gather(x @ w, dim, group) * 2).sin() for dim in range(3)},
        **{f"scatter{dim}": lambda x, w, dim=dim: (scatter(x @ w, "sum", dim, group) * 2).sin() for dim in range(2)},
        "to_all": lambda x, w: (funcol.all_to_all_single_autograd(x @ w, None, None, group) * 2).sin(),
        "reduce": lambda x, w: (funcol.all_reduce((x @ w).detach(), "sum", group) * x).sin(),
        "view": lambda x, w: (lambda y: (y.view(-1).view(y.shape) * 2).sin() * y)(gather(x @ w, 0, group)),
        "several": lambda x, w: x * sum(
            (y * 2).sin().sum() for y in funcol.all_gather_into_tensor_coalesced([(x @ w).detach(), x.detach()], group)
        ),
    }  # fmt: skip
    for name, program in programs.items():
        expected, names = _runs(program, lambda function: function, 2 * world)
        for policy, how in ((SAVE, "default"), (SAVE, "bitwise"), (SAVE_COLLECTIVES, "default")):
            actual, again = _runs(program, remat.checkpoint(policy=policy, determinism_check=how), 2 * world)
            assert all(map(torch.equal, expected, actual)), f"{name}: gradients differ"
            assert again == names, f"{name}: {again} instead of {names}"


@check
def bitwise_notices_other_values_of_split_tensors() -> None:
    """Replay computes with another factor, which a check of metadata cannot notice."""
    factor = [1.0]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)]).requires_grad_()
    y = remat.checkpoint(determinism_check="bitwise")(lambda x: (x * factor[0]).sin().exp())(x)
    factor[0] = 2.0
    with pytest.raises(remat.MismatchError, match="other values"):
        y.sum().backward()


@check
def dtr_is_refused() -> None:
    """Blocks of `dtr` refuse what is over ranks, at once, and say what to use."""
    engines = {
        "ddp": "DistributedDataParallel",
        "fsdp2": "FSDP::",
        "fsdp1": "FullyShardedDataParallel",
        "fsdp1_flat": "FullyShardedDataParallel",
        "tp": "DTensor",
        "sp": "DTensor",
        "cp": "_c10d_functional",
    }
    for name, wanted in engines.items():
        engine = ENGINES[name](WAYS["none"])
        with (
            pytest.raises(remat.UsageError, match=rf"does not run over ranks, and {wanted}[\s\S]*checkpoint_modules"),
            remat.dtr.budget("1 GiB"),
        ):
            engine.step(0)


@check
def dtr_runs_in_a_stage_of_a_pipeline() -> None:
    """A pipeline, and ranges of a profile that are the user's own, run in a block."""
    engine, other = (ENGINES["gpipe"](WAYS["none"]) for _ in range(2))
    expected = engine.step(0)
    with remat.dtr.budget("1 GiB"), torch.profiler.record_function("mine"):
        actual = other.step(0)
    assert all(map(torch.equal, expected, actual))


@check
def a_region_around_ddp_trains_as_without() -> None:
    """The wrapper runs again in backward."""
    found = []
    for wrap in (lambda module: module, remat.checkpoint()):
        engine = ENGINES["ddp"](WAYS["none"])
        engine.forward = wrap(engine.model)
        found.append(engine.step(0) + engine.step(1))
    assert all(map(torch.equal, *found))


@check
def a_copy_is_sharded_alone() -> None:
    """A deep copy of a model with regions trains as the model does."""
    model = Model()
    remat.checkpoint_modules(model, "layers.*", policy=remat.policies.save_matmuls)
    expected = fsdp2(lambda model: None, model=copy.deepcopy(model)).step(0)
    actual = fsdp2(lambda model: None, model=model).step(0)
    assert all(map(torch.equal, expected, actual))
