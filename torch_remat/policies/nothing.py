"""A policy that selects nothing in a region: said once, with what it may have been meant to select.

In: a policy, and the ops of a region's forward. Kept: by policy and code of the region, whether the first forward had
something for it. Out: a warning, and a line for reports.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from difflib import get_close_matches
from itertools import chain

import torch

from torch_remat.errors import warn
from torch_remat.policies.policy import OpPolicy

_SELECTS: dict[Hashable, bool] = {}
_KNOWN: dict[tuple[object, object], object] = {}
_SHOWN = 6  # names of ops


def is_new(policy: OpPolicy, code: Hashable) -> bool:
    """Whether a policy that is to select something has its first forward in a region with this code."""
    return policy.expects_ops and (policy.parts(), code) not in _SELECTS


def note_first(policy: OpPolicy, code: Hashable, region: str, ran: Sequence[str], selects: bool) -> None:
    """Note whether a policy has selected something in a first forward, and warn if not.

    Args:
        policy: The policy.
        code: What identifies the region's code.
        region: The region's name.
        ran: The names of its ops.
        selects: Whether the policy has selected one.
    """
    _SELECTS[policy.parts(), code] = selects
    if not selects:
        warn(f"{region}: the policy {policy!r} selected nothing, so all is recomputed. {_near(policy, ran)}")


def note_first_functions(
    policy: OpPolicy, code: Hashable, region: str, wanted: Sequence[str], ran: Sequence[str], selects: bool
) -> None:
    """Do the same for a policy that names functions, and warn of each that did not run.

    Args:
        policy: The policy.
        code: What identifies the region's code.
        region: The region's name.
        wanted: The names of the functions.
        ran: The names of those that ran.
        selects: Whether the policy has selected something.
    """
    _SELECTS[policy.parts(), code] = selects
    # Of higher-order ops, as of all ops, none has to occur.
    missing = [name for name in wanted if name not in ran and not (selects and hasattr(torch.ops.higher_order, name))]
    if missing:
        near = (get_close_matches(name, ran, n=_SHOWN, cutoff=0.5) for name in missing)
        shown = _some([*chain.from_iterable(near), *ran])
        what = "is for calls that did not run" if selects else "selected nothing, so all is recomputed"
        others = " If other layers run them, checkpoint_modules(model, {pattern: {'policy': ...}}) gives each its own."
        warn(
            f"{region}: the policy {policy!r} {what}: {', '.join(missing)}. Functions that ran: {shown or 'none'}. "
            f"remat.list_names(function)(*args) shows what they consist of.{others * selects}"
        )


def selects_nothing(policy: OpPolicy | None, code: Hashable) -> bool:
    """Whether that has been noted."""
    return policy is not None and policy.expects_ops and not _SELECTS.get((policy.parts(), code), True)


def is_known(tables: object, code: object) -> bool:
    """Whether functions were noted in a first forward of a region with this code, by the tables of their policy."""
    return _key(tables, code) in _KNOWN


def note_known(tables: object, code: object) -> None:
    """Note that they were."""
    _KNOWN[_key(tables, code)] = tables, code  # which keeps the ids


def _key(tables: object, code: object) -> tuple[object, object]:
    """Return what stands for both: code is slow to compare, and a builtin method is named by a new tuple each time."""
    return id(tables), code if isinstance(code, tuple) else id(code)


def forget_first_forwards() -> None:
    """Forget what was noted; for tests, whose functions have one code and many meanings."""
    _SELECTS.clear()
    _KNOWN.clear()


def _near(policy: OpPolicy, ran: Sequence[str]) -> str:
    if "attention" in repr(policy) and any("softmax" in name for name in ran):
        return (
            "Attention ran as products and a softmax here, as it does with dropout on a CPU. Keep it as one call, "
            "remat.op(attention, 'attention')(x), or by name, remat.save_names('self_attn.*')."
        )
    near = (get_close_matches(op, list(dict.fromkeys(ran)), n=_SHOWN, cutoff=0.4) for op in policy.op_names())
    shown = _some([*chain.from_iterable(near), *ran])
    return f"Ops that ran here: {shown}. remat.list_names(function)(*args) shows all by name."


def _some(names: Sequence[str]) -> str:
    """Return the first of some names, each once; those that are like what was asked for come first."""
    first = list(dict.fromkeys(names))
    return ", ".join(first[:_SHOWN]) + (", ..." if len(first) > _SHOWN else "")
