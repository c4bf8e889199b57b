"""``generate`` of Transformers with each forward in a single call of the native library.

Transformers selects the tokens, with its own random numbers, processors, streamers and criteria. Only the forward is
replaced: it runs the fused layout over a paged cache instead of the cache of ``generate``; without a streamer, the loop
around it is replaced, too. Identical prompts are computed once. Calls that need more than the logits of the last tokens
(beams, an assistant, hidden states), and models or batches that the fused layout does not support, use the module's own
``generate``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.inference.cache.pages import PagedCache, PagePiece
from deepspeed.inference.model.decoder import has_hooks
from deepspeed.inference.model.fused import FusedLayout
from deepspeed.inference.model.info import LayoutError
from deepspeed.inference.model.runner import ModelRunner
from deepspeed.ops.host_graph import largest_of

# The token loop of Transformers' ``generate`` for greedy search and sampling, over a forward that computes only the
# unfinished rows.
#
# Processors, criteria and random numbers are those of the call, used in the same order, so the tokens are the same.
# Omitted is the generic work around a model's forward: preparing inputs, growing masks, and computing finished rows,
# which Transformers does until the last row is finished.


Forward = Callable[[Tensor, Sequence[int]], Tensor]
"""(tokens [rows, new], indices of unfinished rows) -> their logits [unfinished rows, vocabulary]."""

_LOOP_METHODS = (
    "_sample",
    "_prefill",
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
)


def uses_standard_loop(kind: type[Any]) -> bool:
    """Return whether models of this class use the token loop of Transformers."""
    from transformers import GenerationMixin

    return all(getattr(kind, name, None) is getattr(GenerationMixin, name, None) for name in _LOOP_METHODS)


@dataclass(slots=True)
class GeneratedTokens:
    """``tokens`` [rows, length]: prompts and new tokens, padded after a row's end. ``scores``, ``logits`` [rows,
    vocabulary] of each new token, with and without processors, if requested."""

    tokens: Tensor
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


def supports(config: Any, criteria: Any, others: Sequence[Any]) -> bool:
    """Return whether this loop supports the call. ``others``: further arguments of the loop."""
    padded = isinstance(getattr(config, "_pad_token_tensor", None), Tensor)
    return not any(others) and (padded or not _has_ends(criteria))


def choose_tokens(
    forward: Forward, prompts: Tensor, processors: Any, criteria: Any, config: Any
) -> GeneratedTokens:
    """Run the loop. ``prompts``: [rows, length] on the host."""
    made, new, as_dict = GeneratedTokens(prompts), prompts, config.return_dict_in_generate
    ends, rows = _has_ends(criteria), len(prompts)
    going, unfinished = list(range(rows)), torch.ones(rows, dtype=torch.bool)
    logits = torch.empty(0)
    while True:
        found = forward(new, going).float()
        # A finished row keeps its last logits: it draws as many random numbers as in Transformers, and gets padding.
        logits = found if len(going) == rows else logits.index_copy(0, torch.tensor(going), found)
        scores = processors(made.tokens, logits.clone()) if processors else logits
        if as_dict and config.output_scores:
            made.scores.append(scores)
        if as_dict and config.output_logits:
            made.logits.append(logits)
        chosen = _choose(scores, config.do_sample)
        if ends:
            chosen = torch.where(unfinished, chosen, config._pad_token_tensor)
        new = chosen[:, None]
        made.tokens = torch.cat([made.tokens, new], dim=1)
        unfinished &= ~criteria(made.tokens, tuple(made.scores) or None)
        if not unfinished.any():
            return made
        if ends and not as_dict:  # the dict contains the logits after an end, and the cache
            going = unfinished.nonzero()[:, 0].tolist()


def _choose(scores: Tensor, samples: bool | None) -> Tensor:
    if samples:
        return torch.multinomial(scores.softmax(-1), num_samples=1)[:, 0]
    return torch.tensor(largest_of(scores))


def _has_ends(criteria: Any) -> bool:
    """Return whether one of them is a token that ends a row."""
    return any(hasattr(each, "eos_token_id") for each in criteria)


_BLOCK_SIZE = 16
_FIRST_TOKENS = 256
"""Initial size of the cache in tokens, after the prompt; it grows by doubling."""

_ARGUMENTS = frozenset(
    "inputs input_ids attention_mask generation_config logits_processor stopping_criteria streamer "
    "synced_gpus tokenizer max_new_tokens max_length min_new_tokens min_length do_sample temperature "
    "top_k top_p min_p typical_p top_h epsilon_cutoff eta_cutoff repetition_penalty no_repeat_ngram_size "
    "bad_words_ids suppress_tokens sequence_bias begin_suppress_tokens forced_bos_token_id "
    "forced_eos_token_id renormalize_logits remove_invalid_values exponential_decay_length_penalty "
    "prefix_allowed_tokens_fn stop_strings max_time num_return_sequences num_beams use_cache bos_token_id "
    "pad_token_id eos_token_id return_dict_in_generate output_logits output_scores".split()
)
"""Arguments of ``generate`` that affect which tokens are selected."""

_PLAIN: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "use_cache": (None, True),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "cache_implementation": (None, "dynamic"),
    "prefill_chunk_size": (None,),
    "guidance_scale": (None, 1, 1.0),
    "watermarking_config": (None,),
}
"""Settings of a call or model that change what the forward must return, with the values that do not."""

_FORWARD = frozenset(
    "input_ids attention_mask position_ids cache_position past_key_values use_cache logits_to_keep return_dict "
    "output_attentions output_hidden_states".split()
)
_UNWANTED = ("output_attentions", "output_hidden_states")


class FusedGeneration:
    """Generates with one module after another. Facts about a module are kept while it lives; the cache is dropped after
    each call."""

    def __init__(self) -> None:
        self._module: weakref.ref[nn.Module] | None = None
        self._runner: ModelRunner | None = None
        self._acting: type[Any] = type(None)

    def generate(self, module: Any, *inputs: Any, **kwargs: Any) -> Any:
        """Run the ``generate`` of the module's class, in evaluation mode and with whole weights."""
        plain = type(module).generate
        runner = self._runner_of(module) if _is_plain(module, inputs, kwargs) else None
        if runner is None:
            return plain(module, *inputs, **kwargs)
        from deepspeed.inference.model.padded_cache import cache_over

        rows = _Rows(runner)
        cache: Any = cache_over(rows, 1)
        cache.rows = rows
        acting = object.__new__(self._acting)
        own = vars(module)
        if "forward" in own:
            own = {name: value for name, value in own.items() if name != "forward"}
        object.__setattr__(acting, "__dict__", own)  # the same module with another forward
        try:
            made = plain(acting, *inputs, past_key_values=cache, **kwargs)
            if getattr(made, "past_key_values", None) is cache:
                # A caller that asked for the whole output gets the cache, too.
                made.past_key_values = rows.kept(module)
            return made
        finally:
            runner.release()

    def _runner_of(self, module: nn.Module) -> ModelRunner | None:
        """Return a runner; None if the fused layout does not support ``module``, or hooks would see the trial."""
        if any(map(has_hooks, module.modules())):
            return None
        if self._module is None or self._module() is not module:
            self._module = weakref.ref(module)
            self._acting = _acting_kind(type(module))
            try:
                self._runner = ModelRunner(module, _BLOCK_SIZE, layouts=(FusedLayout,))
            except (LayoutError, AttributeError, TypeError, ValueError):  # from any model code
                self._runner = None
        return self._runner

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedGeneration:
        return FusedGeneration()


