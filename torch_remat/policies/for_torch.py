"""Policies for ops as torch's own checkpoint asks them, to which the compiler's regions are handed.

In: the parts of a policy, which the compiler holds as constants. Kept: what the policy keeps while one forward is
traced. Out: the contexts that ``torch.utils.checkpoint.checkpoint`` takes from its ``context_fn``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from torch_remat._compat import past_the_compiler
from torch_remat.errors import Carried, PolicyError, RematError, warn
from torch_remat.policies.decision import OF_TORCH
from torch_remat.policies.policy import Combined, OpContext, OpPolicy

_FOR_TORCH = {decision: TorchPolicy[name] for name, decision in OF_TORCH.items()}


def contexts_for_torch(allow_cache_entry_mutation: bool, *parts: Any) -> tuple[Any, Any]:
    """Return the contexts of torch's own checkpoint for one region; the compiler calls it past its trace.

    Args:
        allow_cache_entry_mutation: Whether what the policy keeps may be modified in place.
        *parts: Those of the region's policy; see `OpPolicy.parts`.

    Raises:
        PolicyError: The policy asks for names.
    """
    from torch_remat.policies.names import NamePolicy  # loaded only where it is used

    if NamePolicy in parts:
        raise past_the_compiler(_no_names())
    triples = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    policy = Combined([kind(about) if decision is None else kind(about, decision) for kind, about, decision in triples])
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_for_torch(policy), allow_cache_entry_mutation)
    return contexts


def all_saved() -> tuple[Any, Any]:
    """Return the contexts of torch's own checkpoint for a part of a region that is not run again."""
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_save)
    return contexts


def all_offloaded() -> tuple[Any, Any]:
    """Return those for a part whose results are kept away from the device; a torch without such a tag keeps them."""
    if not hasattr(TorchPolicy, "MUST_CPU_OFFLOAD"):
        warn("this torch has no tag for what a compiled region offloads: OFFLOAD is SAVE there")
        return all_saved()
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_offload)
    return contexts


def _offload(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    tags: Any = TorchPolicy  # an older one lacks this tag
    return tags.MUST_CPU_OFFLOAD


def _save(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> TorchPolicy:
    return TorchPolicy.MUST_SAVE


def _for_torch(policy: OpPolicy) -> Callable[..., TorchPolicy]:
    decider = policy.begin()

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> TorchPolicy:
        try:
            said = decider.decide(_Context(ctx), op, args, kwargs)
        except Carried as carried:
            raise past_the_compiler(_for_operators(carried.take())) from None
        except PolicyError as error:
            raise past_the_compiler(_for_operators(error)) from None
        return _FOR_TORCH.get(max(said), TorchPolicy.PREFER_RECOMPUTE)

    return decide


def _for_operators(error: TypeError) -> RuntimeError:
    """Return an error of a policy as one that is no TypeError: of those an operator such as ``@`` makes its own."""
    return RematError(error.what, remedy=error.remedy) if isinstance(error, PolicyError) else RuntimeError(str(error))


class _Context(OpContext):
    """What torch's own checkpoint passes, as our policies expect it."""

    __slots__ = ("_told",)

    def __init__(self, told: Any) -> None:
        self.is_recompute = told.is_recompute
        self._told = told

    @property
    def names(self) -> Sequence[str]:
        """Nothing: ops have no names there."""
        raise _no_names()

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


def _no_names() -> PolicyError:
    return PolicyError(
        "a policy by name was used under torch.compile, where ops have no names",
        remedy="Use a list of ops or a function that does not ask for ctx.name there.",
    )
