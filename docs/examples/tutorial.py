"""Draws the pictures of ``docs/tutorial.md``: live bytes over one step of the model that is in its first block of code.

python docs/examples/tutorial.py --out docs/pictures
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from live_bytes import LiveBytes, StepMemory, phase
from picture import draw_live_bytes

import torch_remat as remat

PAGE = Path(__file__).parent.parent / "tutorial.md"
SUBTITLE = "the GPT of the tutorial, 4 sequences of 256 bytes, on the CPU"
Way = Callable[[torch.nn.Module], AbstractContextManager[Any]]


def model_of_the_page() -> type[torch.nn.Module]:
    """Return the class that the first block of the page defines."""
    first = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert first is not None
    names: dict[str, Any] = {}
    exec(first.group(1), names)
    return names["GPT"]


def half(model: torch.nn.Module) -> AbstractContextManager[Any]:
    """Make the blocks regions that keep half of what the plain model keeps."""
    remat.checkpoint_modules(model, "blocks.*")
    return remat.budget("50%")


WAYS: dict[str, Way] = {
    "plain": lambda model: nullcontext(),
    "everything recomputed": lambda model: remat.checkpoint_modules(model, "blocks.*"),
    "a budget of 50 %": half,
    "attention kept": lambda model: remat.checkpoint_modules(model, "blocks.*", policy=remat.policies.save_attention),
}
PICTURES = {
    "tutorial_plain.png": ("plain",),
    "tutorial_regions.png": ("plain", "everything recomputed"),
    "tutorial_choices.png": tuple(WAYS),
}


def recorded(way: Way, steps: int = 4) -> StepMemory:
    """Train the model for a few steps, as a budget needs, and record the last one."""
    torch.manual_seed(0)
    model = model_of_the_page()()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    text = torch.randint(256, (4, 257))
    tokens, targets = text[:, :-1].clone(), text[:, 1:].clone()

    def step() -> None:
        with phase("forward"):
            loss = model(tokens, targets)
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    with way(model):
        for _ in range(steps - 1):
            step()
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        with LiveBytes([*model.parameters(), *state, tokens, targets], torch.device("cpu")) as live_bytes:
            step()
    return live_bytes.memory


def main(arguments: Sequence[str] | None = None) -> int:
    """Record each way and draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("tutorial-output"), help="folder for the pictures")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    memories = {name: recorded(way) for name, way in WAYS.items()}
    for file, names in PICTURES.items():
        draw_live_bytes({name: memories[name] for name in names}, None, options.out / file, SUBTITLE)
    for name, memory in memories.items():
        print(f"{name:24} kept {memory.kept_bytes / 2**20:5.1f} MiB, peak {memory.peak_bytes / 2**20:5.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
