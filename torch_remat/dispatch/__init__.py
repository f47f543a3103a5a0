"""The runtime: regions, the two phases in which their functions run, and what passes from one to the other.

    checkpoint (face) ── run_region ── Region ─┬─ RegionInputs   what replay starts from
                                               ├─ Ambient        RNG, autocast, device context
                                               ├─ Tape           the holders in the order of forward
                                               └─ RematMode      the current (region, phase, op) of this thread
    autograd node ── Holder ── Region ── replay ── Filling       fills the empty holders

Who keeps whom alive: autograd's nodes own the holders, holders own their region, a region owns its inputs; a region
knows its holders only weakly and never knows a node. So reference counts free everything, with or without backward.
"""
