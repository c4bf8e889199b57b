"""The server's use of real tokenizers: from several threads at once, and with a bound of their length that holds."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="the clients extra is not installed")

from deepspeed.inference.serving.tokenizers import HuggingFaceTokenizer, characters_per_token  # noqa: E402

TEXTS = ["the cat sat on the mat ", "Grüße,  wörld 🙂!\n\n", "aaaa" * 20 + " ", "1 2 3\t", "    " * 8]


def bytes_of_words() -> Any:
    """As of GPT-2 and Llama 3."""
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(TEXTS * 20, trainer)
    return raw


def bytes_as_last_resort() -> Any:
    """As of Llama 2 and Gemma: a text is one word, and unknown characters are bytes."""
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcehmnost", "▁t", "▁▁", "▁▁▁▁"]
    merges = [("▁", "t"), ("▁", "▁"), ("▁▁", "▁▁")]
    vocab = {each: at for at, each in enumerate(letters)}
    model = tokenizers.models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    raw = tokenizers.Tokenizer(model)
    raw.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    return raw


def one_unknown_for_many() -> Any:
    """As of XGLM: runs of unknown characters are one token, and so are blanks."""
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("▁the", -2.0), *((each, -3.0) for each in "abcdef")]
    raw = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    raw.normalizer = tokenizers.normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    return raw


def words() -> Any:
    """As of BERT: one token for each unknown word."""
    vocab = {"[UNK]": 0, "the": 1, "cat": 2, "a": 3, "##a": 4}
    raw = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return raw


@pytest.mark.parametrize(
    ("make", "bounded"),
    [(bytes_of_words, True), (bytes_as_last_resort, True), (one_unknown_for_many, False), (words, False)],
)
def test_no_text_has_fewer_tokens_than_its_length_says(make: Any, bounded: bool) -> None:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=make())
    longest = characters_per_token(tokenizer)
    assert (longest is not None) == bounded
    source = random.Random(1)
    for _ in range(100 if longest else 0):
        text = "".join(
            source.choice([*TEXTS, "漢", "\ue000", " " * 50]) for _ in range(source.randrange(1, 30))
        )
        assert len(tokenizer.encode(text, add_special_tokens=False)) * (longest or 0) >= len(text)


def test_a_short_context_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    """Texts that are too long are refused; Transformers would speak of indexing errors."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_of_words(), model_max_length=16)
    with caplog.at_level("WARNING"):
        HuggingFaceTokenizer(tokenizer, max_tokens=16).encode("漢" * 16)
    assert not caplog.records


def test_threads_encode_and_decode_at_once() -> None:
    """Each gets what it would get alone, also of a tokenizer whose file says that it pads and cuts."""
    raw = bytes_of_words()
    alone = transformers.PreTrainedTokenizerFast(tokenizer_object=raw)
    texts = [each * (1 + number % 40) for number, each in enumerate(TEXTS * 40)]
    wanted = [alone.encode(text) for text in texts]
    raw = bytes_of_words()
    raw.enable_padding(length=100)
    raw.enable_truncation(10)
    template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    own = HuggingFaceTokenizer(
        transformers.PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=template), max_tokens=100_000
    )
    with ThreadPoolExecutor(4) as pool:
        chats = pool.map(lambda text: own.chat([{"role": "user", "content": text}]), texts)
        plain = pool.map(own.encode, texts)
        back = pool.map(own.decode, wanted)
        assert list(plain) == list(chats) == wanted and list(back) == texts


def test_what_the_routes_of_tokens_tell() -> None:
    raw = bytes_of_words()
    known = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<end>", chat_template="{{ 1 }}"
    )
    known.add_special_tokens({"eos_token": "<end>"})
    own = HuggingFaceTokenizer(known)
    tokens = [*own.words(" the cat"), known.eos_token_id]
    assert own.decode(tokens) == " the cat" and own.decode_all(tokens) == " the cat<end>"
    assert own.names([*tokens, 10**6]) == [*known.convert_ids_to_tokens(tokens), ""]
    told = own.info()
    assert told["eos_token"] == "<end>" and told["bos_token"] is None and told["chat_template"] == "{{ 1 }}"
