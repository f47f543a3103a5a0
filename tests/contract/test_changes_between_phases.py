"""Things that programs change between forward and backward: gradients are right or an error says so."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import Function

import torch_remat as remat
from tests.helpers import assert_same, checkpointed, leaf, pairwise
from tests.native_programs import full, on_cpu
from tests.ways import BY_HANDLE, SAVE, WAYS, Way
from torch_remat.dispatch.check import unread


class Layers(nn.Module):
    """Square layers, so that all saved tensors have one shape and a shift among them is not seen by shape."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return torch.sin(self.drop(torch.sin(self.drop(x) @ self.one)) @ self.two) @ self.three


CHANGES = {
    "dropout is turned on": (lambda model: model.train(), "but replay used another one"),
    "dropout is turned off": (lambda model: model.eval(), "but replay used another one"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_model_that_changes_before_backward_is_an_error(name):
    change, text = CHANGES[name]
    model = Layers(dropout=0.5 if name == "dropout is turned off" else 0.0)
    if name == "dropout is turned on":
        model.drop.p = 0.5
        model.eval()
    y = checkpointed(model, region_name="block")(leaf(4, 4))
    change(model)
    with pytest.raises(remat.MismatchError, match=rf"^block::saved tensor \d: .*{text}"):
        y.sum().backward()


class Reaching(nn.Module):
    """Two layers, run by a function that reaches them in one of several ways, and a third that it does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.idle = (nn.Linear(4, 4) for _ in range(3))

    def body(self, x):
        return self.two(self.one(x).tanh()).sin()


def reach_through_a_closure(model):
    def outer(x):
        return model.body(x)

    return lambda x: outer(x)


def reach_through_a_list(model):
    layers = [model.one, model.two]
    return lambda x: layers[1](layers[0](x).tanh()).sin()


REACHING = {
    "method": lambda model: model.body,
    "closure in a closure": reach_through_a_closure,
    "list": reach_through_a_list,
    "partial": lambda model: partial(partial(Reaching.body), model),
    "argument": lambda model: (Reaching.body, model),
}


def run_reaching(reach, model, x):
    function = reach(model)
    if isinstance(function, tuple):
        return checkpointed(function[0], region_name="block")(function[1], x)
    return checkpointed(function, region_name="block")(x)


def step(model, layer, name):
    with torch.no_grad():
        getattr(getattr(model, layer), name).add_(1)


def replace(model, layer, name):
    old = getattr(getattr(model, layer), name)
    setattr(getattr(model, layer), name, nn.Parameter(torch.randn(old.shape)))


def exchange(model, layer, name):
    one, two = getattr(model.one, name), getattr(model.two, name)
    setattr(model.one, name, two), setattr(model.two, name, one)


KINDS = {step: remat.MutationError, replace: remat.MismatchError, exchange: remat.MismatchError}


@pairwise(input_needs_grad=[True, False], reach=REACHING.values(), change=KINDS, name=["bias", "weight"])
def test_parameter_that_is_another_in_replay_is_an_error_that_names_it(reach, input_needs_grad, change, name):
    model = Reaching()
    y = run_reaching(reach, model, torch.randn(2, 4, requires_grad=input_needs_grad))
    change(model, "one", name)
    with pytest.raises(KINDS[change], match=rf"^block::.*\b(one\.|){name}\b") as caught:
        y.sum().backward()
    assert caught.value.region == "block"
    del caught
    assert all(parameter.grad is None for parameter in model.parameters())


@pairwise(change=[step, replace], reach=REACHING.values())
def test_parameter_that_replay_does_not_read_may_change(reach, change):
    model, x = Reaching(), leaf(2, 4)
    expected = torch.autograd.grad(model.body(x).sum(), x)
    y = run_reaching(reach, model, x)
    change(model, "idle", "bias")
    assert_same(expected, torch.autograd.grad(y.sum(), x))


def test_input_that_no_longer_requires_grad_before_backward():
    x, w = leaf(4, 4), leaf(4, 4)
    y = checkpointed(lambda x: (x @ w).sin() @ w)(x)
    expected = torch.autograd.grad(((x @ w).sin() @ w).sum(), w)
    x.requires_grad_(False)
    assert_same(expected, torch.autograd.grad(y.sum(), w))


GLOBAL = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


def in_another_function(x):
    return GLOBAL(x)


def holding(bias):
    """Return a function with an object that is no module."""
    held = SimpleNamespace(bias={"it": [bias]})
    return lambda x: (x + held.bias["it"][0]).sin().exp()


def read_unsaved():
    """Return, by name, a region's function that reads a parameter which autograd does not save, and the parameter."""
    own, inner = torch.ones(4, requires_grad=True), nn.Linear(4, 4)
    return {
        "global": (lambda x: GLOBAL(x).sin(), GLOBAL[0].bias),
        "region inside": (lambda x: checkpointed(lambda x: inner(x).sin())(x).exp(), inner.bias),
        "view": (lambda x: (x + own[1:].sum()).sin(), own),
        "global of another function": (lambda x: in_another_function(x).sin(), GLOBAL[2].bias),
        "object": (holding(own), own),
    }


TOO_FAR = {"global of another function", "object"}  # The walk does not find these: docs/limits.md says so.


@pytest.mark.parametrize("name", read_unsaved())
def test_parameter_that_autograd_does_not_save_is_missed_nowhere_when_it_changes(name):
    function, parameter = read_unsaved()[name]
    y = remat.checkpoint(determinism_check="bitwise" if name in TOO_FAR else "default")(function)(leaf(2, 4))
    with torch.no_grad():
        parameter.add_(0.5)
    error, text = remat.MutationError, "modified in place since forward"
    if name in TOO_FAR:
        error, text = remat.MismatchError, "has other values in replay"
    with pytest.raises(error, match=text):
        y.sum().backward()


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_bias_that_is_none_or_no_parameter_in_replay_is_an_error(is_deleted):
    layer = nn.Linear(4, 4)
    y = remat.checkpoint()(lambda x: layer(x).sin())(torch.randn(2, 4, requires_grad=True))
    if is_deleted:
        del layer.bias
        layer.__dict__["bias"] = torch.zeros(4)
    else:
        layer.bias = None
    with pytest.raises(remat.MismatchError, match=r"parameter 1.*then none"):
        y.sum().backward()


def test_views_listed_as_parameters_in_forward_and_attributes_in_replay_are_no_other_parameters(monkeypatch):
    """As the first FSDP has them, with `use_orig_params=True`; the replay watches no op for them."""
    monkeypatch.setattr(unread.Unread, "add", lambda *_: pytest.fail("the replay is watched"))
    flat = nn.Parameter(torch.randn(20))
    layer = nn.Linear(4, 4)
    del layer.weight, layer.bias
    weight, bias = flat[:16].view(4, 4), flat[16:]
    layer._parameters.update(weight=weight, bias=bias)
    x = torch.randn(2, 4, requires_grad=True)
    gradients = []
    for wrap in (lambda function: function, remat.checkpoint()):
        layer._parameters.update(weight=weight, bias=bias)
        y = wrap(lambda x: layer(x).sin().sin())(x)
        layer._parameters.clear()
        layer.__dict__.update(weight=weight, bias=bias)
        gradients.append(torch.autograd.grad(y.sum(), [x, flat], retain_graph=True))
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


class Product(Function):
    """Saves both of its arguments."""

    @staticmethod
    @remat.auto_forward("x", "scale")
    def forward(ctx, x, scale, op_name, remat_policy):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        _, scale = ctx.saved_tensors
        return grad * scale, None, None, None


BY_AUTO_FORWARD = Way("auto_forward", lambda name, _function, *tensors: Product.apply(*tensors, name, SAVE))
SKIPPING = [BY_AUTO_FORWARD if way is BY_HANDLE else way for way in WAYS]


@pairwise(way=SKIPPING, is_buffer=[True, False])
def test_tensor_that_a_skipped_op_saves_replaced_before_backward_is_an_error(way, is_buffer):
    module = nn.Module()
    module.register_buffer("scale", torch.rand(4, 4)) if is_buffer else setattr(module, "scale", torch.rand(4, 4))
    out = way.region(lambda x: way.keep("product", torch.mul, x.sin(), module.scale))(leaf(4, 4))
    module.scale = module.scale * 2
    with pytest.raises(remat.MutationError, match="scale"):
        out.sum().backward()


@pytest.mark.parametrize("policy", [None, [torch.ops.aten.sin.default]], ids=["no policy", "policy"])
@pytest.mark.parametrize("way", SKIPPING, ids=str)
def test_buffer_that_a_nested_region_modifies_after_a_call_has_saved_it_is_an_error(way, policy):
    """Plain autograd refuses it too; hooks around a region, here an enclosing region's, hide no version."""
    module = nn.Module()
    module.register_buffer("scale", torch.rand(4, 4))

    def modify(y):
        with torch.no_grad():
            module.scale.mul_(0.5)
        return y

    def inner(x):
        return remat.checkpoint()(modify)(way.keep("product", torch.mul, x, module.scale))

    block = way.region(inner, **({} if policy is None else {"policy": policy}))
    out = remat.checkpoint()(lambda x: block(x.tanh()))(leaf(4, 4))
    with pytest.raises(remat.MutationError):
        out.sum().backward()


MATMULS = {"policy": remat.policies.save_matmuls}
NESTED = {
    "in a region": lambda f: checkpointed(checkpointed(f)),
    "in two": lambda f: checkpointed(checkpointed(checkpointed(f))),
    "policy inside": lambda f: checkpointed(checkpointed(f, **MATMULS)),
    "policy around": lambda f: checkpointed(checkpointed(f), **MATMULS),
    "in a saved call": lambda f: checkpointed(remat.op(checkpointed(f), "call")),
    "in torch's checkpoint": lambda f: full(checkpointed(f)),
    "in hooks": lambda f: on_cpu(checkpointed(f)),
    "two in torch's checkpoint": lambda f: full(checkpointed(checkpointed(f))),
}


@pytest.mark.parametrize("is_index", [False, True], ids=["factor", "index"])
@pytest.mark.parametrize("name", NESTED)
def test_tensor_that_no_region_reaches_modified_before_the_backward_of_nested_regions_is_an_error(name, is_index):
    box = SimpleNamespace(inner=SimpleNamespace(t=torch.arange(4) if is_index else torch.ones(4)))

    def inner(x):
        return (x.sin()[box.inner.t] if is_index else x.sin() * box.inner.t).exp()

    y = NESTED[name](inner)(leaf(4))
    box.inner.t.mul_(0)
    with pytest.raises(remat.MutationError, match=r"saved tensor \d: .* modified in place"):
        y.sum().backward()


def test_what_an_inner_region_reads_modified_before_a_backward_through_the_outer_one_alone_is_an_error():
    box = SimpleNamespace(inner=SimpleNamespace(t=torch.ones(4)))
    x, w = leaf(4), leaf(4)
    y = checkpointed(lambda x: checkpointed(lambda x: (x.sin() * box.inner.t).exp())(x) * w)(x)
    box.inner.t.mul_(2)
    with pytest.raises(remat.MutationError, match="modified in place"):
        torch.autograd.grad(y.sum(), w)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    mask: torch.Tensor


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    mask: torch.Tensor


class Mapped(dict):
    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


class Encoding(UserDict):
    x = property(lambda self: self["x"], lambda self, value: self.__setitem__("x", value))
    mask = property(lambda self: self["mask"], lambda self, value: self.__setitem__("mask", value))


OBJECTS = [Batch, Slotted, Mapped, Encoding, SimpleNamespace]


@pytest.mark.parametrize("is_replaced", [False, True], ids=["in place", "replaced"])
@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.parametrize("nests", [False, True], ids=["one region", "nested"])
def test_tensor_of_an_argument_that_is_an_object_changed_before_backward_is_an_error(nests, kind, is_replaced):
    linear = nn.Linear(4, 4)
    batch = kind(x=leaf(4), mask=torch.ones(4))

    def function(batch):
        return (linear(batch.x).sin() + batch.mask).exp()

    region = checkpointed(checkpointed(function) if nests else function)
    y = region(batch).sum()
    if is_replaced:
        batch.mask = torch.zeros(4)
    else:
        batch.mask.zero_()
    with pytest.raises(remat.MutationError, match=r"mask.* modified"):
        y.backward()


@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.parametrize("options", [{}, MATMULS], ids=["plain", "policy"])
def test_region_that_sets_tensors_of_an_argument_that_is_an_object_starts_from_those_of_forward(options, kind):
    x, w = leaf(4), leaf(4)

    def function(batch):
        batch.x = batch.x.sin() * w
        return (batch.x * batch.mask).exp()

    def run(region):
        batch = kind(x=x * 1, mask=torch.ones(4))
        region(batch).sum().backward()
        found, x.grad, w.grad = [batch.x, x.grad, w.grad], None, None
        return found

    assert_same(run(function), run(checkpointed(function, **options)))
