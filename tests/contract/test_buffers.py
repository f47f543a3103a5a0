"""Buffers of modules in regions: as forward left them after backward, whatever was recomputed."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import torch_remat as remat
from tests.helpers import assert_same, assert_same_program, leaf, name_of, pairwise, plain


class Counting(nn.Module):
    """Changes buffers in each way: counted and not, in place and by binding them anew, its own and a child's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(4, 4))
        self.register_buffer("bound", torch.zeros(3))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))
        self.register_buffer("absent", None)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x):
        y = self.norm(self.linear(x)).relu()
        y = F.batch_norm(y, self.mean, self.var, training=True)
        self.steps += 1
        self.bound = self.bound + self.steps
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.t() @ y, alpha=0.1)
            self.seen.resize_(self.seen.numel() + 1).fill_(float(self.steps))
        return y.sin()


def train(wrap, module, backward=lambda y: y.sum().backward()):
    torch.manual_seed(0)
    for _ in range(3):
        x = torch.randn(8, 4, requires_grad=True)
        backward(wrap(module)(x))
    return [*(p.grad for p in module.parameters()), *module.buffers()]


def assert_same_or_refused(expected, program):
    """Assert that a program with a gradient inside of its forward is right, or that an error says what it read."""
    try:
        found = program()
    except (remat.MutationError, remat.UsageError):
        return
    assert_same(expected, found)


def named(module, body="return module(x)"):
    """Return a function that finds the module in a global variable."""
    names = {"module": module}
    exec(f"def function(x):\n    {body}", names)
    return names["function"]


class Owner:
    """An object that is no module; it can be called, and knows a method of its own."""

    def __init__(self, *held) -> None:
        self.held = held
        self.own = self.run

    def run(self, x):
        return self.held[0](x)

    __call__ = run


class Wrapper:
    """An object that calls what it was given."""

    def __init__(self, function) -> None:
        self.function = function

    def __call__(self, x):
        return self.function(x)


WAYS = {
    "plain": remat.checkpoint(),
    "to the end": remat.checkpoint(early_stop=False),
    "bitwise": remat.checkpoint(determinism_check="bitwise"),
    "debug": remat.checkpoint(debug=True),
    "policy": remat.checkpoint(policy=[torch.ops.aten.addmm.default]),
    "method": lambda module: remat.checkpoint()(module.forward),
    "closure": lambda module: remat.checkpoint()(lambda x: module(x)),
    "argument": lambda module: lambda x: remat.checkpoint()(lambda m, y: m(y))(module, x),
    "region in a region": lambda module: remat.checkpoint()(lambda x: remat.checkpoint()(module)(x)),
    "native region": lambda module: remat.checkpoint()(lambda x: remat.native_save_region("m", module, x).sin()),
    "global variable": lambda module: remat.checkpoint()(named(module)),
    "global variable of an inner function": lambda module: remat.checkpoint()(
        named(module, "return [inner() for inner in [lambda: module(x)]][0]")
    ),
    "call": lambda module: remat.checkpoint()(lambda x: remat.op(module, "m")(x).sin()),
    "object": lambda module: remat.checkpoint()(Owner(module)),
    "method of an object": lambda module: remat.checkpoint()(Owner(module).run),
    "object around a method": lambda module: remat.checkpoint()(Wrapper(module.forward)),
    "object around a method of an object": lambda module: remat.checkpoint()(Wrapper(Owner(module).run)),
}
SINES = {"native region", "call"}


@pytest.mark.parametrize("way", WAYS)
def test_buffers_are_changed_once(way):
    torch.manual_seed(1)
    module = Counting()
    twin = copy.deepcopy(module)
    expected = train((lambda m: lambda x: m(x).sin()) if way in SINES else lambda m: m, module)
    assert_same(expected, train(WAYS[way], twin))
    assert module.steps == twin.steps == 3


def test_what_happened_between_forward_and_backward_stays():
    module = nn.BatchNorm1d(4)
    y = remat.checkpoint()(module)(torch.randn(8, 4, requires_grad=True))
    module(torch.randn(8, 4))
    left = [buffer.clone() for buffer in module.buffers()]
    versions = [buffer._version for buffer in module.buffers()]
    y.sum().backward()
    assert_same(left, list(module.buffers()))
    assert versions == [buffer._version for buffer in module.buffers()]


def test_replay_that_fails_leaves_buffers_alone():
    module = nn.BatchNorm1d(4)
    fails = []

    def block(x):
        y = module(x)
        if fails:
            raise ValueError("in replay")
        return y.sin()

    y = remat.checkpoint()(block)(torch.randn(8, 4, requires_grad=True))
    left = [buffer.clone() for buffer in module.buffers()]
    fails.append(True)
    with pytest.raises(ValueError, match="in replay"):
        y.sum().backward()
    assert_same(left, list(module.buffers()))


