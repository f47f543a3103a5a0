"""Memory budgets for regions: everything is kept while there is room, and just enough is evicted when there is not.

`limit` has what users call; `budget` the object and its context manager; `kept` the regions in it, `counted` their
bytes by storage, `evict` what of them may go; `steps` notes what happened, for `text` and `pictures`; `reserve` learns
what backward needs on top; `plan` makes decisions that last; `curve` measures what memory buys. `collectives` says
which regions communicate; `agreed` has budgets of several ranks, `group` what these ask of each other.
"""

from typing import TYPE_CHECKING

from torch_remat._lazy import loaded_on_use

if TYPE_CHECKING:
    from torch_remat.budgets.budget import Budget
    from torch_remat.budgets.curve import Frontier, frontier
    from torch_remat.budgets.plan import Plan, Planned

__all__ = ["Budget", "Frontier", "Plan", "Planned", "frontier"]
__getattr__ = loaded_on_use(
    __name__, {"budget": ("Budget",), "curve": ("Frontier", "frontier"), "plan": ("Plan", "Planned")}
)
