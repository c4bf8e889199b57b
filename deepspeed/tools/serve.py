"""``ds serve MODEL``: serve a causal Transformers model over HTTP."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.extras import install_hint
from deepspeed.base.logging import report
from deepspeed.base.tool_arguments import ends_quietly
from deepspeed.base.transformers_models import why_not_loaded
from deepspeed.inference.config import DtypeEnum
from deepspeed.inference.entry import init_inference
from deepspeed.inference.generation.generator import Generator
from deepspeed.inference.generation.grammars import Grammars
from deepspeed.inference.model.facts import ModelFacts
from deepspeed.inference.model.low_rank import adaptable_layers, load_adapter
from deepspeed.inference.pretrained import check_quantization, load_causal, load_tokenizer
from deepspeed.inference.scheduling.speculation import NgramProposer, Proposer, SpeculativeConfig
from deepspeed.inference.serving.clients import Certificate, RequestLog, read_keys
from deepspeed.inference.serving.commands import Among, SingleRankCommands
from deepspeed.inference.serving.formats import guessed_reasoning_format, guessed_tool_format
from deepspeed.inference.serving.models import Models
from deepspeed.inference.serving.observing import access_log, trace
from deepspeed.inference.serving.pooling import classifier_in, dimensions_of, pooling_of
from deepspeed.inference.serving.service import Service
from deepspeed.inference.serving.tokenizers import HuggingFaceTokenizer
from deepspeed.inference.serving.tool_requests import Formats
from deepspeed.observe.live.access import check_token, is_local
from deepspeed.tools import serve_options


@ends_quietly("ds serve")
def main(argv: Sequence[str] | None = None) -> int:
    """Serves until it is told to stop. Returns 2 for arguments that do not fit together."""
    args = serve_options.parser().parse_args(argv)
    problem = problem_of(args)
    if problem is not None:
        print(f"ds serve: {problem}", file=sys.stderr)
        return 2
    if int(os.environ.get("RANK", 0)):  # it hears no clients
        return _load_and_serve(args)
    from deepspeed.inference.serving.listening import LoadingAnswers

    try:
        certificate = _certificate_of(args)
        loading = LoadingAnswers(args.host, args.port, certificate and certificate.context())
    except OSError as error:
        print(f"ds serve: --host {args.host} --port {args.port}: {error.strerror}", file=sys.stderr)
        return 2
    with contextlib.closing(loading):
        return _load_and_serve(args, loading)


@dataclass(frozen=True, slots=True)
class LoadedServer:
    """``service``: not started. ``app``: what answers its clients; None on ranks that hear none. ``told``: of the
    model, for a log."""

    service: Service
    app: Any = None
    told: str = ""


def load(args: argparse.Namespace) -> LoadedServer:
    """Load the model that the options name. OSError, ValueError: it cannot be."""
    from deepspeed.inference.serving.app import ServerSettings, make_app

    if classifier_in(args.model):
        return _load_cross_encoder(args)
    service, tokenizer, generator, leads = build(args)
    if not leads:
        return LoadedServer(service)
    formats = formats_of(args, tokenizer.template)
    if args.enable_auto_tool_choice and formats.tools is None:
        raise ValueError("--enable-auto-tool-choice needs --tool-call-parser for this model")
    settings = ServerSettings(
        model=args.name or args.model,
        max_length=generator.scheduler.max_length,
        stop_token_ids=generator.runner.facts.stop_token_ids,
        **clients_of(args),
        default_tokens=args.default_tokens,
        formats=formats,
        trust_templates=args.trust_request_chat_template,
        pooling=args.pooling or pooling_of(args.model) or "last",
        dimensions=dimensions_of(generator.runner.facts.config),
    )
    app = make_app(service, tokenizer, settings, models_of(args, settings, generator))
    told = f"calls of tools: {formats.tools or 'none'}, reasoning: {formats.reasoning or 'none'}"
    return LoadedServer(service, app, f"model {settings.model}, {memory_line(generator)}; {told}")


def _load_cross_encoder(args: argparse.Namespace) -> LoadedServer:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    from deepspeed.inference.serving.app import ServerSettings, make_app
    from deepspeed.inference.serving.cross_encoder import CrossEncoder

    model: Any = AutoModelForSequenceClassification.from_pretrained(args.model)
    if model.config.model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        raise ValueError(f"{type(model).__name__} is no encoder, whose pairs of texts are scored")
    module = init_inference(model, dtype=model.dtype if args.dtype == "auto" else args.dtype).module
    known = AutoTokenizer.from_pretrained(args.model)
    engine = CrossEncoder(module, known, token_budget=args.token_budget)
    tokenizer = HuggingFaceTokenizer(AutoTokenizer.from_pretrained(args.model), max_tokens=engine.max_length)
    settings = ServerSettings(
        model=args.name or args.model,
        max_length=engine.max_length,
        **clients_of(args),
        encode_pair=engine.encode_pair,
    )
    service = Service(engine, max_requests=args.max_requests, request_seconds=args.request_seconds)
    app = make_app(service, tokenizer, settings)
    return LoadedServer(service, app, f"model {settings.model}, which scores pairs of texts")


def _load_and_serve(args: argparse.Namespace, loading: Any = None) -> int:
    """``loading``: answers clients while the model is loaded."""
    try:
        loaded = load(args)
    # Transformers' for a model that is not there, ours for what does not fit.
    except (OSError, ValueError) as error:
        why = why_not_loaded(args.model, error) if isinstance(error, OSError) else error
        print(f"ds serve: {args.model}: {why}", file=sys.stderr)
        return 2
    if loaded.app is None:
        # The first rank finishes answers, and says when it ends.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        loaded.service.follow()
        return 0
    return _listen(args, loaded, loading)


def _listen(args: argparse.Namespace, loaded: LoadedServer, loading: Any) -> int:
    """On the rank that hears clients."""
    from deepspeed.inference.serving.app import endpoints
    from deepspeed.inference.serving.listening import make_listener

    app, service = loaded.app, loaded.service.start()
    signal.signal(signal.SIGTERM, _end)  # uvicorn sends it again when all connections are closed

    def ready(address: str) -> None:
        report(f"ds serve: ready at {address}: {loaded.told}; endpoints {', '.join(endpoints(app))}")

    try:
        if args.otlp_traces_endpoint is not None:
            trace(app, args.otlp_traces_endpoint, args.name or args.model)
        log = None if args.access_log is None else access_log(args.access_log)
    except (OSError, ValueError) as problem:
        print(f"ds serve: {problem}", file=sys.stderr)
        service.close(drain=False)
        return 2
    listener = make_listener(
        RequestLog(app, log),
        service,
        host=args.host,
        port=args.port,
        drain_seconds=args.drain_seconds,
        ready=ready,
        certificate=_certificate_of(args),
    )
    # What is loaded now stays until the end: the collector need not visit it, and would for a second after SIGTERM.
    gc.freeze()
    try:
        listener.run(loading and loading.hand_over())
    finally:
        service.close(timeout=args.drain_seconds)
    return 0 if service.failure is None else 1


def clients_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of who may ask, and how often. OSError, ValueError: the file of keys cannot be read."""
    return {
        "token": args.token,
        "keys": {} if args.api_key_file is None else read_keys(args.api_key_file),
        "requests_per_minute": args.requests_per_minute,
        "allowed_origins": tuple(args.allowed_origins),
    }


