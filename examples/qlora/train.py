"""Adapters on a base model in few bits, from one context: quantized while it loads, sharded by ZeRO, merged at the end.

    python examples/qlora/train.py
    torchrun --nproc-per-node 2 examples/qlora/train.py --stage 3 --bits 6

A tiny Llama is written to disk as the "pretrained" base. Under `deepspeed.linear.Init`, `from_pretrained` makes its
linear layers frozen ones of few bits with adapters beside them; nothing else in the script knows of it. Shows what the
base takes, the loss, and that the merged model, a plain Llama, computes the same.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import deepspeed
from deepspeed.linear import Init, LoRAConfig, QuantizationConfig, merged_state_dict
from deepspeed.linear.quantization import QuantizedParameter

LENGTH = 32


def config(stage: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-2}},
        "zero_optimization": {"stage": stage},
    }


def write_base(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    LlamaForCausalLM(sizes).save_pretrained(folder)


def bytes_held(weights: list[Any], stage: int) -> int:
    """Of the quantized weights, by this rank."""
    return sum(w.ds_tensor.nbytes if stage == 3 else w.nbytes for w in weights)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--bits", type=int, default=8, choices=[4, 6, 8, 12])
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir(), "ds_qlora"))
    options = parser.parse_args()
    deepspeed.init_distributed(auto_mpi_discovery=False)
    rank = deepspeed.comm.get_rank()
    if rank == 0:
        write_base(options.output / "base")
    deepspeed.comm.barrier()

    with Init(LoRAConfig(lora_r=8, lora_alpha=16.0), QuantizationConfig(q_bits=options.bits)):
        model = AutoModelForCausalLM.from_pretrained(options.output / "base")
    quantized = [p for p in model.parameters() if isinstance(p, QuantizedParameter)]
    values = sum(p.full_shape.numel() for p in quantized)
    engine, *_ = deepspeed.initialize(model=model, config=config(options.stage))

    batch = torch.randint(0, 256, (4, LENGTH), generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(options.steps):
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())

    held = bytes_held(quantized, options.stage)
    state = merged_state_dict(engine.module)
    logits = engine(input_ids=batch).logits.detach()
    if rank == 0:
        plain = LlamaForCausalLM.from_pretrained(options.output / "base")
        plain.load_state_dict(state)
        plain.save_pretrained(options.output / "merged")
        apart = (plain(batch).logits - logits).abs().max().item()
        answer = plain.generate(batch[:1, :8], max_new_tokens=8, do_sample=False)[0, 8:].tolist()
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {options.steps} steps")
        print(f"base: {values:,} values; this rank holds {held:,} bytes")
        print(f"merged model: logits {apart:.1e} apart; it goes on with {answer}")
    deepspeed.comm.barrier()


if __name__ == "__main__":
    main()
