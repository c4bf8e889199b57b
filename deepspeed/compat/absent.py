"""Removed names of release 0.19: their replacements, and stubs for the few that public scripts import without
calling, which raise when called.
"""

from __future__ import annotations

from typing import Any, NoReturn

from deepspeed.base.exceptions import ExplainedError

# Path prefix -> replacement. The longest match is quoted.
INSTEAD = {
    "deepspeed.autotuning": "deepspeed --autotuning tune generates, names and prunes its configs.",
    "deepspeed.checkpoint": "load_checkpoint() takes a checkpoint of any world size and stage, without conversion.",
    "deepspeed.checkpoint.autoep": "Checkpoints hold whole experts: any number of ranks loads them.",
    "deepspeed.comm": "Communication here is torch.distributed; deepspeed.comm has its functions.",
    "deepspeed.compile": "engine.compile() runs passes over graphs; see docs/compile.md.",
    "deepspeed.datastates": "datastates_ckpt in the config makes engine.save_checkpoint() write in the background.",
    "deepspeed.env_report": "ds_report prints the device and its libraries.",
    "deepspeed.inference": "deepspeed.init_inference and build_hf_engine create all parts of their engines.",
    "deepspeed.inference.v2": "build_hf_engine runs unmodified Transformers models on its own paged cache.",
    "deepspeed.io": "The writers of deepspeed.io manage their buffers themselves.",
    "deepspeed.model_implementations": "deepspeed.init_inference runs unmodified models.",
    "deepspeed.module_inject": "init_inference and tensor_parallel.autotp_size find a model's layers by its graph.",
    "deepspeed.module_inject.auto_ep": "Set expert_parallel in the config to distribute experts over ranks.",
    "deepspeed.moe": "Set expert_parallel in the config to distribute the experts of Transformers models over ranks.",
    "deepspeed.nvme": "The commands ds_io and ds_nvme_tune measure and tune file access.",
    "deepspeed.ops.adam": "The engine itself does this with zero_optimization.zenflow in the config.",
    "deepspeed.ops.fp_quantizer": "Use deepspeed.ops.fp_quantizer.matmul_fp8.",
    "deepspeed.ops.op_builder": "Nothing is compiled at run time here: a builder's load() returns what is installed.",
    "deepspeed.ops.quantizer": "Use the quantizers of deepspeed.compression.utils.",
    "deepspeed.ops.transformer": "Use DeepSpeedTransformerLayer.",
    "deepspeed.ops.transformer.inference": "deepspeed.init_inference has its own kernels.",
    "deepspeed.runtime.activation_checkpointing": "deepspeed.checkpointing.configure() and checkpoint() do this.",
    "deepspeed.runtime.base_optimizer": "Gradients are reduced by hooks of the engine; plain loss.backward() works.",
    "deepspeed.runtime.checkpoint_engine": "engine.save_checkpoint() does this, configured by checkpoint.writer.",
    "deepspeed.runtime.checkpoint_engine.nebula_checkpoint_engine": "Set checkpoint.writer in the config.",
    "deepspeed.runtime.hybrid_engine_graph": "The hybrid engine generates with a paged cache.",
    "deepspeed.runtime.superoffload": "offload_optimizer.super_offload in the config does this.",
    "deepspeed.runtime.weight_quantizer": "Set quant in the config of init_inference.",
    "deepspeed.utils.pin_memory": "get_accelerator().pin_memory() pins tensors.",
    "deepspeed.utils.static_cache": "Use the StaticCache of Transformers.",
    "deepspeed.runtime.comm": "CompressedBackend works on every process group; see also deepspeed.comm.",
    "deepspeed.runtime.compiler": "Use torch.compiler, or engine.compile().",
    "deepspeed.runtime.compression": "CompressedBackend of deepspeed.runtime.comm needs no CuPy.",
    "deepspeed.runtime.engine": "deepspeed.initialize() creates all parts of an engine.",
    "deepspeed.runtime.model_checkpointing": "deepspeed.check_config reads and checks the section checkpoint.",
    "deepspeed.runtime.swap_tensor": "offload_optimizer and offload_param with device nvme do this.",
    "deepspeed.runtime.tensor_parallel": "Set tensor_parallel.autotp_size in the config, or call tp_model_init().",
    "deepspeed.runtime.torch_autocast": "Set torch_autocast.enabled in the config; the engine does the rest.",
    "deepspeed.runtime.utils": "The engine does this itself; training scripts need not.",
    "deepspeed.runtime.zenflow": "The engine does this itself with zero_optimization.zenflow in the config.",
    "deepspeed.runtime.zero": "Use deepspeed.zero.GatheredParameters and deepspeed.utils.safe_get_full_fp32_param.",
    "deepspeed.utils.debug": "Use print() or deepspeed.utils.log_dist, and debug_param2name(), debug_module2name().",
    "deepspeed.utils.link_hp_params": "Engines link by themselves; see deepspeed.utils.safe_get_full_fp32_param.",
    "deepspeed.utils.mixed_precision_linkage": "Engines link by themselves; see safe_get_full_fp32_param.",
    "deepspeed.utils.tensor_fragment": "Use deepspeed.utils.safe_get_full_fp32_param and its siblings.",
    "deepspeed.utils.zero_to_fp32": "Use get_fp32_state_dict_from_zero_checkpoint().",
}


class FeatureNotAvailableError(ExplainedError, NotImplementedError):
    """A documented feature that this release lacks was called."""


def instead(path: str) -> str:
    """Return the sentence of `INSTEAD` for a dotted path, preceded by ". "; empty if there is none."""
    prefixes = [prefix for prefix in INSTEAD if f"{path}.".startswith(f"{prefix}.")]
    return f". {INSTEAD[max(prefixes, key=len)]}" if prefixes else ""


def _refuse(path: str) -> NoReturn:
    raise FeatureNotAvailableError(f"{path} is not part of this release{instead(path)}")


def graph_process(replay_first_step: Any, func: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Raise FeatureNotAvailableError: nothing here captures CUDA graphs for a caller."""
    _refuse("deepspeed.runtime.utils.graph_process")


def link_hp_params(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise FeatureNotAvailableError: engines link weights and master weights themselves."""
    _refuse("deepspeed.utils.link_hp_params")


def parse_optim_states(files: Any, ds_checkpoint_dir: Any) -> NoReturn:
    """Raise FeatureNotAvailableError: optimizer files are read by ``deepspeed.checkpoint`` only."""
    _refuse("deepspeed.utils.zero_to_fp32.parse_optim_states")


class NebulaCheckpointEngine:
    """Raises FeatureNotAvailableError when made: the Nebula service is not supported."""

    def __init__(self, config_params: Any = None) -> None:
        _refuse("deepspeed.runtime.checkpoint_engine.nebula_checkpoint_engine.NebulaCheckpointEngine")


def is_enabled() -> bool:
    """Return False: communication does not use the mori backend."""
    return False
