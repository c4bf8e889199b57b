"""``deepspeed.init_inference``: from arguments to an engine."""

from __future__ import annotations

import os
from typing import Any

from pydantic import ValidationError
from torch import nn

from deepspeed.config.problems import FROM_INFERENCE, DeepSpeedConfigError, Problem
from deepspeed.config.reader import read_config
from deepspeed.config.refusals import refusals
from deepspeed.inference.config import DeepSpeedInferenceConfig
from deepspeed.inference.engine import InferenceEngine


def default_inference_config() -> dict[str, Any]:
    """Return every key with its default."""
    return DeepSpeedInferenceConfig().model_dump()


def init_inference(
    model: nn.Module,
    config: str | os.PathLike[str] | dict[str, Any] | DeepSpeedInferenceConfig | None = None,
    **kwargs: Any,
) -> InferenceEngine:
    """Return an engine that runs ``model`` for inference: cast, on the device, split over ranks as configured.

    Args:
        model: any module; it is changed in place and becomes ``engine.module``. Or a pipeline, such as diffusers', with
            modules as attributes: each is changed in place, and the pipeline itself is returned.
        config: a dict, the path of a JSON file, or a ``DeepSpeedInferenceConfig``.
        kwargs: single keys of the config, which must not contradict it. None means the default.

    Raises:
        DeepSpeedConfigError: a key is unknown, given twice, or asks for a feature that this release lacks.
        UnreadableConfig: the path is not a file, or its text is not JSON.
    """
    settings = inference_config(config, kwargs)
    modules = {} if isinstance(model, nn.Module) else _modules_of(model)
    return _prepared_pipeline(model, modules, settings) if modules else InferenceEngine(model, settings)


def _modules_of(pipeline: Any) -> dict[str, nn.Module]:
    return {
        name: each for name, each in getattr(pipeline, "__dict__", {}).items() if isinstance(each, nn.Module)
    }


def _prepared_pipeline(pipeline: Any, modules: dict[str, nn.Module], config: DeepSpeedInferenceConfig) -> Any:
    """Prepare each module in place, because pipelines check module classes and call methods other than ``forward``.

    DeepSpeedConfigError: the config names weight files, which belong to a single model.
    """
    for key in ("checkpoint", "save_mp_checkpoint_path"):
        if getattr(config, key) is not None:
            raise DeepSpeedConfigError(
                f"{key} is for a single model, but {type(pipeline).__name__} has {', '.join(modules)}: "
                "leave it out, or pass one of them to init_inference"
            )
    pipeline.__dict__["_ds_inference_engines"] = [InferenceEngine(each, config) for each in modules.values()]
    return pipeline


def inference_config(
    config: str | os.PathLike[str] | dict[str, Any] | DeepSpeedInferenceConfig | None, more: dict[str, Any]
) -> DeepSpeedInferenceConfig:
    """Merge single keys into the config. DeepSpeedConfigError: see ``init_inference``."""
    if isinstance(config, DeepSpeedInferenceConfig):
        if more:
            raise DeepSpeedConfigError(
                f"{', '.join(sorted(more))} given together with a DeepSpeedInferenceConfig: set it there"
            )
        return config
    more = {key: value for key, value in more.items() if value is not None}
    given: dict[str, Any] = (
        read_config(config).data if isinstance(config, (str, os.PathLike)) else config or {}
    )
    twice = [key for key in more if key in given and given[key] != more[key]]
    if twice:
        key = twice[0]
        raise DeepSpeedConfigError(
            f"{key} is {given[key]!r} in the config and {more[key]!r} as an argument: keep one of them"
        )
    values = {**more, **given}
    try:
        return DeepSpeedInferenceConfig(**values)
    except ValidationError as error:
        refused = refusals(DeepSpeedInferenceConfig, error, values, values)
        problems = [Problem(".".join(map(str, path)), text, path=path) for path, text, _ in refused]
        raise DeepSpeedConfigError.of(problems, FROM_INFERENCE) from error
    except ValueError as error:
        raise DeepSpeedConfigError(f"init_inference: {error}") from error
