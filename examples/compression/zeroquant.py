"""A trained model is quantized without labels, and without training it as a whole.

    python examples/compression/zeroquant.py

After Z. Yao et al.: ZeroQuant, efficient and affordable post-training quantization for large-scale transformers (2022).
Weights have a scale for each group of rows, inputs of layers one for each token. Rounding alone is enough for 8 bits.
For fewer, one layer after the other learns to give what the teacher's layer gives, from inputs that the quantized
layers before it gave: a model that is too large to be trained at once can be trained in this way. The result is saved
with packed weights, and multiplies integers.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from task import Classifier, Sizes, Snippets, Table, accuracy, saved, trained_teacher
from torch.nn import functional

import deepspeed
from deepspeed.compression.compress import init_compression, redundancy_clean
from deepspeed.compression.config import get_compression_config
from deepspeed.compression.scheduler import compression_scheduler


def quantization(bits: int, groups: int) -> dict[str, Any]:
    """Weights of ``bits`` in ``groups`` (tables of words in 8), inputs of layers in 8 bits."""
    eight, few = ({"start_bits": n, "target_bits": n} for n in (8, bits))
    return {
        "compression_training": {
            "weight_quantization": {
                "shared_parameters": {
                    "enabled": True,
                    "schedule_offset": 0,
                    "quantize_groups": groups,
                    "quantization_type": "symmetric",
                    "quantize_weight_in_forward": True,
                },
                "different_groups": {
                    "matrices": {"params": few, "modules": ["layer"]},
                    "tables": {"params": eight, "modules": ["embeddings"]},
                },
            },
            "activation_quantization": {
                "shared_parameters": {
                    "enabled": True,
                    "schedule_offset": 0,
                    "quantization_type": "asymmetric",
                    "range_calibration": "dynamic",
                },
                "different_groups": {"inputs": {"params": {"bits": 8}, "modules": ["layer"]}},
            },
        }
    }


def learn_layer_by_layer(
    student: Classifier, teacher: Classifier, data: Snippets, options: argparse.Namespace
) -> None:
    """Each layer of ``student``, which is quantized in forward, learns what the teacher's gives; no labels are used."""
    generator = torch.Generator().manual_seed(2)
    teacher.eval()
    student.train()
    for number, layer in enumerate(student.layer):
        optimizer = torch.optim.Adam(layer.parameters(), lr=options.layer_lr)
        for _ in range(options.layer_steps):
            tokens, _ = data.train(options.batch, generator)
            with torch.no_grad():
                wanted = teacher(tokens).hidden[number + 1]
                x = student.embeddings(tokens)
                for before in student.layer[:number]:
                    x = before(x)[0]
            optimizer.zero_grad()
            functional.mse_loss(layer(x)[0], wanted).backward()
            optimizer.step()


def main(arguments: list[str] | None = None) -> Table:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4, 2])
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--steps", type=int, default=150, help="of the teacher")
    parser.add_argument("--lr", type=float, default=3e-3, help="of the teacher")
    parser.add_argument("--layer-steps", type=int, default=40)
    parser.add_argument("--layer-lr", type=float, default=5e-4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir(), "ds_compression"))
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    deepspeed.init_distributed(auto_mpi_discovery=False)

    sizes = Sizes(hidden=options.hidden, inner=4 * options.hidden, layers=options.layers)
    data = Snippets(sizes.length)
    teacher = trained_teacher(sizes, data, options.steps, options.batch, options.lr)
    table = Table()
    table.add("teacher", accuracy(teacher, data), saved(teacher, options.output / "teacher.pt"))

    for bits in options.bits:
        config = quantization(bits, options.groups)
        for learns in (False, True) if bits < 8 else (False,):
            student = copy.deepcopy(teacher).requires_grad_(True)
            student = init_compression(student, config)
            compression_scheduler(student, get_compression_config(config))
            if learns:
                learn_layer_by_layer(student, teacher, data, options)
            clean = redundancy_clean(student, config, packed=True)
            name = f"W{bits}A8, {'layer by layer' if learns else 'rounded'}"
            table.add(name, accuracy(clean, data), saved(clean, options.output / f"w{bits}_{learns}.pt"))
    return table


if __name__ == "__main__":
    main()
