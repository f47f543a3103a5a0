"""Seeing what is kept: memory reports, traces, explanations. Files import only those above them.

    data, spans                                what reports and traces say, as plain data
    fold, text, html, pictures                 the same for people; layers that are alike are told once
    model, timeline                            what users get: the data with every form in which it is shown
    ledger, collect, graph, torch_checkpoint   gathering: what is kept, each storage counted once
    memory, oom                                the memory report, when asked for, and when memory runs out
    recorder, profile, trace                   the trace
    explanation, reasons, notes, explain       the explanation: its data and text, why, watching a run, trials

Reports read `Region.kept`, keep no tensor, and are never imported by the runtime.
"""
