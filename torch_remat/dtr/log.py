"""Event logs of training steps, in the format of the DTR prototype.

One JSON object a line, its kind under ``INSTRUCTION``; numbers are strings. A log is what a program did with its
tensors, without any rematerialization: which ops it ran on which tensors, at what cost, and when it let go of them.

    CONSTANT NAME, then MEMORY                      an input or a weight
    CALL NAME ARGS RESULT TIME, then for each       an op; MEMORY in bytes, ALIAS the index of the argument whose
        result MEMORY and ALIAS                     storage the result shares, or -1; TIME in nanoseconds
    MUTATE NAME ARGS MUTATE TIME                    an op that writes to the arguments at the indices MUTATE
    COPY DST SRC, COPY_FROM DST SRC                 a new name for a tensor; a name that now means another tensor
    RELEASE NAME                                    the program lets go of a name
    ANNOTATE ANNOTATION                             START: forget all before it; others mean nothing here

`Log` resolves the names once: ops read and make numbered *tensors*, tensors live in numbered *storages*, and the
*steps* are what happens in order. A mutation is an op that makes new storages of the full size, after which the
mutated names mean the new tensors.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch_remat.errors import RematError

_START = "START"
T = TypeVar("T")


class LogError(RematError):
    """A log of events, for the simulator of dynamic rematerialization, is broken.

    Args:
        what: What is wrong.
        line: Number of the line that is broken, or that stands where another one should; the first is 1.
    """

    def __init__(self, what: str, *, line: int) -> None:
        self.line = line
        super().__init__(f"line {line}: {what}")


class Step(enum.Enum):
    """What can happen in a log; the number beside it is a tensor's, or for `RUN` an op's."""

    CONSTANT = enum.auto()
    RUN = enum.auto()
    HOLD = enum.auto()
    """One name more means the tensor."""
    DROP = enum.auto()
    """One name less means the tensor. Results of ops and constants begin with one name."""


@dataclass(frozen=True)
class Op:
    """One op of a log: its cost in nanoseconds, and the numbers of the tensors that it reads and makes."""

    name: str
    cost: float
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Log:
    """A log with its names resolved.

    Attributes:
        lines: How many lines count: those from the last ``START`` on.
        steps: What happens, in order.
        ops: The ops that `Step.RUN` numbers.
        storage_of: For each tensor the number of its storage.
        view: For each tensor whether it is a view in a storage that another tensor made.
        op_of: For each tensor the number of the op that makes it, -1 for a constant.
        sizes_bytes: For each storage its size.
        named: The tensors that the program still names at the end, in the order in which they were first made.
        base_compute: Nanoseconds that the ops take, each once.
        peak_bytes: The most bytes alive, constants included, where each storage is freed with its last name.

    Example:
        >>> constant = '{"INSTRUCTION": "CONSTANT", "NAME": "w"}'
        >>> memory = '{"INSTRUCTION": "MEMORY", "NAME": "w", "MEMORY": "8"}'
        >>> Log.parse([constant, memory]).peak_bytes
        8
    """

    def __init__(self) -> None:
        self.lines = 0
        self.steps: list[tuple[Step, int]] = []
        self.ops: list[Op] = []
        self.storage_of: list[int] = []
        self.view: list[bool] = []
        self.op_of: list[int] = []
        self.sizes_bytes: list[int] = []
        self.named: list[int] = []
        self.base_compute: float = 0
        self.peak_bytes = 0

    @classmethod
    def load(cls, path: str | Path) -> Log:
        """Read a log from a file.

        Raises:
            LogError: A line of it is broken, or one is missing.
        """
        with Path(path).open("rb") as file:
            return cls.parse(file)

    @classmethod
    def parse(cls, lines: Iterable[str | bytes]) -> Log:
        """Read a log from its lines.

        Raises:
            LogError: A line is broken, or one is missing.
        """
        records = [(number, _fields(number, line)) for number, line in enumerate(lines, 1) if line.strip()]
        starts = [at for at, (_, fields) in enumerate(records) if fields.get("ANNOTATION") == _START]
        records = records[starts[-1] :] if starts else records
        log = cls()
        log.lines = len(records)
        _Reader(log, records).read()
        log.base_compute = sum(op.cost for op in log.ops)
        log.peak_bytes = _peak_bytes(log)
        return log


def _fields(number: int, line: str | bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise LogError("it is not JSON", line=number) from None
    if not isinstance(fields, dict):
        raise LogError("it is no JSON object", line=number)
    return fields


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _number(value: Any, least: float = 0) -> float:
    """Return a number given as such or as text: an int where it is whole."""
    number = json.loads(value) if isinstance(value, str) else value
    if type(number) not in (int, float) or not math.isfinite(number) or number < least:
        raise ValueError
    return int(number) if number == int(number) else number


def _whole(value: Any, least: int = 0) -> int:
    number = _number(value, least)
    if not isinstance(number, int):
        raise ValueError
    return number


def _alias(value: Any) -> int:
    return _whole(value, -1)


class _Reader:
    """Reads records into a log: who is who at each point."""

    def __init__(self, log: Log, records: Iterable[tuple[int, dict[str, Any]]]) -> None:
        self._log = log
        self._records = iter(records)
        self._line = 0
        self._fields: dict[str, Any] = {}  # of the line
        self._tensors: dict[str, int] = {}  # what each name means now

    def read(self) -> None:
        """Read all records."""
        readers: dict[str, Callable[[], Any]] = {
            "CONSTANT": self._constant,
            "CALL": self._call,
            "MUTATE": self._mutate,
            "COPY": self._copy,
            "COPY_FROM": self._copy_from,
            "RELEASE": self._release,
            "ANNOTATE": lambda: self._get("ANNOTATION", _name),
        }
        for record in self._records:
            self._line, self._fields = record
            kind = self._get("INSTRUCTION", _name)
            if kind in ("MEMORY", "ALIAS"):
                raise self._broken(f"{kind} has no place here: it follows a CONSTANT or the results of a CALL")
            if kind not in readers:
                raise self._broken(f"there is no instruction {kind!r}")
            readers[kind]()
        self._log.named = sorted(set(self._tensors.values()))

    def _broken(self, what: str) -> LogError:
        return LogError(what, line=self._line)

    def _get(self, field: str, form: Callable[[Any], T]) -> T:
        """Return a field of the line in its form."""
        if field not in self._fields:
            raise self._broken(f"it has no field {field}")
        try:
            return form(self._fields[field])
        except (ValueError, RecursionError):
            raise self._broken(f"{field} cannot be {self._fields[field]!r}") from None

    def _all(self, field: str, form: Callable[[Any], T]) -> list[T]:
        """Return a field of the line that is a list, all parts in one form."""
        values = self._get(field, lambda value: value)
        if not isinstance(values, list):
            raise self._broken(f"{field} is no list: {values!r}")
        return self._get(field, lambda values: [form(value) for value in values])

    def _next(self, kind: str, name: str, form: Callable[[Any], T]) -> T:
        """Return what the next record says of a name, which must be of this kind."""
        record = next(self._records, None)
        if record is None:
            raise self._broken(f"the log ends where {kind} of {name!r} should follow")
        self._line, self._fields = record
        if self._get("INSTRUCTION", _name) != kind or self._get("NAME", _name) != name:
            raise self._broken(f"{kind} of {name!r} is missing here")
        return self._get(kind, form)

    def _constant(self) -> None:
        name = self._get("NAME", _name)
        tensor = self._add_tensor(-1, self._next("MEMORY", name, _whole))
        self._log.steps.append((Step.CONSTANT, tensor))
        self._bind(name, tensor)

    def _call(self) -> None:
        run = self._get("NAME", _name), self._get("TIME", _number)
        inputs = [self._tensor(name) for name in self._all("ARGS", _name)]
        results, outputs = self._all("RESULT", _name), {}
        if len(set(results)) < len(results):
            raise self._broken(f"two results have one name: {results}")
        for result in results:
            size_bytes = self._next("MEMORY", result, _whole)
            alias = self._next("ALIAS", result, _alias)
            if alias >= len(inputs):
                raise self._broken(f"ALIAS is {alias}, and the op has {len(inputs)} arguments")
            storage = None if alias < 0 else self._log.storage_of[inputs[alias]]
            outputs[result] = self._add_tensor(len(self._log.ops), size_bytes, storage)
        self._run(*run, inputs, outputs)

    def _mutate(self) -> None:
        names = self._all("ARGS", _name)
        inputs, outputs = [self._tensor(name) for name in names], {}
        for index in self._all("MUTATE", _whole):
            if index >= len(names):
                raise self._broken(f"MUTATE has {index}, and the op has {len(names)} arguments")
            if names[index] not in outputs:
                size_bytes = self._log.sizes_bytes[self._log.storage_of[inputs[index]]]
                outputs[names[index]] = self._add_tensor(len(self._log.ops), size_bytes)
        self._run(self._get("NAME", _name), self._get("TIME", _number), inputs, outputs)

    def _run(self, name: str, cost: float, inputs: Iterable[int], outputs: dict[str, int]) -> None:
        self._log.steps.append((Step.RUN, len(self._log.ops)))
        self._log.ops.append(Op(name, cost, tuple(inputs), tuple(outputs.values())))
        for output, tensor in outputs.items():
            self._bind(output, tensor)

    def _copy(self) -> None:
        name, tensor = self._get("DST", _name), self._tensor(self._get("SRC", _name))
        self._log.steps.append((Step.HOLD, tensor))
        self._bind(name, tensor)

    def _copy_from(self) -> None:
        self._tensor(self._get("DST", _name))
        self._copy()

    def _release(self) -> None:
        tensor = self._tensors.pop(self._get("NAME", _name), None)
        if tensor is not None:
            self._log.steps.append((Step.DROP, tensor))

    def _bind(self, name: str, tensor: int) -> None:
        """Let a name mean a tensor that counts it already, and no longer what it meant."""
        old = self._tensors.get(name)
        self._tensors[name] = tensor
        if old is not None:
            self._log.steps.append((Step.DROP, old))

    def _add_tensor(self, op: int, size_bytes: int, storage: int | None = None) -> int:
        log = self._log
        log.op_of.append(op)
        log.view.append(storage is not None)
        if storage is None:
            storage = len(log.sizes_bytes)
            log.sizes_bytes.append(size_bytes)
        log.storage_of.append(storage)
        return len(log.op_of) - 1

    def _tensor(self, name: str) -> int:
        if name not in self._tensors:
            raise self._broken(f"the name {name!r} is unknown, or was released")
        return self._tensors[name]


def _peak_bytes(log: Log) -> int:
    alive = peak = 0
    names = [0] * len(log.sizes_bytes)  # of each storage
    for step, number in log.steps:
        if step is Step.RUN or step is Step.CONSTANT:
            for tensor in log.ops[number].outputs if step is Step.RUN else (number,):
                names[log.storage_of[tensor]] += 1
                alive += 0 if log.view[tensor] else log.sizes_bytes[log.storage_of[tensor]]
            peak = max(peak, alive)
            continue
        storage = log.storage_of[number]
        names[storage] += 1 if step is Step.HOLD else -1
        alive -= 0 if names[storage] else log.sizes_bytes[storage]
    return peak


class LogWriter:
    """Writes a log; each event reaches the file whole, so that the log is sound wherever it ends.

    Args:
        path: The file, which is written anew.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, LogWriter(f"{folder}/step.log") as writer:
        ...     writer.constant("w", size_bytes=4)
        ...     writer.call("aten.neg", ["w"], [("y", 4, -1)], nanoseconds=10)
        ...     writer.release("w")
    """

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self.annotate(_START)

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def annotate(self, annotation: str) -> None:
        """Write a mark, such as ``BACKWARD``."""
        self._file.write(_line("ANNOTATE", ANNOTATION=annotation))

    def constant(self, name: str, size_bytes: int) -> None:
        """Write that a tensor comes from outside."""
        self._file.write(_line("CONSTANT", NAME=name) + _line("MEMORY", NAME=name, MEMORY=str(size_bytes)))

    def call(self, name: str, args: Sequence[str], results: Sequence[tuple[str, int, int]], nanoseconds: float) -> None:
        """Write that an op ran.

        Args:
            name: Of the op.
            args: Names of the tensors that it read.
            results: For each result its name, its size in bytes, and the index of the argument whose storage it
                shares, or -1.
            nanoseconds: What it took.
        """
        made = [result for result, _, _ in results]
        lines = [_line("CALL", NAME=name, ARGS=list(args), RESULT=made, TIME=str(round(nanoseconds)))]
        for result, size_bytes, alias in results:
            lines.append(_line("MEMORY", NAME=result, MEMORY=str(size_bytes)))
            lines.append(_line("ALIAS", NAME=result, ALIAS=str(alias)))
        self._file.write("".join(lines))

    def mutate(self, name: str, args: Sequence[str], indices: Sequence[int], nanoseconds: float) -> None:
        """Write that an op changed the arguments at these indices in place."""
        written = [str(index) for index in indices]
        self._file.write(_line("MUTATE", NAME=name, ARGS=list(args), MUTATE=written, TIME=str(round(nanoseconds))))

    def copy(self, target: str, source: str) -> None:
        """Write that a new name means the same tensor."""
        self._file.write(_line("COPY", DST=target, SRC=source))

    def copy_from(self, target: str, source: str) -> None:
        """Write that a known name now means the tensor of another."""
        self._file.write(_line("COPY_FROM", DST=target, SRC=source))

    def release(self, name: str) -> None:
        """Write that the program let go of a name."""
        self._file.write(_line("RELEASE", NAME=name))


def _line(instruction: str, **fields: object) -> str:
    return json.dumps({"INSTRUCTION": instruction, **fields}) + "\n"
