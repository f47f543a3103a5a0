"""Skipped ops that replay runs after all, where C++ code takes the data of a placeholder or refuses it."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import torch_remat as remat
from tests.helpers import alive, assert_clean_state, assert_same, leaf, watch
from tests.native_programs import aten, keep, region, uncollected

EVERYTHING = lambda ctx, op, *args, **kwargs: op is not aten.mul.Tensor  # noqa: E731


class Sub(torch.Tensor):
    """A tensor of another type."""


def stumble(x):
    """Return a tensor by way of another type, which no placeholder can take."""
    return x.as_subclass(Sub).as_subclass(torch.Tensor)


def packed(kind):
    rnn = kind(8, 8, batch_first=True)

    def body(x):
        sequence = pack_padded_sequence(x.view(2, 2, 8), [2, 1], batch_first=True)
        return pad_packed_sequence(rnn(sequence)[0], batch_first=True)[0]

    return body


def ctc(x):
    return F.ctc_loss(x.log_softmax(-1)[:, None], torch.tensor([[1, 2]]), [4], [2])


def subclass(x):
    return (x.exp().as_subclass(Sub) * 2).as_subclass(torch.Tensor)


BODIES = {"gru": packed(nn.GRU), "lstm": packed(nn.LSTM), "ctc": ctc, "subclass": subclass}


def gradients(function, x):
    """Return output and gradient, and how often the user was told of a second run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = function(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
    said = [str(warning.message) for warning in caught if issubclass(warning.category, remat.RematWarning)]
    return y.detach(), grad, said


def check(function, checkpointed, x, warned=1):
    y, grad, _ = gradients(function, x)
    y2, grad2, said = gradients(checkpointed, x)
    assert_same([y, grad], [y2, grad2])
    assert len(said) == warned
    assert all("recomputes" in text for text in said)
    assert_clean_state()


# Native regions


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_native_region_runs_once_more_where_placeholders_will_not_do(body, closure):
    function = BODIES[body]

    def whole(x, keep=lambda _name, function, *args: function(*args)):
        y = keep("a", lambda: function(x.sin())) if closure else keep("a", function, x.sin())
        return y.cos().exp()

    check(whole, region()(lambda x: whole(x, keep)), leaf(4, 8))


def test_warning_names_the_reader_and_comes_once_for_a_graph():
    x = leaf(4, 8)
    y = region(region_name="block")(lambda x: keep("a", BODIES["gru"], x.sin()).sin().exp())(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = torch.autograd.grad(y.sum(), x, retain_graph=True)
        second = torch.autograd.grad(y.sum(), x)
    assert_same(first, second)
    (warning,) = caught
    assert warning.category is remat.RematWarning
    assert "block::a" in str(warning.message)
    assert "gru reads this result in replay" in str(warning.message)
    assert warning.filename == __file__


class Outside:
    """What a native region changes outside."""

    def __init__(self):
        self.count = torch.zeros(3)
        self.norm = nn.BatchNorm1d(8)

    def tensors(self):
        return [self.count, *self.norm.buffers()]


@pytest.mark.parametrize("policy", [None, remat.policies.save_matmuls])
def test_nothing_outside_is_changed_again(policy):
    def function(x, outside, keep=lambda _name, function, *args: function(*args)):
        def body(x):
            outside.count.add_(1)
            outside.count[1:].mul_(3)
            return stumble(outside.norm(x).exp()) * 2

        return keep("a", body, x.sin()).cos().exp()

    x, ours = leaf(4, 8), Outside()
    wrapped = region(*[policy] * (policy is not None))
    y = wrapped(lambda x: function(x, ours, keep))(x)
    before = [tensor._version for tensor in ours.tensors()], [tensor.clone() for tensor in ours.tensors()]
    with pytest.raises(remat.PlaceholderError):  # to run it once more would change them again
        y.sum().backward()
    assert [tensor._version for tensor in ours.tensors()] == before[0]
    assert_same(before[1], ours.tensors())


@pytest.mark.parametrize("policy", [None, remat.policies.save_matmuls])
def test_random_numbers_inside_and_after_are_those_of_forward(policy):
    def function(x, keep=lambda _name, function, *args: function(*args)):
        y = keep("a", lambda x: F.dropout(stumble(F.dropout(x.exp(), 0.5) * 2), 0.5), x.sin())
        return F.dropout(y * 3, 0.5).sin() * torch.rand_like(y)

    def seeded(function):
        def run(x):
            torch.manual_seed(5)
            return function(x)

        return run

    wrapped = region(*[policy] * (policy is not None))
    x = leaf(4, 8)
    check(seeded(function), seeded(wrapped(lambda x: function(x, keep))), x)
    torch.manual_seed(5)
    function(x)
    expected = torch.rand(3)
    torch.manual_seed(5)
    y = wrapped(lambda x: function(x, keep))(x)
    assert_same(expected, torch.rand(3))
    with pytest.warns(remat.RematWarning):
        y.sum().backward()


def test_without_the_state_of_the_generators_it_is_an_error():
    y = region(preserve_rng_state=False)(lambda x: keep("a", lambda: stumble(F.dropout(x.exp(), 0.5)) * 2).sin().exp())(
        leaf(3)
    )
    with pytest.raises(remat.PlaceholderError):
        y.sum().backward()


def test_region_that_reads_what_it_changed_outside_is_not_run_once_more():
    count, x = torch.ones(3), leaf(3)

    def body(x):
        count.mul_(2)
        return stumble(x.exp()) * (count + 1)

    y = region()(lambda x: keep("a", body, x.sin()).sin().exp())(x)
    with pytest.raises(remat.PlaceholderError):
        y.sum().backward()
    assert_same(count, torch.full((3,), 2.0))


def test_error_that_the_function_swallows_is_noticed():
    def body(x):
        h = x.exp()
        with contextlib.suppress(RuntimeError):
            h = stumble(h)
        return h * 2

    check(lambda x: body(x.sin()).cos().exp(), region()(lambda x: keep("a", body, x.sin()).cos().exp()), leaf(3))


def test_exception_of_forward_comes_again():
    def body(x):
        h = stumble(x.exp())
        if h.sum().item() > -1:
            raise ValueError("as in forward")
        return h

    def function(x, keep=lambda _name, function, *args: function(*args)):
        try:
            y = keep("a", body, x.sin())
        except ValueError:
            y = x.cos()
        return y.exp().sin()

    check(function, region()(lambda x: function(x, keep)), leaf(3))


def test_nothing_is_held_after_the_second_run():
    x, held = leaf(4, 8), []

    def body(x):
        h = x.exp()
        held.extend(watch(h))
        return stumble(h) * 2

    with uncollected(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = region()(lambda x: keep("a", body, x.sin()).sin().exp())(x)
        y.sum().backward()
        del y
        assert alive(held) == 0


# Regions with a policy


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("policy", ["matmuls", "everything"])
@pytest.mark.parametrize("body", ["ctc", "subclass", "stumble"])
def test_region_with_a_policy_runs_all_ops_where_placeholders_will_not_do(body, policy, native):
    inner = {**BODIES, "stumble": lambda x: stumble(x.exp() @ x.t()) * 2}[body]

    def function(x, keep=lambda _name, function, *args: function(*args)):
        return (keep("a", inner, x.sin()) * x.sum() * 3).sin()

    wrapped = region({"matmuls": remat.policies.save_matmuls, "everything": EVERYTHING}[policy])
    x = leaf(4, 8)
    y, grad, _ = gradients(function, x)
    y2, grad2, _ = gradients(wrapped(lambda x: function(x, keep if native else function.__defaults__[0])), x)
    assert_same([y, grad], [y2, grad2])
