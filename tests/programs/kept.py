"""The byte model, one for all ways of keeping: which memory may be alive between a region's forward and its backward.

The model tells storages apart by who made them, not by their sizes. Of all that the ops of a forward made, what is
alive with the outputs dropped must be one of: an input of the outermost region, made by a saved call or in it, or the
result of an op that a policy selects; with in-place steps also what they changed, of which the model says nothing.
With the graph dropped nothing is alive. The garbage collector is off.

From below: no op in a saved call and no op that a policy selects runs in a replay, and nothing warns of a second run,
unless the program modifies tensors in place or reads data out of autograd's sight.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_remat as remat
from tests.helpers import LiveStorages, has_storage, tensors_in
from tests.programs.priced import PRICED
from tests.programs.program import Program, policies_of, reads_into_python, steps_of, writes
from tests.programs.running import OF_FUNCTIONS, OPS_OF, State, backward, forward, make_leaves
from torch_remat.dispatch.reach import boundary_nodes

# The ops that policies without a set of names select.
OPS_OF_FUNCTIONS = {
    "mm", "sin", "exp", "mul", "_softmax", "native_layer_norm", "native_dropout", "sort", "clone", "max", "cumsum",
    "gelu", "cat", "stack", "where", "relu", "zeros", "bernoulli_", "div", "empty_like",
}  # fmt: skip
OTHER_POLICIES = {"list": {"mm", "sin"}, "names": {"mul", "mul_"}, "ready": {"mm", "addmm", "bmm", "baddbmm"}}


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
            if nbytes and not reference.expired() and key not in self.may_be_kept
        ]


def is_modelled(program: Program) -> bool:
    """Return whether the model says what a program keeps: hooks, budgets and subclasses keep by other rules."""
    is_plain = program.hooks is None and program.budget is None and program.inputs in ("plain", "transposed")
    return is_plain and program.around != "torch" and program.later is None


@functools.cache
def _warm() -> None:
    """Run what torch loads when a dispatch mode first needs it: it leaves cycles."""
    with LiveStorages():
        torch.ones(1, requires_grad=True).sin()


def check_kept(program: Program) -> None:
    """Run a program's forward and assert that it keeps what the model allows, and nothing once its graph is gone.

    A second forward keeps as many tensors: what is kept does not depend on addresses.
    """
    policies = policies_of(program)
    selected = set().union(*(OPS_OF.get(name) or OTHER_POLICIES.get(name, ()) for name in policies))
    if not policies.isdisjoint(OF_FUNCTIONS):
        selected |= OPS_OF_FUNCTIONS
    _warm()
    everything = "all" in policies or not policies.isdisjoint(PRICED)
    counts = [_count_kept(program, Births(selected, everything)) for _ in range(2)]
    assert counts[0] == counts[1], f"two forwards of one program keep {counts[0]} and {counts[1]} storages"


def _count_kept(program: Program, births: Births) -> int:
    state, leaves = State(True, program), make_leaves(program)
    state.saved, state.note = births.saved_call, births.allow
    gc.disable()
    try:
        with births:
            outputs = forward(state, leaves)
        nodes = boundary_nodes(outputs)  # autograd may let nobody use an output, if nobody does
        del outputs
        wrong = [] if writes(program) else births.wrong()
        assert not wrong, f"kept beside inputs, saved calls and selected ops: storages of {wrong} bytes"
        kept = births.count()
        del nodes
        allowed = 0 if policies_of(program).isdisjoint(PRICED) else _left_by_plain_autograd(program)
        assert births.count() <= allowed, f"{births.count()} storages, {births.bytes()} bytes, outlive their graph"
        return kept
    finally:
        gc.enable()


def _left_by_plain_autograd(program: Program) -> int:
    """Return how many storages outlive the graph of plain code, as which a region by price may run.

    What a node saved and a later op wrote in place owns the graph that owns it.
    """
    if not writes(program):
        return 0
    with LiveStorages() as live:
        forward(State(False, program), make_leaves(program))
    return live.count()


def check_let_go(program: Program) -> None:
    """Run a program and assert that with its outputs alive nothing else is, once a backward through all is over.

    Nor are the functions that regions ran, unless the graph is kept: its next backward may need all that it has now,
    but no value that this backward recomputed.
    """
    if program.backward in ("subset", "one by one", "dropped") or writes(program):
        return
    _warm()
    births, state, leaves = LiveStorages(), State(True, program), make_leaves(program)
    replayed = InReplay()
    gc.disable()
    try:
        with births, replayed:
            outputs = forward(state, leaves)
            if not (differentiable := [y for y in outputs if y.requires_grad]):
                return
            extra = backward(program, differentiable, leaves)
        del differentiable
        held = [*outputs, *extra, *(leaf.grad for leaf in (*leaves, *state.parameters_at_first))]
        allowed = {one.untyped_storage()._cdata for one in held if one is not None}
        keeps_graph = program.backward in ("kept", "two orders")
        if keeps_graph:
            allowed |= births.seen.keys() - replayed.seen.keys()
        seen = births.seen.items()  # an empty one is that of a dummy of torch's checkpoint
        left = [size for key, (one, size) in seen if size and not one.expired() and key not in allowed]
        assert not left, f"after backward storages of {left} bytes are alive besides outputs and gradients"
        has_functions = any(function() is not None for function in state.functions)
        assert keeps_graph or not has_functions, "the function of a region outlives its backward"
    finally:
        gc.enable()


class InReplay(LiveStorages):
    """Watches what is made in replays."""

    def watch(self, tensor: Tensor) -> None:
        """Count a storage that is made in a replay."""
        if remat.is_recomputing():
            super().watch(tensor)


class Replayed(TorchDispatchMode):
    """Notes the ops that run in a replay, though they are in a saved call or selected by a policy."""

    def __init__(self, selected: set[str]) -> None:
        super().__init__()
        self.selected, self.in_saved_call, self.in_whole_body, self.ran = selected, 0, 0, list[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        makes = all(result.alias_info is None for result in func._schema.returns) and name != "_to_copy"  # autocast's
        kept = makes and not self.in_whole_body and (self.in_saved_call or name in self.selected)
        if kept and remat.is_recomputing():
            self.ran.append(name)
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def saved_call(self) -> Iterator[None]:
        """Note all ops inside."""
        self.in_saved_call += 1
        try:
            yield
        finally:
            self.in_saved_call -= 1

    @contextlib.contextmanager
    def whole_body(self) -> Iterator[None]:
        """Note no ops inside: what a policy selects there, it does not see."""
        self.in_whole_body += 1
        try:
            yield
        finally:
            self.in_whole_body -= 1


def check_recomputed(program: Program) -> None:
    """Run a program and assert that replay recomputes nothing that forward was to keep, and that nothing warns."""
    inner = any(step.kind in ("region", "torch") for step in steps_of(program.body))
    inner = inner or program.around not in ("nothing", "twice")  # whose outer replay runs the inner forward again
    if writes(program) or reads_into_python(program) or program.backward == "dropped":
        return
    if not policies_of(program).isdisjoint(PRICED):
        return  # replay starts over where a ladder is of another step
    policies = set() if inner else policies_of(program)
    selected = set().union(*(OPS_OF.get(name) or OTHER_POLICIES.get(name, ()) for name in policies))
    state, leaves, replayed = State(True, program), make_leaves(program), Replayed(selected)
    state.saved = contextlib.nullcontext if inner else replayed.saved_call
    state.whole = replayed.whole_body
    with warnings.catch_warnings(record=True) as told, replayed:
        warnings.simplefilter("always")
        if outputs := [y for y in forward(state, leaves) if y.requires_grad]:
            backward(program, outputs, leaves)
    texts = [str(one.message) for one in told if issubclass(one.category, remat.RematWarning)]
    texts = [text for text in texts if "selected nothing" not in text]  # a drawn program need not have its policy's ops
    assert not texts, f"a warning: {texts[0]}"
    assert not replayed.ran, f"replay recomputes what is saved: {replayed.ran}"
