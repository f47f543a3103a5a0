"""Where the user's code stands."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_OURS = str(Path(__file__).parent.parent)
_TORCH = str(Path(torch.__file__).parent)


def user_line() -> tuple[str, int]:
    """Return file and line of the innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_OURS, _TORCH)):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
