"""The collectives of a block, and from which call on those of several processes differ.

In: each aten op of the block, after tensor subclasses such as DTensor have come apart. Kept: one row for each
collective, and a line in a file before it runs, if the user wants that. Out: a table, and the first call in which the
ranks of a group differ.

NOTE [ Processes that hang ]
One that waits in a collective reaches neither the end of the block nor another collective, so that nothing can be
exchanged then. `Collectives.difference` is for steps that end. For a step that hangs each process writes its calls to a
file as it goes, and `compare_collectives` reads the files of all, in any process, without a process group.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from torch_remat._compat import DispatchMode, graph_task, ranks_of_group
from torch_remat._util.table import Table
from torch_remat._util.text import aligned, format_bytes, plural
from torch_remat.dispatch.mode import current_mode
from torch_remat.errors import UsageError
from torch_remat.policies.collectives import is_collective

_PHASES = ("forward", "backward", "replay")
_GROUP = ("group_name", "process_group", "group")
_SINGLE = ("send", "recv", "p2p", "put", "get")  # between two processes, which do not do the same
_UNEVEN = ("alltoall", "all_to_all", "gather_", "scatter_")  # what tensors may differ between ranks in


@dataclass(frozen=True)
class Collective:
    """One collective of a process.

    Attributes:
        op: The op, as ``all_reduce``, or ``allreduce_`` for one that writes its argument.
        tensors: What the process gives to it, as ``float32[4, 64]``; several with commas between.
        bytes: The bytes of these.
        ranks: The global ranks of its group.
        phase: ``forward``, ``backward``, or ``replay`` of a region.
        region: The name of the region that runs; empty outside of regions.
    """

    op: str
    tensors: str
    bytes: int
    ranks: tuple[int, ...]
    phase: str
    region: str

    def __str__(self) -> str:
        """Return it in one line."""
        where = f"{self.phase} of {self.region}" if self.region else self.phase
        return f"{self.op} {self.tensors} ({where})"


class Collectives(Table[Collective]):
    """The collectives of a block, in order; prints as a table."""

    @property
    def names(self) -> list[str]:
        """The ops, in order."""
        return [row.op for row in self._rows]

    def difference(self, group: Any = None) -> str | None:
        """Tell from which call on the ranks differ, after the block.

        All ranks of the group must call it, since they exchange their lists, and wait for each other as long as the
        group waits. Where a step hangs use ``collectives(directory)`` and `compare_collectives`.

        Args:
            group: A process group; by default of all processes.

        Returns:
            A text with the first different call of each rank; None if all ranks of each group did the same.
        """
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, self._rows, group=group)
        ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        return _difference(dict(zip(ranks, found, strict=True)))

    def __str__(self) -> str:
        """Return the table as text."""
        cells = [_cells(number, row) for number, row in enumerate(self._rows, 1)]
        counts = Counter(row.phase for row in self._rows)
        phases = ", ".join(f"{counts[phase]} in {phase}" for phase in _PHASES if counts[phase])
        total = format_bytes(sum(row.bytes for row in self._rows))
        end = f"{plural(len(self), 'collective')}{': ' * bool(phases)}{phases}; {total}"
        return "\n".join([*aligned([_HEADER, *cells], right=(0, 3)), end])


_HEADER = ("call", "collective", "tensors", "bytes", "ranks", "phase", "region")


def _cells(number: int, row: Collective) -> tuple[str, ...]:
    return str(number), row.op, row.tensors, f"{row.bytes:,}", _numbers(row.ranks), row.phase, row.region


@contextmanager
def collectives(directory: str | Path | None = None) -> Iterator[Collectives]:
    """List the collectives that run in a block, in this process.

    Seen are those of ``torch.distributed`` and its functional collectives in forward, in backward and in the replay of
    regions, also those of DTensor, FSDP and DistributedDataParallel; not those that other libraries start, nor those
    in compiled code.

    Args:
        directory: Where each process writes its calls as it goes, each before it runs, for a step that hangs:
            `compare_collectives` reads them. The file of this process there is written anew.

    Yields:
        The list, to which each collective is added before it runs.

    Example:
        >>> import torch_remat as remat
        >>> with remat.testing.collectives() as calls:
        ...     pass  # a training step
        >>> print(calls)
        call  collective  tensors  bytes  ranks  phase  region
        0 collectives; 0 B
    """
    calls = Collectives()
    if directory is None:
        with _Listing(calls, None):
            yield calls
        return
    Path(directory).mkdir(parents=True, exist_ok=True)
    path = Path(directory) / f"rank-{dist.get_rank()}.jsonl"
    with path.open("w", encoding="utf-8") as file, _Listing(calls, file):
        yield calls


def compare_collectives(directory: str | Path) -> str | None:
    """Tell from which call on the processes differ that write to a directory; see `collectives`.

    It reads files only, so that it may be called from anywhere: also while the processes hang, or when they are gone.
    A process that is slow, and not stuck, looks as if it made no further call.

    Args:
        directory: What `collectives` was given in all processes.

    Returns:
        A text with the first different call of each rank; None if all ranks of each group did the same.

    Raises:
        UsageError: No process has written there.

    Example:
        >>> import tempfile
        >>> import torch_remat as remat
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     for rank in range(2):
        ...         with open(f"{directory}/rank-{rank}.jsonl", "w"):
        ...             pass
        ...     print(remat.testing.compare_collectives(directory))
        None
    """
    files = sorted(Path(directory).glob("rank-*.jsonl"))
    if not files:
        raise UsageError(
            f"no process has written its collectives to {directory}",
            remedy="Run the step in all processes under `with remat.testing.collectives(directory):`.",
        )
    return _difference({int(file.stem.removeprefix("rank-")): list(_read(file)) for file in files})


def _read(file: Path) -> Iterator[Collective]:
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.startswith("{") and line.endswith("\n"):  # a process that was killed may have written half a line
            found = json.loads(line)
            yield Collective(**{**found, "ranks": tuple(found["ranks"])})


def _difference(found: Mapping[int, Sequence[Collective]]) -> str | None:
    """Return the first difference between the ranks of each group, which is told by its ranks."""
    groups = dict.fromkeys(row.ranks for rows in found.values() for row in rows)
    texts = []
    for group in groups:
        members = {
            rank: [(at, row) for at, row in enumerate(found[rank], 1) if row.ranks == group and not _is_single(row.op)]
            for rank in group
            if rank in found
        }
        for place in range(max(map(len, members.values()))):
            now = {rank: rows[place] if place < len(rows) else None for rank, rows in members.items()}
            if len({_compared(one) for one in now.values()}) > 1:
                lines = [
                    f"  rank {rank}: " + ("no further call" if one is None else f"{one[1]}, call {one[0]} of its list")
                    for rank, one in now.items()
                ]
                texts.append("\n".join([f"ranks {_numbers(group)} differ from their call {place + 1} on:", *lines]))
                break
    return "\n".join(texts) or None


def _is_single(op: str) -> bool:
    return any(word in op for word in _SINGLE)


def _compared(one: tuple[int, Collective] | None) -> tuple[str, str]:
    """Return what must be the same on all ranks."""
    if one is None:
        return "", ""
    row = one[1]
    return row.op, "" if row.op.startswith(_UNEVEN) else row.tensors


def _numbers(ranks: Sequence[int]) -> str:
    """Return ranks as text: ``0-3``, ``0, 2``."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


class _Listing(DispatchMode):
    """Notes each collective before it runs."""

    def __init__(self, calls: Collectives, file: TextIO | None) -> None:
        super().__init__()
        self._rows = calls._rows
        self._file = file

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Let subclasses come apart first, and note a collective."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if is_collective(op):
            self._note(op, args, kwargs or {})
        return op(*args, **(kwargs or {}))

    def _note(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | dict(kwargs)
        group = next((given[name] for name in _GROUP if name in given), None)
        # Of a result and an argument the argument is the later one.
        tensors = next((found for value in reversed(args) if (found := list(_tensors_in(value)))), [])
        mode = current_mode()
        phase = "forward" if graph_task() < 0 else "backward"
        row = Collective(
            op.overloadpacket.__name__,
            ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors),
            sum(tensor.nbytes for tensor in tensors),
            () if group is None else ranks_of_group(group),
            "replay" if mode is not None and mode.recomputing else phase,
            "" if mode is None else mode.region.name or "",
        )
        self._rows.append(row)
        if self._file is not None:
            self._file.write(json.dumps(asdict(row)) + "\n")
            self._file.flush()


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
