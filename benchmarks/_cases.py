"""The Functions and models that the benchmarks run, with and without hops: imports torch only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 64
HEADS = 4

Activation = Callable[[Tensor], Tensor]
BlockCall = Callable[[nn.Module, Tensor], Tensor]


class Swish(torch.autograd.Function):
    """`x * sigmoid(x)` that saves only its input (Ramachandran et al. 2017, arXiv:1710.05941)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the activation of `x`, of any shape."""
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        """Return the gradient for `x`."""
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return grad_output * (gate + x * gate * (1 - gate))


def function_swish(x: Tensor) -> Tensor:
    """Swish by way of the Function."""
    return Swish.apply(x)


def plain_swish(x: Tensor) -> Tensor:
    """The same values and gradients from ordinary ops."""
    return x * torch.sigmoid(x)


def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    """Run `block` inside a checkpoint region."""
    return checkpoint(block, x, use_reentrant=False)


def called(block: nn.Module, x: Tensor) -> Tensor:
    """Run `block` as it is."""
    return block(x)


class Block(nn.Module):
    """A pre-norm transformer block; takes and returns `(batch, length, WIDTH)`."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the perceptron, each added to its input."""
        x = x + self.projection(self._attend(self.attention_norm(x)))
        return x + self.down(self.activation(self.up(self.mlp_norm(x))))

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = self.queries_keys_values(x).view(batch, length, 3, HEADS, WIDTH // HEADS)
        queries, keys, values = split.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return attended.transpose(1, 2).reshape(batch, length, WIDTH)


class Transformer(nn.Module):
    """A stack of blocks and a mean, so that the output is a scalar loss."""

    def __init__(self, blocks: int, activation: Activation, call: BlockCall) -> None:
        super().__init__()
        self.call = call
        self.blocks = nn.ModuleList(Block(activation) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Return a scalar for `x` of shape `(batch, length, WIDTH)`."""
        for block in self.blocks:
            x = self.call(block, x)
        return x.square().mean()


def wrapped_transformer(blocks: int) -> Transformer:
    """Every block in a checkpoint region, with one Function inside."""
    torch.manual_seed(0)
    return Transformer(blocks, function_swish, checkpointed)


def plain_transformer(blocks: int) -> Transformer:
    """The same network and weights without checkpoint and without Functions."""
    torch.manual_seed(0)
    return Transformer(blocks, plain_swish, called)


def transformer_input() -> Tensor:
    """A float32 batch of shape `(4, 32, WIDTH)`."""
    return torch.randn(4, 32, WIDTH, generator=torch.Generator().manual_seed(0))


class Chain(nn.Module):
    """Calls the Function `calls` times in a row, on a tensor of any shape."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        """Return the last activation."""
        for _ in range(self.calls):
            x = Swish.apply(x)
        return x


def chain_input() -> Tensor:
    """Eight float32 numbers that need a gradient, so few that the call is what is timed."""
    return torch.linspace(-1.0, 1.0, 8).requires_grad_()


def forward_backward(module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run `module`, then its backward with ones; return the gradient of `x`."""
    output = module(x)
    return torch.autograd.grad(output, x, torch.ones_like(output))[0]
