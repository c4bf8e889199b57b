"""A cell: one combination of features, as data, with the DeepSpeed config that asks for it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

STEPS = 3
FREEZE = 2
"""Updates of 1-bit optimizers with gradients in full."""
SYNC_EVERY, OUTER_RATE, OUTER_MOMENTUM = 2, 0.7, 0.9
"""Of local steps: a phase of ``STEPS`` updates ends between two outer ones."""
SENDING_SIGNS = ("1-bit Adam", "0/1 Adam", "1-bit LAMB", "local 0/1 Adam")
"""Optimizers."""
THETA, GAMMA = 0.5, 0.5
"""Of progressive layer drop."""
MIN_TOKENS, MAX_TOKENS = 4, 8
"""Lengths of the curriculum, in steps of 2."""
BATCH = 2
RATE, EPS, DECAY = 1e-2, 1e-3, 0.1
CLIP = 0.05
WARMUP_FROM = 0.25

FAMILIES = (
    "llama mistral qwen2 qwen3 gemma gemma2 gemma3 phi phi3 gpt2 gptj gpt_neo gpt_neox gpt_bigcode "
    "codegen opt bloom mpt falcon falcon_grouped falcon_alibi olmo olmo2 glm glm4 cohere cohere2 stablelm "
    "starcoder2 granite smollm3 nemotron persimmon exaone4 mixtral qwen2_moe qwen3_moe deepseek_v3 "
    "gpt_oss bert roberta distilbert electra vit t5 bart unet"
).split()
"""Tiny models of Transformers (`tests/clients/architectures.py`) and a UNet, drawn separately: it may not be installed.
Their ``lora`` is PEFT's."""
IMAGES = ("vit", "unet")
CHOICES: dict[str, tuple[Any, ...]] = {
    "model": ("blocks", "gru", "moe", *FAMILIES),
    "ranks": (1, 2, 4),
    "axes": ("dp", "tp", "sp", "pp", "ep", "tp+sp", "pp+tp", "pp+sp", "pp+ep", "sp+ep", "tp+ep"),
    "stage": (0, 1, 2, 3),
    "shards": ("all", "mics", "hpz"),
    "tier": ("device", "cpu", "nvme", "nvme+params", "ratio", "super", "zenflow"),
    "precision": ("fp32", "bf16", "fp16", "autocast", "bf16 masters"),
    "optimizer": (
        "AdamW",
        "Adam",
        "SGD",
        "Adagrad",
        "Lion",
        "NAdam",
        "8-bit",
        "client",
        "LAMB",
        "Muon",
        "1-bit Adam",
        "0/1 Adam",
        "1-bit LAMB",
        "DiLoCo",
        "local 0/1 Adam",
        "callable",
    ),
    "accumulation": (1, 3, 2),
    "clip": (False, True),
    "wire": ("plain", "qwz", "qgz", "fp32", "bf16", "int8"),
    "recompute": ("no", "torch", "reentrant", "documented", "partitioned"),
    "buckets": ("default", "tiny"),
    "parameters": ("all", "frozen", "tied", "unused", "unused somewhere", "twice", "late"),
    "data": ("even", "uneven", "empty"),
    "evaluate": (False, True),
    "resume": ("no", "same", "stage", "ranks", "dp", "2x2, 1"),
    "batch_change": (False, True),
    "schedule": ("no", "warmup"),
    "backward": ("engine", "tensor", "no_sync"),
    "order": ("1f1b", "zero-bubble", "interleaved", "zero-bubble-v"),
    "compile": ("no", "eager", "aot_eager", "inductor"),
    "lora": (False, True),
    "lengths": ("whole", "curriculum"),
    "layer_drop": (False, True),
    "compression": ("no", "weights", "activations", "pruning"),
    "fp8": (False, True),
    "attention": ("dense", "sparse"),
    "generate": (False, True),
    "token_drop": (False, True),
}
"""The values of each feature. The first one is the plain one: what shrinking returns to."""

REMOVABLE_LAST = ("ranks", "axes", "stage")
"""What shrinking tries after everything else."""


