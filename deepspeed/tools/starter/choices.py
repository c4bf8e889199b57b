"""Config choice of `ds init`: plans the memory of candidates in order of time cost, and takes the first that fits."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.planning import report
from deepspeed.planning.advice import advise
from deepspeed.planning.link_time import link_times
from deepspeed.planning.request import PlanAnswer, PlanRequest, answer
from deepspeed.tools import parsers
from deepspeed.tools.plan import make_request
from deepspeed.zero.partitioning import blocks_of

LORA_RANK = 16
LEARNING_RATES = {"finetune": 1e-5, "pretrain": 3e-4, "lora": 2e-4}
MAX_PER_RANK = 16
"""Samples per micro-batch above which throughput hardly increases."""

USUAL_BATCH = 32


@dataclass(slots=True)
class Decision:
    """The planned run, and sentences on the candidates that were tried and why this one was taken."""

    answer: PlanAnswer
    reasons: list[str] = field(default_factory=list)
    plain_loop: bool = True

    @property
    def config(self) -> dict[str, Any]:
        """The config to write."""
        request, micro = self.answer.request, self.answer.config.train_micro_batch_size_per_gpu
        # A plain loop gets the global batch, which a run on another number of ranks keeps or is refused with what
        # fits; trainers want the accumulation.
        key = "train_batch_size" if self.plain_loop else "gradient_accumulation_steps"
        return {
            key: getattr(self.answer.config, key),
            "train_micro_batch_size_per_gpu": micro,
            **{k: value for k, value in request.config.items() if "batch" not in k and "steps" not in k},
        }


def decide(args: argparse.Namespace) -> Decision:
    """Choose the config for these arguments of `ds init`. DeepSpeedConfigError: no known config fits, the batch is not
    divisible by the ranks, or the client does not support the device; ModelError: the model cannot be built."""
    ranks = args.gpus * args.nodes
    batch = args.batch or max(1, USUAL_BATCH // ranks) * ranks
    if batch % ranks:
        raise DeepSpeedConfigError(f"--batch {batch} cannot be divided among {ranks} ranks: pass a multiple")
    request = _request(args, batch)
    if args.client == "lightning" and request.device_type != "cuda":
        raise DeepSpeedConfigError(
            f"--with lightning on {request.device_type}: Lightning's DeepSpeedStrategy takes CUDA devices only. Use "
            "--with torch, or plan for a machine that has them: --device cuda --device-memory 24G"
        )
    if args.goal == "lora":
        add_adapters(request.module)
    decision = _smallest_that_fits(request)
    decision.plain_loop = args.client == "torch"
    _enlarge(decision, batch // ranks)
    if args.link_mbits is not None and args.nodes > 1:
        best = link_times(decision.answer, 1.0, args.link_mbits * 1e6 / 8).recommended
        if best.change:
            decision.reasons.append(
                f"Between nodes at {args.link_mbits:g} Mbit/s, {best.name} would send less ({best.change}); "
                "not enabled, as it changes the numerics: see docs/slow_links.md."
            )
    return decision


def _request(args: argparse.Namespace, batch: int) -> PlanRequest:
    """Return the base request to `ds plan`, from which all candidates are derived."""
    rate, pretrains = LEARNING_RATES[args.goal], args.goal == "pretrain"
    adamw = {"lr": rate, "weight_decay": 0.1 if pretrains else 0.0}
    config: dict[str, Any] = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": adamw},
        "zero_optimization": {"stage": 0 if args.gpus * args.nodes == 1 else 1},
    }
    if pretrains and args.client == "torch":  # trainers have schedules of their own
        warmup = {"warmup_max_lr": rate, "warmup_num_steps": 50, "warmup_type": "linear"}
        config["scheduler"] = {"type": "WarmupLR", "params": warmup}
    given = ["", "--model", args.model]
    for option in ("gpus", "nodes", "sequence"):
        given += [f"--{option}", str(getattr(args, option))]
    planned = parsers.plan().parse_args(given)
    for name in ("device", "device_memory", "host_memory"):
        setattr(planned, name, getattr(args, name))
    planned.disk = args.disk if args.nvme else 0
    planned.dtype = "fp32" if args.goal == "pretrain" or args.device == "cpu" else "bf16"
    request = make_request(planned, config)
    if request.device_type != "cpu":
        config["bf16"] = {"enabled": True}
    elsewhere = args.device_memory is not None and args.host_memory is None  # that host's memory is unknown
    capacity = replace(request.capacity, host=None) if elsewhere else request.capacity
    return replace(request, config=config, capacity=capacity, follow_disk=False)


def add_adapters(module: nn.Module) -> None:
    """Freeze the model, and add LoRA's two trained matrices to each linear layer of its blocks, so that the plan counts
    them."""
    module.requires_grad_(False)
    for block in blocks_of(module):
        for linear in [each for each in block.modules() if isinstance(each, nn.Linear)]:
            for name, shape in (
                ("lora_A", (LORA_RANK, linear.in_features)),
                ("lora_B", (linear.out_features, LORA_RANK)),
            ):
                linear.register_parameter(name, nn.Parameter(linear.weight.new_empty(shape)))


def _candidates(request: PlanRequest) -> Iterator[PlanRequest]:
    """Yield the candidates, cheapest in time first: without recomputation, then with it; within each, by ZeRO stage,
    since higher stages cost communication."""
    first = request.config["zero_optimization"]["stage"]
    stages = range(first, 4 if request.ranks > 1 else 1)
    for checkpointing in (False, True) if request.shape is not None else (False,):
        for stage in stages:
            yield _at(replace(request, checkpointing=checkpointing), stage)


def _at(request: PlanRequest, stage: int) -> PlanRequest:
    config = {**request.config, "zero_optimization": {"stage": stage}}
    return replace(request, config=config, zero_init=stage == 3)


def _smallest_that_fits(request: PlanRequest) -> Decision:
    reasons: list[str] = []
    found = None
    for candidate in _candidates(request):
        found = answer(candidate)
        if not found.lacking():
            reasons.append(f"{_name(candidate)} is the first that fits.")
            return Decision(found, reasons)
        lacks = "; ".join(line for line in report.verdict(found) if "DOES NOT FIT" in line)
        reasons.append(f"{_name(candidate)} was not taken: {lacks}.")
    assert found is not None
    for stage in (2, 3):  # at both, a rank's shard of the states can be offloaded to the host
        advice = advise(answer(_at(found.request, stage)))
        if advice.result is not None:
            changes = "; ".join(advice.changes)
            reasons.append(f"Stage {stage} fits with {changes}. Offloading costs time in each step.")
            return Decision(advice.result, reasons)
    lines = "\n".join(report.advice_lines(advice))
    raise DeepSpeedConfigError(f"no known config fits:\n{report.headline(found)}\n{lines}")


def _name(request: PlanRequest) -> str:
    again = " with activation checkpointing (about a third more compute)" if request.checkpointing else ""
    return f"Stage {request.config['zero_optimization']['stage']}{again}"


def _enlarge(decision: Decision, per_rank: int) -> None:
    """Double the micro-batch while it fits and divides the samples per rank and step."""
    micro = 1
    while 2 * micro <= min(per_rank, MAX_PER_RANK) and per_rank % (2 * micro) == 0:
        larger = replace(decision.answer.request, micro_batch=2 * micro)
        found = answer(larger)
        if found.lacking():
            decision.reasons.append(f"A micro-batch of {2 * micro} would not fit.")
            break
        micro, decision.answer = 2 * micro, found
    more = "more would use the device better, " if micro < per_rank else ""
    decision.reasons.append(
        f"A rank processes {micro} of its {per_rank} samples per step at a time: {more}fewer would need less memory."
    )
