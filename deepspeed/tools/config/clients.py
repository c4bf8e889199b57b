"""Translation of config files of Accelerate and of Transformers' Trainer into a DeepSpeed config.

Accelerate's file (``accelerate config``) is YAML or JSON with a ``deepspeed_config`` section: either the plugin's
fields or ``deepspeed_config_file``. The Trainer's is TrainingArguments as JSON or YAML with a ``deepspeed`` key: a path
or the config itself. "auto" values are filled in from the file; those that depend on the model or the data stay "auto".
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deepspeed.config.problems import Problem, shown
from deepspeed.config.reader import ConfigSource, UnreadableConfig, copy_containers, read_config, text_of

ACCELERATE, TRAINER = "Accelerate", "Trainer"
AUTO = "auto"

# Field of Accelerate's plugin -> key of the config that it builds if no config file is given.
PLUGIN_KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
# The plugin's fields for the launcher and for the model, without a counterpart in the config.
OTHER_FIELDS = (
    "deepspeed_config_file", "deepspeed_exclusion_filter", "deepspeed_hostfile",
    "deepspeed_inclusion_filter", "deepspeed_moe_layer_cls_names", "deepspeed_multinode_launcher",
    "zero3_init_flag",
)  # fmt: skip
# Key of the config -> the Trainer's argument; the Trainer refuses a config with a different value.
TRAINER_KEYS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.total_num_steps": "max_steps",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
}
# Defaults of TrainingArguments; others differ between TRL's trainers and are left out.
BATCH_DEFAULTS = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}


@dataclass
class ClientConfig:
    """A config as a client passes it to ``initialize``."""

    client: str
    source: ConfigSource
    ranks: int | None = None
    """Number of processes, if the file states it."""
    errors: list[Problem] = field(default_factory=list)
    """Settings that the client itself refuses."""
    warnings: list[str] = field(default_factory=list)
    filled: dict[str, Any] = field(default_factory=dict)
    """Keys that were "auto", with the values that the client gives them."""
    origins: dict[str, str] = field(default_factory=dict)
    """Key of the config -> field of the client's file that sets it."""

    def renamed(self, problem: Problem) -> Problem:
        """Return the problem under the name used in the client's file."""
        origin = self.origins.get(problem.key)
        return replace(problem, key=origin, place=None) if origin else problem


def client_of(data: Mapping[str, Any]) -> str | None:
    """Return the client to which the file belongs; None for a DeepSpeed config."""
    if "distributed_type" in data or isinstance(data.get("deepspeed_config"), Mapping):
        return ACCELERATE
    return TRAINER if "deepspeed" in data else None


def read_any(config: str | os.PathLike[str] | Mapping[str, Any]) -> ConfigSource:
    """Read a config as ``read_config`` does, or a YAML file, recognised by extension. Raises UnreadableConfig."""
    if isinstance(config, (str, os.PathLike)) and Path(config).suffix in (".yaml", ".yml"):
        return _read_yaml(Path(config))
    return read_config(config)


def read_client(source: ConfigSource, ranks: int) -> ClientConfig | None:
    """Return the config inside a client's file, for ``ranks`` ranks; None if the file is itself a DeepSpeed config."""
    client = client_of(source.data)
    if client is None:
        return None
    return _read_accelerate(source) if client == ACCELERATE else _read_trainer(source, ranks)


