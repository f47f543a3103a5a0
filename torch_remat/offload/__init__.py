"""Where offloaded tensors go: the protocol of an offloader, and the two that come with the library.

Nothing here knows of regions. The runtime decides what travels and when; an offloader takes one-dimensional tensors
away and brings them back.
"""

from torch_remat.offload.cpu import CpuOffloader
from torch_remat.offload.disk import DiskOffloader
from torch_remat.offload.protocol import Offloader, OffloadInfo

__all__ = ["CpuOffloader", "DiskOffloader", "OffloadInfo", "Offloader"]
