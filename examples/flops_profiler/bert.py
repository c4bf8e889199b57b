"""Profile BERT for sequence classification, as Transformers builds it from its config; nothing is downloaded.

python examples/flops_profiler/bert.py --batch-size 4 --seq-length 128
python examples/flops_profiler/bert.py --large --device meta        # counts without memory
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from deepspeed.profiling.flops_profiler import get_model_profile

LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


def inputs(batch_size: int, seq_length: int, device: str) -> dict[str, Tensor]:
    shape = (batch_size, seq_length)
    return {
        "input_ids": torch.zeros(shape, dtype=torch.long, device=device),
        "labels": torch.ones(batch_size, dtype=torch.long, device=device),
    }


def main(arguments: list[str] | None = None) -> tuple[int, int, int]:
    parser = argparse.ArgumentParser(description="Profile BERT.")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--large", action="store_true", help="the shape of BERT-large; default: BERT-base")
    parser.add_argument("--layers", type=int, help="fewer layers")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(arguments)
    config = BertConfig(**LARGE if given.large else {})
    config.num_hidden_layers = given.layers or config.num_hidden_layers
    with torch.device(given.device):
        model = BertForSequenceClassification(config)
    return get_model_profile(
        model,
        kwargs=inputs(given.batch_size, given.seq_length, given.device),
        print_profile=True,
        detailed=True,
        as_string=False,
    )


if __name__ == "__main__":
    main()
