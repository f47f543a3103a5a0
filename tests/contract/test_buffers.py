"""Buffers of modules in regions: as forward left them after backward, whatever was recomputed."""

from __future__ import annotations

import contextlib
import copy
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import torch_remat as remat
from tests.helpers import assert_same, leaf, pairwise, plain


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


def named(module):
    """Return a function that finds the module in a global variable."""
    names = {"module": module}
    exec("def function(x):\n    return module(x)", names)
    return names["function"]


class Owner:
    """An object that is no module; it can be called, and knows a method of its own."""

    def __init__(self, function) -> None:
        self.function = function
        self.own = self.run

    def run(self, x):
        return self.function(x)

    __call__ = run


WAYS = {
    "plain": remat.checkpoint(),
    "bitwise": remat.checkpoint(determinism_check="bitwise"),
    "debug": remat.checkpoint(debug=True),
    "policy": remat.checkpoint(policy=[torch.ops.aten.addmm.default]),
    "method": lambda module: remat.checkpoint()(module.forward),
    "region in a region": lambda module: remat.checkpoint()(lambda x: remat.checkpoint()(module)(x)),
    "native region": lambda module: remat.checkpoint()(lambda x: remat.native_save_region("m", module, x).sin()),
    "global variable": lambda module: remat.checkpoint()(named(module)),
    "call": lambda module: remat.checkpoint()(lambda x: remat.op(module, "m")(x).sin()),
    "object": lambda module: remat.checkpoint()(Owner(module)),
    "object around a method of an object": lambda module: remat.checkpoint()(Owner(Owner(module).run)),
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


@pytest.mark.parametrize("fails", [False, True])
def test_what_happened_between_forward_and_backward_stays(fails):
    module = nn.BatchNorm1d(4)

    def block(x):
        y = module(x)
        if fails and remat.is_recomputing():
            raise ValueError("in replay")
        return y.sin()

    y = remat.checkpoint()(block)(torch.randn(8, 4, requires_grad=True))
    module(torch.randn(8, 4))
    left = [(buffer.clone(), buffer._version) for buffer in module.buffers()]
    with pytest.raises(ValueError, match="in replay") if fails else contextlib.nullcontext():
        y.sum().backward()
    assert_same([buffer for buffer, _ in left], list(module.buffers()))
    assert [version for _, version in left] == [buffer._version for buffer in module.buffers()]


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
    "wrapper": lambda: (TwoTensor(torch.ones(4), torch.ones(4)), lambda odd, y: odd.add_(1).a.clone() * y),
    "meta": lambda: (torch.ones(4, device="meta"), None),
}


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*it wrote a tensor in place that is neither")
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


@pytest.mark.parametrize("way", ["plain", "method", "region in a region", "call", "debug"])
def test_buffers_that_the_region_initializes_change_once(way):
    def made():
        torch.manual_seed(1)
        return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Tanh())

    module, twin = made(), made()
    expected = train((lambda m: lambda x: m(x).sin()) if way in SINES else lambda m: m, twin)
    assert_same(expected, train(WAYS[way], module))


MULTIPLICATIONS = {"policy": [torch.ops.aten.addmm.default]}
NORMED = {
    "plain": lambda module: remat.checkpoint()(module),
    "policy": lambda module: remat.checkpoint(**MULTIPLICATIONS)(module),
    "policy outside": lambda module: remat.checkpoint(**MULTIPLICATIONS)(remat.checkpoint()(module)),
}


def spectral(normed):
    return lambda: nn.Sequential(normed(nn.Linear(4, 8)), nn.LeakyReLU(0.2), normed(nn.Linear(8, 4)))


def instance(kind):
    return lambda: nn.Sequential(nn.Linear(8, 8), kind(3, track_running_stats=True), nn.Tanh())


STATISTICS = {
    "spectral": (spectral(nn.utils.parametrizations.spectral_norm), (3, 4)),
    "older spectral": (spectral(nn.utils.spectral_norm), (3, 4)),
    "batch": (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()), (4, 8)),
    # These read copies of their statistics, and then write them.
    "instance, 1": (instance(nn.InstanceNorm1d), (2, 3, 8)),
    "instance, 2": (instance(nn.InstanceNorm2d), (2, 3, 2, 8)),
    "instance, 3": (instance(nn.InstanceNorm3d), (2, 3, 2, 2, 8)),
}