def test_buffer_that_autograd_saved_is_still_compared():
    module = nn.Module()
    module.register_buffer("scale", torch.ones(4))
    y = remat.checkpoint()(lambda x, m: (x.sin() * m.scale).sin())(torch.randn(4, requires_grad=True), module)
    module.scale.mul_(2)
    with pytest.raises(remat.MutationError):
        y.sum().backward()


def test_replay_reads_what_forward_read():
    """A spectral norm moves its buffers in each forward, and divides by what they say then."""

    def step(wrap):
        torch.manual_seed(0)
        module = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        return train(lambda m: lambda x: wrap(m)(x[:, :4]).sin(), module)

    assert_same(step(lambda module: module), step(remat.checkpoint()))


class Odd(nn.Module):
    """Has a buffer of any kind, reads it if `read` does, and counts its steps."""

    def __init__(self, buffer, read=None):
        super().__init__()
        self.linear, self.read = nn.Linear(4, 4), read
        self.register_buffer("odd", buffer)
        self.register_buffer("steps", torch.zeros(4))

    def forward(self, x):
        self.steps += 1
        y = self.linear(x).sin()
        return y if self.read is None else self.read(self.odd, y)


ODD = {
    "sparse": lambda: (torch.eye(8).to_sparse(), torch.sparse.mm),
    "sparse vector": lambda: (torch.ones(8).to_sparse(), None),
    "sparse rows": lambda: (torch.eye(8).to_sparse_csr(), torch.sparse.mm),
    "wrapper": lambda: (TwoTensor(torch.ones(4), torch.ones(4)), lambda odd, y: odd.add_(1).a.clone() * y),
    "jagged": lambda: (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), None),
    "overlapping": lambda: (torch.ones(1).expand(4), torch.mul),
    "meta": lambda: (torch.ones(4, device="meta"), None),
}


@pytest.mark.filterwarnings(
    "ignore:Sparse", "ignore:The PyTorch API of nested", "ignore:.*it wrote a tensor in place that is neither"
)
@pairwise(kind=ODD, way=WAYS)
def test_buffers_of_any_kind(kind, way):
    """Below the dispatch of a wrapper there is no memory; a sparse tensor has no size in bytes."""

    def made():
        torch.manual_seed(1)
        return Odd(*ODD[kind]())

    module, twin = made(), made()
    expected = train(lambda m: (lambda x: m(x).sin()) if way in SINES else m, twin)
    found = train(WAYS[way], module)
    for one, other in zip(expected, found, strict=True):
        if type(one) is TwoTensor:
            one, other = torch.stack([one.a, one.b]), torch.stack([other.a, other.b])
        if one.layout is torch.strided and not one.is_meta:
            assert torch.equal(one, other)


@pytest.mark.parametrize("way", ["plain", "to the end", "bitwise", "debug", "method", "closure", "region in a region"])
def test_buffers_that_the_region_initializes_change_once(way):
    def made():
        torch.manual_seed(1)
        return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Tanh())

    module, twin = made(), made()
    assert_same(train(lambda m: m, twin), train(WAYS[way], module))


def raises_and_is_caught(y):
    def fails(y):
        raise KeyError

    try:
        return remat.native_save_region("fails", fails, y)
    except KeyError:
        return y


SAVED = {
    "function": lambda y: remat.native_save_region("kept", torch.sin, y),
    "closure": lambda y: remat.native_save_region("kept", lambda: y.sin() + 1),
    "call": lambda y: remat.op(lambda y: y.sin() * y, "kept")(y),
    "recomputed": lambda y: remat.op(torch.sin, "kept", policy=remat.CheckpointPolicy.RECOMPUTE)(y),
    "an exception": raises_and_is_caught,
}


@pairwise(
    name=SAVED, where=["before", "after", "inside"], policy=[None, lambda ctx, op, *args, **kwargs: False], ids=name_of
)
def test_module_that_changes_its_buffers_beside_what_is_saved_in_the_region(name, where, policy):
    """It reads what it changes; the log of what is saved knows nothing of that."""

    def program(wrap):
        torch.manual_seed(3)
        module = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4))
        x = leaf(4, 4)

        def block(x, module):
            if where == "inside":
                x = remat.native_save_region("inside", lambda: module(x).exp())
            h = SAVED[name](module(x) if where == "before" else x * 2)
            return (module(h) if where == "after" else h).exp() * 2

        y = wrap(block)(x, module)
        y.sum().backward()
        return (y, x.grad, *[parameter.grad for parameter in module.parameters()], *module.buffers())

    assert_same_program(program, **({} if policy is None else {"policy": policy}))


class Inner(nn.Module):
    """Takes a gradient between a change of a buffer in a native region and what reads that."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("average", torch.ones(4))

    def update(self, h):
        with torch.no_grad():
            self.average.lerp_(h.mean(0), 0.5)
        return h.sin()

    def forward(self, x):
        h = remat.native_save_region("update", self.update, self.linear(x))
        scaled = (h * self.average.clone()).exp()
        (gradient,) = torch.autograd.grad(scaled.sum(), h, create_graph=True)
        return gradient * scaled * self.average.clone()


def test_gradient_inside_forward_after_a_native_region_changed_a_buffer_is_refused():
    with pytest.raises(remat.UsageError, match="modified a tensor created outside the region"):
        train(remat.checkpoint(), Inner())


class Steps(nn.Module):
    """Counts its calls in a buffer, and goes by it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return x * (self.steps * 1)


