"""What users need to test their own extensions, and what they run over several processes.

offloaders   the check of an offloader against its contract
listing      the collectives of a block, and where those of several processes part
"""

from typing import TYPE_CHECKING

from torch_remat._util.lazy import loaded_on_use

if TYPE_CHECKING:
    from torch_remat.testing.listing import Collective, Collectives, collectives, compare_collectives
    from torch_remat.testing.offloaders import check_offloader

__all__ = ["Collective", "Collectives", "check_offloader", "collectives", "compare_collectives"]
__getattr__ = loaded_on_use(
    __name__,
    {
        "listing": ("Collective", "Collectives", "collectives", "compare_collectives"),
        "offloaders": ("check_offloader",),
    },
)
