"""CONTRIBUTING.md lists the functions that a saved tensor passes, in each way of keeping: here real ones are followed.

python -m tests.api.test_saved_tensor_ways    # writes the lists anew
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.nn import functional as F

import torch_remat as remat
from tests.ways import BY_HANDLE
from torch_remat.dispatch.holder import Holder

PACKAGE = Path(remat.__file__).parent
PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
START, END = "<!-- ways of a saved tensor -->\n\n```text\n", "```\n"
SHAPE = (7, 3)  # of what is saved, and of nothing else


WAYS = {
    "plain": (lambda x, w: (x @ w).sin().sum(), {}),
    "handle": (lambda x, w: BY_HANDLE.keep("exp", torch.exp, x @ w).sum(), {}),
    "op": (lambda x, w: remat.op(torch.mm, "mm")(x, w).sin().sum(), {}),
    "native region": (lambda x, w: remat.native_save_region("mm", lambda: x @ w).sin().sum(), {}),
    "policy by function": (lambda x, w: F.linear(x, w.mT).sin().sum(), {"policy": [F.linear]}),
    "policy by op": (lambda x, w: (x @ w).sin().sum(), {"policy": [torch.ops.aten.mm.default]}),
}


def is_saved(value):
    return isinstance(value, Holder) or (isinstance(value, torch.Tensor) and tuple(value.shape) == SHAPE)


def functions_on_the_way(block, options):
    """Return the package's functions, by file, that get or return the saved tensor or its holder."""
    found = {}

    def note(frame, event, value):
        code = frame.f_code
        file = Path(code.co_filename)
        if event not in ("call", "return") or PACKAGE not in file.parents or code.co_name.startswith("<"):
            return
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [value] if event == "return" else map(frame.f_locals.get, given)
        if any(map(is_saved, values)):
            found.setdefault(str(file.relative_to(PACKAGE)), {})[code.co_name] = None

    x, w = torch.ones(7, 2, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    run = remat.checkpoint(**options)(block)
    for _ in range(3):  # the first forwards look at more than later ones
        run(x, w).backward()
    sys.setprofile(note)
    try:
        run(x, w).backward()
    finally:
        sys.setprofile(None)
    return found


def lists():
    lines = []
    for name, (block, options) in WAYS.items():
        lines.append(name)
        lines += [f"  {file}: {', '.join(names)}" for file, names in functions_on_the_way(block, options).items()]
    return "\n".join(lines) + "\n"


def parts_of_the_page():
    before, _, rest = PAGE.read_text().partition(START)
    return (before, *rest.partition(END)[::2])


def test_lists_of_functions_on_the_way_of_a_saved_tensor_are_those_that_it_passes():
    assert parts_of_the_page()[1] == lists(), "python -m tests.api.test_saved_tensor_ways writes the lists anew"


def main():
    before, _, after = parts_of_the_page()
    PAGE.write_text(f"{before}{START}{lists()}{END}{after}")


if __name__ == "__main__":
    main()
