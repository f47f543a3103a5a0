"""The byte model, one for all ways of keeping: which memory may be alive between a region's forward and its backward.

The model tells storages apart by who made them, not by their sizes. Of all that the ops of a forward made, what is
alive with the outputs dropped must be one of: an input of the outermost region, made by a saved call or in it, or the
result of an op that a policy selects; with in-place steps also what they changed, of which the model says nothing.
With the graph dropped nothing is alive. The garbage collector is off.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator

import torch
from torch import Tensor

from tests.helpers import LiveStorages, has_storage, tensors_in
from tests.programs.program import Program, policies_of, writes
from tests.programs.running import OPS_OF, State, forward, make_leaves

# The ops that policies without a set of names select.
OTHER_POLICIES = {"list": {"mm", "sin"}, "names": {"mul"}, "ready": {"mm", "addmm", "bmm", "baddbmm"}}


class Births(LiveStorages):
    """Watches storages, and remembers which of them may be kept."""

    def __init__(self, selected: set[str], everything: bool) -> None:
        super().__init__()
        self.selected, self.everything = selected, everything
        self.in_saved_call = 0
        self.may_be_kept: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.everything or self.in_saved_call or func.overloadpacket.__name__ in self.selected:
            for tensor in tensors_in([out]):
                self.allow(tensor)
        return out

    def allow(self, tensor: Tensor) -> None:
        """Let this tensor's memory be kept."""
        if has_storage(tensor):
            self.may_be_kept.add(tensor.untyped_storage()._cdata)

    @contextlib.contextmanager
    def saved_call(self) -> Iterator[None]:
        """Let all be kept that is made inside."""
        self.in_saved_call += 1
        try:
            yield
        finally:
            self.in_saved_call -= 1

    def wrong(self) -> list[int]:
        """Return the bytes of each storage that is alive and must not be."""
        return [
            nbytes
            for key, (reference, nbytes) in self.seen.items()
            if not reference.expired() and key not in self.may_be_kept
        ]


def is_modelled(program: Program) -> bool:
    """Return whether the model says what a program keeps: hooks, budgets and subclasses keep by other rules."""
    return program.hooks is None and program.budget is None and program.inputs == "plain" and program.around != "torch"


@functools.cache
def _warm() -> None:
    """Run what torch loads when a dispatch mode first needs it: it leaves cycles."""
    with LiveStorages():
        torch.ones(1, requires_grad=True).sin()


def check_kept(program: Program) -> None:
    """Run a program's forward and assert that it keeps what the model allows, and nothing once its graph is gone."""
    policies = policies_of(program)
    selected = set().union(*(OPS_OF.get(name) or OTHER_POLICIES.get(name, ()) for name in policies))
    _warm()
    births, state, leaves = Births(selected, "all" in policies), State(True, program), make_leaves(program)
    state.saved, state.note = births.saved_call, births.allow
    gc.disable()
    try:
        with births:
            outputs = forward(state, leaves)
        nodes = [y.grad_fn for y in outputs]
        del outputs
        wrong = [] if writes(program) else births.wrong()
        assert not wrong, f"kept beside inputs, saved calls and selected ops: storages of {wrong} bytes"
        del nodes
        assert births.count() == 0, f"{births.count()} storages, {births.bytes()} bytes, outlive their graph"
    finally:
        gc.enable()
