"""Records one training step of a small GPT and simulates it: overhead by heuristic and budget.

python docs/examples/dtr_step.py step.log
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
    log, shares = remat.dtr.Log.load(path), (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
    print(" " * 9, *(f"{share:7}" for share in shares))
    for name in ("dtr", "dtr_eq", "dtr_local", "lru", "size", "msps"):
        runs = [remat.dtr.simulate(log, share * log.peak_bytes, name) for share in shares]
        print(f"{name:9}", *(" " * 6 + "-" if run.ran_out or run.stopped else f"{run.overhead:7.2f}" for run in runs))


if __name__ == "__main__":
    main(sys.argv[1])
