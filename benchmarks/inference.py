"""Tokens per second: decoding against Transformers, torch.compile, llama.cpp and the memory stream; serving; latency.

decode: greedy tokens of a Llama of 88M parameters (hidden 768, 12 layers, 4 heads of keys), 2 threads, batches of 1 and
16, at each precision. Beside Transformers' generate: generate with the step compiled over a static cache, and, where
`--llama` names an interpreter that has llama-cpp-python, llama.cpp with the same weights in its own format. "of
stream": the bytes of weights that a step must read, divided by the time of a step, as a share of what the faster of two
sums over memory reads per second in the same round. Of weights that are not much larger than the last cache, a part may
stay there from step to step: then the share is above what memory alone gives, for everybody. "of limit": the same
share where the stream takes longest, but where the products would, at the speed of PyTorch's own product of large
matrices in that precision (integers: in bf16, which takes as many instructions), of their time.
serving: 64 requests with mixed lengths, one after another, in static batches of 16 and by continuous batching with
Transformers, and with continuous batching here.
first-token: time to the first token under load, with long prompts arriving (first_token.py).

Rounds are written to `--rounds-file` as they end, and the tables are made of all that it holds, so that a long run may
be done in pieces:

    python benchmarks/inference.py --only decode --precisions int4 --batches 1 --rounds 3 --rounds-file R --save cpu
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import first_token
from gguf_file import write_gguf
from inference_rank import SHAPES, make_model
from jobs import OURS, Contender, Job, Spread, progress, started
from report import Report, common_arguments

PRECISIONS = ("fp32", "bf16", "int8", "int4")
GOALS = {"fp32": 1.5, "bf16": 2.0, "int8": 2.0, "int4": None}
SYSTEMS = ("transformers", "compiled", "llama.cpp", "ours", "kernels", "generate")
TABLES = ("decode", "serving", "first-token")
STREAM = 1 << 28  # bytes of the sum that measures the memory
OWN = "kernels"  # what the others are compared with


class Rounds:
    """What was measured, by table and row; kept in a file, if there is one, as soon as it is there."""

    def __init__(self, file: str | None) -> None:
        self._file = Path(file) if file else None
        self._of: dict[str, list[dict[str, Any]]] = {}
        if self._file is not None and self._file.exists():
            self._of = json.loads(self._file.read_text())

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        return self._of.get(name, [])

    def add(self, name: str, measured: dict[str, Any]) -> None:
        self._of.setdefault(name, []).append(measured)
        if self._file is not None:
            self._file.write_text(json.dumps(self._of))

    def all(self) -> dict[str, Any]:
        return self._of


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Tokens per second of decoding and of serving, against others.")
    parser.add_argument("--only", nargs="+", default=list(TABLES), choices=TABLES, help="tables")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS, help="that decode")
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--tokens", type=int, default=48, help="generated, per sequence")
    parser.add_argument("--requests", type=int, default=64, help="that are served")
    parser.add_argument(
        "--longest", type=int, default=128, help="tokens of a prompt and of an answer, served"
    )
    parser.add_argument("--arrivals", type=int, default=48, help="requests of a round of first-token")
    parser.add_argument("--rate", type=float, default=2.0, help="of them, per second")
    parser.add_argument("--budget", type=int, default=64, help="tokens of a forward of first-token")
    parser.add_argument("--rounds", type=int, default=5, help="over all systems; 0: only print what is there")
    parser.add_argument("--rounds-file", metavar="FILE", help="of all rounds, also of calls before this one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama", metavar="PYTHON", help="an interpreter that has llama-cpp-python")
    arguments = parser.parse_args(argv)
    arguments.shape = "tiny" if arguments.quick else "88M"
    if arguments.quick:
        arguments.precisions, arguments.tokens, arguments.rounds = ["fp32"], 24, 2
        arguments.requests, arguments.longest, arguments.batches = 4, 16, [1, 2]
        arguments.arrivals, arguments.rate = 8, 20.0
        arguments.systems = [each for each in arguments.systems if each != "compiled"]
    return arguments


def contender(arguments: argparse.Namespace, system: str, precision: str) -> Contender:
    """Transformers runs integer weights in bf16, the fastest that it has on a CPU."""
    longest = max(arguments.longest, arguments.prompt + arguments.tokens)
    name, target, python = f"{system}, {precision}", "inference_rank:Inference", OURS
    options: dict[str, Any] = {"longest": longest}
    if system == "llama.cpp":
        target, python = "llama_rank:Llama", arguments.llama
        options |= {"threads": arguments.threads, "batch": max(arguments.batches)}
        options["path"] = str(_gguf(arguments.shape, precision))
    else:
        options |= {"shape": arguments.shape, "system": system, "precision": precision}
    return Contender(name, target, options, ranks=1, threads=arguments.threads, python=python)


def contenders(arguments: argparse.Namespace, precision: str) -> list[Contender]:
    plain = precision if precision in ("fp32", "bf16") else "bf16"
    wanted = [each for each in arguments.systems if each != "llama.cpp" or arguments.llama]
    if plain != precision:
        wanted = [each for each in wanted if each != "ours"]
    of = {"transformers": plain, "compiled": plain}
    return [contender(arguments, each, of.get(each, precision)) for each in wanted]


def _gguf(shape: str, precision: str) -> Path:
    """The model as llama.cpp's file, of the very weights that the others have."""
    path = Path(tempfile.gettempdir()) / f"deepspeed-llama-{shape}-{precision}.gguf"
    if not path.exists():
        write_gguf(
            make_model(shape, torch.bfloat16 if precision == "bf16" else torch.float32), precision, path
        )
    return path