def _read_yaml(path: Path) -> ConfigSource:
    try:
        import yaml
    except ImportError:
        raise UnreadableConfig(f"{path} is YAML: pip install pyyaml, or write it as JSON") from None
    try:
        data = yaml.safe_load(text_of(os.fspath(path), "JSON, HJSON or YAML"))
    except yaml.YAMLError as error:
        raise UnreadableConfig(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise UnreadableConfig(f"{path} holds {type(data).__name__} at top level, expected keys and values")
    return ConfigSource(data, os.fspath(path))


def _read_referred(name: Any, source: ConfigSource, key: str, result: ClientConfig) -> bool:
    """Read the DeepSpeed config that a client's file names, relative to the working directory or else to the file.
    Return False, with an entry in ``result.errors``, if it cannot be read."""
    if isinstance(name, str) and not os.path.exists(name):
        beside = Path(source.name).parent / name
        name = os.fspath(beside) if beside.is_file() else name
    try:
        inner = read_config(name)
    except UnreadableConfig as error:
        result.errors.append(Problem(key, str(error), source.place((key,))))
        return False
    where = f"{inner.name} ({key} of {source.name})" if isinstance(name, str) else f"{source.name}, key {key}"
    result.source = ConfigSource(inner.data, where, inner.text, inner.not_json)
    return True


# ------------------------------------------------------------------------------------------- Accelerate


def _read_accelerate(source: ConfigSource) -> ClientConfig:
    data = source.data
    section = data.get("deepspeed_config") or {}
    processes = data.get("num_processes")
    result = ClientConfig(ACCELERATE, ConfigSource({}, source.name))
    result.ranks = processes if isinstance(processes, int) and processes > 0 else None
    kind = data.get("distributed_type", "DEEPSPEED")
    if kind != "DEEPSPEED":
        text = f"{shown(kind)}: Accelerate uses DeepSpeed only with DEEPSPEED"
        result.errors.append(Problem("distributed_type", text))
    for name in section:
        if name not in PLUGIN_KEYS and name not in OTHER_FIELDS:
            result.warnings.append(f"deepspeed_config.{name} is not a known field of Accelerate's file")
    if section.get("deepspeed_config_file") not in (None, "none"):
        _with_file(section, data, source, result)
    else:
        _with_fields(section, result)
        _set_precision(data.get("mixed_precision", "no"), result)
    return result


def _with_file(
    section: Mapping[str, Any], data: Mapping[str, Any], source: ConfigSource, result: ClientConfig
) -> None:
    key = "deepspeed_config_file"
    if not _read_referred(section[key], source, key, result):
        return
    given = [f"deepspeed_config.{name}" for name in PLUGIN_KEYS if name in section]
    if data.get("mixed_precision") is not None:
        given.append("mixed_precision")
    for name in given:
        result.errors.append(
            Problem(
                name,
                f"Accelerate rejects it together with {key}: move its value into {section[key]} and remove it here",
            )
        )
    if "zero_optimization" not in result.source.data:
        result.errors.append(Problem("zero_optimization", "Accelerate requires this section; add it"))
    result.source.data.setdefault("gradient_accumulation_steps", 1)


def _with_fields(section: Mapping[str, Any], result: ClientConfig) -> None:
    config = result.source.data
    config |= {"train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO}
    fields = {"gradient_accumulation_steps": AUTO, "gradient_clipping": AUTO, "zero_stage": 2}
    for name, value in (fields | dict(section)).items():
        key = PLUGIN_KEYS.get(name)
        if key is None or value == "none" and name.endswith("nvme_path"):
            continue
        node = config
        *parents, last = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
        if name in section:
            result.origins[key] = f"deepspeed_config.{name}"
    config["steps_per_print"] = float("inf")


def _set_precision(precision: Any, result: ClientConfig) -> None:
    if precision in ("bf16", "fp8"):
        result.source.data["bf16"] = {"enabled": True}
    elif precision == "fp16":
        result.source.data["fp16"] = {"enabled": True, "auto_cast": True}
    result.origins |= {"fp16.auto_cast": "mixed_precision", "bf16.enabled": "mixed_precision"}


# ---------------------------------------------------------------------------------------------- Trainer


def _read_trainer(source: ConfigSource, ranks: int) -> ClientConfig:
    arguments = source.data
    result = ClientConfig(TRAINER, ConfigSource({}, source.name))
    if not _read_referred(arguments["deepspeed"], source, "deepspeed", result):
        return result
    result.source.data = copy_containers(result.source.data)
    for key, name, value in _trainer_values(arguments, ranks):
        _fill_or_compare(key, name, value, result)
    return result


def _trainer_values(arguments: Mapping[str, Any], ranks: int) -> Iterator[tuple[str, str, Any]]:
    """Yield (key of the config, the Trainer's name for the value, the value)."""
    known = BATCH_DEFAULTS | dict(arguments)
    for key, name in TRAINER_KEYS.items():
        waits = key.startswith("scheduler.") and name.endswith("_steps") and not _is_count(known.get(name))
        if name in known and not waits:  # a fraction of the steps, or as many as the data allows
            yield key, name, known[name]
    if "adam_beta1" in known and "adam_beta2" in known:
        yield "optimizer.params.betas", "adam_beta1, adam_beta2", [known["adam_beta1"], known["adam_beta2"]]
    micro, gas = (known[name] for name in BATCH_DEFAULTS)
    if _is_count(micro) and _is_count(gas):
        yield "train_batch_size", ", ".join(BATCH_DEFAULTS), ranks * micro * gas


def _fill_or_compare(key: str, name: str, value: Any, result: ClientConfig) -> None:
    *parents, last = key.split(".")
    node: Any = result.source.data
    for parent in parents:
        node = node.get(parent)
        if not isinstance(node, dict):
            return
    written = node.get(last)
    if written == AUTO:
        node[last] = value
        result.filled[key] = value
    elif written is not None and written != value:
        place = result.source.place(tuple(key.split(".")))
        text = f'{shown(written)}, but {name} is {shown(value)}: the Trainer rejects that; write "auto"'
        result.errors.append(Problem(key, text, place))


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 1
