"""Records one training step of a small GPT, for the simulator of dynamic rematerialization.

python docs/examples/dtr_step.py step.log
python -m torch_remat.dtr simulate step.log --heuristics dtr dtr_eq dtr_local lru size msps --plot chart.png
"""

from __future__ import annotations

import sys

import torch
from gpt import GPT, GPTConfig

import torch_remat as remat


def main(path: str) -> None:
    """Train for a step, so that all is warm, and record the next one into ``path``."""
    torch.manual_seed(0)
    config = GPTConfig(layers=8)
    model = GPT(config, lambda _name, block, x: block(x))
    tokens = torch.randint(config.vocabulary, (8, config.context + 1))
    for recorded in (False, True):
        model.zero_grad()
        if recorded:
            with remat.dtr.record(path):
                model(tokens[:, :-1], tokens[:, 1:]).backward()
        else:
            model(tokens[:, :-1], tokens[:, 1:]).backward()


if __name__ == "__main__":
    main(sys.argv[1])
