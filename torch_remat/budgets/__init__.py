"""Memory budgets for regions: everything is kept while there is room, and just enough is evicted when there is not.

`budget` has the object and its context manager; `kept` the regions in it, `counted` their bytes in the `ledger`,
`evict` what of them may go; `steps` notes what happened, for `text` and `pictures`; `reserve` learns what backward
needs on top; `plan` makes decisions that last; `frontier` measures what memory buys.
"""
