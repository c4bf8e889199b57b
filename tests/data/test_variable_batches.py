"""Training with batches by tokens: the same weights as plain PyTorch with each batch in one piece."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset

import deepspeed
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.data.data_sampling.variable_batch_size_and_lr import (
    VariableBatchSizeLR,
    batch_by_seqlens,
    get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed,
    scale_lr,
)
from deepspeed.parallel.pipeline.module import PipelineModule
from tests.pool import distributed

SIZES = [1 + (i * 37) % 11 for i in range(120)]
MAX_TOKENS, PACKS, RATE, SEED = 14, 8, 0.05, 11


class Documents(Dataset[Any]):
    """Sample i: as many tokens from 1 to 19 as ``SIZES[i]``."""

    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(SIZES[index]) * (index + 3) % 19 + 1


def padded(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


class Model(nn.Module):
    """The mean loss of a micro-batch: over its samples, or over its tokens (but the first of each sample)."""

    def __init__(self, mean_over: str = "samples") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mean_over = mean_over
        self.table, self.head = nn.Embedding(20, 4), nn.Linear(4, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        losses = (self.head(self.table(tokens))[..., 0] - tokens / 10).pow(2)
        counted = tokens > 0
        if self.mean_over == "predictions":
            losses, counted = losses[:, 1:], counted[:, 1:]
        losses = losses * counted
        if self.mean_over != "samples":
            return losses.sum() / counted.sum()
        return (losses.sum(1) / counted.sum(1)).mean()


def settings(stage: int = 0, **dynamic: Any) -> dict[str, Any]:
    return {
        "train_batch_size": PACKS,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "data_efficiency": {
            "enabled": True,
            "seed": SEED,
            "data_sampling": {
                "enabled": True,
                "dynamic_batching": {
                    "enabled": True,
                    "max_tokens": MAX_TOKENS,
                    "sequence_picking_order": "random",
                    **dynamic,
                },
            },
        },
    }


def start(stage: int = 0, mean_over: str = "samples", **dynamic: Any) -> Any:
    return deepspeed.initialize(
        model=Model(mean_over),
        config=settings(stage, loss_weighting=mean_over, **dynamic),
        training_data=Documents(),
        collate_fn=padded,
    )


def train(engine: Any, stream: Any, micro_batches: int) -> None:
    for _ in range(micro_batches):
        engine.backward(engine(next(stream)))
        engine.step()


def weights_of(engine: Any) -> list[Tensor]:
    """On rank 0; elsewhere perhaps nothing."""
    state = engine._consolidated_16bit_state_dict() or {}
    return [value.float().cpu() for value in state.values()]


def plain(batches: int, mean_over: str = "samples", method: str = "linear") -> list[Tensor]:
    """Every batch at once."""
    model, documents = Model(mean_over), Documents()
    packs, sizes, _ = batch_by_seqlens(
        SIZES, MAX_TOKENS, sequence_picking_order="random", effective_batch_size=PACKS, seed=SEED
    )
    for number in range(batches):
        place = number % len(sizes)
        samples = [documents[n] for batch, pack in packs if batch == place for n in pack]
        rate = scale_lr(PACKS, sizes[place], RATE, method)
        gradients = torch.autograd.grad(model(padded(samples)), list(model.parameters()))
        with torch.no_grad():
            for param, gradient in zip(model.parameters(), gradients, strict=True):
                param -= rate * gradient
    return [param.detach() for param in model.parameters()]


def check(engine: Any, wanted: list[Tensor]) -> None:
    for found, expected in zip(weights_of(engine), wanted, strict=False):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("stage", "mean_over", "method"),
    [(0, "samples", "linear"), (1, "tokens", "sqrt"), (2, "predictions", "none"), (3, "samples", "linear")],
)
@distributed(world_size=2)
def test_weights_are_those_of_whole_batches(stage: int, mean_over: str, method: str) -> None:
    engine, _, loader, scheduler = start(stage, mean_over, lr_scaling_method=method)
    assert engine.gradient_accumulation_steps() == 2 and scheduler is engine.lr_scheduler
    assert len({batch for batch, _ in loader.dataset.packs}) * 2 == len(loader)
    for _ in range(2):  # epochs, of more than three batches
        train(engine, iter(loader), len(loader))
    assert len(loader) > 6
    check(engine, plain(len(loader), mean_over, method))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_a_run_resumes_within_a_batch(stage: int, tmp_path: Path) -> None:
    engine, _, loader, _ = start(stage)
    stream = iter(loader)
    train(engine, stream, 5)
    engine.save_checkpoint(tmp_path)
    train(engine, stream, len(loader) - 5)
    check(engine, plain(len(loader) // 2))
    again, _, loader, scheduler = start(stage)
    again.load_checkpoint(tmp_path)
    assert scheduler.last_epoch == 2
    stream = iter(loader)
    train(again, stream, len(loader) - 5)
    for found, wanted in zip(weights_of(again), weights_of(engine), strict=True):
        assert torch.equal(found, wanted)
    with pytest.raises(StopIteration):
        next(stream)


@distributed(world_size=1)
def test_micro_batches_may_be_read_ahead_and_lost() -> None:
    engine, _, loader, _ = start()
    stream = iter(loader)
    for _ in range(2):  # batches of 4 micro-batches
        for micro_batch in [next(stream) for _ in range(4)]:
            engine.backward(engine(micro_batch))
            engine.step()
    check(engine, plain(2))
    assert engine.loss_weight() == 1.0  # nothing is left of what was read: other data count as they are
    with pytest.raises(IndexError):
        engine(next(stream) + 100)
    assert engine.loss_weight() == 1.0
    train(engine, iter(loader), 4)
    assert engine.loss_weight() == 1.0


@distributed(world_size=1)
def test_an_update_that_is_skipped_leaves_its_batch_behind() -> None:
    config = settings() | {"fp16": {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}}
    engine, _, loader, scheduler = deepspeed.initialize(
        model=Model(), config=config, training_data=Documents(), collate_fn=padded
    )
    stream, sizes = iter(loader), loader.batch_sizes
    for number in range(3):
        assert scheduler.get_lr() == pytest.approx([scale_lr(PACKS, sizes[number], RATE)])
        train(engine, stream, 4)
    assert engine.skipped_steps > 0 and scheduler.last_epoch == 3


# As a script does ------------------------------------------------------------------------------------------------


class Sequences(Dataset[Any]):
    """Vectors of ones, and how many they are."""

    def __init__(self) -> None:
        numbers = random.Random(0)
        self.rows = [torch.ones(numbers.randrange(5, 15), 3) for _ in range(240)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index], len(self.rows[index])

    def collate(self, samples: list[Any]) -> tuple[Tensor, Tensor]:
        rows, sizes = zip(*samples, strict=True)
        return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor(sizes, dtype=torch.float)

    def pad(self, sample: tuple[Tensor, int], size: int) -> tuple[Tensor, int]:
        return functional.pad(sample[0], (0, 0, 0, size - len(sample[0]))), sample[1]

    def lengths(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return batch[0][..., 0].sum(1).to(torch.int64)


def script_settings(folder: Path) -> dict[str, Any]:
    config = settings(
        metrics_path=str(folder), max_tokens=40, max_batch_size=10, sequence_picking_order="seqlen"
    )
    warmup = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.005, "warmup_num_steps": 100}
    return config | {"scheduler": {"type": "WarmupLR", "params": warmup}}


@pytest.mark.parametrize("stages", [0, 2])
@distributed(world_size=2)
def test_a_script(stages: int, tmp_path: Path) -> None:
    data = Sequences()
    layers = [nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1), total]
    model: nn.Module = nn.Sequential(*layers[:3])
    if stages:
        model = PipelineModule(layers=layers, num_stages=stages, loss_fn=functional.mse_loss)
    engine, *_ = deepspeed.initialize(model=model, config=script_settings(tmp_path))
    chosen = [n for n, (_, size) in enumerate(data) if 7 < size < 14]
    loader, scheduler, _ = get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
        dataset=data,
        dataset_filter_ids=chosen,
        engine=engine,
        dataloader_collate_fn=data.collate,
        sample_padding_fn=data.pad,
        batch_seqlens_fn=data.lengths,
    )
    assert (tmp_path / "seqlen" / "seqlen_sample_to_metric.idx").exists()
    assert engine.lr_scheduler is scheduler and engine.training_dataloader is loader
    assert isinstance(scheduler, VariableBatchSizeLR) and engine.data_parallel_group.size() == (
        1 if stages else 2
    )
    steps = engine.gradient_accumulation_steps()
    shapes, losses = set(), []
    for _ in range(2):
        stream = iter(loader)
        scheduler.step(0)
        for number in range(len(loader) // steps):
            wanted = scale_lr(PACKS, loader.batch_sizes[number], scheduler.unscaled_lrs[0])
            assert scheduler.get_lr() == engine.get_lr() == pytest.approx([wanted])
            if stages:
                engine.reset_activation_shape()
                losses.append(float(engine.train_batch(data_iter=stream)))
                continue
            for _ in range(steps):
                rows, sizes = next(stream)
                shapes.add(rows.shape)
                loss = functional.mse_loss(engine(rows).sum((1, 2)), sizes)
                engine.backward(loss)
                engine.step()
            losses.append(float(loss.detach()))
    assert len(losses) > 4 and all(loss == loss for loss in losses)
    if not stages:
        assert len(shapes) > 2
    else:  # every micro-batch of a batch has one shape
        loader._start_epoch(0)
        found = [tuple(rows.shape) for rows, _ in loader]
        assert all(len(set(found[i : i + steps])) == 1 for i in range(0, len(found), steps))


@distributed(world_size=2)
def test_a_pipeline_reads_training_data() -> None:
    """The losses are those of plain PyTorch with whole batches."""
    data, rate = Sequences(), 1e-3
    torch.manual_seed(0)
    layers = [nn.Linear(3, 8, bias=False), nn.ReLU(), nn.Linear(8, 1, bias=False)]  # nothing comes of padding
    plain_model = copy.deepcopy(nn.Sequential(*layers))
    config = settings(max_tokens=40) | {"optimizer": {"type": "SGD", "params": {"lr": rate}}}
    engine, _, loader, _ = deepspeed.initialize(
        model=PipelineModule(layers=[*layers, total], num_stages=2, loss_fn=functional.mse_loss),
        config=config,
        training_data=data,
        collate_fn=data.collate,
    )
    for number in range(3):
        samples = [data[n] for batch, pack in loader.dataset.packs if batch == number for n in pack]
        assert len(samples) == loader.batch_sizes[number]
        rows, sizes = data.collate(samples)
        loss = functional.mse_loss(total(plain_model(rows)), sizes)
        gradients = torch.autograd.grad(loss, list(plain_model.parameters()))
        assert float(engine.train_batch()) == pytest.approx(float(loss.detach()), rel=1e-4)
        with torch.no_grad():
            for param, gradient in zip(plain_model.parameters(), gradients, strict=True):
                param -= scale_lr(PACKS, len(samples), rate) * gradient


def total(rows: Tensor) -> Tensor:
    return rows.sum((1, 2))


@distributed(world_size=1)
def test_another_loader_takes_the_place_of_the_first() -> None:
    engine, _, loader, scheduler = start()
    other, wrapped, arguments = get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
        Documents(), engine, dataloader_collate_fn=padded, dataset_filter_ids=list(range(60))
    )
    assert wrapped is not scheduler and not isinstance(wrapped.base_lr_scheduler, VariableBatchSizeLR)
    assert wrapped.get_lr() == pytest.approx([scale_lr(PACKS, other.batch_sizes[0], RATE)])
    train(engine, iter(other), 4)
    assert not loader.to_train and len(other) < len(loader)
    same = engine.deepspeed_io(**arguments)
    assert [batch.tolist() for batch in same] == [batch.tolist() for batch in other]


@distributed(world_size=1)
def test_what_cannot_be_is_named() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(ValueError, match="needs a map-style data set with a length, not Stream"):
        deepspeed.initialize(model=Model(), config=settings(), training_data=Stream())
    config = settings()
    config["data_efficiency"]["data_sampling"]["curriculum_learning"] = {
        "enabled": True,
        "data_cluster_path": "x",
        "curriculum_metrics": {},
    }
    with pytest.raises(DeepSpeedConfigError, match="both choose the samples"):
        deepspeed.initialize(model=Model(), config=config, training_data=Documents())
    pipeline = PipelineModule(layers=[nn.Linear(1, 1)], num_stages=1, loss_fn=functional.mse_loss)
    with pytest.raises(ValueError, match="loss_weighting='tokens' is not supported with a pipeline"):
        deepspeed.initialize(
            model=pipeline, config=settings(loss_weighting="tokens"), training_data=Documents()
        )
    engine, _, loader, _ = start()
    engine.set_train_batch_size(PACKS // 2)
    stream = iter(loader)
    with pytest.raises(ValueError, match="train_batch_size=4 was set after"):
        train(engine, stream, 1)