NAMED = {
    "nothing": lambda x: x.sin(),
    "a native region": lambda x: remat.native_save_region("kept", lambda x: x.sin(), x),
    "a call": lambda x: remat.op(torch.sin, "kept")(x),
}
SAVING = {
    "plain": {},
    "some": {"policy": [torch.ops.aten.exp.default]},
    "all": {"policy": lambda ctx, op, *args, **kwargs: remat.CheckpointPolicy.SAVE},
}


@pairwise(options=SAVING, named=NAMED, gradient=["of a copy", "kept graph", "second order"])
@pytest.mark.filterwarnings("ignore::torch_remat.RematWarning")
def test_replay_inside_forward_starts_from_buffers_as_forward_found_them(options, named, gradient):
    """They have changed by then, and change again afterwards."""

    def program(wrap):
        torch.manual_seed(2)
        module, x = Steps(), leaf(4)
        first = NAMED["nothing" if wrap is plain else named]

        def block(x):
            y = module(first(x)).sin()
            if gradient == "of a copy":
                point = x.detach().requires_grad_()
                (taken,) = torch.autograd.grad(module(point).exp().sum(), point)
            else:
                (taken,) = torch.autograd.grad(y.sum(), x, retain_graph=True, create_graph=gradient == "second order")
            return module(y * taken).exp()

        y = wrap(block)(x * 1)
        y.sum().backward()
        return y, x.grad, module.steps

    assert_same_or_refused(program(plain), lambda: program(remat.checkpoint(**SAVING[options])))


MULTIPLICATIONS = {"policy": [torch.ops.aten.addmm.default]}
NORMED = {
    "plain": lambda module: remat.checkpoint()(module),
    "policy": lambda module: remat.checkpoint(**MULTIPLICATIONS)(module),
    "policy that saves nothing": lambda module: remat.checkpoint(
        policy=lambda ctx, op, *args, **kwargs: remat.CheckpointPolicy.RECOMPUTE
    )(module),
    "native region of a part": lambda module: remat.checkpoint(policy=[torch.ops.aten.leaky_relu.default])(
        lambda x: module[2](module[1](remat.native_save_region("first", module[0], x)))
    ),
    "policy inside": lambda module: remat.checkpoint()(remat.checkpoint(**MULTIPLICATIONS)(module)),
    "policy outside": lambda module: remat.checkpoint(**MULTIPLICATIONS)(remat.checkpoint()(module)),
}


@pytest.mark.parametrize("how", NORMED)
@pytest.mark.parametrize("normed", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_module_with_spectral_norm_may_run_again_before_backward(normed, how):
    """A discriminator sees real and made data: the second call changes what replay of the first one reads."""

    def program(wrap):
        torch.manual_seed(0)
        module = nn.Sequential(normed(nn.Linear(4, 8)), nn.LeakyReLU(0.2), normed(nn.Linear(8, 4)))
        results = []
        for _ in range(2):
            x = leaf(3, 4)
            region = wrap(module)
            (region(x).square().sum() - region(x.cos()).sum()).backward()
            results += [x.grad, *(parameter.grad.clone() for parameter in module.parameters())]
        return [*results, *module.buffers()]

    assert_same(program(plain), program(NORMED[how]))


SPARED = {
    "call": lambda function: remat.op(function, "kept"),
    "opaque call": lambda function: remat.op(function, "kept", opaque=True),
    "native region": lambda function: partial(remat.native_save_region, "kept", function),
    "native region to recompute": lambda function: remat.op(function, "kept", policy=remat.CheckpointPolicy.RECOMPUTE),
}


@pairwise(options=SAVING, spared=SPARED, by=["the result", "the argument"])
@pytest.mark.filterwarnings("ignore::torch_remat.RematWarning")
def test_gradient_taken_after_a_call_of_a_module_with_spectral_norm(options, spared, by):
    """The call is made again, though it was to be left out, on what the buffers were."""

    def program(wrap, call):
        torch.manual_seed(0)
        module = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        x = leaf(3, 4)

        def penalized(x):
            h = call(module)(x * 1.5)
            y = h.exp()
            (gradient,) = torch.autograd.grad(y.sum(), h if by == "the result" else x, retain_graph=True)
            return (y * gradient).exp()

        y = wrap(penalized)(x)
        y.sum().backward()
        return y, x.grad, *(parameter.grad for parameter in module.parameters()), *module.buffers()

    assert_same_or_refused(program(plain, plain), lambda: program(remat.checkpoint(**SAVING[options]), SPARED[spared]))
