"""Ops that save a buffer before they fill it: replay must not stop between the two."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.helpers import assert_same_program, leaf, pairwise

RRELUS = {
    "alone": lambda x: F.rrelu(x, training=True),
    "last": lambda x: F.rrelu(x.sin(), training=True),
    "in_the_middle": lambda x: F.rrelu(x.sin(), training=True).exp().cos(),
    "twice": lambda x: F.rrelu(F.rrelu(x.sin(), training=True) * 3, training=True),
    "in_place": lambda x: F.rrelu(x * 2, training=True, inplace=True),
    "in_place_last": lambda x: F.rrelu(x.sin() * 1, training=True, inplace=True) + 1,
    "all_positive": lambda x: F.rrelu(x.exp(), training=True),
    "all_negative": lambda x: F.rrelu(-x.exp(), training=True),
    "before_dropout": lambda x: F.dropout(F.rrelu(x.cos(), training=True), 0.5),
}


@pairwise(name=RRELUS, early_stop=[True, False])
def test_rrelu_that_saves_its_noise_before_it_fills_it_is_equal(name, early_stop):
    def program(wrap):
        x = leaf(50)
        y = wrap(RRELUS[name])(x)
        results = [torch.autograd.grad(y.sum(), x, retain_graph=True) for _ in range(2)]
        y.sum().backward()
        return y, results, x.grad, torch.rand(2)

    assert_same_program(program, early_stop=early_stop)


def test_function_whose_buffer_is_filled_after_it_was_saved_is_equal():
    class LateFill(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            noise = torch.empty_like(x)
            ctx.save_for_backward(noise)
            noise.uniform_()
            return x * noise

        @staticmethod
        def backward(ctx, grad):
            (noise,) = ctx.saved_tensors
            return grad * noise

    def program(wrap):
        x = leaf(6)
        y = wrap(lambda x: LateFill.apply(x.sin()))(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program, replays=1)
