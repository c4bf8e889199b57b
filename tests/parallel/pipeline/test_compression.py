"""Compressed stages of a pipeline against one process that has all layers: losses, bits, masks and clean models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.compression import init_compression, redundancy_clean
from deepspeed.compression.scheduler import compression_scheduler
from deepspeed.compression.techniques import Compressible
from deepspeed.config.sections.compression import get_compression_config
from deepspeed.parallel.pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.compression.models import HEADS_HALF, HIDDEN, SNIP, Layer, config, technique
from tests.parallel.pipeline.test_engine import head, loss_of, set_weights
from tests.pool import distributed

TOKENS, LENGTH, MICRO, COUNT, STEPS = 32, 6, 2, 2, 6
WEIGHTS = technique(
    "weight_quantization",
    ["attention.self", "intermediate", "words"],
    {"start_bits": 8, "target_bits": 4, "quantization_period": 2},
    quantize_weight_in_forward=True,
    quantize_groups=4,
)
ROWS = technique(
    "row_pruning", ["intermediate.dense"], {"dense_ratio": 0.5}, [[r"\d+\.output\.dense"]], method="topk"
)


def layers() -> list[Any]:
    def words(**more: Any) -> TiedLayerSpec:
        return TiedLayerSpec("words", nn.Embedding, TOKENS, HIDDEN, **more)

    return [words(), *[LayerSpec(Layer) for _ in range(3)], words(forward_fn=head)]


def section_of(stage: int = 0, ranges: str = "dynamic", **more: Any) -> dict[str, Any]:
    inputs = technique(
        "activation_quantization",
        ["attention", r"\d\.intermediate", r"\d\.output"],
        {"bits": 8},
        quantization_type="asymmetric",
        range_calibration=ranges,
    )
    return config(
        WEIGHTS,
        inputs,
        SNIP,
        ROWS,
        HEADS_HALF,
        **settings(stage, **more),
    )


def settings(stage: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": COUNT,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        **more,
    }


def batches(replica: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """From step number ``first`` on."""
    number = first * COUNT
    while True:
        source = torch.Generator().manual_seed(1000 * replica + number)
        tokens = torch.randint(TOKENS, (MICRO, LENGTH + 1), generator=source)
        yield tokens[:, :-1], tokens[:, 1:]
        number += 1


class Whole(nn.Module):
    """All layers in one module, under the names that they have in a pipeline."""

    def __init__(self, specs: list[Any]) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        self.calls: list[tuple[str, Any]] = []
        for index, spec in enumerate(specs):
            if isinstance(spec, TiedLayerSpec):
                if spec.key not in self.tied_modules:
                    self.tied_modules[spec.key] = spec.build()
                self.calls.append((f"tied_modules.{spec.key}", spec.forward_fn))
            elif isinstance(spec, LayerSpec):
                self.add_module(str(index), spec.build())
                self.calls.append((str(index), None))
            else:
                self.calls.append(("", spec))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for name, function in self.calls:
            module: Any = self.get_submodule(name)
            x = function(x) if not name else module(x) if function is None else function(module, x)
        return loss_of(x, labels)


def prepared(model: Any, section: dict[str, Any]) -> Any:
    set_weights(model)
    torch.manual_seed(7)
    return init_compression(model, section)


def alone(
    section: dict[str, Any], replicas: int = 1, specs: list[Any] | None = None
) -> tuple[list[float], Any]:
    """Losses and model of one process that has all replicas' batches, in plain PyTorch."""
    model = prepared(Whole(specs or layers()), section)
    scheduler = compression_scheduler(model, get_compression_config(section))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data, losses = [batches(replica) for replica in range(replicas)], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        parts = [model(*next(own)) for own in data for _ in range(COUNT)]
        loss = torch.stack(parts).mean()
        losses.append(loss.item())
        loss.backward()
        for pruner in vars(model).get("pruners", []):
            pruner.on_before_optimizer_step()
        optimizer.step()
        for pruner in vars(model).get("pruners", []):
            pruner.on_after_optimizer_step()
        scheduler.step()
    return losses, model


def pipeline(section: dict[str, Any], specs: list[Any] | None = None, stages: int = 2, **more: Any) -> Any:
    module = PipelineModule(
        specs or layers(), num_stages=stages, loss_fn=loss_of, partition_method="uniform", **more
    )
    engine, *_ = deepspeed.initialize(model=prepared(module, section), config=section)
    return engine


def trained(engine: Any, first: int, last: int) -> list[float]:
    data = batches(engine.grid.get_data_parallel_id(), first)
    return [engine.train_batch(data).item() for _ in range(first, last)]


