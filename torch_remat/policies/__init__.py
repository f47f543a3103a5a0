"""Ready policies for ``checkpoint(policy=...)``; combine them, and policies of other kinds, with ``|``.

Each is a policy already: ``policy=remat.policies.save_attention | remat.save_names("hidden")``. None needs all of its
ops to occur.

Example:
    >>> import torch
    >>> import torch_remat as remat
    >>> block = torch.nn.Linear(8, 8)
    >>> x = torch.randn(4, 8, requires_grad=True)
    >>> y = remat.checkpoint(policy=remat.policies.save_matmuls)(block)(x)
"""

from typing import TYPE_CHECKING

from torch_remat._util.lazy import loaded_on_use

if TYPE_CHECKING:
    from torch_remat.policies.by_price import memory_budget
    from torch_remat.policies.ready import (
        never_replay_effects,
        save_attention,
        save_collectives,
        save_discrete,
        save_every_other_matmul,
        save_matmuls,
    )

__all__ = [
    "memory_budget",
    "never_replay_effects",
    "save_attention",
    "save_collectives",
    "save_discrete",
    "save_every_other_matmul",
    "save_matmuls",
]
__getattr__ = loaded_on_use(
    __name__, {"by_price": ("memory_budget",), "ready": [name for name in __all__ if name != "memory_budget"]}
)