def _certificate_of(args: argparse.Namespace) -> Certificate | None:
    return None if args.ssl_certfile is None else Certificate(args.ssl_certfile, args.ssl_keyfile)


def models_of(args: argparse.Namespace, settings: Any, generator: Generator) -> Models:
    """The model and the adapters that are given. ValueError: one cannot be loaded."""
    module = generator.runner.module
    load = None
    if args.tp_size == 1:
        # The layers are found now, as later the model is in use.
        load = partial(load_adapter, module, adaptable=adaptable_layers(module))
    models = Models(settings.model, settings.max_length, load)
    for each in args.lora_modules:
        name, separator, folder = each.partition("=")
        if not separator:
            raise ValueError(f"--lora-modules: {each!r}: name=folder is expected")
        try:
            models.add(name, folder)
        except ValueError as problem:
            raise ValueError(f"--lora-modules: {problem}") from problem
    return models


def _end(*_: Any) -> None:
    raise SystemExit(0)


def problem_of(args: argparse.Namespace) -> str | None:
    """Why a server is not to be started like this."""
    if not is_local(args.host) and not (args.token or args.api_key_file):
        return (
            f"--host {args.host} can be reached from other hosts: set --token or ${serve_options.TOKEN_VARIABLE}, "
            "or --api-key-file, so that only those who know a key are served"
        )
    try:
        clients_of(args)
    except (OSError, ValueError) as problem:
        return f"--api-key-file: {problem}"
    if args.ssl_keyfile is not None and args.ssl_certfile is None:
        return "--ssl-keyfile is the key of a certificate: set --ssl-certfile too"
    if (certificate := _certificate_of(args)) is not None:
        try:
            certificate.context()
        except OSError as problem:
            return f"--ssl-certfile {args.ssl_certfile}, --ssl-keyfile {args.ssl_keyfile}: {problem.strerror}"
    if args.token is not None:
        try:
            check_token(args.token, f"--token or ${serve_options.TOKEN_VARIABLE}")
        except ValueError as problem:
            return str(problem)
    if args.lora_modules and args.tp_size > 1:
        return "--lora-modules needs a model on one rank: --tp-size 1"
    try:
        config = args.speculative_config and SpeculativeConfig.of(args.speculative_config)
        if config and config.model is not None and (kind := classifier_in(config.model)):
            raise ValueError(f"{config.model}: {kind} classifies texts and generates none")
    except (OSError, ValueError) as problem:
        return f"--speculative-config: {problem}"
    try:
        args.pooling or pooling_of(args.model)
        if kind := classifier_in(args.model):
            if args.tp_size > 1:
                return f"{args.model}: {kind} is served on one rank: --tp-size 1"
            for option in ("lora_modules", "speculative_config"):
                if getattr(args, option):
                    return f"--{option.replace('_', '-')} is for models that generate, not for {args.model}: {kind}"
    except (OSError, ValueError) as problem:
        return str(problem)
    for package, extra in (("fastapi", "serve"), ("uvicorn", "serve"), ("transformers", "transformers")):
        try:
            __import__(package)
        except ImportError:
            return f"the package {package!r} is missing: {install_hint(package, extra=extra)}"
    return None


