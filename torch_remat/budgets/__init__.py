"""Memory budgets for regions: everything is kept while there is room, and just enough is given up when there is not.

`budget` has the object and its context manager; `ledger` counts bytes by storage; `kept` is one region in a budget: its
full holders, and which prefix of them to give up; `steps` notes what happened, for `text` and `pictures`; `reserve`
learns what backward needs on top; `plan` makes decisions that last; `frontier` measures what memory buys.
"""
