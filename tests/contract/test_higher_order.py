"""Higher-order ops: flex attention, control flow, compiled code that torch wraps; kept, recomputed and named."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.nn.attention import flex_attention as flex
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import torch_remat as remat
from tests.helpers import OLDEST, assert_clean_state, assert_same, checkpointed, leaf, pairwise, plain

pytestmark = [  # torch warns while it compiles, and that there are faster ways than flex attention's reference code
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::torch_remat.RematWarning"),
    pytest.mark.skipif(OLDEST, reason="what a mode keeps from being compiled, fails for good"),
]
FLEX = torch.ops.higher_order.flex_attention
COND = torch.ops.higher_order.cond
MM = torch.ops.aten.mm
CALLS = {
    "as it is": plain,
    "op": lambda function: remat.op(function, "call"),
    "native": lambda function: functools.partial(remat.native_save_region, "call", function),
}
OPTIONS = {
    "plain": {},
    "products": {"policy": [MM]},
    "higher": {"policy": [FLEX, COND]},
    "both": {"policy": [FLEX, COND, MM]},
    "offload": {
        "policy": lambda ctx, op, *args, **kwargs: remat.CheckpointPolicy.OFFLOAD if op in (FLEX, COND) else None
    },
    "bitwise": {"determinism_check": "bitwise", "policy": [FLEX, COND]},
    "debug": {"debug": True},
}


@pytest.fixture(autouse=True)
def backward_on_a_cpu(monkeypatch):
    """Flex attention refuses gradients on a CPU, though its reference code computes them."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)


class Attention:
    """Flex attention with a mask and a learned bias, which its score function closes over, or without both."""

    def __init__(self, learned=True):
        self.weights = [leaf(8, 8) for _ in range(3)]
        self.bias = leaf(2)
        document = torch.arange(32) // 12
        mask = lambda b, h, i, j: (i >= j) & (document[i] == document[j])  # noqa: E731
        self.mask = flex.create_block_mask(mask, 1, None, 32, 32, device="cpu", BLOCK_SIZE=16) if learned else None
        self.learned = learned

    def attend(self, q, k, v):
        score = lambda s, b, h, i, j: s + self.bias[h] * (i - j)  # noqa: E731
        return flex.flex_attention(q, k, v, score if self.learned else None, self.mask)

    def __call__(self, x, keep=plain):
        q, k, v = (x @ weight for weight in self.weights)
        return (keep(self.attend)(q, k, v).sin() @ self.weights[0]).sin()

    def leaves(self):
        return [*self.weights, *([self.bias] if self.learned else [])]


class Choice(Attention):
    """`torch.cond`, on the same tensors."""

    def __init__(self):
        super().__init__(learned=False)

    def attend(self, q, k, v):
        return torch.cond(q.sum() > 0, lambda q, k: (q * k).sin(), lambda q, k: (q - k).cos(), (q, k)) * v


KINDS = {"learned": Attention, "flex": functools.partial(Attention, learned=False), "cond": Choice}


def gradients(block, function, times=2):
    x = torch.linspace(-1, 1, 512).reshape(1, 2, 32, 8).requires_grad_()
    for _ in range(times):
        found = torch.autograd.grad(function(x).square().sum(), [x, *block.leaves()])
    return found


@pairwise(kind=KINDS, options=OPTIONS, call=CALLS, ids=str)
def test_gradients_are_equal(kind, options, call):
    block = KINDS[kind]()
    expected = gradients(block, block, 1)
    region = checkpointed(lambda x: block(x, CALLS[call]), **OPTIONS[options])
    assert_same(expected, gradients(block, region))
    assert_same(expected, gradients(block, checkpointed(lambda x: region(x * 1))))
    assert_same(expected, gradients(block, block, 1))  # and plain code runs as before
    assert_clean_state()


class Runs:
    """Counts how often the reference code of flex attention runs."""

    def __init__(self, monkeypatch):
        module = sys.modules["torch._higher_order_ops.flex_attention"]
        original = module.math_attention
        self.count = 0

        def counted(*args, **kwargs):
            self.count += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, "math_attention", counted)


def sac(*ops):
    return functools.partial(create_selective_checkpoint_contexts, list(ops))


