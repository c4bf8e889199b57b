"""LoRA on a base model that ZeRO-3 shards across ranks while it is being loaded.

    python examples/lora_zero3/train.py
    torchrun --nproc-per-node 2 examples/lora_zero3/train.py

A tiny Llama is written to disk as the "pretrained" base and loaded under `zero.Init`; PEFT adds adapters; only they
have gradients and optimizer state. Shows what each rank holds, that the base did not change, and how small the
adapter's file is.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

import deepspeed

LENGTH = 32


def config(width: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": width},
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir(), "ds_lora_zero3"))
    options = parser.parse_args()
    deepspeed.init_distributed(auto_mpi_discovery=False)
    rank = deepspeed.comm.get_rank()
    if rank == 0:
        write_base(options.output / "base")
    deepspeed.comm.barrier()

    settings = config(width=128)
    keep = HfDeepSpeedConfig(settings)  # while it exists, from_pretrained partitions what it loads
    model = AutoModelForCausalLM.from_pretrained(options.output / "base")
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    engine, *_ = deepspeed.initialize(model=model, config=settings)

    batch = torch.randint(0, 256, (4, LENGTH), generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(options.steps):
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())

    held = sum(p.ds_tensor.numel() for p in engine.module.parameters())
    whole = sum(p.ds_numel for p in engine.module.parameters())
    trained = sum(p.ds_numel for p in engine.module.parameters() if p.requires_grad)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        if rank == 0:
            engine.module.save_pretrained(options.output / "adapter")
            before = load_file(options.output / "base" / "model.safetensors")["model.embed_tokens.weight"]
            after = engine.module.base_model.model.model.embed_tokens.weight
            size = (options.output / "adapter" / "adapter_model.safetensors").stat().st_size
            print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {options.steps} steps")
            print(f"parameters: {whole:,}, trained {trained:,}; this rank's slices hold {held:,}")
            print(f"base unchanged: {torch.equal(before, after)}; adapter file {size:,} bytes")
    deepspeed.comm.barrier()
    del keep


if __name__ == "__main__":
    main()
