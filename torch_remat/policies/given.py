"""What users may give as a policy: lists of functions and ops, functions of their own, and policies.

In: what was given. Kept: the policies of the latest lists, since many write a list anew in each step. Out: a policy.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any

from torch.compiler import is_compiling

from torch_remat._compat import OperatorBase, OpOverloadPacket
from torch_remat.errors import PolicyError, shown
from torch_remat.policies.by_function import FunctionsPolicy, OpsOfFunctions
from torch_remat.policies.by_op import OpsPolicy, PolicyFunction
from torch_remat.policies.functions import is_function, name_of, not_seen
from torch_remat.policies.policy import Combined, OpPolicy, read_by


@lru_cache
def _listed(policy: tuple[Any, ...]) -> OpPolicy:
    """Return the policy that a list is; many write it anew in each step."""
    functions = [one for one in policy if is_function(one)]
    ops = [one for one in policy if not is_function(one)]
    if ops and functions:
        return Combined((FunctionsPolicy(functions), OpsPolicy(ops)))
    return FunctionsPolicy(functions) if functions else OpsPolicy(ops)


def as_policy(policy: Any) -> OpPolicy:
    """Return what a user gave as a policy in the form that the runtime asks.

    Raises:
        PolicyError: It is not a policy.
    """
    if isinstance(policy, OpPolicy):
        return policy
    if isinstance(policy, (list, tuple, set, frozenset)):
        if is_compiling():  # which cannot look into functions, and needs the ops that they are made of
            names = [name_of(one) for one in policy if not isinstance(one, OperatorBase | OpOverloadPacket)]
            listed = OpsPolicy([one for one in policy if isinstance(one, OperatorBase | OpOverloadPacket)])
            return Combined((OpsOfFunctions(names), listed)) if names else listed
        try:
            return _listed(tuple(policy))
        except TypeError as error:
            if isinstance(error, PolicyError):
                raise
            raise not_seen(next(one for one in policy if not isinstance(one, Hashable))) from None
    if is_function(policy):
        return FunctionsPolicy([policy])
    if isinstance(policy, OperatorBase | OpOverloadPacket):
        return OpsPolicy([policy])
    if callable(policy):
        return PolicyFunction(policy)
    raise PolicyError(
        f"{shown(policy)} is not a policy for the ops of a region",
        remedy="A policy is a list of functions and ops, a function (ctx, op, *args, **kwargs), remat.save_names(...), "
        "one of remat.policies, or several of these with | between them; policy & ~remat.save_names(...) excludes "
        "names.",
    )


read_by(as_policy)
