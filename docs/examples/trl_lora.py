"""Trains a LoRA of a Llama by TRL's SFTTrainer, its layers as regions that keep attention.

python docs/examples/trl_lora.py
"""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_callback import PrinterCallback
from trl import SFTConfig, SFTTrainer

import torch_remat as remat

LAYERS, WIDTH, HEADS = 4, 64, 4
BATCH, STEPS = 4, 3
TEXTS = ["the cat sat on the mat", "a dog ran on the mat"] * BATCH * STEPS


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the texts' words. Yours: AutoTokenizer.from_pretrained(...)."""
    words = ["<pad>", "<eos>", *dict.fromkeys(" ".join(TEXTS).split())]
    words_only = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}))
    words_only.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=words_only, **special)


def build(regions: bool, vocabulary: int) -> LlamaForCausalLM:
    """Return a model with random weights. Yours: from_pretrained(...).train()."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config).train()
    if regions:
        policy = [F.scaled_dot_product_attention]
        remat.enable_gradient_checkpointing(model, policy=policy)
    return model


def train(regions: bool) -> tuple[list[float], float]:
    """Return the losses, and the KiB that a batch keeps for backward."""
    words = tokenizer()
    model = build(regions, len(words))
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            activation_checkpointing=False,  # True by default in TRL
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=False,  # True by default in TRL
        )
        trainer = SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict({"text": TEXTS}),
            processing_class=words,
            peft_config=LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    tokens = words(TEXTS[:1] * BATCH, return_tensors="pt").input_ids
    loss = trainer.model(input_ids=tokens, labels=tokens).loss
    return losses, remat.memory_report(loss, trainer.model).bytes / 1024


def main() -> None:
    """Train without and with regions, and compare."""
    (plain, plain_kept), (ours, our_kept) = train(regions=False), train(regions=True)
    print("losses", *(f"{loss:.4f}" for loss in ours))
    print("equal to those without regions:", ours == plain)
    print(f"kept for backward: {our_kept:,.0f} of {plain_kept:,.0f} KiB")


if __name__ == "__main__":
    main()