@pytest.mark.parametrize(
    ("wrap", "runs"),
    [
        (checkpointed, 2),
        (lambda f: checkpointed(f, policy=[MM]), 2),
        (lambda f: checkpointed(f, policy=[FLEX]), 1),
        (lambda f: checkpointed(f, policy=[FLEX, MM]), 1),
        (lambda f: checkpointed(f, policy=remat.policies.save_attention), 1),
        (lambda f: checkpointed(f, policy=lambda ctx, op, *args, **kwargs: op is FLEX), 1),
        (lambda f: checkpointed(f, policy=remat.save_names("flex_attention_0*")), 1),
        (lambda f: lambda x: remat.drop_in()(f, x, use_reentrant=False, context_fn=sac(FLEX, MM.default)), 1),
        (lambda f: checkpointed(lambda x: f(x, CALLS["op"])), 1),
        (lambda f: checkpointed(lambda x: f(x, CALLS["op"]), policy=[MM]), 1),
        (lambda f: checkpointed(lambda x: f(x, CALLS["native"])), 1),
        (lambda f: checkpointed(lambda x: f(x, CALLS["native"]), policy=[MM]), 1),
    ],
)
@pytest.mark.parametrize("learned", [False, True])
def test_saved_attention_runs_once(monkeypatch, wrap, runs, learned):
    block = Attention(learned)
    expected = gradients(block, block, 1)
    counted = Runs(monkeypatch)
    assert_same(expected, gradients(block, wrap(block), 1))
    assert counted.count == runs


def test_products_are_kept_beside_attention():
    block, x = Attention(), leaf(1, 2, 32, 8)
    with_products = [checkpointed(block, policy=policy)(x) for policy in ([FLEX], [FLEX, MM])]
    few, more = (remat.memory_report(y).bytes for y in with_products)
    assert more - few == 4 * x.nbytes


def test_names_lists_and_reports_have_the_op():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.Module()
            self.attention.forward = lambda x: flex.flex_attention(x, x, x)

        def forward(self, x):
            return self.attention(x.sin()).sin()

    x = leaf(1, 2, 16, 8)
    layer = Layer()
    assert "attention.flex_attention_0_0" in str(remat.list_names(layer)(x))
    y = checkpointed(layer, policy=remat.save_names("attention.flex_attention_0*"))(x)
    assert "attention.flex_attention_0_0" in str(remat.memory_report(y))
    explained = str(remat.explain(checkpointed(layer, policy=[FLEX]))(x))
    assert "flex_attention" in explained


def test_the_function_of_users_means_its_higher_order_op():
    x = leaf(1, 2, 16, 8)

    def block(x):
        return flex.flex_attention(x.sin(), x, x).exp()

    for policy in ([flex.flex_attention], [FLEX], remat.policies.save_attention):
        y = checkpointed(block, policy=policy)(x)
        assert "flex_attention_0" in str(remat.memory_report(y))
        assert_same(torch.autograd.grad(block(x).sum(), x), torch.autograd.grad(y.sum(), x))


def test_debug_shows_the_op_and_its_tensors():
    flips = iter((False, True))

    def block(x):
        out = flex.flex_attention(x, x, x)
        return (out if next(flips) else out[..., :4]).sin()

    y = checkpointed(block, debug=True)(leaf(1, 2, 16, 8))
    with pytest.raises(remat.MismatchError, match=r"flex_attention\(float32\[1, 2, 16, 8\]") as raised:
        y.sum().backward()
    assert "at test_higher_order.py" in str(raised.value)


@pytest.mark.parametrize("policy", [None, [FLEX], [MM]])
def test_results_in_any_tree_are_equal(policy):
    """`return_lse` gives two results, `scan` a carry and outputs in a dict."""
    from torch._higher_order_ops.scan import scan

    def block(x):
        out, lse = flex.flex_attention(x.sin(), x, x, return_lse=True)
        last, rows = scan(lambda carry, row: (carry + row["a"], {"b": carry * row["a"]}), x[0, 0, 0], {"a": x[0, 1]})
        return (out * lse.unsqueeze(-1)).sin() * last.cos() + rows["b"].sin()

    x = leaf(1, 2, 16, 8)
    expected = torch.autograd.grad(block(x).sum(), x)
    if policy is not None:
        policy = [*policy, torch.ops.higher_order.scan]
    assert_same(expected, torch.autograd.grad(checkpointed(block, policy=policy)(x).sum(), x))
    native = checkpointed(lambda x: remat.native_save_region("all", block, x).exp())
    assert_same(torch.autograd.grad(block(x).exp().sum(), x), torch.autograd.grad(native(x).sum(), x))