@dataclass(frozen=True)
class Cell:
    """A cell. Each field is one of ``CHOICES``. ``seed`` affects only the data."""

    model: str = "blocks"
    ranks: int = 1
    axes: str = "dp"
    stage: int = 0
    shards: str = "all"
    tier: str = "device"
    precision: str = "fp32"
    optimizer: str = "AdamW"
    accumulation: int = 1
    clip: bool = False
    wire: str = "plain"
    recompute: str = "no"
    buckets: str = "default"
    parameters: str = "all"
    data: str = "even"
    evaluate: bool = False
    resume: str = "no"
    batch_change: bool = False
    schedule: str = "no"
    backward: str = "engine"
    order: str = "1f1b"
    compile: str = "no"
    lora: bool = False
    lengths: str = "whole"
    layer_drop: bool = False
    compression: str = "no"
    fp8: bool = False
    attention: str = "dense"
    generate: bool = False
    token_drop: bool = False

    def __str__(self) -> str:
        """One line, such as ``ranks=2 stage=3 tier=nvme``; what is plain is left out. ``parse`` reads it."""
        said = [f"{name}={_written(value)}" for name, value in self.features().items()]
        return " ".join(said) or "plain"

    def features(self) -> dict[str, Any]:
        """Return the fields with non-default values."""
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if value != CHOICES[name][0]}

    def pairs(self) -> set[tuple[str, str]]:
        """Every pair of its features, each written as in ``__str__``, in the order of the fields."""
        said = [f"{name}={_written(value)}" for name, value in self.features().items()]
        return {(first, second) for at, first in enumerate(said) for second in said[at + 1 :]}

    def axis(self, name: str) -> int:
        """Return the number of ranks on this axis: 1 or 2 for ``tp``, ``sp``, ``pp`` and ``ep``."""
        return 2 if name in self.axes.split("+") else 1

    @property
    def replicas(self) -> int:
        """Return the number of different data streams."""
        return self.ranks // (self.axis("tp") * self.axis("sp") * self.axis("pp"))

    def accumulation_at(self, step: int) -> int:
        """Micro-batches of this step: ``batch_change`` doubles them after the first one."""
        return self.accumulation * (2 if self.batch_change and step >= 1 else 1)

    @property
    def chunks(self) -> int:
        """Runs of layers that a stage of its pipeline has."""
        return 2 if self.order in ("interleaved", "zero-bubble-v") else 1

    @property
    def sends_signs(self) -> bool:
        """Return whether ranks have only their own gradients after two updates."""
        return self.optimizer in SENDING_SIGNS

    @property
    def steps_alone(self) -> bool:
        """Return whether copies of the weights differ after some updates; only the first has gradients in full."""
        return self.optimizer in ("DiLoCo", "local 0/1 Adam")

    @property
    def copies_of_one_batch(self) -> bool:
        """Return whether ranks that compute one batch hold copies of weights."""
        pp, tp, sp = (self.axis(name) > 1 for name in ("pp", "tp", "sp"))
        tied = pp and self.parameters == "tied"
        return tied or tp and self.model == "moe" or sp and (self.shards != "mics" or self.stage == 0)

    @property
    def keeps_gradients(self) -> bool:
        """Return whether ranks have only their own gradients after their first updates."""
        return self.sends_signs or self.optimizer == "DiLoCo"


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "_")


def parse(line: str) -> Cell:
    """The cell of a line of ``str(cell)``, or of a JSON object.

    ValueError: an unknown feature or value.
    """
    line = line.strip()
    if line.startswith("{"):
        given = {name: value for name, value in json.loads(line).items() if name in CHOICES}
        return Cell(**given)
    given = {}
    for word in [] if line == "plain" else line.split():
        name, _, text = word.partition("=")
        if name not in CHOICES:
            raise ValueError(f"{name!r} is no feature: use one of {', '.join(CHOICES)}")
        known = {_written(value): value for value in CHOICES[name]}
        if text not in known:
            raise ValueError(f"{name}={text} is not known: use one of {', '.join(known)}")
        given[name] = known[text]
    return Cell(**given)


