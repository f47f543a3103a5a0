"""Ops of other libraries in a policy: calls of user code, found without a log, as those of functions are."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.library import custom_op

import torch_remat as remat
from tests.helpers import LiveStorages, assert_same, leaf
from tests.offloaders import Counting
from torch_remat.policies.given import as_policy
from torch_remat.policies.policy import split

LIBRARY = torch.library.Library("remat_library_tests", "DEF")
RUNS = []  # whether each run of the op was one of replay
SAVE, OFFLOAD = remat.CheckpointPolicy.SAVE, remat.CheckpointPolicy.OFFLOAD


@custom_op("remat_library_tests::smooth", mutates_args=())
def smooth(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    RUNS.append(remat.is_recomputing())
    return (x * scale).tanh()


def _keep(ctx, inputs, output):
    ctx.scale = inputs[1]
    ctx.save_for_backward(output)


smooth.register_fake(lambda x, scale=1.0: torch.empty_like(x))
smooth.register_autograd(lambda ctx, g: (g * ctx.scale * (1 - ctx.saved_tensors[0] ** 2), None), setup_context=_keep)


@custom_op("remat_library_tests::halves", mutates_args=())
def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    RUNS.append(remat.is_recomputing())
    left, right = x.chunk(2, -1)
    return left.exp(), right.sin()


halves.register_fake(lambda x: tuple(torch.empty_like(one) for one in x.chunk(2, -1)))
halves.register_autograd(
    lambda ctx, a, b: torch.cat([a * ctx.saved_tensors[0].exp(), b * ctx.saved_tensors[1].cos()], -1),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[0].chunk(2, -1)),
)


@custom_op("remat_library_tests::add_one_", mutates_args=("x",))
def add_one_(x: torch.Tensor) -> None:
    x.add_(1)


LIBRARY.define("mixed(Tensor x) -> Tensor")
LIBRARY.define("mixed.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
LIBRARY.define("composite(Tensor x) -> Tensor")
LIBRARY.impl("composite", lambda x: torch.ops.remat_library_tests.smooth(x) * 2, "CompositeImplicitAutograd")
LIBRARY.define("several(Tensor x) -> Tensor")
LIBRARY.define("several.twice(Tensor x, Tensor y) -> Tensor")
for form in ("several", "mixed"):
    LIBRARY.impl(form, lambda x: x.sin(), "CompositeImplicitAutograd")
LIBRARY.impl("several.twice", lambda x, y: x * y, "CompositeImplicitAutograd")
LIBRARY.impl("mixed.out", lambda x, out: out.copy_(x.sin()), "CPU")

OPS = torch.ops.remat_library_tests


def block(x):
    """Call the op in each form, with arguments by position and by name, and one that has two results."""
    x = OPS.smooth(x.sin()).exp()
    x = OPS.smooth.default(x, scale=0.5).sin()
    left, right = OPS.halves(smooth(x, 2.0).exp())
    return (left.sin() * right).exp()


def run(policy, function=block, **options):
    """Return how often ops of the library ran in forward and in replay; gradients are those of plain autograd."""
    x = leaf(4, 4)
    expected = torch.autograd.grad(function(x).sum(), x)
    for _ in range(2):
        RUNS.clear()
        y = remat.checkpoint(policy=policy, **options)(function)(x)
        assert_same(expected, torch.autograd.grad(y.sum(), x))
    return RUNS.count(False), RUNS.count(True)


def watches_ops(policy):
    return split(as_policy(policy)).ops is not None


# A policy, how many of the four calls run in replay, and whether each op of the region is watched for it.
POLICIES = {
    "packet": ([OPS.smooth], 1, False),
    "overload": ([OPS.smooth.default], 1, False),
    "as custom_op gives it": ([smooth, halves], 0, False),
    "alone": (OPS.smooth, 1, False),
    "beside functions": ([OPS.smooth.default, torch.sin, OPS.halves], 0, False),
    "beside a ready policy": ([OPS.smooth, OPS.halves] | remat.policies.save_matmuls, 0, False),
    "offloaded": ({OPS.smooth: OFFLOAD, OPS.halves: SAVE}, 0, False),
    "beside an op of torch": ([OPS.smooth, torch.ops.aten.sin.default], 1, True),
    "beside a list of ops of torch": (as_policy([OPS.smooth, OPS.halves]) | [torch.ops.aten.sin], 0, True),
    "beside a policy function": ([OPS.smooth, OPS.halves] | remat.policies.save_discrete, 0, True),
    "beside names": ([OPS.smooth] | remat.save_names("*halves*"), 0, True),
}


@pytest.mark.parametrize("kind", POLICIES)
def test_kept_calls_do_not_run_in_replay_and_gradients_are_equal(kind):
    policy, replayed, is_watched = POLICIES[kind]
    assert watches_ops(policy) == is_watched
    assert run(policy, offloader=Counting()) == (4, replayed)
    assert run(policy, lambda x: remat.checkpoint(policy=policy)(block)(x.exp()), offloader=Counting())[0] >= 4
    for same in (pickle.loads(pickle.dumps(as_policy(policy))), copy.deepcopy(as_policy(policy))):
        assert repr(same) == repr(as_policy(policy))
        assert run(same, offloader=Counting()) == (4, replayed)


def test_bytes_are_those_of_the_kept_results():
    def kept(policy, offloader=None):
        x = leaf(16, 16)
        with LiveStorages() as live:
            y = remat.checkpoint(policy=policy, offloader=offloader)(lambda x: smooth(smooth(x.sin()).exp()).sin())(x)
            return (live.bytes() - y.untyped_storage().nbytes()) // 1024

    offloader = Counting()
    assert kept([smooth]) == kept([smooth, torch.ops.aten.cos]) == 2
    assert kept({smooth: OFFLOAD}, offloader) == 0
    assert len(offloader.sent) == 2


def test_names_tell_module_op_and_count():
    y = remat.checkpoint(policy=[OPS.smooth, OPS.halves])(block)(leaf(4, 4))
    names = [op.name for op in remat.memory_report(y).regions[0].ops]
    assert names == ["smooth_0", "smooth_1", "smooth_2", "halves_0"]


@pytest.mark.filterwarnings("ignore:.*selected nothing:torch_remat.RematWarning")
def test_an_op_that_another_op_calls_is_found_only_where_ops_are_watched():
    def function(x):
        return OPS.composite(x.sin()).exp() * x

    assert run([smooth], function) == (1, 1)
    assert run([smooth, torch.ops.aten.sin], function) == (1, 0)


@pytest.mark.parametrize("op", [OPS.add_one_, OPS.add_one_.default, add_one_, OPS.mixed.out])
def test_ops_that_change_their_arguments_are_refused_by_name(op):
    for given in ([op], [op, smooth], [torch.sin, op], {op: OFFLOAD}):
        with pytest.raises(remat.PolicyError, match=r"torch\.ops\.remat_library_tests\..* never kept"):
            remat.checkpoint(policy=given)


def test_a_packet_of_which_not_all_is_kept_is_found_by_op():
    assert not watches_ops([OPS.several])
    assert not watches_ops([OPS.several.default, OPS.several.twice])
    for policy in ([OPS.several.default], [OPS.mixed], [OPS.mixed.default]):
        assert watches_ops(policy)
        run(policy, lambda x: OPS.several(OPS.mixed(x).exp(), x.sin()).exp() * OPS.several(x))
    run([OPS.several], lambda x: OPS.several(OPS.mixed(x).exp(), x.sin()).exp() * OPS.several(x))


FORMS = {
    "no_gradient(Tensor x) -> Tensor": (lambda x: x.tanh(), lambda op, x: op(x.detach()).exp() * x),
    "view(Tensor(a) x) -> Tensor(a)": (lambda x: x.t(), lambda op, x: op(x).exp()),
    "same(Tensor x) -> Tensor": (lambda x: x, lambda op, x: op(x=x).exp()),
    "list_of(Tensor x) -> Tensor[]": (lambda x: [x.sin(), x.cos()], lambda op, x: op(x)[0].exp() * op(x)[1]),
    "number(Tensor x) -> float": (lambda x: float(x.detach().sum()), lambda op, x: (x * op(x)).exp()),
    "nothing(Tensor x) -> ()": (lambda x: None, lambda op, x: x.exp() if op(x) is None else x),
    "of_nothing(int size) -> Tensor": (lambda size: torch.ones(size, size) * 2, lambda op, x: (op(4) * x).exp()),
    "random(Tensor x) -> Tensor": (lambda x: x * torch.rand_like(x), lambda op, x: op(x).exp() * torch.rand_like(x)),
    "written(Tensor x) -> Tensor": (lambda x: x.tanh() * 2, lambda op, x: op(x).mul_(2).exp()),
}
for schema, (kernel, _) in FORMS.items():
    LIBRARY.define(schema)
    key = "CPU" if "no_gradient" in schema else "CompositeExplicitAutograd" if "size" in schema else None
    LIBRARY.impl(schema.partition("(")[0], kernel, key or "CompositeImplicitAutograd")


@pytest.mark.filterwarnings("ignore:.*replay recomputes this call:torch_remat.RematWarning")
@pytest.mark.parametrize("schema", FORMS)
def test_ops_of_all_forms_have_equal_gradients(schema):
    op, x = getattr(OPS, schema.partition("(")[0]), leaf(4, 4)

    def gradient(wrap):
        torch.manual_seed(0)
        return torch.autograd.grad(wrap(lambda x: FORMS[schema][1](op, x.sin()))(x).sum(), x)

    assert_same(gradient(lambda function: function), gradient(remat.checkpoint(policy=[op])))


@pytest.mark.parametrize("policy", [[smooth, halves], [OPS.smooth.default, OPS.halves.default]])
def test_a_compiled_region_keeps_the_ops(policy):
    x = leaf(4, 4)
    expected = torch.autograd.grad(block(x).sum(), x)
    for region in (remat.checkpoint(policy=policy)(block), lambda x: remat.checkpoint(policy=policy)(block)(x)):
        RUNS.clear()
        y = torch.compile(region, backend="aot_eager", fullgraph=True)(x)
        assert_same(expected, torch.autograd.grad(y.sum(), x))
        assert len(RUNS) == 4
