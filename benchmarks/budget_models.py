"""The models of `benchmarks.budgets`, whose blocks may be run in any way.

Equal blocks (GPT-2 and Llama), unequal ones (a U-Net), batches whose lengths vary (an encoder with a decoder), a
mixture of experts, and frozen weights with LoRA. Those of ``transformers`` are built from their configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .real import VOCABULARY
from .real import Model as Built

Run = Callable[[int, nn.Module], Callable[..., Tensor]]


def plain(_: int, block: nn.Module) -> Callable[..., Tensor]:
    """Run a block as it is."""
    return block


@dataclass
class Model:
    """A model whose blocks are run by ``run[0]``, which may be changed; a step goes over all its batches."""

    name: str
    blocks: int
    module: nn.Module
    losses: Sequence[Callable[[], Tensor]]
    run: list[Run]

    def __post_init__(self) -> None:
        """Give each parameter a gradient, so that a step makes none anew."""
        for parameter in self.trained():
            parameter.grad = torch.zeros_like(parameter)

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that get a gradient."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def clear(self) -> None:
        """Zero the gradients."""
        for parameter in self.trained():
            parameter.grad.zero_()  # type: ignore[union-attr]

    def step(self) -> None:
        """Run forward and backward of each batch, with gradients from before."""
        self.clear()
        for loss in self.losses:
            loss().backward()

    def gradients(self) -> list[Tensor]:
        """Return copies of the gradients."""
        return [parameter.grad.clone() for parameter in self.trained()]  # type: ignore[union-attr]


class Convs(nn.Module):
    """Two convolutions, each with a norm."""

    def __init__(self, taken: int, given: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(taken, given, 3, padding=1), nn.GroupNorm(4, given), nn.SiLU(),
            nn.Conv2d(given, given, 3, padding=1), nn.GroupNorm(4, given), nn.SiLU(),
        )  # fmt: skip

    def forward(self, *given: Tensor) -> Tensor:
        """Run on what is given, joined by channels."""
        return self.body(torch.cat(given, 1) if len(given) > 1 else given[0])


class UNet(nn.Module):
    """Four levels down and up, with skip connections: blocks of a factor of eight in size."""

    def __init__(self, run: list[Run], width: int = 12) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(4)]
        self.run = run
        self.down = nn.ModuleList(Convs(3 if not level else widths[level - 1], widths[level]) for level in range(4))
        self.up = nn.ModuleList(Convs(widths[level] + widths[level + 1], widths[level]) for level in (2, 1, 0))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return an image."""
        skips = []
        for place, block in enumerate(self.down):
            x = self.run[0](place, block)(x if not place else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for place, block in enumerate(self.up, start=4):
            x = self.run[0](place, block)(skips.pop(), F.interpolate(x, scale_factor=2.0))
        return self.head(x)


def unet() -> Model:
    """Return a U-Net on a batch of noise."""
    run: list[Run] = [plain]
    torch.manual_seed(0)
    module, images = UNet(run), torch.randn(2, 3, 96, 96)
    return Model("U-Net", 7, module, [lambda: module(images).square().mean()], run)


class Encoder(nn.Module):
    """A block that reads a source: attention, and a network four times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        """Attend in heads; all have the shape batch, length, width."""
        split = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (query, key, value))
        return F.scaled_dot_product_attention(*split, is_causal=is_causal).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return what comes after the block."""
        x = x + self.out(self.attend(*self.qkv(self.norms[0](x)).chunk(3, -1)))
        return x + F.dropout(self.wide(self.norms[1](x)), 0.05)


class Decoder(Encoder):
    """A block that writes a target, and reads the source too."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.cross_norm = nn.LayerNorm(width)
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.cross_out = nn.Linear(width, width)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:  # type: ignore[override]
        """Return what comes after the block."""
        x = x + self.out(self.attend(*self.qkv(self.norms[0](x)).chunk(3, -1), is_causal=True))
        query = self.query(self.cross_norm(x))
        x = x + self.cross_out(self.attend(query, *self.key_value(source).chunk(2, -1)))
        return x + F.dropout(self.wide(self.norms[1](x)), 0.05)


class Translator(nn.Module):
    """An encoder and a decoder, over symbols."""

    def __init__(self, run: list[Run], width: int = 64, depth: int = 4, symbols: int = 256) -> None:
        super().__init__()
        self.run = run
        self.symbols = nn.Embedding(symbols, width)
        self.encoder = nn.ModuleList(Encoder(width, 4) for _ in range(depth))
        self.decoder = nn.ModuleList(Decoder(width, 4) for _ in range(depth))
        self.head = nn.Linear(width, symbols)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the loss of a batch: each symbol of the target is foretold from those before it, and the source."""
        read, written = self.symbols(source), self.symbols(target[:, :-1])
        for place, block in enumerate(self.encoder):
            read = self.run[0](place, block)(read)
        for place, block in enumerate(self.decoder, start=len(self.encoder)):
            written = self.run[0](place, block)(written, read)
        return F.cross_entropy(self.head(written).flatten(0, 1), target[:, 1:].flatten())


LENGTHS = ((16, 128), (128, 16), (32, 64), (64, 32), (48, 96), (128, 128))
"""Of source and target, batch by batch: both vary by a factor of eight."""


def translation() -> Model:
    """Return an encoder and decoder on batches of noise, whose lengths vary; a step goes over all of them."""
    run: list[Run] = [plain]
    torch.manual_seed(0)
    module = Translator(run)
    batches = [(torch.randint(256, (4, read)), torch.randint(256, (4, written + 1))) for read, written in LENGTHS]

    def loss(source: Tensor, target: Tensor) -> Tensor:
        torch.manual_seed(1)
        return module(source, target)

    return Model("translation", 8, module, [partial(loss, *batch) for batch in batches], run)


class Block(nn.Module):
    """A layer of a model of ``transformers``, which runs as the model's blocks are to be run."""

    def __init__(self, run: list[Run], place: int, layer: nn.Module) -> None:
        super().__init__()
        self.run, self.place, self.layer = run, place, layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        return self.run[0](self.place, self.layer)(*args, **kwargs)


class LoRA(nn.Module):
    """A linear layer with frozen weights, and a product of two narrow ones that are trained."""

    def __init__(self, frozen: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the frozen layer gives, and what is learned."""
        return self.frozen(x) + self.up(self.down(F.dropout(x, 0.05)))


def built(name: str, kind: str, sizes: dict[str, Any], tokens: tuple[int, int], change: Any = None) -> Model:
    """Return a model of ``transformers`` without a head, on a batch of random tokens; ``change`` is applied to it."""
    run: list[Run] = [plain]
    torch.manual_seed(0)
    module, given = Built(kind, {**sizes, "vocab_size": VOCABULARY, "use_cache": False}, {}, tokens, []).build()
    if change is not None:
        change(module)
    layers = next(child for child in module.modules() if isinstance(child, nn.ModuleList))
    for place, layer in enumerate(layers):
        layers[place] = Block(run, place, layer)
    direction = torch.randn_like(module(**given)[0])

    def loss() -> Tensor:
        torch.manual_seed(1)
        return module(**given)[0].mul(direction).mean()

    return Model(name, len(layers), module, [loss], run)


def gpt2(width: int, layers: int = 6, tokens: tuple[int, int] = (2, 256)) -> Model:
    """Return a GPT-2 with dropout, but none inside of attention."""
    sizes = {"n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": tokens[1], "attn_pdrop": 0.0}
    sizes |= {"bos_token_id": None, "eos_token_id": None}
    return built(f"GPT-2, {layers} x {width}", "GPT2", sizes, tokens)


def llama(width: int, layers: int = 6, tokens: tuple[int, int] = (2, 256)) -> Model:
    """Return a Llama."""
    return built(f"Llama, {layers} x {width}", "Llama", _llama(width, layers), tokens)


def experts() -> Model:
    """Return a Mixtral: in each layer four experts, of which each token has two."""
    sizes = {**_llama(256, 6), "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 512}
    return built("a mixture of experts", "Mixtral", sizes, (2, 256))


def lora() -> Model:
    """Return a Llama with frozen weights; what is learned are additions to its queries and values."""

    def freeze(module: nn.Module) -> None:
        module.requires_grad_(False)
        for layer in module.layers:
            attention = layer.self_attn
            attention.q_proj, attention.v_proj = LoRA(attention.q_proj), LoRA(attention.v_proj)

    return built("frozen Llama with LoRA", "Llama", _llama(256, 6), (2, 256), freeze)


def _llama(width: int, layers: int) -> dict[str, Any]:
    heads = max(width // 32, 2)
    return {
        "hidden_size": width,
        "intermediate_size": width * 43 // 16,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
    }


MODELS: dict[str, Callable[[], Model]] = {
    "gpt2-256": partial(gpt2, 256),
    "gpt2-768": partial(gpt2, 768),
    "llama-512": partial(llama, 512),
    "llama-256": partial(llama, 256),
    "unet": unet,
    "translation": translation,
    "experts": experts,
    "lora": lora,
}
"""By the name on the command line."""
