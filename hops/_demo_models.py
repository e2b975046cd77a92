"""Models of the demo: Hugging Face networks from a config, with fake-quantised weights.

Nothing is downloaded: every weight is random. `transformers` is imported only when one is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize


class FakeQuantize(torch.autograd.Function):
    """Straight-through fake quantiser (Bengio et al. 2013, arXiv:1308.3432).

    Weights inside the clipping range get the gradient as it comes, the others zero. So backward is
    not what autodiff of forward gives: the derivative of `round` is zero.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bits: int) -> Tensor:
        """Return `weight`, of any shape, on a symmetric grid of `2 ** bits - 1` levels."""
        top = 2 ** (bits - 1) - 1
        limit = 2.5 * weight.abs().mean()
        ctx.save_for_backward(weight.abs() <= limit)
        step = limit / top
        return (weight / step).round().clamp(-top, top) * step

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """Return the gradient for `weight`, and None for `bits`."""
        (inside,) = ctx.saved_tensors
        return grad_output * inside, None


class FakeQuantizedWeight(nn.Module):
    """Parametrisation that shows a layer its weight fake-quantised to `bits` bits."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def forward(self, weight: Tensor) -> Tensor:
        """Return the quantised weight, of the same shape and dtype."""
        return FakeQuantize.apply(weight, self.bits)


class TrainingLoss(nn.Module):
    """A Hugging Face network as export wants it: tensors in, one scalar loss out."""

    attention_mask: Tensor | None

    def __init__(self, model: nn.Module, attention_mask: Tensor | None = None) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("attention_mask", attention_mask)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy of the logits for `inputs` against class indices."""
        logits = self.model(inputs, attention_mask=self.attention_mask).logits
        return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


@dataclass(frozen=True)
class Size:
    """How large a demo model and its batches are."""

    width: int = 128
    layers: int = 3
    classes: int = 512
    batch: int = 8
    length: int = 64


SMALL = Size()
TINY = Size(width=32, layers=2, classes=32, batch=2, length=8)


def build(name: str, size: Size = SMALL, bits: int = 4) -> TrainingLoss:
    """Build the model called `name`, in training mode, with fake-quantised weights.

    Args:
        name: one of the keys of `NETWORKS`.
        size: its width and depth.
        bits: width of the quantised weights.

    Raises:
        ValueError: `name` is not in the list.
        ModuleNotFoundError: `transformers` is not installed.
    """
    if name not in NETWORKS:
        raise ValueError(f"unknown model {name!r}: choose from {', '.join(NETWORKS)}")
    torch.manual_seed(0)
    model = NETWORKS[name](size).train()
    for layer in _projections(model):
        parametrize.register_parametrization(layer, "weight", FakeQuantizedWeight(bits))
    return model


def set_checkpointing(model: TrainingLoss, use_reentrant: bool | None) -> None:
    """Turn the network's gradient checkpointing on, or off when `use_reentrant` is None."""
    network: Any = model.model
    # The older pair of names is deprecated from transformers 5.24 on and goes away in 6.
    if use_reentrant is None:
        getattr(
            network, "activation_checkpointing_disable", network.gradient_checkpointing_disable
        )()
    else:
        enable = getattr(
            network, "activation_checkpointing_enable", network.gradient_checkpointing_enable
        )
        enable({"use_reentrant": use_reentrant})


def batches(name: str, size: Size, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return `count` random batches for the model called `name`, the same ones on every call.

    Language models take int64 tokens `(batch, length)` and labels of the same shape; the vision
    model takes float32 images `(batch, 3, 32, 32)` and int64 labels `(batch,)`.
    """
    generator = torch.Generator().manual_seed(1)
    make = _images if name == "vit" else _tokens
    return [make(size, generator) for _ in range(count)]


def _projections(model: nn.Module) -> list[nn.Module]:
    """Every Linear, and every Conv1D of GPT-2, which is a Linear stored transposed."""
    from transformers.pytorch_utils import Conv1D

    return [module for module in model.modules() if isinstance(module, (nn.Linear, Conv1D))]


def _tokens(size: Size, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(size.classes, (size.batch, size.length + 1), generator=generator)
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()


def _images(size: Size, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    images = torch.randn(size.batch, 3, 32, 32, generator=generator)
    return images, torch.randint(size.classes, (size.batch,), generator=generator)


def _llama(size: Size) -> TrainingLoss:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.classes,
        hidden_size=size.width,
        intermediate_size=3 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        use_cache=False,
        attn_implementation="eager",
    )
    return TrainingLoss(LlamaForCausalLM(config))


def _gpt2(size: Size) -> TrainingLoss:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size.classes,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=4,
        n_positions=size.length,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation="eager",
    )
    return TrainingLoss(GPT2LMHeadModel(config))


def _vit(size: Size) -> TrainingLoss:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        image_size=32,
        patch_size=4,
        num_labels=size.classes,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        attn_implementation="eager",
    )
    # Given no mask, transformers makes one under torch.export, but runs without one in eager.
    patches = (config.image_size // config.patch_size) ** 2
    see_all = torch.zeros(1, 1, patches + 1, patches + 1)
    return TrainingLoss(ViTForImageClassification(config), see_all)


NETWORKS: dict[str, Callable[[Size], TrainingLoss]] = {"llama": _llama, "gpt2": _gpt2, "vit": _vit}
