"""Seeing what is kept: memory reports, traces, explanations. Files import only those above them.

    pictures, report     what all reports can do: text, HTML, data, pictures, from the same blocks
    data, fold           what regions keep, counted, each storage once; layers that are alike are told once
    graph                what autograd and `torch.utils.checkpoint` keep outside of regions
    memory, oom          the memory report that users get, also when memory runs out
    watch                what the runtime reports while it is watched, and to whom
    timeline, trace      what a trace records; the trace that users get
    names                what a function's ops return, by name
    explain              what regions would keep at other prices, from one recorded forward
    debug_log            the ops of both phases, for errors with `debug=True`

Reports keep no tensor, and are never imported by the runtime. The face loads `debug_log` and `watch`, each
when it is first needed, and no other.
"""

from typing import TYPE_CHECKING

from torch_remat._util.lazy import loaded_on_use

if TYPE_CHECKING:
    from torch_remat.reports.explain import Explanation
    from torch_remat.reports.memory import MemoryReport
    from torch_remat.reports.names import NamedResult, NameTable
    from torch_remat.reports.trace import Trace

__all__ = ["Explanation", "MemoryReport", "NameTable", "NamedResult", "Trace"]
__getattr__ = loaded_on_use(
    __name__,
    {
        "explain": ("Explanation",),
        "memory": ("MemoryReport",),
        "names": ("NameTable", "NamedResult"),
        "trace": ("Trace",),
    },
)