def check_masks(engine: Any, plain: Any) -> None:
    theirs = {name: buffer for name, buffer in plain.named_buffers() if name.endswith("mask")}
    own = {name: buffer for name, buffer in engine.module.named_buffers() if name.endswith("mask")}
    assert own and own.keys() <= theirs.keys()
    for name, mask in own.items():
        assert torch.equal(mask, theirs[name]), name
    assert 0 < sum(int(mask.sum()) for mask in own.values()) < sum(mask.numel() for mask in own.values())


def bits(model: nn.Module) -> dict[str, int]:
    return {
        name: each.weight_quantize_bits
        for name, each in model.named_modules()
        if isinstance(each, Compressible) and each.weight_bits is not None
    }


def check_run(stage: int, ranges: str, folder: Path, **more: Any) -> None:
    """Trained as one process does, and resumed in the middle of the schedule."""
    chunks = {name: more.pop(name) for name in ("chunks", "zigzag") if name in more}
    section = section_of(stage, ranges, **more)
    replicas = dist.get_world_size() // 2
    expected, plain = alone(section, replicas)
    engine = pipeline(section, **chunks)
    torch.testing.assert_close(trained(engine, 0, 4), expected[:4], rtol=1e-5, atol=1e-6)
    assert set(bits(engine.module).values()) == {6}
    engine.save_checkpoint(str(folder))
    dist.barrier()
    resumed = pipeline(section, **chunks)
    resumed.load_checkpoint(str(folder))
    assert set(bits(resumed.module).values()) == {6}
    losses = trained(resumed, 4, STEPS)
    torch.testing.assert_close(losses, expected[4:], rtol=1e-5, atol=1e-6)
    assert losses == trained(engine, 4, STEPS)
    check_masks(resumed, plain)
    assert bits(resumed.module).items() <= bits(plain).items()
    check_clean(resumed, plain, section)
    engine.destroy()


def check_clean(engine: Any, plain: Any, section: dict[str, Any]) -> None:
    """Each stage becomes the part of the clean whole."""
    redundancy_clean(plain, section)
    redundancy_clean(engine, section)
    assert not any(isinstance(each, Compressible) for each in engine.module.modules())
    theirs, own = plain.state_dict(), engine.module.state_dict()
    assert own
    compare(own, theirs)
    assert any(
        name.endswith("intermediate.dense.weight") and value.shape[0] == 12 for name, value in own.items()
    )


def compare(own: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, value in own.items():
        if "key.bias" in name:
            continue  # softmax does not depend on it: Adam follows the noise of a gradient that is zero
        torch.testing.assert_close(
            value, theirs[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("stage", "ranges", "more"),
    [
        (0, "static", {}),
        (2, "dynamic", {"pipeline": {"schedule": "zero-bubble"}}),
        (3, "dynamic", {}),
    ],
)
def test_two_stages(stage: int, ranges: str, more: dict[str, Any], tmp_path: Path) -> None:
    check_run(stage, ranges, tmp_path, **more)


@distributed(world_size=4)
def test_two_stages_of_two_replicas(tmp_path: Path) -> None:
    check_run(1, "dynamic", tmp_path)


@pytest.mark.slow
@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 1])
def test_chunks(stage: int, tmp_path: Path) -> None:
    check_run(stage, "dynamic", tmp_path, chunks=2, pipeline={"schedule": "interleaved"})


@distributed(world_size=2)
def test_a_checkpoint_of_stages_becomes_a_clean_whole_model(tmp_path: Path) -> None:
    """By an engine of the whole model in use, and without one."""
    section = section_of(1, "static")
    expected, plain = alone(section)
    engine = pipeline(section)
    trained(engine, 0, 4)
    engine.save_checkpoint(str(tmp_path / "middle"))
    trained(engine, 4, STEPS)
    engine.save_checkpoint(str(tmp_path / "end"))
    dist.barrier()
    engine.destroy()

    whole, *_ = deepspeed.initialize(model=prepared(Whole(layers()), section), config=section)
    whole.load_checkpoint(str(tmp_path / "middle"))
    data, losses = batches(0, 4), []
    for _ in range(4, STEPS):
        parts = []
        for _ in range(COUNT):
            loss = whole(*next(data))
            whole.backward(loss)
            whole.step()
            parts.append(loss.item())
        losses.append(sum(parts) / COUNT)
    torch.testing.assert_close(losses, expected[4:], rtol=1e-5, atol=1e-6)
    whole.destroy()

    model = init_compression(Whole(layers()), section)
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "end")))
    redundancy_clean(model, section)
    redundancy_clean(plain, section)
    assert model.state_dict().keys() == plain.state_dict().keys()
    compare(model.state_dict(), plain.state_dict())


