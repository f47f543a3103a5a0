"""What a region can keep, from everything to nothing, by function call: each rung has fewer bytes and takes more time.

`record` is one forward, as `dispatch.call.survey` has seen it; `ladder` finds the rungs by minimum cuts; `kinds` knows
which regions have a ladder in common. A ladder only says what is worth keeping: gradients never depend on it.
"""
