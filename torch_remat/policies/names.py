"""Policies by name: shell patterns on the names of results.

In: names, automatic ones and those given by hand. Kept: which patterns have matched, while one forward runs. Out: a
decision for each name, and an error for a pattern that matched nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch_remat.errors import PolicyError, shown
from torch_remat.policies.decision import Decision
from torch_remat.policies.given import as_policy
from torch_remat.policies.policy import Combined, Decider, OpContext, OpPolicy


class NamePolicy(OpPolicy):
    """Saves results by name: shell patterns on automatic names and on those given by `checkpoint_name`."""

    def __init__(self, patterns: Sequence[str], decision: Decision) -> None:
        self._patterns = patterns
        self._decision = decision

    def __repr__(self) -> str:
        kind = "offload_names" if self._decision.offloads else "save_names"
        mark = "~" if self._decision is Decision.LEFT_OUT else ""
        return f"{mark}{kind}({', '.join(map(repr, self._patterns))})"

    def __invert__(self) -> LeftOut:
        """Return what excludes these names from a policy: ``policy & ~save_names("*.gate.*")``."""
        if self._decision.offloads:
            raise PolicyError(
                f"~{self!r} is not possible",
                remedy='Exclude names by policy & ~remat.save_names("*.gate.*"), also of what is offloaded.',
            )
        return LeftOut(self._patterns)

    def left_out(self) -> Sequence[str]:
        """Return the patterns, if it excludes them."""
        return self._patterns if self._decision is Decision.LEFT_OUT else ()

    def parts(self) -> tuple[Any, ...]:
        """Return the kind, the patterns and the decision."""
        return NamePolicy, tuple(self._patterns), self._decision

    def begin(self) -> Decider:
        """Begin one forward."""
        return _NameDecider(self._patterns, self._decision)


class LeftOut:
    """Names that a policy excludes: its one use is ``policy & ~save_names(...)``."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = patterns

    def __rand__(self, policy: Any) -> OpPolicy:
        """Return the policy without these names."""
        return Combined((as_policy(policy), NamePolicy(self._patterns, Decision.LEFT_OUT)))

    def __repr__(self) -> str:
        return f"~save_names({', '.join(map(repr, self._patterns))})"


class _NameDecider(Decider):
    reads_names = True

    def __init__(self, patterns: Sequence[str], decision: Decision) -> None:
        super().__init__()
        self._patterns = patterns
        self._left = dict.fromkeys(patterns)
        self._decision = decision
        self.notes_packed = decision is Decision.LEFT_OUT  # a name by hand comes late

    def decide(self, context: OpContext, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Decision]:
        return [self.decide_name(name) for name in context.names]

    def decide_name(self, name: str) -> Decision:
        found = Decision.PREFER_RECOMPUTE
        for pattern in self._patterns:
            if fnmatchcase(name, pattern):
                self._left.pop(pattern, None)
                found = self._decision
        return found

    def unmatched(self, names: Iterable[str]) -> PolicyError | None:
        if not self._left:
            return None
        known = list(names)
        pattern, *others = self._left
        near = sorted(get_close_matches(pattern, known, n=5, cutoff=0.4), key=known.index) or known[:5]
        too = f"; neither {'does' if len(others) == 1 else 'do'} {', '.join(map(repr, others))}" if others else ""
        return PolicyError(
            f"the name pattern {pattern!r} matches nothing that the region made{too}",
            tensor=pattern,
            remedy=f"Near names: {', '.join(near) or 'none'}. remat.list_names(function)(*args) shows all.",
        )


def save_names(*patterns: str) -> NamePolicy:
    """Return a policy that saves results by name.

    Each result of an op in a region has an automatic name, the same in each run: the path of its module from the
    region's root, the op, how many such ops ran in that module before, and which of the op's results it is, as in
    ``attention.mm_2_0``. `checkpoint_name` gives a tensor another; `list_names` shows all.

    Args:
        *patterns: Shell patterns (``*``, ``?``, ``[...]``) that are compared with the whole name, case included.

    Returns:
        A policy for ``checkpoint(policy=...)``; ``|`` combines it with others. ``policy & ~save_names(...)`` excludes
        the names from any policy: they are recomputed, whatever the parts of it say. A pattern that matches nothing is
        an error at the end of the region's forward.

    Raises:
        PolicyError: There is no pattern, or one is no string or empty.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
        >>> x = torch.randn(4, 8, requires_grad=True)
        >>> y = remat.checkpoint(policy=remat.save_names("0.addmm_*"))(block)(x)
        >>> policy = remat.policies.save_matmuls & ~remat.save_names("2.*")
        >>> y = remat.checkpoint(policy=policy)(block)(x)
    """
    return NamePolicy(_checked("save_names", patterns), Decision.MUST_SAVE)


def offload_names(*patterns: str) -> OpPolicy:
    """Return a policy that offloads results by name: `save_names`, but what is kept leaves the device.

    Where a policy saves some names and offloads others, ``save_names(...) | offload_names(...)``, saving is stronger.

    Args:
        *patterns: Shell patterns (``*``, ``?``, ``[...]``) that are compared with the whole name, case included.

    Returns:
        A policy for ``checkpoint(policy=...)``. A pattern that matches nothing is an error at the end of the region's
        forward. The offloader is that of ``checkpoint(offloader=...)`` or of `offload_to`.

    Raises:
        PolicyError: There is no pattern, or one is no string or empty.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
        >>> x = torch.randn(4, 8, requires_grad=True)
        >>> y = remat.checkpoint(policy=remat.offload_names("0.addmm_*"))(block)(x)
    """
    return NamePolicy(_checked("offload_names", patterns), Decision.MUST_OFFLOAD)


def _checked(function: str, patterns: tuple[str, ...]) -> tuple[str, ...]:
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise PolicyError(
            f"{function}({', '.join(map(shown, patterns))}) is not possible",
            remedy=f'The form is {function}("attention.*", "*.mm_2_0"), with at least one non-empty string.',
        )
    return patterns
