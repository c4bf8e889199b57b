"""Greedy tokens of every architecture whose layers two ranks share: those of Transformers' `generate` on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.inference import build_hf_engine
from deepspeed.inference.v2.config_v2 import RaggedInferenceEngineConfig
from tests.clients.kit import clean_clients
from tests.pool import distributed

transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")

from tests.clients.architectures import ARCHITECTURES, CAUSAL, TWO, make  # noqa: E402
from tests.clients.test_inference import PACKED, PADDED  # noqa: E402

NEW = 6
GENERATING = [name for name, each in ARCHITECTURES.items() if each.auto in (CAUSAL, TWO)]
LENGTHS = (9, 4)
QUICK = "llama gpt2 mixtral gptj bloom falcon_grouped".split()  # of each layout; the others are slow tests


def left_padded() -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 90, (2, max(LENGTHS)), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(tokens)
    mask[1, : -LENGTHS[1]] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def greedy(model: Any) -> list[list[int]]:
    settings = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=-1, decoder_start_token_id=0
    )
    found: list[list[int]] = model.generate(**left_padded(), generation_config=settings).tolist()
    return found


@pytest.mark.parametrize("name", GENERATING)
@distributed(world_size=2)
def test_init_inference(name: str) -> None:
    with clean_clients(deepspeed_state=False):
        model = make(name).eval()
        wanted, whole = greedy(model), sum(param.numel() for param in model.parameters())
        engine = deepspeed.init_inference(model, dtype=torch.float32, tensor_parallel={"tp_size": 2})
        assert sum(param.numel() for param in engine.module.parameters()) < 0.9 * whole
        assert greedy(engine) == wanted


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in (*PACKED, *PADDED)],
)
@distributed(world_size=2)
def test_fastgen(name: str, tmp_path: Path) -> None:
    """From files in the hub's layout; the prompts share each forward."""
    with clean_clients(deepspeed_state=False):
        model = make(name).eval()
        given = [ids[mask.bool()] for ids, mask in zip(*left_padded().values(), strict=True)]
        wanted = [ids[-NEW:] for ids in greedy(model)]
        if torch.distributed.get_rank() == 0:
            model.save_pretrained(tmp_path)
        torch.distributed.barrier()
        memory: Any = {"memory_config": {"mode": "allocate", "size": 16}}
        settings = RaggedInferenceEngineConfig(state_manager=memory)
        settings.tensor_parallel.tp_size = 2
        engine = build_hf_engine(str(tmp_path), settings)
        found: list[list[int]] = [[] for _ in given]
        for _ in range(NEW):
            chosen = engine.put(range(len(given)), given).argmax(-1)
            given = list(chosen.split(1))
            for tokens, token in zip(found, chosen.tolist(), strict=True):
                tokens.append(token)
        assert found == wanted
