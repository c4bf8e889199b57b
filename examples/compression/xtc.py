"""Extreme compression in one go: a student with half of a teacher's layers, and weights of two bits or one.

    python examples/compression/xtc.py
    python examples/compression/xtc.py --bits 1

After X. Wu et al.: XTC, extreme compression for pre-trained transformers made simple and efficient (2022). The student
starts from some of the teacher's layers, is quantized from the first step on, and learns from the teacher alone: its
logits, its hidden states and its attention, of the layers that stand for each other. No stage of training in full
precision comes before. The result is saved with packed weights.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from task import Sizes, Snippets, Table, accuracy, saved, settings, student_of, trained_teacher

import deepspeed


def compression(bits: int, chosen: list[int]) -> dict[str, Any]:
    """Layers ``chosen`` of the teacher; all matrices in ``bits``, with a scale for every 16th part of a layer's weight
    and for every fourth word."""
    params = {"start_bits": bits, "target_bits": bits}
    return {
        "layer_reduction": {
            "enabled": True,
            "keep_number_layer": len(chosen),
            "module_name_prefix": "layer",
            "teacher_layer": chosen,
            "other_module_name": ["embeddings", "classifier"],
        },
        "weight_quantization": {
            "shared_parameters": {
                "enabled": True,
                "schedule_offset": 0,
                "quantize_groups": 32,
                "quantize_weight_in_forward": True,
            },
            "different_groups": {
                "matrices": {"params": params, "modules": ["layer"]},
                "tables": {"params": params, "modules": ["embeddings"]},
            },
        },
    }


def main(arguments: list[str] | None = None) -> Table:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bits", type=int, nargs="+", choices=[1, 2], default=[2, 1])
    parser.add_argument("--steps", type=int, default=150, help="of the teacher")
    parser.add_argument(
        "--lr", type=float, default=3e-3, help="of the teacher and of students that learn whole"
    )
    parser.add_argument("--student-steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4, help="of the teacher; the student has half as many")
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir(), "ds_compression"))
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    deepspeed.init_distributed(auto_mpi_discovery=False)

    sizes = Sizes(hidden=options.hidden, inner=4 * options.hidden, layers=options.layers)
    data = Snippets(sizes.length)
    teacher = trained_teacher(sizes, data, options.steps, options.batch, options.lr)
    table = Table()
    table.add(
        f"teacher, {options.layers} layers",
        accuracy(teacher, data),
        saved(teacher, options.output / "teacher.pt"),
    )

    chosen = list(range(1, options.layers, 2))
    for bits in options.bits:
        section = compression(bits, chosen)
        config = settings(options.student_steps, options.lr, compression_training=section)
        student = student_of(teacher, sizes, config, data, options.student_steps, options.batch)
        name = f"{len(chosen)} layers, {'ternary' if bits == 2 else 'binary'}"
        table.add(name, accuracy(student, data), saved(student, options.output / f"student_{bits}.pt"))
    return table


if __name__ == "__main__":
    main()
