"""Looks at one training step of a small GPT: what is kept, when, and what keeping more would save.

Each block is a checkpointed region with one named op, its MLP. The first three blocks keep the MLP's hidden layer,
so that its two matrix products need not run again; the others recompute all. What keeping more would save is asked of
the same model without named ops. The pictures and texts in
``docs/reports.md`` are made by this:

    python docs/examples/look.py --out docs/pictures
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, Block, GPTConfig
from torch import Tensor, nn
from torch.nn import functional as F

import torch_remat as remat

SAVE, RECOMPUTE = remat.CheckpointPolicy.SAVE, remat.CheckpointPolicy.RECOMPUTE


class Mlp(torch.autograd.Function):
    """``residual + down(gelu(up(x)))``; keeps ``x`` and the hidden layer, and computes its GELU again in backward."""

    @staticmethod
    @remat.auto_forward("x", "hidden", "up", "down")
    def forward(
        ctx: Any, residual: Tensor, x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, bias: Tensor
    ) -> Tensor:
        """Return the block's output; ``x`` and ``residual`` have shape ``(batch, context, width)``."""
        hidden = F.linear(x, up, up_bias)
        ctx.save_for_backward(x, hidden, up, down)
        return residual + F.linear(F.gelu(hidden), down, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of all inputs."""
        x, hidden, up, down = ctx.saved_tensors
        flat = grad.flatten(0, 1)
        to_hidden = torch.ops.aten.gelu_backward(grad @ down, hidden)
        flat_hidden = to_hidden.flatten(0, 1)
        return (
            grad,
            to_hidden @ up,
            flat_hidden.t() @ x.flatten(0, 1),
            flat_hidden.sum(0),
            flat.t() @ F.gelu(hidden).flatten(0, 1),
            flat.sum(0),
        )


def run_block(name: str, block: nn.Module, x: Tensor) -> Tensor:
    """Run a block as a region; those of the first half keep the hidden layer of their MLP."""
    assert isinstance(block, Block)
    policy = SAVE if int(name.rpartition(".")[2]) < GPTConfig.layers // 2 else RECOMPUTE

    def run(x: Tensor) -> Tensor:
        x = x + block.attention(block.attention_norm(x))
        up, _, down = block.mlp
        mlp = remat.op(Mlp.apply, "mlp", policy=policy)
        return mlp(x, block.mlp_norm(x), up.weight, up.bias, down.weight, down.bias)

    return remat.checkpoint(region_name=name)(run)(x)


def main(arguments: Sequence[str] | None = None) -> int:
    """Take a step under each of the tools; print what they say and save the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("look-output"), help="folder for the pictures")
    parser.add_argument("--batch", type=int, default=8, help="sequences in the batch")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # steadier times, on a machine that does something else as well
    torch.manual_seed(0)
    model = GPT(GPTConfig(dropout=0.0), run_block)
    tokens = torch.randint(256, (options.batch, GPTConfig.context))
    model(tokens, tokens).backward()  # what is made once only is made now
    model.zero_grad()

    loss = model(tokens, tokens)
    report = remat.memory_report(loss)
    print(report, end="\n\n")
    report.plot(options.out / "memory_report.png")
    loss.backward()
    model.zero_grad()

    with remat.trace() as trace:
        model(tokens, tokens).backward()
    print(trace, end="\n\n")
    trace.plot(options.out / "trace.png")

    plain = GPT(GPTConfig(dropout=0.0), lambda name, block, x: remat.checkpoint(region_name=name)(block)(x))
    print(remat.explain(plain)(tokens, tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
