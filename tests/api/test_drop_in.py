"""`drop_in`: called as torch's own checkpoint is, by libraries that take such a function."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import pickle
from collections import defaultdict

import pytest
import torch
import torch.utils.checkpoint as of_torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import torch_remat as remat
from tests.helpers import CountOps, Mlp, assert_same, leaf, no_other_regions, train_step
from torch_remat.errors import MismatchError, UsageError

aten = torch.ops.aten
PRODUCTS = [aten.addmm.default, aten.mm.default]  # no layer with a bias runs mm


class Block(nn.Module):
    """A layer that is called with keyword arguments, and has dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x, scale=None, training=True):
        x = nn.functional.dropout(self.mlp(x), 0.2, training)
        return x if scale is None else x * scale


@pytest.fixture
def block():
    return Block()


X = torch.linspace(-1, 1, 32).reshape(4, 8)


def kept(run, *args, **kwargs):
    """Return the names of what a region keeps."""
    with no_other_regions():
        (region,) = remat.memory_report(run(*args, **kwargs)).regions
        by_function = [f"{op.name}.{tensor.label}" for op in region.ops for tensor in op.tensors]
        return [tensor.label for tensor in region.tensors if tensor.label != "random state"] + by_function


def products_in_replay(run, *args, **kwargs):
    loss = run(*args, **kwargs).sum()
    with CountOps() as ops:
        loss.backward()
    return ops.counts["addmm"]


def test_signature_is_that_of_torch():
    theirs, ours = (inspect.signature(function).parameters for function in (torch_checkpoint, remat.drop_in()))
    assert {name: ours[name].kind for name in theirs} == {name: theirs[name].kind for name in theirs}
    # Before 2.14 torch takes one out of its keyword arguments, and has no other.
    assert ours.keys() - theirs.keys() <= {"preserve_rng_state", "respect_saved_tensors_hooks"}


SCALE = {"scale": torch.tensor(2.0, requires_grad=True)}  # torch's reentrant checkpoint takes no keyword arguments


@pytest.mark.parametrize("kwargs", [{}, SCALE], ids=["no keywords", "keywords"])
@pytest.mark.parametrize("given", [{}, {"use_reentrant": False}], ids=str)
def test_gradients_are_those_of_torch(block, given, kwargs):
    expected = train_step(block, X, torch_checkpoint, use_reentrant=False, **kwargs)
    assert_same(expected, train_step(block, X, remat.drop_in(), **given, **kwargs))


def test_use_reentrant_is_handed_on_to_torch(block):
    expected = train_step(block, X, torch_checkpoint, use_reentrant=True)
    assert_same(expected, train_step(block, X, remat.drop_in(), use_reentrant=True))
    with no_other_regions():
        x = X.clone().requires_grad_()
        y = remat.drop_in(preserve_rng_state=False)(block, x, use_reentrant=True)
        assert not remat.memory_report(y).regions
    assert type(y.grad_fn).__name__ == "CheckpointFunctionBackward"
    assert y.grad_fn.preserve_rng_state is False
    assert type(remat.drop_in()(use_reentrant=True)(block)(x).grad_fn).__name__ == "CheckpointFunctionBackward"
    decorated = remat.drop_in(policy=PRODUCTS)(use_reentrant=False)(block)
    assert products_in_replay(decorated, X) == 0
    with pytest.raises(ValueError, match="only supported when"):
        remat.drop_in()(block, x, use_reentrant=True, debug=True)
    with pytest.raises(UsageError, match=r"drop_in\(policy=\.\.\.\) returned was called with use_reentrant=True"):
        remat.drop_in(policy=remat.policies.save_matmuls)(block, X, use_reentrant=True)


class CallingItself(Block):
    """Checkpoints its own call, as layers of ``transformers`` before 5.24 do."""

    def __call__(self, x, scale):
        return remat.drop_in(policy=remat.save_names("mlp.gelu_*"))(functools.partial(super().__call__, scale=scale), x)


def test_partial_of_the_call_of_a_module_is_named_from_the_module_and_has_inputs():
    block, scale = CallingItself(), torch.tensor(2.0)
    assert kept(block, X, scale) == ["args[0]", "kwargs['scale']", "mlp.gelu_0_0"]
    assert remat.memory_report(block(X, scale)).regions[0].name == "CallingItself"


