"""Grammars that constrain answers: JSON schemas, regular expressions, choices and Lark grammars, matched by llguidance.

llguidance computes the mask of a token in about 50 us and has no dependencies; xgrammar requires Triton and its own
compiler, and outlines-core compiles each schema to an automaton before the first token.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.extras import install_hint
from deepspeed.base.logging import logger
from deepspeed.inference.scheduling.requests import Constraint

_MAX_CHARACTERS = 100_000
"""Maximum characters of a grammar: llguidance is fast, but its time grows with the size."""

JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
"""Of llguidance. Where any number of blanks may follow, a greedy answer of a weak model may have nothing else."""

_NO_STOP = "<|the grammar is complete|>"
"""Stands for the stop token of a model that has none."""
_CHECKED = 64
"""Number of constraints whose check is cached: a server checks each twice, and clients repeat theirs."""


class Grammars:
    """Creates the matchers of constraints (`logits.py`). Thread-safe.

    Args:
        tokenizer: a fast tokenizer of Transformers, or one of the library ``tokenizers``.
        stop_token_ids: tokens that may follow a whole answer.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._stops = list(stop_token_ids)
        self._made: dict[int, Any] = {}  # by vocabulary size
        self._right: dict[tuple[Constraint, int], None] = {}  # recently checked, valid ones
        self._lock = threading.Lock()

    def check(self, constraint: Constraint, size: int) -> None:
        """Check a constraint. ValueError: it is not a grammar, or the tokenizer cannot follow one."""
        if (constraint, size) in self._right:
            return
        if len(constraint.text) > _MAX_CHARACTERS:
            raise ValueError(f"a grammar may have at most {_MAX_CHARACTERS:,} characters")
        errors = _library().LLMatcher.validate_grammar(self._grammar(constraint), self._tokens(size))
        if errors and not errors.startswith("WARNING"):
            raise ValueError(f"{constraint.kind}: {errors}")
        with self._lock:
            self._right[constraint, size] = None
            if len(self._right) > _CHECKED:
                self._right.pop(next(iter(self._right)))

    def __call__(self, constraint: Constraint, size: int) -> GrammarMatcher:
        """Return a matcher at the start of ``constraint``, over a vocabulary of ``size`` tokens."""
        known = self._tokens(size)
        matcher = _library().LLMatcher(known, self._grammar(constraint), log_level=0)
        return GrammarMatcher(matcher, known, size, self._stops)

    def _grammar(self, constraint: Constraint) -> str:
        grammar = _grammar(constraint)
        return grammar if constraint.reasoning is None else self._behind(grammar, *constraint.reasoning)

    def _behind(self, grammar: str, begin: str, end: str) -> str:
        """Return a grammar of free text from ``begin`` to ``end``, followed by ``grammar``."""
        added = self._tokenizer.get_added_tokens_decoder()
        specials = {each.content: f"<[{token}]>" for token, each in added.items() if each.special}
        ended = f"FREE? {specials[end]}" if end in specials else "free"
        first = (
            f"({specials.get(begin, json.dumps(begin))} {ended} SPACES?)?" if begin else f"{ended} SPACES?"
        )
        rules = f"start: {first} @answer\nSPACES: /\\s+/\n"
        rules += "FREE: /(?s:.+)/" if end in specials else f"free[suffix={json.dumps(end)}]: /(?s:.*)/"
        inner = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
        return json.dumps({"grammars": [{"lark_grammar": rules}, {**inner[0], "name": "answer"}, *inner[1:]]})

    def _tokens(self, size: int) -> Any:
        with self._lock:
            if size not in self._made:
                if not hasattr(self._tokenizer, "to_str"):
                    raise ValueError(f"grammars need a fast tokenizer, not {type(self._tokenizer).__name__}")
                plain = type(self._tokenizer).from_str(self._tokenizer.to_str())
                plain.no_padding()
                plain.no_truncation()
                size_of_both = max(size, plain.get_vocab_size())  # it may have more than the model
                stops = [each for each in self._stops if each < size_of_both]
                if not stops:  # a token of its own, so that no other one ends a grammar
                    plain.add_special_tokens([_NO_STOP])
                    stops = [plain.token_to_id(_NO_STOP)]
                    size_of_both = max(size_of_both, stops[0] + 1)
                self._made[size] = _library().LLTokenizer(
                    plain.to_str(), n_vocab=size_of_both, eos_token=stops
                )
            return self._made[size]


class GrammarMatcher:
    """Progress of one answer through its grammar. Once only the end may follow, or the grammar has become too complex,
    only ``stops`` are allowed: a request must not disturb others. ``known``: tokens of the matcher, of which the
    model has the first ``size`` tokens. ``is_complete``: no token may follow, of a model without ``stops``."""

    def __init__(self, matcher: Any, known: Any, size: int, stops: Sequence[int]) -> None:
        self._matcher = matcher
        self._ends = [each for each in known.eos_tokens if each < size]
        self._size = size
        self._stops = [each for each in stops if each < size]
        self.is_complete = False
        self._warned = False
        self._words = torch.zeros((known.vocab_size + 31) // 32, dtype=torch.int32)

    def allowed(self) -> Tensor:
        """Return a mask of the tokens that may follow, bool [vocabulary], True for at least one."""
        self._matcher.unsafe_compute_mask_ptr(self._words.data_ptr(), self._words.nbytes)
        bits = self._words[:, None] >> torch.arange(32, dtype=torch.int32) & 1
        found = bits.flatten()[: self._size].bool()
        if not self._stops:
            found[self._ends] = False
        return self._end() if self._is_lost() or not bool(found.any()) else found

    def advance(self, token: int) -> None:
        """Advance by the chosen token."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def _is_lost(self) -> bool:
        lost = self._matcher.is_error()
        if lost and not self._warned:
            self._warned = True
            logger.warning(f"inference: an answer ends as its grammar failed: {self._matcher.get_error()}")
        return lost

    def _end(self) -> Tensor:
        self.is_complete = not self._stops
        found = torch.full((self._size,), not self._stops)
        found[self._stops] = True
        return found


def _grammar(constraint: Constraint) -> str:
    """Return the grammar in llguidance's form. ValueError: the text of the constraint is malformed."""
    library, text = _library().LLMatcher, constraint.text
    if constraint.kind in ("json_schema", "json_object"):
        schema = text if constraint.kind == "json_schema" else '{"type": "object"}'
        schema = "{}" if schema.strip() == "true" else schema  # only an object takes options
        try:
            return library.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)
        except ValueError as error:
            raise ValueError(f"the schema is not a JSON object: {error}") from None
    if constraint.kind == "regex":
        return library.grammar_from_regex(text)
    if constraint.kind == "choice":
        return library.grammar_from_lark(
            "start: " + " | ".join(json.dumps(each) for each in json.loads(text))
        )
    if constraint.kind == "grammar":
        return library.grammar_from_lark(text)
    raise ValueError(
        f"constraint {constraint.kind!r}: expected json_schema, json_object, regex, choice or grammar"
    )


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ValueError(f"grammars need llguidance: {install_hint('llguidance', extra='serve')}") from error
    return llguidance
