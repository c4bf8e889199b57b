"""User rules for splitting layers, as in the section ``tensor_parallel.partition_config``.

Rules are optional: the plan is derived from the model. A rule overrides it for the parameters that it matches.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

SubParams = tuple[int | tuple[int, ...], ...]


class PartitionType(Enum):
    """COLUMN: split by outputs; ROW: split by inputs, labelled by a sum; SKIP: replicated."""

    COLUMN = "column"
    ROW = "row"
    SKIP = "skip"


@dataclass
class TPLayerSpec:
    """One rule for parameters.

    ``patterns``: regular expressions that a parameter's full name must match from its start. ``shape``: the parameter
    as matrices side by side, each of which is split: at ``partition_dim`` their number, such as ``(3, -1)``, or their
    extents, such as ``((64, 16, 16), -1)``. ``model_types``: apply only to models with one of these as
    ``config.model_type``. ``gather_output``: gather the outputs on every rank. ``grad_allreduce``: the parameter is
    replicated and its gradient summed.
    """

    patterns: list[str]
    partition_type: PartitionType = PartitionType.COLUMN
    shape: SubParams | None = None
    partition_dim: int | None = None
    model_types: list[str] | None = None
    gather_output: bool = False
    grad_allreduce: bool = False

    def get_partition_dim(self) -> int:
        """Return the dim of the weight [outputs, inputs] to split."""
        if self.partition_dim is not None:
            return self.partition_dim
        return 1 if self.partition_type is PartitionType.ROW else 0

    def get_sub_param_sizes(self) -> tuple[int, ...] | None:
        """Return the extents of the matrices, if ``shape`` has them."""
        found = self._at_dim()
        return found if isinstance(found, tuple) else None

    def get_num_sub_params(self) -> int | None:
        """Return the number of matrices side by side, if ``shape`` has it."""
        found = self._at_dim()
        if isinstance(found, tuple):
            return len(found)
        return found if found is not None and found > 0 else None

    def matches(self, param_name: str, model_type: str | None = None) -> bool:
        """Return whether the rule applies to this parameter. A rule for some model types does not apply when the type
        is unknown.
        """
        if self.model_types and str(model_type).lower() not in map(str.lower, self.model_types):
            return False
        return any(re.match(pattern, param_name) for pattern in self.patterns)

    def _at_dim(self) -> int | tuple[int, ...] | None:
        return None if self.shape is None else self.shape[self.get_partition_dim()]


@dataclass
class AutoTPConfig:
    """The rules of a model; the first one that matches a parameter applies.

    ``use_default_specs``: fall back to the preset's rules. ``strict_mode``: a parameter without a rule is an error.
    ``lm_head_patterns``: names of output heads.
    """

    tp_size: int = 1
    layer_specs: list[TPLayerSpec] = field(default_factory=list)
    embedding_partition_dim: int = 1
    lm_head_patterns: list[str] = field(default_factory=lambda: ["lm_head", "embed_out"])
    use_default_specs: bool = True
    strict_mode: bool = False

    def find_matching_spec(self, param_name: str, model_type: str | None = None) -> TPLayerSpec | None:
        """Return the first rule for this parameter. ValueError: there is none, and ``strict_mode`` is set."""
        for spec in self.layer_specs:
            if spec.matches(param_name, model_type):
                return spec
        if self.strict_mode:
            raise ValueError(
                f"no rule of layer_specs matches {param_name} (model_type={model_type!r}); add one, with "
                "partition_type 'skip' to keep it whole, or set strict_mode to false"
            )
        return None

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> AutoTPConfig:
        """Parse the section ``partition_config``. ValueError: an unknown key or invalid value."""
        given = dict(config_dict)
        given["layer_specs"] = [
            spec if isinstance(spec, TPLayerSpec) else _spec(spec) for spec in given.get("layer_specs") or ()
        ]
        _check_keys(cls, given, "partition_config")
        return cls(**given)


def _spec(given: Mapping[str, Any]) -> TPLayerSpec:
    values = dict(given)
    _check_keys(TPLayerSpec, values, "partition_config.layer_specs")
    if not values.get("patterns"):
        raise ValueError("partition_config.layer_specs: a rule needs patterns")
    kind = values.get("partition_type", PartitionType.COLUMN)
    try:
        values["partition_type"] = PartitionType(kind.lower() if isinstance(kind, str) else kind)
    except ValueError:
        raise ValueError(
            f"partition_config.layer_specs: partition_type={kind!r}: must be 'column', 'row' or 'skip'"
        ) from None
    if values.get("shape") is not None:
        values["shape"] = tuple(
            tuple(extent) if isinstance(extent, Sequence) else int(extent) for extent in values["shape"]
        )
    made = TPLayerSpec(**values)
    nested = [dim for dim, extent in enumerate(made.shape or ()) if isinstance(extent, tuple)]
    if nested not in ([], [made.get_partition_dim()]):
        raise ValueError(
            f"partition_config.layer_specs: shape={list(made.shape or ())}: nested tuple only allowed at "
            f"partition_dim, which is {made.get_partition_dim()}"
        )
    return made


def _check_keys(kind: type, given: Mapping[str, Any], where: str) -> None:
    known = [each.name for each in dataclasses.fields(kind)]
    unknown = sorted(given.keys() - set(known))
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; expected one of {', '.join(known)}")


def merge_autotp_configs(base: AutoTPConfig, override: AutoTPConfig) -> AutoTPConfig:
    """Return ``override`` with the rules of ``base`` appended if ``override.use_default_specs``."""
    specs = [*override.layer_specs, *(base.layer_specs if override.use_default_specs else ())]
    return dataclasses.replace(override, layer_specs=specs)


def _column(*names: str, **more: Any) -> TPLayerSpec:
    return TPLayerSpec(patterns=[rf".*\.{name}\.weight$" for name in names], **more)


def _row(*names: str) -> TPLayerSpec:
    return _column(*names, partition_type=PartitionType.ROW)


def _config(*specs: TPLayerSpec) -> AutoTPConfig:
    return AutoTPConfig(layer_specs=list(specs))


def _skip(*names: str) -> TPLayerSpec:
    return _column(*names, partition_type=PartitionType.SKIP)


_QKV = tuple(rf"self_attn\.{name}_proj" for name in "qkv")
_GATED = (r"mlp\.gate_proj", r"mlp\.up_proj")


PRESETS = ("llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3")


class AutoTPPresets:
    """Rules of model families, by their parameter names in Transformers."""

    @staticmethod
    def llama() -> AutoTPConfig:
        return _config(_column(*_QKV), _row(r"self_attn\.o_proj"), _column(*_GATED), _row(r"mlp\.down_proj"))

    @staticmethod
    def llama_gqa(num_heads: int, num_kv_heads: int, head_dim: int) -> AutoTPConfig:
        """Return rules for a fused q, k and v projection with fewer k and v heads."""
        sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        fused = _column(r"self_attn\.qkv_proj", shape=(sizes, -1), partition_dim=0)
        return _config(fused, *AutoTPPresets.llama().layer_specs)

    @staticmethod
    def bloom() -> AutoTPConfig:
        return _config(
            _column(r"self_attention\.query_key_value", r"mlp\.dense_h_to_4h"),
            _row(r"self_attention\.dense", r"mlp\.dense_4h_to_h"),
        )

    @staticmethod
    def chatglm() -> AutoTPConfig:
        return _config(
            _column(r"self_attention\.query_key_value"),
            _column(r"mlp\.dense_h_to_4h", shape=(2, -1), partition_dim=0),
            _row(r"self_attention\.dense", r"mlp\.dense_4h_to_h"),
        )

    @staticmethod
    def mixtral() -> AutoTPConfig:
        return _config(
            _column(*_QKV),
            _row(r"self_attn\.o_proj"),
            _column(r"block_sparse_moe\.experts\.\d+\.w[13]"),
            _row(r"block_sparse_moe\.experts\.\d+\.w2"),
            _skip(r"block_sparse_moe\.gate"),
        )

    @staticmethod
    def deepseek_v2() -> AutoTPConfig:
        """Return rules that keep the projections to latent vectors whole, as all heads share them."""
        return _config(
            _skip(r"self_attn\.q_a_proj", r"self_attn\.kv_a_proj_with_mqa", r"mlp\.gate"),
            _column(r"self_attn\.q_proj", r"self_attn\.q_b_proj", r"self_attn\.kv_b_proj"),
            _row(r"self_attn\.o_proj"),
            _column(r"mlp\.(experts\.\d+\.|shared_experts\.)?(gate|up)_proj"),
            _row(r"mlp\.(experts\.\d+\.|shared_experts\.)?down_proj"),
        )

    @staticmethod
    def qwen2() -> AutoTPConfig:
        return AutoTPPresets.llama()

    @staticmethod
    def phi3() -> AutoTPConfig:
        return _config(
            _column(r"self_attn\.qkv_proj", shape=(3, -1), partition_dim=0),
            _row(r"self_attn\.o_proj"),
            _column(r"mlp\.gate_up_proj", shape=(2, -1), partition_dim=0),
            _row(r"mlp\.down_proj"),
        )

    @staticmethod
    def get_preset(model_type: str) -> AutoTPConfig | None:
        """Return the rules of a family (``config.model_type``); None if there is no preset."""
        family = model_type.lower()
        return getattr(AutoTPPresets, family)() if family in PRESETS else None
