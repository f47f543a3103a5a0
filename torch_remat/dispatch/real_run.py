"""Skipped ops that replay runs after all, since placeholders would not do.

In: what a function raised in replay that it did not raise in forward, and then its ops, one by one. Kept: their
results, until the replay is over. Out: the same results; nothing outside is changed again.

NOTE [ Where placeholders will not do ]
C++ code may take the data of a tensor without asking for an op (packed sequences, ``F.ctc_loss`` with lists of
lengths), or refuse a placeholder (a change of its type to a subclass). Then the function runs once more from its start,
with its ops, which are compared with those of forward as before. Holders that are full stay as they are, and what is
kept stands for what is made again. A function cannot run so if it read what it had changed outside, if it drew random
numbers and the generators' state was not kept, or if it gave a tensor the storage of another, which no op shows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch_remat.dispatch.again import Again
from torch_remat.dispatch.calls import Call
from torch_remat.dispatch.placeholder import TORCH_SAYS, Placeholder
from torch_remat.dispatch.schema import Effects, argument, effects_of
from torch_remat.errors import PlaceholderError, RematWarning, qualified_name, raised_at

if TYPE_CHECKING:
    from torch_remat.dispatch.region.region import Region

_SAYS = (*TORCH_SAYS, Placeholder.__name__)
_VALUES = (bool, int, float, complex)
_SETTING = frozenset(("set_", "set_data"))


def may_run(region: Region, calls: Iterable[Call], error: Exception) -> bool:
    """Whether calls of a region can run in its replay, and an error that was raised there is of their lack."""
    if isinstance(error, PlaceholderError):
        if _is_of_a_handle(region, error):
            return False
    elif not isinstance(error, RuntimeError | TypeError) or not any(text in str(error) for text in _SAYS):
        return False
    ran = [effects_of(call.op) for call in calls]
    if region.rng is None:
        # Of an op that is not torch's own nobody knows whether it draws, but the generators tell if they were compared.
        compared = region.options.preserve_rng_state
        if any(effects.random and not (compared and effects.namespace != "aten") for effects in ran):
            return False
    return _SETTING.isdisjoint([effects.name for effects in ran])


def _is_of_a_handle(region: Region, error: PlaceholderError) -> bool:
    """Whether the placeholder stands for the output of an op with a handle, whose body cannot run in replay."""
    record = region.tape.records.get(error.op or "")
    return record is not None and bool(record.outputs)


def warn_of_real_run(region: str, op: str | None, what: str, error: Exception) -> None:
    """Tell the user that replay runs skipped ops after all."""
    if isinstance(error, PlaceholderError):
        reason = f"{error.consumer} at {error.line} needs data"
    else:
        reason = f"{raised_at(error)}: {error}"
    warnings.warn(
        f"{qualified_name(region, op)}: replay cannot pass over {what} with placeholders ({reason}), so it runs the "
        "ops once more. The gradients are right all the same. To spare the second run, leave out of it what takes the "
        "data of tensors past all ops.",
        RematWarning,
        stacklevel=3,
    )


class RealRun:
    """The ops of one such function.

    Args:
        again: What runs them, on copies of what they would change outside.
    """

    __slots__ = ("_again",)

    def __init__(self, again: Again) -> None:
        self._again = again

    def run(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], effects: Effects, results: Any) -> Any:
        """Run an op.

        Args:
            op: The op.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            effects: Its effects.
            results: What forward noted of its results; None if it is none of the sequence.
        """
        # A view of something outside is one of the tensor itself, as in forward, and not of the copy.
        if not effects.written and (effects.viewed or effects.reshapes or getattr(results, "alias", False)):
            return op(*args, **kwargs)
        result = self._again.watch(op, args, kwargs)
        if isinstance(results, _VALUES):
            return results
        if len(effects.returned) == 1 and effects.returned[0] >= 0:
            return argument(effects.written[effects.returned[0]], args, kwargs)
        return result
