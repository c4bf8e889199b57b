"""Named random states, so that ranks draw the same or different numbers, as each computation requires.

Ranks of one tensor-parallel group hold pieces of the same layer. Replicated computation (a dropout on the
layer's output) has to draw the same numbers on each rank; partitioned computation (a dropout inside the
layer) different ones. The former uses the device's own generator, the latter a named state of the tracker
(Shoeybi et al., *Megatron-LM*, 2019), as in layers written for it, or ``RegionNumbers``, as in our own.
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
    """Set the state of an accelerator's random generator, by default the current one's. ``new_state`` is copied."""
    get_accelerator().set_rng_state(new_state.clone(), device if device >= 0 else None)


class CudaRNGStatesTracker:
    """Named states of the accelerator's random generator (the CPU's where that is the accelerator)."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_ = {}
        self.seeds_ = set()

    def copy(self) -> CudaRNGStatesTracker:
        """Another tracker that starts with the same states."""
        result = CudaRNGStatesTracker()
        result.states_, result.seeds_ = dict(self.states_), set(self.seeds_)
        return result

    def get_states(self) -> dict[str, torch.Tensor]:
        """A copy of the table; the states in it are never written to."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Adds a state that starts at ``seed``. ValueError if the name or the seed is in use."""
        if name in self.states_:
            raise ValueError(f"The random state {name!r} exists already; reset() the tracker to start over.")
        if seed in self.seeds_:
            raise ValueError(f"Seed {seed} is in use already: two random states would draw the same numbers.")
        accelerator = get_accelerator()
        outside = accelerator.get_rng_state()
        accelerator.manual_seed(seed)
        self.states_[name] = accelerator.get_rng_state()
        self.seeds_.add(seed)
        accelerator.set_rng_state(outside)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Inside, random numbers come from the named state, which advances; the outer state is untouched."""
        if name not in self.states_:
            raise ValueError(f"There is no random state {name!r}; add({name!r}, seed) comes first.")
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
        """Inside, the table is ``states``; afterwards it is restored."""
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
    """Seeds the accelerator with ``seed`` and the tracker's named state with a different seed per tensor-parallel
    rank.
    """
    tracker.reset()
    get_accelerator().manual_seed(seed)
    tracker.add(MODEL_PARALLEL_RNG, seed + TENSOR_PARALLEL_SEED_OFFSET + _tensor_parallel_rank(mpu))


def reseed_tensor_parallel(tracker: CudaRNGStatesTracker, seed: int, mpu: Any) -> None:
    """Restarts only the named state, from ``seed``."""
    with tracker.fork():
        get_accelerator().manual_seed(seed + TENSOR_PARALLEL_SEED_OFFSET + _tensor_parallel_rank(mpu))


class RegionNumbers:
    """Random numbers of a region of which each rank of ``group`` has a part: different on each, and the same again when
    a checkpointed region is recomputed, by whoever recomputes it.

    A named state of the tracker would not do for the latter: ``torch.utils.checkpoint`` restores the device's own
    generator and nothing else. So a region's numbers start from that generator's state and the rank's place, and the
    generator moves on by one number, on all ranks alike, that the next region has others. The two are swapped with get
    and set, without waiting for the device.
    """

    def __init__(self, group: Communicator) -> None:
        self.group = group
        self._equal: torch.Tensor | None = (
            None  # state of the device's generator while the other one is in its place
        )

    @contextlib.contextmanager
    def different(self) -> Iterator[None]:
        """Inside, each rank draws its own numbers."""
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
        """Within ``different``: inside, all ranks draw the same numbers again."""
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

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionNumbers:
        return RegionNumbers(self.group)


def share_random_states(group: Communicator) -> None:
    """The first rank's states of the host's and the device's generator on every rank of ``group``, which then draw
    alike. Collective."""
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
