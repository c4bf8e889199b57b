"""ZeRO-Inference: tokens from a model whose weights rest in a file, against what the storage gives.

    python benchmarks/streamed_weights.py --folder /some/disk [--layers 16]

A Llama is saved, built without weights and given to `init_inference` with ``zero.offload_param.device=nvme``. "of the
storage": the bytes of weights read per second while tokens are generated, divided by what reading the same file in the
same order gives without a model. Memory is what the process itself has (RssAnon, the largest of samples while it
loads and generates), beyond what it had before.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

import deepspeed
from deepspeed.inference.streaming import StreamedWeights
from deepspeed.utils.logging import logger


def own_memory() -> int:
    return 1024 * int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0])


@contextmanager
def watched(found: list[int]) -> Iterator[None]:
    """Appends the largest of samples."""
    done, before = threading.Event(), own_memory()
    most = [before]

    def sample() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], own_memory())

    thread = threading.Thread(target=sample)
    thread.start()
    yield
    done.set()
    thread.join()
    found.append(most[0] - before)


def config(layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        max_position_embeddings=512,
        eos_token_id=None,
        bos_token_id=None,
    )


def storage_speed(streamed: StreamedWeights, passes: int) -> float:
    """Bytes per second of reading all regions in order, two at a time, into the same buffers."""
    store, slots = streamed.store, streamed._slots
    began, pending = time.perf_counter(), []
    for number in range(passes * len(streamed.units)):
        pending.append(
            store.start(slots[number % 2].buffer, streamed.units[number % len(streamed.units)].region)
        )
        if len(pending) == 2:
            store.finish(pending.pop(0))
    store.finish(pending[0])
    return passes * streamed.bytes_streamed / (time.perf_counter() - began)


def run(folder: Path, layers: int, dtype: str, tokens: int) -> None:
    memory: list[int] = []
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(folder)}}
    quant = {"weight": {"num_bits": 4, "q_groups": 8}}
    with watched(memory):
        with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
            model = AutoModelForCausalLM.from_config(config(layers))
        more: dict[str, Any] = {"quant": quant, "dtype": "int8"} if dtype == "int4" else {"dtype": dtype}
        engine = deepspeed.init_inference(
            model, checkpoint=str(folder / "model"), zero=zero, replace_with_kernel_inject=True, **more
        )
        streamed = engine.streamed
        assert streamed is not None
        os.sync()
        settings = GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        prompt = torch.arange(8)[None]
        engine.generate(prompt, generation_config=settings)
        limit = storage_speed(streamed, 2)
        before, began = streamed.store.bytes_read, time.perf_counter()
        engine.generate(prompt, generation_config=settings)
        took = time.perf_counter() - began
        read = (streamed.store.bytes_read - before) / took
        limit = (limit + storage_speed(streamed, 2)) / 2
    whole = (
        2 * sum(param.numel() for param in AutoModelForCausalLM.from_config(config(1)).parameters()) * layers
    )
    print(
        f"{dtype:5} {streamed.bytes_streamed / 1e6:9.0f} {streamed.bytes_held / 1e6:9.1f} {memory[0] / 1e6:9.0f} "
        f"{whole / max(1, memory[0]):8.1f}x {tokens / took:9.2f} {read / 1e9:7.2f} {limit / 1e9:9.2f} "
        f"{read / limit:8.0%}",
        flush=True,
    )
    engine.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    logger.setLevel("WARNING")
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        folder = Path(made)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config(args.layers)).to(torch.bfloat16)
        numel = sum(param.numel() for param in model.parameters())
        model.save_pretrained(folder / "model", max_shard_size="100MB")
        del model
        print(f"Llama of {numel / 1e6:.0f}M parameters, {args.layers} layers, batch 1, {args.tokens} tokens;")
        print("MB and GB are 10^6 and 10^9 bytes\n")
        print("dtype  streamed   buffers  own peak  bf16/own  tokens/s    GB/s   storage     of it")
        for dtype in ("bf16", "int4"):
            run(folder, args.layers, dtype, args.tokens)


if __name__ == "__main__":
    main()
