"""A replay in which something reads a placeholder starts over once, with native regions and ops run, or refuses."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import torch_remat as remat
from tests.helpers import alive, assert_clean_state, assert_same, leaf, plain, watch
from tests.native_programs import aten, full, keep, region, uncollected
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


def gradients(block, *, policy=None, **options):
    """Return the gradients of a block, plain and as a region, and what the region warned of."""
    found = []
    for run in (block, remat.checkpoint(policy=policy, **options)(block)):
        torch.manual_seed(0)
        x, w = (torch.rand(4, 4).requires_grad_() for _ in range(2))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found.append(torch.autograd.grad(run(x, w).sum(), (x, w), allow_unused=True))
    assert all(a is b or torch.equal(a, b) for a, b in zip(*found, strict=True))
    return [warning for warning in caught if issubclass(warning.category, remat.RematWarning)]


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

    (warning,) = gradients(block)
    assert "a.sin_0_0: numpy reads this result in replay" in str(warning.message)
    assert warning.filename == __file__
    assert counts == {"a": 4, "b": 3, "c": 2}  # plain, in forward, in the first attempt of replay, and in the second


def test_results_of_calls_are_there_for_any_reader():
    def block(x, w):
        h = remat.op(torch.mm, "h")(x, w)
        return (x * largest(h)).sin()

    assert not gradients(block)


@pytest.mark.parametrize("leaves", ["goes on", "saves something else", "raises another"])
def test_error_that_user_code_swallows(leaves):
    def block(x, w):
        def body():
            h = torch.mm(x, w).sin()
            try:
                factor = largest(h)
            except RuntimeError:
                if leaves == "goes on":
                    factor = 77.0
                elif leaves == "saves something else":
                    return (x.view(2, 8) * 3).exp().cos()
                else:
                    raise ValueError("mine") from None
            return (x * factor).sin() * 2

        return keep("a", body).exp()

    assert len(gradients(block)) == 1


@pytest.mark.parametrize("policy", [None, [aten.mm.default]], ids=["native", "policy"])
def test_buffers_and_generators_are_put_back_before(policy):
    module = torch.nn.Module()
    module.register_buffer("count", torch.zeros(()))

    def block(x, w):
        module.count.add_(1)
        noise = torch.rand(4, 4) * module.count
        largest_product = (lambda: largest(torch.mm(x, w))) if policy else lambda: keep("a", lambda: largest(x @ w))
        return (x * largest_product() * noise).sin() * torch.rand(4, 4)

    found: list[torch.Tensor] = []
    for wrap in (lambda f: f, remat.checkpoint(policy=policy)):
        torch.manual_seed(0)
        module.count.zero_()
        x, w = (torch.rand(4, 4).requires_grad_() for _ in range(2))
        y = wrap(block)(x, w)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", remat.RematWarning)
            found.append(torch.autograd.grad(y.sum(), x)[0])
        assert module.count == 1
    assert torch.equal(*found)


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


@pytest.mark.parametrize("graphs", ["two layers", "a graph that is kept"])
@pytest.mark.parametrize("outer", [region(), full], ids=["region", "torch"])
def test_what_a_replay_starts_over_for_leaves_forwards_that_were_run_as_they_are(outer, graphs):
    """The enclosing region runs the inner forward again, which is to keep then what it kept before."""

    def block(x):
        h = remat.op(torch.sin, "h")(x * 1.0)
        return (x * largest(h)).sin()

    def gradients(wrap, inner):
        torch.manual_seed(0)
        x = leaf(4, 4)
        layer = wrap(lambda x: inner(x).sin())
        y = layer(layer(x)) if graphs == "two layers" else layer(x)
        return torch.autograd.grad(y.sum(), x, retain_graph=True) + torch.autograd.grad(y.sum(), x)

    expected = gradients(plain, block)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = gradients(outer, region()(block))
        assert_same(expected, found)


@pytest.mark.parametrize("inner", [lambda h: h, lambda h: Doubled.apply(h, "inner", SAVE)], ids=["alone", "in it"])
def test_handle_runs_again_under_a_policy_with_what_is_in_it(inner):
    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            handle = remat.get_handle(ctx, "outer", SAVE)
            if (y := handle.maybe_load_saved()) is not None:
                return y
            y = inner(handle.save_or_load_inputs(x)) * torch.rand(4, 4)
            handle.save_for_backward({"y": y})
            return handle.record_outputs(y)

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    def block(x, w):
        return (x * largest(Outer.apply(x.cos())) + w).exp()

    (said,) = gradients(block, policy=[aten.cos.default])
    assert "starts over" in str(said.message)


def test_exception_that_forward_caught_comes_again():
    def body(x):
        if stumble(x.exp()).sum().item() > -1:
            raise ValueError("as in forward")

    def function(x, keep=lambda _name, function, *args: function(*args)):
        try:
            keep("a", body, x.sin())
        except ValueError:
            return x.cos().exp().sin()

    assert_starts_over(function, region()(lambda x: function(x, keep)))


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


class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(y := x.tanh())
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 - ctx.saved_tensors[0] ** 2)


@pytest.mark.parametrize("kind", [remat.op, lambda f, name: lambda *args: remat.native_save_region(name, f, *args)])
def test_call_that_reads_a_handles_output_stays_skipped_where_another_starts_replay_over(kind):
    def block(x, w):
        b = kind(Tanh.apply, "b")(Doubled.apply(x, "a", SAVE))
        s = keep("c", lambda: largest(torch.mm(x, w)))
        return b * x.sin() * s

    assert len(gradients(block)) == 1


def modifies_an_unread_variable(x, w):
    v = x * 2
    remat.op(lambda: v.neg_(), "call")()
    return torch.cat([x.square(), w + torch.rand_like(w)])


def modifies_a_variable_and_returns_another(x, w):
    v, u = x * 2, x.exp()

    def call():
        v.neg_()
        return u.sin()

    return remat.op(call, "call")() * x.square() + torch.rand_like(w) * w


def modifies_the_result_of_a_call(x, w):
    v = remat.op(torch.mul, "first")(x, w)

    def second():
        v.neg_()
        return w @ x

    return remat.op(second, "second")() * x.sin()


def modifies_one_result_and_reads_another(x, w):
    v, u = remat.op(torch.mul, "first")(x, w), remat.op(torch.exp, "other")(x)

    def second():
        v.neg_()
        return w @ u

    return remat.op(second, "second")() * x.sin()


@pytest.mark.parametrize("policy", [None, [aten.mm.default]], ids=["no policy", "policy"])
@pytest.mark.parametrize(
    "block",
    [
        modifies_an_unread_variable,
        modifies_a_variable_and_returns_another,
        modifies_the_result_of_a_call,
        modifies_one_result_and_reads_another,
    ],
)
def test_call_that_runs_whole_has_the_variables_that_it_reads(block, policy):
    assert not [one for one in gradients(block, policy=policy) if "starts over" in str(one.message)]


@pytest.mark.parametrize("view", [lambda h: h, lambda h: h.t()], ids=["itself", "a view"])
def test_output_of_a_handle_that_a_native_region_returns_is_there_for_any_reader(view):
    def block(x, w):
        h = keep("n", lambda: view(Doubled.apply(x.sin(), "h", SAVE)))
        torch.softmax(h, -1)
        return x.cos().exp()

    assert not gradients(block)


@pytest.mark.parametrize("kind", [remat.op, lambda f, name: lambda *args: remat.native_save_region(name, f, *args)])
def test_output_of_a_handle_that_passes_through_a_call_is_there_for_any_reader(kind):
    def block(x, w):
        h, _ = kind(lambda h: (h, h.exp()), "n")(Doubled.apply(x.sin(), "h", SAVE))
        torch.softmax(h, -1)
        return x.cos().exp()

    assert not gradients(block)


class Second(torch.autograd.Function):
    """Reads one input in forward, and both in backward."""

    @staticmethod
    @remat.auto_forward("one", "two")
    def forward(ctx, one, two, op_name, policy):
        ctx.save_for_backward(one, two)
        return two.clone()

    @staticmethod
    def backward(ctx, grad):
        one, two = ctx.saved_tensors
        return grad * two, grad * one, None, None


def test_policy_keeps_what_a_recomputed_handle_is_given():
    def block(x, w):
        return Second.apply(x * w, x * 3, "h", remat.CheckpointPolicy.RECOMPUTE).sin()

    assert not gradients(block, policy=[aten.mul.Tensor])


def test_op_that_modified_a_kept_result_in_place_runs_again():
    """What it left there is kept, and its result is not."""

    def block(x, w):
        h = (x @ w).mul_(0.9)
        unread = (x * 2).exp()
        return (h.sin() * largest(unread)).exp()

    assert len(gradients(block, policy=[aten.mm.default])) == 1
