"""Bodies of requests: read as JSON is, in bounded time and memory, and refused at the first error."""

from __future__ import annotations

import gc
import itertools
import json
import random
import time
import tracemalloc
from typing import Any

import pytest

from deepspeed.inference.serving import bodies, protocol
from deepspeed.inference.serving.bodies import RequestError, fields_of
from deepspeed.inference.serving.protocol import ChatRequest, CompletionRequest

SIZE = 4 * 2**20
LIST, MESSAGES = b'{"prompt": [', b'{"messages": ['


def filled(head: bytes, unit: bytes, tail: bytes = b"]}") -> bytes:
    return head + b",".join([unit] * ((SIZE - len(head) - len(tail)) // (len(unit) + 1))) + tail


def many(head: bytes, unit: bytes, count: int, tail: bytes = b"]}") -> bytes:
    return head + b",".join([unit] * count) + tail


def long(head: bytes, unit: bytes, tail: bytes) -> bytes:
    return head + unit * ((SIZE - len(head) - len(tail)) // len(unit)) + tail


KEYS = b",".join(b'"%x": 0' % number for number in range(60_000))
HOSTILE: dict[str, bytes] = {
    "floats": filled(LIST, b"0.5"),
    "lists": filled(LIST, b"[]"),
    "objects": filled(LIST, b'{"":1}'),
    "texts": filled(LIST, b'"ab"'),
    "messages": filled(MESSAGES, b"1"),
    "stops": filled(b'{"prompt": "a", "stop": [', b"1"),
    # as many as are read
    "fewer floats": many(LIST, b"0.5", 500_000),
    "fewer tokens": many(LIST, b"123456", 500_000, b', "a"]}'),
    "fewer lists": many(LIST, b"[0.5,0.5,0.5,0.5,0.5,0.5,0.5]", 65_000),
    "fewer objects": many(LIST, b'{"":1}', 30_000),
    "fewer messages": many(MESSAGES, b"1", 500_000),
    "fewer stops": many(b'{"prompt": "a", "stop": [', b"1", 500_000),
    "keys": b'{"prompt": "a", ' + KEYS + b"}",
    "keys of an option": b'{"prompt": "a", "stream_options": {' + KEYS + b"}}",
    # long
    "integer": long(b'{"prompt": "a", "seed": ', b"1", b"}"),
    "integers": filled(LIST, b"1" * 4300),
    "integer in a text": long(b'{"prompt": "a", "seed": "', b"1", b'"}'),
    "number in a text": long(b'{"prompt": "a", "temperature": "', b"1", b'"}'),
    "name": long(b'{"prompt": "a", "', b"a", b'": 1}'),
    "escapes without end": long(b'{"prompt": "', b'\\"', b""),
    "half pairs": long(b'{"prompt": "', b"\\ud83d", b'"}'),
    "blanks": long(b'{"prompt": "a",', b" ", b'"n": 300}'),
    "nested": b'{"prompt": ' + b"[" * 60_000 + b"]" * 60_000 + b"}",
}


def read(body: bytes) -> str:
    """Return the error message for a body."""
    try:
        if body.startswith(b'{"messages"'):
            protocol.messages_of(protocol.parse(ChatRequest, body))
        else:
            protocol.texts_of(protocol.parse(CompletionRequest, body).prompt, "prompt")
    except RequestError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", HOSTILE)
def test_any_body_ends_soon(name: str) -> None:
    body = HOSTILE[name]
    assert len(body) <= SIZE
    gc.collect()
    gc.freeze()  # as the server does: what it holds is not collected again for each body
    began = time.thread_time()
    message = read(body)
    took = time.thread_time() - began
    assert took < 0.5
    assert message and len(message) < 200


@pytest.mark.parametrize(
    "name", ["floats", "objects", "fewer tokens", "fewer lists", "fewer objects", "keys", "name"]
)
def test_any_body_takes_less_than_100_mb(name: str) -> None:
    tracemalloc.start()
    try:
        read(HOSTILE[name])
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


def test_the_first_error_is_named() -> None:
    for text, words in (
        ('{"prompt": [1, 2, 0.5, null]}', "prompt.2: expected an integer, not a number"),
        ('{"prompt": [1, true]}', "prompt.1: expected an integer, not true or false"),
        ('{"prompt": [[1], ["a"]]}', "prompt.1.0: expected an integer, not a string"),
        ('{"prompt": ["a", [1]]}', "prompt.1: expected either strings or tokens"),
        ('{"prompt": ["a", null]}', "prompt.1: expected strings or tokens, not null"),
        ('{"prompt": {"a": 1}}', "prompt: expected strings or tokens, not an object"),
        ('{"prompt": ["a", ""]}', "the prompt is empty"),
        ('{"prompt": []}', "the prompt is empty"),
        ('{"prompt": null}', "prompt: Field required"),
        ('{"prompt": "a", "stop": ["b", 1]}', "stop: expected a string of up to 1000 characters"),
        ('{"prompt": "a", "stop": false}', "stop: expected a string or a list of up to 16"),
        ('{"prompt": "a", "temperature": 1e999}', "temperature: Input should be a finite number"),
        ('{"prompt": "a", "temperature": -Infinity}', "-Infinity is not a JSON number"),
        ('{"messages": [{"role": "user"}, 3]}', "messages.1: expected an object, not a number"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": {}}', "at least one message"),
        (
            '{"messages": [{"role": "user", "content": ["a"]}]}',
            "messages.0.content: a part must be an object",
        ),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "the text of a part is null"),
        ("[1]", "expected an object, not a list"),
        ("", "not JSON"),
        ("\ufeff{}", "not JSON"),
    ):
        assert words in read(text.encode()), (text, read(text.encode()))


@pytest.fixture(params=[1, 7, 2**16])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are checked at once."""
    monkeypatch.setattr(bodies, "_PIECE", request.param)


@pytest.mark.usefixtures("piece")
def test_bodies_are_read_as_json_is() -> None:
    source = random.Random(5)

    def value(depth: int) -> Any:
        kind = source.randrange(7 if depth else 5)
        if kind == 0:
            return source.choice((None, True, False, 0.25, -1e-30))
        if kind == 1:
            return source.randint(-(10**40), 10**40)
        if kind < 5:
            return "".join(source.choices('aä🙂\\"[{,:]}\n\u2028', k=source.randrange(9)))
        inner = [value(depth - 1) for _ in range(source.randrange(5))]
        return inner if kind == 5 else {str(value(0)): each for each in inner}

    for _ in range(300):
        wanted = {"a": value(4), "b": value(2)}
        for ascii_only in (True, False):
            assert fields_of(json.dumps(wanted, ensure_ascii=ascii_only).encode()) == wanted


def parts_and_values(value: Any) -> tuple[int, int]:
    """Texts, lists and objects; and commas, which are one less than the values of each list or object."""
    if isinstance(value, str):
        return 1, 0
    if not isinstance(value, (list, dict)):
        return 0, 0
    inner = list(value.values()) if isinstance(value, dict) else value
    counts = [parts_and_values(each) for each in inner]
    names = len(value) if isinstance(value, dict) else 0
    parts = 1 + names + sum(count for count, _ in counts)
    return parts, max(0, len(inner) - 1) + sum(count for _, count in counts)


@pytest.mark.usefixtures("piece")
def test_only_what_is_outside_of_texts_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"a": ["[[[,,,", '"{,\\', "\\\\", ',\\"', [1, 2, [], {}], {"b,": "]", "c[": None}]}
    body = json.dumps(value).encode()
    parts, commas = parts_and_values(value)
    for most_parts, most_values, refused in (
        (parts, commas + 1, None),
        (parts - 1, commas + 1, "strings, lists, objects"),
        (parts, commas, "values"),
    ):
        monkeypatch.setattr(bodies, "MAX_PARTS", most_parts)
        monkeypatch.setattr(bodies, "MAX_VALUES", most_values)
        if refused is None:
            assert fields_of(body) == value
        else:
            with pytest.raises(RequestError, match=refused):
                fields_of(body)


@pytest.mark.usefixtures("piece")
def test_half_pairs_of_surrogates_are_refused() -> None:
    """Exactly those texts that have no UTF-8."""
    pieces = (r"\ud83d", r"\uDE42", r"\u0041", r"\\", r"\"", "u", "🙂")
    for count in range(1, 5):
        for chosen in itertools.product(pieces, repeat=count):
            body = '{"a": "' + "".join(chosen) + '"}'
            try:
                json.loads(body)["a"].encode()
            except UnicodeEncodeError:
                with pytest.raises(RequestError, match="surrogate"):
                    fields_of(body.encode())
            else:
                assert fields_of(body.encode()) == json.loads(body)
