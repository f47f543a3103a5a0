"""The errors of torch_remat.

    RematError(RuntimeError)            everything that this library raises
    ├── UsageError(TypeError)           the API was called in a form that it does not have
    │   └── PolicyError(ValueError)     a region got something that is not a policy, or a name pattern matched nothing
    ├── MismatchError                   replay did not do what forward did
    ├── MutationError                   a tensor that backward or replay needs was modified in place
    ├── ReleasedError                   backward asked for values that an earlier backward freed
    ├── PlaceholderError                something in replay needs the data of an output that was skipped
    ├── OffloadError                    an offloaded tensor could not be brought back
    └── BudgetError                     a budget of dynamic rematerialization is too small

`torch_remat.dtr` adds `LogError`: a log of events, for its simulator, is broken.

`RematWarning(UserWarning)` warns of what costs more than it should; gradients are right.

Each error carries ``region``, ``op`` and ``tensor`` as fields beside its message, so that a program can act on
them without parsing text. The message is built here and nowhere else.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch


class RematError(RuntimeError):
    """Base of all errors of this library.

    Args:
        what: What happened, as a sentence without the final stop.
        region: Name of the checkpointed region, if there is one.
        op: Name of the remat-aware op, if there is one.
        tensor: Name of the tensor, or its place (``"args[0]"``, ``"saved tensor 3"``), if there is one.
        remedy: What the user can do about it, as one or more sentences.
    """

    def __init__(
        self,
        what: str,
        *,
        region: str | None = None,
        op: str | None = None,
        tensor: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.what = what
        self.region = region
        self.op = op or None
        self.tensor = tensor
        self.remedy = remedy
        super().__init__(what)

    def __str__(self) -> str:
        """Return ``region::op.tensor: what. remedy``, without the parts that are not known."""
        place = qualified_name(self.region, self.op, self.tensor)
        text = f"{place}: {self.what}" if place else self.what
        if self.remedy is None:
            return text
        return f"{text.rstrip('.')}.\n{self.remedy}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Say how to make the error again, for pickle and copy, whatever its class takes."""
        return _unmade, (type(self),), self.__dict__ | {"args": self.args}


def _unmade(kind: type[RematError]) -> RematError:
    return kind.__new__(kind)


class UsageError(RematError, TypeError):
    """The API was called in a form that it does not have."""


class PolicyError(UsageError, ValueError):
    """A region got something that is not a policy, or an entry of its policy matched nothing."""


class MismatchError(RematError):
    """Replay did not do what forward did, so its values cannot be trusted."""


class MutationError(RematError):
    """A tensor that backward or replay needs was modified in place."""


class ReleasedError(RematError):
    """Backward asked for values that an earlier backward freed."""


