"""The body of an op with a handle while it runs, and whether it still does."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import ref

from torch_remat._compat import has_returned
from torch_remat.dispatch.log.record import Record
from torch_remat.dispatch.placeholder import new_tuple
from torch_remat.errors import UsageError


class Body(NamedTuple):
    """The body of an op while it runs. Unlike the handle it keeps nothing alive: the body may raise.

    Attributes:
        record: The op's record.
        ctx: Its autograd context.
        place: The address of the frame in which the body runs; the frame itself would keep the body's tensors alive.
        code: The body's code.
        outer: The body in which it runs, if any.
    """

    record: Record
    ctx: ref[Any]
    place: int
    code: CodeType
    outer: Body | None

    @classmethod
    def of(cls, record: Record, ctx: Any, frame: FrameType, outer: Body | None) -> Body:
        """Return the body that runs in a frame."""
        made: Body = new_tuple(cls, (record, ref(ctx), id(frame), frame.f_code, outer))
        return made

    def is_running(self) -> bool:
        """Whether it is on this thread's stack."""
        return self._is_at_or_above(sys._getframe(1))

    def is_around(self, frame: FrameType, ctx: Any) -> bool:
        """Whether it is on the stack above the body of another op, or is that body.

        If it has raised, the other body may have its address and its code: then only the context tells them apart.
        """
        return self._is_at_or_above(frame if self.ctx() is ctx else frame.f_back)

    def _is_at_or_above(self, frame: FrameType | None) -> bool:
        if self.ctx() is None:  # the body has raised
            return False
        while frame is not None:
            if id(frame) == self.place and frame.f_code is self.code:
                return True
            frame = frame.f_back
        return False

    def check_ended(self, region_name: str) -> None:
        """Raise if it returned without telling its outputs; one that raised may be forgotten."""
        ctx = self.ctx()
        if ctx is not None and has_returned(ctx):
            raise UsageError(
                "the op's forward returned without handle.record_outputs",
                region=region_name,
                op=self.record.name,
                remedy="End the forward with `return handle.record_outputs(out)`.",
            )
