"""`get_handle` and `RematHandle`: hooks into the runtime for the forward of a custom autograd Function."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from torch_remat._names import scoped
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.op import Op
from torch_remat.dispatch.policy import CheckpointPolicy
from torch_remat.errors import UsageError

_FORM = (
    "The form is: handle = remat.get_handle(ctx, name, policy); `if (ret := handle.maybe_load_saved()) is not None: "
    "return ret`; x = handle.save_or_load_inputs(x); ...; handle.save_for_backward({'x': x}); "
    "return handle.record_outputs(out)."
)
_STEPS = ("maybe_load_saved", "save_or_load_inputs", "save_for_backward", "record_outputs")


class RematHandle:
    """One call of a custom autograd Function, as the runtime sees it; made by `get_handle`.

    Its methods are called once each, in this order: `maybe_load_saved`, `save_or_load_inputs`, `save_for_backward`,
    `record_outputs`. The second and the third may be left out. Outside of regions they act as plain autograd.
    """

    __slots__ = ("_ctx", "_name", "_op", "_step")

    def __init__(self, ctx: Any, name: str, op: Op) -> None:
        self._ctx = ctx
        self._name = name
        self._op = op
        self._step = -1

    def maybe_load_saved(self) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
        """Return what the forward shall return at once if replay skips the op, else None.

        Returns:
            None in forward, and in the replay of a RECOMPUTE op. In the replay of a SAVE op its output, or a tuple of
            its outputs: placeholders with true metadata and no data.

        Raises:
            UsageError: It was called before.
        """
        return self.load(())

    def load(self, args: tuple[Any, ...]) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
        """Do what `maybe_load_saved` does, for a caller that knows the op's inputs: those are not kept again."""
        if self._step != -1:
            raise self._out_of_order(0)
        self._step = 0
        outputs = self._op.load(self._ctx, args)
        if outputs is None:
            return None
        self._step = len(_STEPS)  # nothing may follow
        return outputs

    def save_or_load_inputs(self, *args: Any) -> Any:
        """Keep the inputs that replay would not have (forward), or return the kept ones (replay).

        Only for a RECOMPUTE op, and only for inputs that come from SAVE ops, anything is kept: until replay has run.

        Args:
            *args: The op's inputs, in an order that does not change; values other than tensors pass.

        Returns:
            The input, or a tuple of the inputs, to be used from here on.

        Raises:
            UsageError: It was called out of order.
            MutationError: A kept input was changed in place.
            PlaceholderError: Forward had another input here.
        """
        if self._step != 0:
            raise self._out_of_order(1)
        self._step = 1
        loaded = self._op.inputs(args)
        return loaded[0] if len(loaded) == 1 else loaded

    def save_for_backward(self, saved_tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Do what ``ctx.save_for_backward`` does, and give the tensors names.

        Args:
            saved_tensors: The tensors by name, in the order of ``ctx.saved_tensors``; None keeps a place empty.

        Raises:
            UsageError: It was called out of order; a name is no string, empty, or contains ``.``; a value is neither
                a tensor nor None.
        """
        if not 0 <= self._step < 2:
            raise self._out_of_order(2)
        self._step = 2
        if type(saved_tensors) is not dict and not isinstance(saved_tensors, Mapping):
            raise self.misused(
                f"save_for_backward takes a dict of names to tensors, not a {type(saved_tensors).__name__}"
            )
        for key, tensor in saved_tensors.items():
            if not isinstance(key, str) or not key or "." in key:
                raise self.misused(f"{key!r} is no name for a saved tensor: a non-empty string without '.'")
            if tensor is not None and not isinstance(tensor, torch.Tensor):
                raise self.misused(f"the saved value is a {type(tensor).__name__}, neither a tensor nor None", key)
        self._ctx.save_for_backward(*saved_tensors.values())
        self._op.save(saved_tensors)

    def record_outputs(self, *outs: torch.Tensor) -> Any:
        """Name the outputs (``out``, or ``0``, ``1``, ... for several) and note what placeholders must show.

        Args:
            *outs: The op's outputs, all tensors.

        Returns:
            The output, or a tuple of the outputs, to be returned from the forward.

        Raises:
            UsageError: It was called out of order, without outputs, or with a value that is no tensor; or the op has
                policy SAVE and marked an input as dirty.
        """
        return self.record(outs, as_tuple=len(outs) > 1)

    def record(self, outs: tuple[torch.Tensor, ...], *, as_tuple: bool) -> Any:
        """Do what `record_outputs` does, for a forward that returns a tuple or not, whatever its length."""
        if not 0 <= self._step < 3:
            raise self._out_of_order(3)
        self._step = 3
        if not outs:
            raise self.misused("record_outputs needs at least one output")
        for place, out in enumerate(outs):
            if not isinstance(out, torch.Tensor):
                raise self.misused(f"output {place} is a {type(out).__name__}, not a tensor", str(place))
        outputs = self._op.outputs(self._ctx, outs, as_tuple)
        return outputs if as_tuple else outputs[0]

    def _out_of_order(self, step: int) -> UsageError:
        if self._step == len(_STEPS):
            what = f"{_STEPS[step]} was called after maybe_load_saved had returned the outputs of a skipped op"
        elif self._step < 0:
            what = f"{_STEPS[step]} was called before maybe_load_saved"
        else:
            again = "a second time" if step == self._step else f"after {_STEPS[self._step]}"
            what = f"{_STEPS[step]} was called {again}"
        return self.misused(what)

    def misused(self, what: str, tensor: str | None = None) -> UsageError:
        """Return the error about a wrong use of this handle."""
        return UsageError(what, region=_region_name(), op=self._name, tensor=tensor, remedy=_FORM)


def get_handle(ctx: Any, op_name: str, remat_policy: CheckpointPolicy) -> RematHandle:
    """Begin a named op inside the forward of a custom autograd Function.

    Args:
        ctx: The Function's context.
        op_name: The op's name, unique within the region; `name_scope` prefixes it.
        remat_policy: Whether replay skips the op (SAVE) or runs it again (RECOMPUTE).

    Returns:
        The handle, whose methods the forward calls.

    Raises:
        UsageError: The name is no string, empty or taken; the policy is no `CheckpointPolicy`; ``ctx`` is no context.
        MismatchError: In replay, if forward had another op or policy here.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x, op_name, remat_policy):
        ...         handle = remat.get_handle(ctx, op_name, remat_policy)
        ...         if (ret := handle.maybe_load_saved()) is not None:
        ...             return ret
        ...         x = handle.save_or_load_inputs(x)
        ...         handle.save_for_backward({"x": x})
        ...         return handle.record_outputs(x * x)
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         (x,) = ctx.saved_tensors
        ...         return 2 * x * grad, None, None
        >>> x = torch.ones(3, requires_grad=True)
        >>> y = remat.checkpoint()(lambda x: Square.apply(x, "square", remat.CheckpointPolicy.SAVE))(x)
        >>> y.sum().backward()
    """
    name = scoped(op_name)
    if not isinstance(remat_policy, CheckpointPolicy):
        raise UsageError(
            f"{remat_policy!r} is no policy",
            region=_region_name(),
            op=name,
            remedy="Policies are remat.CheckpointPolicy.SAVE and remat.CheckpointPolicy.RECOMPUTE.",
        )
    if not hasattr(ctx, "save_for_backward"):
        raise UsageError(
            f"get_handle needs the context of an autograd Function, not a {type(ctx).__name__}",
            region=_region_name(),
            op=name,
            remedy="Call it first thing in `forward(ctx, ...)`, with that ctx.",
        )
    mode = None if torch.compiler.is_compiling() else current_mode()
    op = _PLAIN if mode is None else mode.begin_op(name, remat_policy, ctx, sys._getframe(1))
    return RematHandle(ctx, name, op)


_PLAIN = Op()


def _region_name() -> str | None:
    mode = current_mode()
    return None if mode is None else mode.region.name