def template_of(given: str) -> str:
    """Return the template in a file; or ``given``, if it is one itself. ValueError: there is no such file."""
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text()
    except OSError as error:
        raise ValueError(f"--chat-template {given}: {error.strerror}") from None


def formats_of(args: argparse.Namespace, template: str) -> Formats:
    """Return how the model writes calls and reasoning: as the options say, else as its template does."""
    tools = args.tool_call_parser or guessed_tool_format(template)
    reasoning = args.reasoning_parser or guessed_reasoning_format(template)
    return Formats(None if tools == "none" else tools, None if reasoning == "none" else reasoning)


def memory_line(generator: Generator) -> str:
    """Return what weights and cache take on this rank."""
    runner = generator.runner
    module = runner.module
    tensors = {id(each): each for each in (*module.parameters(), *module.buffers())}.values()
    weights = sum(each.nbytes for each in tensors)
    cache = runner.cache
    tokens = cache.num_blocks * cache.block_size
    return (
        f"weights {weights / 2**30:.2f} GiB and key-value cache {cache.nbytes / 2**30:.2f} GiB ({tokens:,} tokens) "
        f"on {runner.facts.device}"
    )


def cache_bytes_of(args: argparse.Namespace) -> int | None:
    """Return the size that is asked for. ValueError: nothing is left for the cache."""
    if args.gpu_memory_utilization is None:
        return args.kv_cache_memory_bytes if args.cache_gb is None else int(args.cache_gb * 2**30)
    device = get_accelerator()
    whole, free = device.total_memory(), device.available_memory()
    left = int(args.gpu_memory_utilization * whole) - (whole - free)
    if left <= 0:
        used = (whole - free) / whole
        raise ValueError(
            f"--gpu-memory-utilization {args.gpu_memory_utilization}: {used:.2f} of the memory is in use already, "
            "which leaves none for the key-value cache"
        )
    return left


def proposer_of(args: argparse.Namespace, tokenizer: Any, model: Any) -> Proposer | None:
    """Return what ``--speculative-config`` asks for. ValueError: the draft model has other tokens than ``model``."""
    if not args.speculative_config:
        return None
    from deepspeed.inference.generation.draft import DraftModel

    config = SpeculativeConfig.of(args.speculative_config)
    if config.model is None:
        return NgramProposer(
            config.num_speculative_tokens, config.prompt_lookup_max, config.prompt_lookup_min
        )
    if load_tokenizer(config.model).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"--speculative-config: the tokenizers of {config.model} and {args.model} differ; a draft model has the "
            "vocabulary of the model that it drafts for"
        )
    draft = load_causal(config.model, dtype=model.dtype, keeps_integers=args.tp_size == 1)
    engine = init_inference(draft, dtype=model.dtype, tensor_parallel={"tp_size": args.tp_size})
    return DraftModel(engine.module, config.num_speculative_tokens, token_budget=args.token_budget)


def build(args: argparse.Namespace) -> tuple[Service, HuggingFaceTokenizer, Generator, bool]:
    """The service, not started; and whether this rank is the one that hears clients."""
    if args.quantization:
        check_quantization(args.model, args.quantization)
    given = None if args.dtype == "auto" else DtypeEnum.from_str(args.dtype).value[0]
    keeps_integers = args.tp_size == 1 and given is not torch.int8
    model: Any = load_causal(
        args.model, dtype=None if given is torch.int8 else given, keeps_integers=keeps_integers
    )
    engine = init_inference(model, dtype=given or model.dtype, tensor_parallel={"tp_size": args.tp_size})
    group, known = engine.mp_group, load_tokenizer(args.model)
    if args.chat_template is not None:
        known.chat_template = template_of(args.chat_template)
    facts = ModelFacts.of(engine.module)
    generator = Generator(
        engine.module,
        token_budget=args.token_budget,
        short_share=args.short_share,
        policy=args.scheduling_policy,
        speculation=proposer_of(args, known, engine.module),
        max_sequences=args.max_sequences,
        max_length=args.max_length,
        cache_bytes=cache_bytes_of(args),
        block_size=args.block_size,
        prefix_sharing=args.enable_prefix_caching,
        seed=args.seed if args.seed is not None else int(torch.randint(2**31, ())) if group is None else 0,
        group=group,
        matcher_of=Grammars(known, facts.stop_token_ids),
    )
    announcer = SingleRankCommands() if group is None else Among(group, generator.runner.facts.device)
    service = Service(
        generator,
        max_requests=args.max_requests,
        request_seconds=args.request_seconds,
        announcer=announcer,
    )
    tokenizer = HuggingFaceTokenizer(known, max_tokens=generator.scheduler.max_length)
    return service, tokenizer, generator, group is None or group.rank == 0


if __name__ == "__main__":
    raise SystemExit(main())
