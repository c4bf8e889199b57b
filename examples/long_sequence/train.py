"""A Transformers model on long sequences: feed-forward layers and loss in tiles, layers computed again in backward.

    python examples/long_sequence/train.py
    python examples/long_sequence/train.py --length 16384
    torchrun --nproc-per-node 2 examples/long_sequence/train.py --sequence 2      # two ranks share each sequence

The model and the loop are those of short sequences; the config and one call of the model differ. Shows how much memory
a step takes with and without, and that the loss is the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed
from deepspeed.accelerator import get_accelerator

VOCABULARY = 32_000
FILES = sorted(Path(deepspeed.__file__).parent.rglob("*.py"))


def settings(long: bool, sequence: int, stage: int) -> dict:
    return {
        "tiled_compute": {"enabled": long, "loss_shards": 16},
        "activation_checkpointing": {"cpu_checkpointing": long},
        "sequence_parallel_size": sequence,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }


def make_model(length: int, long: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
        use_cache=False,
    )
    model = LlamaForCausalLM(sizes)
    if long:
        model.gradient_checkpointing_enable()
    return model


def batches(length: int, steps: int) -> list[dict[str, torch.Tensor]]:
    """Bytes of the package's files, labels equal to the inputs."""
    data, needed = bytearray(), length * steps
    for file in FILES:
        data += file.read_bytes()
        if len(data) >= needed:
            break
    rows = torch.tensor(list(data[:needed])).view(steps, 1, length)
    return [{"input_ids": row, "labels": row} for row in rows]


def train(options: argparse.Namespace, *, long: bool) -> tuple[list[float], float]:
    """The losses, and the MiB that the last step needs beyond what is there at its beginning."""
    memory = get_accelerator()  # on a CPU: of this process
    model = make_model(options.length, long)
    engine, *_ = deepspeed.initialize(model=model, config=settings(long, options.sequence, options.stage))
    losses = []
    for batch in batches(options.length, options.steps):
        memory.reset_peak_memory_stats()
        before = memory.memory_allocated()
        loss = engine(**{name: each.to(engine.device) for name, each in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    needed = (memory.max_memory_allocated() - before) / 2**20
    engine.destroy()
    return losses, needed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--sequence", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--stage", type=int, default=1, choices=range(4))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--output", type=Path, help="accepted and not used: nothing is written")
    options = parser.parse_args()
    deepspeed.init_distributed(auto_mpi_discovery=False)

    losses, memory = train(options, long=True)
    plain, plain_memory = train(options, long=False)
    if deepspeed.comm.get_rank() == 0:
        print(f"{options.length} tokens: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
        print(f"without tiles: loss {plain[0]:.4f} -> {plain[-1]:.4f}")
        print(f"a step needs {memory:.0f} MiB, without tiles {plain_memory:.0f} MiB")
    deepspeed.comm.barrier()


if __name__ == "__main__":
    main()