class Stream:
    """Bytes per second that a sum over fp32 values reads: by torch, or by the native library where that is faster."""

    def __init__(self) -> None:
        from deepspeed.ops import native

        self._values = torch.ones(STREAM // 4)
        self._readers: list[Callable[[], object]] = [self._values.sum]
        if native.library() is not None:
            self._readers.append(partial(native.sum_of_squares, [self._values]))

    def measure(self) -> float:
        best = 0.0
        for reader in self._readers * 2:
            begin = time.perf_counter()
            reader()
            best = max(best, self._values.nbytes / (time.perf_counter() - begin))
        return best


class Multiplier:
    """Multiplications per second of PyTorch's product of large matrices."""

    def __init__(self, precision: str) -> None:
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        self._rows, self._weight = torch.ones(1024, 768, dtype=dtype), torch.ones(4096, 768, dtype=dtype)

    def measure(self) -> float:
        took = []
        for _ in range(4):
            begin = time.perf_counter()
            functional.linear(self._rows, self._weight)
            took.append(time.perf_counter() - begin)
        return self._rows.shape[0] * self._weight.numel() / min(took)


def matrix_numbers(shape: str) -> int:
    """Of the weights that multiply every token."""
    with torch.device("meta"):
        model = make_model(shape, torch.float32)
    whole = sum(each.numel() for each in model.parameters() if each.dim() > 1)
    return whole - model.get_input_embeddings().weight.numel()


def decode(rounds: Rounds, arguments: argparse.Namespace, precision: str) -> None:
    """A round is one call of each system, each round begins with another, and the memory is measured twice."""
    stream, multiplier, numbers = Stream(), Multiplier(precision), matrix_numbers(arguments.shape)
    vocabulary = SHAPES[arguments.shape]["vocab_size"]
    with started(contenders(arguments, precision)) as jobs:
        names = list(jobs)
        weights = {name: job.call("weights")[0] for name, job in jobs.items()}
        for batch in arguments.batches:
            torch.manual_seed(2)
            prompts = torch.randint(0, vocabulary, (batch, arguments.prompt)).tolist()
            for job in jobs.values():  # buffers are made, kernels chosen or compiled
                job.call("run", prompts=prompts, tokens=arguments.tokens)
            agree = _agreeing(jobs, prompts[0]) if precision == "fp32" else None
            for number in range(arguments.rounds):
                progress(f"round {number + 1} of {arguments.rounds}")
                at, seconds = number % len(names), dict[str, float]()
                before, speed = stream.measure(), multiplier.measure()
                for name in names[at:] + names[:at]:
                    seconds[name] = jobs[name].call("run", prompts=prompts, tokens=arguments.tokens)[0]
                rate, speed = max(before, stream.measure()), max(speed, multiplier.measure())
                measured = {"stream": rate, "weights": weights, "seconds": seconds, "agree": agree}
                measured["products"] = numbers * batch / speed  # seconds
                rounds.add(f"decode {precision} {batch}", measured)


def _agreeing(jobs: dict[str, Job], prompt: list[int]) -> int | None:
    """The first of so many greedy tokens are the same by Transformers and by llama.cpp: it has the same model. It keeps
    keys and values in fp16, and near-ties of a model that was not trained end this at some time."""
    names = [each for each in jobs if each.startswith(("transformers", "llama.cpp"))]
    if len(names) < 2:
        return None
    found = [jobs[name].call("tokens", prompt=prompt, tokens=32)[0] for name in names]
    return next((i for i, (a, b) in enumerate(zip(*found, strict=True)) if a != b), 32)


def decode_table(report: Report, arguments: argparse.Namespace, rounds: Rounds, precision: str) -> None:
    cells = []
    for batch in arguments.batches:
        of = rounds[f"decode {precision} {batch}"]
        names = list(dict.fromkeys(name for one in of for name in one["seconds"]))
        for name in sorted(names, key=lambda each: SYSTEMS.index(each.split(",")[0])):
            cells.append([name, str(batch), *_decoded(of, name, batch, arguments.tokens, precision)])
    streams = [one["stream"] for batch in arguments.batches for one in rounds[f"decode {precision} {batch}"]]
    if not cells:
        return
    read = {
        one["weights"][name]
        for batch in arguments.batches
        for one in rounds[f"decode {precision} {batch}"]
        for name in one["weights"]
        if name.startswith(OWN)
    }
    own = f", {max(read) / 1e6:.0f} MB of weights for each step of ours" if read else ""
    report.table(
        f"decoding {arguments.tokens} tokens after {arguments.prompt}, {arguments.shape} Llama, {precision}, "
        f"{arguments.threads} threads, memory stream {statistics.median(streams) / 1e9:.1f} GB/s{own}",
        ["", "batch", "tokens/s", "to Transformers", "goal", f"{OWN} to it", "goal", "of stream", "of limit"],
        cells,
    )
    agree = [
        one["agree"]
        for batch in arguments.batches
        for one in rounds[f"decode {precision} {batch}"]
        if one.get("agree")
    ]
    if agree:
        report.line(f"llama.cpp gives the first {max(agree)} of Transformers' greedy tokens")


def _decoded(rounds: list[dict[str, Any]], name: str, batch: int, tokens: int, precision: str) -> list[str]:
    """A row: medians over the rounds in which it and what it is compared with took part."""
    took = [one for one in rounds if name in one["seconds"]]
    system, goal = name.split(",")[0], GOALS[precision]

    def to(other: str, inverse: bool = False) -> str:
        pairs = [
            (one["seconds"][name], seconds)
            for one in took
            for each, seconds in one["seconds"].items()
            if each.startswith(f"{other},")
        ]
        found = [own / its if inverse else its / own for own, its in pairs]
        return Spread.of(found).show() if found else ""

    share = statistics.median(
        one["weights"][name] * tokens / one["seconds"][name] / one["stream"] for one in took
    )
    limits = [
        max(one["weights"][name] / one["stream"], one["products"]) * tokens / one["seconds"][name]
        for one in took
        if "products" in one
    ]
    ours = system in ("ours", "kernels", "generate")
    return [
        f"{batch * tokens / statistics.median(one['seconds'][name] for one in took):.1f}",
        to("transformers"),
        f">= {goal:.1f}" if goal and ours else "",
        to(OWN, inverse=True) if not ours else "",
        ">= 1.00" if system in ("compiled", "llama.cpp") else "",
        f"{share:.2f}",
        f"{statistics.median(limits):.2f}" if limits else "",
    ]


_PLAIN, _OURS = "transformers, fp32", "ours, fp32"
_SERVED = {
    "Transformers, one by one": (_PLAIN, 1, ">= 5.0"),
    "Transformers, static batches of 16": (_PLAIN, 16, ">= 1.5"),
    "Transformers, continuous batches": (_PLAIN, 0, ""),
    "ours, continuous": (_OURS, 16, ""),
}


def serve(rounds: Rounds, arguments: argparse.Namespace) -> None:
    taking_part = [contender(arguments, each, "fp32") for each in ("transformers", "ours")]
    with started(taking_part) as jobs:
        for _ in range(max(arguments.rounds // 2, 1)):
            seconds = {
                name: jobs[job].call("serve", count=arguments.requests, batch=batch)[0]
                for name, (job, batch, _) in _SERVED.items()
            }
            full, short = jobs[_OURS].call("filled")[0]
            rounds.add("serving", {"seconds": seconds, "full": full, "short": short})


def serve_table(report: Report, arguments: argparse.Namespace, rounds: Rounds) -> None:
    served, cells = rounds["serving"], []
    if not served:
        return
    for name, (_, _, goal) in _SERVED.items():
        each = [one["seconds"][name] for one in served]
        gain = Spread.of([one["seconds"][name] / one["seconds"]["ours, continuous"] for one in served])
        cells.append([name, f"{statistics.median(each):.1f}", gain.show(), goal])
    report.table(
        f"{arguments.requests} requests, prompts and answers of {arguments.longest // 8} to {arguments.longest} "
        f"tokens, {arguments.shape} Llama, fp32",
        ["", "seconds", "to ours, median [min .. max]", "goal"],
        cells,
    )
    full, short = served[-1]["full"], served[-1]["short"]
    report.line(f"forwards while requests were waiting: {full} with the whole budget, {short} with less")


def first_tokens(rounds: Rounds, arguments: argparse.Namespace) -> None:
    with contender(arguments, "ours", "fp32").start() as job:
        for _ in range(max(arguments.rounds // 2, 1)):
            vocabulary, number = SHAPES[arguments.shape]["vocab_size"], len(rounds["first-token"])
            rounds.add("first-token", first_token.measure(job, arguments, vocabulary, number))


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    torch.set_num_threads(arguments.threads)
    report, rounds = Report("inference", arguments), Rounds(arguments.rounds_file)
    measured = arguments.only if arguments.rounds else ()
    for precision in arguments.precisions:  # each table as soon as its rounds are there
        if "decode" in measured:
            decode(rounds, arguments, precision)
        decode_table(report, arguments, rounds, precision)
    if "serving" in measured:
        serve(rounds, arguments)
    serve_table(report, arguments, rounds)
    if "first-token" in measured:
        first_tokens(rounds, arguments)
    if rounds["first-token"]:
        first_token.table(report, arguments, rounds["first-token"])
    report.data["rounds"] = rounds.all()
    report.save()


if __name__ == "__main__":
    sys.exit(main())
