"""Named RNG states, so that ranks draw equal or different numbers, as each computation requires.

Ranks of a tensor-parallel group hold parts of the same layer. Replicated computation (dropout on the layer's output)
must draw equal numbers on each rank; partitioned computation (dropout inside the layer) different ones. The former uses
the device's default generator, the latter a named state of the tracker (Shoeybi et al., *Megatron-LM*, 2019), in layers
written for it, or ``RegionRNG``, in our own.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import torch

from deepspeed.base.accelerator import get_accelerator
from deepspeed.comm.collectives import Communicator

MODEL_PARALLEL_RNG = "model-parallel-rng"
TENSOR_PARALLEL_SEED_OFFSET = 2718  # keeps tensor-parallel seeds distinct from data-parallel ones


def set_device_state(new_state: torch.Tensor, device: int = -1) -> None:
    """Set the RNG state of a device, by default the current one. ``new_state`` is copied."""
    get_accelerator().set_rng_state(new_state.clone(), device if device >= 0 else None)


class CudaRNGStatesTracker:
    """Named RNG states of the accelerator (which may be the CPU)."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_ = {}
        self.seeds_ = set()

    def copy(self) -> CudaRNGStatesTracker:
        """Return a new tracker with the same states."""
        result = CudaRNGStatesTracker()
        result.states_, result.seeds_ = dict(self.states_), set(self.seeds_)
        return result

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return a copy of the table; the states in it are never modified."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a state seeded with ``seed``. ValueError: the name or the seed is in use."""
        if name in self.states_:
            raise ValueError(f"The random state {name!r} exists already; reset() the tracker to start over.")
        if seed in self.seeds_:
            raise ValueError(f"Seed {seed} is already in use: two random states would draw the same numbers.")
        accelerator = get_accelerator()
        outside = accelerator.get_rng_state()
        accelerator.manual_seed(seed)
        self.states_[name] = accelerator.get_rng_state()
        self.seeds_.add(seed)
        accelerator.set_rng_state(outside)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Draw random numbers from the named state inside the block, advancing it; the outer state is restored."""
        if name not in self.states_:
            raise ValueError(f"There is no random state {name!r}; add({name!r}, seed) must come first.")
        accelerator = get_accelerator()
        outside = accelerator.get_rng_state()
        accelerator.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = accelerator.get_rng_state()
            accelerator.set_rng_state(outside)

    @contextlib.contextmanager
    def replay(self, states: dict[str, torch.Tensor]) -> Iterator[None]:
        """Use ``states`` as the table inside the block; afterwards the previous one is restored."""
        now = self.get_states()
        self.set_states(states)
        try:
            yield
        finally:
            self.set_states(now)


def _tensor_parallel_rank(mpu: Any) -> int:
    for getter in ("get_tensor_model_parallel_rank", "get_model_parallel_rank"):
        if hasattr(mpu, getter):
            return getattr(mpu, getter)()
    return 0


def seed_model_parallel(tracker: CudaRNGStatesTracker, seed: int, mpu: Any) -> None:
    """Seed the accelerator with ``seed``, and the tracker's named state differently on each tensor-parallel rank."""
    tracker.reset()
    get_accelerator().manual_seed(seed)
    tracker.add(MODEL_PARALLEL_RNG, seed + TENSOR_PARALLEL_SEED_OFFSET + _tensor_parallel_rank(mpu))


def reseed_tensor_parallel(tracker: CudaRNGStatesTracker, seed: int, mpu: Any) -> None:
    """Reseed only the named state, from ``seed``."""
    with tracker.fork():
        get_accelerator().manual_seed(seed + TENSOR_PARALLEL_SEED_OFFSET + _tensor_parallel_rank(mpu))


class RegionRNG:
    """Random numbers of a region that is partitioned over ``group``: different on each rank, and reproduced when a
    checkpointed region is recomputed, by any checkpointing implementation.

    A named state of the tracker would not achieve the latter: ``torch.utils.checkpoint`` restores only the device's
    default generator. So a region is seeded from that generator's state and the rank, and the generator then advances
    by one number, equally on all ranks, so that the next region differs. States are swapped by get and set, without
    synchronizing with the device.
    """

    def __init__(self, group: Communicator) -> None:
        self.group = group
        self._equal: torch.Tensor | None = None
        """The default generator's state while a region's state replaces it."""

    @contextlib.contextmanager
    def different(self) -> Iterator[None]:
        """Draw different numbers on each rank inside the block."""
        if self.group.size == 1 or self._equal is not None:
            yield
            return
        accelerator = get_accelerator()
        self._equal = accelerator.get_rng_state()
        accelerator.manual_seed(zlib.crc32(bytes(self._equal.numpy())) * self.group.size + self.group.rank)
        try:
            yield
        finally:
            accelerator.set_rng_state(self._equal)
            self._equal = None
            torch.rand(1, device=accelerator.current_device_name())

    @contextlib.contextmanager
    def equal(self) -> Iterator[None]:
        """Draw equal numbers on all ranks inside the block, nested in ``different``."""
        if self._equal is None:
            yield
            return
        accelerator = get_accelerator()
        own = accelerator.get_rng_state()
        accelerator.set_rng_state(self._equal)
        self._equal = None
        try:
            yield
        finally:
            self._equal = accelerator.get_rng_state()
            accelerator.set_rng_state(own)

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionRNG:
        return RegionRNG(self.group)


def share_random_states(group: Communicator) -> None:
    """Broadcast the first rank's RNG states of host and device over ``group``, so that all ranks draw equal numbers.
    Collective."""
    if group.size == 1:
        return
    accelerator = get_accelerator()
    state = torch.get_rng_state().to(accelerator.current_device_name())
    group.broadcast(state, 0).wait()
    torch.set_rng_state(state.cpu())
    if accelerator.device_name() != "cpu":
        state = accelerator.get_rng_state().to(accelerator.current_device_name())
        group.broadcast(state, 0).wait()
        accelerator.set_rng_state(state.cpu())
