"""Device and host apart: the CPU taken for a device, and what rests on either side counted by owner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import deepspeed
from deepspeed.planning.ledger import Ledger, MemoryKind, MemoryPhase, MemoryPlace
from deepspeed.planning.offload import CountedMemory
from deepspeed.planning.request import PlanRequest, answer
from tests.planning.memory.models import MODELS, NOTHING_KEPT, config_for
from tests.planning.memory.test_engines import planned, train_step
from tests.pool import distributed
from tests.zero.test_offload import pretend_device

CPU = {"device": "cpu"}
RESTING = (
    MemoryKind.PARAMETERS,
    MemoryKind.MASTERS,
    MemoryKind.STATE,
    MemoryKind.GRADIENTS,
    MemoryKind.STAGING,
)

CASES = {
    "stage 1": config_for(1, bf16=True, gas=2, offload_optimizer=CPU),
    "stage 2": config_for(2, bf16=True, offload_optimizer=CPU),
    "stage 2, fp32": config_for(2, offload_optimizer=CPU),
    "stage 3": config_for(3, bf16=True, offload_optimizer=CPU, **NOTHING_KEPT),
    "stage 3, parameters too": config_for(
        3, bf16=True, offload_optimizer=CPU, offload_param=CPU, **NOTHING_KEPT
    ),
    "Twin-Flow": config_for(3, bf16=True, offload_optimizer={**CPU, "ratio": 0.5}, **NOTHING_KEPT),
}


def storage_bytes(tensors: list[Tensor | None]) -> int:
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(found.values())


def host_bytes(engine: Any) -> int:
    """Return the bytes that the engine keeps off the device between steps."""
    core, tensors = engine.core, []
    tier = core.store.tier
    # Otherwise a pretended device stages weights that a real one finds on the host.
    if engine.plan.param_offload is None:
        tensors += [slot.buffer for slot in tier.slots]
    for owned in core.store.fragments:
        bucket = owned.grad_bucket
        if tier.offloads(bucket.layout):
            tensors += [owned.master, *(v for v in core.store.state_of(owned).values())]
            tensors += [bucket._shard]
    if engine.sharded is not None and engine.plan.param_offload is not None:
        tensors += [bucket.shard for bucket in engine.sharded.buckets if not bucket.persistent]
    return storage_bytes(tensors)


@pytest.mark.parametrize("case", CASES)
@distributed(world_size=2)
def test_what_rests_on_the_host(case: str) -> None:
    config = CASES[case]
    with pretend_device():
        engine, *_ = deepspeed.initialize(model=MODELS["gpt"](), config=config)
        for _ in range(2):
            train_step(engine)
        found = host_bytes(engine)
        engine.destroy()
    ledger = planned("gpt", config, 2, device_type="cuda").ledger
    if engine.global_rank == 0:
        staging = (
            ledger.entries[MemoryPhase.STEP, MemoryPlace.HOST, MemoryKind.STAGING]
            if "offload_param" in str(config)
            else 0
        )
        assert found == resting(ledger, MemoryPlace.HOST) - staging


def resting(ledger: Ledger, place: MemoryPlace) -> int:
    return sum(n for kind, n in ledger.kinds(MemoryPhase.STEP, place).items() if kind in RESTING)


def closed_form(config: dict[str, Any], ranks: int) -> tuple[float, float]:
    """Bytes per parameter at rest, (device, host)."""
    with torch.device("meta"):
        model = MODELS["gpt"]()
    found = answer(PlanRequest(module=model, config=config, ranks=ranks, device_type="cuda"))
    numel = found.setting.model.numel
    return tuple(resting(found.ledger, place) / numel for place in (MemoryPlace.DEVICE, MemoryPlace.HOST))  # type: ignore[return-value]


def test_zero_offload_keeps_16_bit_weights_on_the_device() -> None:
    """Ren et al. 2021: 2 bytes per parameter on the device; 4 + 8 for Adam and 2 for the gradient, over N ranks, and
    the staging of the new weights on the host."""
    device, host = closed_form(config_for(2, bf16=True, offload_optimizer=CPU), 4)
    assert device == pytest.approx(2, rel=0.01)
    assert 14 / 4 <= host <= 1.02 * 16 / 4


def test_zero_infinity_keeps_nothing_on_the_device() -> None:
    zero = {**NOTHING_KEPT, "stage3_param_persistence_threshold": 0}
    device, host = closed_form(config_for(3, bf16=True, offload_optimizer=CPU, offload_param=CPU, **zero), 4)
    assert device == 0
    assert 16 / 4 <= host <= 1.02 * 18 / 4


def test_super_offload_keeps_a_second_copy_on_the_host() -> None:
    """4 + 8 for Adam once more, and the rounded weights."""
    plain = closed_form(config_for(2, bf16=True, offload_optimizer=CPU), 4)
    ahead = closed_form(config_for(2, bf16=True, offload_optimizer={**CPU, "super_offload": True}), 4)
    assert ahead[0] == plain[0]
    assert ahead[1] - plain[1] == pytest.approx(14 / 4, rel=0.02)


def test_zenflow_keeps_sums_and_chosen_columns_on_the_device() -> None:
    """On the device the gradient (2), its sum (4) and, of a tenth, masters and state (12) with positions (8); on the
    host the second copy (14), and the mean (2) where the gradient was."""
    plain = closed_form(config_for(2, bf16=True, offload_optimizer=CPU), 4)
    config = config_for(2, bf16=True, offload_optimizer=CPU, zenflow={"topk_ratio": 0.1})
    device, host = closed_form(config, 4)
    assert device - plain[0] == pytest.approx((2 + 4 + 0.1 * (12 + 8)) / 4, rel=0.02)
    assert host - plain[1] == pytest.approx(14 / 4, rel=0.04)


def test_pinned_memory_comes_in_powers_of_two() -> None:
    ledger = Ledger()
    memory = CountedMemory("cuda")
    memory.host(ledger, [MemoryPhase.STEP], MemoryKind.MASTERS, 5 << 20, pin=True)
    memory.host(ledger, [MemoryPhase.STEP], MemoryKind.MASTERS, 4 << 20, pin=True)
    memory.host(ledger, [MemoryPhase.STEP], MemoryKind.MASTERS, 5 << 20, pin=False)
    assert ledger.kinds(MemoryPhase.STEP, MemoryPlace.HOST) == {
        MemoryKind.MASTERS: 14 << 20,
        MemoryKind.PINNING: 3 << 20,
    }
