"""Answers that follow a grammar, whatever the model's logits are."""

from __future__ import annotations

import json
import re

import pytest
import torch

from deepspeed.inference.generation.grammars import Grammars
from deepspeed.inference.generation.sampling import Sampler
from deepspeed.inference.scheduling.requests import Constraint, Request, SamplingParams
from deepspeed.inference.serving.formats import grammar, tool_format

pytest.importorskip("llguidance", reason="the serve extra is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="the demo extra is not installed")

END, SIZE = 256, 300  # more logits than tokens, as models have them
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    assert made.token_to_id("<end>") == END
    return made


def answers(tokenizer, constraints: list[Constraint], new: int = 120) -> list[str]:
    """Drawn from random logits, several at once."""
    grammars = Grammars(tokenizer, [END])
    sampler, numbers = Sampler(matcher_of=grammars), torch.Generator().manual_seed(1)
    requests = []
    for id, each in enumerate(constraints):
        grammars.check(each, SIZE)
        params = SamplingParams(constraint=each, temperature=1.0, seed=id, stop_token_ids=(END,))
        requests.append(Request(id, [1], params))
    running = list(requests)
    for _ in range(new):
        logits = torch.randn(len(running), SIZE, generator=numbers)
        for id, token in sampler.choose(logits, running).items():
            requests[id].tokens.append(token)
        running = [each for each in running if each.tokens[-1] != END]
        if not running:
            break
    assert not running
    return [tokenizer.decode(each.generated) for each in requests]


def test_answers_follow_their_grammars(tokenizer) -> None:
    lark = 'start: "(" start ")" | "x"'
    schema, expression, choice, brackets = answers(
        tokenizer,
        [
            Constraint("json_schema", json.dumps(SCHEMA)),
            Constraint("regex", r"[a-c]{3}-\d{2}"),
            Constraint("choice", json.dumps(["yes", "no", 'per"haps'])),
            Constraint("grammar", lark),
        ],
    )
    found = json.loads(schema)
    assert set(found) == {"name", "age"} and len(found["name"]) <= 4 and 10 <= found["age"] <= 99
    assert re.fullmatch(r"[a-c]{3}-\d{2}", expression)
    assert choice in {"yes", "no", 'per"haps'}
    assert re.fullmatch(r"(\(*)x(\)*)", brackets) and brackets.count("(") == brackets.count(")")


def test_white_space_ends(tokenizer) -> None:
    """As greedy answers of weak models may go on with it until they are cut short."""
    grammars = Grammars(tokenizer, [END])
    call = Constraint(
        "grammar", grammar(tool_format("llama3_json", ()), {"f": SCHEMA}, many=False, specials={})
    )
    begin = '{"name": "f", "parameters": {'
    for constraint, before in (
        (Constraint("json_schema", json.dumps(SCHEMA)), "{"),
        (Constraint("json_object"), '{"a":'),
        (call, begin),
    ):
        matcher = grammars(constraint, SIZE)
        for token in tokenizer.encode(before).ids:
            assert bool(matcher.allowed()[token])
            matcher.advance(token)
        (blank,) = tokenizer.encode(" ").ids
        for _ in range(32):
            assert bool(matcher.allowed()[blank])
            matcher.advance(blank)
        assert not bool(matcher.allowed()[blank])
        assert bool(matcher.allowed().any())


def test_any_value_follows_the_schema_true(tokenizer) -> None:
    grammars = Grammars(tokenizer, [END])
    for text in ("[1, {}]", "3", '"a"'):
        matcher = grammars(Constraint("json_schema", "true"), SIZE)
        for token in tokenizer.encode(text).ids:
            assert bool(matcher.allowed()[token]), text
            matcher.advance(token)
    for schema in ("false", "[1]", "nope"):
        with pytest.raises(ValueError, match="the schema is not a JSON object"):
            grammars(Constraint("json_schema", schema), SIZE)


def test_reasoning_stands_before_what_follows_a_grammar(tokenizer) -> None:
    """Free text up to its end, which random logits do not produce, so the matcher is called directly."""
    kinds = {
        "json_schema": (json.dumps(SCHEMA), '{"name": "a", "age": 12}'),
        "regex": ("[a-c]{3}", "abc"),
        "choice": ('["yes"]', "yes"),
        "grammar": ('start: "(" "x" ")"', "(x)"),
    }
    grammars = Grammars(tokenizer, [END])
    for kind, (text, answer) in kinds.items():
        for begin, before in (("", "so < </a\n</think>\n"), ("<think>", ""), ("<think>", "<think>a</think>")):
            constraint = Constraint(kind, text, (begin, "</think>"))
            grammars.check(constraint, SIZE)
            matcher = grammars(constraint, SIZE)
            for token in tokenizer.encode(before + answer).ids:
                assert bool(matcher.allowed()[token]), (kind, begin, before)
                matcher.advance(token)
            assert bool(matcher.allowed()[END])
    begun = Constraint("choice", '["yes"]', ("", "<end>"))  # an end that is a special token
    matcher = grammars(begun, SIZE)
    for token in (*tokenizer.encode("so").ids, END, *tokenizer.encode("yes").ids):
        assert bool(matcher.allowed()[token])
        matcher.advance(token)


@pytest.mark.parametrize(
    "constraint, said",
    [
        (Constraint("json_schema", '{"type": "strng"}'), "strng"),
        (Constraint("json_schema", "no JSON"), "json"),
        (Constraint("regex", "(a"), "regex"),
        (Constraint("grammar", "start: nothing"), "nothing"),
        (Constraint("yaml", "a"), "yaml"),
        (Constraint("regex", "a" * 200_000), "100,000"),
    ],
    ids=lambda value: value.kind if isinstance(value, Constraint) else "",
)
def test_what_is_no_grammar_is_told(tokenizer, constraint, said) -> None:
    with pytest.raises(ValueError, match=f"(?i){said}"):
        Grammars(tokenizer, [END]).check(constraint, SIZE)


def test_a_tokenizer_without_a_vocabulary_of_bytes_is_told() -> None:
    with pytest.raises(ValueError, match="fast tokenizer"):
        Grammars(object(), [END]).check(Constraint("regex", "a"), SIZE)


def test_a_tokenizer_that_knows_more_tokens_than_the_model(tokenizer) -> None:
    """As one has to which a token for padding was added."""
    for size in (END + 1, 250):  # less even than the bytes: what is left may end too early, but nothing fails
        constraint = Constraint("regex", "[a-c]{3}")
        bigger = type(tokenizer).from_str(tokenizer.to_str())
        bigger.add_special_tokens(["<pad>", "<more>"])
        grammars = Grammars(bigger, [0])
        grammars.check(constraint, size)
        matcher = grammars(constraint, size)
        allowed = matcher.allowed()
        assert allowed.shape == (size,)
        assert allowed.nonzero().flatten().tolist() == [bigger.token_to_id(each) for each in "abc"]


def test_a_whole_grammar_ends_an_answer_without_stop_tokens(tokenizer) -> None:
    """Nothing follows it, whatever the model would say; ids beyond the vocabulary are no stop tokens."""
    for stops in ([], [SIZE + 5]):
        sampler = Sampler(matcher_of=Grammars(tokenizer, stops))
        params = SamplingParams(constraint=Constraint("regex", "[a-c]{3}"), max_new_tokens=20, logprobs=True)
        request = Request(1, [5], params)
        for _ in range(20):
            found = sampler.choose(torch.zeros(1, SIZE), [request])
            if request.cut is not None:
                break
            request.tokens.append(found[request.id])
        assert (
            not found
            and request.cut == "stop"
            and re.fullmatch("[a-c]{3}", tokenizer.decode(request.generated))
        )
        assert len(request.logprobs) == len(request.generated)
