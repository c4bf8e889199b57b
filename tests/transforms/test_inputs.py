"""Transforms of inputs: shards of a sequence, truncated sequences; in training and in evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.transforms import ForwardFacts, TransformError
from tests.pool import distributed
from tests.transforms.users import (
    SGD,
    VOCAB,
    Model,
    Sequences,
    SequenceShards,
    Truncation,
    make_model,
    start,
    tokens,
    train,
)

LENGTH = 6


def positions() -> Tensor:
    return torch.arange(LENGTH).expand(2, LENGTH)


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_each_rank_of_a_sequence_gets_its_part(stage: int) -> None:
    """The model processes each token separately, so the halves together give the result of one process."""
    engine = start(stage, Sequences(), sequence_parallel_size=2, **SGD)
    plain = make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        ids, labels = tokens(step), tokens(step + 10)
        loss = engine(ids, labels)
        engine.backward(loss)
        engine.step()
        expected = plain(ids, labels, positions=positions())
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert whole(loss) == pytest.approx(expected.item(), rel=1e-5)
    engine.eval()
    with torch.no_grad():
        loss = engine(tokens(9), positions=positions() + 1)
        expected = plain(tokens(9), positions=positions() + 1)
    assert whole(loss) == pytest.approx(expected.item(), rel=1e-5)
    engine.destroy()


def whole(loss: Tensor) -> float:
    """Mean over the parts of the sequence."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@distributed(world_size=1)
def test_a_length_that_changes_by_step() -> None:
    engine = start(2, gradient_accumulation_steps=2)
    seen: list[int] = []
    engine.module.embed.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    train(engine, 0)
    engine.add_input_transform(Truncation())
    train(engine, 1, 2, 3, 4)
    engine.eval()
    engine(tokens(5))
    assert seen == [
        6,
        2,
        4,
        4,
        6,
        6,
    ]  # an update after every second micro-batch; longer than it is at the end
    engine.train()
    engine.remove_input_transform("curriculum")
    assert engine.data.inputs is None
    with pytest.raises(KeyError):
        engine.remove_input_transform("curriculum")
    engine.destroy()


@distributed(world_size=2)
def test_cut_short_first_then_into_shards() -> None:
    """In this order whatever the order in which they were added."""
    engine = start(2, Sequences(), sequence_parallel_size=2)
    engine.add_input_transform(Truncation())
    assert [each.name for each in engine.data.inputs.transforms] == ["curriculum", "sequence_parallel"]
    ids = tokens(0)
    with torch.no_grad():
        loss = engine(ids)
        rank = dist.get_rank()
        own = make_model()(ids[:, rank : rank + 1], positions=torch.full((2, 1), rank))
    assert loss.item() == pytest.approx(own.item(), rel=1e-6)
    with pytest.raises(ValueError, match="two transforms are named 'curriculum'"):
        engine.add_input_transform(Truncation())
    engine.add_input_transform(SequenceShards(engine.mesh, name="again", after=("curriculum",)))
    with pytest.raises(ValueError, match="runs before 'sequence_parralel'.*did you mean 'sequence_parallel'"):
        engine.add_input_transform(Truncation("other", before=("sequence_parralel",)))
    assert [each.name for each in engine.data.inputs.transforms][-1] == "again"
    engine.destroy()


@dataclass(frozen=True)
class Fails:
    name: str = "picky"
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    def transform(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], facts: ForwardFacts
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args[0].max() == VOCAB:
            raise ValueError("no such token")
        return args, kwargs


@distributed(world_size=1)
def test_one_that_fails_is_named_and_drops_the_batch() -> None:
    """As when the forward itself fails: the next batch trains as if this one had not been."""
    losses = []
    for faulty in (False, True):
        engine = start(2, gradient_accumulation_steps=2)
        engine.add_input_transform(Fails())
        if faulty:
            engine.backward(engine(tokens(7)))
            engine.step()
            with pytest.raises(
                TransformError, match="input transform 'picky' failed: ValueError: no such token"
            ):
                engine(torch.full((2, 6), VOCAB))
        losses.append(train(engine, 0, 1, 2, 3))
        engine.destroy()
    assert losses[0] == losses[1]


@distributed(world_size=1)
def test_observers_see_what_the_module_gets() -> None:
    engine = start(0)
    engine.add_input_transform(Truncation())
    seen: list[Any] = []
    engine.events.on("before_forward", lambda inputs, kwargs: seen.append(inputs[0].shape[1]))
    engine(tokens(0))
    assert seen == [2]
    engine.destroy()


@distributed(world_size=1)
def test_without_transforms_nothing_is_called() -> None:
    engine = start(0)
    calls: list[Any] = []
    assert isinstance(engine.module, Model) and engine.data.inputs is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine.data), "transform", lambda *args: calls.append(args))
        engine(tokens(0))
    assert not calls
    engine.destroy()