@pairwise(how=NORMED, norm=STATISTICS)
def test_module_with_statistics_may_run_again_before_backward(norm, how):
    """A discriminator sees real and made data: the second call changes what replay of the first one reads."""
    make, shape = STATISTICS[norm]

    def program(wrap):
        torch.manual_seed(0)
        module, results = make(), []
        for _ in range(2):
            x, region = leaf(*shape), wrap(module)
            (region(x).square().sum() - region(x.cos()).sum()).backward()
            results += [x.grad, *(parameter.grad.clone() for parameter in module.parameters())]
        return [*results, *module.buffers()]

    assert_same(program(plain), program(NORMED[how]))


class Cached(nn.Module):
    """Makes a buffer when it first runs, as attention does with the biases of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("bias", None, persistent=False)

    def forward(self, x):
        if self.bias is None:
            self.bias = -torch.arange(4.0).mul(0.5)
        return (self.linear(x) + self.bias).softmax(-1)


@pytest.mark.parametrize("called", [False, True])
def test_buffer_that_forward_makes_is_there_once_replay_has_made_it_too(called):
    def block(x):
        y = remat.op(module, "module")(x) if called else module(x)
        return (y * module.bias).sin() + module(y)

    gradients = []
    for wrap in (lambda function: function, remat.checkpoint(policy=[torch.ops.aten._softmax.default])):
        torch.manual_seed(0)
        module, x = Cached(), leaf(3, 4)
        y = wrap(block)(x)
        made = module.bias
        y.sum().backward()
        assert module.bias is made
        wrap(block)(x).sum().backward()
        gradients.append([x.grad, *(p.grad for p in module.parameters())])
    assert_same(*gradients)


@pytest.mark.parametrize("call", [remat.op, lambda function, name: partial(remat.native_save_region, name, function)])
def test_region_does_not_own_the_graph_of_what_a_call_binds(call):
    module = nn.Module()
    module.last = torch.zeros(4)

    def attend(x):
        module.last = x.sin()
        return module.last.exp()

    y = remat.checkpoint()(lambda x: call(attend, "attend")(x.cos()) * module.last.detach())(leaf(4))
    last = weakref.ref(module.last)
    module.last = None
    del y
    assert last() is None


class Scaled(nn.Module):
    """Multiplies by a buffer that it sets before, as delayed scaling for float8 does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        with torch.no_grad():
            self.scale.copy_(x.abs().max() + 1)
        return x * self.scale


def in_native_region(module, **options):
    return remat.checkpoint(**options)(lambda x: remat.native_save_region("m", module, x.sin()).sin())


def in_saved_call(module, **options):
    return remat.checkpoint(**options)(lambda x: remat.op(module, "m")(x.sin()).sin())


SAVED_AND_MODIFIED = {
    "float8": (Scaled, {}),
    "float8, policy": (Scaled, {"policy": [torch.ops.aten.mul.Tensor]}),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), {"determinism_check": "bitwise"}),
}


@pairwise(wrap=[in_native_region, in_saved_call], case=SAVED_AND_MODIFIED)
def test_call_that_saves_a_buffer_that_it_modifies_is_exact(wrap, case):
    make, options = SAVED_AND_MODIFIED[case]
    torch.manual_seed(1)
    module = make()
    twin = copy.deepcopy(module)
    expected = train(lambda m: lambda x: m(x.sin()).sin(), module)
    assert_same(expected, train(partial(wrap, **options), twin))


class Rotary(nn.Module):
    """Makes a table when it first runs, and a longer one for longer sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table, self.length = nn.Linear(4, 4), None, 0

    def forward(self, x):
        if self.table is None or self.length < len(x):
            self.length = len(x)
            self.table = torch.arange(self.length)[:, None].cos()
        return (self.linear(x) * self.table[: len(x)]).exp()


@pytest.mark.parametrize("way", ["plain", "policy", "method", "region in a region", "native region", "call"])
def test_table_that_grows_with_a_length_beside_it_is_exact(way):
    """Two graphs are there at once: replay of the first finds what its forward found."""

    def program(wrap, module):
        torch.manual_seed(1)
        results = []
        for length in (2, 4):
            x, y = leaf(length, 4), leaf(length + 1, 4)
            out = wrap(module)(x).sum() + wrap(module)(y).sum()
            out.backward()
            results += [x.grad, y.grad, torch.tensor(module.length)]
        return [*results, module.table, module.linear.weight.grad]

    torch.manual_seed(0)
    module = Rotary()
    twin = copy.deepcopy(module)
    assert_same(program((lambda m: lambda x: m(x).sin()) if way in SINES else plain, module), program(WAYS[way], twin))
