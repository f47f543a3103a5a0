"""The ways of keeping, for tests of what holds whichever way a region keeps something.

A test takes a way as an argument (`@pytest.mark.parametrize("way", WAYS, ids=str)`, or one axis of `pairwise`), makes
its regions by `way.region(function)`, and calls what is to be kept by `way.keep("name", function, *tensors)`. The
reference is the same program with `PLAIN_AUTOGRAD` as the way. What reads a kept result and saves it is kept as well:
replay has no data of what a handle keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.helpers import assert_same

SAVE, RECOMPUTE = remat.CheckpointPolicy.SAVE, remat.CheckpointPolicy.RECOMPUTE


@dataclass(frozen=True)
class Way:
    """One way of keeping.

    Attributes:
        name: What the test is called by.
        keep: `(name, function, *tensors)` to the function's result.
        options: What `remat.checkpoint` is given; None for a function without a region.
    """

    name: str
    keep: Callable[..., Any]
    options: dict[str, Any] | None = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def __name__(self) -> str:
        """The name, by which `pairwise` makes ids as of functions."""
        return self.name

    def region(self, function: Callable, **options: Any) -> Callable:
        """Return the function as a region of this way, with more options."""
        return function if self.options is None else remat.checkpoint(**{**self.options, **options})(function)

    def torchs(self, function: Callable) -> Callable:
        """Return the function under torch's own checkpoint."""
        return function if self.options is None else partial(torch_checkpoint, function, use_reentrant=False)

    # Calls of a certain kind, for programs that need just this one; without regions they are plain.

    def op(self, name: str, function: Callable, *args: Any, policy: Any = SAVE, **kwargs: Any) -> Any:
        """Call the function by `remat.op`."""
        made = function if self.options is None else remat.op(function, name, policy=policy)
        return made(*args, **kwargs)

    def native(self, name: str, function: Callable, *args: Any) -> Any:
        """Call the function as a native region."""
        return function(*args) if self.options is None else remat.native_save_region(name, function, *args)

    def handle(self, name: str, function: Callable, *tensors: Tensor, policy: Any = SAVE) -> Tensor:
        """Call the function in a remat-aware Function."""
        return function(*tensors) if self.options is None else ByHandle.apply(function, name, policy, *tensors)


def call(_name: str, function: Callable, *args: Any) -> Any:
    """Call a function as it is."""
    return function(*args)


class ByHandle(Function):
    """Any function of tensors with one result, as a remat-aware Function.

    Its backward runs the function again on its inputs, and draws the numbers of its forward.
    """

    @staticmethod
    def forward(ctx, function, name, policy, *inputs):
        ctx.function = function
        handle = remat.get_handle(ctx, name, policy)
        if (result := handle.maybe_load_saved()) is not None:
            return result
        inputs = handle.save_or_load_inputs(*inputs)
        inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
        before = torch.get_rng_state()
        output = function(*inputs)
        ctx.random = None if torch.equal(before, torch.get_rng_state()) else before
        handle.save_for_backward({f"input {index}": tensor for index, tensor in enumerate(inputs)})
        return handle.record_outputs(output)

    @staticmethod
    def backward(ctx, grad):
        needed = ctx.needs_input_grad[3:]
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            if ctx.random is not None:
                torch.set_rng_state(ctx.random)
            given = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)]
            output = ctx.function(*given)
        wanted = [x for x in given if x.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, grad, allow_unused=True))
        return None, None, None, *(next(found) if need else None for need in needed)


PLAIN_AUTOGRAD = Way("plain autograd", call, None)
RECOMPUTED = Way("recomputed", call)
BY_HANDLE = Way("handle", lambda name, function, *tensors: ByHandle.apply(function, name, SAVE, *tensors))
BY_OP = Way("op", lambda name, function, *args: remat.op(function, name)(*args))
BY_NATIVE_REGION = Way("native region", remat.native_save_region)
BY_POLICY = Way("policy", call, {"policy": remat.policies.save_matmuls})
BY_POLICY_AND_OP = Way("policy and op", BY_OP.keep, BY_POLICY.options)

WAYS = [RECOMPUTED, BY_HANDLE, BY_OP, BY_NATIVE_REGION, BY_POLICY, BY_POLICY_AND_OP]
KEEPING = [BY_HANDLE, BY_OP, BY_NATIVE_REGION, BY_POLICY_AND_OP]  # in which `keep` keeps what it runs


def everything(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """A policy that saves the result of every op."""
    return True


def nothing(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """A policy that saves no result."""
    return False


def assert_same_in(way: Way, program: Callable[[Way], Any], **options: Any) -> None:
    """Assert that a whole program gives the same tensors in this way as in plain autograd.

    Args:
        way: The way of keeping.
        program: Takes a way, by which it makes its regions and keeps, builds all that it needs, and returns tensors.
        **options: Options of `remat.checkpoint`.
    """
    torch.manual_seed(2)
    expected = program(PLAIN_AUTOGRAD)
    torch.manual_seed(2)
    assert_same(expected, program(replace(way, options={**way.options, **options})))
