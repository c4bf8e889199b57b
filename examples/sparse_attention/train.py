"""A Transformers model whose tokens attend to a pattern of blocks: what that costs, and what the loss becomes.

    python examples/sparse_attention/train.py
    python examples/sparse_attention/train.py --mode bslongformer --length 16384
    torchrun --nproc-per-node 2 examples/sparse_attention/train.py --stage 3

The model and the loop are those of dense attention: the section `sparse_attention` of the config is all that differs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed

VOCABULARY = 256  # bytes
FILES = sorted(Path(deepspeed.__file__).parent.rglob("*.py"))
PATTERNS = {
    "fixed": {"num_local_blocks": 16, "num_global_blocks": 1, "attention": "unidirectional"},
    "bigbird": {"num_sliding_window_blocks": 15, "num_random_blocks": 1, "num_global_blocks": 1},
    "bslongformer": {"num_sliding_window_blocks": 15, "global_block_indices": [0]},
}


def settings(options: argparse.Namespace, sparse: bool) -> dict:
    pattern = {"sparse_attention": {"mode": options.mode, "block": 16, **PATTERNS[options.mode]}}
    return {
        **(pattern if sparse else {}),
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": options.stage},
    }


def make_model(length: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=length,
        use_cache=False,
    )
    return LlamaForCausalLM(sizes)


def batches(length: int, steps: int) -> torch.Tensor:
    """Bytes of the package's files [steps, 1, length]."""
    data, needed = bytearray(), length * steps
    for file in FILES:
        data += file.read_bytes()
        if len(data) >= needed:
            break
    return torch.tensor(list(data[:needed])).view(steps, 1, length)


def train(options: argparse.Namespace, *, sparse: bool) -> tuple[list[float], float]:
    """The losses, and the seconds of the fastest step."""
    engine, *_ = deepspeed.initialize(model=make_model(options.length), config=settings(options, sparse))
    losses, seconds = [], []
    for tokens in batches(options.length, options.steps).to(engine.device):
        begin = time.perf_counter()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - begin)
    engine.destroy()
    return losses, min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", default="fixed", choices=sorted(PATTERNS))
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--stage", type=int, default=1, choices=range(4))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--output", type=Path, help="accepted and not used: nothing is written")
    options = parser.parse_args()
    deepspeed.init_distributed(auto_mpi_discovery=False)

    dense, dense_seconds = train(options, sparse=False)
    sparse, seconds = train(options, sparse=True)
    if deepspeed.comm.get_rank() == 0:
        print(f"{options.mode}, {options.length} tokens, {options.steps} steps")
        print(f"dense:  loss {dense[0]:.4f} -> {dense[-1]:.4f}, {dense_seconds:.2f} s per step")
        print(f"sparse: loss {sparse[0]:.4f} -> {sparse[-1]:.4f}, {seconds:.2f} s per step")
    deepspeed.comm.barrier()


if __name__ == "__main__":
    main()
