"""Clients of soak.py: some ask properly and know the answer, others leave, dawdle, or send what is not a request."""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = {
    "whole": 8,
    "stream": 6,
    "slow": 2,
    "leave": 4,
    "structured": 3,
    "malformed": 2,
    "unknown": 1,
    "too_long": 1,
    "large": 1,
    "silent": 1,
}
"""Requests by how often they come."""
MODELS = ("base", "first", "second")
"""The model, and adapters of it."""
NEAR = 1e-3
"""Where the log-probabilities of the two likeliest tokens differ by less, their order is an accident."""
END = "<end>"
CHOICES = ["yes", "no", "perhaps"]
SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "of": {"enum": CHOICES}},
    "required": ["sure", "of"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Case:
    """A request, and the text of an idle server."""

    body: dict[str, Any]
    text: str


class Connection:
    """Requests of one client, each over its own connection."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str) -> tuple[int, str]:
        return self._done(self.begin("GET", path, b""))

    def post(self, body: Any) -> tuple[int, Any]:
        """Return the status and the body, parsed. ``body``: an object, or bytes."""
        status, text = self._done(self.begin("POST", "/v1/completions", body))
        return status, json.loads(text)

    def begin(self, method: str, path: str, body: Any) -> tuple[http.client.HTTPConnection, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, content, {"Content-Type": "application/json"})
        return connection, connection.getresponse()

    def metrics(self) -> dict[str, float]:
        """Return the values of the page by name."""
        _, text = self.get("/metrics")
        text = re.sub(r'{model_name="[^"]*",?', "{", text).replace("{}", "")
        return {name: float(value) for name, value in re.findall(r"^(deepspeed_\S+) (\S+)$", text, re.M)}

    def _done(self, begun: tuple[http.client.HTTPConnection, Any]) -> tuple[int, str]:
        connection, response = begun
        try:
            return response.status, response.read().decode()
        finally:
            connection.close()


def choose_cases(port: int, count: int) -> list[Case]:
    """Ask an idle server for ``count`` answers of each model, one after the other, with other prompts instead of those
    where two tokens are nearly equal."""
    draw, connection, found = random.Random(0), Connection(port), list[Case]()
    for model in MODELS:
        kept = 0
        while kept < count:
            prompt = "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(1, 100)))
            body = {"model": model, "prompt": prompt, "max_tokens": draw.randint(4, 48), "temperature": 0}
            status, answer = connection.post({**body, "logprobs": 2})
            if status != 200:
                raise RuntimeError(f"an idle server answers {status}: {answer}")
            choice = answer["choices"][0]
            if all(_apart(top) for top in choice["logprobs"]["top_logprobs"]):
                found.append(Case(body, choice["text"]))
                kept += 1
    return found


def _apart(top: dict[str, float]) -> bool:
    values = sorted(top.values())
    return len(values) < 2 or values[-1] - values[-2] > NEAR


class Clients:
    """``counts``: what was asked, by kind; ``wrong``: answers that are not what they should be."""

    def __init__(self, port: int, cases: Sequence[Case]) -> None:
        self.connection = Connection(port)
        self.cases = cases
        self.counts: dict[str, int] = {}
        self.wrong: list[str] = []
        self._lock = threading.Lock()

    def run(self, seconds: float, concurrent: int, seed: str) -> None:
        """Let ``concurrent`` clients ask for this time; return when the last has its answer."""
        until = time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._client, args=(random.Random(f"{seed} {number}"), until))
            for number in range(concurrent)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, draw: random.Random, until: float) -> None:
        while time.monotonic() < until:
            kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
            try:
                found = getattr(self, kind)(draw)
            except Exception as error:
                found = repr(error)
            with self._lock:
                self.counts[kind] = self.counts.get(kind, 0) + 1
                if found is not None:
                    self.wrong.append(f"{kind}: {found}")

    def whole(self, draw: random.Random) -> str | None:
        case = draw.choice(self.cases)
        status, answer = self.connection.post(case.body)
        if status != 200:
            return f"{status} {answer}"
        return _differs(case, answer["choices"][0]["text"])

    def stream(self, draw: random.Random) -> str | None:
        case = draw.choice(self.cases)
        return _differs(case, "".join(self._streamed(case)))

    def slow(self, draw: random.Random) -> str | None:
        """Read one piece after the other, with pauses."""
        case, found = draw.choice(self.cases), ""
        for piece in self._streamed(case):
            found += piece
            time.sleep(draw.random() * 0.05)
        return _differs(case, found)

    def leave(self, draw: random.Random) -> None:
        """Ask for a long answer, read a little, and go."""
        case = draw.choice(self.cases)
        body = {**case.body, "max_tokens": 120, "stream": True, "n": draw.choice([1, 1, 3])}
        connection, response = self.connection.begin("POST", "/v1/completions", body)
        response.read(draw.randint(1, 400))
        connection.close()

    def structured(self, draw: random.Random) -> str | None:
        """An answer that a grammar limits: an object of a schema, a choice, or a pattern."""
        prompt = draw.choice(self.cases).body["prompt"]
        body = {"model": draw.choice(MODELS), "prompt": prompt, "max_tokens": 100, "temperature": 1}
        kind = draw.choice(["schema", "choice", "pattern"])
        if kind == "schema":
            body["structured_outputs"] = {"json": SCHEMA}
        elif kind == "choice":
            body["structured_outputs"] = {"choice": CHOICES}
        else:
            body["structured_outputs"] = {"regex": "[ab]{3,9}"}
        status, answer = self.connection.post(body)
        text = answer["choices"][0]["text"] if status == 200 else ""
        return None if status == 200 and _follows(kind, text) else f"{kind}: {status} {answer}"

    def malformed(self, draw: random.Random) -> str | None:
        """Not JSON, not an object, or with a value of another type."""
        bodies = [b"{", b"\xff\x00", b"[]", b"", b'{"prompt": 3}', b'{"prompt": "a", "n": "two"}']
        bodies += [b'{"prompt": ["a", 1]}', b'{"prompt": "a", "max_tokens": -1}', b'{"prompt": [999999]}']
        bodies += [b'{"prompt": "a", "structured_outputs": {"regex": "("}}', b'{"prompt": "a", "stop": {}}']
        body = draw.choice(bodies)
        return _refused(400, self.connection.post(body), body)

    def unknown(self, draw: random.Random) -> str | None:
        """A field or a model that does not exist."""
        field = self.connection.post({"prompt": "a", "no_such_field": 1})
        model = self.connection.post({"prompt": "a", "model": "third"})
        return _refused(400, field, "a field") or _refused(404, model, "a model")

    def too_long(self, draw: random.Random) -> str | None:
        body = {"prompt": "a" * draw.randint(400, 4000), "max_tokens": 3}
        return _refused(400, self.connection.post(body), "a long prompt")

    def large(self, draw: random.Random) -> str | None:
        """More than a body may have. The server may close the connection while it is being sent."""
        try:
            return _refused(413, self.connection.post({"prompt": "a" * (5 << 20)}), "a large body")
        except (ConnectionError, http.client.HTTPException):
            return None

    def silent(self, draw: random.Random) -> None:
        """Promise a body and go."""
        with socket.create_connection(("127.0.0.1", self.connection.port)) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")

    def _streamed(self, case: Case) -> Iterator[str]:
        connection, response = self.connection.begin("POST", "/v1/completions", {**case.body, "stream": True})
        try:
            if response.status != 200:
                raise ValueError(f"{response.status} {response.read()!r}")
            last = b""
            for line in response:
                if line.startswith(b"data: {"):
                    part = json.loads(line[6:])
                    if "error" in part:
                        raise ValueError(part["error"])
                    yield part["choices"][0]["text"]
                last = line.strip() or last
            if last != b"data: [DONE]":
                raise ValueError(f"a stream ends with {last!r}")
        finally:
            connection.close()


def _differs(case: Case, text: str) -> str | None:
    return None if text == case.text else f"{case.body} gives {text!r}, on an idle server {case.text!r}"


def _refused(status: int, found: tuple[int, Any], what: Any) -> str | None:
    return None if found[0] == status and "error" in found[1] else f"{what!r}: {found}"


def _follows(kind: str, text: str) -> bool:
    if kind == "choice":
        return text in CHOICES
    if kind == "pattern":
        return re.fullmatch("[ab]{3,9}", text) is not None
    made = json.loads(text)
    return set(made) == {"sure", "of"} and isinstance(made["sure"], bool) and made["of"] in CHOICES


def save_models(folder: Path) -> None:
    """Write a tiny model with a tokenizer of single bytes, and two adapters, each in a folder with its name."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END]
    raw = Tokenizer(models.BPE(vocab={each: at for at, each in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END).save_pretrained(folder / "model")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    marks = {"eos_token_id": len(alphabet) - 1, "bos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(vocab_size=len(alphabet), max_position_embeddings=256, **sizes, **marks)
    ).save_pretrained(folder / "model")
    for name in MODELS[1:]:
        (folder / name).mkdir()
        tensors = {}
        for layer in range(2):
            for module in ("q_proj", "v_proj"):
                path = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                tensors |= {
                    f"{path}.lora_A.weight": torch.randn(4, 64),
                    f"{path}.lora_B.weight": torch.randn(64, 4),
                }
        save_file(tensors, folder / name / "adapter_model.safetensors")
        told = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
        (folder / name / "adapter_config.json").write_text(json.dumps(told))
