"""Op-level policies: what they are given, what they may be, and that they cost no more than torch's own.

The peer is torch's selective activation checkpointing (SAC): the same functions, no more bytes or ops.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy
from torch.utils.checkpoint import SelectiveCheckpointContext

import torch_remat as remat
from tests.helpers import (
    assert_clean_state,
    assert_equal_gradients,
    assert_same,
    leaf,
    pairwise,
    shown,
)
from tests.native_programs import (
    aten,
    full,
    kept,
    peak_bytes,
    region,
    replayed_ops,
    retained_bytes,
    sac,
)
from tests.ways import everything, nothing

MM = [aten.mm.default]


def sine_chain(x, w):
    """Three times a matmul and a sine."""
    for _ in range(3):
        x = (x @ w).sin()
    return x


def mixed(x, w):
    """Products, a softmax, views, a norm, several outputs."""
    q, k = (x @ w).chunk(2, -1)
    scores = (q @ k.t()).softmax(-1)
    h = F.layer_norm(scores @ x, (4,)).relu()
    values, index = h.sort(-1)
    return (values.exp() + h.gather(-1, index)).view(2, -1, 2).transpose(0, 1) * 2


FUNCTIONS = [sine_chain, mixed]


def matmuls(ctx, op, *args, **kwargs):
    return TorchPolicy.PREFER_SAVE if op is aten.mm.default else TorchPolicy.MUST_RECOMPUTE


def by_output(ctx, op, *args, **kwargs):
    return isinstance(ctx.op_output, torch.Tensor) and ctx.op_output.numel() >= 16 and op is not aten.t.default


def by_arguments(ctx, op, *args, **kwargs):
    return op is aten.mm.default and args[0].shape[-1] == args[1].shape[0] == 4


def every_other_matmul():
    """As torchtitan writes it: a policy with state, which counts the two phases apart."""
    counts = defaultdict(int)

    def policy(ctx, op, *args, **kwargs):
        phase = "recompute" if ctx.is_recompute else "forward"
        if op is aten.mm.default:
            counts[phase] += 1
        return (
            TorchPolicy.MUST_SAVE if op is aten.mm.default and counts[phase] % 2 == 0 else TorchPolicy.PREFER_RECOMPUTE
        )

    return policy


POLICIES = {
    "everything": lambda: everything,
    "nothing": lambda: nothing,
    "matmuls": lambda: matmuls,
    "output": lambda: by_output,
    "arguments": lambda: by_arguments,
    "every other": every_other_matmul,
    "list": lambda: list(MM),
    "falls through": lambda: lambda ctx, op, *args, **kwargs: TorchPolicy.MUST_SAVE if op is aten.mm.default else None,
}


# Torch 2.10 and 2.11 ask a policy before the op runs, so that their own checkpoint has no output to tell.


TELLS_OUTPUT = hasattr(SelectiveCheckpointContext(is_recompute=False), "op_output")
POLICIES_OF_PEER = [name for name in POLICIES if name != "output" or TELLS_OUTPUT]


@pairwise(function=FUNCTIONS, policy=POLICIES_OF_PEER)
def test_never_more_ops_or_bytes_than_the_peer(function, policy):
    inputs = leaf(4, 4), leaf(4, 4)

    def ours():
        return region(POLICIES[policy]())

    def peers():
        return sac(POLICIES[policy]())

    replayed = replayed_ops(function, ours(), inputs)
    assert not Counter(replayed) - Counter(replayed_ops(function, peers(), inputs))
    if policy == "everything":
        assert replayed == {}
    if policy == "nothing":
        assert replayed
        assert not Counter(replayed) - Counter(replayed_ops(function, full, inputs))
    assert kept(ours()(function), inputs).bytes <= kept(peers()(function), inputs).bytes
    assert retained_bytes(ours()(function), inputs) <= retained_bytes(peers()(function), inputs)
    assert peak_bytes(ours()(function), inputs) <= peak_bytes(peers()(function), inputs)


# What the policy is given


def test_policy_sees_each_op_once_in_forward_with_its_output_and_arguments():
    seen = []

    def policy(ctx, op, *args, **kwargs):
        assert isinstance(op, torch._ops.OpOverload)
        seen.append((ctx.is_recompute, op, args, kwargs, ctx.op_output))
        return TorchPolicy.PREFER_RECOMPUTE

    x, w = leaf(4, 4), leaf(4, 4)
    y = region(policy)(lambda x, w: torch.add((x @ w).sin(), x, alpha=3).sort(dim=-1)[0])(x, w)
    forward = [entry for entry in seen if not entry[0]]
    ops = [op for _, op, *_ in forward]
    assert ops == [aten.mm.default, aten.sin.default, aten.add.Tensor, aten.sort.default]
    for _, op, args, kwargs, output in forward:
        again = op(*args, **kwargs)
        assert_same(again, output)
    assert forward[2][3] == {"alpha": 3}
    y.sum().backward()
    assert [entry for entry in seen if not entry[0]] == forward
    assert all(op in ops for recomputing, op, *_ in seen if recomputing)
    seen.clear()  # the policy is the region's: its output here would be a cycle through the graph


def test_policy_is_called_for_the_ops_that_the_peer_calls_it_for():
    def recorded():
        seen = []

        def policy(ctx, op, *args, **kwargs):
            if not ctx.is_recompute:
                seen.append((op, [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in args]))
            return op is aten.mm.default

        return seen, policy

    for function in FUNCTIONS:
        inputs = leaf(4, 4), leaf(4, 4)
        (ours, one), (peer, other) = recorded(), recorded()
        region(one)(function)(*inputs).sum().backward()
        sac(other)(function)(*inputs).sum().backward()
        assert ours == peer


FORMS = {
    "method": lambda x, w: (x @ w).sin(),
    "comparison": lambda x, w: x * (x > 0) @ w,
}


@pairwise(form=FORMS, value=["save", object(), 2], ids=shown)
def test_policy_that_returns_something_else_is_an_error(value, form):
    """Operators make "unsupported operand" of a TypeError, which this is, too."""
    with pytest.raises(remat.PolicyError, match="the policy returned") as caught:
        region(lambda ctx, op, *args, **kwargs: value, region_name="block")(FORMS[form])(leaf(4, 4), leaf(4, 4))
    assert caught.value.__cause__ is None
    assert caught.value.region == "block"
    assert_clean_state()
    with pytest.raises(TypeError, match="positional argument"):
        region(lambda ctx, op: True)(FORMS[form])(leaf(4, 4), leaf(4, 4))


def test_state_of_a_policy_function_begins_anew_with_each_forward():
    seen = []

    def policy(ctx, op, *args, **kwargs):
        seen.append(ctx.state.get("count", 0))
        ctx.state["count"] = seen[-1] + 1
        return False

    checkpointed = region(policy | remat.policies.save_every_other_matmul)(lambda x: x.sin().exp().cos())
    for _ in range(2):
        checkpointed(leaf(3)).sum().backward()
    assert seen == [0, 1, 2, 0, 1, 2]


# Lists


def test_wrong_policy_or_list_entry_is_an_error_that_helps():
    for wrong in ("mm", "aten.mm.default", None):
        with pytest.raises((ValueError, TypeError), match=r"torch\.ops\.aten\.mm\.default") as caught:
            region([aten.sin.default, wrong])(sine_chain)(leaf(4, 4), leaf(4, 4))
        assert str(wrong) in str(caught.value)
    for wrong in (3, "attention.*", object()):
        with pytest.raises(TypeError):
            region(wrong)(sine_chain)(leaf(4, 4), leaf(4, 4))


# In-place changes, as SAC documents them


def test_check_can_be_switched_off():
    """The user saves the output of the in-place op too, as the documentation of SAC describes."""
    ops = [aten.mm.default, aten.add_.Tensor]

    def function(x, w):
        h = x @ w
        h.add_(1)
        return h.sin()

    inputs = leaf(4, 4), leaf(4, 4)
    expected = torch.autograd.grad(function(*inputs).sum(), inputs)
    for wrap in (sac, region):
        wrapped = wrap(ops, allow_cache_entry_mutation=True)(function)
        assert_same(expected, torch.autograd.grad(wrapped(*inputs).sum(), inputs))


# Entries that match nothing


def test_all_patterns_that_match_nothing_are_named():
    with pytest.raises(remat.PolicyError) as caught:
        region(remat.save_names("mm_*", "first.*", "second.*", "third"))(lambda x, w: x @ w)(leaf(3, 3), leaf(3, 3))
    for pattern in ("first.*", "second.*", "third"):
        assert pattern in caught.value.what
    assert "mm_*" not in caught.value.what
    assert caught.value.tensor == "first.*"


def test_packet_means_all_its_overloads_and_an_overload_itself_alone():
    function = lambda x: (x * 2).sin().exp()  # noqa: E731
    for listed, count in ((aten.mul, 0), (aten.mul.Tensor, 0), (aten.mul.Scalar, 1)):
        assert replayed_ops(function, region([listed]), (leaf(3),)).get("mul", 0) == count, listed
    overloads = aten.sum.overloads()
    for function, overload in ((lambda x: x.sum().sin(), "default"), (lambda x: x.sum(0).sin(), "dim_IntList")):
        assert overload in overloads
        assert "sum" not in replayed_ops(function, region([aten.sum]), (leaf(3, 3),)), overload


def test_exception_of_the_function_comes_before_that_of_an_unmatched_entry():
    def function(x):
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        region(remat.save_names("mm_*"))(function)(leaf(3))
    assert_clean_state()


# --- Results in tensor subclasses


class Wrapped(Tensor):
    """Stands for another tensor, as the result of a collective does that is not waited for yet."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(value):
            return unwrap(value.inner) if isinstance(value, Wrapped) else value

        return func(*map(unwrap, args), **(kwargs or {}))


def read_by_an_op(x, w):
    return (Wrapped((x @ w).sin().detach()) + x).exp() @ w


def saved_by_autograd(x, w):
    return x * Wrapped(Wrapped((x @ w).sin().detach()))


@pytest.mark.parametrize("saved", [(), (aten.mm.default,), (aten.mm.default, aten.sin.default)])
@pytest.mark.parametrize("function", [read_by_an_op, saved_by_autograd], ids=lambda f: f.__name__)
def test_what_a_wrapper_has_inside_is_kept_or_made_again(function, saved):
    inputs = leaf(4, 4), leaf(4, 4)

    def policy(ctx, op, *args, **kwargs):
        return op in saved

    assert_equal_gradients(function, region(policy)(function), inputs)
    replayed = replayed_ops(function, region(policy), inputs)
    assert not {op.overloadpacket.__name__ for op in saved} & set(replayed)
