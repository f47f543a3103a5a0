"""An op with a handle, the object that the forward of a custom autograd Function calls.

In: the op's name, policy and autograd context. Kept: on the tape, its call. Out: what the op's body works on. The first
class is plain autograd: outside of regions, and inside the body of a saved call. For each phase and policy one class
derives from it, and does each step in one call, since an op is often small; those of replay are in `answerer`.

NOTE [ What is kept for a handle ]
1. SAVE: the tensors that it saves for backward are *residents*: their holders have the values from the start. Of an
   input of the op, or a view of one, that replay recomputes, the holder is filled from replay's input, where the inputs
   are known (`auto_forward`). A parameter, a region input and a view of either share storage that exists anyway.
2. RECOMPUTE: it keeps those of its inputs that are outputs of SAVE ops, so that replay has them. What it saves for
   backward is recomputed.
3. An op inside the body of a SAVE op is part of it: replay never comes there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor, strided

from torch_remat.dispatch.call.entry import Call
from torch_remat.dispatch.call.log import Log
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.ops.meta import Meta, described
from torch_remat.dispatch.placeholder import NOT_LAZY, new_tuple
from torch_remat.dispatch.region.outside import NOTHING_BEFORE, Before
from torch_remat.errors import UsageError
from torch_remat.policies.decision import CheckpointPolicy

_RECOMPUTE, _OFFLOAD = CheckpointPolicy.RECOMPUTE, CheckpointPolicy.OFFLOAD

_FORM = (
    "The form is: handle = remat.get_handle(ctx, name, policy); `if (ret := handle.maybe_load_saved()) is not None: "
    "return ret`; x = handle.save_or_load_inputs(x); ...; handle.save_for_backward({'x': x}); "
    "return handle.record_outputs(out)."
)
_STEPS = ("maybe_load_saved", "save_or_load_inputs", "save_for_backward", "record_outputs")
SKIPPED = len(_STEPS)
"""The step of a handle whose op replay has skipped: no step may follow."""


class RematHandle:
    """One call of a custom autograd Function, as the runtime sees it; made by `get_handle`.

    Its methods are called once each, in this order: `maybe_load_saved`, `save_or_load_inputs`, `save_for_backward`,
    `record_outputs`. The second and the third are optional. Outside of regions they act as plain autograd.
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
            raise self.out_of_order(0)
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
            MutationError: A kept input was modified in place.
            PlaceholderError: Forward had another input here.
        """
        if self._step != 0:
            raise self.out_of_order(1)
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
            raise self.out_of_order(2)
        self._step = 2
        if type(saved_tensors) is not dict and not isinstance(saved_tensors, Mapping):
            raise self.misused(
                f"save_for_backward needs a dict that maps names to tensors, not a {type(saved_tensors).__name__}"
            )
        for key, tensor in saved_tensors.items():
            if not isinstance(key, str) or not key or "." in key:
                raise self.misused(f"a saved tensor cannot be named {key!r}: use a non-empty string without '.'")
            if not isinstance(tensor, Tensor) and tensor is not None:
                raise self.misused(f"the saved value must be a tensor or None, not a {type(tensor).__name__}", key)
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
            raise self.out_of_order(3)
        self._step = 3
        if not outs:
            raise self.misused("record_outputs needs at least one output")
        for out in outs:
            if not isinstance(out, Tensor):
                place = next(place for place, value in enumerate(outs) if value is out)
                raise self.misused(f"output {place} must be a tensor, not a {type(out).__name__}", str(place))
        return outs

    def out_of_order(self, step: int) -> UsageError:
        """Return the error about a step that is taken at the wrong time."""
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


class ForwardOp(RematHandle):
    """An op with policy RECOMPUTE in forward, and what all ops in forward have in common.

    Attributes:
        ops: The log of its region.
        call: What the log keeps of it.
        depth: In how many bodies of others it runs.
        args: The op's inputs, as far as they are known and matter.
    """

    ops: Log
    call: Call
    depth: int
    args: tuple[Any, ...] = ()

    def save_or_load_inputs(self, *args: Any) -> Any:
        """Keep the inputs that replay would not have."""
        if self._step != 0:
            raise self.out_of_order(1)
        self._step = 1
        self.ops.note_inputs(self.call, args)
        return args[0] if len(args) == 1 else args

    def record_outputs(self, *outs: Tensor, as_tuple: bool = False) -> Any:
        """Note that the body has ended."""
        if 0 <= self._step < 3 and len(outs) == 1 and type(out := outs[0]) is Tensor and not out.requires_grad:
            self._step = 3
        else:
            outs = self._end(outs)
        del self.ops.opened[self.depth :]
        return outs if as_tuple or len(outs) > 1 else outs[0]

    def _end(self, outs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Check the last step; an input that is returned as it is becomes a view, as autograd does, too."""
        super()._end(outs)
        for out in outs:
            if out.requires_grad:
                dirty = {id(tensor) for tensor in self._ctx.dirty_tensors or ()}
                return tuple([o.view_as(o) if o.requires_grad and id(o) not in dirty else o for o in outs])
        return outs


