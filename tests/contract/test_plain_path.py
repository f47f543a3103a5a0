"""The short way of a usual region against the general one, which does the same for any call and any tensor."""

from __future__ import annotations

from weakref import ref

import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers import assert_same, checkpointed, leaf, pairwise
from torch_remat.dispatch.region import forward, replay
from torch_remat.dispatch.region.region import live_regions


def in_place(x, w):
    h = (x * 2).sin()
    h.mul_(w)
    return h.exp() * x


PROGRAMS = {
    "chain": lambda x, w: (x.sin() @ w).tanh().exp() + x,
    "views of results": lambda x, w: (x.sin().t()[1:] @ w).sin()[:, 1:].exp().sum(),
    "views of inputs": lambda x, w: (x.t() @ w.t()).sin() * x[1:].sum() * w.view(-1)[3:].exp().mean(),
    "constants": lambda x, w: ((x > 0).float() * x.sin() * torch.ones(4)).exp() * w.detach(),
    "in place": in_place,
    "dropout": lambda x, w: F.dropout(x.sin(), 0.5) @ w,
    "noise": lambda x, w: F.rrelu(x.sin(), training=True) @ w,
    "norm": lambda x, w: F.layer_norm(x.sin() @ w, (4,)).exp(),
    "several outputs": lambda x, w: {"a": [x.sin().exp(), None], "b": (w.cos() * x).tanh()},
    "dtypes": lambda x, w: (x.double().sin() @ w.double()).exp().float().cos(),
    "sparse": lambda x, w: torch.sparse.mm(x.sin().to_sparse(), w).exp(),
    "unused": lambda x, w: (x.sin().exp(), w.cos().exp())[0].tanh(),
    "inner leaf": lambda x, w: (torch.ones(4, requires_grad=True) * x).sin() @ w,
    "nothing saved": lambda x, w: x + w,
    "large": lambda x, w: (x.expand(500, 4, 4).sin() @ w).exp().tanh().mean(0),
}


def run(function, general, monkeypatch, weight):
    """Return output, gradients and what the tape holds, by the short way or the general one."""
    with monkeypatch.context() as patch:
        if general:
            patch.setattr(forward.Recording, "pack_hook", lambda self: self.pack)
            patch.setattr(replay.Filling, "pack_hook", lambda self: self.pack)
        torch.manual_seed(0)
        x = leaf(4, 4)
        before = set(live_regions())
        out = checkpointed(lambda x: function(x, weight))(x)
        made = set(live_regions()) - before  # none where nothing is saved
        noted = []
        for entry in [entry for region in made for entry in region.tape.saved]:
            holder = entry() if type(entry) is ref else None
            about = holder and (holder.metadata, holder.layout, holder.producer, type(holder.origin))
            noted.append(entry if holder is None else about)
        leaves = [out] if isinstance(out, torch.Tensor) else [out["a"][0], out["b"]]
        wanted = [one for one in (x, weight) if one.requires_grad]
        gradients = torch.autograd.grad(sum(y.square().sum() for y in leaves), wanted, allow_unused=True)
        present = [torch.zeros(()) if grad is None else grad for grad in gradients]
        return [*leaves, *present], noted, [region.tape.layouts for region in made]


@pairwise(name=PROGRAMS, kind=["parameter", "leaf", "frozen", "result", "view"])
def test_short_way_and_general_one_note_and_give_the_same(name, kind, monkeypatch):
    torch.manual_seed(1)
    data = torch.randn(4, 4)
    weight = {
        "parameter": lambda: nn.Parameter(data),
        "leaf": lambda: data.clone().requires_grad_(),
        "frozen": lambda: nn.Parameter(data, requires_grad=False),
        "result": lambda: (data.clone().requires_grad_() * 1).detach(),
        "view": lambda: nn.Parameter(torch.cat([data, data]))[2:6].detach(),
    }[kind]()
    short = run(PROGRAMS[name], False, monkeypatch, weight)
    general = run(PROGRAMS[name], True, monkeypatch, weight)
    assert_same(general[0], short[0])
    assert len(short[1]) == len(general[1])
    for one, other in zip(short[1], general[1], strict=True):
        same_leaf = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
        dead = type(one) is ref and type(other) is ref
        assert same_leaf or dead or one == other
    assert short[2] == general[2]
