"""`explain`: why each named tensor is kept or not, and what each op's other policies would cost."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from threading import get_ident
from typing import Any

import torch

from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.observe import Observer, observed_by
from torch_remat.dispatch.region.forward import run_region
from torch_remat.dispatch.region.inputs import RegionInputs, leaves_of, with_leaves
from torch_remat.dispatch.region.region import Region
from torch_remat.dispatch.region.replay import Filling
from torch_remat.errors import PlaceholderError, RematError, UsageError, qualified_name
from torch_remat.offload.cpu import CpuOffloader
from torch_remat.offload.protocol import chosen
from torch_remat.policies.decision import CheckpointPolicy
from torch_remat.reports.explanation import Alternative, Explanation
from torch_remat.reports.graph import is_released, nodes_below
from torch_remat.reports.notes import CountAten, Notes, OpNotes, RegionNotes, report_of
from torch_remat.reports.torch_checkpoint import is_of_checkpoint
from torch_remat.reports.undo import Undo
from torch_remat.reports.walk import tensors_in


def explain(function: Callable[..., Any], *, alternatives: bool = True) -> Callable[..., Explanation]:
    """Run a function forward and backward once, and say why each named tensor in its regions is kept or not.

    Backward starts from all tensors that the function returns, also in containers and dataclasses, and that need a
    gradient, with ones; gradients are dropped, not accumulated. A function that calls backward itself, such as a
    training step, may return anything.

    For each op the other policies are tried out: the forward and the replay of its region run once more with that
    policy. That relies on what any checkpoint relies on, that a region's function may run again; what it changes in
    place in tensors from outside, such as the statistics of a batch norm, is put back. Bytes are measured, FLOPs
    counted. Regions that are alike (same code, ops and bytes) are tried out once; regions inside others are not.
    OFFLOAD is tried out with the region's offloader, or that of `offload_to`, or a `CpuOffloader` for this alone.

    Args:
        function: What contains the regions, such as a model; called with the arguments of the second call.
        alternatives: Whether other policies are tried out.

    Returns:
        A callable that takes the function's arguments and returns the explanation: plain data, and text with ``print``.

    Raises:
        UsageError: It was called inside a region, or ``function`` cannot be called.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     @remat.auto_forward("x")
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x * x
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return 2 * grad * ctx.saved_tensors[0]
        >>> def block(x):
        ...     return remat.op(Square.apply, "square")(x.sin())
        >>> x = torch.randn(4, requires_grad=True)
        >>> explanation = remat.explain(remat.checkpoint(region_name="block")(block))(x)
        >>> [(tensor.label, tensor.state) for tensor in explanation.regions[0].ops[0].tensors]
        [('x', 'elided'), ('out', 'not kept')]
    """
    if not callable(function):
        raise UsageError(
            f"explain() cannot run a {type(function).__name__}",
            remedy="The form is remat.explain(function)(*args, **kwargs).",
        )

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        if current_mode() is not None:
            raise UsageError("explain() was called inside a region", remedy="Call it around the whole model.")
        trials = _Trials()
        notes = Notes(trials.try_others if alternatives else _no_trials)
        trials.notes = notes
        with torch.enable_grad(), observed_by(notes), CountAten(notes.count):
            no_backward = _backward(function(*args, **kwargs))
        return Explanation(tuple(region.explained() for region in notes.regions.values()), no_backward)

    return explained


def _no_trials(region: Region, notes: RegionNotes) -> None:
    pass


def _backward(output: Any) -> str | None:
    """Run backward from what needs a gradient, without accumulating any; return why none ran, if so."""
    found = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
    released = {node for node in nodes_below(found) if is_released(node)}
    roots = [root for root in found if not released or released.isdisjoint(nodes_below([root]))]
    variables = [variable for node in nodes_below(roots) if (variable := getattr(node, "variable", None)) is not None]
    if variables:
        torch.autograd.grad(roots, variables, [torch.ones_like(root) for root in roots], allow_unused=True)
        return None
    if found:
        return "the function has run that of what it returned itself"
    return (
        f"it found no tensor that needs a gradient in what the function returned ({type(output).__name__}). "
        "Return the loss, in a container or dataclass if need be, or run backward in the function."
    )


class _Override(Observer):
    """Gives one op of one function's regions another policy."""

    def __init__(self, op: str, policy: CheckpointPolicy) -> None:
        self._op = op
        self._policy = policy
        self._thread = get_ident()
        self.region: Region | None = None

    def begin_region(self, region: Region, phase: str) -> None:
        """Take the first region that begins: the one that is tried out."""
        if self.region is None and get_ident() == self._thread:
            self.region = region

    def policy_of(self, region: Region, name: str, policy: CheckpointPolicy) -> CheckpointPolicy:
        """Return the other policy for the op."""
        return self._policy if region is self.region and name == self._op else policy


