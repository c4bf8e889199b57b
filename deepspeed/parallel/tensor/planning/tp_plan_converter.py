"""The plan that a model of Transformers carries (``base_model_tp_plan``), as rules of ``partition_config``."""

from __future__ import annotations

from collections.abc import Mapping

from deepspeed.base.logging import logger
from deepspeed.parallel.tensor.planning.autotp_config import PartitionType, TPLayerSpec

_STYLES = {
    "colwise": {"partition_type": PartitionType.COLUMN},
    "colwise_rep": {"partition_type": PartitionType.COLUMN, "gather_output": True},
    "colwise_gather_output": {"partition_type": PartitionType.COLUMN, "gather_output": True},
    "rowwise": {"partition_type": PartitionType.ROW},
    "replicated_with_grad_allreduce": {"partition_type": PartitionType.SKIP, "grad_allreduce": True},
}


class TPPlanConverter:
    """From names with wildcards and styles of Transformers to ``TPLayerSpec``."""

    @staticmethod
    def convert(hf_tp_plan: Mapping[str, str]) -> list[TPLayerSpec] | None:
        """One rule for each entry, in the plan's order.

        A layer whose style is none of ours stays whole, as a rule of its own, so that nothing else splits it. None: no
        entry of the plan has a style of ours.
        """
        known = {name for name, style in hf_tp_plan.items() if style.lower() in _STYLES}
        if hf_tp_plan and not known:
            return None
        foreign = sorted({style for name, style in hf_tp_plan.items() if name not in known})
        if foreign:
            logger.warning("layers of these styles of the model's tp_plan stay whole: %s", ", ".join(foreign))
        return [_spec(name, style.lower()) for name, style in hf_tp_plan.items()]

    @staticmethod
    def _wildcard_to_regex(pattern: str) -> str:
        """``*`` stands for anything, and the name may begin anywhere in a parameter's."""
        return ".*" + pattern.replace(".", r"\.").replace("*", ".*")


def _spec(name: str, style: str) -> TPLayerSpec:
    regex = TPPlanConverter._wildcard_to_regex(name.removesuffix(".weight"))
    return TPLayerSpec([rf"{regex}\.weight$"], **_STYLES.get(style, {"partition_type": PartitionType.SKIP}))
