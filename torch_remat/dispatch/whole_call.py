"""A native region that is one call of a function of torch's own: replay skips the call whole.

In forward: the call's arguments, results, and the tensors that autograd saves meanwhile. Kept: residents; on the tape
what replay must know of arguments and results. Out: in replay the results, kept ones or placeholders, and the values of
arguments that were saved, without a dispatch mode in either phase.

Such a function is C++ code: what it does depends on its arguments alone, so that there is no sequence of ops to watch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.nn import functional as F

from torch_remat._compat import PYTREE_NAMESPACE, any_autocast_enabled, is_compiled, node_number, sequence_number
from torch_remat.dispatch.calls import Meta, described, key_of, layout_of, placeholder_for
from torch_remat.dispatch.inputs import leaves_of, with_leaves
from torch_remat.dispatch.mismatch import mismatched
from torch_remat.dispatch.naming import default_name
from torch_remat.dispatch.native import Native, Returned
from torch_remat.dispatch.placeholder import Placeholder, Source, refuse, unpack
from torch_remat.dispatch.record import WholeCallRecord
from torch_remat.dispatch.schema import may_draw
from torch_remat.errors import RematWarning, UsageError, qualified_name, user_line

if TYPE_CHECKING:
    from torch_remat.dispatch.ambient import RngState
    from torch_remat.dispatch.forward_ops import ForwardOps
    from torch_remat.dispatch.holder import Anchor, Holder
    from torch_remat.dispatch.replay import Filling
    from torch_remat.dispatch.replay_ops import ReplayOps


def is_whole_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function is one of torch's own, called with plain tensors, which changes none of them, or compiled.

    Under autocast one of torch's own makes casts besides, and parameters' casts are not to be kept.
    """
    if type(function) is not BuiltinFunctionType:
        return is_compiled(function) and all(map(_is_plain, args)) and all(map(_is_plain, kwargs.values()))
    if not _is_pure(function) or any_autocast_enabled():
        return False
    if kwargs and ("out" in kwargs or any(not _is_plain(value) for value in kwargs.values())):
        return False
    return all(map(_is_plain, args))


def _is_plain(value: Any) -> bool:
    if type(value) in _PLAIN:
        return True
    if isinstance(value, torch.Tensor):
        return False
    return not isinstance(value, (list, tuple)) or all(map(_is_plain, value))


_PLAIN = frozenset((torch.Tensor, Parameter, Placeholder, int, float, bool, type(None)))
_pure: dict[int, bool] = {}


def _is_pure(function: Any) -> bool:
    pure = _pure.get(id(function))
    if pure is None:
        name = function.__name__
        known = any(getattr(place, name, None) is function for place in (torch, F))
        # Norms change running statistics; what is named so changes its argument.
        pure = _pure[id(function)] = known and not name.endswith("_") and "_norm" not in name
    return pure


def _versions_of(args: Sequence[Any]) -> list[int]:
    return [arg._version for arg in args if isinstance(arg, torch.Tensor) and not arg.is_inference()]


def _nothing(_leaf: Any) -> int:
    return 0


def may_draw_in(function: Callable[..., Any]) -> bool:
    """Whether such a function may draw random numbers."""
    if type(function) is not BuiltinFunctionType:
        return True
    draws = _draws.get(id(function))
    if draws is None:
        draws = _draws[id(function)] = may_draw(function.__name__)
    return draws


_draws: dict[int, bool] = {}


