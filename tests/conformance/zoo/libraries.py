"""Features: architectures of torch itself and of the libraries that people bring, tiny and with random weights."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

from dure.torchcompat.imports import repair_torchvision
from tests.conformance.zoo.feature import HIDDEN, IN, OUT, Samples, ZooTask, data, feature

repair_torchvision()  # timm and transformers import it


IN_SINGLE = 1e-6
"""Rounding where a library computes its loss in float32, or where many layers of BatchNorm amplify it."""


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(IN, HIDDEN).double()
        self.body = nn.Transformer(
            HIDDEN, 2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=16, dropout=0.0, batch_first=True
        ).double()
        self.head = nn.Linear(HIDDEN, OUT).double()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.embed(x)[:, None, :] * torch.linspace(0.5, 1.5, 3, dtype=x.dtype, device=x.device)[:, None]
        return self.head(self.body(rows, rows.flip(1))).mean(1)


@feature("Architectures", "`nn.Transformer`")
class Transformer(ZooTask):
    def build_model(self) -> nn.Module:
        return Translator()


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(IN, HIDDEN, num_layers=2, batch_first=True).double()
        self.head = nn.Linear(HIDDEN, OUT).double()

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, None, :] * torch.linspace(0.5, 1.5, 4, dtype=x.dtype, device=x.device)[:, None]
        return self.head(self.recurrent(rows)[0][:, -1])


@feature("Architectures", "`nn.LSTM`")
class Recurrent(ZooTask):
    def build_model(self) -> nn.Module:
        return Sequences()


class ImageTask(ZooTask):
    """Small random images and three classes."""

    size = 32

    def _images(self, num_samples: int, seed: int) -> Any:
        x, _ = data(num_samples, seed)
        generator = torch.Generator().manual_seed(seed + 10)
        images = torch.randn(num_samples, 3, self.size, self.size, generator=generator, dtype=torch.float64)
        return Samples(images + x[:, :3, None, None], (x[:, 0] > 0).long() + (x[:, 1] > 0).long())

    def train_data(self) -> Any:
        return self._images(22, 1)

    def eval_data(self) -> Any:
        return self._images(7, 2)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.01, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)


@feature(
    "Architectures",
    "torchvision's ResNet-18",
    declares=("BatchNorm",),
    needs="torchvision",
    tolerance=IN_SINGLE,
    drop_last=True,
)
class ResNet18(ImageTask):
    def build_model(self) -> nn.Module:
        from torchvision.models import resnet18

        return resnet18(num_classes=3).double()


@feature("Architectures", "torchvision's ViT", needs="torchvision")
class VisionTransformer(ImageTask):
    def build_model(self) -> nn.Module:
        from torchvision.models import VisionTransformer as ViT

        model = ViT(image_size=32, patch_size=16, num_layers=3, num_heads=2, hidden_dim=8, mlp_dim=16, num_classes=3)
        nn.init.normal_(model.heads[0].weight, std=0.1)
        return model.double()


@feature("Architectures", "timm's ConvNeXt", needs="timm")
class ConvNeXt(ImageTask):
    def build_model(self) -> nn.Module:
        from timm.models import ConvNeXt as Model

        return Model(num_classes=3, depths=(1, 1, 2, 1), dims=(4, 8, 8, 16)).double()


class TextTask(ZooTask):
    """Rows of tokens, as a language model learns them."""

    def _tokens(self, num_samples: int, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return Samples(torch.randint(1, 20, (num_samples, 6), generator=generator))

    def train_data(self) -> Any:
        return self._tokens(22, 1)

    def eval_data(self) -> Any:
        return self._tokens(7, 2)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        (tokens,) = batch
        return model(input_ids=tokens, labels=tokens).loss


@feature("Architectures", "transformers' GPT-2, with its own loss", needs="transformers", tolerance=IN_SINGLE)
class GPT2(TextTask):
    def build_model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=20, n_positions=8, n_embd=8, n_layer=3, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        return GPT2LMHeadModel(config).double()


@feature("Architectures", "transformers' BERT, with its own loss", needs="transformers")
class BERT(TextTask):
    def build_model(self) -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            vocab_size=20, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=8, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        )  # fmt: skip
        return BertForMaskedLM(config).double()


@feature("Architectures", "transformers' T5, with its own loss", needs="transformers")
class T5(TextTask):
    def build_model(self) -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=20, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0,
            decoder_start_token_id=0, pad_token_id=0,
        )  # fmt: skip
        return T5ForConditionalGeneration(config).double()


@feature("Architectures", "transformers' Llama, with its own loss", needs="transformers", tolerance=IN_SINGLE)
class Llama(TextTask):
    def build_model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=20, hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=8,
        )  # fmt: skip
        return LlamaForCausalLM(config).double()


@feature("Architectures", "transformers' GPT-2, its logits in the task's loss", needs="transformers")
class GPT2Logits(GPT2):  # type: ignore[valid-type,misc]
    def loss(self, model: nn.Module, batch: Any) -> Any:
        (tokens,) = batch
        logits = model(input_ids=tokens).logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
