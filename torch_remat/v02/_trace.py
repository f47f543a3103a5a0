"""`collect_trace`: which regions a forward comes to, in the scopes that `trace_scope` makes.

In: the calls of `region` and of functions with `trace_scope`. Kept: names, no tensor. Out: a tree, as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from torch.compiler import is_compiling

from torch_remat._checkpoint import is_recomputing
from torch_remat.dispatch.mode import RematMode
from torch_remat.errors import UsageError
from torch_remat.v02._names import checked

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class OpTrace:
    """One call of `region`, with its scopes in its name."""

    name: str
    recompute: bool

    def lines(self) -> Iterator[str]:
        """Yield its line."""
        yield f"{self.name}: {'recompute' if self.recompute else 'save'}"


@dataclass
class ScopeTrace:
    """One call of a function with `trace_scope`."""

    name: str
    metadata: str | None = None
    entries: list[OpTrace | ScopeTrace] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield its line, and those of what is in it."""
        yield self.name if self.metadata is None else f"{self.name} [{self.metadata}]"
        for entry in self.entries:
            yield from (f"  {line}" for line in entry.lines())


@dataclass
class RematTrace:
    """What `collect_trace` has collected.

    Attributes:
        entries: Calls and scopes, in the order of forward.
    """

    entries: list[OpTrace | ScopeTrace] = field(default_factory=list)

    def format(self) -> str:
        """Return it as text, a line for each call and scope."""
        return "\n".join(["torch_remat trace", *(line for entry in self.entries for line in entry.lines())])


_entries: ContextVar[list[OpTrace | ScopeTrace] | None] = ContextVar("torch_remat_v02_trace", default=None)


@contextmanager
def collect_trace() -> Iterator[RematTrace]:
    """Collect the calls of `region` that checkpointed functions make inside, in forward alone.

    `torch_remat.trace` tells more: times and bytes of each.

    Yields:
        The trace; ``format()`` returns it as text.
    """
    trace = RematTrace()
    token = _entries.set(trace.entries)
    try:
        yield trace
    finally:
        _entries.reset(token)


def trace_scope(function: Callable[P, R], name: str, *, metadata: str | None = None) -> Callable[P, R]:
    """Let what a function calls stand under a name in the trace; nothing else.

    Args:
        function: The function.
        name: The name.
        metadata: What stands in brackets beside it.

    Returns:
        A function that takes and returns what ``function`` does.

    Raises:
        UsageError: The function is not callable, or the name or the metadata is empty or no string.
    """
    if not callable(function):
        raise UsageError(f"a {type(function).__name__} cannot be called", remedy="The form is trace_scope(f, 'name').")
    checked(name, "a scope of the trace")
    if metadata is not None:
        checked(metadata, "metadata of a scope")

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        entries = None if is_compiling() else _entries.get()
        if entries is None or is_recomputing():
            return function(*args, **kwargs)
        made = ScopeTrace(name, metadata)
        entries.append(made)
        token = _entries.set(made.entries)
        try:
            return function(*args, **kwargs)
        finally:
            _entries.reset(token)

    return call


def note_region(mode: RematMode, name: str, recompute: bool) -> None:
    """Note a call of `region`, if a trace is collected and forward runs."""
    entries = _entries.get()
    if entries is not None and not mode.recomputing:
        entries.append(OpTrace(name, recompute))