class WholeCall(Native):
    """One such call, while forward runs.

    Args:
        ops: The ops of the region around it.
        record: Its record.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(
        self, ops: ForwardOps, record: WholeCallRecord, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        super().__init__(ops)
        self.record: WholeCallRecord = record
        self._saved = 0
        self._args = tuple(args) if not kwargs else (*args, *kwargs.values())
        record.layout = layout_of(args, kwargs)
        self._versions = None if type(record.function) is BuiltinFunctionType else _versions_of(self._args)
        rng = ops.region.rng if may_draw_in(record.function) else None
        self._rng = None if rng is None else rng.present()

    def pack(self, tensor: torch.Tensor) -> Holder | Anchor:
        """Return what autograd keeps of a tensor that the call saves."""
        if type(tensor) is Parameter:
            return (tensor, tensor._version, self._ops.region)
        name = f"saved_{self._saved}"
        self._saved += 1
        return self._ops.hold(self.record, name, tensor, self._args)

    def returns(self, result: Any) -> None:
        """Note what the call returns."""
        self.last_number = sequence_number()
        record = self.record
        if self._versions is not None and self._versions != _versions_of(self._args):
            raise UsageError(
                "a compiled function in a native region changed its argument in place, which replay would not repeat",
                region=self._ops.region.name,
                op=record.name,
                remedy="Return the new value from it, or give the native region the policy RECOMPUTE.",
            )
        leaves = (result,) if isinstance(result, torch.Tensor) else leaves_of((result,), {})
        if leaves and all(map(self._is_view_of_argument, leaves)):
            record.views = self.views = True
            self._end()
            return
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                record.metas.append(leaf)
                continue
            record.metas.append((described(leaf, None), leaf.requires_grad))
            if not leaf.is_inference():
                self.returned.append(Returned.of(place, key_of(leaf), leaf))
            node = leaf.grad_fn
            if node is not None and not self._saved and node_number(node) >= self.first_number:
                node.register_prehook(self._ops.region.note_backward)
        if len(leaves) != 1 or leaves[0] is not result:
            record.template = optree.tree_map(_nothing, result, namespace=PYTREE_NAMESPACE)
        self._end()

    def keep(self, stop: int) -> None:
        """At the end of forward: keep the returned tensors that replay reads, unless replay must make them again."""
        if self._ops.region.tape.backward_inside:
            self.returned = []
        else:
            super().keep(stop)

    def _is_view_of_argument(self, leaf: Any) -> bool:
        if not isinstance(leaf, torch.Tensor):
            return False
        base = leaf._base
        for arg in self._args:
            if arg is leaf:
                return True
            if base is not None and isinstance(arg, torch.Tensor) and (arg is base or arg._base is base):
                return True
        return False

    def left_by(self, error: BaseException) -> None:
        """Note that an exception left the call: the region that catches it must do without."""
        self.last_number = sequence_number()
        if isinstance(error, Exception):
            self.record.raised = type(error), error.args
        self._end()

    def _end(self) -> None:
        if self._ops.departures.waiting:
            self._ops.departures.send()
        if self._rng is not None:
            self.record.drawn = self._rng.drawn()
            self._rng = None
        self._args = ()


class WholeCallReplay:
    """One such call in one replay.

    Args:
        mode: The replay's mode.
        ops: Its ops.
        record: The call's record.
        function: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(
        self,
        mode: Filling,
        ops: ReplayOps,
        record: WholeCallRecord,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._mode = mode
        self._record = record
        self._call: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]] | None = function, args, kwargs
        self._values: list[Any] | None = None
        self._rng: RngState | None = None
        region = mode.region
        same = function is record.function
        if not same or layout_of(args, kwargs) != record.layout:
            ran = default_name(record.function)
            found = "tensors of other shapes or strides" if same else default_name(function)
            mode.fail(
                mismatched(
                    region,
                    f"forward ran {ran} here, replay ran {'it on ' if same else ''}{found}",
                    "A native region must run the same function on the same arguments in both phases.",
                    op=record.name,
                )
            )
        if record.elided_inputs or ops.made:
            ops.fill_elided(record, tuple(args) if not kwargs else (*args, *kwargs.values()))
        if record.raised is not None:
            kind, values = record.raised
            raise kind(*values)
        if record.drawn is not None:
            if region.rng is not None:
                self._rng = region.rng.present()
            record.drawn.restore()

    def result(self) -> Any:
        """Return what the call returned in forward, or for views what it returns."""
        record = self._record
        if record.views and self._call is not None:
            function, args, kwargs = self._call
            return function(*args, **kwargs)
        if self._mode.region.tape.backward_inside and self._call is not None:
            return self._run(*self._call)
        leaves = [self._leaf(place, meta) for place, meta in enumerate(record.metas)]
        if record.template is None:
            return leaves[0]
        return with_leaves((record.template,), {}, leaves)[0][0]

    def _run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the call, so that a gradient taken inside the region finds a history."""
        if self._rng is not None:
            self._rng.restore()
        with saved_tensors_hooks(torch.detach, unpack):  # forward's holders have what backward needs
            result = function(*args, **kwargs)
        if self._record.drawn is not None:
            self._record.drawn.restore()
        return result

    def forget(self) -> None:
        """Let go of the arguments; a placeholder may outlive the replay."""
        self._call = self._values = None

    def _leaf(self, place: int, meta: Any) -> Any:
        record, region = self._record, self._mode.region
        if type(meta) is not tuple:
            return meta
        slot = record.returned.get(place)
        if slot is not None:
            tensor = slot.load(region, record.name, record.output_name(place))
            self._mode.note_loaded(tensor)
            return tensor
        known, requires_grad = meta
        if type(known) is not Meta:
            return known
        made = placeholder_for(known, Source(region.name, record.name, record.output_name(place)))
        made.compute = partial(self._compute, place)
        return made.requires_grad_() if requires_grad else made

    def _compute(self, place: int, consumer: str) -> torch.Tensor:
        record = self._record
        name = record.output_name(place)
        if self._call is None:
            refuse(Source(self._mode.region.name, record.name, name), consumer)
        if self._values is None:
            warn_of_rerun(self._mode.region.name, record, name, consumer)
            function, args, kwargs = self._call
            present = None if self._rng is None else self._rng.present()
            if self._rng is not None:
                self._rng.restore()
            try:
                with self._mode.unwatched(), torch.no_grad():
                    result = function(*args, **kwargs)
            finally:
                if present is not None:
                    present.restore()
            self._values = [result] if isinstance(result, torch.Tensor) else leaves_of((result,), {})
        value: torch.Tensor = self._values[place]
        return value


def warn_of_rerun(region: str, record: Any, tensor: str, consumer: str) -> None:
    """Tell the user, once, that replay runs a native region after all."""
    if record.warned:
        return
    record.warned = True
    file, line = user_line()
    warnings.warn(
        f"{qualified_name(region, record.name, tensor)}: {consumer} at {file}:{line} reads this result of a native "
        "region in replay, which autograd's graph did not show in forward, so that it was not kept: replay runs the "
        "region once more. Let the native region contain the reader too, or give it the policy RECOMPUTE.",
        RematWarning,
        stacklevel=3,
    )
