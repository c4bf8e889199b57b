r"""MoQ: weights of 16 bits lose one bit after the other while the classifier of text trains, without any preparation.

    python examples/compression/moq.py
    python examples/compression/moq.py --target-bits 4 --eigenvalue

With --eigenvalue, blocks whose loss has more curvature keep their bits longer.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from task import Classifier, Sizes, Snippets, accuracy, from_labels, settings, train

import deepspeed


def moq(options: argparse.Namespace, period: int) -> dict[str, Any]:
    section: dict[str, Any] = {
        "enabled": True,
        "quantize_type": "symmetric",
        "quantize_bits": {"start_bits": options.start_bits, "target_bits": options.target_bits},
        "quantize_schedule": {"quantize_period": period, "schedule_offset": options.steps // 4},
        "quantize_groups": 16,
    }
    if options.eigenvalue:
        section["eigenvalue"] = {
            "enabled": True,
            "layer_name": "layer",
            "layer_num": options.layers,
            "max_iter": 10,
            "tol": 0.1,
            "gas_boundary_resolution": 4,
        }
    return section


def levels(weight: torch.Tensor) -> int:
    """The most different values in one of the sixteen groups of a matrix."""
    return max(len(group.unique()) for group in weight.detach().float().flatten().chunk(16))


def run(options: argparse.Namespace, data: Snippets, section: dict[str, Any] | None) -> tuple[float, int]:
    """Accuracy, and the values of a group of the first layer's query."""
    torch.manual_seed(0)
    sizes = Sizes(hidden=options.hidden, inner=4 * options.hidden, layers=options.layers)
    config = settings(options.steps, options.lr, bf16={"enabled": True})
    if section is not None:
        config["quantize_training"] = section
    engine, *_ = deepspeed.initialize(model=Classifier(sizes), config=config)
    train(engine, data, options.steps, options.batch, from_labels)
    model = engine.module
    result = accuracy(model, data), levels(model.layer[0].attention.self.query.weight)
    engine.destroy()
    return result


def main(arguments: list[str] | None = None) -> dict[str, tuple[float, int]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--start-bits", type=int, default=12)
    parser.add_argument("--target-bits", type=int, default=8)
    parser.add_argument("--eigenvalue", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args(arguments)
    deepspeed.init_distributed(auto_mpi_discovery=False)
    data = Snippets(Sizes().length)
    # The period doubles with every bit, so the last bit goes after as many periods as this.
    periods = 2 ** (options.start_bits - options.target_bits) - 1
    period = max(options.steps // 2 // periods, 1)
    found = {"bf16": run(options, data, None), "MoQ": run(options, data, moq(options, period))}
    for name, (correct, values) in found.items():
        print(f"{name}: accuracy {correct:.3f}, up to {values} values in a group of weights", flush=True)
    return found


if __name__ == "__main__":
    main()
