"""Dicts as policies: functions and ops, each with its own decision."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy

import torch_remat as remat
from tests.helpers import CountOps, LiveStorages, assert_same, leaf
from tests.offloaders import Counting

SAVE, OFFLOAD, RECOMPUTE = remat.CheckpointPolicy.SAVE, remat.CheckpointPolicy.OFFLOAD, remat.CheckpointPolicy.RECOMPUTE
MM, GELU = torch.ops.aten.mm.default, torch.ops.aten.gelu
MUST_RECOMPUTE, PREFER_SAVE = TorchPolicy.MUST_RECOMPUTE, TorchPolicy.PREFER_SAVE
KIB = 1024
WEIGHTS = [leaf(16, 16) for _ in range(2)]


def block(x):
    """Each result is read by backward, and has 1 KiB."""
    for weight in WEIGHTS:
        x = F.gelu(x.exp() @ weight)
    return x.sin() * 1


def run(policy):
    """Compare gradients; return the KiB that stay and that travel, and which of products and gelus replay ran."""
    offloader, x = Counting(), leaf(16, 16)
    with LiveStorages() as live:
        y = remat.checkpoint(policy=policy, offloader=offloader)(block)(x)
        stays = live.bytes() - y.untyped_storage().nbytes()
    travels = offloader.bytes
    with CountOps() as ops:
        gradients = torch.autograd.grad(y.sum(), [x, *WEIGHTS])
    offloader.assert_all_released_once()
    y = block(x)
    with CountOps() as of_backward:
        expected = torch.autograd.grad(y.sum(), [x, *WEIGHTS])
    assert_same(expected, gradients)
    ran = ops.counts - of_backward.counts
    return stays // KIB, travels // KIB, [op for op in ("gelu", "mm") if ran[op]]


# A policy, the KiB that stay and that travel, and what runs in replay. A gelu saves what a product returned, which
# stays if either is saved.
POLICIES = {
    "saved": ({torch.matmul: SAVE}, 2, 0, ["gelu"]),
    "offloaded": ({torch.matmul: OFFLOAD}, 0, 2, ["gelu"]),
    "both": ({torch.matmul: OFFLOAD, F.gelu: SAVE}, 4, 1, []),
    "the other way": ({torch.matmul: SAVE, F.gelu: OFFLOAD}, 2, 2, []),
    "what a saved call returned": ({torch.matmul: OFFLOAD, torch.exp: SAVE}, 2, 2, ["gelu"]),
    "ops": ({MM: OFFLOAD, GELU: SAVE}, 2, 2, []),
    "recomputed": ({torch.matmul: OFFLOAD, F.gelu: RECOMPUTE}, 0, 2, ["gelu"]),
    "as policy functions say": ({torch.matmul: True, F.gelu: None, torch.exp: False}, 2, 0, ["gelu"]),
    "of torch": ({torch.matmul: TorchPolicy.MUST_SAVE, F.gelu: TorchPolicy.PREFER_RECOMPUTE}, 2, 0, ["gelu"]),
    "an op": ({MM: OFFLOAD}, 0, 2, ["gelu"]),
    "all overloads of an op": ({GELU: OFFLOAD, MM: RECOMPUTE}, 0, 2, ["mm"]),
    "function and op": ({torch.matmul: SAVE, GELU: OFFLOAD}, 2, 2, []),
    "with a list": ({torch.matmul: OFFLOAD} | remat.save_names("gelu*"), 2, 2, []),
    "the stronger of two": ({torch.matmul: OFFLOAD} | remat.policies.save_matmuls, 2, 0, ["gelu"]),
    "excluded by name": ({torch.matmul: OFFLOAD} & ~remat.save_names("matmul_1"), 0, 1, ["gelu", "mm"]),
    "must before prefer": ({torch.matmul: MUST_RECOMPUTE, torch.Tensor.matmul: PREFER_SAVE}, 0, 0, ["gelu", "mm"]),
}  # fmt: skip
if hasattr(TorchPolicy, "MUST_CPU_OFFLOAD"):  # not in torch 2.10
    PREFERRED = {torch.matmul: TorchPolicy.PREFER_CPU_OFFLOAD} | remat.policies.save_discrete
    POLICIES["of torch, offloaded"] = {torch.matmul: TorchPolicy.MUST_CPU_OFFLOAD}, 0, 2, ["gelu"]
    POLICIES["of torch, rather offloaded"] = PREFERRED, 0, 2, ["gelu"]


@pytest.mark.parametrize("kind", POLICIES)
def test_each_has_its_own_decision(kind):
    policy, *expected = POLICIES[kind]
    assert list(run(policy)) == expected


@pytest.mark.parametrize("policy", [{F.gelu: RECOMPUTE}, {MM: False, F.gelu: None}])
def test_what_is_only_recomputed_costs_and_says_nothing(policy):
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.append(len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()))
            return op(*args, **(kwargs or {}))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(policy) == (0, 0, ["gelu", "mm"])
        with Watch():
            remat.checkpoint(policy=policy)(block)(leaf(16, 16))
    assert set(seen) == {0}  # no mode of ours below


def test_texts_show_the_decision():
    with pytest.warns(remat.RematWarning, match=r"\{torch\.logsumexp: must offload\}.* selected nothing"):
        remat.checkpoint(policy={torch.logsumexp: OFFLOAD, F.gelu: RECOMPUTE})(torch.sin)(leaf(3))
