"""`explain`: why each named tensor is kept or not, and what each op's other policies would cost."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from operator import sub
from threading import get_ident
from typing import Any

import torch

from torch_remat._compat import TorchDispatchMode, as_written, eager_only, set_version
from torch_remat.dispatch.log.meta import key_of
from torch_remat.dispatch.log.meta import tensors_in as arguments_in
from torch_remat.dispatch.log.schema import argument, effects_of
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.placeholder import is_placeholder
from torch_remat.dispatch.region.forward import run_region
from torch_remat.dispatch.region.inputs import RegionInputs, leaves_of, with_leaves
from torch_remat.dispatch.region.region import Region
from torch_remat.errors import PlaceholderError, RematError, RematWarning, UsageError, qualified_name
from torch_remat.offload.cpu import CpuOffloader
from torch_remat.offload.protocol import chosen
from torch_remat.policies.decision import CheckpointPolicy
from torch_remat.reports.explanation import Alternative, Explanation
from torch_remat.reports.graph import is_released, nodes_below
from torch_remat.reports.ledger import report_of, tensors_in
from torch_remat.reports.notes import CountAten, Notes, OpNotes, RegionNotes
from torch_remat.reports.observer import Observer, observed_by
from torch_remat.reports.torch_checkpoint import is_of_checkpoint
from torch_remat.reports.watch import WatchedOp

# Written by batch norms, of which not all schemas say so.
_STATISTICS = {"running_mean", "running_var"}


@eager_only
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
        notes = Notes(_Trials().try_others if alternatives else None)
        with as_written(), torch.enable_grad(), observed_by(notes), CountAten(notes.count):
            no_backward = _backward(function(*args, **kwargs))
        return Explanation(tuple(region.explained() for region in notes.regions.values()), no_backward)

    return explained


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
    """Gives ops other policies, by their names, in the first region that this thread begins."""

    def __init__(self, policies: Mapping[str, CheckpointPolicy]) -> None:
        self._policies = policies
        self._thread = get_ident()
        self.region: Region | None = None

    def begin(self, region: Region, op: WatchedOp | None, phase: str) -> None:
        if self.region is None and get_ident() == self._thread:
            self.region = region

    def policy_of(self, region: Region, name: str, policy: CheckpointPolicy) -> CheckpointPolicy:
        return self._policies.get(name, policy) if region is self.region else policy


class _Trials:
    """Tries out other policies for the ops of a region, once for each kind of region."""

    def __init__(self) -> None:
        self._known: dict[Any, dict[str, tuple[Alternative, ...]]] = {}
        self._offloader = CpuOffloader()

    def try_others(self, region: Region, notes: RegionNotes) -> None:
        if current_mode() is not None or not notes.ops or region.inputs is None:
            return
        if region.hooks is not None and is_of_checkpoint(region.hooks[1]):
            return  # that would count what a trial saves
        kind = _kind(region, notes)
        if kind not in self._known:
            same = self._measure(region, {})
            self._known[kind] = {
                # What cannot run as it is will fail in backward, with an error of its own.
                name: () if isinstance(same, str) else tuple(self._others(region, op, same))
                for name, op in notes.ops.items()
            }
        for name, found in self._known[kind].items():
            notes.ops[name].alternatives = found

    def _others(self, region: Region, op: OpNotes, same: tuple[int, int, int]) -> Iterator[Alternative]:
        for policy in CheckpointPolicy:
            if policy is not op.policy:
                measured = self._measure(region, {op.name: policy})
                if isinstance(measured, str):
                    yield Alternative(policy.value, 0, 0, 0, measured)
                else:
                    yield Alternative(policy.value, *map(sub, measured, same))

    def _measure(self, region: Region, policies: Mapping[str, CheckpointPolicy]) -> tuple[int, int, int] | str:
        """Run a region's forward and replay; return kept and offloaded bytes and replay's FLOPs, or what went wrong."""
        flops: list[int] = []
        override = _Override(policies)
        assert region.function is not None
        assert region.inputs is not None
        options = region.options
        if options.offloader is None and chosen.get() is None:
            options = options._replace(offloader=self._offloader)
        try:
            args, kwargs = _arguments_of(region, region.inputs)
            with ExitStack() as stack:
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", category=RematWarning, message=".*(CpuOffloader|DiskOffloader)")
                if region.rng is not None:
                    stack.enter_context(region.rng.replayed())
                stack.enter_context(_Undo())
                stack.enter_context(observed_by(override))
                output = run_region(region.function, args, kwargs, options)
                tried = override.region
                assert tried is not None
                report = report_of(tried)
                stack.enter_context(CountAten(flops.append))
                if empty := tried.tape.empty():
                    tried.refill(empty[0])  # as a backward that reads all of its saved tensors would
        except PlaceholderError as error:
            return f"{error.consumer} at {error.line} reads {qualified_name(None, error.op, error.tensor)}"
        except RematError as error:
            return error.what
        del output
        return report.bytes, report.offloaded_bytes, sum(flops)


def _arguments_of(region: Region, inputs: RegionInputs) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return a region's arguments; those that were offloaded are such that a new region offloads them, too."""
    args, kwargs = inputs.restore(region)
    leaves = leaves_of(args, kwargs)
    copies = {id(leaves[place]): leaves[place].clone() for place in inputs.offloaded()}  # a leaf would not travel
    return with_leaves(args, kwargs, [copies.get(id(leaf), leaf) for leaf in leaves]) if copies else (args, kwargs)


def _kind(region: Region, notes: RegionNotes) -> Any:
    """Return a key that is equal for two regions if a trial of one holds for the other as well."""
    options, counts, report = region.options, notes.counts, notes.report
    ops = tuple((op.name, op.policy, tuple((one.label, one.bytes) for one in op.outputs)) for op in notes.ops.values())
    return (
        *(type(region.function), getattr(region.function, "__code__", None)),
        *(options._replace(region_name=None, offloader=None), id(options.offloader)),
        *(counts["forward_flops"], counts["forward_ops"], ops, notes.unnamed),
        *(report.bytes, report.offloaded_bytes),
    )


class _Undo(TorchDispatchMode):
    """Puts back what a trial changes in place in tensors from before: running statistics, caches, counters.

    It copies each storage from outside that an op writes, before that, and keeps the copies until the trial is over.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {key_of(tensor) for tensor in arguments_in(args, kwargs)}
        for tensor in _written(op, args, kwargs):
            self._note(tensor)
        result = op(*args, **kwargs)
        results = result if isinstance(result, (list, tuple)) else (result,)
        self._made.update(key for tensor in arguments_in(results, {}) if (key := key_of(tensor)) not in given)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        if is_placeholder(tensor) or tensor.layout is not torch.strided or (key := key_of(tensor)) in self._made:
            return
        if key not in self._before:
            storage = tensor.untyped_storage()
            self._before[key] = storage, storage.clone()
        if not tensor.is_inference():
            self._versions.append((tensor, tensor._version))

    def __exit__(self, *raised: Any) -> None:
        """Put back what was changed."""
        super().__exit__(*raised)
        for storage, before in self._before.values():
            if storage.nbytes() == before.nbytes():  # else it was resized: its tensor is another one now
                storage.copy_(before)
        for tensor, version in self._versions[::-1]:
            set_version(tensor, version)


def _written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    effects = effects_of(op)
    where = list(effects.written)
    if "batch_norm" in effects.name:
        where += [(place, one.name) for place, one in enumerate(op._schema.arguments) if one.name in _STATISTICS]
    return arguments_in([argument(one, args, kwargs) for one in where], {})
