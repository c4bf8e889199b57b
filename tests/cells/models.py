"""Tiny language models for cells: for the engine, and the same in plain PyTorch for the oracle.

A model is a list of layers. Without a pipeline ``Language`` runs them; a pipeline takes the list itself. Both name
weights alike: ``names`` translates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.cells.cell import BATCH, FAMILIES, Cell
from tests.cells.formulas import makes_feed, makes_linear, window
from tests.cells.routing import doubt

VOCABULARY, WIDTH, HEADS, EXPERTS, LENGTH = 24, 16, 4, 4, 8
BALANCE = 0.02
Recompute = Callable[..., Any]


@dataclass(frozen=True)
class Kit:
    """Differences of the layers of an engine's model from the oracle's, which are the defaults."""

    attend: Callable[[], nn.Module] | None = None
    """Makes a module of query, key, value [batch, tokens, heads, size] and the dimension of the batch."""
    mixture: Callable[[int], nn.Module] | None = None
    """The layer of experts of a block, by the block's number."""
    recompute: Recompute | None = None
    linear: Callable[..., nn.Module] = nn.Linear
    """Linear layers but the head's and those of ``feed``."""
    feed: Callable[[int, int, str], nn.Module] = lambda inputs, outputs, name: nn.Linear(inputs, outputs)
    """Of a feed-forward part, by its sizes and name."""


def oracle_kit(cell: Cell) -> Kit:
    """The features of a cell in plain PyTorch."""
    return Kit(
        attend=SparseWindow if cell.attention == "sparse" else None,
        linear=makes_linear(cell),
        feed=makes_feed(cell),
    )


class SparseWindow(nn.Module):
    """Attention to one's own block and the one before."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: int) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (query, key, value))
        return functional.scaled_dot_product_attention(q, k, v, window(q.shape[2])).transpose(1, 2)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of [batch, tokens, heads, size]."""
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.weight)


class Attention(nn.Module):
    def __init__(self, kit: Kit) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        # no bias: that of keys has no gradient but rounding, which Adam enlarges
        self.q = kit.linear(WIDTH, WIDTH, bias=False)
        self.k = kit.linear(WIDTH, WIDTH, bias=False)
        self.v = kit.linear(WIDTH, WIDTH, bias=False)
        self.out = kit.linear(WIDTH, WIDTH)
        self.shards = kit.attend() if kit.attend else None

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (layer(normed).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.q, self.k, self.v))
        attended = attend(q, k, v) if self.shards is None else self.shards(q, k, v, 0)
        return x + self.out(attended.flatten(2))


