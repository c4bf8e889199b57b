"""Scores of cross-encoders, and vectors of encoders, over HTTP are those of Transformers for each text alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")
pytest.importorskip("fastapi", reason="the extra serve is not installed")

from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402

from deepspeed.inference.serving.bodies import RequestError  # noqa: E402
from deepspeed.inference.serving.encoders import CrossEncoder, TextEncoder  # noqa: E402
from deepspeed.tools import serve_options  # noqa: E402
from deepspeed.tools.serve_loading import load  # noqa: E402
from tests.inference.standin import Bytes  # noqa: E402
from tests.inference.test_http import server  # noqa: E402

WORDS = "[PAD] [CLS] [SEP] [UNK] how many people live in berlin paris is large a city river".split()
QUERY = "how many people live in berlin"
TEXTS = ["berlin is a large city", "paris", "a river is in paris " * 3]


def tokenizer() -> Any:
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        model_max_length=512,
    )


def encoder(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    shape = {
        "vocab_size": len(WORDS),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 40,
        "num_labels": 1,
        "type_vocab_size": 2,
        "pad_token_id": 0,
        **more,
    }
    config = getattr(transformers, f"{kind}Config")(**shape)
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(0, 0.5)
    return model


def wanted(model: Any, left: str, right: str, **cut: Any) -> float:
    with torch.no_grad():
        return float(model(**tokenizer()(left, right, return_tensors="pt", **cut)).logits[0, 0])


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_scores_are_those_of_transformers(kind: str) -> None:
    """In batches of different lengths, cut pairs too; sigmoid unless the config says otherwise."""
    identity = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    for more, activation in (({}, torch.sigmoid), (identity, lambda value: value)):
        model = encoder(kind, **more)
        engine = CrossEncoder(model, tokenizer(), token_budget=48)
        assert engine.max_length == (40 if kind == "Bert" else 39)
        logits = torch.tensor([wanted(model, QUERY, each) for each in TEXTS])
        scores = activation(logits).tolist()
        assert max(scores) - min(scores) > 0.01
        with server(
            engine,  # type: ignore[arg-type]
            tokenizer=Bytes(),
            max_length=engine.max_length,
            encode_pair=engine.encode_pair,
            no_text=engine.use,
        ) as running:
            status, found = running.post({"text_1": QUERY, "text_2": TEXTS}, "/v1/score")
            assert status == 200 and [each["score"] for each in found["data"]] == pytest.approx(
                scores, abs=1e-5
            )
            pairs = [engine.encode_pair(QUERY, each) for each in TEXTS]
            assert found["usage"]["prompt_tokens"] == sum(map(len, pairs))
            _, found = running.post({"query": QUERY, "documents": TEXTS, "top_n": 2}, "/v1/rerank")
            best = sorted(range(3), key=lambda at: -scores[at])[:2]
            assert [each["index"] for each in found["results"]] == best
            cut = {"text_1": QUERY, "text_2": TEXTS[2] * 3, "truncate_prompt_tokens": 12}
            _, found = running.post(cut, "/score")
            expected = activation(
                torch.tensor(wanted(model, QUERY, TEXTS[2] * 3, truncation="longest_first", max_length=12))
            )
            assert found["data"][0]["score"] == pytest.approx(float(expected), abs=1e-5)
            for body, path, words in (
                ({"text_1": QUERY, "text_2": TEXTS[2] * 9}, "/score", "set truncate_prompt_tokens"),
                ({**cut, "truncate_prompt_tokens": 2}, "/score", "expected at least 3"),
                ({"prompt": "a"}, "/v1/completions", "scores pairs of texts and does not generate text"),
                ({"input": "a"}, "/v1/embeddings", "has no embeddings"),
            ):
                status, found = running.post(body, path)
                assert status == 400 and words in found["error"]["message"]


@pytest.mark.parametrize(
    ("kind", "words", "least"),
    [
        ("Bert", "[PAD] [CLS] [SEP] [UNK] [MASK] a b", 3),
        ("Roberta", "<s> <pad> </s> <unk> <mask> a b \u0120 \u0120a \u0120b", 4),
    ],
)
def test_a_pair_is_not_cut_below_its_special_tokens(kind: str, words: str, least: int) -> None:
    """With less, tokenizers cut nothing."""
    vocab = {word: at for at, word in enumerate(words.split())}
    known = getattr(transformers, f"{kind}Tokenizer")(
        vocab=vocab, **({} if kind == "Bert" else {"merges": []})
    )
    engine = CrossEncoder(encoder(kind), known)
    for most in range(1, 8):
        if most < least:
            with pytest.raises(RequestError, match=f"={most}: expected at least {least}") as raised:
                engine.encode_pair("a b a b", "b a b a", most)
            assert raised.value.field == "truncate_prompt_tokens"
        else:
            assert len(engine.encode_pair("a b a b", "b a b a", most)) == most


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="has 3 labels, but a cross-encoder has one"):
        CrossEncoder(encoder("Bert", num_labels=3), tokenizer())
    with pytest.raises(ValueError, match="the activation Tanh"):
        CrossEncoder(
            encoder("Bert", sbert_ce_default_activation_function="torch.nn.modules.activation.Tanh"),
            tokenizer(),
        )


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_vectors_are_those_of_transformers(kind: str) -> None:
    """In batches of different lengths: padding changes nothing."""
    model = encoder(kind).base_model
    engine = TextEncoder(model, tokenizer(), token_budget=30)
    for pooling in ("mean", "cls", "last"):
        with server(
            engine, tokenizer=Words(), max_length=40, pooling=pooling, no_text=TextEncoder.use
        ) as running:  # type: ignore[arg-type]
            status, found = running.post({"input": TEXTS, "normalize": False}, "/v1/embeddings")
            assert status == 200, found
            for text, each in zip(TEXTS, found["data"], strict=True):
                with torch.no_grad():
                    rows = model(**tokenizer()(text, return_tensors="pt")).last_hidden_state[0]
                expected = {"mean": rows.mean(0), "cls": rows[0], "last": rows[-1]}[pooling]
                assert each["embedding"] == pytest.approx(expected.tolist(), abs=1e-5)
    with server(engine, tokenizer=Words(), max_length=engine.max_length, no_text=TextEncoder.use) as running:  # type: ignore[arg-type]
        assert running.call("GET", "/v1/models")[1]["data"][0]["type"] == "embedding"
        # The last words of a text stay, between the tokens that every text has.
        for cut, kept in ((5, "is a large"), (-1, " ".join(["city"] * (engine.max_length - 2)))):
            body = {"input": f"berlin {'city ' * 60 * (cut < 0)} {kept}", "truncate_prompt_tokens": cut}
            found, expected = (running.post(each, "/v1/embeddings")[1] for each in (body, {"input": kept}))
            assert found["data"] == expected["data"] and found["usage"] == expected["usage"]
        for body, words in (
            ({"input": [[]]}, "is empty"),
            ({"input": "a city", "truncate_prompt_tokens": 2}, "at least 3 is expected"),
            ({"input": "a " * 50}, "52 tokens, but the model supports"),
            ({"input": [[1, len(WORDS)]]}, f"outside the vocabulary, 0 to {len(WORDS) - 1}"),
        ):
            status, found = running.post(body, "/v1/embeddings")
            assert status == 400 and words in found["error"]["message"], found
        status, found = running.post({"prompt": "a", "max_tokens": 1})
        assert status == 400 and "only computes embeddings: use /v1/embeddings" in found["error"]["message"]
        assert running.call("GET", "/")[0] == 404
        assert running.post({"query": QUERY, "documents": TEXTS}, "/v1/rerank")[0] == 200


class Words(Bytes):
    template = ""

    def encode(self, text: str) -> list[int]:
        return tokenizer()(text)["input_ids"]

    def words(self, text: str) -> list[int]:
        return tokenizer()(text, add_special_tokens=False)["input_ids"]


def test_a_folder_of_an_encoder(tmp_path: Path) -> None:
    """One whose head fills in masked words, too; as one that generates it would have random weights."""
    model = encoder("Bert").base_model
    for name, saved in (("plain", model), ("masked", transformers.BertForMaskedLM(model.config))):
        saved.save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    parse = serve_options.parser().parse_args
    given = [str(tmp_path / "plain"), "--model", f"masked={tmp_path / 'masked'}", "--dtype", "fp32"]
    loaded = load(parse(given))
    assert loaded.summary.count("which computes embeddings") == 2
    with pytest.raises(ValueError, match="plain: an encoder runs on one rank"):
        load(parse([str(tmp_path / "plain"), "--speculative-config", '{"method": "ngram"}']))
    with pytest.raises(ValueError, match="does not support adapters"):
        load(parse([str(tmp_path / "plain"), "--lora-modules", "a=b"]))
