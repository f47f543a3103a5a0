"""What mkdocstrings' parser calls for each object: our docstrings say ``Example:``, and it looks for ``Examples:``."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Make the examples of docstrings code that is coloured."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section of one docstring."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
