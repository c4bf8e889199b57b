"""Pipelines against one process that runs the same layers: losses, gradients and weights."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import deepspeed
from deepspeed.base.logging import logger
from deepspeed.comm.topology import PipeDataParallelTopology
from deepspeed.engine.pipeline.engine import PipelineEngine
from deepspeed.parallel.pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.zero.tensor_fragment import safe_get_full_fp32_param
from tests.pool import distributed

VOCABULARY, WIDTH, LENGTH, MICRO, COUNT = 12, 8, 5, 2, 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def head(module: nn.Embedding, x: Tensor) -> Tensor:
    return x @ module.weight.T


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def layers(blocks: int = 4, *, tied: bool = False) -> list[Any]:
    body: list[Any] = [LayerSpec(Block, WIDTH) for _ in range(blocks)]
    if tied:
        first: Any = TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH)
        return [first, *body, TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=head)]
    return [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), *body, LayerSpec(nn.Linear, WIDTH, VOCABULARY)]


def batches(replica: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(100 * seed + replica)
    while True:
        tokens = torch.randint(VOCABULARY, (MICRO, LENGTH + 1), generator=source)
        yield tokens[:, :-1], tokens[:, 1:]


def set_weights(module: nn.Module) -> None:
    """The same values under the same names, wherever they are."""
    for name, param in module.named_parameters():
        source = torch.Generator().manual_seed(sum(map(ord, name)) + 7 * len(name))
        param.data.copy_(torch.randn(param.shape, generator=source) * 0.3)


class Plain:
    """The oracle: the same layers in one process, plain PyTorch."""

    def __init__(self, specs: list[Any], *, lr: float, clip: float = 0.0) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.functions: list[Any] = []
        for index, spec in enumerate(specs):
            if isinstance(spec, TiedLayerSpec):
                module = self.modules.setdefault(f"tied_modules.{spec.key}", spec.build())
                self.functions.append((module, spec.forward_fn))
            elif isinstance(spec, LayerSpec):
                module = self.modules.setdefault(str(index), spec.build())
                self.functions.append((module, None))
            else:
                self.functions.append((spec, None))
        self.params = {
            f"{key}.{name}": p for key, m in self.modules.items() for name, p in m.named_parameters()
        }
        for name, param in self.params.items():
            source = torch.Generator().manual_seed(sum(map(ord, name)) + 7 * len(name))
            param.data.copy_(torch.randn(param.shape, generator=source) * 0.3)
        self.optimizer = torch.optim.Adam(self.params.values(), lr=lr)
        self.clip = clip
        self.norm = 0.0

    def forward(self, inputs: Any) -> Any:
        for module, function in self.functions:
            inputs = module(inputs) if function is None else function(module, inputs)
        return inputs

    def step(self, data: list[Iterator[Any]], count: int = COUNT) -> float:
        self.optimizer.zero_grad()
        total = 0.0
        for replica in data:
            for _ in range(count):
                inputs, labels = next(replica)
                loss = loss_of(self.forward(inputs), labels)
                (loss / count / len(data)).backward()
                total += loss.item() / count / len(data)
        if self.clip:
            self.norm = nn.utils.clip_grad_norm_(self.params.values(), self.clip).item()
        self.optimizer.step()
        return total


def make_engine(module: PipelineModule, stage: int = 0, clip: float = 0.0, **more: Any) -> PipelineEngine:
    set_weights(module)
    engine = deepspeed.initialize(
        model=module,
        config={
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": COUNT,
            "gradient_clipping": clip,
            "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True, "weight_decay": 0.0}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            **more,
        },
    )[0]
    assert isinstance(engine, PipelineEngine)
    return engine


def compare(engine: PipelineEngine, plain: Plain, *, rtol: float = 1e-5) -> None:
    trained = [(name, param) for name, param in engine.module.named_parameters() if param.requires_grad]
    for name, param in trained:
        own = safe_get_full_fp32_param(param)
        torch.testing.assert_close(
            own, plain.params[name].detach(), rtol=rtol, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def train_both(
    module: PipelineModule, specs: list[Any], *, stage: int, clip: float, steps: int = 3
) -> PipelineEngine:
    engine, plain = make_engine(module, stage, clip), Plain(specs, lr=0.01, clip=clip)
    replicas = engine.dp_world_size
    own, everyone = batches(engine.grid.get_data_parallel_id()), [batches(r) for r in range(replicas)]
    for _ in range(steps):
        expected = plain.step(everyone)
        assert engine.train_batch(own).item() == pytest.approx(expected, rel=1e-5)
        if clip:
            assert engine.get_global_grad_norm() == pytest.approx(plain.norm, rel=1e-5)
    compare(engine, plain)
    assert (engine.global_steps, engine.micro_steps) == (steps, steps * COUNT)
    assert engine._peak_held == min(engine.num_stages - engine.stage_id, COUNT)
    assert engine.get_pipeline_parallel_rank() == engine.stage_id
    assert engine.get_pipeline_parallel_world_size() == engine.num_stages
    return engine


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_two_stages(stage: int) -> None:
    module = PipelineModule(layers(), num_stages=2, loss_fn=loss_of)
    engine = train_both(module, layers(), stage=stage, clip=0.1)
    owned = {int(name.split(".")[0]) for name, _ in module.named_parameters()}
    assert owned == set(range(*module.partitions()[engine.stage_id : engine.stage_id + 2]))
    engine.destroy()


@pytest.mark.parametrize(("stages", "stage"), [(4, 0), (2, 1), (2, 2), (2, 3)])
@distributed(world_size=4)
def test_four_ranks(stages: int, stage: int) -> None:
    module = PipelineModule(layers(), num_stages=stages, loss_fn=loss_of, partition_method="uniform")
    train_both(module, layers(), stage=stage, clip=0.1).destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=4)
def test_a_tied_weight_counts_once(stage: int) -> None:
    specs = layers(tied=True)
    module = PipelineModule(specs, topology=PipeDataParallelTopology(2, 2), loss_fn=loss_of)
    engine = train_both(module, specs, stage=stage, clip=0.1)
    weight = safe_get_full_fp32_param(module.tied_modules["embed"].weight)
    copies = [torch.empty_like(weight) for _ in range(4)]
    dist.all_gather(copies, weight.contiguous())
    assert all(torch.equal(copy, weight) for copy in copies)
    assert len(module.get_tied_weights_and_groups()) == 1
    engine.destroy()


@distributed(world_size=2)
def test_the_same_bits_as_one_rank() -> None:
    """Without a tie every sum has the order that one rank gives it."""
    module = PipelineModule(layers(), num_stages=2, loss_fn=loss_of)
    engine, plain = make_engine(module), Plain(layers(), lr=0.01)
    own, same = batches(0), batches(0)
    for _ in range(3):
        engine.train_batch(own)
        plain.step([same])
    for name, param in module.named_parameters():
        assert torch.equal(param, plain.params[name]), name
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_split_backwards_give_the_same_bits(stage: int) -> None:
    module = PipelineModule(layers(), num_stages=2, loss_fn=loss_of)
    twin = PipelineModule(layers(), num_stages=2, loss_fn=loss_of)
    first = make_engine(module, stage, clip=0.1)
    second = make_engine(twin, stage, clip=0.1, pipeline={"schedule": "zero-bubble"})
    assert len(second._split) >= 4 and second._order(COUNT).split
    own, same = batches(0), batches(0)
    for _ in range(3):
        assert torch.equal(first.train_batch(own), second.train_batch(same))
    for (name, one), two in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(safe_get_full_fp32_param(one), safe_get_full_fp32_param(two)), name
    first.destroy()
    second.destroy()


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": self.linear(x), "mask": x > 0, "note": None, "rest": (x.shape[0], True, torch.arange(3))}


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, given: dict[str, Any]) -> Tensor:
        rows, flag, numbers = given["rest"]
        assert given["note"] is None and flag is True and rows == len(given["x"])
        return self.linear(given["x"]) * given["mask"] + numbers


@distributed(world_size=2)
def test_any_message_of_any_shape() -> None:
    specs = [LayerSpec(First), LayerSpec(Second)]
    module = PipelineModule(specs, num_stages=2, loss_fn=functional.mse_loss, partition_method="uniform")
    engine, plain = make_engine(module), Plain(specs, lr=0.01)

    def shapes() -> Iterator[tuple[Tensor, Tensor]]:
        source = torch.Generator().manual_seed(3)
        for rows in (2, 2, 5, 1, 2, 2, 2, 2):
            yield torch.randn(rows, 3, generator=source), torch.randn(rows, 3, generator=source)

    own, same = shapes(), shapes()
    for _ in range(2):
        engine.train_batch(own)
        plain.optimizer.zero_grad()
        for _ in range(COUNT):
            inputs, labels = next(same)
            (functional.mse_loss(plain.forward(inputs), labels) / COUNT).backward()
        plain.optimizer.step()
    compare(engine, plain)
    if engine._channels[0].outputs is not None:  # described where the shape changed, not every time
        assert (engine._channels[0].outputs.sent, engine._channels[0].outputs.described) == (8, 4)
    engine.destroy()


@distributed(world_size=4)
def test_evaluation_of_several_losses() -> None:
    """Each is the mean over micro-batches and replicas, on the last stage, which alone knows how many there are."""
    module = PipelineModule(layers(), num_stages=2, loss_fn=lambda out, labels: (out.mean(), 10 * out.mean()))
    engine = make_engine(module)
    pairs = [next(batches(0)) for _ in range(COUNT)]
    with torch.no_grad():
        mean = torch.stack([Plain(layers(), lr=0.01).forward(inputs).mean() for inputs, _ in pairs]).mean()
    found = engine.eval_batch(iter(pairs), bcast_loss=False)
    torch.testing.assert_close(found, [mean, 10 * mean] if engine.is_last_stage() else None)
    found = engine.eval_batch(iter(pairs), bcast_loss=False, reduce_output=None)
    assert (found is not None and [len(each) for each in found] == [2] * COUNT) == engine.is_last_stage()


@distributed(world_size=2)
def test_evaluation() -> None:
    module = PipelineModule(layers(), num_stages=2, loss_fn=loss_of)
    engine, plain = make_engine(module), Plain(layers(), lr=0.01)
    with torch.no_grad():
        data = batches(0)
        pairs = [next(data) for _ in range(COUNT)]
        logits = [plain.forward(inputs) for inputs, _ in pairs]
        losses = [loss_of(own, labels) for own, (_, labels) in zip(logits, pairs, strict=True)]
    last = engine.is_last_stage()
    mean = torch.stack(losses).mean()
    torch.testing.assert_close(engine.eval_batch(iter(pairs)), mean)
    assert module.training
    found = engine.eval_batch(iter(pairs), reduce_output=None)
    torch.testing.assert_close(torch.stack(found), torch.stack(losses))
    loss, own = engine.eval_batch(iter(pairs), return_logits=True, num_micro_batches=2)
    torch.testing.assert_close(loss, torch.stack(losses[:2]).mean())
    assert (own is not None) == last
    found = engine.eval_batch(iter(pairs), compute_loss=False, reduce_output=None)
    assert (found is None) != last
    if last:
        torch.testing.assert_close(own, logits[1])
        torch.testing.assert_close(found, logits)
    found = engine.eval_batch(iter(pairs), bcast_loss=False)
    assert (found is None) != last
    with pytest.raises(ValueError, match="reduce_output='sum'"):
        engine.eval_batch(iter(pairs), reduce_output="sum")
    engine.train_batch(iter(pairs))  # between steps it changes nothing
    plain.step([iter(pairs)])
    compare(engine, plain)
    engine.destroy()


@distributed(world_size=2)
def test_an_unfinished_batch_is_abandoned_before_the_next() -> None:
    module = PipelineModule(layers(), num_stages=2, loss_fn=loss_of)
    engine, plain = make_engine(module), Plain(layers(), lr=0.01)
    engine.micro_steps = 1  # as loaded from the middle of a batch
    with pytest.raises(
        PipelineError, match=r"1 micro-batches of an unfinished batch .* call abandon_update\(\)"
    ):
        engine.train_batch(batches(0))
    engine.abandon_update()
    engine.train_batch(batches(0))
    plain.step([batches(0)])
    compare(engine, plain)
    engine.destroy()


@distributed(world_size=2)
def test_data_of_the_engine_and_a_batch_function() -> None:
    source = torch.Generator().manual_seed(1)
    data = [{"ids": torch.randint(VOCABULARY, (LENGTH + 1,), generator=source)} for _ in range(6)]
    module = PipelineModule(layers(), num_stages=2, loss_fn=loss_of)
    set_weights(module)
    engine, _, loader, _ = deepspeed.initialize(
        model=module,
        model_parameters=[p for p in module.parameters() if p.requires_grad],
        training_data=data,
        config={
            "train_batch_size": 4,
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        },
    )
    assert isinstance(engine, PipelineEngine) and loader is not None
    engine.set_batch_fn(lambda batch: (batch["ids"][:, :-1], batch["ids"][:, 1:]))
    losses = [engine.train_batch().item() for _ in range(4)]
    assert losses[-1] < losses[0] and engine.gradient_accumulation_steps() == 2
    engine.set_train_batch_size(6)
    engine.train_batch()
    assert engine.micro_steps == 4 * 2 + 3
    engine.destroy()


@distributed(world_size=2)
def test_training_data_keeps_its_order() -> None:
    data = [{"ids": torch.full((LENGTH + 1,), n % VOCABULARY)} for n in range(5)]
    module = PipelineModule(layers(), num_stages=2, loss_fn=loss_of)
    set_weights(module)
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine, _, loader, _ = deepspeed.initialize(model=module, training_data=data, config=config)
    for _ in range(2):
        assert [batch["ids"][0, 0].item() for batch in loader] == [n % VOCABULARY for n in range(5)]
    engine.destroy()


@distributed(world_size=2)
def test_what_a_pipeline_refuses() -> None:
    module = PipelineModule(layers(), num_stages=2, loss_fn=loss_of)
    with pytest.raises(AssertionError, match="leave out mpu"):
        deepspeed.initialize(model=module, mpu=module.mpu(), config={"train_batch_size": 1})
    engine = make_engine(module)
    for call in (engine.forward, engine.backward, engine.step):
        with pytest.raises(PipelineError, match="train_batch"):
            call(1)
    with pytest.raises(RuntimeError, match="eval_batch"), torch.no_grad():
        engine.train_batch(batches(0))
    with pytest.raises(RuntimeError, match="num_stages=3 does not divide the 2 ranks"):
        PipelineModule(layers(), num_stages=3)
    with pytest.raises(RuntimeError, match="num_stages or a topology"):
        PipelineModule(layers())
    engine.destroy()


class Reporting(PipelineModule):
    def get_additional_losses(self) -> dict[str, Tensor]:
        return {"extra": torch.tensor(2.0), "other": torch.tensor(1.0 + self.micro_offset)}


@distributed(world_size=2)
def test_additional_losses() -> None:
    engine = make_engine(Reporting(layers(), num_stages=2, loss_fn=loss_of))
    assert engine.get_additional_losses() is None
    engine.train_batch(batches(0))
    assert engine.get_additional_losses() == {"extra": 2.0, "other": 3.5}
    engine.destroy()


@pytest.mark.parametrize("reentrant", [True, False])
@distributed(world_size=2)
def test_activation_checkpointing(reentrant: bool) -> None:
    module = PipelineModule(layers(), num_stages=2, loss_fn=loss_of)
    section = {"pipeline": {"activation_checkpoint_interval": 2, "use_reentrant": reentrant}}
    engine, plain = make_engine(module, **section), Plain(layers(), lr=0.01)
    assert module.activation_checkpoint_interval == 2
    own, same = batches(0), batches(0)
    for _ in range(2):
        engine.train_batch(own)
        plain.step([same])
    compare(engine, plain)
    engine.destroy()


@pytest.mark.parametrize("section", ["bf16", "fp16"])
@distributed(world_size=2)
def test_low_precision_learns(section: str) -> None:
    module = PipelineModule(layers(), num_stages=2, loss_fn=loss_of)
    engine = make_engine(module, stage=1, clip=1.0, **{section: {"enabled": True}})
    pairs = [next(batches(0))] * COUNT
    losses = [engine.train_batch(iter(pairs)).item() for _ in range(8)]
    assert losses[-1] < losses[0]
    engine.destroy()


@distributed(world_size=2)
def test_seeded_layers_do_not_depend_on_their_stage() -> None:
    specs = [LayerSpec(nn.Linear, 4, 4), nn.Dropout(0.5), LayerSpec(nn.Linear, 4, 4)]
    two = PipelineModule(specs, num_stages=2, seed_layers=True, base_seed=5, partition_method="uniform")
    one = PipelineModule(specs, num_stages=1, seed_layers=True, base_seed=5)
    theirs = dict(one.named_parameters())
    assert all(torch.equal(param, theirs[name]) for name, param in two.named_parameters())


class Fragile(nn.Module):
    """Raises at a call, once."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.left = call

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise ArithmeticError("fragile")
        return x


