"""`trace`: what regions and ops do over a step, with times and bytes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from torch_remat._compat import ProfilerRange, any_profiler_runs, eager_only
from torch_remat.dispatch.observe import observed_by
from torch_remat.errors import UsageError
from torch_remat.reports.profile import spans_and_samples
from torch_remat.reports.recorder import MARK, Recorder
from torch_remat.reports.timeline import Trace


@eager_only
@contextmanager
def trace() -> Iterator[Trace]:
    """Record forward, replay and backward of each region and op inside, with every allocation.

    `torch.profiler` runs meanwhile, so each op takes some microseconds longer, and no other profiler may run. Bytes are
    exact: the allocators of all devices report each block. Blocks that were there before do not count. On an
    accelerator, times are those of the host, which runs ahead of the device. Work of Python threads other than the
    caller's and autograd's is not in the trace.

    Yields:
        The trace, to be read once the block has been left, also where an error leaves it: ``print(trace)``,
        ``trace.plot("step.png")``, ``trace.to_chrome_trace("step.json")``, ``trace.spans``. It keeps no tensor.

    Raises:
        UsageError: A profiler runs already. Its profile has the ranges of regions and ops in any case.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> x = torch.randn(64, 64, requires_grad=True)
        >>> with remat.trace() as trace:
        ...     remat.checkpoint(region_name="block")(torch.sin)(x * 2).sum().backward()
        >>> [span.phase for span in trace.spans]
        ['forward', 'replay', 'backward']
    """
    if any_profiler_runs():
        raise UsageError(
            "trace() needs torch.profiler, and a profiler runs already",
            remedy="Use one of them: a profile has ranges of regions and ops (`remat::region::op [replay]`) as well.",
        )
    result, recorder = Trace(), Recorder()
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    try:
        with profiler, observed_by(recorder), ProfilerRange(f"{MARK}all"):
            try:
                yield result
            finally:
                recorder.look_for_gone()
    except BaseException:
        with suppress(Exception):  # what happened up to the error; the error itself must pass
            _read(profiler, recorder, result)
        raise
    _read(profiler, recorder, result)


def _read(profiler: profile, recorder: Recorder, result: Trace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    result.fill(*spans_and_samples(events, recorder.marks, recorder.given), recorder.budgets())
