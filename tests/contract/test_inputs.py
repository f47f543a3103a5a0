"""What may go into a region: where tensors may stand, which values, which keywords."""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import Tensor, nn

import torch_remat as remat
from tests.batches import OpaqueBatch, OptreeBatch, TorchBatch
from tests.helpers import (
    Calls,
    LiveStorages,
    assert_same,
    assert_same_program,
    checkpointed,
    collector_off,
    leaf,
    pairwise,
)

Pair = namedtuple("Pair", ["one", "two"])

BATCHES = [OptreeBatch, TorchBatch, OpaqueBatch]


def test_inputs_that_are_no_tensors_reach_the_function_in_both_phases():
    seen = []
    marker = object()

    def block(*args, **kwargs):
        seen.append((args, kwargs))
        return w.sin().exp()

    w = leaf(3)
    checkpointed(block)(1, None, "text", marker, flag=True, items=[1, {"a": marker}]).sum().backward()
    assert_same(w.grad, torch.autograd.grad(w.sin().exp().sum(), w)[0])
    assert len(seen) == 2
    for args, kwargs in seen:
        assert args == (1, None, "text", marker)
        assert kwargs == {"flag": True, "items": [1, {"a": marker}]}


def test_tensors_in_nested_containers_get_equal_gradients():
    def program(wrap):
        leaves = [leaf(3) for _ in range(7)]
        a, b, c, d, e, f, g = leaves

        def block(items, *, options):
            (a, [b]), pair = items
            mapped = options["deep"][0]["x"] * options["ordered"]["y"] * pair.one * pair.two
            return (a * b).sin() * mapped.exp() * options["deep"][1]

        y = wrap(block)([(a, [b]), Pair(c, d)], options={"deep": ({"x": e}, f), "ordered": OrderedDict(y=g)})
        y.sum().backward()
        return [x.grad for x in leaves]

    assert_same_program(program, replays=1)


@pytest.mark.parametrize("batch_class", BATCHES)
def test_tensors_in_dataclasses_get_equal_gradients(batch_class):
    types = []

    def program(wrap):
        features, mask = leaf(3), torch.tensor([1.0, 0.0, 1.0])

        def block(batch):
            types.append(type(batch))
            return (batch.features.sin() * batch.mask).exp()

        wrap(block)(batch_class(features, mask)).sum().backward()
        return features.grad

    assert_same_program(program, replays=1)
    assert types == [batch_class] * 3


def test_keywords_named_like_options_reach_the_function():
    names = [*inspect.signature(remat.checkpoint).parameters, "fn", "function", "self", "args", "kwargs", "region"]
    values = {name: leaf(3) for name in names}

    def block(*args, **kwargs):
        assert list(kwargs) == names
        return (args[0] * sum(place * value for place, value in enumerate(kwargs.values(), 1))).sin().exp()

    x = leaf(3)
    given = [x, *values.values()]
    checkpointed(block)(x, **values).sum().backward()
    assert_same(torch.autograd.grad(block(x, **values).sum(), given), [value.grad for value in given])


def test_same_tensor_twice_gets_the_sum_of_both_gradients():
    def program(wrap):
        x = leaf(3)
        wrap(lambda x, y, *, z: (x.sin() * y.exp()) * z[0])(x, x, z=[x]).sum().backward()
        return x.grad

    assert_same_program(program, replays=1)


def test_input_keeps_its_strides_and_grad_flag_in_replay():
    """Views among inputs are still views of each other."""
    seen = []

    def block(x, row, flat, index):
        assert x.untyped_storage().data_ptr() == row.untyped_storage().data_ptr()
        seen.append(
            [(t.shape, t.stride(), t.storage_offset(), t.requires_grad, t.dtype) for t in (x, row, flat, index)]
        )
        return (x * flat + row).sin().sum() * index.sum()

    base = leaf(6, 4) * 1
    columns = base.t()[:, ::2]
    checkpointed(block)(columns, columns[1], torch.ones(3).expand(4, 3), torch.arange(3)).backward()
    assert len(seen) == 2
    assert seen[0] == seen[1]


@pytest.mark.filterwarnings("ignore:CpuOffloader moves")
@pairwise(
    policy=[None, remat.policies.save_matmuls],
    view=[lambda x: x, lambda x: x[:], lambda x: x[1:]],
    options=[{}, {"offload_inputs": True, "offloader": remat.CpuOffloader(min_bytes=0)}],
)
def test_tensor_that_the_function_also_reaches_past_the_argument_gets_equal_gradients(view, options, policy):
    def program(wrap):
        x = leaf(4, 4)
        made = x.softmax(0)
        y = wrap(lambda given: made.sin().sum() * given.cos())(view(made))
        y.sum().backward()
        return y, x.grad

    assert_same_program(program, policy=policy, **options)


def test_caller_may_change_its_containers_after_the_call():
    function = Calls(lambda items, *, options: (items[0] * options["scale"]).sin())
    x, scale = leaf(3), leaf(3)
    items, options = [x], {"scale": scale}
    y = checkpointed(function)(items, options=options)
    items[0] = torch.zeros(3)
    options.clear()
    y.sum().backward()
    assert function.total == 2
    assert_same([x.grad, scale.grad], torch.autograd.grad((x * scale).sin().sum(), [x, scale]))


@pytest.mark.parametrize("around", [contextlib.nullcontext, torch.autograd.graph.save_on_cpu])
@pytest.mark.parametrize(
    "view",
    [Tensor.detach, Tensor.bfloat16, lambda w: w.view(9).view(3, 3)],
    ids=["detach", "cast", "view"],
)
def test_argument_that_is_a_view_or_a_cast_of_a_parameter_is_no_other_parameter(view, around):
    def program(wrap):
        w = nn.Parameter(torch.rand(3, 3))
        x = leaf(3, 3)
        with around():
            y = wrap(lambda x, v: ((x.to(v.dtype) @ v).sin().float() @ w.t()).cos())(x, view(w))
        y.sum().backward()
        return y, x.grad, w.grad

    assert_same_program(program, replays=1)


def marked(tensor, **attributes):
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


ATTRIBUTED = {
    "argument": lambda body, x, m: lambda wrap: wrap(body)(x, m),
    "in a list, twice": lambda body, x, m: lambda wrap: wrap(lambda x, m, ms: body(x, ms[0]))(x, m, [m]),
    "view": lambda body, x, m: lambda wrap: wrap(body)(x, marked(m.view(-1)[:3], **m.__dict__)),
    "parameter": lambda body, x, m: lambda wrap: wrap(body)(x, marked(nn.Parameter(m * 1), **m.__dict__)),
}


@pairwise(around=[contextlib.nullcontext, torch.autograd.graph.save_on_cpu], name=ATTRIBUTED)
def test_attributes_of_tensor_arguments_are_there_in_replay(name, around):
    def body(x, m):
        return (x.sin() * m * (2.0 if m.kind == "keep" else 1.0)).exp()

    def program(wrap):
        x, mask = leaf(3), marked(torch.ones(3), kind="keep")
        call = ATTRIBUTED[name](body, x, mask)
        with around():
            y = call(wrap)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program, replays=1)


def test_attributes_set_after_the_call_do_not_reach_replay_and_make_no_cycle():
    """An output that is put on an argument leads back to the region: kept, it would never be freed."""
    with collector_off(), LiveStorages() as live:
        x = marked(leaf(3) * 1, kind="keep")
        x.out = checkpointed(lambda x: (x.sin() * len(x.kind)).exp())(x)
        del x
        assert live.count() == 0
