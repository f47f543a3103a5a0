"""One forward of a region, by function call: what each call reads and makes, and how long it takes.

In: calls in order, as a survey meets them. Kept: numbers and names, no tensor. Out: what a `Ladder` is made of.

A *unit* is a storage, with its bytes. A *step* is a call of a function, or an op that no function call has made.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Step:
    """One call of a function, or an op outside of all.

    Attributes:
        function: What a mode for torch functions sees; None for an op outside of all.
        number: How many calls of this function came before.
        name: Its name in reports, such as ``mlp.linear_1``.
        ns: Nanoseconds that its kernels took; 0 for the last one where replay ends before them.
        reads: The units that it reads, each with how many steps had written it before.
        writes: The units that it writes or makes.
        results: The unit of each result; None if replay has to run it whatever is kept.
        random: Whether it draws random numbers.
        saves: Whether autograd saves tensors meanwhile.
        saves_made: Whether some of these are its own, so that replay, where it ends here, runs it to have them.
    """

    function: Any
    number: int
    name: str
    ns: int = 0
    reads: list[tuple[int, int]] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    results: tuple[int, ...] | None = None
    random: bool = False
    saves: bool = False
    saves_made: bool = True


@dataclass
class Record:
    """One forward.

    Attributes:
        steps: Its steps, in order, up to the last that saves a tensor: replay goes no further.
        sizes: The bytes of each unit.
        writers: The steps that write each unit, in order; none for what was there before.
        saved: The units that autograd saves and the region has made, or got as arguments.
        inputs: The units of the region's arguments, which it holds in any case.
        calls: How many calls of functions a mode sees, besides those that read attributes.
        whole_bytes: The bytes of all that autograd saves, also in inner regions and in compiled code.
        whole_ns: How long the forward took.
        is_hidden: Whether steps are missing: compiled code ran, or a gradient was taken, which no skipped call lets
            through.
        is_named: Whether the author decides about calls inside, so that it is not to be plain code.
    """

    steps: list[Step] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    writers: list[list[int]] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)
    inputs: set[int] = field(default_factory=set)
    calls: int = 0
    whole_bytes: int = 0
    whole_ns: int = 0
    is_hidden: bool = False
    is_named: bool = False

    def new_unit(self, size: int) -> int:
        """Return the number of a new unit."""
        self.sizes.append(size)
        self.writers.append([])
        return len(self.sizes) - 1

    def end(self) -> None:
        """Drop what follows the last step that saves; that one is stopped before its kernel if it saves arguments."""
        last = max((at for at, step in enumerate(self.steps) if step.saves), default=-1)
        del self.steps[last + 1 :]
        if self.steps and not self.steps[-1].saves_made:
            self.steps[-1].ns = 0
        self.writers = [[at for at in writers if at <= last] for writers in self.writers]

    def signature(self) -> Hashable:
        """Return what is equal for forwards that have one ladder."""
        steps = tuple(
            (step.function, step.number, tuple(step.reads), tuple(step.writes), step.results, step.random, step.saves)
            for step in self.steps
        )
        units = tuple(self.sizes), frozenset(self.saved), frozenset(self.inputs)
        return steps, units, self.whole_bytes, self.is_hidden, self.is_named
