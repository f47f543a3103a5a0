"""What users may give as a policy: lists and dicts of functions and ops, functions of their own, and policies.

In: what was given. Kept: the policies of the latest lists, since many write a list anew in each step. Out: a policy.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from functools import lru_cache
from types import FunctionType
from typing import Any

from torch.compiler import is_compiling

from torch_remat._compat import CustomOpDef, OperatorBase, OpOverloadPacket
from torch_remat.errors import PolicyError, shown
from torch_remat.policies.by_function import FunctionsPolicy, OpsOfFunctions
from torch_remat.policies.by_op import OpsPolicy, PolicyFunction
from torch_remat.policies.decision import ANSWERS, Decision
from torch_remat.policies.functions import is_function, name_of, not_seen
from torch_remat.policies.policy import Combined, OpPolicy, read_by

_OPS = (OperatorBase, OpOverloadPacket, CustomOpDef)


def as_policy(policy: Any) -> OpPolicy:
    """Return what a user gave as a policy in the form that the runtime asks.

    Raises:
        PolicyError: It is not a policy.
    """
    if isinstance(policy, OpPolicy):
        return policy
    if isinstance(policy, (list, tuple, set, frozenset)):
        return _listed(policy, Decision.MUST_SAVE)
    if isinstance(policy, Mapping):
        return _mapped(policy)
    if is_function(policy):
        return FunctionsPolicy([policy])
    if isinstance(policy, _OPS):
        return OpsPolicy([policy])
    if isinstance(policy, FunctionType) and str(policy.__module__).startswith("torch_remat."):
        raise PolicyError(
            f"{policy.__name__} makes policies, and is not one itself",
            remedy="Call it: remat.save_names('up.*'), remat.save_modules('*.self_attn'), memory_budget(0.5).",
        )
    if callable(policy):
        return PolicyFunction(policy)
    raise PolicyError(
        f"{shown(policy)} is not a policy for the ops of a region",
        remedy="A policy is a list of functions and ops, a dict from these to decisions, a function "
        "(ctx, op, *args, **kwargs), remat.save_names(...), one of remat.policies, or several of these with | between "
        "them; policy & ~remat.save_names(...) excludes names.",
    )


def _mapped(policy: Mapping[Any, Any]) -> OpPolicy:
    """Return the policy that a mapping from functions and ops to decisions is."""
    said = tuple(policy.items())
    try:
        return _decided(said) if is_compiling() else _known_mapping(said)
    except TypeError as error:
        if isinstance(error, PolicyError):
            raise
        return _decided(said)  # which has something to say of a decision without a hash


def _decided(said: Iterable[tuple[Any, Any]]) -> OpPolicy:
    listed: dict[Decision, list[Any]] = {}
    for one, decided in said:
        try:
            (decision,) = ANSWERS[decided]
        except (KeyError, TypeError):
            raise PolicyError(
                f"a policy says {shown(decided)} of {shown(one)}, which is no decision",
                remedy="A dict that is a policy has for each function or op remat.CheckpointPolicy.SAVE, OFFLOAD or "
                "RECOMPUTE, a policy of torch.utils.checkpoint.CheckpointPolicy, a bool, or None for recomputing.",
            ) from None
        listed.setdefault(decision, []).append(one)
    parts = [_listed(some, decision) for decision, some in listed.items()]
    return parts[0] if len(parts) == 1 else Combined(parts) if parts else _listed((), Decision.MUST_SAVE)


_known_mapping = lru_cache(_decided)


def _listed(given: Iterable[Any], decision: Decision) -> OpPolicy:
    """Return the policy that says the same of several functions and ops."""
    if is_compiling():  # which cannot look into functions, and needs the ops that they are made of
        names = [name_of(one) for one in given if not isinstance(one, _OPS)]
        ops = OpsPolicy([one for one in given if isinstance(one, _OPS)], decision)
        return Combined((OpsOfFunctions(names, decision), ops)) if names else ops
    try:
        return _known(tuple(given), decision)
    except TypeError as error:
        if isinstance(error, PolicyError):
            raise
        raise not_seen(next(one for one in given if not isinstance(one, Hashable))) from None


@lru_cache
def _known(given: tuple[Any, ...], decision: Decision) -> OpPolicy:
    functions = [one for one in given if is_function(one)]
    ops = [one for one in given if not is_function(one)]
    if ops and functions:
        return Combined((FunctionsPolicy(functions, decision), OpsPolicy(ops, decision)))
    return FunctionsPolicy(functions, decision) if functions else OpsPolicy(ops, decision)


read_by(as_policy)
