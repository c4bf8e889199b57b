"""Tokens per second of answers between training steps: the hybrid engine and the serving engine against `generate` of
the engine's module, whose weights are gathered for every token under ZeRO-3.

Each rank answers prompts of its own. Rounds take all contenders in turn; an update lies between two rounds. With
--mbits, the two ranks are hosts of their own (network namespaces, links.py) that a link of that rate joins.

    ../clients/bin/python benchmarks/rollouts.py --peer ../clients_peer/bin/python --save cpu
    ../clients/bin/python benchmarks/rollouts.py --mbits 1000 --tokens 16 --rounds 2 --save 1000mbit
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from jobs import OURS, Contender, Spread, ratios, round_robin, started
from links import Links, links_or_exit
from report import Report, common_arguments

GOAL = 5.0  # times as fast as the module
VOCABULARY = 4096
SIZES = {"tiny": (64, 2, 4), "15M": (384, 6, 6), "50M": (640, 8, 10)}  # width, layers, heads


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Rollouts under ZeRO-3.")
    parser.add_argument("--sizes", nargs="+", default=["15M"], choices=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--rows", type=int, default=8, help="prompts per rank")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the longest prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mbits", type=float, help="rate of the link; default: one host, shared memory")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.sizes, arguments.dtypes, arguments.rounds = ["tiny"], ["fp32"], 2
        arguments.rows, arguments.tokens = 2, 8
    return arguments


def llama(size: str, **special: int | None) -> Any:
    """The model of that size, with the same weights on every rank; ``special``: numbers of tokens."""
    import transformers

    width, layers, heads = SIZES[size]
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=1024,
            **special,
        )
    )


class RolloutRank:
    """One rank that answers with ``system``: module, hybrid or serving."""

    def __init__(
        self, system: str, size: str, dtype: str, stage: int, rows: int, prompt: int, tokens: int
    ) -> None:
        import transformers

        import deepspeed

        transformers.logging.set_verbosity_error()
        self.system, self.tokens = system, tokens
        module = llama(size, eos_token_id=None, bos_token_id=None)
        self.parameters = sum(param.numel() for param in module.parameters())
        embedding = module.get_input_embeddings().weight.numel()
        self.read = (self.parameters - embedding) * (2 if dtype == "bf16" else 4)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "bf16": {"enabled": dtype == "bf16"},
            "zero_optimization": {"stage": stage},
            "native_products": {"enabled": True},  # unknown to the peer, which does not mind
            "steps_per_print": 1_000_000,
        }
        if system == "hybrid":
            config["hybrid_engine"] = {"enabled": True, "max_out_tokens": 1024}
        deepspeed.init_distributed("gloo")
        self.engine: Any = deepspeed.initialize(
            model=module, model_parameters=module.parameters(), config=config
        )[0]
        draw = torch.Generator().manual_seed(2 + self.engine.global_rank)
        self.prompts = torch.randint(1, VOCABULARY, (rows, prompt), generator=draw)
        self.mask = torch.ones_like(self.prompts)
        for row in range(rows):  # lengths differ; padding is at the left
            self.mask[row, : row % (prompt // 2)] = 0
        self.rollout: Any = None
        if system == "serving":
            from deepspeed.runtime.rollout import RolloutConfig, build_rollout

            self.rollout = build_rollout(RolloutConfig("serving"), self.engine, None)

    def describe(self) -> dict[str, float]:
        """``read``: bytes of the weights that a step of decoding reads; ``rate``: bytes per second that this rank reads
        from memory while all others do."""
        return {"parameters": self.parameters, "read": self.read, "rate": self._memory_rate()}

    def _memory_rate(self) -> float:
        large = [torch.ones(self.read // 4) for _ in range(4)]  # in turn: none is in a cache when it is read
        torch.distributed.barrier()
        seconds = []
        for at in range(24):
            begin = time.perf_counter()
            large[at % len(large)].sum()
            seconds.append(time.perf_counter() - begin)
        torch.distributed.barrier()
        return self.read / sorted(seconds)[len(seconds) // 2]

    def run(self) -> float:
        """Seconds for the answers of this rank, and of the slowest one: an update comes behind."""
        self.engine.eval()
        torch.distributed.barrier()
        begin = time.perf_counter()
        answers = self._answer()
        torch.distributed.barrier()
        seconds = time.perf_counter() - begin
        assert answers.shape == (len(self.prompts), self.prompts.shape[1] + self.tokens)
        self.engine.train()
        tokens = answers[:1].to(self.engine.device)
        self.engine.backward(self.engine(input_ids=tokens, labels=tokens).loss)
        self.engine.step()
        return seconds

    def _answer(self) -> torch.Tensor:
        if self.rollout is not None:
            from deepspeed.runtime.rollout import RolloutRequest, SamplingConfig

            sampling = SamplingConfig(self.tokens, temperature=0)
            return self.rollout.generate(RolloutRequest(self.prompts, self.mask), sampling).input_ids
        generate = self.engine.generate if self.system == "hybrid" else self.engine.module.generate
        with torch.no_grad():
            return generate(
                self.prompts,
                attention_mask=self.mask,
                max_new_tokens=self.tokens,
                do_sample=False,
                pad_token_id=0,
                synced_gpus=False,  # all answers are equally long
            )


def contenders(arguments: argparse.Namespace, size: str, dtype: str, links: Links | None) -> list[Contender]:
    shared = {"size": size, "dtype": dtype}
    shared |= {name: getattr(arguments, name) for name in ("rows", "prompt", "tokens")}
    found = [("module, stage 3", "module", 3, OURS)]
    if arguments.peer:
        found.append(("peer: module, stage 3", "module", 3, arguments.peer))
    found += [("hybrid engine, stage 3", "hybrid", 3, OURS), ("serving, stage 3", "serving", 3, OURS)]
    found += [("module, stage 2", "module", 2, OURS), ("hybrid engine, stage 2", "hybrid", 2, OURS)]
    return [
        Contender(
            name,
            "rollouts:RolloutRank",
            {**shared, "system": system, "stage": stage},
            python=python,
            ranks=arguments.ranks,
            goal=GOAL if system != "module" and stage == 3 else None,
            place=None if links is None else partial(links.place, per_host=1),
        )
        for name, system, stage, python in found
    ]


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("rollouts", arguments)
    with contextlib.nullcontext() if arguments.mbits is None else links_or_exit(arguments.ranks) as links:
        compare(arguments, links, report)
    report.save()


def compare(arguments: argparse.Namespace, links: Links | None, report: Report) -> None:
    for size in arguments.sizes:
        for dtype in arguments.dtypes:
            rows = contenders(arguments, size, dtype, links)
            with started(rows) as jobs:
                if links is not None:
                    links.limit(arguments.mbits)
                for job in jobs.values():
                    job.call("run")
                seconds = round_robin(jobs, arguments.rounds, lambda job: max(job.call("run")))
                described = jobs[rows[0].name].call("describe")
            parameters = described[0]["parameters"]
            limit = sum(arguments.rows * each["rate"] / each["read"] for each in described)
            report.data[f"{size}_{dtype}_limit"] = limit
            report.data[f"{size}_{dtype}"] = seconds
            tokens = arguments.rows * arguments.tokens * arguments.ranks
            where = "" if links is None else f" on hosts joined by {arguments.mbits:g} Mbit/s"
            report.table(
                f"Llama of {parameters / 1e6:.1f}M parameters, {dtype}, {arguments.ranks} ranks{where}, "
                f"{arguments.rows} prompts each, answers of {arguments.tokens} tokens, {arguments.rounds} rounds",
                ["", "tokens/s", "of the limit", "x the module at stage 3, median [min .. max]", "goal"],
                [
                    *(cells(row, rows[0], seconds, tokens, limit) for row in rows),
                    ["limit: weights read once a step", f"{limit:,.0f}", "100%", "", ""],
                ],
            )


def cells(
    row: Contender, base: Contender, seconds: dict[str, list[float]], tokens: int, limit: float
) -> list[str]:
    """``limit``: tokens per second at which the ranks' memory is read all the time, and each weight once a step."""
    rate = tokens / Spread.of(seconds[row.name]).median
    times = ratios(seconds[base.name], seconds[row.name])
    return [
        row.name,
        f"{rate:,.0f}",
        f"{rate / limit:.0%}",
        times.show("{:.2f}"),
        f">= {row.goal:.0f}" if row.goal is not None else "",
    ]


if __name__ == "__main__":
    main()
