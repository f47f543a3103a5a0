"""`remat.policies.save_collectives`: which collectives replay does not repeat, and what that keeps."""

from __future__ import annotations

import copy
import pickle
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.multiprocessing.reductions import StorageWeakRef

import torch_remat as remat
from tests.helpers import assert_equal_gradients, leaf
from tests.native_programs import aten, region, replayed_ops, retained_bytes
from tests.ways import nothing
from torch_remat import policies

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # names that all releases have


@pytest.fixture(autouse=True)
def _process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def between(collective):
    """Return a function with a collective between ops that replay runs, and one that reads its result."""
    return lambda x: (collective(x.sin()) * 2).exp().sin()


REDUCE_SCATTER = between(lambda x: collectives.reduce_scatter_tensor_autograd(x, "sum", 0, dist.group.WORLD))
ALL_GATHER = between(lambda x: collectives.all_gather_tensor_autograd(x, 0, dist.group.WORLD))


EVERYTHING = policies.save_collectives(all_gathers=True)


def test_bytes_are_those_of_the_results():
    x, size = leaf(16, 16), 16 * 16 * 4
    for function, with_option in ((REDUCE_SCATTER, False), (REDUCE_SCATTER, True), (ALL_GATHER, True)):
        policy = EVERYTHING if with_option else policies.save_collectives
        more = retained_bytes(region(policy)(function), [x]) - retained_bytes(region(nothing)(function), [x])
        assert more == size
    plain = retained_bytes(region(policies.save_collectives)(ALL_GATHER), [x])
    assert plain == retained_bytes(region(nothing)(ALL_GATHER), [x])


def test_forms_of_the_policy():
    """Called without an option it is itself, also copied; a policy function can ask it; other options are errors."""

    def mine(ctx, op, *args, **kwargs):
        return policies.save_collectives(ctx, op, *args, **kwargs) or op is aten.exp.default

    assert not any("reduce_scatter" in op for op in replayed_ops(REDUCE_SCATTER, region(mine), [leaf(4, 4)]))
    assert policies.save_collectives() is policies.save_collectives(all_gathers=False) is policies.save_collectives
    for policy in (policies.save_collectives, EVERYTHING):
        for copied in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)):
            assert copied is policy
            assert repr(copied | policies.save_matmuls) == repr(policy | policies.save_matmuls)
    form = r"The form is save_collectives, or save_collectives\(all_gathers=True\)"
    for options in ({"all_gather": True}, {"all_gathers": "no"}):
        with pytest.raises(remat.PolicyError, match=form):
            policies.save_collectives(**options)


# Those that write their arguments, of which their schemas say nothing


def writes(collective):
    """Return a function with a collective into a new tensor, and what notes the storages that it makes."""
    storages = []

    def function(x):
        given, result = x.detach().sin(), torch.empty(4, 4)
        if not remat.is_recomputing():
            storages[:] = [StorageWeakRef(one.untyped_storage()) for one in (given, result)]
        collective(result, given)
        return (x * (given if collective is reduced else result)).exp().sin()

    return function, storages


def reduced(result, given):
    dist.all_reduce(given, async_op=True).wait()


WRITES = {
    "allgather_": lambda result, given: dist.all_gather([result], given),
    "_allgather_base_": lambda result, given: dist.all_gather_into_tensor(result, given),
    "alltoall_base_": lambda result, given: dist.all_to_all_single(result, given),
    "gather_": lambda result, given: dist.gather(given, [result], dst=0),
    "scatter_": lambda result, given: dist.scatter(result, [given], src=0),
    "allreduce_": reduced,
}


@pytest.mark.parametrize("policy", [nothing, EVERYTHING])
@pytest.mark.parametrize("op", WRITES)
def test_what_a_collective_writes_is_kept_or_written_again(op, policy):
    function, storages = writes(WRITES[op])
    assert_equal_gradients(function, region(policy)(function), [leaf(4, 4)])
    counts = replayed_ops(function, region(policy), [leaf(4, 4)])
    assert sum(count for name, count in counts.items() if name.split(".")[-1] == op) == (policy is nothing)
    y = region(policy)(function)(leaf(4, 4))
    kept = policy is EVERYTHING
    expected = [kept, False] if op == "allreduce_" else [False, kept]
    deadline = time.monotonic() + 5  # gloo's thread lets go of the tensors a moment after the work is done
    while (alive := [not storage.expired() for storage in storages]) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alive == expected, "a pending work keeps what it was given"
    y.sum().backward()


def test_a_region_with_collectives_keeps_no_random_state():
    """Also where replay runs one after another that is kept."""

    def function(x):
        reduced = collectives.all_reduce(x.detach().sin(), "sum", dist.group.WORLD) * x
        return (collectives.all_gather_tensor(reduced.detach(), 0, dist.group.WORLD) * x).exp()

    y = region(policies.save_collectives)(function)(leaf(4, 4))
    assert "random state" not in str(remat.memory_report(y))
