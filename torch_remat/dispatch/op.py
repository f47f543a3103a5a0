"""One remat-aware op in one phase: what a handle's methods do.

In: the op's name, policy and autograd context. Kept: on the tape, its record. Out: an object for the phase, whose
methods note or restore what the other phase needs.

NOTE [ What is kept for an op ]
1. SAVE: the tensors that it saves for backward are *residents*: their holders have the values from the start. Not so a
   tensor that replay makes again anyway: the output of a RECOMPUTE op or a view of one is *elided* and filled where its
   producer runs in replay; an input of the op itself that no SAVE op made, or a view of one, is filled from replay's
   input, where the inputs are known (`auto_forward`). A parameter, a region input and a view of either share storage
   that exists anyway.
2. RECOMPUTE: of its inputs, the outputs of SAVE ops and views of them are kept in *slots*, since replay would pass
   placeholders. What it saves for backward is recomputed.
3. An op inside the body of a SAVE op is part of it: replay never comes there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Op:
    """An op outside of regions, or inside the body of a SAVE op: plain autograd. The phases derive from it."""

    def load(self, ctx: Any, args: tuple[Any, ...]) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
        """Return placeholders for the outputs, in the form of forward's return, if the op is skipped; else None.

        ``args`` are the op's inputs, as far as the caller knows them.
        """
        return None

    def inputs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the op's inputs, in replay with those that it would not have replaced by the kept ones."""
        return args

    def save(self, named: Mapping[str, torch.Tensor | None]) -> None:
        """Note which tensors the op saves for backward."""

    def outputs(self, ctx: Any, outputs: tuple[torch.Tensor, ...], as_tuple: bool) -> tuple[torch.Tensor, ...]:
        """Note the op's outputs; return what the op shall return."""
        return outputs
