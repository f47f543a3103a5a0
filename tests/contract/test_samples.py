"""What the default check finds of other values in replay, and what it must not take for such."""

from __future__ import annotations

import contextvars
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import torch_remat as remat
from tests.helpers import assert_same_program, checkpointed, leaf, pairwise
from torch_remat.dispatch.check import samples

VARIABLE = contextvars.ContextVar("scale", default=0.5)
GLOBAL = {"tensor": torch.full((8,), 0.5)}


def global_of_another_function():
    return GLOBAL["tensor"]


class Layer(nn.Module):
    """A layer whose middle a test replaces: it multiplies by what ``scale`` returns."""

    def __init__(self, scale=None, width=8):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.scale, self.p, self.held = scale, 0.1, SimpleNamespace()

    def middle(self, h):
        return h * self.scale()

    def forward(self, x):
        return self.norm(self.middle(self.linear(x)).tanh() + x)


class Doubling(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        return result * 2 if op is torch.ops.aten.tanh.default else result


def number_by_hook(layer):
    layer.linear.register_forward_hook(lambda module, args, out: out * layer.p)
    layer.scale = lambda: 1.0
    return lambda: setattr(layer, "p", 0.3)


def carrier(make, change):
    """Return a program: ``make(tensor)`` returns what holds it and how to read it, ``change`` what happens later."""

    def program(layer):
        held, read = make(torch.full((8,), 0.5))
        layer.scale = lambda: read(held)
        return lambda: change(held)

    return program


def number(read, change):
    def program(layer):
        change(0.5)
        layer.scale = read
        return lambda: change(0.25)

    return program


def quarter():
    return torch.full((8,), 0.25)


def dropout(layer):
    layer.middle = lambda h: F.dropout(h, layer.p)
    return lambda: setattr(layer, "p", 0.5)


def counter(layer):
    calls = itertools.count(1)
    layer.scale = lambda: next(calls)
    return lambda: None


def mode_in_forward(layer):
    layer.scale = lambda: 1.0
    return Doubling()


def data_of_weight(layer):
    layer.scale = lambda: 1.0
    return lambda: layer.linear.weight.data.mul_(2)


def numpy_of_carrier(layer):
    held = {"inner": {"scale": torch.full((8,), 0.5)}}
    layer.scale = lambda: held["inner"]["scale"]
    return lambda: held["inner"]["scale"].numpy().fill(0.25)


def drawn_by_python(layer):
    source = random.Random(3)
    layer.scale = source.random
    return lambda: None


def mask(layer):
    held = {"it": {"mask": torch.arange(8) % 2 == 0}}
    layer.middle = lambda h: h.masked_fill(held["it"]["mask"], 0.0)
    return lambda: held["it"].update(mask=torch.arange(8) % 3 == 0)


def indices(layer):
    held = {"it": {"order": torch.arange(8)}}
    layer.middle = lambda h: h[:, held["it"]["order"]]
    return lambda: held["it"].update(order=torch.arange(8).flip(0))


def swapped_operands(layer):
    layer.held.sign = 1
    layer.middle = lambda h: h.sin() - h.cos() if layer.held.sign == 1 else h.cos() - h.sin()
    return lambda: setattr(layer.held, "sign", -1)


def eps(layer):
    layer.held.eps = 1e-5
    layer.middle = lambda h: F.layer_norm(h, (8,), eps=layer.held.eps)
    return lambda: setattr(layer.held, "eps", 1.0)


# Each changes one thing between forward and backward: a function of the layer that returns the change.
PROGRAMS = {
    "number by a hook": number_by_hook,
    "carrier in an object": carrier(
        lambda t: (SimpleNamespace(a=SimpleNamespace(b=t)), lambda h: h.a.b), lambda h: setattr(h.a, "b", quarter())
    ),
    "global tensor of another function": number(
        global_of_another_function, lambda k: GLOBAL.update(tensor=torch.full((8,), k))
    ),
    "ContextVar": number(VARIABLE.get, VARIABLE.set),
    "dropout's p": dropout,
    "counter": counter,
    "dispatch mode in forward alone": mode_in_forward,
    ".data of a weight": data_of_weight,
    "NumPy writes a carrier": numpy_of_carrier,
    "Python's random": drawn_by_python,
    "mask": mask,
    "indices": indices,
    "operands swapped": swapped_operands,
    "eps of a norm": eps,
}


def run(name, batch=4, **options):
    layer, x = Layer(), leaf(batch, 8)
    change = PROGRAMS[name](layer)
    if isinstance(change, TorchDispatchMode):
        with change:
            y = checkpointed(layer, region_name="layer", **options)(x)
    else:
        y = checkpointed(layer, region_name="layer", **options)(x)
        change()
    y.square().sum().backward()
    return x.grad


@pairwise(name=PROGRAMS, policy=[None, remat.policies.save_matmuls])
def test_other_values_in_replay_are_found(name, policy):
    if policy is not None and name == ".data of a weight":
        return  # its products are kept, and replay does not compute with it
    with pytest.raises(remat.MismatchError, match="layer"):
        run(name, policy=policy)
    if policy is None:
        run(name, determinism_check="none")


@pytest.mark.parametrize("name", ["number by a hook", "dropout's p", "ContextVar", "carrier in an object"])
def test_other_values_are_found_in_tensors_of_any_size(name):
    for batch in (512, 1 << 16):
        with pytest.raises(remat.MismatchError, match="other values"):
            run(name, batch=batch)


# --- What is no difference


class Scratch(torch.autograd.Function):
    """Saves a buffer of which it writes a part."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.empty(1000, dtype=torch.uint8), x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[1].cos()


def with_garbage(function):
    """Return a function that leaves other bytes in free memory each time that it begins."""
    count = itertools.count(1)

    def run(*args):
        k = float(next(count))
        [torch.full((size,), k) for size in (8, 16, 32, 48, 60, 64, 120, 128, 250, 256, 500, 1000) for _ in range(8)]
        return function(*args)

    return run


def ctc(x):
    text, lengths = torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 2])
    return F.ctc_loss(x.log_softmax(-1), text, torch.tensor([6, 3]), lengths, reduction="none").exp()


MEAN, VAR = torch.zeros(5), torch.ones(5)
ALIKE = {
    "ctc, with gaps in its table": ctc,
    "rrelu in evaluation, unwritten noise": lambda x: F.rrelu(x, training=False),
    "rrelu of a result": lambda x: F.rrelu(x.sin(), training=False),
    "rrelu in training, noise filled later": lambda x: F.rrelu(x, training=True),
    "rrelu in place": lambda x: F.rrelu(x.sin() * 1, training=True, inplace=True) + 1,
    "rrelu before dropout": lambda x: F.dropout(F.rrelu(x.cos(), training=True), 0.5),
    "a scratch buffer": Scratch.apply,
    "LSTM": nn.LSTM(5, 5),
    "NaN": lambda x: (x * torch.full((5,), float("nan"))).exp(),
    "infinities": lambda x: (x * torch.tensor([float("inf"), -float("inf"), 1.0, 0.0, float("nan")])).exp(),
    "negative zero": lambda x: (x * torch.tensor([-0.0, 0.0, 1.0, 2.0, 3.0])).exp(),
    "scalar": lambda x: (x * torch.tensor(2.0)).exp(),
    "transposed": lambda x: (x[:, 0].t() * torch.arange(60.0).view(5, 12)[:, ::2]).exp(),
    "no elements": lambda x: (x[..., :0] * torch.ones(0)).exp().sum() + x.exp(),
    "sparse": lambda x: torch.sparse.mm(torch.eye(6).to_sparse(), x[:, 0]) * x[:, 0].exp(),
    "expanded": lambda x: (x * torch.full((1,), 0.5).expand(5)).exp(),
    "random mask": lambda x: (x * (torch.rand(5) > 0.5)).exp(),
    "bfloat16": lambda x: (x.bfloat16() * torch.full((5,), 0.3, dtype=torch.bfloat16)).exp(),
    "complex, conjugated": lambda x: (x * torch.full((5,), 1 + 2j).conj()).abs().exp(),
    "statistics that nobody counts": lambda x: F.batch_norm(x[0].sin(), MEAN, VAR, training=True),
    "statistics that evaluation reads": lambda x: F.batch_norm(x[0].sin(), MEAN, VAR, training=False).exp(),
    "made in place": lambda x: (x * torch.zeros(5).add_(2).mul_(3)).exp(),
}


ALIKE_UNDER = {
    "default": {},
    "bitwise": {"determinism_check": "bitwise"},
    "policy": {"policy": remat.policies.save_matmuls},
    "to the end": {"early_stop": False},
    "other numbers": {"preserve_rng_state": False},
}


# These have other bits in each phase, which is what that check is asked for.
OTHER_BITS = ("ctc, with gaps in its table", "statistics that nobody counts")
OTHER_BITS += ("rrelu in evaluation, unwritten noise", "rrelu of a result", "a scratch buffer")


@pairwise(
    name=ALIKE,
    under=ALIKE_UNDER,
    twice=[False, True],
    possible=lambda name, under, **_: under != "bitwise" or name not in OTHER_BITS,
)
def test_what_an_op_leaves_unwritten_or_writes_late_is_no_difference(name, under, twice):
    def program(wrap):
        x = leaf(6, 2, 5)
        region = wrap(with_garbage(ALIKE[name]))
        outputs = [region(x) for _ in range(1 + twice)]
        outputs = [one[0] if isinstance(one, tuple) else one for one in outputs]
        return outputs, [torch.autograd.grad(one.abs().sum(), x, retain_graph=True) for one in outputs * 2]

    if under == "other numbers":
        program(remat.checkpoint(**ALIKE_UNDER[under]))
    else:
        assert_same_program(program, **ALIKE_UNDER[under])


def test_a_carrier_modified_in_place_is_a_mutation_error():
    held = {"inner": {"scale": torch.full((8,), 0.5)}}
    y = checkpointed(lambda x: (x * held["inner"]["scale"]).exp())(leaf(4, 8))
    held["inner"]["scale"].mul_(2)
    with pytest.raises(remat.MutationError):
        y.sum().backward()


def test_a_result_that_the_region_modifies_after_its_save_is_a_mutation_error():
    with pytest.raises(remat.MutationError):
        checkpointed(lambda x: x.sin().exp().add_(1))(leaf(512, 1024)).sum().backward()


def test_the_last_bits_may_differ():
    def function(x):
        return (x * (1 + 1e-7 * remat.is_recomputing())).exp()

    checkpointed(function)(leaf(4, 8)).sum().backward()
    with pytest.raises(remat.MismatchError):
        checkpointed(function, determinism_check="bitwise")(leaf(4, 8)).sum().backward()


def test_of_later_regions_one_in_seven_is_compared_and_each_layer_has_its_turn(monkeypatch):
    monkeypatch.setattr(samples, "_FIRST", 100)
    assert all(map(samples.takes_samples, range(100)))
    later = [serial for serial in range(100, 70_100) if samples.takes_samples(serial)]
    assert len(later) == pytest.approx(10_000, rel=0.01)
    for layers in range(1, 200):
        assert {serial % layers for serial in later[: 40 * layers]} == set(range(layers))


def test_error_names_the_tensor_and_both_values():
    held = {"inner": {"scale": torch.tensor(0.5)}}
    y = checkpointed(lambda x: (x * held["inner"]["scale"]).exp(), region_name="layer")(leaf(4, 8))
    held["inner"]["scale"] = torch.tensor(0.25)
    with pytest.raises(remat.MismatchError, match=r"other values .*0\.5 in forward, 0\.25 in replay") as caught:
        y.sum().backward()
    assert (caught.value.region, caught.value.tensor) == ("layer", "saved tensor 0")
