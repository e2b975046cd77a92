"""Checkpointed models of real libraries: random weights, tiny configurations.

A case is one function that gives ``(module, arguments)``, called anew on the same seed
for every program that is compared.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class Case:
    """A case of the table; each argument of :func:`case` is one of these fields."""

    build: Callable[[], tuple[nn.Module, tuple[Any, ...]]]
    package: str
    #: Front end: what the error says where the capture must be refused.
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    #: Why the group does not install the package.
    elsewhere: str = ""

    def left_out(self) -> bool:
        return bool(self.elsewhere) and importlib.util.find_spec(self.package) is None


CASES: dict[str, Case] = {}


def case(package: str, **options: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(build: Callable[[], Any]) -> Callable[[], Any]:
        CASES[build.__name__] = Case(build, package, **options)
        return build

    return register


def fresh(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    module, args = CASES[name].build()
    return module.train(), args


class First(nn.Module):
    """A model that gives an object of the library's, by its first tensor."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model = model
        self.options = options

    def forward(self, *args: Any) -> torch.Tensor:
        return self.model(*args, **self.options)[0]


TOKENS = (2, 5)


def tokens() -> torch.Tensor:
    return torch.randint(0, 32, TOKENS)


def _transformer(model: nn.Module, use_reentrant: bool, **options: Any) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        # A reentrant region gives no gradient to its parameters unless an input requires it.
        model.enable_input_require_grads()
    return First(model, **options)


_SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def _text_model(name: str, use_reentrant: bool, config: dict[str, Any], **options: Any) -> Any:
    import transformers

    configuration = getattr(transformers, f"{name}Config")(**config)
    model = getattr(transformers, f"{name}Model")(configuration)
    return _transformer(model, use_reentrant, **options), (tokens(),)


def _both(name: str, build: Callable[[bool], Any], **options: Any) -> None:
    """The case with either implementation of checkpoint."""
    for use_reentrant in (False, True):
        label = f"{name}_reentrant" if use_reentrant else name
        CASES[f"transformers_{label}"] = Case(
            functools.partial(build, use_reentrant), "transformers", **options
        )


def _llama(use_reentrant: bool) -> Any:
    config = {**_SIZES, "num_key_value_heads": 1, "attention_dropout": 0.1}
    return _text_model("Llama", use_reentrant, config, use_cache=False)


def _qwen2(use_reentrant: bool) -> Any:
    config = {**_SIZES, "num_key_value_heads": 1, "attention_dropout": 0.1}
    return _text_model("Qwen2", use_reentrant, config, use_cache=False)


def _gpt2(use_reentrant: bool) -> Any:
    config = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return _text_model("GPT2", use_reentrant, config, use_cache=False)


def _bert(use_reentrant: bool) -> Any:
    return _text_model("Bert", use_reentrant, {**_SIZES, "max_position_embeddings": 16})


def _t5(use_reentrant: bool) -> Any:
    import transformers

    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2
    )
    model = transformers.T5Model(config)

    class Seq2Seq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = _transformer(model, use_reentrant).model

        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            found = self.model(input_ids=source, decoder_input_ids=target, use_cache=False)
            return found.last_hidden_state

    return Seq2Seq(), (tokens(), tokens())


def _vit(use_reentrant: bool) -> Any:
    import transformers

    sizes = {k: v for k, v in _SIZES.items() if k != "vocab_size"}
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
        **sizes,
    )  # fmt: skip
    model = transformers.ViTModel(config)
    return _transformer(model, use_reentrant), (torch.randn(2, 3, 8, 8),)


for _name, _build in {
    "llama": _llama,
    "qwen2": _qwen2,
    "gpt2": _gpt2,
    "bert": _bert,
    "vit": _vit,
}.items():
    _both(_name, _build)

# A region of it makes its position bias require grad, which Dynamo does not do.
_both(
    "t5",
    _t5,
    refused={
        "strict": r"checkpointed region of T5Block\.forward.*strict=False(.|\n)*requires_grad"
    },
)


@case("diffusers")
def diffusers_unet():
    import diffusers

    model = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=2,
        out_channels=2,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=8,
    )
    model.enable_gradient_checkpointing()
    return First(model, return_dict=False), (torch.randn(1, 2, 8, 8), torch.tensor([3]))


@case("diffusers")
def diffusers_conditional_unet():
    import diffusers

    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=2,
        out_channels=2,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        cross_attention_dim=8,
        attention_head_dim=4,
    )
    model.enable_gradient_checkpointing()
    args = (torch.randn(1, 2, 8, 8), torch.tensor([3]), torch.randn(1, 4, 8))
    return First(model, return_dict=False), args


@case("diffusers")
def diffusers_transformer():
    import diffusers

    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=2,
        out_channels=2,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=8,
        norm_num_groups=2,
        dropout=0.1,
    )
    model.enable_gradient_checkpointing()
    args = (torch.randn(1, 2, 8, 8), torch.tensor([3]), torch.tensor([1]))

    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, image, step, label):
            return self.model(image, step, class_labels=label, return_dict=False)[0]

    return Conditioned(), args


_TIMM = "timm needs torchvision, which the registry has for torch 2.14.1 and newer only"


@case("timm", elsewhere=_TIMM)
def timm_vit():
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=16, num_heads=2, num_classes=3
    )
    model.set_grad_checkpointing(True)
    return model, (torch.randn(2, 3, 32, 32),)


@case("timm", elsewhere=_TIMM)
def timm_resnet():
    import timm

    model = timm.create_model("resnet10t", num_classes=3)
    model.set_grad_checkpointing(True)
    return model, (torch.randn(2, 3, 32, 32),)