def why_not(cell: Cell) -> str:
    """Why the cell asks for nothing that exists; empty if it can be written down.

    What a config *can* say stays in, also if it is refused: refusals are an outcome.
    """
    tp, sp, pp, ep = (cell.axis(name) for name in ("tp", "sp", "pp", "ep"))
    if cell.ranks % (tp * sp * pp):
        return "more ranks are shared by axes than there are"
    if (cell.ranks // (tp * pp)) % ep:
        return "experts need two ranks with the same dense weights"
    if ep > 1 and cell.model != "moe":
        return "only a mixture has experts"
    if sp > 1 and cell.model == "gru":
        return "a recurrence needs the tokens before its own"
    if cell.order != "1f1b" and pp == 1:
        return "only pipelines have an order"
    if pp > 1:
        if cell.backward != "engine" or cell.parameters in ("unused", "unused somewhere", "late", "twice"):
            return "the pipeline's own step decides this"
        if cell.recompute in ("torch", "reentrant", "partitioned"):
            return "a pipeline recomputes by its own interval"
    if cell.recompute == "reentrant" and cell.parameters == "frozen":
        return "torch gives no gradients to a region whose inputs need none"
    if cell.recompute == "partitioned" and tp == 1:
        return "inputs are partitioned over ranks that share layers"
    if cell.shards != "all" and cell.ranks != 4:
        return "groups need four ranks"
    if cell.shards != "all" and cell.ranks // (tp * pp) < 2:
        return "groups need two ranks with the same weights"
    if cell.tier != "device" and cell.stage == 0:
        return "nothing to offload at stage 0"
    if cell.tier in ("nvme+params", "ratio") and cell.stage != 3:
        return "needs stage 3"
    if cell.shards == "hpz" and cell.stage != 3:
        return "needs stage 3"
    if cell.shards == "mics" and cell.stage == 0:
        return "needs stage 1"
    if cell.wire in ("qwz",) and cell.stage != 3 or cell.wire == "qgz" and cell.stage == 0:
        return "needs slices"
    if cell.precision == "bf16 masters" and cell.stage == 0:
        return "needs stage 1"
    if cell.ranks == 1 and (
        cell.wire != "plain" or cell.data != "even" or cell.parameters == "unused somewhere"
    ):
        return "needs several ranks"
    if cell.replicas == 1 and (cell.data != "even" or cell.parameters == "unused somewhere"):
        return "needs several streams of data"
    if cell.resume == "ranks" and cell.axes != "dp":
        return "only data-parallel ranks change in number"
    if cell.resume == "2x2, 1" and (cell.ranks, cell.axes) != (4, "dp"):
        return "goes from four copies to two of two parts, and to one rank"
    if cell.resume == "2x2, 1" and (
        cell.fp8 or cell.attention == "sparse" or cell.keeps_gradients or cell.lora
    ):
        return "the second of its layouts has split layers"
    if cell.resume == "stage" and cell.keeps_gradients and cell.shards != "mics":
        return "has one stage"
    if cell.resume == "dp" and (cell.axes == "dp" or pp > 1 or ep > 1):
        return "is what it is already, or has other names"
    if cell.backward == "no_sync" and cell.accumulation == 1:
        return "nothing to put off"
    return _why_no_feature(cell)


def _why_no_feature(cell: Cell) -> str:
    """``why_not`` of what changes the model or its inputs."""
    tp, sp, pp = (cell.axis(name) for name in ("tp", "sp", "pp"))
    if cell.model in FAMILIES and (
        cell.axes not in ("dp", "tp")
        or (cell.recompute, cell.compression, cell.attention) != ("no", "no", "dense")
        or cell.parameters not in ("all", "frozen")
        or (cell.lora and cell.parameters != "all")
        or cell.fp8
        or cell.layer_drop
        or (cell.model in IMAGES and (cell.lengths, cell.data, cell.generate) != ("whole", "even", False))
        or (cell.model == "unet" and (cell.lora or cell.axes != "dp"))
    ):
        return "is part of this folder's own models"
    if cell.order == "interleaved" and cell.accumulation % 2:
        return "stages take micro-batches in pairs"
    if pp > 1 and (cell.layer_drop or cell.generate):
        return "a pipeline's layers take tensors alone"
    if cell.token_drop and (pp > 1 or sp > 1 or cell.model in FAMILIES):
        return "the oracle follows the tokens of whole layers of its own"
    if sp > 1 and (cell.lengths != "whole" or cell.generate):
        return "the script cuts sequences into shards itself"
    if tp > 1 and cell.fp8:
        return "layers that are split keep their precision"
    if cell.attention == "sparse" and (tp > 1 or (sp > 1 and cell.resume == "dp")):
        return "a layout, which is saved, has the heads of one rank"
    if cell.model == "gru" and cell.attention == "sparse":
        return "only attention has a layout"
    if cell.lora and cell.compression != "no" or cell.fp8 and cell.compression != "no":
        return "one class of layers takes the place of another"
    if cell.keeps_gradients and cell.axes != "dp" and cell.clip:
        return "the norm is that of each rank's own gradients"
    return ""


def config_of(cell: Cell, folder: str = "/tmp/cells") -> dict[str, Any]:
    """The DeepSpeed config; ``folder`` is for files of states and parameters."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": cell.accumulation,
        "gradient_clipping": CLIP if cell.clip else 0.0,
        "zero_optimization": _zero(cell, folder),
        **_precision(cell),
        **_optimizer(cell),
    }
    if cell.axis("tp") > 1:
        config["tensor_parallel"] = {"autotp_size": 2}
    if cell.axis("sp") > 1:
        config["sequence_parallel_size"] = 2
    if cell.schedule == "warmup":
        rate = RATE / 4 if cell.optimizer == "Lion" else RATE
        config["scheduler"] = {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": WARMUP_FROM * rate,
                "warmup_max_lr": rate,
                "warmup_num_steps": STEPS,
                "warmup_type": "linear",
            },
        }
    if cell.recompute == "partitioned":
        config["activation_checkpointing"] = {"partition_activations": True}
    if cell.wire in ("fp32", "bf16"):
        config["communication_data_type"] = cell.wire
    if cell.wire == "int8":
        config["gradient_compression"] = {"codec": "int8"}
    if cell.order != "1f1b":
        config["pipeline"] = {"schedule": cell.order}
    if cell.lengths == "curriculum":
        config["curriculum_learning"] = {
            "enabled": True,
            "curriculum_type": "seqlen",
            "min_difficulty": MIN_TOKENS,
            "max_difficulty": MAX_TOKENS,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": STEPS, "difficulty_step": 2},
        }
    if cell.layer_drop:
        config["progressive_layer_drop"] = {"enabled": True, "theta": THETA, "gamma": GAMMA}
    if cell.token_drop:
        config["data_efficiency"] = {
            "enabled": True,
            "data_routing": {"enabled": True, "random_ltd": _token_drop()},
        }
    if cell.fp8:
        config["fp8"] = {"enabled": True, "emulate": True}
    if cell.compression != "no":
        config["compression_training"] = _compression(cell)
    return config


def _token_drop() -> dict[str, Any]:
    """The first of two layers, by the lengths of the curriculum but a step later."""
    return {
        "enabled": True,
        "total_layer_num": 2,
        "random_ltd_layer_num": 1,
        "random_ltd_layer_id": [0],
        "model_mask_name": None,
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": MIN_TOKENS,
            "max_value": MAX_TOKENS,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": STEPS, "seq_per_step": 2},
        },
    }


def _compression(cell: Cell) -> dict[str, Any]:
    """8 bits, or half of the weights, of every layer ``up``."""
    name, shared, params = {
        "weights": (
            "weight_quantization",
            {"quantize_groups": 1, "quantize_weight_in_forward": True},
            {"start_bits": 8, "target_bits": 8, "quantization_period": 100},
        ),
        "activations": ("activation_quantization", {"range_calibration": "dynamic"}, {"bits": 8}),
        "pruning": ("sparse_pruning", {"method": "l1"}, {"dense_ratio": 0.5}),
    }[cell.compression]
    return {
        name: {
            "shared_parameters": {"enabled": True, "schedule_offset": 0, **shared},
            "different_groups": {"up": {"params": params, "modules": ["feed.up", "sometimes.up"]}},
        }
    }


def _zero(cell: Cell, folder: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": cell.stage}
    if cell.stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    if cell.buckets == "tiny":
        zero |= {"reduce_bucket_size": 500, "allgather_bucket_size": 500, "sub_group_size": 500}
        if cell.stage == 3:
            zero |= {"stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0}
    files = {"device": "nvme", "nvme_path": folder}
    tiers: dict[str, dict[str, Any]] = {
        "device": {},
        "cpu": {"offload_optimizer": {"device": "cpu"}},
        "nvme": {"offload_optimizer": files},
        "nvme+params": {"offload_optimizer": files, "offload_param": {**files, "max_in_cpu": 0}},
        "ratio": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        "super": {"offload_optimizer": {"device": "cpu", "super_offload": True}},
        "zenflow": {
            "offload_optimizer": {"device": "cpu"},
            "zenflow": {
                "topk_ratio": 0.25,
                "update_interval": 1,
                "select_interval": 2,
                "overlap_step": False,
                "full_warm_up_rounds": 0,
            },
        },
    }
    zero |= tiers[cell.tier]
    if cell.shards == "mics":
        zero["mics_shard_size"] = 2
    if cell.shards == "hpz":
        zero["zero_hpz_partition_size"] = 2
    if cell.wire == "qwz":
        zero["zero_quantized_weights"] = True
    if cell.wire == "qgz":
        zero["zero_quantized_gradients"] = True
    return zero


def _precision(cell: Cell) -> dict[str, Any]:
    return {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True, "loss_scale": 64}},
        "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        "bf16 masters": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    }[cell.precision]


def _optimizer(cell: Cell) -> dict[str, Any]:
    adam = {"lr": RATE, "eps": EPS, "weight_decay": DECAY}
    kinds: dict[str, dict[str, Any]] = {
        "AdamW": {"type": "AdamW", "params": adam},
        "Adam": {"type": "Adam", "params": {**adam, "adam_w_mode": False}},
        "SGD": {"type": "SGD", "params": {"lr": RATE, "momentum": 0.9, "weight_decay": DECAY}},
        "Adagrad": {"type": "Adagrad", "params": {"lr": RATE, "eps": EPS}},
        "Lion": {"type": "Lion", "params": {"lr": RATE / 4, "weight_decay": DECAY}},
        "NAdam": {"type": "NAdam", "params": adam},
        "8-bit": {"type": "AdamW", "params": {**adam, "state_bits": 8}},
        "LAMB": {"type": "Lamb", "params": adam},
        "Muon": {"type": "Muon", "params": {**adam, "momentum": 0.9, "betas": [0.9, 0.999]}},
        "1-bit Adam": {"type": "OneBitAdam", "params": {**adam, "freeze_step": FREEZE}},
        "0/1 Adam": {"type": "ZeroOneAdam", "params": {**adam, "var_update_scaler": 1}},
        "1-bit LAMB": {"type": "OneBitLamb", "params": {**adam, "freeze_step": FREEZE}},
        "local 0/1 Adam": {
            "type": "ZeroOneAdam",
            "params": {
                **adam,
                "var_update_scaler": 1,
                "var_freeze_step": 1,
                "local_step_scaler": 1,
                "local_step_clipper": SYNC_EVERY,
            },
        },
        "DiLoCo": {
            "type": "DiLoCo",
            "params": {
                **adam,
                "sync_every": SYNC_EVERY,
                "outer_lr": OUTER_RATE,
                "outer_momentum": OUTER_MOMENTUM,
            },
        },
    }
    return {} if cell.optimizer in ("client", "callable") else {"optimizer": kinds[cell.optimizer]}
