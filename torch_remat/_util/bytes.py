"""Numbers of bytes that users write: 600, ``"600 MiB"``, or a share of a device's memory."""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from torch_remat._compat import accelerator_type
from torch_remat.errors import UsageError, shown

_UNITS = {"": 1, "B": 1}
for _power, _unit in enumerate("KMGT", 1):
    _UNITS |= {f"{_unit}IB": 2 ** (10 * _power), f"{_unit}B": 10 ** (3 * _power), _unit: 10 ** (3 * _power)}
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(limit: str | int | float, device: torch.device | str | None = None) -> int:
    """Return a limit in bytes.

    Args:
        limit: Bytes; a text with one of the units B, KiB, MiB, GiB (powers of 1024), KB, MB, GB, K, M, G (powers of
            1000); or a float up to 1, a share of a device's memory.
        device: The device of which a share is meant; the accelerator, else the machine's memory.

    Raises:
        UsageError: It is zero, negative or nonsense.

    Example:
        >>> parse_bytes("1.5 KiB")
        1536
        >>> parse_bytes("6 GB")
        6000000000
    """
    size: float = math.nan
    if isinstance(limit, str):
        match = _TEXT.fullmatch(limit)
        if match is not None and match[2].upper() in _UNITS:
            size = float(match[1]) * _UNITS[match[2].upper()]
    elif isinstance(limit, float):
        size = limit * _device_bytes(device) if 0 < limit <= 1 else limit
    elif isinstance(limit, int) and not isinstance(limit, bool):
        size = limit
    if not math.isfinite(size) or size < 1:
        raise UsageError(
            f"{shown(limit)} is not a budget",
            remedy='A budget is a number of bytes of at least 1, a text such as "600 MiB" (B, KiB, MiB, GiB; KB, MB, '
            "GB with powers of 1000), or a float between 0 and 1: a share of the device's memory.",
        )
    return int(size)


def _device_bytes(device: torch.device | str | None) -> int:
    found = torch.device(accelerator_type() if device is None else device)
    if found.type != "cpu":
        module: Any = getattr(torch, found.type)
        return int(module.get_device_properties(found).total_memory)
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