class Doubling(torch.autograd.graph.saved_tensors_hooks):
    """Hooks that note the shapes of what they pack."""

    def __init__(self):
        self.packed = []
        super().__init__(self.note, lambda tensor: tensor)

    def note(self, tensor):
        self.packed.append(tuple(tensor.shape))
        return tensor.clone()

    def __enter__(self):
        super().__enter__()
        return self


PRODUCTS_KEPT = {"context_fn": functools.partial(create_selective_checkpoint_contexts, PRODUCTS)}


@pytest.mark.parametrize("hooks_around", [False, True])
@pytest.mark.parametrize("keeps", ["nothing", "contexts", "policy"])
@pytest.mark.parametrize("respects", [None, True, False])
def test_what_is_kept_passes_the_hooks_around_unless_that_is_refused(block, respects, keeps, hooks_around):
    """Torch's own takes the option from 2.14 on; here it may be passed with any torch."""
    expected = train_step(block, X, torch_checkpoint, use_reentrant=False)
    run = remat.drop_in(policy=PRODUCTS if keeps == "policy" else None)
    options = {"respect_saved_tensors_hooks": respects, **(PRODUCTS_KEPT if keeps == "contexts" else {})}
    with Doubling() if hooks_around else contextlib.nullcontext() as hooks:
        if respects is False and hooks_around and keeps != "nothing":
            for call in (functools.partial(run, block, **options), run(**options)(block)):
                with pytest.raises(UsageError, match="respect_saved_tensors_hooks=False"):
                    call(X)
            return
        assert_same(expected, train_step(block, X, run, **options))
    if hooks_around:
        assert ((4, 16) in hooks.packed) == (keeps != "nothing"), hooks.packed


def test_hooks_of_regions_around_are_no_hooks_of_users(block):
    inner = remat.drop_in()(respect_saved_tensors_hooks=False, **PRODUCTS_KEPT)(block)
    expected = train_step(block, X, torch_checkpoint, use_reentrant=False)
    for outer in (remat.drop_in(), functools.partial(torch_checkpoint, use_reentrant=False)):
        assert_same(expected, train_step(block, X, lambda block, x, outer=outer: outer(inner, x)))


def policy_function(ctx, op, *args, **kwargs):
    return of_torch.CheckpointPolicy.MUST_SAVE if op in PRODUCTS else of_torch.CheckpointPolicy.PREFER_RECOMPUTE


def counting_contexts():
    """As torchtitan does: every other product is saved, with a counter for each region."""
    counts = defaultdict(int)

    def policy(ctx, op, *args, **kwargs):
        counts[ctx.is_recompute, op] += 1
        return op in PRODUCTS and counts[ctx.is_recompute, op] % 2 == 1

    return create_selective_checkpoint_contexts(policy)


FIRST = ["args[0]", "mlp.up.addmm_0_0"]
BOTH = [*FIRST, "mlp.down.addmm_0_0"]  # the dropout after it runs again, for its mask
CONTEXTS = {
    "a list": (functools.partial(create_selective_checkpoint_contexts, PRODUCTS), BOTH),
    "a list of packets": (functools.partial(create_selective_checkpoint_contexts, [aten.addmm]), BOTH),
    "a function": (functools.partial(create_selective_checkpoint_contexts, policy_function), BOTH),
    "in a lambda": (lambda: create_selective_checkpoint_contexts(PRODUCTS), BOTH),
    "in a function with a counter": (counting_contexts, FIRST),
}


@pytest.mark.parametrize("case", CONTEXTS)
def test_contexts_of_selective_checkpointing_are_a_policy(block, case):
    context_fn, names = CONTEXTS[case]
    expected = train_step(block, X, torch_checkpoint, use_reentrant=False)
    assert_same(expected, train_step(block, X, remat.drop_in(), use_reentrant=False, context_fn=context_fn))
    assert kept(remat.drop_in(), block, X, context_fn=context_fn) == names
    assert products_in_replay(remat.drop_in(), block, X, context_fn=context_fn) == int("counter" in case)


def test_contexts_are_combined_with_a_policy_of_ones_own(block):
    for policy in (remat.save_names("mlp.gelu_*"), {aten.gelu: remat.CheckpointPolicy.SAVE}):
        saves_gelu = remat.drop_in(policy=policy)
        assert kept(saves_gelu, block, X) == ["args[0]", "mlp.gelu_0_0"]
        assert kept(saves_gelu, block, X, **PRODUCTS_KEPT) == [*FIRST, "mlp.gelu_0_0", BOTH[2]]


