"""Fields of requests, from a client over HTTP to the logits of a model of Transformers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("llguidance", reason="the extra serve is not installed")
pytest.importorskip("transformers", reason="the clients extra is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="the clients extra is not installed")

from deepspeed.inference.generation.generator import Generator  # noqa: E402
from deepspeed.inference.generation.grammars import Grammars  # noqa: E402
from tests.clients.architectures import make  # noqa: E402
from tests.inference.standin import Bytes  # noqa: E402
from tests.inference.test_http import server  # noqa: E402

END = 256


class BytesAndEnd(Bytes):
    """The model has a few more tokens, which stand for no text."""

    def decode(self, tokens: list[int]) -> str:
        return super().decode([token for token in tokens if token < END])


@pytest.fixture(scope="module")
def module() -> Any:
    return make("llama", vocab_size=260, max_position_embeddings=512).eval()


@pytest.fixture(scope="module")
def running(module: Any):
    """Tokens are bytes, also for grammars: the byte ``b`` is the token ``b``."""
    letters = list(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    by_byte = {tokenizers.decoders.ByteLevel().decode([letter]): letter for letter in letters}
    vocabulary = {by_byte.get(chr(byte), f"<{byte}>"): byte for byte in range(256)}
    known = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    known.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    known.decoder = tokenizers.decoders.ByteLevel()
    known.add_special_tokens(["<end>"])
    engine = Generator(
        module,
        token_budget=64,
        max_sequences=8,
        max_length=256,
        num_blocks=256,
        matcher_of=Grammars(known, [END]),
    )
    with server(engine, tokenizer=BytesAndEnd(), max_length=256, stop_token_ids=(END,)) as made:  # type: ignore[arg-type]
        yield made


def logprobs(module: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return module(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def completed(running: Any, **body: Any) -> dict[str, Any]:
    status, found = running.post({"prompt": "The capital", "temperature": 0, "max_tokens": 8, **body})
    assert status == 200, found
    return found["choices"][0]


def test_a_harness_scores_prompts(running: Any, module: Any) -> None:
    """As evaluation harnesses ask for log-likelihoods: tokens, repeated, with nothing or one token behind them."""
    tokens = list(b"The capital of France")
    for new in (0, 1):
        told = completed(running, prompt=[tokens], max_tokens=new, echo=True, logprobs=3)["logprobs"]
        rows = logprobs(module, tokens)
        wanted = rows[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
        assert told["token_logprobs"][0] is None
        assert told["token_logprobs"][1 : len(tokens)] == pytest.approx(wanted, abs=1e-4)
        assert len(told["tokens"]) == len(tokens) + new
        for place, row in enumerate(rows[:-1], 1):
            best = max(told["top_logprobs"][place].values())
            assert best == pytest.approx(float(row.max()), abs=1e-4)
        assert told["text_offset"][: len(tokens)] == list(range(len(tokens)))


def test_chats_tell_the_likeliest_tokens(running: Any, module: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}
    _, found = running.post({**body, "logprobs": True, "top_logprobs": 4}, "/v1/chat/completions")
    for entry in found["choices"][0]["logprobs"]["content"]:
        values = [each["logprob"] for each in entry["top_logprobs"]]
        assert entry["logprob"] == pytest.approx(max(values)) and len(values) == 4
    status, found = running.post({**body, "top_logprobs": 4}, "/v1/chat/completions")
    assert status == 400 and found["error"]["param"] == "top_logprobs"


def test_what_changes_logits(running: Any, module: Any) -> None:
    plain = completed(running, logprobs=0)
    row = logprobs(module, list(b"The capital"))[-1]
    best, second = row.topk(2).indices.tolist()
    biased = completed(running, logit_bias={str(best): -100}, logprobs=0, max_tokens=1)
    assert biased["logprobs"]["token_logprobs"] == pytest.approx([float(row[second])], abs=1e-4)
    only = completed(running, allowed_token_ids=list(b"xyz"))
    assert set(only["text"]) <= set("xyz") and len(only["text"]) == 8
    never = completed(running, bad_words=["x", "zz"], allowed_token_ids=list(b"xyz"))
    assert "x" not in never["text"] and "zz" not in never["text"]
    ended = completed(running, allowed_token_ids=list(b"xyz"), stop_token_ids=list(b"xyz"))
    assert ended["text"] == "" and ended["finish_reason"] == "stop"
    spread = completed(running, frequency_penalty=2.0, presence_penalty=2.0, allowed_token_ids=list(b"xyz"))
    assert len(set(spread["text"])) == 3
    assert completed(running, logprobs=0)["logprobs"] == plain["logprobs"]


def test_answers_follow_grammars(running: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    drawn = {"temperature": 1.0, "seed": 3, "max_tokens": 100}
    for body in (
        {"response_format": form},
        {"structured_outputs": {"json": schema}},
        {"guided_json": json.dumps(schema)},
    ):
        found = completed(running, **drawn, **body)
        assert set(json.loads(found["text"])) == {"ok", "n"} and found["finish_reason"] == "stop"
    assert re.fullmatch("[ab]{3}", completed(running, **drawn, guided_regex="[ab]{3}")["text"])
    assert completed(running, **drawn, guided_choice=["yes", "no"])["text"] in {"yes", "no"}
    # An excluded end token follows if no other token may.
    assert completed(running, guided_choice=["yes"], min_tokens=8)["text"] == "yes"


def test_calls_are_forced(running: Any) -> None:
    """A model that knows nothing of tools writes a call, with arguments of the schema."""
    kinds = {"type": "string", "enum": ["Rome", "Paris"]}
    schema = {
        "type": "object",
        "properties": {"city": kinds},
        "required": ["city"],
        "additionalProperties": False,
    }
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}} for name in ("weather", "map")
    ]
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": tools,
        "temperature": 1.0,
        "max_tokens": 120,
    }
    named = {"type": "function", "function": {"name": "map"}}
    for choice, names in (("required", {"weather", "map"}), (named, {"map"})):
        for seed in range(3):
            asked = {**body, "tool_choice": choice, "parallel_tool_calls": False, "seed": seed}
            status, found = running.post(asked, "/v1/chat/completions")
            assert status == 200, found
            (told,) = found["choices"]
            (call,) = told["message"]["tool_calls"]
            assert told["finish_reason"] == "tool_calls" and told["message"]["content"] is None
            assert call["function"]["name"] in names
            assert json.loads(call["function"]["arguments"])["city"] in kinds["enum"]
    bad = [{"type": "function", "function": {"name": "a", "parameters": {"type": "strng"}}}]
    status, found = running.post({**body, "tools": bad, "tool_choice": "required"}, "/v1/chat/completions")
    assert status == 400 and "strng" in found["error"]["message"]


@pytest.mark.parametrize(
    "body, field",
    [
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"999": 1}}, None),  # the model has no such token
        ({"allowed_token_ids": []}, None),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids"),
        ({"stop_token_ids": "x"}, "stop_token_ids"),
        ({"bad_words": [""]}, "bad_words.0"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"yaml": "a"}}, "structured_outputs.yaml"),
        ({"guided_choice": []}, "guided_choice"),
        (
            {
                "guided_regex": "(",
            },
            None,
        ),
        ({"guided_json": {"type": "strng"}}, None),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "structured_outputs"),
        ({"logprobs": 21}, "logprobs"),
        ({"presence_penalty": 3}, "presence_penalty"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_what_is_malformed_is_refused(running: Any, body: dict[str, Any], field: str | None) -> None:
    status, found = running.post({"prompt": "a", "max_tokens": 1, **body})
    assert status == 400 and found["error"]["param"] == field, found


def test_prompts_are_cut_and_stops_included(running: Any, module: Any) -> None:
    whole = completed(running, prompt="a long prompt", truncate_prompt_tokens=6, echo=True, max_tokens=0)
    assert whole["text"] == "prompt"
    text = completed(running, allowed_token_ids=list(b"xyz"))["text"]
    stop = text[2:4]
    body = {"allowed_token_ids": list(b"xyz"), "stop": stop}
    ended = completed(running, **body)["text"]
    assert completed(running, **body, include_stop_str_in_output=True)["text"] == ended + stop
