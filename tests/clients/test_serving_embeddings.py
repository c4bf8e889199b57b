"""Embeddings over HTTP equal the pooled hidden states of Transformers, regardless of other requests."""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the clients extra is not installed")
pytest.importorskip("fastapi", reason="the extra serve is not installed")

from deepspeed.inference.generation.generator import Generator
from deepspeed.inference.scheduling.requests import SamplingParams
from deepspeed.inference.serving.pooling import dimensions_of, pooling_of
from tests.clients.architectures import make
from tests.inference.standin import Bytes
from tests.inference.test_http import server

TEXTS = ["The capital of France", "a", "Grüße, " * 9, "The capital of Spain"]


def wanted(module: Any, tokens: list[int], pooling: str) -> torch.Tensor:
    with torch.no_grad():
        states = module.base_model(torch.tensor([tokens])).last_hidden_state[0].float()
    return {"last": states[-1], "cls": states[0], "mean": states.mean(0)}[pooling]


def unit(vector: torch.Tensor) -> Any:
    return pytest.approx((vector / vector.norm()).tolist(), abs=2e-5)


@pytest.mark.parametrize("kind", ["llama", "bloom"])
@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_pooled_states_are_those_of_transformers(kind: str, pooling: str) -> None:
    """In chunks, preempted, with shared prefixes, and together with requests that generate; for models of the packed
    and of the padded layout."""
    module = make(kind).eval()
    generator = Generator(
        module, token_budget=16, max_sequences=4, num_blocks=12, block_size=4, max_length=40
    )
    size = generator.runner.info.vocab_size
    prompts = [
        [(start + 7 * at) % size for at in range(length)]
        for start, length in ((3, 33), (3, 20), (9, 1), (3, 33))
    ]
    pooled = SamplingParams(max_new_tokens=0, pooling=pooling)
    alone = generator.generate([prompts[1]], SamplingParams(max_new_tokens=4))[0].generated
    requests = generator.generate(
        [*prompts, prompts[1]], [pooled] * len(prompts) + [SamplingParams(max_new_tokens=4)]
    )
    for prompt, request in zip(prompts, requests, strict=False):
        assert request.reason == "length" and not request.generated
        expected = wanted(module, prompt, pooling)
        assert torch.allclose(request.pooled, expected, rtol=1e-3, atol=1e-4)
    assert requests[-1].generated == alone


@pytest.fixture(scope="module")
def module() -> Any:
    return make("llama", vocab_size=260, max_position_embeddings=512).eval()


def engine(module: Any) -> Any:
    return Generator(module, token_budget=64, max_sequences=8, max_length=100, num_blocks=64)


