"""Where offloaded tensors go: the protocol of an offloader, its two implementations, and what is away with each.

Nothing here knows of regions. To import the package or its `protocol` loads none of the rest.
"""

from torch_remat.offload.protocol import Offloader, OffloadInfo

__all__ = ["OffloadInfo", "Offloader"]
