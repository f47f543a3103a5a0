"""Dicts as policies: functions and ops, each with its own decision."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy

import torch_remat as remat
from tests.helpers import LiveStorages, assert_same, leaf
from tests.offloaders import Counting

SAVE, OFFLOAD, RECOMPUTE = remat.CheckpointPolicy.SAVE, remat.CheckpointPolicy.OFFLOAD, remat.CheckpointPolicy.RECOMPUTE
MM, GELU = torch.ops.aten.mm.default, torch.ops.aten.gelu
KIB = 1024
WEIGHTS = [leaf(16, 16) for _ in range(2)]


def block(x):
    """Each result is read by backward, and has 1 KiB."""
    for weight in WEIGHTS:
        x = F.gelu(x.exp() @ weight)
    return x.sin() * 1


def run(policy, function=block):
    """Return gradients, the bytes that stay, those that travel, and the products and gelus that replay ran."""

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if remat.is_recomputing() and op in (MM, GELU.default):
                ran.append(op.overloadpacket.__name__)
            return op(*args, **(kwargs or {}))

    ran, offloader, x = [], Counting(), leaf(16, 16)
    with LiveStorages() as live:
        y = remat.checkpoint(policy=policy, offloader=offloader)(function)(x)
        stays = live.bytes() - y.untyped_storage().nbytes()
    travels = offloader.bytes
    with Count():
        gradients = torch.autograd.grad(y.sum(), [x, *WEIGHTS])
    offloader.assert_all_released_once()
    assert_same(torch.autograd.grad(function(x).sum(), [x, *WEIGHTS]), gradients)
    return stays // KIB, travels // KIB, sorted(set(ran))


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
}  # fmt: skip


@pytest.mark.parametrize("kind", POLICIES)
def test_each_has_its_own_decision(kind):
    policy, *expected = POLICIES[kind]
    assert list(run(policy)) == expected


@pytest.mark.skipif(not hasattr(TorchPolicy, "MUST_CPU_OFFLOAD"), reason="torch 2.10 has no such policy")
def test_policies_of_torch_that_offload():
    assert run({torch.matmul: TorchPolicy.MUST_CPU_OFFLOAD})[:2] == (0, 2)
    preferred = {torch.matmul: TorchPolicy.PREFER_CPU_OFFLOAD}
    assert run(preferred | remat.policies.save_discrete)[:2] == (0, 2)
    # Must is stronger than prefer.
    assert run({torch.matmul: TorchPolicy.MUST_RECOMPUTE, torch.Tensor.matmul: TorchPolicy.PREFER_SAVE})[:2] == (0, 0)


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


# --- Where regions come from.


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2))
        self.function = None

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.function is None else self.function(layer, x)
        return x.sin()


class Supporting(Layers):
    """As models of Hugging Face have it."""

    supports_gradient_checkpointing = True
    gradient_checkpointing = False

    def _set_gradient_checkpointing(self, enable=True, gradient_checkpointing_func=None):
        self._gradient_checkpointing_func, self.gradient_checkpointing = gradient_checkpointing_func, enable

    def forward(self, x):
        for layer in self.layers:
            x = self._gradient_checkpointing_func(layer.__call__, x) if self.gradient_checkpointing else layer(x)
        return x.sin()


def checkpointed_by(model, way, **options):
    if way == "modules":
        remat.checkpoint_modules(model, "layers.*", **options)
    elif way == "layers":
        remat.enable_gradient_checkpointing(model, **options)
    else:
        model.function = remat.drop_in(**options)


LISTS = {
    "functions": {F.linear: OFFLOAD, F.gelu: RECOMPUTE},
    "ops": {torch.ops.aten.addmm.default: OFFLOAD, GELU: SAVE},
    "both": {F.linear: OFFLOAD, GELU: SAVE},
    "a list of ops": [torch.ops.aten.addmm.default, torch.ops.aten.gelu],
}


def stepped(model, x, options=()):
    y = model(x)
    report = remat.memory_report(y)
    return [y, *torch.autograd.grad(y.sum(), [x, *model.parameters()])], report.offloaded_bytes


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("way", ["modules", "layers", "drop_in"])
def test_models_with_such_regions_are_copied_and_pickled_before_and_after_a_step(way, kind):
    torch.manual_seed(0)
    model, x = Supporting() if way == "layers" else Layers(), leaf(4, 8)
    expected, _ = stepped(model, x)
    with remat.offload_to(Counting()):
        checkpointed_by(model, way, policy=LISTS[kind])
        for _ in range(2):
            for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
                actual, offloaded = stepped(same, x)
                assert_same(expected, actual)
                assert (offloaded > 0) == (kind != "a list of ops")


def test_what_drop_in_is_given_is_combined_with_what_a_library_says():
    policy = remat.drop_in(policy={torch.matmul: OFFLOAD})
    offloader, x = Counting(), leaf(16, 16)

    def contexts():
        return torch.utils.checkpoint.create_selective_checkpoint_contexts([GELU.default])

    with remat.offload_to(offloader):
        y = policy(block, x, use_reentrant=False, context_fn=contexts)
        assert_same(torch.autograd.grad(block(x).sum(), x), torch.autograd.grad(y.sum(), x))
    assert {info.tensor for info in offloader.sent}


@pytest.mark.parametrize("made", ["outside", "inside"])
def test_a_compiled_region_keeps_the_ops(made):
    policy = {torch.matmul: SAVE, F.gelu: OFFLOAD, torch.ops.aten.exp.default: SAVE, torch.ops.aten.sin.default: None}
    region, x = remat.checkpoint(policy=policy)(block), leaf(16, 16)

    def inside(x):
        decided = {torch.matmul: SAVE, F.gelu: OFFLOAD, torch.ops.aten.exp.default: SAVE}
        return remat.checkpoint(policy=decided)(block)(x)

    compiled = torch.compile(region if made == "outside" else inside, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(block(x).sum(), [x, *WEIGHTS])
    assert_same(expected, torch.autograd.grad(compiled(x).sum(), [x, *WEIGHTS]))


# --- Errors.


def of_layers(**options):
    return remat.checkpoint_modules(Layers(), "layers.*", **options)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ({F.linear: "save"}, r"(?s)says 'save' of .*linear.*CheckpointPolicy\.SAVE, OFFLOAD"),
        ({F.linear: [SAVE]}, "which is no decision"),
        ({"up.*": SAVE}, "neither an op nor a function"),
        ({nn.Linear: OFFLOAD}, r"remat\.save_modules\(Linear\)"),
        ({F.linear: SAVE, torch.Tensor.add_: OFFLOAD}, "never kept"),
        ({block: RECOMPUTE}, r"remat\.op"),
    ],
)
@pytest.mark.parametrize(
    "take", [remat.checkpoint, remat.drop_in, lambda **o: remat.checkpoint_modules(Layers(), "*", **o)]
)
def test_what_is_no_function_or_no_decision_is_an_error_at_once(take, policy, text):
    with pytest.raises(remat.PolicyError, match=text):
        take(policy=policy)


def test_texts_show_the_decision():
    with pytest.warns(remat.RematWarning, match=r"\{torch\.logsumexp: must offload\}.* selected nothing"):
        remat.checkpoint(policy={torch.logsumexp: OFFLOAD, F.gelu: RECOMPUTE})(torch.sin)(leaf(3))
