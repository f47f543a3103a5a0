"""TorchTitan's selective activation checkpointing by regions: see docs/torchtitan.md."""

from dataclasses import dataclass

import torch
from torchtitan.distributed.activation_checkpoint import SelectiveAC

import torch_remat as remat

aten = torch.ops.aten


class RematAC(SelectiveAC):
    """SelectiveAC by regions of torch_remat: the same config and the same `get_save_ops()`."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        keep_last: int = 0  # so many layers at the end keep everything

    def apply(self, model):
        config, save_ops = self.config, self.get_save_ops()

        def policy(ctx, op, *args, **kwargs):
            if op in (aten.mm.default, aten.linear.default):  # every second, unless named
                if any(name in ctx.name for name in config.force_recompute_mm_shapes_by_fqns):
                    return False
                ctx.state["products"] = ctx.state.get("products", 0) + 1
                return op in save_ops and ctx.state["products"] % 2 == 1
            if op is aten._to_copy.default and str(kwargs.get("device")) == "cpu":
                return args[0].is_cuda or op in save_ops
            return op in save_ops

        names = ("preserve_rng_state", "determinism_check", "debug", "keep_last")
        options = {name: getattr(config, name) for name in names}
        remat.checkpoint_modules(model, "layers.*", policy=policy, **options)