class _Trials:
    """Tries out other policies for the ops of a region, once for each kind of region."""

    notes: Notes

    def __init__(self) -> None:
        self._known: dict[Any, dict[str, tuple[Alternative, ...]]] = {}
        self._offloader = CpuOffloader()

    def try_others(self, region: Region, notes: RegionNotes) -> None:
        """Fill in the alternatives of a region's ops."""
        if current_mode() is not None or not notes.ops or region.inputs is None:
            return
        if region.hooks is not None and is_of_checkpoint(region.hooks[1]):
            return  # that would count what a trial saves
        kind = _kind(region, notes)
        if kind not in self._known:
            self.notes.paused = True
            try:
                same = self._measure(region, None, None)
                self._known[kind] = {
                    # What cannot run as it is will fail in backward, with an error of its own.
                    name: () if isinstance(same, str) else tuple(self._others(region, op, same))
                    for name, op in notes.ops.items()
                }
            finally:
                self.notes.paused = False
        for name, found in self._known[kind].items():
            notes.ops[name].alternatives = found

    def _others(self, region: Region, op: OpNotes, same: tuple[int, int, int]) -> list[Alternative]:
        found = []
        for policy in CheckpointPolicy:
            if policy.value != op.policy:
                measured = self._measure(region, op.name, policy)
                if isinstance(measured, str):
                    found.append(Alternative(policy.value, 0, 0, 0, measured))
                else:
                    kept, offloaded, flops = (after - before for after, before in zip(measured, same, strict=True))
                    found.append(Alternative(policy.value, kept, offloaded, flops))
        return found

    def _measure(self, region: Region, op: str | None, policy: CheckpointPolicy | None) -> tuple[int, int, int] | str:
        """Run a region's forward and replay; return kept and offloaded bytes and replay's FLOPs, or what went wrong."""
        flops: list[int] = []
        override = _Override(op or "", policy or CheckpointPolicy.SAVE)
        assert region.function is not None
        assert region.inputs is not None
        options, undo = region.options, Undo()
        if options.offloader is None and chosen.get() is None:
            options = options._replace(offloader=self._offloader)
        try:
            args, kwargs = _arguments_of(region, region.inputs)
            with ExitStack() as stack:
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", category=RuntimeWarning, message=".*(CpuOffloader|DiskOffloader)")
                if region.rng is not None:
                    stack.enter_context(region.rng.replayed())
                stack.callback(undo.restore)
                stack.enter_context(undo)
                stack.enter_context(observed_by(override))
                output = run_region(region.function, args, kwargs, options)
                tried = override.region
                assert tried is not None
                report = report_of(tried)
                stack.enter_context(CountAten(flops.append))
                if empty := tried.tape.empty():
                    Filling(tried, empty).replay()
        except PlaceholderError as error:
            return f"{error.consumer} at {error.line} reads {qualified_name(None, error.op, error.tensor)}"
        except RematError as error:
            return error.what
        del output
        return report.bytes, report.offloaded_bytes, sum(flops)


class _Alias(torch.autograd.Function):
    """The same memory as a result, not as a leaf: a leaf would not travel."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _arguments_of(region: Region, inputs: RegionInputs) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return a region's arguments, such that those will be offloaded which were."""
    args, kwargs = inputs.restore(region)
    away = inputs.offloaded()
    if not away:
        return args, kwargs
    leaves = leaves_of(args, kwargs)
    aliases = {id(leaves[place]): _Alias.apply(leaves[place]) for place in away}
    return with_leaves(args, kwargs, [aliases.get(id(leaf), leaf) for leaf in leaves])


def _kind(region: Region, notes: RegionNotes) -> Any:
    """Return what two regions have in common if a trial of one tells of the other."""
    function = region.function
    report = notes.report
    return (
        type(function),
        getattr(function, "__code__", None),
        region.options._replace(region_name=None, offloader=None),
        id(region.options.offloader),
        notes.counts.flops["forward"],
        notes.counts.ops["forward"],
        tuple(
            (op.name, op.policy, tuple((seen.label, seen.bytes) for seen in op.outputs)) for op in notes.ops.values()
        ),
        None if report is None else (report.bytes, report.offloaded_bytes),
        notes.unnamed,
    )
