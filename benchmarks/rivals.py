"""Servers of one model, ours and others, for serving.py: what each is started with, and which weights it reads.

All get the same weights. fp32 and bf16 are a folder of Transformers. In int8 and int4 each has what it can read: ours
rounds the folder to 8 bits itself and reads 4 bits from a folder in GPTQ's layout, vLLM reads 8 bits from one in
compressed-tensors' layout and the same 4 bits, llama.cpp its own q8_0 and q4_0. Transformers has neither on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from load import Wanted

START_S, STOP_S = 600, 30
OURS, VLLM, LLAMA, TRANSFORMERS = "ours", "vLLM", "llama.cpp", "Transformers"
SEQUENCES, LONGEST = 32, 512
"""Of every server: sequences at a time, and tokens of each."""
GUESSES = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


@dataclass(frozen=True)
class System:
    """A server: its command without the port, and how requests are put to it. ``text``: it takes no lists of tokens;
    ``model``: its name in requests; ``ready``: the path that answers 200 when it can be asked."""

    name: str
    command: Sequence[str]
    port: str = "--port"
    ready: str = "/health"
    model: str = "model"
    environment: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    text: bool = False

    def body(self, wanted: Wanted) -> dict[str, Any]:
        """Return the request as this server understands it. The tokenizer has one word for each token."""
        prompt = " ".join(f"w{token}" for token in wanted.prompt) if self.text else wanted.prompt
        settings = {"model": self.model, "max_tokens": wanted.tokens, "temperature": 0, "stream": True}
        return {"prompt": prompt, **settings, **self.more}


def systems(arguments: argparse.Namespace, folder: Path, precision: str) -> list[System]:
    """Return the servers that have this precision and are installed. ``folder`` has the models (``model_files.py``)."""
    plain, dense = precision in ("fp32", "bf16"), not arguments.shape.startswith("moe")
    found = [ours(folder, precision)] if dense or precision != "int4" else []
    if arguments.vllm and (plain or dense):
        found.append(vllm(arguments.vllm, arguments.threads, folder, precision))
    if arguments.llama_server and dense:
        found.append(llama(arguments.llama_server, arguments.threads, folder, precision))
    if arguments.transformers and plain:
        found.append(transformers(arguments.transformers, folder, precision))
    return found


def ours(folder: Path, precision: str, *more: str) -> System:
    model = folder / ("gptq" if precision == "int4" else "plain")
    dtype = "bf16" if precision == "int4" else precision
    options = ["--name", "model", "--dtype", dtype, "--max-model-len", str(LONGEST)]
    options += ["--max-num-seqs", str(SEQUENCES), *more]
    name = "with guesses" if more else OURS
    return System(name, [sys.executable, "-m", "deepspeed.tools.serve", str(model), *options], ready="/ready")


def guessing(folder: Path, precision: str) -> System:
    return ours(folder, precision, "--speculative-config", json.dumps(GUESSES))


def vllm(python: str, threads: int, folder: Path, precision: str) -> System:
    """Its threads are bound to the first cores; the size of its cache is what the others have by far."""
    model = folder / {"int8": "int8", "int4": "gptq"}.get(precision, "plain")
    dtype = "float32" if precision == "fp32" else "bfloat16"
    options = ["--served-model-name", "model", "--dtype", dtype, "--max-model-len", str(LONGEST)]
    options += ["--max-num-seqs", str(SEQUENCES), "--host", "127.0.0.1"]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{Path(python).absolute().parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options]
    return System(VLLM, command, environment=environment)


def llama(command: str, threads: int, folder: Path, precision: str) -> System:
    """``--ctx-size`` is of all sequences together. Weights are not packed anew, which crashes on some processors."""
    options = ["--model", str(folder / f"{precision}.gguf"), "--parallel", str(SEQUENCES)]
    options += ["--ctx-size", str(SEQUENCES * LONGEST), "--threads", str(threads), "--no-repack"]
    return System(LLAMA, [*shlex.split(command), *options, "--host", "127.0.0.1"])


def transformers(python: str, folder: Path, precision: str) -> System:
    dtype = "float32" if precision == "fp32" else "bfloat16"
    options = ["--continuous-batching", "--device", "cpu", "--dtype", dtype, "--host", "127.0.0.1"]
    options += ["--cb-max-memory-percent", "0.1"]  # by default it takes nearly all that is free
    tool = str(Path(python).absolute().parent / "transformers")
    return System(
        TRANSFORMERS,
        [tool, "serve", str(folder / "plain"), *options],
        model=str(folder / "plain"),
        environment={"HF_HUB_OFFLINE": "1"},
        more={},
        text=True,
    )


class StartError(RuntimeError):
    """A server ended before it was ready, or was not ready in time; holds the last line that it printed."""


@dataclass(frozen=True)
class Running:
    """A server's port, and its process."""

    port: int
    process: int


@contextlib.contextmanager
def started(system: System) -> Iterator[Running]:
    """Start a server, wait until it is ready, yield it, and end it. StartError: it is never ready."""
    port = _free_port()
    with tempfile.TemporaryFile() as printed:
        server = subprocess.Popen(
            [*system.command, system.port, str(port)],
            env={**os.environ, **system.environment},
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
        try:
            _await(system, server, port, printed)
            yield Running(port, server.pid)
        finally:
            server.terminate()
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _await(system: System, server: subprocess.Popen[bytes], port: int, printed: Any) -> None:
    until = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < until:
        if status(port, system.ready) == 200:
            return
        time.sleep(0.2)
    printed.seek(0)
    told = printed.read().decode(errors="replace").strip().splitlines()
    if told:
        print(*told[-20:], sep="\n", file=sys.stderr)
    raise StartError(f"not ready: {told[-1] if told else 'it prints nothing'}")


def status(port: int, path: str) -> int | None:
    """Return the status of an answer; None: nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _free_port() -> int:
    """Return a port below those that the kernel gives to clients: some servers take it only when they have loaded."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise StartError("no port is free")
