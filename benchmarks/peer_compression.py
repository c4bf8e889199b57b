"""Which of DeepSpeed's compressed collectives run on this machine: its 1-bit optimizers with each `comm_backend_name`,
and the options of ZeRO++, three steps each on two ranks that stand for a host each. What does not run has no row in
slow_links.py; the error says why.

Release 0.18.9 is the last one that has 1-bit optimizers; its environment is made like that of 0.19.8 (README.md).

    ../clients/bin/python benchmarks/peer_compression.py --peer ../peer18/bin/python --save cpu
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from jobs import OURS, Contender, JobError
from report import Report, common_arguments

STEPS = 3
BACKENDS = ("nccl", "compressed", "mpi", "hccl")
ONE_BIT = {
    "OneBitAdam": {"freeze_step": 1},
    "ZeroOneAdam": {"var_freeze_step": 1, "local_step_scaler": 100, "local_step_clipper": 2},
    "OneBitLamb": {"freeze_step": 1},
}
ZERO = {
    "hpZ": {"zero_hpz_partition_size": 2},
    "qwZ": {"zero_quantized_weights": True},
    "qgZ": {"zero_quantized_gradients": True},
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Which of the peer's compressed collectives run here.")
    arguments = parser.parse_args(argv)
    if arguments.peer is None and not arguments.quick:
        parser.error("--peer PYTHON: the interpreter that has DeepSpeed 0.18.9")
    return arguments


def configs(quick: bool) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, special in ONE_BIT.items():
        for backend in BACKENDS[: 1 if quick else None]:
            params = {"lr": 1e-3, **special, "comm_backend_name": backend}
            found[f"{name}, {backend}"] = {"optimizer": {"type": name, "params": params}}
    for name, options in ZERO.items():
        optimizer = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}
        found[name] = {"optimizer": optimizer, "zero_optimization": {"stage": 3, **options}}
    return found


class TrialRank:
    """One rank that trains a small model with a configuration."""

    def __init__(self, config: dict[str, Any]) -> None:
        import deepspeed

        deepspeed.init_distributed("gloo")
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256))
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "steps_per_print": 1_000_000,
            "bf16": {"enabled": True},
            **config,
        }
        self.engine: Any = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )[0]

    def run(self) -> str:
        """The release that has run the steps."""
        import deepspeed

        inputs = torch.ones(4, 256, dtype=torch.bfloat16)
        for _ in range(STEPS):
            self.engine.backward(self.engine(inputs).float().square().mean())
            self.engine.step()
        return deepspeed.__version__


def own_host(rank: int) -> tuple[list[str], dict[str, str]]:
    """Gradients are compressed between hosts only: each rank says that it is alone on its own."""
    return [], {"LOCAL_SIZE": "1", "LOCAL_RANK": "0"}


def outcome(name: str, config: dict[str, Any], python: str) -> str:
    """That it runs, and with which release, or what the error was."""
    target = "peer_compression:TrialRank"
    contender = Contender(name, target, {"config": config}, python=python, place=own_host)
    try:
        with contender.start() as job:
            return f"runs ({job.call('run')[0]})"
    except JobError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        return next((line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))), lines[0])


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("peer_compression", arguments)
    python = arguments.peer or OURS
    found = {name: outcome(name, config, python) for name, config in configs(arguments.quick).items()}
    report.data["outcomes"] = found
    report.table(
        f"{STEPS} steps on 2 ranks, a host each",
        ["", "outcome"],
        [[name, text] for name, text in found.items()],
    )
    report.save()


if __name__ == "__main__":
    main()
