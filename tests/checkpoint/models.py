"""A small model with everything that checkpoints must survive, and training it for a few steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from tests.checkpoint import make_upstream_checkpoints as upstream

VOCAB = 11


class Zoo(nn.Module):
    """Tied, frozen, unused and zero-sized parameters, a buffer, a scalar parameter, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 6)
        self.frozen = nn.Linear(6, 5)
        self.l1 = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.l2 = nn.Linear(7, 6)
        self.head = nn.Linear(6, VOCAB, bias=False)
        self.head.weight = self.emb.weight
        self.unused = nn.Linear(3, 3)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0))
        self.drop = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.norm(torch.tanh(self.l1(self.frozen(self.emb(tokens)))))
        return self.head(self.drop(self.l2(hidden))) * self.temperature


def config(stage: int = 0, precision: str = "fp32", accumulation: int = 1, **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 5}},
        "zero_optimization": {"stage": stage},
    }
    if precision == "bf16":
        made["bf16"] = {"enabled": True}
    if precision == "fp16":
        made["fp16"] = {"enabled": True, "initial_scale_power": 8}
    return {**made, **changes}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """The usual two: matrices with weight decay, the rest without."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]


def make_engine(ds_config: dict[str, Any], *, seed: int = 0, model: nn.Module | None = None) -> Any:
    torch.manual_seed(seed)
    model = model if model is not None else Zoo()
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=groups(model), config=ds_config)
    return engine


def train(engine: Any, first: int, last: int) -> list[float]:
    """Micro-batches number ``first`` to ``last - 1``; the data depends on that number and the rank alone."""
    losses: list[float] = []
    engine.train()
    for number in range(first, last):
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        tokens = torch.randint(0, VOCAB, (4, 5), generator=generator)
        labels = torch.randint(0, VOCAB, (4, 5), generator=generator)
        loss = nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), labels.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def evaluate(engine: Any) -> float:
    """A loss that depends on nothing but the weights; the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCAB, (8, 5), generator=generator)
    engine.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
    engine.train()
    return loss.item()


def full_state(engine: Any) -> dict[str, Tensor]:
    """Masters and moments of every parameter, whole, from all ranks: an oracle that knows no files."""
    gathered: list[Any] = [None] * dist.get_world_size()
    own = [
        (index.name, index.global_shape, index.start, index.stop, {k: t.clone() for k, t in tensors.items()})
        for index, tensors in engine.state_access.shards()
    ]
    dist.all_gather_object(gathered, own)
    whole: dict[str, Tensor] = {}
    for name, shape, start, stop, tensors in (entry for entries in gathered for entry in entries):
        numel = int(torch.Size(shape).numel())
        for kind, tensor in tensors.items():
            if tensor.dim() == 1 and tensor.numel() == stop - start:
                into = whole.setdefault(f"{name}/{kind}", torch.full((numel,), float("nan")))
                into[start:stop] = tensor.float()
            else:
                whole[f"{name}/{kind}"] = tensor.float().view(1)  # a scalar parameter gives either
    return whole


def weights(engine: Any) -> dict[str, Tensor]:
    """The model's own tensors, copied."""
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, different


def assert_restored(loaded: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """A parameter that had had no gradient at stage 0 had no state there; it starts from zeros elsewhere."""
    assert_equal({name: value for name, value in loaded.items() if name in saved}, saved)
    assert not any(value.any() for name, value in loaded.items() if name not in saved)


def save_as_fixtures_were(
    folder: str, stage: int, precision: str, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Our engine does on this rank what made the fixtures of release 0.19; returns all that it holds."""
    torch.manual_seed(0)
    net = upstream.model()
    ds_config = upstream.config(stage, precision)
    for section, entries in (settings or {}).items():
        ds_config.setdefault(section, {}).update(entries)
    engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=upstream.groups(net), config=ds_config)
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(0, VOCAB, (4, 5), generator=generator)
        labels = torch.randint(0, VOCAB, (4, 5), generator=generator)
        engine.backward(nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), labels.flatten()))
        engine.step()
    engine.save_checkpoint(folder, client_state={"epoch": 3, "note": "hello"})
    with deepspeed.zero.GatheredParameters(list(net.parameters())):
        gathered = weights(engine)
    return {
        "state": full_state(engine),
        "weights": gathered,
        "scale": engine.state_access.scalars()["loss_scaler"]["scale"],
        "schedule": engine.lr_scheduler.state_dict(),
    }