class SavedOp(ForwardOp):
    """An op with policy SAVE or OFFLOAD in forward.

    Attributes:
        before: What the region reaches, before the op.
        inputs: The tensors that it is given, as far as they are known, with their versions.
        entered: How many inner regions had begun before it.
    """

    entered: int
    before: Before = NOTHING_BEFORE
    inputs: Sequence[tuple[Tensor, int]] = ()

    def load(self, args: tuple[Any, ...]) -> None:
        """Note the inputs; forward skips nothing."""
        self.maybe_load_saved()
        self.args = args
        self._know_inputs(args)

    def save_or_load_inputs(self, *args: Any) -> Any:
        """Keep nothing: replay does not run the body."""
        if self._step != 0:
            raise self.out_of_order(1)
        self._step = 1
        if not self.inputs:
            self._know_inputs(args)
        return args[0] if len(args) == 1 else args

    def _know_inputs(self, args: tuple[Any, ...]) -> None:
        try:
            self.inputs = [(arg, arg._version) for arg in args if isinstance(arg, Tensor)]
        except RuntimeError:  # those of inference mode count no changes
            counted = [arg for arg in args if isinstance(arg, Tensor) and not arg.is_inference()]
            self.inputs = [(arg, arg._version) for arg in counted]
        if self.call.policy is _OFFLOAD:  # the parameters among them stay
            self.ops.region.sender().know_parameters(args)

    def record_outputs(self, *outs: Tensor, as_tuple: bool = False) -> Any:
        """Note the outputs, all that placeholders must show, and what autograd is to save next."""
        ctx, ops, call = self._ctx, self.ops, self.call
        out: Any = outs[0] if outs else None
        usual = type(out) is Tensor and not (out.requires_grad or out.is_complex()) and out.layout is strided
        if usual and len(outs) == 1 and 0 <= self._step < 3:
            self._step = 3
        else:
            outs = self._end(outs)
            out = outs[0]
        del ops.opened[self.depth :]
        if ctx.dirty_tensors:
            raise UsageError(
                f"an op with policy {call.policy.name} cannot mark inputs as dirty: replay would not modify them",
                region=ops.region.name,
                op=call.name,
                remedy="Return a new tensor instead, or give the op the policy RECOMPUTE.",
            )
        for tensor, version in self.inputs:
            if tensor._version != version:
                ops.check_inputs(call, self.inputs)
        self.inputs = ()
        if as_tuple or len(outs) > 1:
            call.template = _SEVERAL
            call.results = self._described(outs)
        elif usual:
            geometry = out.shape, out.stride(), out.storage_offset()
            call.results = new_tuple(Meta, (geometry, out.dtype, out.device, False, NOT_LAZY))
        else:
            (call.results,) = self._described((out,))
        if plain := ctx.non_differentiable:
            call.plain = [place for place, out in enumerate(outs) if any(out is tensor for tensor in plain)]
        ops.end_handle(call, outs, self.entered, self.before)
        self.before = NOTHING_BEFORE
        if self._named:
            ops.expect(call, tuple(self._named.items()), self.args)
            self._named, self.args = {}, ()
        return outs if as_tuple or len(outs) > 1 else out

    def _described(self, outs: Sequence[Tensor]) -> list[Any]:
        """Return what placeholders must show of the outputs.

        Raises:
            UsageError: No placeholder can stand in for one: it is sparse, or a subclass that is not a wrapper.
        """
        metas = [described(out, None) for out in outs]
        for place, meta in enumerate(metas):
            if isinstance(meta, Tensor):
                kind, layout = type(meta).__name__, meta.layout
                raise UsageError(
                    f"an op with policy {self.call.policy.name} returned a {kind} of layout {layout}, for which replay "
                    "has no placeholder",
                    region=self.ops.region.name,
                    op=self.call.name,
                    tensor=str(place) if len(outs) > 1 else "out",
                    remedy="Call it as remat.op(Fn.apply, 'name')(...), which keeps such a result, or give it the "
                    "policy RECOMPUTE.",
                )
        return metas


_SEVERAL = ((0,),)  # stands for a tuple of outputs