def test_forms_of_input_and_output(module: Any) -> None:
    with server(
        engine(module), tokenizer=Bytes(), max_length=100, dimensions=(8, 16), max_requests=4
    ) as running:
        path, tokens = "/v1/embeddings", [list(each.encode()) for each in TEXTS]
        expected = [wanted(module, each, "last") for each in tokens]
        for given in (TEXTS, tokens):
            status, found = running.post({"input": given, "model": "parrot", "user": "me"}, path)
            assert status == 200 and found["object"] == "list" and found["model"] == "parrot"
            assert [each["index"] for each in found["data"]] == [0, 1, 2, 3]
            assert [each["embedding"] for each in found["data"]] == [unit(each) for each in expected]
            count = sum(map(len, tokens))
            assert found["usage"] == {"prompt_tokens": count, "total_tokens": count}
        for given in (TEXTS[0], tokens[0]):
            found = running.post({"input": given, "normalize": False}, path)[1]["data"]
            assert [each["embedding"] for each in found] == [pytest.approx(expected[0].tolist(), abs=1e-4)]
        found = running.post({"input": TEXTS, "encoding_format": "base64", "dimensions": 8}, path)[1]["data"]
        vectors = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4").tolist() for each in found]
        assert vectors == [unit(each[:8]) for each in expected]
        # More inputs than are served at once, from several clients, together with one that generates.
        with ThreadPoolExecutor(3) as pool:
            many = [pool.submit(running.post, {"input": TEXTS * 10}, path) for _ in range(2)]
            text = pool.submit(running.post, {"prompt": "Hi", "max_tokens": 5})
            for each in many:
                status, found = each.result()
                assert status == 429 or [one["embedding"] for one in found["data"]] == [
                    unit(e) for e in expected * 10
                ]
            assert text.result()[0] in (200, 429)
        assert not running.service._tickets
        for given in (TEXTS[2], list(TEXTS[2].encode())):
            for cut, kept in ((7, 7), (-1, 81), (500, 81)):
                body = {"input": [given] * 2, "truncate_prompt_tokens": cut}
                status, found = running.post(body, path)
                assert status == 200 and found["usage"]["prompt_tokens"] == 2 * kept, (cut, found)
                expected = wanted(module, tokens[2][-kept:], "last")
                assert found["data"][0]["embedding"] == unit(expected)
        assert running.post({"input": TEXTS[2] * 2, "truncate_prompt_tokens": -1}, path)[0] == 200
        for body, words in (
            ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
            ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
            ({}, "input: Field required"),
            ({"input": []}, "the input is empty"),
            ({"input": ["a", ""]}, "the input is empty"),
            ({"input": ["a", 1]}, "input.1: expected strings or tokens"),
            ({"input": ["a", "b" * 101]}, "input.1: "),
            ({"input": [[1], [999]]}, "input.1: "),
            ({"input": "a", "dimensions": 9}, "one of [8, 16]"),
            ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
            ({"input": "a", "prompt": "b"}, "it belongs to /v1/completions"),
            ({"input": ["a"] * 2049}, "at most 2,048"),
        ):
            status, found = running.post(body, path)
            assert status == 400 and words in found["error"]["message"], (body, found)
        assert running.post({"input": "a", "model": "other"}, path)[0] == 404
    with server(engine(module), tokenizer=Bytes(), max_length=100, pooling="mean") as running:
        found = running.post({"input": TEXTS[0]}, path)[1]["data"][0]["embedding"]
        assert found == unit(wanted(module, tokens[0], "mean"))
        assert "was not trained" in str(running.post({"input": "a", "dimensions": 8}, path))


def test_scores_are_cosines_of_the_vectors(module: Any) -> None:
    """One with many, and in pairs; documents by their scores, as clients of vLLM and of Jina ask for them."""
    with server(engine(module), tokenizer=Bytes(), max_length=100) as running:
        vectors = [wanted(module, list(each.encode()), "last") for each in TEXTS]
        cosine = torch.nn.functional.cosine_similarity
        first, *others = TEXTS
        scores = [float(cosine(vectors[0], each, 0)) for each in vectors]
        for path in ("/score", "/v1/score"):
            status, found = running.post({"text_1": first, "text_2": others, "model": "parrot"}, path)
            assert status == 200 and (found["object"], found["model"]) == ("list", "parrot")
            assert [(each["index"], each["object"]) for each in found["data"]] == [
                (at, "score") for at in range(3)
            ]
            assert [each["score"] for each in found["data"]] == pytest.approx(scores[1:], abs=2e-5)
            assert found["usage"]["total_tokens"] == sum(len(each.encode()) for each in TEXTS)
        found = running.post({"text_1": TEXTS, "text_2": [first, first, others[0], others[2]]}, "/score")[1][
            "data"
        ]
        pairs = [1.0, scores[1], float(cosine(vectors[2], vectors[1], 0)), 1.0]
        assert [each["score"] for each in found] == pytest.approx(pairs, abs=2e-5)
        order = sorted(range(4), key=lambda at: -scores[at])
        for path, documents in (("/rerank", TEXTS), ("/v1/rerank", [{"text": each} for each in TEXTS])):
            body = {"query": first, "documents": documents}
            status, found = running.post(body, path)
            assert status == 200 and [each["index"] for each in found["results"]] == order
            told = [each["relevance_score"] for each in found["results"]]
            assert told == pytest.approx([scores[at] for at in order], abs=2e-5)
            assert [each["document"]["text"] for each in found["results"]] == [TEXTS[at] for at in order]
            found = running.post({**body, "top_n": 2, "return_documents": False}, path)[1]["results"]
            assert [set(each) for each in found] == [{"index", "relevance_score"}] * 2
        cut = {"text_1": "xx" + first, "text_2": first, "truncate_prompt_tokens": len(first)}
        assert running.post(cut, "/score")[1]["data"][0]["score"] == pytest.approx(1.0)
        for body, path, words in (
            ({"text_1": ["a", "b"], "text_2": ["a"]}, "/score", "text_1 has 2 texts and text_2 1"),
            ({"text_1": [1], "text_2": ["a"]}, "/score", "text_1: expected strings"),
            ({"text_1": "a", "text_2": []}, "/score", "the text_2 is empty"),
            ({"text_1": "a"}, "/score", "text_2: Field required"),
            ({"text_1": "a", "text_2": "b" * 101}, "/score", "texts.1: "),
            ({"query": "a", "documents": [{"image": "x"}]}, "/rerank", "documents.0: expected strings"),
            ({"query": "a", "documents": "b"}, "/rerank", "a list of strings as documents"),
            ({"query": "a", "documents": [str(each) for each in range(2049)]}, "/rerank", "at most 2,048"),
            ({"query": "a", "documents": ["a"] * 2049}, "/rerank", "at most 2,048"),
        ):
            status, found = running.post(body, path)
            assert status == 400 and words in found["error"]["message"], (body, found)
        assert not running.service._tickets


