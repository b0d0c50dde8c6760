"""GPT on random words, as a task of dure and as functions for the loops by hand."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

import dure
from dure.data import TensorData

LEARNING_RATE = 1e-4


class Block(nn.Module):
    """Causal attention and a network of two layers, each with a norm before and a shortcut around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.attention_norm, self.norm = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.attention_norm(x)).chunk(3, -1)
        query, key, value = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class GPT(nn.Module):
    """Embeddings, blocks, and scores of the next word."""

    def __init__(self, width: int, layers: int, heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.words(words) + self.places.weight[: words.size(1)])))


def random_words(rows: int, context: int, vocabulary: int) -> Tensor:
    """Return rows of words, each one longer than the context."""
    return torch.randint(vocabulary, (rows, context + 1), generator=torch.Generator().manual_seed(0))


def loss(model: nn.Module, words: Tensor) -> Tensor:
    """Return the mean cross entropy of each next word."""
    return functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def build_optimizer(model: nn.Module) -> AdamW:
    """Return a fused AdamW."""
    return AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


class Text(dure.Task):
    """Next words; by default a model of 355 million parameters."""

    width: int = 1024
    layers: int = 24
    heads: int = 16
    context: int = 1024
    vocabulary: int = 32768
    rows: int = 4096

    def build_model(self) -> nn.Module:
        return GPT(self.width, self.layers, self.heads, self.context, self.vocabulary)

    def train_data(self) -> TensorData:
        return TensorData(random_words(self.rows, self.context, self.vocabulary))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return build_optimizer(model)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch[0])
