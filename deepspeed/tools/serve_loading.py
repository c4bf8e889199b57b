"""Load the models of ``ds serve``: first all weights, then the caches, which share the remaining memory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.transformers_models import why_not_loaded
from deepspeed.inference.config import DtypeEnum
from deepspeed.inference.entry import init_inference
from deepspeed.inference.generation.generator import Generator, default_cache_bytes, divide, longest_request
from deepspeed.inference.generation.grammars import Grammars
from deepspeed.inference.model.low_rank import adaptable_layers, load_adapter
from deepspeed.inference.model.runner import ModelRunner
from deepspeed.inference.pretrained import Pretrained
from deepspeed.inference.scheduling.speculation import NgramProposer, Proposer, SpeculativeConfig
from deepspeed.inference.serving.clients import read_keys
from deepspeed.inference.serving.formats import guessed_reasoning_format, guessed_tool_format
from deepspeed.inference.serving.models import Models, ServedModel
from deepspeed.inference.serving.pooling import dimensions_of, pooling_of
from deepspeed.inference.serving.service import Service, Services, broadcast
from deepspeed.inference.serving.tokenizers import HuggingFaceTokenizer
from deepspeed.inference.serving.tool_requests import Formats
from deepspeed.tools.serve_options import adapter_options


@dataclass(frozen=True, slots=True)
class LoadedServer:
    """``services``: not started yet. ``app``: answers clients; None on ranks that have none. ``summary``: describes the
    models, for a log."""

    services: Services
    app: Any = None
    summary: str = ""


def load(args: argparse.Namespace) -> LoadedServer:
    """Load the models that the options name. OSError, ValueError: one cannot be loaded, or they do not fit into
    memory."""
    from deepspeed.inference.serving.app import ServerSettings, make_app

    settings = ServerSettings(**clients_of(args))
    sources = [(one, _of_model(one, Pretrained, one.model)) for one in args.each]
    if args.tp_size == 1:
        check_memory(args, sources)
    made: list[_Causal | _Encoder] = [
        _of_model(one, _Encoder if source.is_classifier or source.is_encoder else _Causal, one, source)
        for one, source in sources
    ]
    parts = cache_parts(args, [each.largest_cache for each in made])
    served = [_of_model(each.args, each.serve, part) for each, part in zip(made, parts, strict=True)]
    models = Models(served)
    for name, folder, base in _adapters_of(args):
        try:
            models.add(name, folder, base)
        except ValueError as problem:
            raise ValueError(f"--lora-modules: {problem}") from problem
    app = make_app(models, settings) if all(each.leads for each in made) else None
    return LoadedServer(models.services, app, "; ".join(each.summary for each in made))


def _of_model(one: argparse.Namespace, work: Any, *given: Any) -> Any:
    """Call ``work``, and prefix its errors by the model's folder. ValueError: ``work`` raised (Transformers for a
    missing model, ours for one that does not fit)."""
    try:
        return work(*given)
    except (OSError, ValueError) as error:
        why = why_not_loaded(one.model, error) if isinstance(error, OSError) else error
        raise ValueError(f"{one.model}: {why}") from error


class _Causal:
    """A generating model, without its cache. ``largest_cache``: bytes that its requests can use at most."""

    def __init__(self, args: argparse.Namespace, source: Pretrained) -> None:
        if args.quantization:
            source.check_quantization(args.quantization)
        given = dtype_of(args)
        model: Any = source.load_causal(
            dtype=None if given is torch.int8 else given,
            keeps_integers=args.tp_size == 1 and given is not torch.int8,
        )
        self.no_text = source.no_text
        if self.no_text and args.speculative_config:
            raise ValueError(f"--speculative-config is for models that generate: {self.no_text}")
        tensor_parallel = {"tp_size": args.tp_size}
        engine = init_inference(model, dtype=given or model.dtype, tensor_parallel=tensor_parallel)
        self.args, self.group, self.hub_tokenizer = args, engine.mp_group, source.load_tokenizer()
        if args.chat_template is not None:
            self.hub_tokenizer.chat_template = template_of(args.chat_template)
        self.proposer = proposer_of(args, self.hub_tokenizer, engine.module)
        self.runner = ModelRunner(engine.module, args.block_size)
        length, size = longest_request(self.runner, args.max_length), args.block_size
        drafts = 0 if self.proposer is None else self.proposer.token_bytes
        self.largest_cache = (
            args.max_sequences * -(-length // size) * (self.runner.block_bytes + size * drafts)
        )
        self.leads = self.group is None or self.group.rank == 0
        self.summary = ""

    def serve(self, cache_bytes: int) -> ServedModel:
        """Create the cache and the service. ValueError: ``cache_bytes`` is too small, or options do not fit the
        model."""
        args, runner, group = self.args, self.runner, self.group
        drawn = int(torch.randint(2**31, ())) if group is None else 0
        generator = Generator(
            runner,
            token_budget=token_budget_of(args),
            short_share=args.short_share,
            policy=args.scheduling_policy,
            speculation=self.proposer,
            max_sequences=args.max_sequences,
            max_length=args.max_length,
            cache_bytes=cache_bytes,
            prefix_sharing=args.enable_prefix_caching,
            seed=drawn if args.seed is None else args.seed,
            group=group,
            matcher_of=Grammars(self.hub_tokenizer, runner.info.stop_token_ids),
        )
        max_length = generator.scheduler.max_length
        tokenizer = HuggingFaceTokenizer(self.hub_tokenizer, max_tokens=max_length)
        formats = formats_of(args, tokenizer.template)
        if args.enable_auto_tool_choice and formats.tools is None:
            raise ValueError("--enable-auto-tool-choice needs --tool-call-parser for this model")
        announce = None if group is None else partial(broadcast, group, runner.info.device)
        formats_line = f"tool calls: {formats.tools or 'none'}, reasoning: {formats.reasoning or 'none'}"
        self.summary = f"model {args.name}, {memory_line(generator)}; {self.no_text or formats_line}"
        load_one = None
        if args.tp_size == 1:
            # Find the layers now: later the model is in use.
            load_one = partial(load_adapter, runner.module, adaptable=adaptable_layers(runner.module))
        return ServedModel(
            name=args.name,
            path=args.model,
            service=_service_of(args, generator, announce),
            tokenizer=tokenizer,
            max_length=max_length,
            stop_token_ids=runner.info.stop_token_ids,
            default_tokens=args.default_tokens,
            formats=formats,
            trust_templates=args.trust_request_chat_template,
            pooling=args.pooling or pooling_of(args.model) or "last",
            dimensions=dimensions_of(runner.info.config),
            load_adapter=load_one,
            no_text=self.no_text,
        )


class _Encoder:
    """A model that embeds texts or scores pairs of texts, and needs no cache."""

    largest_cache, leads = 0, True

    def __init__(self, args: argparse.Namespace, source: Pretrained) -> None:
        from deepspeed.inference.serving.encoders import CrossEncoder, TextEncoder

        if not source.is_encoder:
            raise ValueError(
                f"{source.config.architectures[0]} is not an encoder, which scoring pairs of texts needs"
            )
        if args.tp_size > 1 or args.speculative_config:
            raise ValueError("an encoder runs on one rank (--tp-size 1), without --speculative-config")
        model: Any = source.load_encoder()
        module = init_inference(model, dtype=dtype_of(args) or model.dtype).module
        self.args, kind = args, CrossEncoder if source.is_classifier else TextEncoder
        budget = token_budget_of(args, on_cpus=512)  # nobody waits for one text of a batch
        self.engine: TextEncoder = kind(module, source.load_tokenizer(), token_budget=budget)
        self.tokenizer = HuggingFaceTokenizer(source.load_tokenizer(), max_tokens=self.engine.max_length)
        ability = "scores pairs of texts" if source.is_classifier else "computes embeddings"
        self.summary = f"model {args.name}, which {ability}"

    def serve(self, _: int) -> ServedModel:
        return ServedModel(
            name=self.args.name,
            path=self.args.model,
            service=_service_of(self.args, self.engine),
            tokenizer=self.tokenizer,
            max_length=self.engine.max_length,
            no_text=self.engine.use,
            pooling=self.args.pooling or pooling_of(self.args.model) or "mean",
            dimensions=dimensions_of(self.engine.module.config),
            encode_pair=getattr(self.engine, "encode_pair", None),
        )


def _service_of(args: argparse.Namespace, engine: Any, announce: Any = None) -> Service:
    limits = {"max_requests": args.max_requests, "request_seconds": args.request_seconds}
    return Service(engine, announce=announce, **limits)


def dtype_of(args: argparse.Namespace) -> torch.dtype | None:
    """Return the dtype of weights; None: that of the folder."""
    return None if args.dtype == "auto" else DtypeEnum.from_str(args.dtype).value[0]


def check_memory(args: argparse.Namespace, sources: Sequence[tuple[argparse.Namespace, Pretrained]]) -> None:
    """Check that weights and caches fit into free memory. A cache counts with its requested size, else with that of the
    longest sequence of its model. ValueError: even these minimum sizes do not fit."""
    asked = args.kv_cache_memory_bytes if args.cache_gb is None else int(args.cache_gb * 2**30)
    least = {one.name: source.least_bytes(dtype_of(one), one.max_length) for one, source in sources}
    whole = sum(weights + (0 if asked else cache) for weights, cache in least.values()) + (asked or 0)
    if whole > (free := get_accelerator().available_memory()):
        sizes = (f"{name} {each[0] / 2**30:.2f} and {each[1] / 2**30:.3f}" for name, each in least.items())
        raise ValueError(
            f"at least {whole / 2**30:.2f} GiB are needed, but only {free / 2**30:.2f} GiB of memory are "
            f"free (weights and cache of one sequence, GiB: {', '.join(sizes)}): serve fewer models or "
            "smaller ones, with fewer bits (--dtype int8), or shorter sequences (--max-length)"
        )


def cache_parts(args: argparse.Namespace, largest: Sequence[int]) -> list[int]:
    """Return the bytes of each model's cache: as its own options say, else its share of the rest. ValueError: nothing
    is left for a model."""
    own = [cache_bytes_of(one) for one in args.each]
    given = cache_bytes_of(args)
    total = default_cache_bytes() if given is None else given
    left = total - sum(each or 0 for each in own)
    sharing = [at for at, each in enumerate(own) if each is None and largest[at]]
    if sharing and left <= 0 < total:
        raise ValueError(
            f"{args.each[sharing[0]].name}: the caches of other models take the {total / 2**30:.2f} GiB "
            "available: raise --cache-gb, or give them less"
        )
    parts = divide(left, [largest[at] for at in sharing], [args.each[at].cache_share for at in sharing])
    of_sharing = dict(zip(sharing, parts, strict=True))
    return [of_sharing.get(at, each or 0) for at, each in enumerate(own)]


def clients_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of authentication and rate limits. OSError, ValueError: the file of keys cannot be read."""
    return {
        "token": args.token,
        "keys": {} if args.api_key_file is None else read_keys(args.api_key_file),
        "requests_per_minute": args.requests_per_minute,
        "allowed_origins": tuple(args.allowed_origins),
    }