def test_a_model_without_a_base_generates_and_refuses_to_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The `base_model` of a model whose prefix names nothing is the model itself, whose output has no hidden states."""
    module = make("llama", vocab_size=260).eval()
    monkeypatch.setattr(type(module), "base_model_prefix", "")
    with server(engine(module), tokenizer=Bytes(), max_length=100) as running:
        status, found = running.post({"input": "a"}, "/v1/embeddings")
        assert status == 400 and "no hidden states to pool" in found["error"]["message"]
        assert running.post({"prompt": "a", "max_tokens": 2})[0] == 200


def test_the_client_of_openai(module: Any) -> None:
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
    with server(engine(module), tokenizer=Bytes(), max_length=100) as running:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none")
        found = client.embeddings.create(model="parrot", input=TEXTS)
        assert [each.embedding for each in found.data] == [
            unit(wanted(module, list(each.encode()), "last")) for each in TEXTS
        ]
        assert [each.id for each in client.models.list()] == ["parrot"]
        parts = client.completions.create(
            model="parrot", prompt="Hi", max_tokens=5, temperature=0, stream=True
        )
        whole = client.completions.create(model="parrot", prompt="Hi", max_tokens=5, temperature=0)
        assert (
            [each.choices[0].finish_reason for each in parts][-1]
            == whole.choices[0].finish_reason
            == "length"
        )
        chat = client.chat.completions.create(
            model="parrot", messages=[{"role": "user", "content": "Hi"}], max_tokens=5
        )
        assert chat.usage.completion_tokens == 5


def test_what_a_folder_says(tmp_path: Path) -> None:
    assert pooling_of(str(tmp_path)) is None and pooling_of("org/name") is None
    file = tmp_path / "1_Pooling" / "config.json"
    file.parent.mkdir()
    for mode, pooling in (("lasttoken", "last"), ("mean_tokens", "mean"), ("cls_token", "cls")):
        file.write_text(
            json.dumps({"word_embedding_dimension": 8, f"pooling_mode_{mode}": True, "pooling_mode_x": False})
        )
        assert pooling_of(str(tmp_path)) == pooling
    file.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(ValueError, match="pooling_mode_max_tokens is not supported"):
        pooling_of(str(tmp_path))
    config = type("Config", (), {})()
    assert dimensions_of(config) is None
    config.is_matryoshka = True
    assert dimensions_of(config) == ()
    config.matryoshka_dimensions = [8, 16]
    assert dimensions_of(config) == (8, 16)
