"""`zero_optimization.leaf_module`: modules that ZeRO-3 gathers as a whole, named in the config."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from deepspeed.config.section import DeepSpeedConfigModel

DEFAULT_LEAF_MODULE_CLASSES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)
DEFAULT_LEAF_MODULE_NAMES: tuple[str, ...] = ()
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: tuple[str, ...] = ()


def _as_list(value: Any) -> Any:
    """Accept a single string where a list of strings is expected."""
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str], BeforeValidator(_as_list)]


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """Modules that are leaves: their parameters are fetched together, however few of them one forward
    uses.
    """

    classes: Texts = Field(
        default=list(DEFAULT_LEAF_MODULE_CLASSES),
        description="Full names of module classes (sparse mixture-of-experts blocks by default).",
    )
    names: Texts = Field(
        default=list(DEFAULT_LEAF_MODULE_NAMES),
        description="Names of single modules, as in `named_modules()`.",
    )
    name_suffixes: Texts = Field(
        default=list(DEFAULT_LEAF_MODULE_NAME_SUFFIXES), description="Endings of module names."
    )
