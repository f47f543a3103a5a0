"""What the tests of reports share: blocks with all kinds of kept tensors, and the bytes that the profiler sees."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import torch_remat as remat
from benchmarks.memory import allocations
from tests.handle_ops import RECOMPUTE, SAVE, Affine, Both, Inner, InnerView, Noise, SinCos, Trace, call
from tests.helpers import Mlp, checkpointed

W1, W2 = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16, 8))
MM, EXP = torch.ops.aten.mm.default, torch.ops.aten.exp.default
MODULES = nn.ModuleList(Mlp() for _ in range(3))


def op(kernel, name, policy, *inputs, style="auto"):
    return call(style, kernel, Trace(), name, policy, *inputs)


def block(x):
    """Ops of both policies, scopes, views, several outputs, shared storage, and random numbers."""
    h = op(Both, "a", SAVE, x)
    with remat.name_scope("sub.0"):
        h = op(Inner, "b", RECOMPUTE, h)
    h = op(InnerView, "c", SAVE, h.t())
    s, c = op(SinCos, "d", SAVE, h)
    h = op(Affine, "e", RECOMPUTE, s.t(), c)
    return op(Noise, "f", SAVE, h, style="handle")


def native_block(x, policy=SAVE):
    """Two native regions, one with two results, between plain ops."""
    h = (x * 2).tanh()
    a = remat.op(lambda h: F.gelu(h @ W1).sin() @ W2, "attn", policy=policy)(h)
    with remat.name_scope("s"):
        c, d = remat.native_save_region("two", lambda b: ((b @ W1).exp(), torch.dropout(b, 0.5, True)), a.exp())
    return (c @ W2) * d.cos()


def fresh(*shape):
    """Return a leaf that nothing but what saves it keeps."""
    return torch.randn(*shape, requires_grad=True)


def several_regions():
    h = F.gelu(fresh(4, 8) * 3.0)
    for index, module in enumerate(MODULES):
        h = checkpointed(module, region_name=f"layers.{index}")(h)
    return (h * h).sum()


def retained_bytes(make):
    """Return a root and the bytes, besides its own, that making it has left allocated."""
    make()  # what is made once only is made now
    with allocations() as events:
        root = make()
    return root, sum(events) - root.untyped_storage().nbytes()


def assert_exact(make):
    """Assert that the report of a root says what the profiler sees; return the root and its report."""
    root, measured = retained_bytes(make)
    report = remat.memory_report(root)
    assert report.bytes == measured, f"{measured} bytes retained\n{report}"
    return root, report
