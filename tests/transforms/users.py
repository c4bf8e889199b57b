"""Small transforms as later parts will need them, and what they are tried on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.transforms import ForwardFacts, LowRank, Part, TransformContext, Weight, request
from deepspeed.zero.params import full_shape

WIDTH, VOCAB = 8, 13


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH // 2)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.query(x)) * self.key(x).repeat(1, 1, 2))


class Model(nn.Module):
    """Two blocks between tied embedding and head; the mean loss of predicting the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def logits(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        x = x + self.shift.to(x.dtype)
        if positions is not None:
            x = x + torch.sin(positions.to(x.dtype)).unsqueeze(-1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))

    def forward(
        self, ids: Tensor, labels: Tensor | None = None, *, positions: Tensor | None = None
    ) -> Tensor:
        labels = ids if labels is None else labels
        return nn.functional.cross_entropy(self.logits(ids, positions).flatten(0, 1), labels.flatten())


def make_model(zero_init: dict[str, Any] | None = None) -> Model:
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=zero_init, enabled=zero_init is not None):
        return Model()


def settings(stage: int, **changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        **changes,
    }


# Adam would hide a wrong factor in the gradients.
SGD: dict[str, Any] = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def tokens(seed: int, length: int = 6) -> Tensor:
    return torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(seed))


class Adapted(nn.Module):
    """A frozen linear layer plus a product of two small matrices."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        rows, columns = full_shape(base.weight)
        # Dtype and device of the base; random on each rank independently, and not zero, so that each part counts.
        self.down = nn.Parameter(torch.randn(rank, columns).to(base.weight) / math.sqrt(columns))
        self.up = nn.Parameter(torch.randn(rows, rank).to(base.weight) / math.sqrt(rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * (x @ self.down.t() @ self.up.t())


def linears(module: nn.Module, ending: str) -> Iterator[tuple[str, nn.Linear]]:
    for path, each in list(module.named_modules()):
        if isinstance(each, nn.Linear) and path.endswith(ending):
            yield path, each


@dataclass(frozen=True)
class Adapters:
    """Freezes the model and adapts those of its linear layers whose path has this ending."""

    ending: str = "query"
    rank: int = 2
    scale: float = 0.5
    name: str = "lora"
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    def apply(self, module: nn.Module, context: TransformContext) -> None:
        found = list(linears(module, self.ending))
        module.requires_grad_(False)
        for path, linear in found:
            adapted = Adapted(linear, self.rank, self.scale)
            module.set_submodule(path, adapted)
            context.replace_param(linear.weight, linear.weight, adapted.up, adapted.down)
            base, up, down = (Weight(f"{path}.{part}") for part in ("base.weight", "up", "down"))
            context.original(f"{path}.weight", LowRank(base, up, down, self.scale))
            if linear.bias is not None:
                context.original(f"{path}.bias", Weight(f"{path}.base.bias"))
        context.report(f"rank {self.rank}")


class FusedAttention(nn.Module):
    def __init__(self, old: Attention, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.both = nn.Linear(1, 1)
        self.both.weight, self.both.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.both.in_features, self.both.out_features = weight.shape[1], weight.shape[0]
        self.out = old.out

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.both(x).split([WIDTH, WIDTH // 2], dim=-1)
        return self.out(torch.tanh(query) * key.repeat(1, 1, 2))


@dataclass(frozen=True)
class Fusion:
    """Makes one linear layer of each attention's two."""

    name: str = "fusion"
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ("lora",)

    def apply(self, module: nn.Module, context: TransformContext) -> None:
        for path, old in list(module.named_modules()):
            if not isinstance(old, Attention):
                continue
            query, key = old.query, old.key
            with context.whole(*query.parameters(), *key.parameters()), torch.no_grad():
                weight = torch.cat([query.weight, key.weight])
                bias = torch.cat([query.bias, key.bias])
            fused = FusedAttention(old, weight, bias)
            module.set_submodule(path, fused)
            for part in ("weight", "bias"):
                whole = Weight(f"{path}.both.{part}")
                context.original(f"{path}.query.{part}", Part(whole, 0, 0, WIDTH))
                context.original(f"{path}.key.{part}", Part(whole, 0, WIDTH, len(weight)))
                for linear in (query, key):
                    context.replace_param(getattr(linear, part), getattr(fused.both, part))


@dataclass(frozen=True)
class SequenceShards:
    """Each rank of the sequence axis gets its part of ids, labels and positions along the second dimension."""

    mesh: ProcessMesh
    name: str = "sequence_parallel"
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    def transform(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], facts: ForwardFacts
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = args[0]
        if "positions" not in kwargs:
            kwargs = {**kwargs, "positions": torch.arange(ids.shape[1]).expand_as(ids)}
        return tuple(map(self.part, args)), {name: self.part(value) for name, value in kwargs.items()}

    def part(self, value: Tensor) -> Tensor:
        return value.chunk(self.mesh.size("sp"), dim=1)[self.mesh.rank("sp")]


@dataclass(frozen=True)
class Truncation:
    """Sequences of 2 tokens in the first update, 2 more after each; whole ones in evaluation."""

    name: str = "curriculum"
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    def transform(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], facts: ForwardFacts
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not facts.training:
            return args, kwargs
        length = 2 * (facts.step + 1)
        return tuple(arg[:, :length] for arg in args), {
            name: value[:, :length] for name, value in kwargs.items()
        }


@dataclass(frozen=True)
class Sequences:
    """Sequence shards as a config would ask for them: a transform of the module that changes the inputs only."""

    name: str = "sequence_parallel"
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    def apply(self, module: nn.Module, context: TransformContext) -> None:
        if context.mesh.size("sp") > 1:
            context.transform_inputs(SequenceShards(context.mesh))


def start(stage: int, *transforms: Any, zero_init: bool = False, **changes: Any) -> Any:
    config = settings(stage, **changes)
    model = make_model(config if zero_init else None)
    for transform in transforms:
        request(model, transform)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine


def train(engine: Any, *seeds: int) -> list[float]:
    losses = []
    for seed in seeds:
        loss = engine(tokens(seed))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