def _adapters_of(args: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Yield the name, folder and base model of each adapter."""
    for one in args.each:
        for adapter in map(adapter_options, one.lora_modules):
            yield adapter["name"], adapter["path"], adapter["base_model_name"] or one.name


def template_of(given: str) -> str:
    """Return the chat template in a file, or ``given`` if it is a template itself. ValueError: no such file."""
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text()
    except OSError as error:
        raise ValueError(f"--chat-template {given}: {error.strerror}") from None


def formats_of(args: argparse.Namespace, template: str) -> Formats:
    """Return the formats of tool calls and reasoning: as in the options, else as detected from the template."""
    tools = args.tool_call_parser or guessed_tool_format(template)
    reasoning = args.reasoning_parser or guessed_reasoning_format(template)
    return Formats(None if tools == "none" else tools, None if reasoning == "none" else reasoning)


def memory_line(generator: Generator) -> str:
    """Describe the memory of weights and cache on this rank."""
    runner = generator.runner
    module = runner.module
    tensors = {id(each): each for each in (*module.parameters(), *module.buffers())}.values()
    weights = sum(each.nbytes for each in tensors)
    cache = runner.cache
    tokens = cache.num_blocks * cache.block_size
    return (
        f"weights {weights / 2**30:.2f} GiB and key-value cache {cache.nbytes / 2**30:.2f} GiB ({tokens:,} tokens) "
        f"on {runner.info.device}"
    )


def cache_bytes_of(args: argparse.Namespace) -> int | None:
    """Return the requested size of the cache; None: the default. ValueError: nothing is left for the cache."""
    if args.gpu_memory_utilization is None:
        return args.kv_cache_memory_bytes if args.cache_gb is None else int(args.cache_gb * 2**30)
    device = get_accelerator()
    whole, free = device.total_memory(), device.available_memory()
    left = int(args.gpu_memory_utilization * whole) - (whole - free)
    if left <= 0:
        used = (whole - free) / whole
        raise ValueError(
            f"--gpu-memory-utilization {args.gpu_memory_utilization}: {used:.2f} of the memory is already "
            "in use, which leaves none for the key-value cache"
        )
    return left


def proposer_of(args: argparse.Namespace, tokenizer: Any, model: Any) -> Proposer | None:
    """Return the proposer of ``--speculative-config``. ValueError: the draft model has another vocabulary."""
    if not args.speculative_config:
        return None
    from deepspeed.inference.generation.draft import DraftModel

    config = SpeculativeConfig.of(args.speculative_config)
    if config.model is None:
        return NgramProposer(
            config.num_speculative_tokens, config.prompt_lookup_max, config.prompt_lookup_min
        )
    source = Pretrained(config.model)
    if source.load_tokenizer().get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"--speculative-config: the tokenizers of {config.model} and {args.model} differ; a draft model "
            "needs the vocabulary of its target model"
        )
    draft = source.load_causal(dtype=model.dtype, keeps_integers=args.tp_size == 1)
    if source.no_text:
        raise ValueError(f"--speculative-config: {config.model}: {source.no_text}")
    engine = init_inference(draft, dtype=model.dtype, tensor_parallel={"tp_size": args.tp_size})
    return DraftModel(engine.module, config.num_speculative_tokens, token_budget=token_budget_of(args))


def token_budget_of(args: argparse.Namespace, on_cpus: int = 128) -> int:
    """Return the tokens per forward. On a CPU 128 already take the time of their products, and requests that decode
    wait for that long."""
    if args.token_budget is not None:
        return int(args.token_budget)
    return max(on_cpus if get_accelerator().device_name() == "cpu" else 512, 2 * int(args.max_sequences))
