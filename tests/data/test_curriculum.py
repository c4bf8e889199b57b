"""Curriculum by sequence length: schedules against their formulas, and what models get of a batch."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.data.curriculum_scheduler import CurriculumScheduler
from deepspeed.parallel.pipeline import LayerSpec, PipelineModule
from deepspeed.transforms import TransformError
from deepspeed.transforms.truncation import cut, takes_length
from tests.pool import distributed

LINEAR = {
    "min_difficulty": 2,
    "max_difficulty": 10,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 2},
}
LENGTHS = [2, 4, 4, 6, 6, 8, 8, 10, 10, 10]


def schedule(kind: str, lowest: int, highest: int, **details: Any) -> CurriculumScheduler:
    return CurriculumScheduler(
        {
            "min_difficulty": lowest,
            "max_difficulty": highest,
            "schedule_type": kind,
            "schedule_config": details,
        }
    )


def test_linear() -> None:
    scheduler = CurriculumScheduler(LINEAR)
    assert scheduler.get_current_difficulty() == 2
    assert [scheduler.update_difficulty(step) for step in range(1, 11)] == LENGTHS
    assert scheduler.update_difficulty(1) == 10  # it stays


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_root_lies_under_the_curve_by_less_than_a_step(degree: int) -> None:
    scheduler = schedule(
        "fixed_root", 8, 1024, total_curriculum_step=777, difficulty_step=8, root_degree=degree
    )
    for step in range(1, 1000):
        curve = 8 + 1016 * (step / 777) ** (1 / degree)
        value = scheduler.get_difficulty(step)
        assert value % 8 == 0 and value <= 1024
        assert value == 1024 if step >= 777 else curve - 9 < value <= curve + 1e-9
    assert (
        schedule(
            "fixed_root", 0, 100, total_curriculum_step=100, difficulty_step=1, root_degree=2
        ).get_difficulty(25)
        == 50
    )


@pytest.mark.parametrize(("lowest", "unit", "first"), [(16, 7, 21), (3, 7, 7), (0, 5, 0), (-9, 4, -8)])
def test_no_length_is_below_the_minimum(lowest: int, unit: int, first: int) -> None:
    """The values are those of release 0.19."""
    scheduler = schedule("fixed_linear", lowest, 100, total_curriculum_step=1000, difficulty_step=unit)
    assert [scheduler.get_difficulty(step) for step in (0, 1, 20)] == [first] * 3


def test_discrete() -> None:
    scheduler = schedule("fixed_discrete", 1, 5, difficulty=[1, 2, 3, 4, 5], max_step=[2, 4, 6, 8])
    assert [scheduler.get_difficulty(step) for step in range(1, 11)] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_custom() -> None:
    scheduler = CurriculumScheduler({"min_difficulty": 2, "max_difficulty": 10, "schedule_type": "custom"})
    with pytest.raises(RuntimeError, match="set_custom_curriculum_learning_schedule"):
        scheduler.update_difficulty(1)
    scheduler.set_custom_get_difficulty(lambda step: 3 * step)
    assert scheduler.update_difficulty(2) == scheduler.get_current_difficulty() == 6


def test_state() -> None:
    scheduler, other = CurriculumScheduler(LINEAR), CurriculumScheduler(LINEAR)
    scheduler.update_difficulty(4)
    other.set_state(scheduler.get_state())
    assert other.get_current_difficulty() == 6
    other.set_current_difficulty(8)
    assert other.get_state()["current_difficulty"] == 8


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, "'min_difficulty'"),
        ({**LINEAR, "schedule_type": "cubic"}, "'cubic'.*fixed_root"),
        ({**LINEAR, "schedule_config": {"difficulty_step": 2}}, "schedule_config.total_curriculum_step"),
        ({**LINEAR, "schedule_type": "fixed_root"}, "schedule_config.root_degree"),
        (
            {
                **LINEAR,
                "schedule_type": "fixed_discrete",
                "schedule_config": {"difficulty": [1], "max_step": [1]},
            },
            "1 entries",
        ),
    ],
)
def test_what_a_schedule_needs(config: dict[str, Any], told: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=told):
        CurriculumScheduler(config)


# What is cut ------------------------------------------------------------------------------------------------


def test_every_sequence_of_a_batch_is_cut() -> None:
    tokens = torch.arange(24).view(3, 8)
    batch = {
        "labels": tokens + 1,
        "classes": torch.arange(3),
        "mask": torch.ones(3, 1, 8, 8, dtype=torch.bool),
        "keys": torch.ones(3, 1, 1, 8),
        "causal": torch.ones(8, 8).tril(),
        "positions": torch.arange(8),
        "axes": torch.zeros(2, 3, 8, dtype=torch.long),
        "embedded": torch.zeros(3, 8, 4),
        "other": torch.zeros(3, 5),
        "input_ids": tokens,
        "name": "text",
    }
    short = cut(batch, 4)
    shapes = {key: tuple(value.shape) for key, value in short.items() if isinstance(value, Tensor)}
    assert shapes == {
        "labels": (3, 4),
        "classes": (3,),
        "mask": (3, 1, 4, 4),
        "keys": (3, 1, 1, 4),
        "causal": (4, 4),
        "positions": (4,),
        "axes": (2, 3, 4),
        "embedded": (3, 4, 4),
        "other": (3, 5),
        "input_ids": (3, 4),
    }
    assert torch.equal(short["input_ids"], tokens[:, :4])
    assert short["name"] == "text"
    assert cut(batch, 8) is batch and cut(batch, 9) is batch


def test_tokens_are_found_by_kind_where_they_have_no_name() -> None:
    x = torch.zeros(2, 6, 3)
    (first,), rest = cut(((x,), {"labels": torch.zeros(2, 6, dtype=torch.long)}), 4)
    assert first.shape == (2, 4, 3) and rest["labels"].shape == (2, 4)
    with pytest.raises(ValueError, match="curriculum_seqlen"):
        cut((torch.zeros(2, 6),), 4)


# The engine -------------------------------------------------------------------------------------------------

VOCABULARY, WIDTH = 12, 8


class Told(nn.Module):
    """As in scripts written for the documented argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return self.linear(x).sum(), kwargs.get("curriculum_seqlen")


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.seen: list[int] = []

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self.seen.append(tokens.shape[1])
        return nn.functional.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), labels.flatten())


