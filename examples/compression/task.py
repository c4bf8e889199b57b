"""What the recipes share: which module of the standard library is a snippet from, a model in the shape of BERT that
answers it, and how it is trained, measured and saved."""

from __future__ import annotations

import importlib.util
import math
import re
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import deepspeed
from deepspeed.compression.compress import init_compression, redundancy_clean

MODULES = (
    "argparse", "difflib", "doctest", "inspect", "mailbox",
    "optparse", "pickletools", "subprocess", "tarfile", "typing",
)  # fmt: skip
VOCABULARY = 2048
BLOCK = 24
"""Lines that stay together: every fourth block is for tests only."""


@dataclass(frozen=True)
class Sizes:
    hidden: int = 128
    heads: int = 4
    inner: int = 512
    layers: int = 4
    length: int = 32


class Snippets:
    """Tokens [batch, length] and classes [batch] from the text of `MODULES`: words and signs, by a hash."""

    def __init__(self, length: int) -> None:
        self.length = length
        streams = [_streams(name) for name in MODULES]
        self._train, self._test = [each[0] for each in streams], [each[1] for each in streams]

    def train(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self._drawn(self._train, size, generator)

    def test(self, size: int) -> tuple[Tensor, Tensor]:
        """Always the same ones, of lines that training never sees."""
        return self._drawn(self._test, size, torch.Generator().manual_seed(1))

    def _drawn(self, streams: list[Tensor], size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        classes = torch.randint(len(MODULES), (size,), generator=generator)
        places = torch.rand(size, generator=generator)
        rows = []
        for chosen, place in zip(classes.tolist(), places.tolist(), strict=True):
            start = int(place * (len(streams[chosen]) - self.length))
            rows.append(streams[chosen][start : start + self.length])
        return torch.stack(rows), classes


def _streams(name: str) -> tuple[Tensor, Tensor]:
    """Tokens of the lines for training, and of those for tests."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    lines = Path(spec.origin).read_text(encoding="utf-8").splitlines()
    parts: tuple[list[int], list[int]] = ([], [])
    for number, line in enumerate(lines):
        tokens = parts[(number // BLOCK) % 4 == 3]
        tokens.extend(zlib.crc32(word.encode()) % VOCABULARY for word in re.findall(r"\w+|[^\w\s]", line))
    return torch.tensor(parts[0]), torch.tensor(parts[1])


# The model --------------------------------------------------------------------------------------------------


@dataclass
class Output:
    logits: Tensor
    hidden: list[Tensor]
    """[batch, length, hidden] behind the embeddings and behind each layer."""
    scores: list[Tensor]
    """[batch, heads, length, length] of each layer's attention, before the softmax."""


class SelfAttention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.num_attention_heads, self.all_head_size = sizes.heads, sizes.hidden
        self.query, self.key, self.value = (nn.Linear(sizes.hidden, sizes.hidden) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (
            each(x).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        return (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(-2), scores


class Residual(nn.Module):
    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(inputs, hidden), nn.LayerNorm(hidden)

    def forward(self, inner: Tensor, x: Tensor) -> Tensor:
        return self.LayerNorm(x + self.dense(inner))


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.self = SelfAttention(sizes)
        self.output = Residual(sizes.hidden, sizes.hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mixed, scores = self.self(x)
        return self.output(mixed, x), scores


class Intermediate(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.dense = nn.Linear(sizes.hidden, sizes.inner)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.dense(x))


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention, self.intermediate = Attention(sizes), Intermediate(sizes)
        self.output = Residual(sizes.inner, sizes.hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, scores = self.attention(x)
        return self.output(self.intermediate(x), x), scores


class Embeddings(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, sizes.hidden)
        self.position_embeddings = nn.Embedding(sizes.length, sizes.hidden)
        self.LayerNorm = nn.LayerNorm(sizes.hidden)
        for table in (self.word_embeddings, self.position_embeddings):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.LayerNorm(self.word_embeddings(tokens) + self.position_embeddings(places))


class Classifier(nn.Module):
    """Modules are named as BERT's."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embeddings = Embeddings(sizes)
        self.layer = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.classifier = nn.Linear(sizes.hidden, len(MODULES))

    def forward(self, tokens: Tensor) -> Output:
        hidden, scores = [self.embeddings(tokens)], []
        for layer in self.layer:
            x, of_layer = layer(hidden[-1])
            hidden.append(x)
            scores.append(of_layer)
        return Output(self.classifier(hidden[-1].mean(dim=1)), hidden, scores)


# Training and measuring -------------------------------------------------------------------------------------


def train(
    engine: Any, data: Snippets, steps: int, batch: int, loss_of: Callable[[Output, Tensor, Tensor], Tensor]
) -> None:
    """``loss_of``: of the output, the tokens and the classes."""
    generator = torch.Generator().manual_seed(0)
    engine.train()
    for _ in range(steps):
        tokens, classes = data.train(batch, generator)
        engine.backward(loss_of(engine(tokens), tokens, classes))
        engine.step()


def from_labels(output: Output, tokens: Tensor, classes: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits, classes)


def student_of(
    teacher: Classifier,
    sizes: Sizes,
    config: dict[str, Any],
    data: Snippets,
    steps: int,
    batch: int,
    packed: bool = True,
) -> Any:
    """A student in the teacher's shape, or with the layers that the config chooses, which has learned from the teacher:
    its logits, its hidden states and its attention, of the layers that stand for each other. It is clean.

    It starts as the teacher is.
    """
    student = Classifier(sizes)
    student.load_state_dict(teacher.state_dict())
    student = init_compression(student, config, teacher_model=teacher)
    reduction = config["compression_training"].get("layer_reduction", {})
    chosen = reduction.get("teacher_layer", range(sizes.layers))
    engine, *_ = deepspeed.initialize(model=student, config=config)

    def from_teacher(output: Output, tokens: Tensor, classes: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(tokens)
        loss = functional.kl_div(
            output.logits.log_softmax(-1),
            wanted.logits.log_softmax(-1),
            reduction="batchmean",
            log_target=True,
        )
        loss = loss + functional.mse_loss(output.hidden[0], wanted.hidden[0])
        for mine, other in enumerate(chosen):
            loss = loss + functional.mse_loss(output.hidden[mine + 1], wanted.hidden[other + 1])
            loss = loss + functional.mse_loss(output.scores[mine], wanted.scores[other])
        return loss

    train(engine, data, steps, batch, from_teacher)
    return redundancy_clean(engine, config, packed=packed).module


def trained_teacher(sizes: Sizes, data: Snippets, steps: int, batch: int, lr: float = 1e-3) -> Classifier:
    torch.manual_seed(0)
    teacher = Classifier(sizes)
    engine, *_ = deepspeed.initialize(model=teacher, config=settings(steps, lr))
    train(engine, data, steps, batch, from_labels)
    engine.destroy()
    return teacher.eval().requires_grad_(False)


@torch.no_grad()
def accuracy(model: nn.Module, data: Snippets, size: int = 2000) -> float:
    model.eval()
    tokens, classes = data.test(size)
    found = torch.cat([model(part).logits.argmax(dim=-1) for part in tokens.split(250)])
    return (found == classes).float().mean().item()


def saved(model: nn.Module, path: Path) -> int:
    """Bytes of the file."""
    torch.save(model.state_dict(), path)
    return path.stat().st_size


def settings(steps: int, lr: float, **more: Any) -> dict[str, Any]:
    """A config: the learning rate rises, and falls to zero."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_max_lr": lr,
                "warmup_num_steps": max(steps // 10, 1),
                "total_num_steps": steps + 1,
            },
        },
        **more,
    }


class Table:
    """Quality against size, line by line."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []
        self._began = time.perf_counter()
        print(f"{'model':44} accuracy  of teacher       bytes   smaller  seconds", flush=True)

    def add(self, name: str, correct: float, size: int) -> None:
        self.rows.append((name, correct, size))
        teacher = self.rows[0]
        print(
            f"{name:44} {correct:8.3f} {correct / teacher[1]:11.3f} {size:11,d} {teacher[2] / size:8.1f}x "
            f"{time.perf_counter() - self._began:8.0f}",
            flush=True,
        )