@pytest.mark.parametrize(
    "made", [functools.partial, lambda function, *args: lambda: function(*args)], ids=["partial", ""]
)
def test_what_is_kept_may_be_changed_if_the_contexts_say_so(made):
    def function(x):
        h = x.exp()
        y = h.sin()
        h.add_(1)
        return y.cos()

    x = leaf(3)
    for may in (False, True):
        context_fn = made(create_selective_checkpoint_contexts, [aten.exp.default], may)
        with contextlib.nullcontext() if may else pytest.raises(RuntimeError):
            remat.drop_in()(function, x, context_fn=context_fn).sum().backward()


@pytest.mark.parametrize("switch", [None, False, True])
@pytest.mark.parametrize("early_stop", [False, True])
def test_early_stop_and_its_switch_are_those_of_torch(switch, early_stop):
    ran = []

    def function(x):
        y = x.exp().sin().exp()
        ran.append("all of it")
        return y

    counts = []
    for run in (torch_checkpoint, remat.drop_in()):
        ran.clear()
        x = torch.randn(3000, requires_grad=True)
        with contextlib.nullcontext() if switch is None else of_torch.set_checkpoint_early_stop(switch):
            y = run(function, x, use_reentrant=False, early_stop=early_stop)
        y.sum().backward()
        counts.append(len(ran))
    stops = early_stop if switch is None else switch
    assert counts == [1 if stops else 2] * 2


@pytest.mark.parametrize("given", ["call", "switch", "option"])
def test_debug_and_its_switch_show_the_ops_of_both_phases(given):
    def function(x):
        return x.sin().exp() if not remat.is_recomputing() else x.reshape(1, 3).sin().exp()

    switch = of_torch.set_checkpoint_debug_enabled(True) if given == "switch" else contextlib.nullcontext()
    run = remat.drop_in(debug=True) if given == "option" else remat.drop_in()
    with switch:
        y = run(function, leaf(3), use_reentrant=False, **({"debug": True} if given == "call" else {}))
    with pytest.raises(MismatchError, match=r"reshape|view"):
        y.sum().backward()
    with of_torch.set_checkpoint_debug_enabled(False), CountOps() as ops:
        remat.drop_in(debug=True)(torch.sin, leaf(3)).sum().backward()
    assert ops.counts["sin"] == 1


def test_options_of_drop_in_come_before_those_of_a_call():
    def function(x):
        factor = (1.0 + 1e-6) if remat.is_recomputing() else 1.0  # which changes the last bits
        return (x * factor).exp().sin()

    def run(checkpoint, **options):
        checkpoint(function, leaf(3), **options).sum().backward()

    run(remat.drop_in(), determinism_check="default")
    with pytest.raises(MismatchError):
        run(remat.drop_in(), determinism_check="bitwise")
    with pytest.raises(MismatchError):
        run(remat.drop_in(determinism_check="bitwise"), determinism_check="default")


def test_copies_and_pickles_do_the_same(block):
    run = remat.drop_in(policy=remat.policies.save_matmuls)
    block.run = functools.partial(run, use_reentrant=False)
    block.decorated = remat.drop_in()(use_reentrant=False)(block.mlp)
    for duplicate in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert "mlp.up.linear_0.out" in kept(duplicate.run, duplicate, X)
        assert duplicate.decorated.function is duplicate.mlp
    assert repr(pickle.loads(pickle.dumps(run))) == "drop_in(policy=save_matmuls)"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch")
@pytest.mark.parametrize(("policy", "more"), [(None, PRODUCTS_KEPT), (PRODUCTS[:1], {})], ids=["contexts", "a policy"])
def test_compiled_it_is_one_graph(block, policy, more):
    torch._dynamo.reset()
    run = functools.partial(remat.drop_in(policy=policy), use_reentrant=False, training=False, **more)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda block, x: run(block, x), backend=backend, fullgraph=True)
    assert_same(train_step(block, X, run), train_step(block, X, compiled))
    targets = [str(node.target) for graph in backend.graphs for node in graph.graph.nodes]
    assert sum("checkpoint" in target for target in targets) == 1
    torch._dynamo.reset()
