"""One remat-aware op: the handle that the forward of a custom autograd Function talks to.

In: the op's name, policy and autograd context. Kept: on the tape, its record. Out: what the op's body works on. Here it
is plain autograd: outside of regions, and inside the body of a SAVE op. The phases derive from it, and do in one call
for each step what the step is about, since an op is often small.

NOTE [ What is kept for an op ]
1. SAVE: the tensors that it saves for backward are *residents*: their holders have the values from the start. Not so a
   tensor that replay makes again anyway, which is *elided*: the output of a RECOMPUTE op or a view of one is taken from
   that op's output in replay; an input of the op itself that no SAVE op made, or a view of one, from replay's input,
   where the inputs are known (`auto_forward`). A parameter, a region input and a view of either share storage that
   exists anyway.
2. RECOMPUTE: of its inputs, the outputs of SAVE ops and views of them are kept in *slots*, since replay would pass
   placeholders. What it saves for backward is recomputed.
3. An op inside the body of a SAVE op is part of it: replay never comes there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from torch_remat.dispatch.mode import current_mode
from torch_remat.errors import UsageError

_FORM = (
    "The form is: handle = remat.get_handle(ctx, name, policy); `if (ret := handle.maybe_load_saved()) is not None: "
    "return ret`; x = handle.save_or_load_inputs(x); ...; handle.save_for_backward({'x': x}); "
    "return handle.record_outputs(out)."
)
_STEPS = ("maybe_load_saved", "save_or_load_inputs", "save_for_backward", "record_outputs")
SKIPPED = len(_STEPS)
"""The step of a handle whose op replay has skipped: nothing may follow."""


class RematHandle:
    """One call of a custom autograd Function, as the runtime sees it; made by `get_handle`.

    Its methods are called once each, in this order: `maybe_load_saved`, `save_or_load_inputs`, `save_for_backward`,
    `record_outputs`. The second and the third may be left out. Outside of regions they act as plain autograd.
    """

    _step = -1  # the last of `_STEPS` that was taken
    _named: Mapping[str, Tensor | None] = MappingProxyType({})

    def __init__(self, ctx: Any, name: str) -> None:
        self._ctx = ctx
        self._name = name

    def maybe_load_saved(self) -> Tensor | tuple[Tensor, ...] | None:
        """Return what the forward shall return at once if replay skips the op, else None.

        Returns:
            None in forward, and in the replay of a RECOMPUTE op. In the replay of a SAVE op its output, or a tuple of
            its outputs: placeholders with true metadata and no data.

        Raises:
            UsageError: It was called before.
        """
        if self._step != -1:
            raise self._out_of_order(0)
        self._step = 0
        return None

    def load(self, args: tuple[Any, ...]) -> Tensor | tuple[Tensor, ...] | None:
        """Do what `maybe_load_saved` does, for a caller that knows the op's inputs: those are not kept again."""
        return self.maybe_load_saved()

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
        return args[0] if len(args) == 1 else args

    def save_for_backward(self, saved_tensors: Mapping[str, Tensor | None]) -> None:
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
            if not isinstance(tensor, Tensor) and tensor is not None:
                raise self.misused(f"the saved value is a {type(tensor).__name__}, neither a tensor nor None", key)
        self._ctx.save_for_backward(*saved_tensors.values())
        self._named = saved_tensors

    def record_outputs(self, *outs: Tensor, as_tuple: bool = False) -> Any:
        """Name the outputs (``out``, or ``0``, ``1``, ... for several) and note what placeholders must show.

        Args:
            *outs: The op's outputs, all tensors.
            as_tuple: Whether the forward returns a tuple even if there is one output.

        Returns:
            The output, or a tuple of the outputs, to be returned from the forward.

        Raises:
            UsageError: It was called out of order, without outputs, or with a value that is no tensor; or the op has
                policy SAVE and marked an input as dirty.
        """
        self._end(outs)
        return outs if as_tuple or len(outs) > 1 else outs[0]

    def _end(self, outs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Check the last step and what it was given."""
        if not 0 <= self._step < 3:
            raise self._out_of_order(3)
        self._step = 3
        if not outs:
            raise self.misused("record_outputs needs at least one output")
        for out in outs:
            if not isinstance(out, Tensor):
                place = next(place for place, value in enumerate(outs) if value is out)
                raise self.misused(f"output {place} is a {type(out).__name__}, not a tensor", str(place))
        return outs

    def _out_of_order(self, step: int) -> UsageError:
        if self._step == SKIPPED:
            what = f"{_STEPS[step]} was called after maybe_load_saved had returned the outputs of a skipped op"
        elif self._step < 0:
            what = f"{_STEPS[step]} was called before maybe_load_saved"
        else:
            again = "a second time" if step == self._step else f"after {_STEPS[self._step]}"
            what = f"{_STEPS[step]} was called {again}"
        return self.misused(what)

    def misused(self, what: str, tensor: str | None = None) -> UsageError:
        """Return the error about a wrong use of this handle."""
        mode = current_mode()
        region = None if mode is None else mode.region.name
        return UsageError(what, region=region, op=self._name, tensor=tensor, remedy=_FORM)
