"""Seeing what is kept: reports, traces, explanations.

    model       plain data: what one report says
    ledger      bytes by storage: each is counted once
    collect     one region's tape, read into rows
    graph       the autograd graph below some tensors
    fold        layers that are alike, told once
    text, html, plots    the same data, for people

All of it only reads the runtime, which never imports it, and keeps no tensor.
"""