def _is_plain(module: Any, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call asks for greedy or sampled tokens only."""
    if module.training or not kwargs.keys() <= _ARGUMENTS or len(inputs) > 1:
        return False
    configs = (kwargs.get("generation_config"), getattr(module, "generation_config", None))
    settings = [kwargs, *(vars(each) for each in configs if each is not None)]
    return all(
        next((each[name] for each in settings if each.get(name) is not None), None) in plain
        for name, plain in _PLAIN.items()
    )


def _acting_kind(kind: type[Any]) -> type[Any]:
    """Return a subclass of ``kind`` whose forward runs the rows of a call if the cache is theirs, and with this
    loop."""
    plain = kind.forward

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows = getattr(kwargs.get("past_key_values"), "rows", None)
        if not isinstance(rows, _Rows):
            return plain(self, *args, **kwargs)
        if not rows.sequences and (args or not rows.supports(kwargs)):
            return plain(self, *args, **{**kwargs, "past_key_values": _plain_cache(self)})
        return rows.forward(kwargs)

    members: dict[str, Any] = {"forward": forward, "__module__": kind.__module__}
    if uses_standard_loop(kind):
        members["_sample"] = _loop_of(kind)
    return type(kind.__name__, (kind,), members)


def _loop_of(kind: type[Any]) -> Any:
    plain = kind._sample

    @functools.wraps(plain)
    def sample(
        self: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **given: Any,
    ) -> Any:
        rows: Any = getattr(given.get("past_key_values"), "rows", None)
        others = synced_gpus, streamer
        wanted = isinstance(rows, _Rows) and supports(generation_config, stopping_criteria, others)
        if not wanted or rows.sequences or not rows.supports({**given, "input_ids": input_ids}):
            settings = (logits_processor, stopping_criteria, generation_config, synced_gpus, streamer)
            return plain(self, input_ids, *settings, **given)
        forward = functools.partial(rows.logits, given.get("attention_mask"))
        made = choose_tokens(forward, input_ids, logits_processor, stopping_criteria, generation_config)
        return (
            _output_of(made, given["past_key_values"])
            if generation_config.return_dict_in_generate
            else made.tokens
        )

    return sample


def _output_of(made: GeneratedTokens, cache: Any) -> Any:
    from transformers.generation import GenerateDecoderOnlyOutput

    scores, logits = (tuple(each) or None for each in (made.scores, made.logits))
    return GenerateDecoderOnlyOutput(
        sequences=made.tokens,  # type: ignore[arg-type]
        scores=scores,  # type: ignore[arg-type]
        logits=logits,  # type: ignore[arg-type]
        past_key_values=cache,
    )


def _plain_cache(module: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=module.config)


class _Rows:
    """The sequences of one call of ``generate``. As a Transformers cache, it has ``length`` tokens, of which ``count``
    are new."""

    count = 0

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.length = 0
        self.sequences: list[tuple[int, list[int]]] = []  # tokens so far without padding, blocks
        self._used = self._blocks = 0

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        raise RuntimeError("the model's own attention does not use this cache")

    def supports(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether the first forward of a call has left-padded rows, and not too many."""
        tokens, mask = arguments.get("input_ids"), arguments.get("attention_mask")
        if not arguments.keys() <= _FORWARD or any(arguments.get(name) for name in _UNWANTED):
            return False
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.device.type != "cpu":
            return False
        layout = self.runner.layout
        if not isinstance(layout, FusedLayout) or not layout.supports(tokens.shape[0]):
            return False
        if mask is None:
            return True
        if not isinstance(mask, Tensor) or mask.shape != tokens.shape:
            return False
        return bool((mask[:, -1] == 1).all() and (mask[:, 1:] >= mask[:, :-1]).all())

    def forward(self, arguments: Mapping[str, Any]) -> Any:
        """Return logits [rows, 1, vocabulary] after the last token of each row."""
        from transformers.modeling_outputs import CausalLMOutputWithPast

        tokens = arguments["input_ids"]
        logits = self.logits(arguments.get("attention_mask"), tokens, range(len(tokens)))
        return CausalLMOutputWithPast(logits=logits[:, None], past_key_values=arguments["past_key_values"])

    def logits(self, mask: Tensor | None, tokens: Tensor, going: Sequence[int]) -> Tensor:
        """Return logits [rows, vocabulary] after the last token of each row in ``going`` (all rows at first)."""
        self.length += tokens.shape[1]
        if not self.sequences:
            return self._first_logits(tokens, mask)
        numbers = tokens.tolist()
        return self.runner.forward([self._piece(i, numbers[i]) for i in going], unchanged=True)

    def kept(self, module: Any) -> Any:
        """Return a Transformers cache with the keys and values of all rows, left-padded."""
        cache, pages = _plain_cache(module), self.runner.cache
        for layer in sorted(pages.shapes):
            pairs = [pages.read(layer, torch.tensor(blocks), 0, stop) for stop, blocks in self.sequences]
            keys, values = (
                torch.stack([functional.pad(each, (0, 0, self.length - each.shape[1], 0)) for each in some])
                for some in zip(*pairs, strict=True)
            )
            cache.update(keys, values, layer)
        return cache

    def _first_logits(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        width = tokens.shape[1]
        real = [width] * len(tokens) if mask is None else mask.sum(1).tolist()
        prompts = [tuple(row[width - count :]) for row, count in zip(tokens.tolist(), real, strict=True)]
        self.sequences = [(0, []) for _ in prompts]
        self._blocks = len(prompts) * -(-(width + _FIRST_TOKENS) // _BLOCK_SIZE)
        self.runner.allocate(self._blocks)
        first = {prompt: i for i, prompt in reversed(list(enumerate(prompts)))}
        different = sorted(first.values())
        logits = self.runner.forward([self._piece(i, prompts[i]) for i in different])
        for i, prompt in enumerate(prompts):
            if first[prompt] != i:
                self._follow(first[prompt], i)
        return logits[torch.tensor([different.index(first[prompt]) for prompt in prompts])]

    def _follow(self, one: int, other: int) -> None:
        """Let sequence ``other`` continue from the tokens of ``one``: full blocks are shared, the last one is
        copied."""
        stop, blocks = self.sequences[one]
        full = stop // _BLOCK_SIZE
        self.sequences[other] = (full * _BLOCK_SIZE, blocks[:full])
        if stop > full * _BLOCK_SIZE:
            own = self._piece(other, (0,) * (stop % _BLOCK_SIZE)).blocks[-1]
            for layer in self.runner.cache.shapes:
                for pages in self.runner.cache.pages(layer):
                    pages[own] = pages[blocks[full]]

    def _piece(self, index: int, tokens: Sequence[int]) -> PagePiece:
        start, blocks = self.sequences[index]
        stop = start + len(tokens)
        missing = -(-stop // _BLOCK_SIZE) - len(blocks)
        if missing > 0:
            while self._used + missing > self._blocks:
                self._grow()
            blocks.extend(range(self._used, self._used + missing))
            self._used += missing
        self.sequences[index] = (stop, blocks)
        return PagePiece(tokens, start, blocks)

    def _grow(self) -> None:
        before: PagedCache = self.runner.cache
        self._blocks *= 2
        self.runner.allocate(self._blocks)
        for layer in before.shapes:
            for old, new in zip(before.pages(layer), self.runner.cache.pages(layer), strict=True):
                new[: len(old)] = old