class FeedForward(nn.Module):
    def __init__(self, kit: Kit) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = kit.feed(WIDTH, 2 * WIDTH, "up"), kit.feed(2 * WIDTH, WIDTH, "down")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gru = nn.LayerNorm(WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gru(self.norm(x))[0]


class PlainMixture(nn.Module):
    """Each token's two largest of ``EXPERTS`` experts, weighted by their normalized probabilities.

    Named as ``deepspeed.moe.layer.MoE`` names its own. Returns [.., WIDTH] and the balancing loss of Shazeer et al.:
    E sum_e (mean probability of e) (fraction of tokens whose largest is e). ``follows`` gives choices that a forward
    takes instead of its own; ``chosen`` are its last ones, ``doubt`` is the largest of ``routing.doubt``,
    ``chances`` are the logarithms [tokens, experts] of all forwards.
    """

    def __init__(self, linear: Callable[..., nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.deepspeed_moe = nn.Module()
        self.deepspeed_moe.gate = nn.Module()
        self.deepspeed_moe.gate.wg = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.deepspeed_moe.experts = nn.Module()
        self.deepspeed_moe.experts.deepspeed_experts = nn.ModuleList(expert(linear) for _ in range(EXPERTS))
        self.follows: Iterator[Tensor] | None = None
        self.chosen, self.doubt = Tensor(), 0.0
        self.chances: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        tokens = x.reshape(-1, WIDTH)
        gate: Tensor = self.deepspeed_moe.gate.wg.weight.float()  # type: ignore[union-attr, operator, assignment]
        with torch.autocast("cpu", enabled=False):
            chances = functional.softmax(tokens.float() @ gate.T, 1)
        self.chosen = next(self.follows) if self.follows else chances.topk(2, 1).indices
        self.doubt = max(self.doubt, doubt(chances, self.chosen))
        self.chances.append(chances.detach().log())
        first, second = self.chosen.unbind(1)
        weights = torch.stack([chances.gather(1, each[:, None])[:, 0] for each in (first, second)], 1)
        weights = weights / weights.sum(1, keepdim=True)
        outputs = []
        for number, each in enumerate(self.deepspeed_moe.experts.deepspeed_experts):
            share = weights[:, 0] * (first == number) + weights[:, 1] * (second == number)
            outputs.append(share[:, None] * (output := each(tokens)).float())
        output = sum(outputs).to(output.dtype)  # rounded once, to what experts give (also under autocast)
        fraction = functional.one_hot(first, EXPERTS).float().mean(0)
        return output.reshape(x.shape), EXPERTS * (chances.mean(0) * fraction).sum(), None


def expert(linear: Callable[..., nn.Module] = nn.Linear) -> nn.Sequential:
    return nn.Sequential(linear(WIDTH, WIDTH), nn.GELU(), linear(WIDTH, WIDTH))


class Mixture(nn.Module):
    """Experts; the balancing loss is taken from ``loss`` after the forward (not in pipelines)."""

    def __init__(self, number: int, kit: Kit) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = kit.mixture(number) if kit.mixture else PlainMixture(kit.linear)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output, balance, _ = self.moe(self.norm(x))
        return x + output, balance


class Block(nn.Module):
    """Attention or a recurrence, then experts or a feed-forward part. Experts return their balancing loss too."""

    def __init__(self, number: int, model: str, kit: Kit) -> None:
        super().__init__()
        self.recurrent = Recurrent() if model == "gru" else None
        self.attention = None if model == "gru" else Attention(kit)
        self.mixture = Mixture(number, kit) if model == "moe" and number == 1 else None
        self.feed = FeedForward(kit) if self.mixture is None else None

    def forward(self, x: Tensor) -> Any:
        for part in (self.recurrent, self.attention):
            x = x if part is None else part(x)
        if self.mixture is not None:
            return self.mixture(x)
        assert self.feed is not None
        return self.feed(x)


class Flat(Block):
    """The block of a pipeline, which passes tensors alone."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return result[0] if isinstance(result, tuple) else result


class Twice(nn.Module):
    """One weight that a forward uses twice."""

    def __init__(self, kit: Kit) -> None:
        super().__init__()
        self.map = kit.linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.map(torch.tanh(self.map(x))))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class Language(nn.Module):
    """``forward(input_ids)`` gives logits, with ``labels`` the loss. Layer drop scales what a block adds."""

    def __init__(self, cell: Cell, kit: Kit | None = None) -> None:
        super().__init__()
        kit = kit or oracle_kit(cell)
        self.config = SimpleNamespace(model_type="cells")  # its inputs are those of a model of Transformers
        self.layers = nn.ModuleList([Embed(), *(Block(number, cell.model, kit) for number in range(2))])
        self.twice = Twice(kit) if cell.parameters == "twice" else None
        self.sometimes = FeedForward(kit) if cell.parameters == "unused somewhere" else None
        self.unused = nn.Linear(5, 3) if cell.parameters == "unused" else None
        self.layers.append(Head())
        self.recompute = kit.recompute
        self.with_sometimes = False
        self.kept: Tensor | None = None
        """Of the oracle: tokens [batch, kept] that the first layer works on."""
        if cell.parameters == "tied":
            self.layers[-1].out.weight = self.layers[0].weight

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        progressive_layer_drop: bool = False,
        pld_theta: float = 1.0,
    ) -> Tensor:
        x, balance = self.layers[0](input_ids), None
        for number, layer in enumerate(list(self.layers)[1:-1]):
            layer = (
                functools.partial(on_some, layer, self.kept)
                if self.kept is not None and number == 0
                else layer
            )
            result = self.recompute(layer, x) if self.recompute and torch.is_grad_enabled() else layer(x)
            output = result[0] if isinstance(result, tuple) else result
            x = x + pld_theta * (output - x) if progressive_layer_drop else output
            balance = result[1] if isinstance(result, tuple) else balance
        x = x if self.twice is None else self.twice(x)
        x = self.sometimes(x) if self.sometimes is not None and self.with_sometimes else x
        logits = self.layers[-1](x)
        self.balance = balance
        return logits if labels is None else mean_loss(logits, labels)


def on_some(layer: nn.Module, kept: Tensor, x: Tensor) -> Tensor:
    """``layer`` of the tokens ``kept`` [batch, n] of ``x``; the others pass it by."""
    at = kept[:, :, None].expand(-1, -1, x.shape[2])
    return x.scatter(1, at, layer(x.gather(1, at)).to(x.dtype))


def alone(cell: Cell) -> nn.Module:
    """The oracle's model."""
    if cell.model in FAMILIES:
        from tests.cells.families import Family

        return Family(cell)
    return Language(cell)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over tokens that count; 0 if none does."""
    total = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    return total / (labels != -100).sum().clamp(min=1)


def freeze(cell: Cell, named: dict[str, nn.Parameter], step: int = 0) -> None:
    """Takes gradients from the weights that the cell freezes; ``late`` ones get them back after the first step."""
    for name, param in named.items():
        if cell.parameters == "frozen":
            param.requires_grad_(".up." not in name and "embed" not in name and name != "layers.0.weight")
        if cell.parameters == "late":
            param.requires_grad_(step >= 1 or ".up." not in name)
        if cell.lora and name.endswith((".up.weight", ".up.bias", ".down.weight", ".down.bias")):
            param.requires_grad_(False)


def names(name: str) -> str:
    """The name of a weight of any of our models as the oracle knows it."""
    if name.startswith("tied_modules."):
        return "layers.0.weight"
    return f"layers.{name}" if name[0].isdigit() else name


def whole_value(name: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """The initial value of a weight, by the oracle's name."""
    source = torch.Generator().manual_seed(sum((at + 1) * ord(each) for at, each in enumerate(name)))
    value = torch.randn(tuple(shape), generator=source)
    if "norm" in name.lower() or ".ln_" in name:
        return 1 + 0.1 * value if name.endswith("weight") else 0.1 * value
    return 0.3 * value


def tokens(cell: Cell, replica: int, number: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and labels [batch, tokens] of the ``number``-th micro-batch of a stream of data."""
    source = torch.Generator().manual_seed(10_007 * seed + 101 * replica + number)
    length = LENGTH + (2 * (replica + number % 2) if cell.data == "uneven" else 0)
    drawn = torch.randint(VOCABULARY, (BATCH, length + 1), generator=source)
    labels = drawn[:, 1:].clone()
    labels[0, :3] = -100
    if cell.data == "empty" and (replica + number) % 2:
        labels[:] = -100
    return drawn[:, :-1].contiguous(), labels.contiguous()


def uses_sometimes(replica: int, number: int) -> bool:
    """Return the forwards that run the part that is unused in others."""
    return (replica + number) % 3 == 0
