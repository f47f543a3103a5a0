"""Trains a Llama by Hugging Face's Trainer, its layers as regions that keep attention.

python docs/examples/hf_trainer.py
"""

import tempfile

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

import torch_remat as remat

LAYERS, WIDTH, HEADS, VOCABULARY = 4, 64, 4, 256
BATCH, CONTEXT, STEPS = 4, 64, 3


def build(regions: bool) -> LlamaForCausalLM:
    """Return a model with random weights. Yours: from_pretrained(...).train()."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
    )
    model = LlamaForCausalLM(config).train()
    if regions:
        policy = [F.scaled_dot_product_attention]
        remat.enable_gradient_checkpointing(model, policy=policy)
    return model


def train(model: LlamaForCausalLM) -> tuple[list[float], float]:
    """Return the losses, and the KiB that a batch keeps for backward."""
    tokens = torch.randint(VOCABULARY, (STEPS * BATCH, CONTEXT))
    batch = {"input_ids": tokens[:BATCH], "labels": tokens[:BATCH]}
    kept = remat.memory_report(model(**batch).loss, model).bytes / 1024
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(  # gradient_checkpointing stays False
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        data = [{"input_ids": row, "labels": row} for row in tokens]
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, kept


def main() -> None:
    """Train without and with regions, and compare."""
    (plain, plain_kept), (ours, our_kept) = (train(build(regions)) for regions in (False, True))
    print("losses", *(f"{loss:.4f}" for loss in ours))
    print("equal to those without regions:", ours == plain)
    print(f"kept for backward: {our_kept:,.0f} of {plain_kept:,.0f} KiB")


if __name__ == "__main__":
    main()
