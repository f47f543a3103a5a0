"""Policies by name: shell patterns on the names of results.

In: names, automatic ones and those given by hand. Kept: which patterns have matched, while one forward runs. Out: a
decision for each name, and an error for a pattern that matched nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch_remat.errors import PolicyError
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
        """Return what leaves these names out of a policy: ``policy & ~save_names("*.gate.*")``."""
        if self._decision.offloads:
            raise PolicyError(
                f"~{self!r} is not possible",
                remedy='Leave names out by policy & ~remat.save_names("*.gate.*"), also of what is offloaded.',
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
