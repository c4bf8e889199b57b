from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.transforms.recompute import checkpointing as ds
from tests.transforms.recompute.models import assert_same_bits, gradients, plain

NAME = "model-parallel-rng"


class Mpu:
    """Tensor-parallel rank ``rank`` of ``size``, without a group."""

    def __init__(self, rank: int, size: int = 4) -> None:
        self._rank, self._size = rank, size

    def get_model_parallel_rank(self) -> int:
        return self._rank

    def get_model_parallel_world_size(self) -> int:
        return self._size

    def get_model_parallel_group(self) -> None:
        return None


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    before, ds._state = ds._state, ds._CheckpointState()
    state = torch.get_rng_state()
    yield
    ds.get_cuda_rng_tracker().reset()
    ds._state = before
    torch.set_rng_state(state)


def draw(seed: int, skip: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(3 * (skip + 1), generator=generator)[3 * skip :]


def test_named_states_draw_apart_from_the_generator() -> None:
    tracker = ds.CudaRNGStatesTracker()
    torch.manual_seed(1)
    tracker.add("a", 5)
    tracker.add("b", 6)
    with tracker.fork("a"):
        first = torch.rand(3)
    with tracker.fork("b"):
        other = torch.rand(3)
    with pytest.raises(KeyError), tracker.fork("a"):
        second = torch.rand(3)
        raise KeyError  # the state moves on and the outside one comes back all the same
    assert torch.equal(torch.rand(3), draw(1))
    assert (
        torch.equal(first, draw(5)) and torch.equal(second, draw(5, skip=1)) and torch.equal(other, draw(6))
    )


def test_states_can_be_taken_and_put_back() -> None:
    tracker = ds.CudaRNGStatesTracker()
    tracker.add("a", 5)
    states = tracker.get_states()
    with tracker.fork("a"):
        torch.rand(3)
    tracker.set_states(states)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3), draw(5))
    tracker.reset()
    assert tracker.get_states() == {}


def test_the_tracker_under_the_name_that_clients_import() -> None:
    assert ds._CUDA_RNG_STATE_TRACKER is ds.get_cuda_rng_tracker()
    ds._CUDA_RNG_STATE_TRACKER.add(ds._MODEL_PARALLEL_RNG_TRACKER_NAME, 1)
    with ds.get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(3), draw(1))
    assert not hasattr(ds, "_OTHER_TRACKER")


def test_mistakes_are_refused() -> None:
    tracker = ds.CudaRNGStatesTracker()
    tracker.add("a", 5)
    with pytest.raises(ValueError, match="'a' exists"):
        tracker.add("a", 6)
    with pytest.raises(ValueError, match="Seed 5"):
        tracker.add("b", 5)
    with pytest.raises(ValueError, match="no random state 'c'"), tracker.fork("c"):
        pass


def test_tensor_parallel_ranks_share_one_state_and_differ_in_the_other() -> None:
    shared, apart = [], []
    for rank in range(4):
        ds.configure(Mpu(rank))
        ds.model_parallel_cuda_manual_seed(100)
        shared.append(torch.rand(3))
        with ds.get_cuda_rng_tracker().fork():
            apart.append(torch.rand(3))
    assert all(torch.equal(values, draw(100)) for values in shared)
    assert all(torch.equal(values, draw(100 + 2718 + rank)) for rank, values in enumerate(apart))


def test_reseeding_the_tensor_parallel_state_alone() -> None:
    ds.configure(Mpu(1))
    ds.model_parallel_cuda_manual_seed(100)
    ds.model_parallel_reconfigure_tp_seed(7)
    with ds.get_cuda_rng_tracker().fork(NAME):
        assert torch.equal(torch.rand(3), draw(7 + 2718 + 1))
    assert torch.equal(torch.rand(3), draw(100))


class Forked(nn.Module):
    """Dropout from both kinds of state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        with ds.get_cuda_rng_tracker().fork():
            inside = nn.functional.dropout(layer(x), 0.4)
        return nn.functional.dropout(inside, 0.2)

    def forward(self, x: Tensor, run: Any) -> Tensor:
        h = x.clone().requires_grad_()
        for layer in self.layers:
            h = run(self.block, layer, h)
        return h.square().sum()


@pytest.mark.parametrize("run", [ds.checkpoint, ds.non_reentrant_checkpoint], ids=["reentrant", "hooks"])
def test_named_states_are_replayed_in_the_second_run(run: Any) -> None:
    torch.manual_seed(0)
    model = Forked()
    seen = []
    for how in (plain, run):
        ds.model_parallel_cuda_manual_seed(9)
        found = gradients(model, how)
        with ds.get_cuda_rng_tracker().fork():
            found["next draw inside"] = torch.rand(3)
        seen.append(found)
    assert_same_bits(seen[1], seen[0])
