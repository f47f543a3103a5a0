"""TorchTitan's selective activation checkpointing by regions of torch_remat: see docs/migrating.md."""

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
            if op in (aten.mm.default, aten.linear.default):  # every second product, but for those that are named
                if any(name in ctx.name for name in config.force_recompute_mm_shapes_by_fqns):
                    return False
                ctx.state["products"] = ctx.state.get("products", 0) + 1
                return op in save_ops and ctx.state["products"] % 2 == 1
            to_cpu = op is aten._to_copy.default and str(kwargs.get("device")) == "cpu" and args[0].is_cuda
            return to_cpu or op in save_ops

        options = {name: getattr(config, name) for name in ("preserve_rng_state", "determinism_check", "debug")}
        remat.checkpoint_modules(model, "layers.*", policy=policy, keep_last=config.keep_last, **options)
