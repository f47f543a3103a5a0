"""Where offloaded tensors go: the protocol of an offloader, its two implementations, and what is away with each.

`sender` sends what one region keeps. Nothing here knows the runtime. To import the package or its
`protocol` loads none of the rest.
"""

from torch_remat.offload.protocol import Offloader, OffloadInfo

__all__ = ["OffloadInfo", "Offloader"]