def settings(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "curriculum_learning": {"enabled": True, "curriculum_type": "seqlen", **LINEAR},
        **more,
    }


def pair(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


@distributed(world_size=1)
def test_a_model_that_takes_the_length_is_told() -> None:
    engine, *_ = deepspeed.initialize(model=Told(), config=settings())
    assert takes_length(engine.module)
    told = []
    for _ in range(10):
        loss, length = engine(torch.ones(2, 4))
        engine.backward(loss)
        engine.step()
        told.append(length)
    assert told == LENGTHS
    assert engine.curriculum_scheduler_legacy.get_current_difficulty() == 10
    engine.eval()
    assert engine(torch.ones(2, 4))[1] is None


@distributed(world_size=1)
def test_a_schedule_of_the_script(tmp_path: Path) -> None:
    config = settings()
    config["curriculum_learning"] |= {"schedule_type": "custom"}
    del config["curriculum_learning"]["schedule_config"]
    told = []
    for resumed in (False, True):
        engine, *_ = deepspeed.initialize(model=Told(), config=config)
        if resumed:
            engine.load_checkpoint(str(tmp_path))
        with pytest.raises(RuntimeError, match="set_custom_get_difficulty"):
            engine(torch.ones(2, 4))
        engine.curriculum_scheduler_legacy.set_custom_get_difficulty(lambda step: 2 + step // 2)
        for _ in range(3):
            loss, length = engine(torch.ones(2, 4))
            engine.backward(loss)
            engine.step()
            told.append(length)
        engine.save_checkpoint(str(tmp_path))
        engine.destroy()
    assert told == [2 + step // 2 for step in range(1, 7)]


@distributed(world_size=1)
def test_a_model_that_does_not_gets_shorter_sequences(tmp_path: Path) -> None:
    engine, *_ = deepspeed.initialize(model=Plain(), config=settings(gradient_accumulation_steps=2))
    oracle = Plain()
    optimizer = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for step in range(4):
        for micro in range(2):
            tokens, labels = pair(2 * step + micro)
            loss = engine(tokens, labels)
            engine.backward(loss)
            engine.step()
            n = LENGTHS[step]
            (oracle(tokens[:, :n], labels[:, :n]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(engine.module.head.weight, oracle.head.weight, rtol=1e-5, atol=1e-7)
    assert engine.module.seen == [2, 2, 4, 4, 4, 4, 6, 6]
    engine.save_checkpoint(tmp_path)
    engine.eval()
    engine(*pair(0))
    engine.train()
    again, *_ = deepspeed.initialize(model=Plain(), config=settings(gradient_accumulation_steps=2))
    again.load_checkpoint(tmp_path)
    again(*pair(0))
    assert engine.module.seen[-1] == 10 and again.module.seen == [6]
    assert again.curriculum_scheduler_legacy.get_current_difficulty() == 6


@distributed(world_size=1)
def test_a_batch_without_a_sequence_is_refused_by_name() -> None:
    class Rows(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x).sum()

    engine, *_ = deepspeed.initialize(model=Rows(4, 1), config=settings())
    with pytest.raises(TransformError, match="'curriculum'.*found no sequence"):
        engine(torch.ones(2, 4))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@distributed(world_size=2)
def test_the_stages_of_a_pipeline_cut_the_same_batch() -> None:
    torch.manual_seed(0)
    layers = [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), LayerSpec(nn.Linear, WIDTH, VOCABULARY)]
    model = PipelineModule(layers=layers, num_stages=2, loss_fn=loss_of, seed_layers=True, base_seed=3)
    engine, *_ = deepspeed.initialize(model=model, config=settings())
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    data = (pair(step) for step in itertools.count())
    losses = [float(engine.train_batch(data_iter=data)) for _ in range(5)]
    assert all(loss == loss for loss in losses)
    assert seen == LENGTHS[:5]
