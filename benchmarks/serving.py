"""Throughput and latency of `ds serve` with several clients at once, without and with guesses of the next tokens.

A Llama with random weights is saved and served twice, and clients of this machine stream completions from both in
turns. Prompts are a passage that is repeated, as in edits and extraction. A random model soon repeats itself when it is
greedy, which guesses find more easily than what people write: the gain here is that of a text that repeats.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from first_token import percentile
from report import Report, common_arguments

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "88M": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
}
VOCABULARY, PASSAGE = 512, 24
GUESSES = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
ROWS = {"one token per forward": [], "with guesses": ["--speculative-config", json.dumps(GUESSES)]}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--shape", choices=list(SHAPES), default="88M")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--requests", type=int, default=4, help="of each client in a round")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.shape, arguments.clients, arguments.rounds = "tiny", [1, 4], 1
        arguments.requests, arguments.tokens = 2, 32
    return arguments


def save_model(folder: str, shape: str) -> None:
    """With a tokenizer of one token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(folder)
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=1024, **SHAPES[shape])
    LlamaForCausalLM(config).save_pretrained(folder)


@contextlib.contextmanager
def serving(folder: str, dtype: str, more: Sequence[str]) -> Iterator[int]:
    """Start a server, and yield its port."""
    command = [sys.executable, "-m", "deepspeed.tools.serve", folder, "--dtype", dtype, "--port", "0", *more]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        lines = iter(server.stdout.readline, "")
        found = next(match for line in lines if (match := re.search(r"ready at http://[^ ]*?:(\d+):", line)))
        yield int(found[1])
    finally:
        server.terminate()
        server.wait(60)


def answer(port: int, prompt: str, tokens: int) -> list[float]:
    """Stream one answer; return the seconds from the request to each of its events."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    connection, began = http.client.HTTPConnection("127.0.0.1", port, timeout=600), time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    assert response.status == 200, response.read()
    told = [time.perf_counter() - began for line in response if line.startswith(b"data: {")]
    connection.close()
    return told


def measure(port: int, clients: int, arguments: argparse.Namespace, number: int) -> dict[str, Any]:
    """Let ``clients`` ask at once, each one request after the other."""
    answers: list[list[float]] = []

    def client(which: int) -> None:
        for index in range(arguments.requests):
            draw = random.Random(f"{number} {which} {index}")
            passage = " ".join(f"w{draw.randrange(VOCABULARY)}" for _ in range(PASSAGE))
            answers.append(answer(port, f"{passage} {passage}", arguments.tokens))

    threads = [threading.Thread(target=client, args=(which,)) for which in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    assert len(answers) == clients * arguments.requests
    return {
        "rate": len(answers) * arguments.tokens / seconds,
        "first": [told[0] for told in answers],
        "whole": [told[-1] for told in answers],
    }


def cells(rounds: Sequence[dict[str, Any]], name: str) -> list[str]:
    of = {key: [value for one in rounds for value in one[key]] for key in ("first", "whole")}
    row = [name, f"{statistics.median(one['rate'] for one in rounds):.0f}"]
    return row + [f"{percentile(of[key], part) * 1e3:.0f}" for key in of for part in (0.5, 0.95, 0.99)]


def main(argv: Sequence[str] | None = None) -> Report:
    arguments = parse(argv)
    report = Report("serving", arguments)
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        save_model(folder, arguments.shape)
        ports = {
            name: stack.enter_context(serving(folder, arguments.dtype, more)) for name, more in ROWS.items()
        }
        for number in range(-1, arguments.rounds):  # the first is not counted
            for clients in arguments.clients:
                for name, port in ports.items():
                    one = measure(port, clients, arguments, number)
                    if number >= 0:
                        found.setdefault((clients, name), []).append(one)
    rows = [cells(rounds, f"{clients} clients, {name}") for (clients, name), rounds in found.items()]
    times = [f"{what}, {part}" for what in ("first token", "answer") for part in ("p50", "p95", "p99")]
    report.table(
        f"{arguments.shape} Llama, {arguments.dtype}, prompts of {2 * PASSAGE} tokens, answers of {arguments.tokens}, "
        f"{arguments.rounds} rounds of {arguments.requests} requests of each client; ms",
        ["", "tokens/s", *times],
        rows,
    )
    report.data["rounds"] = [{"clients": key[0], "row": key[1], "found": one} for key, one in found.items()]
    report.save()
    return report


if __name__ == "__main__":
    main()
