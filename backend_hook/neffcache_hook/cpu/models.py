"""The models of the demo: small, seeded, and of the shapes that Neuron jobs have.

Every call of `build` gives equal weights and inputs, in every process, so ranks ask for the same graphs and their
results can be compared with eager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_SEED = 20260401


class Mlp(nn.Module):
    """The quickstart's network: 128-256-10."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(128, 256)
        self.second = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped


class RmsNorm(nn.Module):
    """Root-mean-square norm as Llama has it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class DecoderLayer(nn.Module):
    """Rotary causal attention and a gated MLP, each behind a norm and a residual."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = RmsNorm(hidden), RmsNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, 2 * hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (self._split(proj(h)) for proj in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(x.shape))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]  # as above

    def _split(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        return x.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Decoder(nn.Module):
    """A Llama-style language model: hidden 128, 2 layers, 4 heads, sequences of 64 by default."""

    cos: Tensor
    sin: Tensor

    def __init__(self, vocabulary: int = 256, hidden: int = 128, layers: int = 2, heads: int = 4, length: int = 64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(DecoderLayer(hidden, heads) for _ in range(layers))
        self.norm = RmsNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        width = hidden // heads
        angle = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, width, 2) / width))
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))  # type: ignore[no-any-return]  # as above


class DecoderLoss(nn.Module):
    """The decoder with its next-token loss, so that one training step is a forward and a backward graph."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.decoder(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class ConvNet(nn.Module):
    """Two convolutions with batch norm (in eval), pooling and a classifier, for 16x16 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.BatchNorm2d(16)
        self.classifier = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.relu(self.norm2(self.conv2(x))).mean((2, 3))
        return self.classifier(x)  # type: ignore[no-any-return]  # as above


class ModelCase:
    """One model of the demo and what to feed it."""

    def __init__(self, name: str, make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]], *, train: bool) -> None:
        self.name = name
        self.train = train
        """True: `run` does a whole training step, forward, backward and an SGD step."""
        self._make = make

    def build(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """Module and inputs, equal in every call and process; the caller's random state is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            module, inputs = self._make()
        return module.train(self.train), inputs


def run(case: ModelCase, backend: str | Callable[..., Any] | None) -> list[Tensor]:
    """Build the model and do one step; `backend` None is eager, else what `torch.compile` takes.

    Returns what the step produced: outputs for inference; loss, gradients and stepped weights for training.
    """
    module, inputs = case.build()
    call: Callable[..., Any] = module
    if backend is not None:
        call = torch.compile(module, backend=backend, dynamic=False, fullgraph=True)
    if not case.train:
        with torch.no_grad():
            return [call(*inputs)]
    loss = call(*inputs)
    loss.backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    return [t.detach() for t in (loss, *gradients, *module.parameters())]


def max_abs_diff(left: list[Tensor], right: list[Tensor]) -> float:
    """Largest difference over all tensors of two runs; infinite where they differ in number or shape or are NaN."""
    if [t.shape for t in left] != [t.shape for t in right]:
        return float("inf")
    worst = max(((a.double() - b.double()).abs().max().item() for a, b in zip(left, right, strict=True)), default=0.0)
    return worst if worst == worst else float("inf")


def _mlp() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Mlp(), (torch.randn(8, 128),)


def _decoder() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Decoder(), (torch.randint(0, 256, (1, 64)),)


def _decoder_train() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return DecoderLoss(), (torch.randint(0, 256, (1, 64)), torch.randint(0, 256, (1, 64)))


def _convnet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return ConvNet(), (torch.randn(2, 3, 16, 16),)


MODELS: dict[str, ModelCase] = {
    case.name: case
    for case in (
        ModelCase("mlp", _mlp, train=False),
        ModelCase("convnet", _convnet, train=False),
        ModelCase("decoder", _decoder, train=False),
        ModelCase("decoder-train", _decoder_train, train=True),
    )
}
"""The demo's models by name, cheapest first."""
