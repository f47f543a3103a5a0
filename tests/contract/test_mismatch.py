"""Replays that differ from forward: other ops, other shapes, other parameters."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call

import torch_remat as remat
from tests.helpers import (
    Mlp,
    assert_same,
    assert_same_program,
    chain,
    checkpointed,
    leaf,
    pairwise,
    parameter_gradients,
)


def differing(forward, replay):
    """Return a function that does one thing in forward and another in replay."""

    def block(*args):
        return (replay if remat.is_recomputing() else forward)(*args)

    return block


def raised(block, *args, error=remat.MismatchError, **options):
    """Run a region and its backward; return the error that backward must raise."""
    y = checkpointed(block, region_name="block", **options)(*args)
    with pytest.raises(error) as caught:
        y.sum().backward()
    assert caught.value.region == "block"
    assert "block" in str(caught.value)
    assert not remat.is_recomputing()
    return caught.value


def position(error):
    """Return the number in the name of the tensor that an error is about."""
    found = re.search(r"\d+", error.tensor or "")
    assert found, f"no position in {error.tensor!r}"
    return int(found.group())


def sines(count, dtype=None, shape=None, at=None):
    """Return a function of `count` sines, whose value changes dtype or shape before sine number `at`."""

    def block(x):
        for index in range(count):
            if index == at:
                x = x.to(dtype) if dtype else x.expand(shape)
            x = x.sin()
        return x

    return block


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(("forward", "replay"), [(3, 2), (3, 0), (1, 0), (10, 9)])
def test_replay_that_saves_fewer_tensors_raises_and_tells_a_count(early_stop, forward, replay):
    error = raised(differing(sines(forward), sines(replay)), leaf(3), early_stop=early_stop)
    numbers = {int(number) for number in re.findall(r"\d+", str(error))}
    assert numbers & {forward, replay}


@pytest.mark.parametrize(("forward", "replay"), [(2, 3), (1, 5)])
def test_replay_that_saves_more_tensors_raises_where_it_runs_to_its_end(forward, replay):
    raised(differing(sines(forward), sines(replay)), leaf(3), early_stop=False)


def test_replay_that_saves_more_tensors_after_the_last_needed_one_is_right_under_early_stop():
    x = leaf(3)
    checkpointed(differing(sines(2), sines(4)))(x).sum().backward()
    assert_same(x.grad, torch.autograd.grad(x.sin().sin().sum(), x)[0])


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(
    "replay",
    [lambda x: (x.tanh(), x.sin().exp())[1], lambda x: (x.cos(), x.sin().exp())[1], lambda x: x.exp().sin()],
    ids=["one more that saves its result", "one more that saves its input", "another order"],
)
def test_replay_with_more_or_reordered_ops_of_equal_shapes_is_never_silently_wrong(early_stop, replay):
    x = leaf(3)
    expected = torch.autograd.grad(x.sin().exp().sum(), x)
    y = checkpointed(differing(lambda x: x.sin().exp(), replay), early_stop=early_stop)(x)
    try:
        actual = torch.autograd.grad(y.sum(), x)
    except remat.MismatchError:
        return
    assert_same(expected, actual)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_replay_with_another_dtype_raises_with_the_position(at):
    replay = sines(4, dtype=torch.float64, at=at)
    error = raised(differing(sines(4), replay), leaf(3))
    other = raised(differing(sines(4), sines(4, dtype=torch.float64, at=0)), leaf(3))
    assert position(error) - position(other) == at
    assert "float64" in str(error)
    assert "float32" in str(error)


@pytest.mark.parametrize("at", [0, 2])
def test_replay_with_another_shape_raises_with_the_position(at):
    error = raised(differing(sines(3), sines(3, shape=(7, 5), at=at)), leaf(5))
    other = raised(differing(sines(3), sines(3, shape=(7, 5), at=0)), leaf(5))
    assert position(error) - position(other) == at
    assert re.search(r"7\D+5", str(error))


def test_replay_with_another_device_raises():
    raised(differing(lambda x: (x * torch.ones(3)).sin(), lambda x: (x * torch.ones(3, device="meta")).sin()), leaf(3))


def test_region_without_name_raises_a_mismatch_too():
    y = checkpointed(differing(sines(2), sines(1)))(leaf(3))
    with pytest.raises(remat.MismatchError):
        y.sum().backward()


def test_mismatch_in_an_inner_region_names_the_inner_region():
    inner = checkpointed(differing(sines(3), sines(3, dtype=torch.float64, at=1)), region_name="inner")
    y = checkpointed(lambda x: inner(x.cos()).tanh(), region_name="outer")(leaf(3))
    with pytest.raises(remat.RematError) as caught:
        y.sum().backward()
    assert caught.value.region in {"inner", "outer"}


def test_state_that_forward_changes_and_replay_sees_changed_raises():
    seen = []

    def block(x):
        seen.append(None)
        return sines(len(seen))(x) if len(seen) > 1 else sines(3)(x)

    raised(block, leaf(3))


class TwoLayers(nn.Module):
    """Two linear layers, the whole of which is a region."""

    def __init__(self, wrap=checkpointed):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.wrap = wrap

    def body(self, x):
        return self.two(self.one(x).sin())

    def forward(self, x):
        return self.wrap(self.body)(x)


def other_parameters(module):
    return {name: (p.detach() + 1).requires_grad_() for name, p in module.named_parameters()}


@pytest.mark.parametrize("input_needs_grad", [True, False])
def test_region_inside_functional_call_raises_with_the_position(input_needs_grad):
    module = TwoLayers()
    module.wrap = lambda f: checkpointed(f, region_name="block")
    x = torch.randn(2, 3, requires_grad=input_needs_grad)
    y = functional_call(module, other_parameters(module), (x,))
    with pytest.raises(remat.RematError) as caught:
        y.sum().backward()
    assert caught.value.region == "block"
    assert position(caught.value) >= 0


def test_region_inside_functional_call_with_backward_inside_is_equal():
    """Backward ends before the parameters are swapped back, so replay sees what forward saw."""

    def program(wrap):
        module = TwoLayers(wrap)
        parameters = other_parameters(module)
        x = leaf(2, 3)

        class Step(nn.Module):
            def __init__(self):
                super().__init__()
                self.module = module

            def forward(self, x):
                return torch.autograd.grad(self.module(x).sum(), [x, *parameters.values()])

        return functional_call(Step(), {f"module.{name}": p for name, p in parameters.items()}, (x,))

    assert_same_program(program, replays=1)


def test_region_around_functional_call_is_equal():
    def program(wrap):
        module = Mlp(3)
        parameters = other_parameters(module)
        x = leaf(2, 3)
        y = wrap(lambda parameters, x: functional_call(module, parameters, (x,)))(parameters, x)
        y.sum().backward()
        return y, x.grad, *(p.grad for p in parameters.values())

    assert_same_program(program, replays=1)


@pytest.mark.parametrize("name", ["one", "two"])
@pytest.mark.parametrize("input_needs_grad", [True, False])
def test_swapped_module_is_an_error_that_names_the_position_or_changes_nothing(name, input_needs_grad):
    module = TwoLayers()
    x = torch.randn(2, 3, requires_grad=input_needs_grad)
    leaves = [*module.parameters(), *([x] if input_needs_grad else [])]
    expected = torch.autograd.grad(module.body(x).sin().sum(), leaves)
    y = checkpointed(module.body, region_name="block")(x)
    setattr(module, name, nn.Linear(3, 3))
    try:
        actual = torch.autograd.grad(y.sin().sum(), leaves)
    except remat.RematError as error:
        assert error.region == "block"  # noqa: PT017
        assert position(error) >= 0  # noqa: PT017
    else:
        assert_same(expected, actual)


def test_swapped_weight_is_an_error_and_the_old_gradients_stay_none():
    module = TwoLayers()
    old = module.one.weight
    y = checkpointed(module.body)(leaf(2, 3))
    module.one.weight = nn.Parameter(old.detach().clone())
    with pytest.raises(remat.RematError):
        y.sum().backward()
    assert old.grad is None
    assert module.one.weight.grad is None


def test_parameter_whose_data_was_replaced_by_another_storage_is_never_silently_wrong():
    module = TwoLayers()
    x = leaf(2, 3)
    y = checkpointed(module.body)(x)
    expected = torch.autograd.grad(TwoLayers.body(module, x).sin().sum(), [x, *module.parameters()])
    module.two.weight.data = module.two.weight.data + 1
    try:
        actual = torch.autograd.grad(y.sin().sum(), [x, *module.parameters()])
    except RuntimeError:
        return
    assert_same(expected, actual)


def test_parameters_given_to_replay_as_before_are_no_error_after_a_swap_and_a_swap_back():
    def program(wrap):
        module = TwoLayers(wrap)
        x = leaf(2, 3)
        y = module(x)
        kept, module.one = module.one, nn.Linear(3, 3)
        module.one = kept
        y.sum().backward()
        return x.grad, *parameter_gradients(module)

    assert_same_program(program, replays=1)


def test_next_region_is_right_after_a_mismatch():
    raised(differing(sines(3), sines(1)), leaf(3))
    x = leaf(3)
    assert_same(torch.autograd.grad(checkpointed(chain)(x).sum(), x), torch.autograd.grad(chain(x).sum(), x))


def first(h):
    return h[:4]


def other_view(one, other):
    """Return a block that takes one view in forward and another in replay, of a result, an argument or a weight."""

    def take(tensor):
        return (other if remat.is_recomputing() else one)(tensor)

    return {
        "result": lambda x, w: (take(x.sin()) @ w[:4, :4]).sin(),
        "argument": lambda x, w: (take(x) @ w[:4, :4]).sin(),
        "argument in an op of its own": lambda x, w: take(x).sin().sin(),
        "weight": lambda x, w: (x[:4, :4].sin() @ take(w)).sin(),
        "constant": lambda x, w: (x[:4, :4] * take(torch.ones(8, 4))).sin(),
    }


OTHER_VIEWS = {
    "transposed": (first, lambda h: h[:4].t()),
    "another part": (first, lambda h: h[4:]),
    "with other strides": (first, lambda h: h[::2]),
    "not transposed": (lambda h: h[:4].t(), first),
    "transposed, all of it": (lambda h: h.view(4, 8)[:, :4].reshape(4, 4), lambda h: h.view(4, 8)[:, :4].t()),
}


@pairwise(
    name=OTHER_VIEWS,
    place=other_view(first, first),
    policy=[None, remat.policies.save_matmuls, lambda ctx, op, *args, **kwargs: False],
)
def test_replay_that_takes_another_view_of_the_same_shape_is_never_silently_wrong(name, place, policy):
    one, other = OTHER_VIEWS[name]
    x, w = leaf(8, 4), nn.Parameter(torch.randn(8, 4))
    expected = torch.autograd.grad(other_view(one, one)[place](x, w).sum(), (x, w), allow_unused=True)
    y = checkpointed(other_view(one, other)[place], region_name="block", policy=policy)(x, w)
    try:
        actual = torch.autograd.grad(y.sum(), (x, w), allow_unused=True)
    except remat.MismatchError:
        return
    for want, got in zip(expected, actual, strict=True):
        assert (want is None) == (got is None)
        assert want is None or torch.equal(want, got)


def test_another_view_is_an_error_that_shows_both():
    block = other_view(lambda h: h, lambda h: h.t())["argument"]
    with pytest.raises(remat.MismatchError, match=r"a whole tensor here, but replay saved a view with strides"):
        checkpointed(block)(leaf(4, 4), leaf(4, 4)).sum().backward()


@pytest.mark.parametrize("hooks", [contextlib.nullcontext, torch.autograd.graph.save_on_cpu])
@pytest.mark.parametrize("given", [lambda x: x, lambda x: x.t(), lambda x: x[1:], lambda x: x[:, 1:].t()])
def test_views_of_inputs_that_come_back_with_other_strides_are_no_difference(given, hooks):
    def block(x, w):
        return (x.t() @ x * x.t().sum() + x[1:].sum() * x.view_as(x).exp().t().mean()).sin()

    base = leaf(5, 5)
    expected = torch.autograd.grad(block(given(base), None).sum(), base)
    with hooks():
        y = checkpointed(block)(given(base * 1), None)
    y.sum().backward()
    assert torch.equal(base.grad, expected[0])


@pytest.mark.parametrize("policy", [None, [torch.ops.aten.sin.default]], ids=["plain", "policy"])
@pytest.mark.parametrize("differs", ["op", "dtype", "layout"])
def test_error_names_the_line_that_does_otherwise_in_replay(differs, policy):
    odd = {"op": torch.sigmoid, "dtype": torch.Tensor.double, "layout": torch.t}[differs]

    def other(x):
        return odd(x.exp()).sin()  # this line

    text = str(raised(differing(lambda x: x.exp().sin(), other), leaf(4, 4), policy=policy))
    assert f"at {Path(__file__).name}:{other.__code__.co_firstlineno + 1}" in text


def test_replaced_and_changed_parameters_are_told_with_the_line_that_reads_them():
    module = nn.Linear(4, 4)
    weight = module.weight
    for change, error in [
        (lambda: setattr(module, "bias", nn.Parameter(torch.ones(4))), remat.MismatchError),
        (lambda: weight.add_(1), remat.MutationError),
    ]:
        y = checkpointed(lambda x: module(x).sin(), region_name="block")(leaf(4, 4))
        with torch.no_grad():
            change()
        with pytest.raises(error, match=rf"reads .*at {Path(__file__).name}:\d+"):
            y.sum().backward()
