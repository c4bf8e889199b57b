"""`ds plan`: plan the memory of a config on device, host and disk, before anything is allocated."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.exceptions import ExplainedError
from deepspeed.base.extras import install_hint
from deepspeed.base.tool_arguments import exit_quietly
from deepspeed.base.transformers_models import why_not_loaded
from deepspeed.config.axes import axes_of
from deepspeed.config.plan import make_plan
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.reader import UnreadableConfig
from deepspeed.parallel.expert.placement import stacked_experts
from deepspeed.parallel.expert.transform import spread_meta
from deepspeed.planning import report
from deepspeed.planning.activations import shape_of
from deepspeed.planning.advice import advise
from deepspeed.planning.link_time import LinkTimes, link_times
from deepspeed.planning.machine import Capacity, free_now
from deepspeed.planning.model_split import ModelSplit
from deepspeed.planning.request import PlanAnswer, PlanRequest, answer, config_of
from deepspeed.planning.step_time import options as time_options
from deepspeed.planning.step_time.shapes import NoSuchFunction, build_shape, call_of, is_shape
from deepspeed.planning.variants import put
from deepspeed.tools import parsers
from deepspeed.tools.config.clients import read_any, read_client
from deepspeed.zero.replica_groups import expert_parallel_size, replica_group_name

if TYPE_CHECKING:
    from deepspeed.tools.plan_time import PlanTimes
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@exit_quietly("ds plan")
def main(argv: Sequence[str] | None = None) -> int:
    args = parsers.plan().parse_args(argv)
    time_options.check(args)
    if args.calibrate is not None:
        from deepspeed.tools.plan_time import run_calibration

        print(*run_calibration(args, read_config(args.config, args.gpus * args.nodes)), sep="\n")
        return 0
    request = make_request(args)
    found = answer(request)
    # With --choices the table already lists what fits, over a larger set than the advice.
    advice = advise(found) if found.lacking() and not args.choices else None
    parts = dict(_times(args, found))
    if args.json:
        more = {name: part.as_json() for name, part in parts.items()}
        print(json.dumps({**report.as_json(found, advice), **more}, indent=2))
    else:
        print(report.full_report(found, advice))
        for part in parts.values():
            print("", *part.lines(), sep="\n")
    return 1 if found.lacking() else 0


def _times(args: argparse.Namespace, found: PlanAnswer) -> Iterator[tuple[str, LinkTimes | PlanTimes]]:
    """Yield the predicted times, with their keys in the JSON output."""
    if args.link_mbits is not None:
        if args.nodes < 2:
            raise SystemExit("ds plan: --link-mbits is the rate between nodes; give --nodes 2 or more")
        yield "link", link_times(found, args.compute_seconds, args.link_mbits * 1e6 / 8)
    if time_options.is_asked(args):
        from deepspeed.tools.plan_time import times_of

        modules = partial(_spread_models, args, found.request)
        yield "step", times_of(args, found, modules)


def _spread_models(args: argparse.Namespace, request: PlanRequest) -> dict[int, nn.Module]:
    """Return copies of the model with its experts spread over 1, 2, 4, ... ranks; a single entry if it has no experts
    to spread."""
    if next(iter(stacked_experts(request.module)), None) is None:
        return {1: request.module}
    found: dict[int, nn.Module] = {}
    size = 1
    while size <= request.ranks:
        module = build_model(args.model, _DTYPES[args.dtype])
        try:
            spread_meta(module, size)
        except DeepSpeedConfigError:
            break
        found[size] = module
        size *= 2
    return found or {1: request.module}


class ModelError(ExplainedError, ValueError):
    """The model that --model names cannot be built."""


def make_request(args: argparse.Namespace, config: dict[str, Any] | None = None) -> PlanRequest:
    """Return the planner's request for these arguments of `ds plan`; ``config`` replaces the config file."""
    config = read_config(args.config, args.gpus * args.nodes) if config is None else dict(config)
    for text in args.set:
        _set_key(config, text)
    module = build_model(args.model, _DTYPES[args.dtype])
    device_type = args.device or _device_type(args)
    axes = axes_of(config, args.gpus * args.nodes, "as requested")
    if axes.problems:
        raise DeepSpeedConfigError.of(axes.problems)
    _spread_experts(module, config.get("expert_parallel"))
    _check_experts(args.model, module, args.gpus * args.nodes)
    tensor = axes.layout.tp if axes.layout is not None else 1
    if tensor > 1:  # tensor-parallel ranks do not share states
        config.pop("tensor_parallel")
    request = PlanRequest(
        module=module,
        config=config,
        ranks=args.gpus * args.nodes // tensor,
        split=ModelSplit(tensor=tensor),
        ranks_per_sequence=axes.layout.sp if axes.layout is not None else 1,
        nodes=args.nodes,
        device_type=device_type,
        zero_init=args.zero_init,
        shape=shape_of(getattr(module, "config", None)),
        micro_batch=args.micro_batch,
        sequence=args.sequence,
        checkpointing=args.checkpointing,
    )
    here = free_now(make_plan(config_of(request)), device_type)
    elsewhere = time_options.device_memory(args)
    capacity = Capacity(
        None if device_type == "cpu" else args.device_memory or elsewhere or here.device,
        args.host_memory or (None if elsewhere else here.host),
        args.disk,
    )
    return replace(request, capacity=capacity, follow_disk=args.disk is None)


