"""A rank that does not come is named after a while, before any timeout."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import deepspeed
from deepspeed.comm.hangs import stragglers as waiting
from tests.comm.test_init import finish, free_port, start
from tests.pool import distributed


def engine():
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    model = torch.nn.Linear(4, 4)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


@distributed(world_size=2)
def test_save_on_rank_0_only_says_who_did_not_call_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(waiting, "WAIT_S", 0.3)
    monkeypatch.setattr(waiting.logger, "warning", said.append)
    trained = engine()
    rank = deepspeed.comm.get_rank()
    for late in (1, 0):
        if rank == late:
            time.sleep(1.5)
        trained.save_checkpoint(str(tmp_path), tag="x")
    assert len(said) == 1 and "save_checkpoint(tag='x')" in said[0]
    assert (
        f"rank {rank} has waited 0.3 s" in said[0]
        and f"for rank {1 - rank}, which did not call it" in said[0]
    )
    assert "not only on rank 0" in said[0]


@distributed(world_size=2)
def test_nothing_is_said_when_all_have_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(waiting, "WAIT_S", 0.2)
    monkeypatch.setattr(waiting.logger, "warning", said.append)
    with waiting.awaiting_all_ranks("a slow save"):
        deepspeed.comm.barrier()
        time.sleep(0.6)
    assert said == []


BODY = """
    import time
    from datetime import timedelta
    from deepspeed.comm.hangs import stragglers as waiting
    waiting.WAIT_S = 2.0
    try: dist.init_distributed(timeout=timedelta(seconds=10))
    except Exception as error: print(type(error).__name__, str(error).splitlines()[0], flush=True)
    else: time.sleep(4)
    os._exit(0)
"""


@pytest.mark.parametrize("missing", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_was_not_started_is_named(missing: int) -> None:
    """Two of three come."""
    port, here = str(free_port()), [rank for rank in range(3) if rank != missing]
    ranks = [
        start(
            BODY,
            RANK=str(rank),
            WORLD_SIZE="3",
            LOCAL_RANK=str(rank),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for rank in here
    ]
    said = [finish(rank) for rank in ranks]
    assert f"rank {here[0]} has waited 2 s for rank {missing}" in said[0], said
    assert "has waited" not in said[1] and "pair.cc" not in said[0] + said[1]
    assert missing == 0 or "CommunicationError" in said[0] and "MASTER_ADDR" in said[0]


LOST = """
    import torch
    import deepspeed
    rank = int(os.environ["RANK"])
    model = torch.nn.Linear(4, 4)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if rank == 0:
        try: engine.save_checkpoint("%s")
        except dist.CommunicationError as error: print(error)
    os._exit(0)
"""


def test_a_rank_that_ended_without_saving_is_named(tmp_path: Path) -> None:
    port = str(free_port())
    ranks = [
        start(
            LOST % tmp_path,
            RANK=str(rank),
            WORLD_SIZE="2",
            LOCAL_RANK=str(rank),
            MASTER_PORT=port,
            MASTER_ADDR="127.0.0.1",
        )
        for rank in range(2)
    ]
    said, _ = (finish(rank) for rank in ranks)
    assert "save_checkpoint(tag='global_step0') is collective, and rank 1 did not call it" in said
    assert "pair.cc" not in said
