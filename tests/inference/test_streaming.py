"""Weights that rest in a file or on the host and come layer by layer: the same results, with buffers that count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.inference.streaming import StreamedWeights
from deepspeed.inference.weight_stores import HostStore

WIDTH, LAYERS, WORDS = 64, 6, 96


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(self.up(self.norm(inputs)).relu())


class Deep(nn.Module):
    """Blocks between a table and a head with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight
        self.skipped: set[int] = set()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                hidden = block(hidden)
        return self.head(self.norm(hidden))


def nvme(folder: Path, **more: Any) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": str(folder)}
    return {"stage": 3, "offload_param": offload, "stage3_param_persistence_threshold": 1000, **more}


TOKENS = torch.arange(20).view(2, 10)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_the_results_are_those_of_weights_in_memory(tmp_path: Path, dtype: str) -> None:
    plain = deepspeed.init_inference(Deep(), dtype=dtype)
    module = Deep()
    engine = deepspeed.init_inference(module, dtype=dtype, zero=nvme(tmp_path))
    streamed = engine.streamed
    # The head; lookups of the table read its rows.
    assert streamed is not None and len(streamed.units) == LAYERS + 1
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(engine(TOKENS), plain(TOKENS))
    with torch.inference_mode():
        assert torch.equal(engine(TOKENS), plain(TOKENS))
    largest = max(unit.region.numel() for unit in streamed.units)
    assert streamed.bytes_held == 2 * largest < streamed.bytes_streamed / 3
    state, wanted = module.state_dict(), plain.module.state_dict()
    assert state.keys() == wanted.keys() and all(torch.equal(state[name], wanted[name]) for name in wanted)
    engine.destroy()
    assert engine.streamed is None and not module.blocks[0]._forward_hooks
    with torch.no_grad():
        assert torch.equal(engine(TOKENS), plain(TOKENS))


def test_every_weight_is_read_once_for_a_forward(tmp_path: Path) -> None:
    engine = deepspeed.init_inference(Deep(), dtype="fp32", zero=nvme(tmp_path))
    streamed = engine.streamed
    assert streamed is not None
    with torch.no_grad():
        engine(TOKENS)
        before = streamed.store.bytes_read
        for _ in range(4):
            engine(TOKENS)
    assert streamed.store.bytes_read - before == 4 * streamed.bytes_streamed


def test_another_order_is_followed_and_learned(tmp_path: Path) -> None:
    plain, module = Deep().eval(), Deep()
    engine = deepspeed.init_inference(module, dtype="fp32", zero=nvme(tmp_path))
    streamed = engine.streamed
    assert streamed is not None
    read = []
    with torch.no_grad():
        for skipped in (set(), {1, 4}, {1, 4}, {1, 4}, {0}):
            plain.skipped = module.skipped = skipped
            before = streamed.store.bytes_read
            assert torch.equal(engine(TOKENS), plain(TOKENS))
            read.append(streamed.store.bytes_read - before)
    assert read[3] == streamed.bytes_streamed - 2 * streamed.units[0].region.numel()


def test_more_blocks_ahead_and_all_that_fit(tmp_path: Path) -> None:
    block = sum(param.numel() for param in Block().parameters())
    engine = deepspeed.init_inference(
        Deep(), dtype="fp32", zero=nvme(tmp_path, stage3_prefetch_bucket_size=3 * block)
    )
    assert engine.streamed is not None and len(engine.streamed._slots) == 4
    engine = deepspeed.init_inference(
        Deep(), dtype="fp32", zero=nvme(tmp_path, stage3_prefetch_bucket_size=99 * block)
    )
    streamed = engine.streamed
    assert streamed is not None
    with torch.no_grad():
        for _ in range(3):
            engine(TOKENS)
    assert streamed.store.bytes_read == streamed.bytes_streamed  # once for all, as there is a buffer for each


def test_an_interrupted_forward_leaves_nothing_behind(tmp_path: Path) -> None:
    module = Deep()
    engine = deepspeed.init_inference(module, dtype="fp32", zero=nvme(tmp_path))
    wanted = Deep().eval()(TOKENS)

    def fail(*_: Any) -> None:
        raise RuntimeError("stopped here")

    handle = module.blocks[2].up.register_forward_hook(fail)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="stopped here"):
            engine(TOKENS)
        handle.remove()
        assert torch.equal(engine(TOKENS), wanted)


def test_from_the_memory_of_the_host() -> None:
    plain, module = Deep().eval(), Deep().eval()
    streamed = StreamedWeights(
        module, HostStore(torch.device("cpu"), pin=False), torch.device("cpu"), ahead=2, least=1000
    )
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(module(TOKENS), plain(TOKENS))
    assert streamed.bytes_held == 3 * max(unit.region.numel() for unit in streamed.units)
    assert (
        deepspeed.init_inference(
            Deep(), dtype="fp32", zero={"stage": 3, "offload_param": {"device": "cpu"}}
        ).streamed
        is None
    )  # the host is the device


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    for zero, words in (
        ({"stage": 3}, "zero.stage=3 needs offload_param.device"),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, "nvme_path is missing"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=words):
            deepspeed.init_inference(Deep(), dtype="fp32", zero=zero)
    assert deepspeed.init_inference(Deep(), dtype="fp32", zero={"stage": 1}).streamed is None


def test_a_read_that_failed_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, module = Deep().eval(), Deep().eval()
    store = HostStore(torch.device("cpu"), pin=False)
    # Every part has a buffer of its own, and would stay there.
    StreamedWeights(module, store, torch.device("cpu"), ahead=99, least=1000)
    with torch.no_grad():
        for name in ("start", "finish"):
            with monkeypatch.context() as patched, pytest.raises(OSError):
                patched.setattr(HostStore, name, lambda *_: (_ for _ in ()).throw(OSError("broken")))
                module(TOKENS)
        assert torch.equal(module(TOKENS), plain(TOKENS))