def _spread_experts(module: nn.Module, section: Any) -> None:
    """Keep only a rank's share of the experts. Errors in the section are reported where the config is read."""
    if isinstance(section, dict) and section.get("enabled") is True:
        size = section.get("autoep_size", 1)
        if isinstance(size, int) and size >= 1:
            spread_meta(module, size)


def _check_experts(name: str, module: nn.Module, ranks: int) -> None:
    """Raise ModelError if the model's experts do not fit the number of ranks."""
    for replica_group in {replica_group_name(param) for param in module.parameters()}:
        try:
            expert_parallel_size(replica_group, ranks)
        except ValueError as error:
            raise ModelError(f"--model {name}: {error}; set their number with --gpus") from None


def read_config(given: str, ranks: int) -> dict[str, Any]:
    """Return the config in a DeepSpeed config file, or in a file of Accelerate or TrainingArguments.
    DeepSpeedConfigError: it cannot be read, or its client refuses it."""
    try:
        source = read_any(given)
    except UnreadableConfig as error:
        raise DeepSpeedConfigError(str(error)) from None
    client = read_client(source, ranks)
    if client is None:
        return dict(source.data)
    if client.errors:
        raise DeepSpeedConfigError.of(client.errors, source.name)
    return dict(client.source.data)


def _device_type(args: argparse.Namespace) -> str:
    here = get_accelerator().device_name().partition(":")[0]
    return "cuda" if here == "cpu" and (args.device_memory or args.on is not None) else here


# The model ---------------------------------------------------------------------------------------------------


def build_model(name: str, dtype: torch.dtype) -> nn.Module:
    """Build the model on the meta device. Raises ModelError that says what is wrong with ``name``."""
    if is_shape(name):
        try:
            with torch.device("meta"):
                return build_shape(name).to(dtype)
        except ValueError as error:
            raise ModelError(f"--model {error}") from None
    if re.fullmatch(r"[\w.]+:[\w.]+", name) and not os.path.exists(name):
        return _call(name)
    return _from_hugging_face(name, dtype)


def _call(name: str) -> nn.Module:
    try:
        found = call_of(name)
    except NoSuchFunction as error:
        raise ModelError(f"--model {error}") from error
    _check_callable(name, found)
    with torch.device("meta"):
        made = found()
    if not isinstance(made, nn.Module):
        raise ModelError(f"--model {name} returned {type(made).__name__}, expected a torch.nn.Module")
    return made


def _check_callable(name: str, found: Any) -> None:
    """Raise ModelError unless ``found`` can be called without arguments."""
    remedy = "give a function that takes no arguments and returns the model, as module:function"
    if isinstance(found, nn.Module) or not callable(found):
        raise ModelError(f"--model {name} is an object of {type(found).__name__}; {remedy}")
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in optional]
    if needed:
        kind = "class" if inspect.isclass(found) else "function"
        called = getattr(found, "__qualname__", type(found).__name__)
        raise ModelError(
            f"--model {name}: the {kind} {called} needs arguments ({', '.join(needed)}); {remedy}"
        )


def _from_hugging_face(name: str, dtype: torch.dtype) -> nn.Module:
    try:
        import transformers
    except ImportError:
        raise ModelError(
            f"--model {name} needs transformers, which is not installed: "
            f"{install_hint('transformers', extra='transformers')}, or give module:function"
        ) from None
    path = Path(name)
    try:
        config = transformers.AutoConfig.from_pretrained(path.parent if path.name == "config.json" else name)
    except (OSError, ValueError) as error:
        why = why_not_loaded(name, error) if isinstance(error, OSError) else error
        raise ModelError(f"--model {name}: {why}") from error
    with torch.device("meta"):
        return _from_config(transformers, config, dtype)


def _from_config(transformers: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """Build the model of ``config``: of its own class, else as a causal LM, else the bare model."""
    own = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    if own is not None and hasattr(own, "_from_config"):
        return own._from_config(config, dtype=dtype)
    try:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError:
        return transformers.AutoModel.from_config(config, dtype=dtype)


# Arguments ---------------------------------------------------------------------------------------------------


def _set_key(config: dict[str, Any], text: str) -> None:
    key, found, value = text.partition("=")
    if not found:
        raise DeepSpeedConfigError(f"--set {text}: expected KEY=VALUE")
    try:
        put(config, key, json.loads(value))
    except json.JSONDecodeError:
        put(config, key, value)


if __name__ == "__main__":
    raise SystemExit(main())
