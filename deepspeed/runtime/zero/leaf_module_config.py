"""`zero_optimization.leaf_module`: modules that ZeRO-3 gathers as a whole, named in the config."""

from __future__ import annotations

from pydantic import Field

from deepspeed.runtime.config_utils import DeepSpeedConfigModel

DEFAULT_LEAF_MODULE_CLASSES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """Which modules are leaves: their parameters are fetched together, however few of them one forward
    uses.
    """

    classes: list[str] = Field(
        default=list(DEFAULT_LEAF_MODULE_CLASSES),
        description="Full names of module classes (sparse mixture-of-experts blocks by default).",
    )
    names: list[str] = Field(default=[], description="Names of single modules, as in `named_modules()`.")
    name_suffixes: list[str] = Field(default=[], description="Endings of module names.")
