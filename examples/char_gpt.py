"""A small GPT that learns Python's own documentation, character by character.

dure train examples/char_gpt.py:CharGPT --nproc 2

The text is that of `help()`, which every Python brings: 79 topics, 465,000 characters.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

import dure
import dure.data

NO_TARGET = -1
"""Stands where a window is longer than what is left of its topic; such places are not counted."""
EVAL_EVERY = 10
"""Every tenth topic is held out."""


class CharGPT(dure.Task):
    """Predicts the next character. The loss is counted in characters, of which windows have unequal numbers."""

    layers: int = 3
    heads: int = 4
    width: int = 96
    """Size of a character's vector; a multiple of `heads`."""
    context: int = 64
    """Characters that the model sees at once."""
    dropout: float = 0.0
    learning_rate: float = 3e-3
    weight_decay: float = 0.1

    defaults = {"epochs": 5, "global_batch_size": 32, "clip_norm": 1.0}  # noqa: RUF012 - a ClassVar in dure.Task

    def build_model(self) -> nn.Module:
        return GPT(len(alphabet()), self.layers, self.heads, self.width, self.context, self.dropout)

    def train_data(self) -> dure.data.TensorData:
        return windows([text for number, text in enumerate(texts()) if number % EVAL_EVERY], self.context)

    def eval_data(self) -> dure.data.TensorData:
        return windows(texts()[::EVAL_EVERY], self.context)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """Decay matrices only: gains and biases have no reason to be small."""
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Callable[[int], float]:
        def warm_up_then_cosine_to_a_tenth(samples: int) -> float:
            progress = min(1.0, samples / total_samples)
            return min(1.0, progress / 0.05 + 0.05) * (0.55 + 0.45 * math.cos(math.pi * progress))

        return warm_up_then_cosine_to_a_tenth

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dure.Sum:
        characters, targets = batch
        total = functional.cross_entropy(
            model(characters).flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="sum"
        )
        return dure.Sum(total, (targets != NO_TARGET).sum())

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, dure.Sum]:
        characters, targets = batch
        logits = model(characters)
        nats = functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="sum"
        )
        count = (targets != NO_TARGET).sum()
        return {
            "bits_per_character": dure.Sum(nats / math.log(2), count),  # the perplexity is 2 to this power
            "accuracy": dure.Sum((logits.argmax(-1) == targets).sum(), count),
        }

    def describe(self, model: nn.Module) -> str:
        number = sum(parameter.numel() for parameter in model.parameters())
        return f"{self.layers}-layer GPT, {number:,} parameters, {len(alphabet())} characters"


class GPT(nn.Module):
    """A decoder-only transformer (Radford et al. 2019): pre-norm, learned positions, input and output tied."""

    def __init__(self, num_characters: int, layers: int, heads: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is no multiple of heads {heads}")
        self.embedding = nn.Embedding(num_characters, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_characters, bias=False)
        self._draw_weights(layers)
        self.head.weight = self.embedding.weight

    def forward(self, characters: Tensor) -> Tensor:
        """Return logits `(B, T, num_characters)` for the character after each of `characters` `(B, T)`."""
        positions = torch.arange(characters.shape[1], device=characters.device)
        hidden = self.embedding(characters) + self.position(positions)  # (B, T, width)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def _draw_weights(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                # what is added onto the residual stream 2 * layers times starts smaller (ibid., section 2.3)
                scale = (2 * layers) ** -0.5 if name.endswith("out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)


class Block(nn.Module):
    """Attention over earlier characters, then a two-layer network per character, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self._attend(self.attention_norm(hidden)))
        expanded = functional.gelu(self.mlp_in(self.mlp_norm(hidden)))
        return hidden + self.dropout(self.mlp_out(expanded))

    def _attend(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        projected = self.attention_in(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)  # each (B, heads, T, width / heads)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))


def texts() -> list[str]:
    """Return the documentation's topics in a fixed order."""
    return [topics[name] for name in sorted(topics)]


@lru_cache(maxsize=1)
def alphabet() -> dict[str, int]:
    """Number the characters that occur anywhere."""
    return {character: number for number, character in enumerate(sorted(set("".join(texts()))))}


def windows(documents: list[str], context: int) -> dure.data.TensorData:
    """Cut documents into windows, so that each character but a document's first is a target exactly once.

    Returns:
        Data with characters `(N, context)` and what follows each of them, `(N, context)`, in which a document's last
        window is filled up with `NO_TARGET`.
    """
    inputs, targets = [], []
    for document in documents:
        codes = torch.tensor([alphabet()[character] for character in document])
        num_windows = -(-(len(codes) - 1) // context)
        filling = num_windows * context - (len(codes) - 1)
        inputs.append(functional.pad(codes[:-1], (0, filling)).view(num_windows, context))
        targets.append(functional.pad(codes[1:], (0, filling), value=NO_TARGET).view(num_windows, context))
    return dure.data.TensorData(torch.cat(inputs), torch.cat(targets))
