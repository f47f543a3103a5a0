"""Trains by Lightning's Trainer, layers as regions that keep attention.

python docs/examples/lightning_trainer.py
"""

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import torch_remat as remat

LAYERS, WIDTH, HEADS = 4, 64, 4
BATCH, CONTEXT, STEPS = 4, 32, 3


class Model(lightning.LightningModule):
    """A Transformer that learns to return its input.

    Args:
        regions: Whether its layers are regions.
    """

    def __init__(self, regions: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.losses: list[float] = []
        self.kept = 0.0
        if regions:
            policy = remat.save_modules("self_attn")
            remat.checkpoint_modules(self.encoder, "layers.*", policy=policy)

    def training_step(self, x: Tensor) -> Tensor:
        """Return the loss of a batch."""
        loss = (self.encoder(x) - x).square().mean()
        self.kept = remat.memory_report(loss, self).bytes / 1024
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return what updates the weights."""
        return torch.optim.AdamW(self.parameters())


def train(regions: bool) -> Model:
    """Return a model after some steps."""
    lightning.seed_everything(0, verbose=False)
    model = Model(regions)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(torch.randn(STEPS * BATCH, CONTEXT, WIDTH), BATCH))
    return model


def main() -> None:
    """Train without and with regions, and compare."""
    plain, ours = train(regions=False), train(regions=True)
    print("losses", *(f"{loss:.4f}" for loss in ours.losses))
    print("equal to those without regions:", ours.losses == plain.losses)
    print(f"kept for backward: {ours.kept:,.0f} of {plain.kept:,.0f} KiB")


if __name__ == "__main__":
    main()
