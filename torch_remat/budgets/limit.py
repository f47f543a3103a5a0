"""`budget`: the budget that a user asks for, in bytes or as a share, of this rank or of a group."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from torch_remat._compat import eager_only
from torch_remat._util.bytes import parse_bytes
from torch_remat.budgets.budget import UNLIMITED, Budget
from torch_remat.errors import UsageError, shown

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*%\s*")
_FORMS = (
    'Give bytes as an int (6 * 2**30) or with a unit ("6 GiB", or "6 GB" with powers of 1000); a share of what the '
    'steps keep without checkpointing, from "0%" to "100%"; or a share of the device\'s memory (device_share=0.6).'
)


def _limit_of(limit: str | int | None, device_share: float | None) -> tuple[float | None, int]:
    """Return a budget as a share of what steps keep, or None, and as bytes, as far as they are known."""
    if (limit is None) == (device_share is None):
        raise UsageError("no budget is given" if limit is None else "two budgets are given", remedy=_FORMS)
    if device_share is not None:
        if isinstance(device_share, bool) or not (isinstance(device_share, int | float) and 0 < device_share <= 1):
            raise UsageError(f"device_share={shown(device_share)} is not a budget", remedy="Above 0, at most 1.")
        return None, parse_bytes(float(device_share))
    percent = _PERCENT.fullmatch(limit) if isinstance(limit, str) else None
    if percent is not None and float(percent[1]) <= 100:
        share = float(percent[1]) / 100
        return share, UNLIMITED if share else 1
    return None, _bytes_of(limit)


def _bytes_of(limit: object) -> int:
    is_bytes = isinstance(limit, int) or (isinstance(limit, str) and any(map(str.isalpha, limit)))
    try:
        return parse_bytes(limit if is_bytes else None)  # type: ignore[arg-type]
    except UsageError:
        raise UsageError(f"{shown(limit)} is not a budget", remedy=_FORMS) from None


@eager_only
def budget(
    limit: str | int | None = None,
    *,
    device_share: float | None = None,
    reserve: str | int = "auto",
    offload: Literal["fill"] | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
) -> Budget:
    """Return a memory budget for regions: inside of its block they keep what is dearest to recompute for its bytes.

    The first forwards of each kind of region keep nothing and are recorded: what each call of a function keeps, and how
    long it takes. From then on each step begins with a choice for all regions together, the dearest first, as far as
    the bytes go; where all of a region is chosen it runs as plain code. If that proves too much in the middle of a
    step, what is cheapest to recompute is evicted. Gradients are those of the same code without a budget, bit for bit.
    Outside of the block regions recompute everything; a graph that was made inside stays counted until it is freed.

    Args:
        limit: Bytes, as an int or with a unit (``"6 GiB"``, or ``"6 GB"`` with powers of 1000); or a share of what the
            steps keep without checkpointing (``"60%"``), known once they are recorded.
            ``"0%"`` recomputes all, ``"100%"`` keeps all.
        device_share: In place of ``limit`` a share of the device's memory, more than 0 and at most 1; on the CPU of
            the machine's.
        reserve: How much of a budget in bytes is left for what backward needs besides: bytes, as above. ``"auto"`` is
            0 on the CPU and for a share; on an accelerator the allocator's peaks in the latest steps tell.
        offload: ``"fill"`` offers what is not chosen to the offloader, the dearest first, as long as it keeps up.
        group: The ranks that share collectives inside regions, as a process group or a device mesh: they agree on what
            is kept, step by step, so each step is a block of its own. Without it a region that communicates with
            other ranks is refused.

    Returns:
        A context manager, which reports what it did: ``kept_bytes``, ``report()``, ``plot(path)``, ``to_dict()``,
        ``plan()``.

    Raises:
        UsageError: A limit or a reserve is zero, negative or nonsense, ``offload`` is unknown, or ``group`` is no group
            of this rank, or comes with ``offload``.

    Warns:
        RematWarning: Once, where the budget is passed although everything is recomputed, and where no region ran.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> kept = []
        >>> with remat.budget("1 MiB") as budget:
        ...     for _ in range(4):
        ...         y = remat.checkpoint(region_name="block")(block)(torch.randn(4, 8))
        ...         kept.append(budget.kept_bytes)
        ...         y.sum().backward()
        >>> kept[0], kept[-1]
        (128, 1152)
    """
    share, budget_bytes = _limit_of(limit, device_share)
    if offload not in (None, "fill"):
        raise UsageError(f"budget(offload={shown(offload)}) is not possible", remedy='It is None or "fill".')
    reserve_bytes = None if reserve == "auto" else _bytes_of(reserve) if reserve else 0
    if reserve_bytes and (reserve_bytes >= budget_bytes or share is not None):
        raise UsageError(
            f"a reserve of {reserve_bytes:,} B leaves nothing of the budget {shown(limit)}",
            remedy="The reserve is a part of a budget in bytes: give less of it, or a larger budget.",
        )
    if group is None:
        return Budget(budget_bytes, share, reserve_bytes, fills=offload == "fill")
    if offload is not None:
        raise UsageError(
            "budget(offload=..., group=...): what an offloader takes differs from rank to rank", remedy="Choose one."
        )
    from torch_remat.budgets.agreed import AgreedBudget  # which loads more of torch.distributed
    from torch_remat.budgets.group import Ranks

    return AgreedBudget(budget_bytes, share, reserve_bytes, Ranks(group))
