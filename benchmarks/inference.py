"""Tokens per second: decoding against Transformers' generate and the memory stream, and serving mixed requests.

First table: greedy tokens of a Llama of 88M parameters (hidden 768, 12 layers, 4 heads of keys), 2 threads, batches of
1 and 16, at each precision. "of the stream": the bytes of weights that a step must read, divided by the time of a step,
as a share of what a plain sum over memory reads per second in the same run.
Second table: 64 requests with mixed lengths, one after another and in static batches of 16 with Transformers, and with
continuous batching here.

    python benchmarks/inference.py --save cpu2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jobs import OURS, Contender, Job, Spread, round_robin, started
from report import Report, common_arguments

PRECISIONS = ("fp32", "bf16", "int8", "int4")
GOALS = {"fp32": 1.5, "bf16": 2.0, "int8": 2.0, "int4": None}
STREAM = 1 << 28  # elements of the sum that measures the memory
SHAPES = {
    "88M": {"vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12},
    "tiny": {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
}


def make_model(shape: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    heads = {"88M": (12, 4), "tiny": (4, 2)}[shape]
    config = LlamaConfig(
        **SHAPES[shape],
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        max_position_embeddings=2048,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval().to(dtype)


def requests(count: int, vocabulary: int, longest: int) -> list[tuple[list[int], int]]:
    """Prompts and the number of tokens wanted: lengths spread over a factor of eight, the same in every run."""
    draw = torch.Generator().manual_seed(1)

    def length() -> int:
        return int(torch.randint(longest // 8, longest + 1, (1,), generator=draw))

    return [
        (torch.randint(0, vocabulary, (length(),), generator=draw).tolist(), length()) for _ in range(count)
    ]


class Inference:
    """One rank that decodes, or serves, with ``system``: transformers, compiled (the same by torch.compile, with a
    static cache), ours, kernels (ours with kernel injection), generate (of the engine with kernels)."""

    def __init__(self, system: str, shape: str, precision: str, longest: int) -> None:
        import transformers

        import deepspeed

        transformers.logging.set_verbosity_error()
        self.system, self.longest = system, longest
        module = make_model(shape, torch.bfloat16 if precision == "bf16" else torch.float32)
        self.generate = module.generate
        if system in ("kernels", "generate"):
            settings: dict[str, Any] = {"dtype": {"fp32": "fp32", "bf16": "bf16"}.get(precision, "int8")}
            if precision == "int4":
                settings["quant"] = {"weight": {"num_bits": 4, "q_groups": 1}}
            engine = deepspeed.init_inference(module, replace_with_kernel_inject=True, **settings)
            module, self.generate = engine.module, engine.generate
        self.module, self.vocabulary = module, SHAPES[shape]["vocab_size"]
        self.settings: dict[str, Any] = {}
        if system == "compiled":
            module.forward = torch.compile(module.forward)
            self.settings = {"cache_implementation": "static"}
        self.generator: Any = None

    def run(self, batch: int, prompt: int, tokens: int) -> float:
        """Seconds to generate ``tokens`` for each of ``batch`` prompts, less the time of the prompts."""
        work = self._by_ours if self.system in ("ours", "kernels") else self._by_transformers
        torch.manual_seed(2)
        prompts = torch.randint(0, self.vocabulary, (batch, prompt)).tolist()
        one = work([(each, 1) for each in prompts])
        return work([(each, tokens + 1) for each in prompts]) - one

    def serve(self, count: int, batch: int) -> float:
        """Seconds for ``count`` mixed requests, ``batch`` at a time (Transformers)."""
        wanted = requests(count, self.vocabulary, self.longest)
        if self.system != "transformers":
            return self._by_ours(wanted)
        return sum(self._by_transformers(wanted[at : at + batch]) for at in range(0, count, batch))

    def _by_transformers(self, wanted: Sequence[tuple[list[int], int]]) -> float:
        """A batch runs until its longest answer ends; shorter prompts are padded on the left."""
        width, new = max(len(prompt) for prompt, _ in wanted), max(tokens for _, tokens in wanted)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in wanted])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in wanted])
        begin = time.perf_counter()
        self.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            **self.settings,
        )
        return time.perf_counter() - begin

    def _by_ours(self, wanted: Sequence[tuple[list[int], int]]) -> float:
        from deepspeed.inference.generator import Generator
        from deepspeed.inference.scheduling.requests import SamplingParams

        if self.generator is None:
            self.generator = Generator(
                self.module, max_length=2 * self.longest + 1, max_sequences=64, prefix_sharing=False
            )
        settings = [SamplingParams(max_new_tokens=tokens) for _, tokens in wanted]
        begin = time.perf_counter()
        self.generator.generate([prompt for prompt, _ in wanted], settings)
        return time.perf_counter() - begin

    def filled(self) -> list[int]:
        """Forwards with as many tokens as the budget, and those with fewer although requests were waiting."""
        return [0, 0] if self.generator is None else [self.generator.counts.full, self.generator.counts.short]

    def weights(self) -> int:
        """Bytes of weights that a step of decoding reads: all but the embedding, of which it reads rows."""
        embedding = {id(each) for each in self.module.get_input_embeddings().parameters()}
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return sum(each.nbytes for each in tensors if id(each) not in embedding)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Tokens per second of decoding and of serving, against Transformers.")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--tokens", type=int, default=48, help="generated, per sequence")
    parser.add_argument("--requests", type=int, default=64, help="second table")
    parser.add_argument(
        "--longest", type=int, default=128, help="tokens of a prompt and of an answer, second table"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds over all contenders")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compiled", action="store_true", help="torch.compile takes part, too")
    parser.add_argument("--serving", action=argparse.BooleanOptionalAction, default=True, help="second table")
    arguments = parser.parse_args(argv)
    arguments.shape = "tiny" if arguments.quick else "88M"
    if arguments.quick:
        arguments.precisions, arguments.tokens, arguments.rounds = ["fp32"], 24, 2
        arguments.requests, arguments.longest, arguments.batches = 4, 16, [1, 2]
    return arguments


def contenders(arguments: argparse.Namespace, precision: str) -> list[Contender]:
    """Transformers runs integer weights in bf16, the fastest that it has on a CPU."""
    options = {
        "shape": arguments.shape,
        "longest": max(arguments.longest, arguments.prompt + arguments.tokens),
    }
    plain = precision if precision in ("fp32", "bf16") else "bf16"
    rows = [("transformers", plain)] + ([("compiled", plain)] if arguments.compiled else [])
    rows += [
        (each, precision) for each in ("ours", "kernels", "generate") if plain == precision or each != "ours"
    ]
    return [
        Contender(
            f"{system}, {of}",
            "inference:Inference",
            {**options, "system": system, "precision": of},
            ranks=1,
            threads=arguments.threads,
            python=OURS,
        )
        for system, of in rows
    ]


def stream_bytes_per_second() -> float:
    """What a sum over fp32 values reads, the best of five."""
    values = torch.ones(STREAM // 4)
    best = 0.0
    for _ in range(5):
        begin = time.perf_counter()
        values.sum()
        best = max(best, values.nbytes / (time.perf_counter() - begin))
    return best


def decoding(report: Report, arguments: argparse.Namespace, precision: str) -> None:
    stream = stream_bytes_per_second()
    cells, found = [], dict[str, Any](stream=stream)
    with started(contenders(arguments, precision)) as jobs:
        weights = {name: job.call("weights")[0] for name, job in jobs.items()}
        for batch in arguments.batches:
            shape = {"batch": batch, "prompt": arguments.prompt, "tokens": arguments.tokens}

            def seconds(job: Job, shape: dict[str, int] = shape) -> float:
                return job.call("run", **shape)[0]

            round_robin(jobs, 1, seconds)  # buffers are made, kernels chosen
            times = round_robin(jobs, arguments.rounds, seconds)
            base = times[next(iter(times))]
            for name, each in times.items():
                median = statistics.median(each)
                gain = Spread.of([b / own for b, own in zip(base, each, strict=True)])
                share = weights[name] * arguments.tokens / median / stream
                goal = GOALS[precision]
                cells.append(
                    [
                        name,
                        str(batch),
                        f"{batch * arguments.tokens / median:.1f}",
                        gain.show(),
                        f">= {goal:.1f}" if goal and not name.startswith("transformers") else "",
                        f"{share:.2f}",
                    ]
                )
            found[str(batch)] = times
    report.table(
        f"decoding {arguments.tokens} tokens after {arguments.prompt}, {arguments.shape} Llama, {precision}, "
        f"{arguments.threads} threads, memory stream {stream / 1e9:.1f} GB/s",
        ["", "batch", "tokens/s", "to Transformers, median [min .. max]", "goal", "of the stream"],
        cells,
    )
    report.data[precision] = found


_PLAIN, _OURS = "transformers, fp32", "ours, fp32"


def serving(report: Report, arguments: argparse.Namespace) -> None:
    rows: dict[str, Callable[[dict[str, Job]], float]] = {
        "Transformers, one by one": lambda jobs: _serve(jobs, _PLAIN, arguments, 1),
        "Transformers, static batches of 16": lambda jobs: _serve(jobs, _PLAIN, arguments, 16),
        "ours, continuous": lambda jobs: _serve(jobs, _OURS, arguments, 16),
    }
    times: dict[str, list[float]] = {name: [] for name in rows}
    taking_part = [each for each in contenders(arguments, "fp32") if each.name in (_PLAIN, _OURS)]
    with started(taking_part) as jobs:
        for _ in range(max(arguments.rounds // 2, 1)):
            for name, work in rows.items():
                times[name].append(work(jobs))
        full, short = jobs[_OURS].call("filled")[0]
    own = times["ours, continuous"]
    goals = [">= 5.0", ">= 1.5", ""]
    cells = []
    for (name, each), goal in zip(times.items(), goals, strict=True):
        gain = Spread.of([other / mine for other, mine in zip(each, own, strict=True)])
        cells.append([name, f"{statistics.median(each):.1f}", gain.show(), goal])
    report.table(
        f"{arguments.requests} requests, prompts and answers of {arguments.longest // 8} to {arguments.longest} "
        f"tokens, {arguments.shape} Llama, fp32",
        ["", "seconds", "to ours, median [min .. max]", "goal"],
        cells,
    )
    report.data["serving"] = {**times, "full": full, "short": short}
    report.line(f"forwards while requests were waiting: {full} with the whole budget, {short} with less")


def _serve(jobs: dict[str, Job], name: str, arguments: argparse.Namespace, batch: int) -> float:
    return jobs[name].call("serve", count=arguments.requests, batch=batch)[0]


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("inference", arguments)
    for precision in arguments.precisions:
        decoding(report, arguments, precision)
    if arguments.serving:
        serving(report, arguments)
    report.save()


if __name__ == "__main__":
    main()
