"""TorchTitan's own small Llama, under its SelectiveAC: by torch's checkpoint, and by our `drop_in` in its place.

SelectiveAC keeps the results of a list of ops, attention among them, and every second matrix product. Attention is
torch's, for TorchTitan's default runs on a GPU only. Nothing is downloaded; without ``torchtitan`` the row is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from .contenders import FLOOR, NONE, OURS_DROP_IN, SAC, UnavailableError, full_recompute, versions
from .workloads import Workload

TOKENS = (1, 128)


def selective() -> Workload:
    """Return the row, whose models share their parameters."""
    checkpointing, llama, attention = _titan()
    torch.manual_seed(0)
    with _exchanged(llama, "get_attention_config", lambda _: attention.ScaledDotProductAttention.Config()):
        model = llama.llama3_configs["debugmodel"](attn_backend="flex").build()
    model.init_states()
    tokens, positions = torch.randint(500, TOKENS), torch.arange(TOKENS[1])[None]

    def checkpointed(wrapper: Callable[..., Any] | None) -> nn.Module:
        copy = deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        if wrapper is not None:
            with _exchanged(checkpointing, "ptd_checkpoint_wrapper", wrapper):
                checkpointing.SelectiveAC(checkpointing.SelectiveAC.Config()).apply(copy)
        return copy

    def forward(module: nn.Module) -> Tensor:
        output: Tensor = module(tokens, positions=positions, attention_masks=None)
        return output

    # What `checkpoint_wrapper` calls is an option of its own.
    wrappers = {NONE: None, SAC: checkpoint_wrapper}
    for name, package in versions(OURS_DROP_IN).items():
        wrappers[name] = partial(checkpoint_wrapper, checkpoint_fn=package.drop_in())
    forwards = {name: partial(forward, checkpointed(wrapper)) for name, wrapper in wrappers.items()}
    return Workload(
        name="titan-selective",
        about=f"TorchTitan's debugging Llama, 6 layers of 256, {TOKENS[0]} x {TOKENS[1]} tokens, by its SelectiveAC",
        leaves=dict(model.named_parameters()),
        output_grad=torch.randn_like(forward(model)),
        forwards={**forwards, FLOOR: full_recompute()[FLOOR](forwards[NONE])},
        ideal_retained_bytes=None,
        steps=1,
        ours=(OURS_DROP_IN,),
        twin=SAC,
    )


WORKLOADS: dict[str, dict[str, Callable[[], Workload]]] = {"titan": {"titan-selective": selective}}
"""By the name on the command line: workloads that are measured in the same rounds, by their own names."""


def _titan() -> tuple[Any, ...]:
    names = ("distributed.activation_checkpoint", "models.llama3", "models.common.attention")
    try:
        return tuple(import_module(f"torchtitan.{name}") for name in names)
    except ImportError as error:
        raise UnavailableError(f"needs torchtitan 0.3: {error}") from error


@contextmanager
def _exchanged(module: Any, name: str, value: Any) -> Iterator[None]:
    """Let a name of a module stand for another value."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
