"""ZeRO-Inference: tokens from a model whose weights rest in a file, against what the storage gives.

    python benchmarks/streamed_weights.py --folder /some/disk --save WHAT

A Llama is saved, built without weights and given to `init_inference` with ``zero.offload_param.device=nvme``. "of the
storage": the bytes of weights read per second while tokens are generated, divided by what reading the same file in the
same order gives without a model. Memory is what the process itself has (RssAnon, the largest of samples while it
loads and generates), beyond what it had before.
"""

from __future__ import annotations

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

import deepspeed
from deepspeed.inference.streaming import StreamedWeights
from deepspeed.utils.logging import logger
from report import Report, common_arguments


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


def config(layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=256,
        hidden_size=1024,
        intermediate_size=3072,
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


def run(folder: Path, layers: int, dtype: str, tokens: int) -> dict[str, float]:
    from transformers import AutoModelForCausalLM, GenerationConfig

    memory: list[int] = []
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(folder)}}
    quant = {"weight": {"num_bits": 4, "q_groups": 8}}
    more: dict[str, Any] = {"quant": quant, "dtype": "int8"} if dtype == "int4" else {"dtype": dtype}
    with watched(memory):
        with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
            model = AutoModelForCausalLM.from_config(config(layers))
        whole = 2 * sum(param.numel() for param in model.parameters())
        engine = deepspeed.init_inference(
            model, checkpoint=str(folder / "model"), zero=zero, replace_with_kernel_inject=True, **more
        )
        streamed = engine.streamed
        assert streamed is not None
        os.sync()
        settings = GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        prompt = torch.arange(8)[None]
        engine.generate(prompt, generation_config=settings)
        limits = [storage_speed(streamed, 2)]
        before, began = streamed.store.bytes_read, time.perf_counter()
        engine.generate(prompt, generation_config=settings)
        took = time.perf_counter() - began
        read = (streamed.store.bytes_read - before) / took
        limits.append(storage_speed(streamed, 2))
    limit = sum(limits) / 2
    found = {
        "streamed": streamed.bytes_streamed / 1e6,
        "buffers": streamed.bytes_held / 1e6,
        "own memory": memory[0] / 1e6,
        "model / own": whole / max(1, memory[0]),
        "tokens/s": tokens / took,
        "GB/s": read / 1e9,
        "storage": limit / 1e9,
        "of it": read / limit,
    }
    engine.destroy()
    return found


def main() -> None:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--folder", default=None, help="on the storage")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM

    if args.quick:
        args.layers, args.tokens = 2, 4
    report = Report("streamed_weights", args)
    logger.setLevel("WARNING")
    torch.set_num_threads(2)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        folder = Path(made)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config(args.layers)).to(torch.bfloat16)
        numel = sum(param.numel() for param in model.parameters())
        model.save_pretrained(folder / "model", max_shard_size="100MB")
        del model
        for dtype in ("bf16", "int4"):
            found[dtype] = run(folder, args.layers, dtype, args.tokens)
    report.data["results"] = found
    forms = ["{:.0f}", "{:.1f}", "{:.0f}", "{:.1f} x", "{:.2f}", "{:.2f}", "{:.2f}", "{:.0%}"]
    rows = [
        [name, *(form.format(each) for form, each in zip(forms, values.values(), strict=True))]
        for name, values in found.items()
    ]
    report.table(
        f"Llama of {numel / 1e6:.0f}M parameters in {args.layers} layers, batch 1, {args.tokens} tokens, 2 threads; MB "
        "and GB/s of 10^6 and 10^9 bytes; the model in bf16 against own memory",
        ["weights", *found["bf16"]],
        rows,
    )
    report.save()


if __name__ == "__main__":
    main()
