"""Seeing what is kept: memory reports, traces, explanations. Files import only those above them.

    pictures, report                what all reports can do: text, HTML, data, pictures, from the same blocks
    data, fold                      what regions keep, counted, each storage once; layers that are alike are told once
    graph                           what autograd and `torch.utils.checkpoint` keep outside of regions
    memory, oom                     the memory report that users get, also when memory runs out
    spans, observer, recorder, profile, trace     the trace that users get, how it is recorded, what may watch
    explanation, reasons, explain   the explanation: its data and text; why, and what else would cost; watching a run
    debug_log                       the ops of both phases, for errors with `debug=True`

Reports keep no tensor, and are never imported by the runtime. The face loads `debug_log`, which
reads nothing of the runtime, and no other.
"""
