"""The tape: what forward noted, in order, for replay to follow.

In: holders, parameters and ops, as forward meets them. Kept: the holders weakly, the ops' slots strongly. Out: which
holders are alive and empty, and how far a replay must go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING
from weakref import ref

import torch

from torch_remat._compat import sequence_number
from torch_remat.dispatch.ambient import RngState
from torch_remat.dispatch.holder import Holder, Layout, OpHolder, ResidentRef
from torch_remat.dispatch.log.record import Record

if TYPE_CHECKING:
    from torch_remat.dispatch.check.inner_ops import InnerOp
    from torch_remat.dispatch.log.entry import Entry


class Tape:
    """What one region saved, in the order of forward.

    Attributes:
        saved: For each saved tensor a weak reference to its holder; for a parameter, or a view of one, the parameter;
            a `ResidentRef` for one that is kept, though replay saves it again; None for a view of a parameter that an
            argument brings.
        numbers: For saved tensors, by place, where autograd stood, if something is kept: the sequence number; the
            number of the first node to which a replay that ends here does not come; whether its op may yet fill it.
        layouts: For views of parameters among these, by place, how they lie there.
        buffers: The places of tensors without a history, which the op that saves them may fill later.
        elided: Weak references to the holders of SAVE ops that are filled from other ops' inputs or outputs, each with
            the number of the first node after the op that saved it.
        holders: Weak references to the holders of all that has a name, for reports.
        records: The ops by name, in order.
        inner: The ops of inner regions, in the order in which they began.
        regions: The inner regions that were called after the first op, as records of what they get from SAVE ops.
        calls: The entries of the log.
        roots: The storages that replay must have, each after how many entries.
        backward_inside: Whether a backward that ran inside forward has read a tensor that the region saved.
        calling: The call of `op` that runs in forward, if it is saved: what it reads of its own is its own affair.
    """

    __slots__ = (
        "backward_inside",
        "buffers",
        "calling",
        "calls",
        "elided",
        "holders",
        "inner",
        "layouts",
        "numbers",
        "records",
        "regions",
        "roots",
        "saved",
    )

    def __init__(self) -> None:
        self.saved: list[ref[Holder] | ResidentRef | torch.Tensor | None] = []
        self.layouts: dict[int, Layout] = {}
        self.buffers: set[int] = set()
        self.elided: list[tuple[ref[OpHolder], int]] = []
        self.holders: list[ref[OpHolder]] = []
        self.records: dict[str, Record] = {}
        self.inner: list[InnerOp] | tuple[()] = ()
        self.calls: Sequence[Entry] = ()
        self.regions: list[Record] = []
        self.roots: Sequence[tuple[int, int]] = ()
        self.backward_inside = False
        self.calling: str | None = None
        self.numbers: dict[int, tuple[int, int, bool]] = {}

    def stop(self, hooks: object, early_stop: bool, begins: Iterable[int]) -> tuple[int, int]:
        """Return the number of the first node to which no replay comes, and where autograd stands when it ends.

        It ends while an op saves what it is given, and has run what has no node and comes before that. ``begins`` are
        the numbers at which native regions begin.
        """
        places = range(len(self.saved) - 1, -1, -1)
        last = self.with_parameters(next((place for place in places if self.may_need(place, hooks)), -1))
        elided = [number for holder, number in self.elided if hooks is not None or holder() is not None]
        if not early_stop and (last >= 0 or elided):
            return sequence_number(), sequence_number()  # to the function's end
        number, stop, _ = self.numbers.get(last, (0, 0, False))
        end = number
        if last >= 0 and any(  # the op itself is run, and then no native region is begun
            buffer and saved == number and place <= last and self.may_need(place, hooks)
            for place, (saved, _, buffer) in self.numbers.items()
        ):
            stop = end = min((begin for begin in begins if begin >= number), default=sequence_number())
        return max([stop, *elided]), max([end, *elided])

    def note_elided(self, holder: ref[OpHolder]) -> None:
        """Note a holder that replay fills from an input or an output of an op, which is over by now."""
        self.elided.append((holder, sequence_number()))

    def position_of(self, holder: Holder) -> int:
        """Return the place of a live holder."""
        return next(place for place, entry in enumerate(self.saved) if type(entry) is ref and entry() is holder)

    def empty(self) -> list[Holder]:
        """Return the live holders that a replay has to fill."""
        empty = [
            holder
            for entry in self.saved
            if type(entry) is ref and (holder := entry()) is not None and holder.value is None
        ]
        if self.elided:
            empty += [holder for entry, _ in self.elided if (holder := entry()) is not None and holder.value is None]
        return empty

    def empty_elided(self) -> int:
        """Return how many of the live holders of SAVE ops are filled from other ops' outputs, and are not yet."""
        return sum([(holder := entry()) is not None and holder.value is None for entry, _ in self.elided])

    def has_values(self) -> bool:
        """Whether a live holder that replay fills has its value."""
        return any(holder.value is not None for holder in self._alive())

    def forget_values(self) -> None:
        """Empty all holders that a replay can fill again."""
        for holder in self._alive():
            holder.describe()
            holder.value = None

    def drawn_by_ops(self) -> list[RngState]:
        """Return the states in which ops left the generators that they drew from."""
        return [record.drawn for record in self.records.values() if record.drawn is not None] if self.records else []

    def forget_slots(self) -> None:
        """Drop what only a further replay would need."""
        self.calls = self.inner = self.roots = ()
        for record in (*self.records.values(), *self.regions):
            if record.slots or type(record) is not Record:  # most have none
                record.forget_slots()

    def may_need(self, place: int, hooks: object) -> bool:
        """Whether, at the end of forward, a replay may have to fill the holder at a place.

        A dead holder needs nothing. But under hooks around the region, which may be those of another region, what is
        kept must be the same in that region's replay, where other tensors live longer.
        """
        entry = self.saved[place]
        if type(entry) is not ref:
            return hooks is not None and type(entry) is torch.Tensor  # a leaf, which another region may make there
        return hooks is not None or ((holder := entry()) is not None and holder.value is None)

    def last_needed(self) -> int:
        """Return the place of the last live empty holder (-1 if none)."""
        saved = self.saved
        for place in range(len(saved) - 1, -1, -1):
            entry = saved[place]
            if type(entry) is ref and (holder := entry()) is not None and holder.value is None:
                return place
        return -1

    def with_parameters(self, place: int) -> int:
        """Return a place, or that of the last of the parameters that directly follow it."""
        saved = self.saved
        while 0 <= place < len(saved) - 1 and isinstance(saved[place + 1], torch.Tensor):
            place += 1
        return place

    def _alive(self) -> Iterator[Holder]:
        for entry in (*self.saved, *[holder for holder, _ in self.elided]):
            holder = entry() if type(entry) is ref else None
            if holder is not None:
                yield holder
