"""The documented estimators print this package's own plan as well, on standard error."""

from __future__ import annotations

import pytest
import torch

from deepspeed.compat.zero_memory import (
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_live,
)
from tests.planning.memory.models import Gpt

RANKS, GB = 4, 2**30


@pytest.fixture
def model() -> Gpt:
    with torch.device("meta"):
        return Gpt(blocks=400, width=512)  # 0.2 billion parameters in equal blocks


def planned(text: str) -> dict[str, tuple[float, float]]:
    """Options -> GB (host, GPU)."""
    rows = [line.split("|") for line in text.splitlines()[2:]]
    return {
        " ".join(options.split()): (float(host.strip()[:-2]), float(gpu.strip()[:-2]))
        for host, gpu, options in rows
    }


def test_stage_2(model: Gpt, capsys: pytest.CaptureFixture[str]) -> None:
    estimate_zero2_model_states_mem_needs_all_live(model, RANKS)
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 6
    assert shown.err.startswith("Planned for this package")
    numel = sum(p.numel() for p in model.parameters())
    found = planned(shown.err)
    host, gpu = found["offload_optimizer=cpu"]
    assert 14 * numel <= host * GB <= 1.5 * 16 * numel  # all ranks of a node, pinned memory rounded up
    # The peak is that of initialize, where the fp32 model goes to the device before it is cast and cut.
    assert gpu * GB == pytest.approx(4 * numel, rel=0.05)
    assert found["offload_optimizer=none"][1] * GB >= (2 + 14 / RANKS) * numel * 0.99


def test_stage_3(model: Gpt, capsys: pytest.CaptureFixture[str]) -> None:
    estimate_zero3_model_states_mem_needs_all_live(model, RANKS)
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 10
    numel = sum(p.numel() for p in model.parameters())
    found = planned(shown.err)
    assert len(found) == 6
    host, gpu = found["offload_param=none, offload_optimizer=none, zero_init=1"]
    assert host * GB < 0.01 * numel
    # states, all weights gathered (they fit the budget of live parameters), and a few small buckets
    assert (16 / RANKS + 2) * numel * 0.99 <= gpu * GB <= (16 / RANKS + 2) * numel * 1.1
    whole, _ = found["offload_param=none, offload_optimizer=none, zero_init=0"]
    assert whole * GB == pytest.approx(RANKS * 4 * numel, rel=0.02)