@distributed(world_size=2)
def test_a_stage_with_nothing_to_compress_takes_part() -> None:
    shared = SNIP["sparse_pruning"]["shared_parameters"]
    group = {"last": {"params": {"dense_ratio": 0.5}, "modules": [r"^3\."]}}
    weights = technique(
        "weight_quantization",
        [r"^3\.intermediate"],
        {"start_bits": 8, "target_bits": 4, "quantization_period": 2},
        quantize_weight_in_forward=True,
    )
    section = config(
        weights, {"sparse_pruning": {"shared_parameters": shared, "different_groups": group}}, **settings(1)
    )
    expected, plain = alone(section)
    engine = pipeline(section)
    torch.testing.assert_close(trained(engine, 0, STEPS), expected, rtol=1e-5, atol=1e-6)
    assert engine.compression_scheduler.training_steps == STEPS
    if engine.stage_id == 1:
        check_masks(engine, plain)
    else:
        assert not any(isinstance(each, Compressible) for each in engine.module.modules())
    redundancy_clean(engine, section)


def parts_of_a_block() -> list[Any]:
    return [
        LayerSpec(nn.Embedding, TOKENS, HIDDEN),
        LayerSpec(nn.Linear, HIDDEN, 24),
        LayerSpec(nn.GELU),
        LayerSpec(nn.Linear, 24, TOKENS),
    ]


@distributed(world_size=2)
def test_related_modules_on_two_stages(tmp_path: Path) -> None:
    """They train; neither can become smaller without the other."""
    rows = technique("row_pruning", ["^1$"], {"dense_ratio": 0.5}, [["^3$"]], method="topk")
    section = config(rows, **settings())
    expected, plain = alone(section, specs=parts_of_a_block())
    engine = pipeline(section, parts_of_a_block())
    torch.testing.assert_close(trained(engine, 0, STEPS), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(
        ValueError, match="1 and the related 3 are on different stages.*load it into the whole model"
    ):
        redundancy_clean(engine, section)
    engine.save_checkpoint(str(tmp_path))
    dist.barrier()
    engine.destroy()
    model = init_compression(Whole(parts_of_a_block()), section)
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(str(tmp_path)))
    redundancy_clean(model, section)
    redundancy_clean(plain, section)
    assert model.get_parameter("3.weight").shape == (TOKENS, 12)
    assert model.state_dict().keys() == plain.state_dict().keys()
    compare(model.state_dict(), plain.state_dict())


def of_images() -> list[Any]:
    return [LayerSpec(nn.Conv2d, 3, 4, 3), LayerSpec(nn.BatchNorm2d, 4)]


def of_layers() -> list[Any]:
    return layers()


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("specs", "section", "message"),
    [
        (
            of_images,
            technique("channel_pruning", ["^0$"], {"dense_ratio": 0.5}, [["^1$"]], method="l1"),
            "0 and the related 1 are on different stages.*partition_method",
        ),
        (
            of_layers,
            {
                "layer_reduction": {
                    "enabled": True,
                    "keep_number_layer": 1,
                    "module_name_prefix": "layer",
                    "teacher_layer": [0],
                    "other_module_name": [],
                }
            },
            "before splitting it into pipeline stages",
        ),
    ],
)
def test_refused(specs: Callable[[], list[Any]], section: dict[str, Any], message: str) -> None:
    module = PipelineModule(specs(), num_stages=2, loss_fn=loss_of, partition_method="uniform")
    with pytest.raises(ValueError, match=message):
        init_compression(module, config(section), teacher_model=nn.Linear(1, 1))


@distributed(world_size=2)
def test_the_same_noise_on_every_stage() -> None:
    """Weights that are rounded at random after the update: what an engine of the whole model has, bit for bit. The
    tied one as well, on both of its stages."""
    written = technique(
        "weight_quantization",
        ["attention.self", "words"],
        {"start_bits": 6, "target_bits": 4, "quantization_period": 1},
        quantize_groups=2,
        rounding="stochastic",
    )
    still = {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "bf16": {"enabled": True}}
    section = config(written, **settings(**still))
    engine = pipeline(section)
    trained(engine, 0, 2)
    whole, *_ = deepspeed.initialize(model=prepared(Whole(layers()), section), config=section)
    for step in range(2):
        data = batches(0, step)
        for _ in range(COUNT):
            whole.backward(whole(*next(data)))
            whole.step()
    theirs = dict(whole.module.named_parameters())
    changed = 0
    for name, param in engine.module.named_parameters():
        assert torch.equal(param, theirs[name]), name
        changed += param.unique().numel() <= 2 * 16 and param.numel() > 2 * 16
    assert changed >= 4
    engine.destroy()
    whole.destroy()
