"""Programs that meet what is rare: each guard of calls that no other program needs is needed here."""

from __future__ import annotations

import warnings

import torch

import torch_remat as remat
from tests.helpers import leaf_copies, pairwise
from tests.native_programs import SAVE


class HandleExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name):
        handle = remat.get_handle(ctx, name, SAVE)
        if (made := handle.maybe_load_saved()) is not None:
            return made
        y = handle.save_or_load_inputs(x).exp()
        handle.save_for_backward({"y": y})
        return handle.record_outputs(y)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


COMPILED = torch.compile(torch.sin, backend="aot_eager")


def doubled(x):
    return x.mul_(2).cos()


def needed(x):
    y = HandleExp.apply(x, "h")
    remat.recompute_needs_tensor(y)
    return y


def written_result(x, opaque):
    y = needed(x)
    return remat.native_save_region("k", torch.mul, y, 2.0).mul_(2).sin() * x


def written_result_of_several(x, opaque):
    y = needed(x)
    return remat.native_save_region("k", torch.cat, [y.detach(), y]).mul_(2).sin()[:4] * x


def written_result_of_compiled_code(x, opaque):
    y = needed(x)
    z = remat.native_save_region("k", COMPILED, y.detach()).mul_(2)
    return z * remat.native_save_region("l", COMPILED, y).mul_(2).cos() * x


def written_result_of_another_call(x, opaque):
    y = remat.op(lambda t: t.sin() * 2, "a")(x)
    return remat.op(doubled, "k")(y.detach()) * x.exp() * y.exp()


def detached_argument(x, opaque):
    y = x * 1.5
    return remat.op(lambda t: doubled(t.detach_()), "k")(y) * x * y


def resized_argument(x, opaque):
    y = torch.zeros(2, 2)
    z = remat.op(lambda t, out: t * out.resize_(4, 4).copy_(t.detach()), "k")(x, y)
    return z.sin() * y


def op_with_the_name_of_another_in_a_call(x, opaque):
    y = HandleExp.apply(x, "h")
    return remat.op(lambda t: HandleExp.apply(t, "h").sin(), "k", opaque=opaque)(y).exp()


def sparse_result(x, opaque):
    at = torch.tensor([[0, 1], [1, 0]])
    y, sparse = remat.op(
        lambda t: (t.sin(), torch.sparse_coo_tensor(at, torch.ones(2), (4, 4), check_invariants=True)), "k"
    )(x)
    return torch.sparse.mm(sparse, y) * y


def view_of_the_output_of_an_op(x, opaque):
    y = HandleExp.apply(x, "h")
    return remat.native_save_region("k", lambda: y.t()).sin() * x


def gradient_in_a_call(x, opaque):
    y = x + x

    def inner():
        t = x.detach().requires_grad_()
        return torch.autograd.grad((t.sin() * y).sum(), t)[0]

    return remat.op(inner, "k", opaque=opaque)() * x.sin()


PROGRAMS = (
    written_result, written_result_of_several, written_result_of_compiled_code,
    written_result_of_another_call, detached_argument, resized_argument, op_with_the_name_of_another_in_a_call,
    gradient_in_a_call, sparse_result, view_of_the_output_of_an_op,
)  # fmt: skip
OPTIONS = {"plain": {}, "policy": {"policy": remat.policies.save_matmuls}}


@pairwise(program=PROGRAMS, opaque=[False, True], options=OPTIONS)
def test_gradients_are_those_of_plain_autograd(program, opaque, options):
    grads = []
    given = torch.randn(4, 4, requires_grad=True)

    def block(x):
        return program(x, opaque).sin().exp()  # so that replay comes to all of it

    for run in (block, remat.checkpoint(**OPTIONS[options])(block)):
        (x,) = leaf_copies([given])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(x * 1).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