@pytest.mark.parametrize("layout", [{}, {"chunks": 2, "zigzag": True}])
@distributed(world_size=1)
def test_a_failure_names_its_place_and_the_next_batch_is_right(layout: dict[str, Any]) -> None:
    specs = [*layers(3), Fragile(3)]
    module = PipelineModule(specs, num_stages=1, loss_fn=loss_of, **layout)
    schedule = {"pipeline": {"schedule": "zero-bubble-v" if layout else "1f1b"}}
    engine, plain = make_engine(module, clip=0.1, **schedule), Plain(layers(3), lr=0.01, clip=0.1)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with pytest.raises(ArithmeticError, match="fragile"):
            engine.train_batch(batches(1))
    finally:
        logger.removeHandler(handler)
    assert any("layer 5 (Fragile) of the pipeline failed" in text for text in said)
    assert any("stage 0 failed at micro-batch 2 (F2" in text for text in said)
    own, same = batches(0), batches(0)
    for _ in range(2):
        assert engine.train_batch(own).item() == pytest.approx(plain.step([same]), rel=1e-5)
    compare(engine, plain)
    engine.destroy()


@pytest.mark.parametrize("shared", [True, False])
@distributed(world_size=2)
def test_messages_of_a_batch_that_ran_out_of_data_are_dropped(shared: bool) -> None:
    """The last stage has sent a gradient by then, which nobody received; in the first batch and in a later one."""
    module = PipelineModule(layers(), num_stages=2, loss_fn=loss_of)
    engine, plain = make_engine(module, comm={"shared_memory": shared}), Plain(layers(), lr=0.01)
    own, same = batches(0), batches(0)
    for left in (1, 3):
        with pytest.raises(StopIteration):
            engine.train_batch(itertools.islice(batches(9), left))
        found = engine.eval_batch(batches(5))
        with torch.no_grad():
            pairs = list(itertools.islice(batches(5), COUNT))
            wanted = torch.stack([loss_of(plain.forward(inputs), labels) for inputs, labels in pairs]).mean()
        torch.testing.assert_close(found, wanted)
        for _ in range(2):
            assert engine.train_batch(own).item() == pytest.approx(plain.step([same]), rel=1e-5)
    compare(engine, plain)
    engine.destroy()
