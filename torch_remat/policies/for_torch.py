"""Policies for ops as torch's own checkpoint asks them, to which the compiler's regions are handed.

In: a policy for the ops of a region. Kept: what it keeps while one forward runs. Out: a function for
``torch.utils.checkpoint.create_selective_checkpoint_contexts``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy

from torch_remat.errors import Carried, PolicyError, RematError
from torch_remat.policies.kinds import OF_TORCH, OpContext, OpPolicy

_FOR_TORCH = {decision: TorchPolicy[name] for name, decision in OF_TORCH.items()}


def for_torch(policy: OpPolicy) -> Callable[..., TorchPolicy]:
    """Return a policy as a function for torch's own checkpoint.

    Automatic names are known in eager mode only.
    """
    decider = policy.begin()

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> TorchPolicy:
        try:
            said = decider.decide(_Context(ctx), op, args, kwargs)
        except Carried as carried:
            raise _for_operators(carried.take()) from None
        except PolicyError as error:
            raise _for_operators(error) from None
        return _FOR_TORCH.get(max(said), TorchPolicy.PREFER_RECOMPUTE)

    return decide


def _for_operators(error: TypeError) -> RuntimeError:
    """Return an error of a policy as one that is no TypeError: of those an operator such as ``@`` makes its own."""
    return RematError(error.what, remedy=error.remedy) if isinstance(error, PolicyError) else RuntimeError(str(error))


class _Context(OpContext):
    """What torch's own checkpoint tells, as our policies expect it."""

    __slots__ = ("_told",)

    def __init__(self, told: Any) -> None:
        self.is_recompute = told.is_recompute
        self._names = _no_names
        self._told = told

    @property
    def op_output(self) -> Any:
        """What the op returned; before 2.12 torch asks before it runs."""
        try:
            return self._told.op_output
        except AttributeError:
            raise PolicyError(
                "a policy read ctx.op_output under torch.compile, which before torch 2.12 asks before an op runs",
                remedy="Decide by the op and its arguments there, or use a later torch.",
            ) from None


def _no_names() -> Sequence[str]:
    raise PolicyError(
        "a policy by name was used under torch.compile, where ops have no names",
        remedy="Use a list of ops or a function that does not ask for ctx.name there.",
    )
