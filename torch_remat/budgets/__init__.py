"""Memory budgets for regions: each keeps what is dearest to recompute, as far as the bytes go.

`limit` has what users call; `budget` the object and its context manager; `price` buys for the regions of a step; `kept`
is what regions ask and notify, `counted` their bytes by storage; `steps` notes what happened, for `text` and
`pictures`; `fill` chooses what an offloader gets; `reserve` learns what backward needs on
top; `plan` makes decisions that last; `curve` shows what memory buys. `agreed` has budgets of several ranks,
`group` what these ask of each other.
"""

from typing import TYPE_CHECKING

from torch_remat._util.lazy import loaded_on_use

if TYPE_CHECKING:
    from torch_remat.budgets.budget import Budget
    from torch_remat.budgets.curve import Frontier, frontier
    from torch_remat.budgets.plan import Plan, Planned

__all__ = ["Budget", "Frontier", "Plan", "Planned", "frontier"]
__getattr__ = loaded_on_use(
    __name__, {"budget": ("Budget",), "curve": ("Frontier", "frontier"), "plan": ("Plan", "Planned")}
)
