"""Op-level policies beside torch's selective activation checkpointing (SAC): same functions, no more bytes or ops."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy
from torch.utils.checkpoint import SelectiveCheckpointContext

import torch_remat as remat
from tests.helpers import (
    alive,
    assert_clean_state,
    assert_equal_gradients,
    assert_same,
    assert_same_program,
    leaf,
    pairwise,
    watch,
)
from tests.native_programs import (
    ATTENTION,
    MATMULS,
    TransformerBlock,
    aten,
    kept,
    peak_bytes,
    region,
    replayed_ops,
    retained_bytes,
    sac,
    uncollected,
)

MM = [aten.mm.default]


def sine_chain(x, w):
    """Three times a matmul and a sine."""
    for _ in range(3):
        x = (x @ w).sin()
    return x


def sigmoid_of_torchs_documentation(x, y):
    return torch.sigmoid(torch.matmul(torch.matmul(x, y), y)) * y


def mixed(x, w):
    """Products, a softmax, views, a norm, several outputs."""
    q, k = (x @ w).chunk(2, -1)
    scores = (q @ k.t()).softmax(-1)
    h = F.layer_norm(scores @ x, (4,)).relu()
    values, index = h.sort(-1)
    return (values.exp() + h.gather(-1, index)).view(2, -1, 2).transpose(0, 1) * 2


def branches(x, w):
    a = (x @ w).exp()
    b = (a @ w).sin()
    return a * b + (b @ x).cos()


FUNCTIONS = [sine_chain, sigmoid_of_torchs_documentation, mixed, branches]


def everything(ctx, op, *args, **kwargs):
    return TorchPolicy.MUST_SAVE


def nothing(ctx, op, *args, **kwargs):
    return TorchPolicy.PREFER_RECOMPUTE


def matmuls(ctx, op, *args, **kwargs):
    return TorchPolicy.PREFER_SAVE if op is aten.mm.default else TorchPolicy.MUST_RECOMPUTE


def by_bool(ctx, op, *args, **kwargs):
    return op in (aten.mm.default, aten.exp.default)


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
    "bool": lambda: by_bool,
    "output": lambda: by_output,
    "arguments": lambda: by_arguments,
    "every other": every_other_matmul,
    "list": lambda: list(MM),
}
# Torch 2.10 and 2.11 ask a policy before the op runs, so that their own checkpoint has no output to tell.
TELLS_OUTPUT = hasattr(SelectiveCheckpointContext(is_recompute=False), "op_output")
POLICIES_OF_PEER = [name for name in POLICIES if name != "output" or TELLS_OUTPUT]


@pairwise(function=FUNCTIONS, policy=POLICIES, early_stop=[True, False])
def test_gradients_are_those_of_plain_autograd(function, policy, early_stop):
    inputs = leaf(4, 4), leaf(4, 4)
    assert_equal_gradients(function, region(POLICIES[policy](), early_stop=early_stop)(function), inputs)


@pairwise(function=FUNCTIONS, policy=POLICIES_OF_PEER)
def test_never_more_ops_in_replay_than_the_peer(function, policy):
    inputs = leaf(4, 4), leaf(4, 4)
    ours = replayed_ops(function, region(POLICIES[policy]()), inputs)
    peer = replayed_ops(function, sac(POLICIES[policy]()), inputs)
    assert not Counter(ours) - Counter(peer), (ours, peer)


@pairwise(function=FUNCTIONS, policy=POLICIES_OF_PEER)
def test_never_more_bytes_than_the_peer(function, policy):
    inputs = leaf(4, 4), leaf(4, 4)
    ours = kept(region(POLICIES[policy]())(function), inputs).bytes
    peer = kept(sac(POLICIES[policy]())(function), inputs).bytes
    assert ours <= peer
    ours = retained_bytes(region(POLICIES[policy]())(function), inputs)
    assert ours <= retained_bytes(sac(POLICIES[policy]())(function), inputs)


@pairwise(function=FUNCTIONS, policy=POLICIES_OF_PEER)
def test_peak_is_not_above_the_peers(function, policy):
    inputs = leaf(32, 4), leaf(4, 4)
    if function is not sine_chain:
        inputs = leaf(4, 4), leaf(4, 4)
    ours = peak_bytes(region(POLICIES[policy]())(function), inputs)
    assert ours <= peak_bytes(sac(POLICIES[policy]())(function), inputs)


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


def test_context_has_a_name_for_each_op():
    names = {}

    def policy(ctx, op, *args, **kwargs):
        names.setdefault(ctx.name, []).append(op)
        return False

    region(policy)(sine_chain)(leaf(4, 4), leaf(4, 4))
    assert all(isinstance(name, str) and name for name in names)
    assert all(len(ops) == 1 for ops in names.values())
    assert len(names) == 6
    assert sum("mm" in name for name in names) == 3
    assert sum("sin" in name for name in names) == 3


def test_our_own_policy_values_are_understood():
    x, w = leaf(4, 4), leaf(4, 4)

    def policy(ctx, op, *args, **kwargs):
        return remat.CheckpointPolicy.SAVE if op is aten.mm.default else remat.CheckpointPolicy.RECOMPUTE

    assert_equal_gradients(sine_chain, region(policy)(sine_chain), (x, w))
    assert replayed_ops(sine_chain, region(policy), (x, w)) == {"sin": 2}


FORMS = {
    "method": lambda x, w: (x @ w).sin(),
    "operator": lambda x, w: x @ w,
    "reflected": lambda x, w: 2 * x @ w,
    "comparison": lambda x, w: x * (x > 0) @ w,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", ["save", object(), 2, []])
def test_policy_that_returns_something_else_is_an_error(value, form):
    """Operators make "unsupported operand" of a TypeError, which this is, too."""
    with pytest.raises(remat.PolicyError, match="the policy returned") as caught:
        region(lambda ctx, op, *args, **kwargs: value, region_name="block")(FORMS[form])(leaf(4, 4), leaf(4, 4))
    assert caught.value.__cause__ is None
    assert caught.value.region == "block"
    assert_clean_state()


@pytest.mark.parametrize("form", FORMS)
def test_type_error_in_the_policy_reaches_the_caller(form):
    with pytest.raises(TypeError, match="positional argument"):
        region(lambda ctx, op: True)(FORMS[form])(leaf(4, 4), leaf(4, 4))


def test_error_in_the_policy_frees_everything_and_is_not_swallowed():
    x, held = leaf(4, 4), []

    def function(x):
        h = x.sin()
        held.extend(watch(h))
        try:
            return h @ x
        except Exception:
            return h

    def policy(ctx, op, *args, **kwargs):
        return "save" if op is aten.mm.default else False

    with uncollected():
        with pytest.raises(remat.PolicyError) as caught:
            region(policy)(function)(x)
        del caught
        assert alive(held) == 0


def test_policy_that_falls_through_recomputes_as_with_the_peer():
    def policy(ctx, op, *args, **kwargs):
        if op is aten.mm.default:
            return TorchPolicy.MUST_SAVE
        return None

    x, w = leaf(4, 4), leaf(4, 4)
    assert_equal_gradients(sine_chain, region(policy)(sine_chain), (x, w))
    assert_equal_gradients(sine_chain, sac(policy)(sine_chain), (x, w))
    assert replayed_ops(sine_chain, region(policy), (x, w)) == {"sin": 2}
    assert region(policy | remat.policies.save_matmuls)(sine_chain)(x, w) is not None


# Lists


@pytest.mark.parametrize("wrong", [torch.mm, "mm", "aten.mm.default", None])
def test_list_entry_that_is_no_op_gets_a_helpful_error(wrong):
    with pytest.raises((ValueError, TypeError)) as caught:
        region([aten.sin.default, wrong])(sine_chain)(leaf(4, 4), leaf(4, 4))
    assert str(wrong) in str(caught.value)
    assert "torch.ops.aten.mm.default" in str(caught.value)


# In-place changes, as SAC documents them


def changes_what_is_saved(x, w):
    h = x @ w
    y = h * 2
    h.add_(1)
    return (y + h).sin()


def test_change_of_a_saved_output_is_an_error_with_its_name():
    x, w = leaf(4, 4), leaf(4, 4)
    with pytest.raises(RuntimeError, match="mutated"):
        sac(MM)(changes_what_is_saved)(x, w).sum().backward()
    try:
        y = region(MM, region_name="block")(changes_what_is_saved)(x, w)
        actual = torch.autograd.grad(y.sum(), [x, w])
    except remat.MutationError as error:
        assert error.region == "block"  # noqa: PT017
        assert "mm" in str(error)  # noqa: PT017
    else:
        assert_same(torch.autograd.grad(changes_what_is_saved(x, w).sum(), [x, w]), actual)


def test_change_of_a_saved_output_by_the_caller_is_an_error_with_its_name():
    held, x, w = [], leaf(4, 4), leaf(4, 4)

    def function(x, w):
        held.append(h := x @ w)
        return (h * 2).sin()

    y = region(MM, region_name="block")(function)(x, w)
    with torch.no_grad():
        held.pop().zero_()  # what stayed in the function's closure would be a cycle through the graph
    with pytest.raises(remat.MutationError) as caught:
        y.sum().backward()
    assert caught.value.region == "block"
    assert "mm" in str(caught.value)


IN_PLACE_PAIRS = {
    "mul_": lambda x: (x * 2).mul_(x.exp()).sin(),
    "clamp_min_": lambda x: ((x * 2) + 0.5).clamp_min_(0).sin(),
    "lerp_": lambda x: (x * 2).lerp_(x.exp(), 0.3).sin(),
    "relu_": lambda x: (x * 2).relu_().sin(),
    "clone": lambda x: x.clone().clamp_(-1, 1).sin(),
    "view": lambda x: (h := x * 2, h[1:].mul_(3), h.sin())[-1],
}


@pytest.mark.parametrize("name", IN_PLACE_PAIRS)
def test_saved_op_whose_result_is_changed_by_another_is_right_or_refused(name):
    """Whichever of the ops a policy saves, the one that changes the result in place among them."""
    function, x, seen = IN_PLACE_PAIRS[name], leaf(4), []
    region(lambda ctx, op, *args, **kwargs: (seen.append(ctx.name), False)[1])(function)(x)
    expected = torch.autograd.grad(function(x).sum(), x)
    right = 0
    for count in range(len(seen) + 1):
        for chosen in itertools.combinations(seen, count):
            y = region(lambda ctx, op, *args, chosen=chosen, **kwargs: ctx.name in chosen)(function)(x)
            try:
                actual = torch.autograd.grad(y.sum(), x)
            except remat.MutationError:
                continue
            assert_same(expected, actual, f"{name} saving {chosen}")
            right += 1
    assert right >= 2


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


def test_with_the_check_off_a_changed_output_is_taken_as_it_is():
    held, x, w = [], leaf(4, 4), leaf(4, 4)

    def function(x, w):
        held.append(h := x @ w)
        return (h * 2).sin()

    results = []
    for wrap in (sac, region):
        y = wrap(MM, allow_cache_entry_mutation=True)(function)(x, w)
        with torch.no_grad():
            held[-1].zero_()
        results.append(torch.autograd.grad(y.sum(), [x, w]))
    assert_same(*results)


def test_switch_without_a_policy_is_harmless_or_an_error():
    try:
        y = remat.checkpoint(allow_cache_entry_mutation=True)(torch.sin)(x := leaf(3))
    except TypeError:
        return
    y.sum().backward()
    assert_same(x.detach().cos(), x.grad)


# What SAC cannot do


RANDOM = {
    "functional": lambda h: h * torch.rand_like(h),
    "dropout": lambda h: F.dropout(h, 0.4),
    "in_place": lambda h: h * torch.empty_like(h).bernoulli_(0.5),
    "factory": lambda h: h + torch.randn(4),
    "permutation": lambda h: h[torch.randperm(4)],
}


@pairwise(draw=RANDOM, policy=[[aten.rand_like.default], everything, nothing, None])
def test_saved_random_op_leaves_later_ones_right(draw, policy):
    def program(wrap):
        x, w = leaf(4, 4), leaf(4, 4)

        def function(x, w):
            h = RANDOM[draw]((x * torch.rand_like(x)).sin())
            h = RANDOM[draw]((h @ w).sin())
            return F.dropout(h, 0.3).exp() * torch.rand(4)

        y = wrap(function)(x, w)
        between = torch.rand(2)
        for retain in (True, False):
            torch.autograd.backward(y.sum(), retain_graph=retain)
        return y, x.grad, w.grad, between, torch.rand(2)

    def random_only(ctx, op, *args, **kwargs):
        return torch.Tag.nondeterministic_seeded in op.tags and not op._schema.is_mutable

    assert_same_program(program, policy=policy or random_only)


def test_two_calls_swapped_in_replay_are_an_error():
    """SAC takes the n-th call of an op for the n-th call, and gives wrong gradients without a word."""

    def function(x, w):
        a, b = (x @ w, w.t() @ x) if not remat.is_recomputing() else (w.t() @ x, x @ w)[::-1]
        return a.sin() * b.cos()

    x, w = leaf(4, 4), leaf(4, 4)
    y = region(MM)(function)(x, w)
    try:
        actual = torch.autograd.grad(y.sum(), [x, w])
    except remat.MismatchError as error:
        assert error.region == "function"  # noqa: PT017
    else:
        a, b = x @ w, w.t() @ x
        assert_same(torch.autograd.grad((a.sin() * b.cos()).sum(), [x, w]), actual)


# The transformer block


@pytest.mark.parametrize(
    ("what", "ops", "expected"), [("attention", ATTENTION, 1_056_768), ("matmuls", MATMULS, 4_718_592)]
)
def test_transformer_block_retains_the_count_by_hand_and_no_more_than_the_peer(what, ops, expected):
    x, block = leaf(4, 128, 256), TransformerBlock()
    assert retained_bytes(region(ops)(block), [x]) == expected
    assert expected <= retained_bytes(sac(ops)(block), [x])


REPLAYED = {
    "attention": {"native_layer_norm": 2, "addmm": 3, "add": 1, "gelu": 1},
    "matmuls": {"native_layer_norm": 2, "_scaled_dot_product_flash_attention_for_cpu": 1, "add": 1, "gelu": 1},
}


@pytest.mark.parametrize(("what", "ops"), [("attention", ATTENTION), ("matmuls", MATMULS)])
def test_transformer_block_runs_again_the_ops_counted_by_hand(what, ops):
    x, block = leaf(2, 8, 16), TransformerBlock(16, 2)
    parameters = list(block.parameters())
    ours = replayed_ops(block, region(ops), [x], parameters)
    assert ours == REPLAYED[what]
    assert not Counter(ours) - Counter(replayed_ops(block, sac(ops), [x], parameters))
    assert peak_bytes(region(ops)(block), [x], parameters) <= peak_bytes(sac(ops)(block), [x], parameters)
