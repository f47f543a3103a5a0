"""A replay in which something reads a placeholder starts over once, with native regions and ops run, or refuses."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import torch_remat as remat
from tests.helpers import alive, assert_clean_state, assert_same, leaf, watch
from tests.native_programs import aten, keep, region, uncollected
from torch_remat import PlaceholderError


class Doubled(torch.autograd.Function):
    @staticmethod
    @remat.auto_forward("x")
    def forward(ctx, x, op_name, policy):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None, None


SAVE = remat.CheckpointPolicy.SAVE


def largest(h):
    return float(h.detach().numpy().max())


def test_every_native_region_runs_and_one_warning_names_the_reader():
    counts = {"a": 0, "b": 0, "c": 0}

    def counted(name, x, w):
        counts[name] += 1
        h = torch.mm(x, w).sin()
        return h * largest(h) if name == "a" else h

    def block(x, w):
        a = keep("a", counted, "a", x, w)
        b = keep("b", counted, "b", x, w)
        c = remat.op(counted, "c")("c", x, w)
        return (x * a * b).sin() + c

    x, w = leaf(4, 4), leaf(4, 4)
    expected = torch.autograd.grad(block(x, w).sum(), (x, w))
    y = remat.checkpoint()(block)(x, w)
    with pytest.warns(remat.RematWarning) as told:
        assert_same(expected, torch.autograd.grad(y.sum(), (x, w)))
    (warning,) = told
    assert "a.sin_0_0: numpy reads this result in replay" in str(warning.message)
    assert warning.filename == __file__
    assert counts == {"a": 4, "b": 3, "c": 2}  # plain, in forward, in the first attempt of replay, and in the second


OUTSIDE = torch.zeros(4, 4)


def adds_outside(x):
    OUTSIDE.add_(1)
    return x * OUTSIDE


def test_native_region_that_writes_outside_is_refused_and_not_run_again():
    OUTSIDE.zero_()
    x = torch.rand(4, 4, requires_grad=True)

    @remat.checkpoint()
    def block(x):
        return (x * keep("k", lambda: largest(adds_outside(x)))).sin() * 2

    with pytest.raises(PlaceholderError, match=r"numpy.*op 'k' is saved"):
        block(x).sum().backward()
    assert torch.equal(OUTSIDE, torch.ones(4, 4))


def test_numbers_that_cannot_be_drawn_again_are_refused():
    def block(x):
        return (x * keep("k", lambda: largest(torch.rand(4, 4) * x))).sin() * 2

    x = torch.rand(4, 4, requires_grad=True)
    with pytest.raises(PlaceholderError, match="numpy"):
        remat.checkpoint(preserve_rng_state=False)(block)(x).sum().backward()
    with pytest.warns(remat.RematWarning, match="starts over"):
        remat.checkpoint()(block)(x).sum().backward()


def test_handle_of_the_seed_refuses_and_nothing_starts_over():
    runs = []

    @remat.checkpoint()
    def block(x):
        runs.append(1)
        y = Doubled.apply(keep("a", torch.sin, x), "h", SAVE)
        return (x * largest(y)).sin() * 2

    with pytest.raises(PlaceholderError, match="numpy"):
        block(torch.rand(4, requires_grad=True)).sum().backward()
    assert len(runs) == 2


def test_output_that_is_changed_after_replay_was_told_to_need_it():
    def block(x):
        y = Doubled.apply(x, "h", SAVE)
        remat.recompute_needs_tensor(y)
        y.mul_(2)
        return (x * largest(y)).sin()

    with pytest.raises(remat.RematError):
        remat.checkpoint()(block)(torch.rand(4, requires_grad=True)).sum().backward()


# --- Where C++ code takes the data of a placeholder or refuses it


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


BODIES = {
    "gru": packed(nn.GRU),
    "lstm": packed(nn.LSTM),
    "ctc": ctc,
    "subclass": lambda x: (x.exp().as_subclass(Sub) * 2).as_subclass(torch.Tensor),
    "product": lambda x: stumble(x.exp() @ x.t()) * 2,
}
POLICIES = {
    "none": None,
    "matmuls": remat.policies.save_matmuls | [aten.mm.default],
    "everything": lambda ctx, op, *args, **kwargs: op is not aten.mul.Tensor,
}


def assert_starts_over(function, region):
    """Assert equal outputs and gradients, and that of each region the user is told at most once for a graph."""
    results = []
    for run in (function, region):
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = run(x)
            first = torch.autograd.grad(y.sum(), x, retain_graph=True)
            results.append([y, *first, *torch.autograd.grad(y.sum(), x)])
    assert_same(*results)
    said = [str(warning.message) for warning in caught if issubclass(warning.category, remat.RematWarning)]
    assert_clean_state()
    return said


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("body", BODIES)
def test_region_runs_all_once_more_where_placeholders_will_not_do(body, policy):
    def whole(x, keep=lambda _name, function, *args: function(*args)):
        return (keep("a", BODIES[body], x.sin()) * x.sum() * 3).sin().exp()

    said = assert_starts_over(whole, region(POLICIES[policy])(lambda x: whole(x, keep)))
    assert len(said) == 1 or policy != "none"
    assert all("recomputes" in text for text in said)


@pytest.mark.parametrize("has_call", [False, True], ids=["policy", "policy and call"])
def test_replay_that_starts_over_for_an_exception_of_others_keeps_nothing(has_call):
    gru, lengths = nn.GRU(4, 4, batch_first=True), torch.tensor([2, 3])
    made = []

    def block(x):
        h = remat.op(torch.sin, "sin")(x) if has_call else x.sin()
        made.extend(watch(h))
        packed = pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(gru(packed)[0], batch_first=True)[0].exp()

    with uncollected(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            region([aten.mm.default])(block)(leaf(2, 3, 4)).sum().backward()
        assert len(made) > 4  # it started over
        assert alive(made) == 0