_FRESH = """
    import warnings; warnings.simplefilter("ignore")
    import torch, torch_remat as remat, torch.nn.attention.flex_attention as flex
    flex._validate_device = lambda *tensors: None
    x = torch.randn(1, 2, 16, 8, requires_grad=True)
    attend = lambda x: flex.flex_attention(x, x, x)
    def gradient(function): return torch.autograd.grad(function(x).sin().sum(), x)[0]
    region = remat.checkpoint
    way = {way}
    first = gradient(way)
    assert torch.equal(first, gradient(attend)), "plain code after it"
    assert torch.equal(first, gradient(way)), "again"
"""
_WAYS = {
    "op": 'region()(remat.op(attend, "f"))',
    "native": 'region()(lambda x: remat.native_save_region("f", attend, x))',
    "native, compiled": """region()(lambda x: remat.native_save_region(
        "f", lambda x: torch.compile(flex.flex_attention, backend="eager")(x, x, x), x))""",
    "policy": "region(policy=[torch.ops.aten.mm])(attend)",
    "bitwise": 'region(determinism_check="bitwise")(attend)',
    "debug": "region(debug=True)(attend)",
    "names": "(remat.list_names(attend)(x), remat.explain(region()(attend))(x)) and attend",
}


# A process for each takes seconds.
@pytest.mark.parametrize(
    "way", ["native", *(pytest.param(way, marks=pytest.mark.slow) for way in _WAYS if way != "native")]
)
def test_plain_attention_runs_afterwards_in_a_fresh_process(way):
    program = textwrap.dedent(_FRESH.replace("{way}", _WAYS[way]))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(torch._higher_order_ops, "inductor_compiled_code"), reason="torch before 2.11")
@pytest.mark.slow
def test_compiled_code_that_torch_wraps_is_kept(monkeypatch):
    hop = torch._higher_order_ops.inductor_compiled_code
    compiled = torch.compile(
        lambda q, k, _unused: ((q @ k.transpose(-1, -2)).softmax(-1) @ q, q.transpose(0, 1)),
        options={"wrap_inductor_compiled_regions": True},
    )
    key = next(key for key in hop.py_kernels if key.name == "CompositeExplicitAutograd")
    original, runs = hop.py_kernels[key], []
    monkeypatch.setitem(hop.py_kernels, key, lambda *args, **kwargs: (runs.append(1), original(*args, **kwargs))[1])
    hop._dispatch_cache.clear()
    weight, x = leaf(8, 8), leaf(2, 4, 8)

    def block(x):
        out, view = compiled(x @ weight, (x @ weight).sin(), (x @ weight) @ weight)
        return (out @ weight + view.transpose(0, 1)).sin()

    expected = torch.autograd.grad(block(x).sum(), [x, weight])
    for policy, count in ([MM], 2), ([hop], 1), ([hop, MM], 1), (remat.save_names("inductor_compiled_code*"), 1):
        runs.clear()
        y = checkpointed(block, policy=policy)(x)
        assert_same(expected, torch.autograd.grad(y.sum(), [x, weight]))
        assert len(runs) == count, policy
    hop._dispatch_cache.clear()


@pytest.mark.parametrize("policy", [[MM], [MM, torch.ops.aten.sin], "kernel"])
def test_kernel_that_writes_its_arguments_is_equal(monkeypatch, policy):
    """A kernel of Triton, of which nothing says what it writes; here its op runs PyTorch instead."""
    kernel = torch.ops.higher_order.triton_kernel_wrapper_mutation

    def write(x, out):
        out.copy_(x * 2)

    key = next(key for key in kernel.py_kernels if key.name == "CompositeExplicitAutograd")
    monkeypatch.setitem(kernel.py_kernels, key, lambda **given: write(**given["kwargs"]))
    kernel._dispatch_cache.clear()

    def double(x):
        out = torch.empty_like(x)
        with torch.no_grad():
            kernel(kernel_idx=0, constant_args_idx=0, grid=[], tma_descriptor_metadata={}, kwargs={"x": x, "out": out})
        return out

    weight, x = leaf(8, 8), leaf(4, 8)

    def block(x):
        h = (x @ weight).sin()
        return (double(h) * h) @ weight

    expected = torch.autograd.grad(block(x).sum(), [x, weight])
    region = checkpointed(block, policy=[kernel] if policy == "kernel" else policy)
    assert_same(expected, torch.autograd.grad(region(x).sum(), [x, weight]))
    native = checkpointed(lambda x: remat.native_save_region("all", block, x) * 1)
    assert_same(expected, torch.autograd.grad(native(x).sum(), [x, weight]))
    kernel._dispatch_cache.clear()