class OffloadError(RematError):
    """An offloaded tensor could not be brought back, or came back as another one.

    Args:
        what: What happened, as a sentence without the final stop.
        region: Name of the region.
        op: Name of the op, or None for an input of the region.
        tensor: Name of the tensor.
        file: Path of the file that held it, if one did.
        remedy: What the user can do about it.
    """

    def __init__(
        self,
        what: str,
        *,
        region: str | None = None,
        op: str | None = None,
        tensor: str | None = None,
        file: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.file = file
        super().__init__(what, region=region, op=op, tensor=tensor, remedy=remedy)


class PlaceholderError(RematError):
    """Something in replay needs the data of a SAVE op's output, which replay skipped.

    Args:
        region: Name of the region.
        op: Name of the SAVE op; empty for a result of an aten op in a region with a policy for those.
        output: Name of the op's output that the placeholder stands for.
        consumer: What needs the data: an aten op, or an access such as ``data_ptr``.
        line: The line of user code that asked for it, ``file.py:12``.
    """

    def __init__(self, *, region: str, op: str, output: str, consumer: str, line: str) -> None:
        self.consumer = consumer
        self.line = line
        if not op:
            super().__init__(
                f"{consumer} at {line} needs the data of this tensor, which the region's policy did not keep and "
                "which no op of forward was seen to need, so that replay passes a placeholder without data",
                region=region,
                tensor=output,
                remedy="Let the policy save the tensor, or read it with .item(), which is an op. After backward, a "
                "list or dict that the region fills still has it: return the tensor from the region instead.",
            )
            return
        super().__init__(
            f"{consumer} at {line} needs the data of this output, but op {op!r} is saved, so replay skipped it "
            "and passes a placeholder without data",
            region=region,
            op=op,
            tensor=output,
            remedy="Either (1) call the op as remat.op(Fn.apply, 'name')(...), which keeps what recomputed code reads, "
            "or let remat.op call a function that contains the consumer, too; or (2) wrap the consumer in "
            "remat.native_save_region, so that it is saved too; or (3) move it into a custom autograd Function with "
            f"remat.auto_forward (or a RematHandle); or (4) change the policy of {op!r} to RECOMPUTE.",
        )


class BudgetError(RematError):
    """A budget of dynamic rematerialization is too small for an op.

    Args:
        op: Name of the op.
        needed_bytes: A budget with which it would have passed.
        budget_bytes: The budget.
        pinned: What could not be evicted: bytes, and why.
    """

    def __init__(self, *, op: str, needed_bytes: int, budget_bytes: int, pinned: Sequence[tuple[int, str]]) -> None:
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes
        self.pinned = tuple(pinned)
        shown = "; ".join(f"{size:,} B {why}" for size, why in self.pinned[:8])
        if len(self.pinned) > 8:
            shown += f"; and {len(self.pinned) - 8} more with {sum(size for size, _ in self.pinned[8:]):,} B"
        super().__init__(
            f"the budget of {budget_bytes:,} B is too small: {op} needs {needed_bytes:,} B, with nothing left to evict"
            + (f". Pinned: {shown}" if shown else ""),
            op=op,
            remedy=f"A budget of {needed_bytes:,} B would have passed here.",
        )


class RematWarning(UserWarning):
    """Something costs more than it should, and the user can do something about it."""


class Carried(BaseException):
    """Carries a TypeError through an op to the end of the region's function.

    Operators such as ``@`` would make "unsupported operand" of it.

    Args:
        error: The error.
    """

    def __init__(self, error: TypeError) -> None:
        self._error: TypeError | None = error
        self.args = ()  # which hold the error too

    def take(self, region: str | None = None) -> TypeError:
        """Return the error, which knows this as its context, with the name of the region, and forget it."""
        error, self._error = self._error, None
        assert error is not None
        if isinstance(error, RematError) and error.region is None:
            error.region = region
        return error


def qualified_name(region: str | None, op: str | None = None, tensor: str | None = None) -> str:
    """Return ``region::op.tensor``, the form in which every message and report names a tensor."""
    inner = ".".join(part for part in (op, tensor) if part)
    return "::".join(part for part in (region, inner) if part)


def shown(value: object) -> str:
    """Return what a message shows of a value that a user gave: no values of tensors, and no more than a line."""
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= _SHOWN and "tensor(" not in text else f"a {type(value).__name__}"


_SHOWN = 200  # characters


def warn(message: str, place: tuple[str, int] | None = None, registry: dict[Any, Any] | None = None) -> None:
    """Warn at a line of the user's: the innermost one of their code, unless a place is given.

    Args:
        message: What costs more than it should, and what to do about it.
        place: File and line.
        registry: What was warned of, where one warning is to come once for a place.
    """
    file, line = user_line() if place is None else place
    warnings.warn_explicit(message, RematWarning, file, line, registry=registry)


_OURS = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


def user_line() -> tuple[str, int]:
    """Return file and line of the innermost frame that is neither ours, nor torch's, nor the standard library's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not _is_of_a_user(frame):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def at_user_line() -> str:
    """Return the same for a message, `` at file.py:12``; empty in a thread where no code of the user's runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_of_a_user(frame):
        frame = frame.f_back
    return "" if frame is None else f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def raised_at(error: BaseException) -> str:
    """Return the same for where an error was raised, as ``file.py:12``."""
    place, step = "", error.__traceback__
    while step is not None:
        if not place or _is_of_a_user(step.tb_frame):
            place = f"{Path(step.tb_frame.f_code.co_filename).name}:{step.tb_lineno}"
        step = step.tb_next
    return place


def _is_of_a_user(frame: FrameType) -> bool:
    if frame.f_code.co_filename.startswith((_OURS, _TORCH, "<eval_with_key>")):  # code that torch has written
        return False
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package != "optree" and package not in sys.stdlib_module_names
