"""Broken configs: each is caught, the key that is wrong is named, and for a misspelt one the key that was
meant.
"""

from __future__ import annotations

import copy
import itertools
import string
from typing import Any

import pytest

from deepspeed.config.analysis import Analysis, analyse
from deepspeed.config.axes import axes_of
from deepspeed.config.deepspeed_config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.config.keys import documented_name, keys_of
from deepspeed.config.problems import distance
from deepspeed.config.reader import read_config
from deepspeed.config.schema import TrainingConfig
from deepspeed.config.section import LenientConfigModel

GOOD: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": 5e7,
        "overlap_comm": True,
        "offload_optimizer": {"device": "none"},
    },
    "activation_checkpointing": {"partition_activations": False},
    "checkpoint": {"tag_validation": "Warn", "parallel_write": {"pipeline_stage": False}},
    "data_types": {"grad_accum_dtype": "fp32"},
    "aio": {"queue_depth": 8},
    "tensorboard": {"enabled": False, "job_name": "x"},
    "comms_logger": {"enabled": False},
    "wall_clock_breakdown": False,
}
DROP = object()

# What is written where (dotted; DROP removes), and the key that a message must name.
MUTANTS: list[tuple[dict[str, Any], str]] = [
    # -- misspelt at distance 1, top level
    ({"train_batch_sise": 32, "train_batch_size": DROP}, "train_batch_size"),
    (
        {"train_micro_batch_size_per_gpus": 4, "train_micro_batch_size_per_gpu": DROP},
        "train_micro_batch_size_per_gpu",
    ),
    ({"gradient_acumulation_steps": 8}, "gradient_accumulation_steps"),
    ({"graident_clipping": DROP, "gradient_cliping": 1.0, "gradient_clipping": DROP}, "gradient_clipping"),
    ({"optimiser": {}, "optimizer": DROP}, "optimizer"),
    ({"schedular": {}, "scheduler": DROP}, "scheduler"),
    ({"fp_16": {"enabled": True}, "fp16": DROP}, "fp16"),
    ({"fp61": {"enabled": True}, "fp16": DROP}, "fp16"),
    ({"zero_optimisation": {"stage": 1}, "zero_optimization": DROP}, "zero_optimization"),
    ({"zero-optimization": {"stage": 1}, "zero_optimization": DROP}, "zero_optimization"),
    ({"Zero_optimization": {"stage": 1}, "zero_optimization": DROP}, "zero_optimization"),
    ({"step_per_print": 10, "steps_per_print": DROP}, "steps_per_print"),
    ({"prescale_gradient": True}, "prescale_gradients"),
    ({"spars_gradients": True}, "sparse_gradients"),
    ({"communication_datatype": "fp32"}, "communication_data_type"),
    ({"wall_clock_brakdown": True, "wall_clock_breakdown": DROP}, "wall_clock_breakdown"),
    ({"memory_breakdwon": True}, "memory_breakdown"),
    ({"torch_autocasts": {}}, "torch_autocast"),
    ({"datatypes": {}, "data_types": DROP}, "data_types"),
    ({"tensorbord": {}, "tensorboard": DROP}, "tensorboard"),
    ({"wandbb": {}}, "wandb"),
    ({"dump_stat": True}, "dump_state"),
    ({"checkpont": {}, "checkpoint": DROP}, "checkpoint"),
    # -- misspelt at distance 2, top level
    ({"gradient_acumulation_step": 8}, "gradient_accumulation_steps"),
    ({"optmiser": {}, "optimizer": DROP}, "optimizer"),
    ({"zeroo_optimisation": {}, "zero_optimization": DROP}, "zero_optimization"),
    ({"graident_cliping": 1.0, "gradient_clipping": DROP}, "gradient_clipping"),
    (
        {"activation_chekpoint": {}, "activation_checkpointing": DROP, "activation_checkpontin": {}},
        "activation_checkpointing",
    ),
    ({"flop_profile": {}}, "flops_profiler"),
    ({"cvs_monitor": {}}, "csv_monitor"),
    ({"tensor_paralel": {}, "tensorparalel": {}}, "tensor_parallel"),
    # -- misspelt inside strict sections
    ({"zero_optimization.stag": 2}, "zero_optimization.stage"),
    ({"zero_optimization.reduce_buket_size": 5}, "zero_optimization.reduce_bucket_size"),
    ({"zero_optimization.overlap_com": True}, "zero_optimization.overlap_comm"),
    ({"zero_optimization.contigous_gradients": True}, "zero_optimization.contiguous_gradients"),
    ({"zero_optimization.stage3_prefetch_bucket": 5}, "zero_optimization.stage3_prefetch_bucket_size"),
    ({"zero_optimization.stage3_max_live_paramters": 5}, "zero_optimization.stage3_max_live_parameters"),
    ({"zero_optimization.offload_optimiser": {}}, "zero_optimization.offload_optimizer"),
    ({"zero_optimization.offload_optimizer.devise": "cpu"}, "zero_optimization.offload_optimizer.device"),
    (
        {"zero_optimization.offload_optimizer.pinmemory": True},
        "zero_optimization.offload_optimizer.pin_memory",
    ),
    (
        {"zero_optimization.offload_param": {"buffer_cuont": 5}},
        "zero_optimization.offload_param.buffer_count",
    ),
    ({"zero_optimization.leaf_module": {"name": []}}, "zero_optimization.leaf_module.names"),
    ({"fp16.loss_scal": 0}, "fp16.loss_scale"),
    ({"fp16.loss_scale_windw": 500}, "fp16.loss_scale_window"),
    ({"fp16.hysterisis": 2}, "fp16.hysteresis"),
    ({"fp16.enable": True}, "fp16.enabled"),
    ({"bf16.enabeld": True}, "bf16.enabled"),
    ({"tensorboard.output_pth": "x"}, "tensorboard.output_path"),
    ({"comms_logger.verbos": True}, "comms_logger.verbose"),
    ({"tensor_parallel": {"autotp_sise": 2}}, "tensor_parallel.autotp_size"),
    ({"hybrid_engine": {"max_out_token": 5}}, "hybrid_engine.max_out_tokens"),
    ({"compile": {"deep_compile": False}}, "compile.deepcompile"),
    ({"timers": {"throughput": {"synchronised": True}}}, "timers.throughput.synchronized"),
    # -- misspelt inside lenient sections
    ({"optimizer.typ": "AdamW", "optimizer.type": DROP}, "optimizer.type"),
    ({"optimizer.parms": {}, "optimizer.params": DROP}, "optimizer.params"),
    ({"scheduler.prams": {}, "scheduler.params": DROP}, "scheduler.params"),
    ({"checkpoint.tag_validaton": "Fail", "checkpoint.tag_validation": DROP}, "checkpoint.tag_validation"),
    (
        {"checkpoint.parallel_write.pipeline_stages": True, "checkpoint.parallel_write.pipeline_stage": DROP},
        "pipeline_stage",
    ),
    (
        {"data_types.grad_acum_dtype": "fp32", "data_types.grad_accum_dtype": DROP},
        "data_types.grad_accum_dtype",
    ),
    ({"aio.que_depth": 4, "aio.queue_depth": DROP}, "aio.queue_depth"),
    ({"activation_checkpointing.cpu_chekpointing": True}, "activation_checkpointing.cpu_checkpointing"),
    ({"torch_autocast": {"dtyp": "bf16"}}, "torch_autocast.dtype"),
    ({"flops_profiler": {"profil_step": 1}}, "flops_profiler.profile_step"),
    ({"elasticity": {"mingpus": 1}}, "elasticity.min_gpus"),
    ({"autotuning": {"tunertype": "random"}}, "autotuning.tuner_type"),
    ({"data_efficiency": {"data_sampling": {"num_epoch": 1}}}, "data_efficiency.data_sampling.num_epochs"),
    ({"pipeline": {"stages": 2}, "expert_parallel": {"auto_ep_size": 2}}, "expert_parallel.autoep_size"),
    # -- wrong type
    ({"train_batch_size": "many"}, "train_batch_size"),
    ({"train_batch_size": True}, "train_batch_size"),
    ({"train_batch_size": 32.5}, "train_batch_size"),
    ({"train_batch_size": [32]}, "train_batch_size"),
    ({"gradient_accumulation_steps": "eight"}, "gradient_accumulation_steps"),
    ({"gradient_clipping": "strong"}, "gradient_clipping"),
    ({"gradient_clipping": True}, "gradient_clipping"),
    ({"steps_per_print": "often"}, "steps_per_print"),
    ({"optimizer": "AdamW"}, "optimizer"),
    ({"optimizer.params": [1]}, "optimizer.params"),
    ({"optimizer.type": 3}, "optimizer.type"),
    ({"fp16": True}, "fp16"),
    ({"fp16.enabled": "perhaps"}, "fp16.enabled"),
    ({"fp16.initial_scale_power": "high"}, "fp16.initial_scale_power"),
    ({"bf16": [True]}, "bf16"),
    ({"zero_optimization": 2}, "zero_optimization"),
    ({"zero_optimization": "stage2"}, "zero_optimization"),
    ({"zero_optimization.reduce_bucket_size": "5e8 elements"}, "zero_optimization.reduce_bucket_size"),
    ({"zero_optimization.reduce_bucket_size": 0.5}, "zero_optimization.reduce_bucket_size"),
    ({"zero_optimization.reduce_bucket_size": 0}, "zero_optimization.reduce_bucket_size"),
    ({"zero_optimization.compute_grad_norm": False, "zero_optimization.stage": 3}, "stage 1 or 2"),
    (
        {"zero_optimization.compute_grad_norm": False, "gradient_clipping": 1.0},
        "requires gradient_clipping=0",
    ),
    ({"zero_optimization.overlap_comm": 3}, "zero_optimization.overlap_comm"),
    ({"zero_optimization.offload_optimizer": "cpu"}, "zero_optimization.offload_optimizer"),
    ({"zero_optimization.leaf_module": {"names": 3}}, "zero_optimization.leaf_module.names"),
    ({"zero_optimization.leaf_module": {"names": ["a", 3]}}, "zero_optimization.leaf_module.names.1"),
    ({"checkpoint.parallel_write": True}, "checkpoint.parallel_write"),
    (
        {"torch_autocast": {"lower_precision_safe_modules": [3]}},
        "torch_autocast.lower_precision_safe_modules.0",
    ),
    ({"comms_logger.prof_ops": "all_reduce"}, "comms_logger.prof_ops"),
    # -- out of range
    ({"train_batch_size": 0}, "train_batch_size"),
    ({"train_micro_batch_size_per_gpu": -4}, "train_micro_batch_size_per_gpu"),
    ({"gradient_clipping": -1}, "gradient_clipping"),
    ({"gradient_predivide_factor": 0}, "gradient_predivide_factor"),
    ({"steps_per_print": 0}, "steps_per_print"),
    ({"zero_optimization.stage": 4}, "zero_optimization.stage"),
    ({"zero_optimization.stage": -1}, "zero_optimization.stage"),
    ({"zero_optimization.allgather_bucket_size": -1}, "zero_optimization.allgather_bucket_size"),
    ({"zero_optimization.allgather_bucket_size": 1001}, "zero_optimization.allgather_bucket_size"),
    ({"zero_optimization.offload_optimizer.ratio": 1.5}, "zero_optimization.offload_optimizer.ratio"),
    ({"fp16.loss_scale": -2}, "fp16.loss_scale"),
    ({"fp16.loss_scale": float("inf")}, "fp16.loss_scale"),
    ({"bf16.enabled": False, "fp16.enabled": True, "fp16.loss_scale_window": 0}, "fp16.loss_scale_window"),
    ({"bf16.enabled": False, "fp16.enabled": True, "fp16.min_loss_scale": 0}, "fp16.min_loss_scale"),
    ({"activation_checkpointing.number_checkpoints": 0}, "activation_checkpointing.number_checkpoints"),
    ({"aio.queue_depth": 0}, "aio.queue_depth"),
    ({"scheduler.params.warmup_num_steps": -5}, "scheduler.params.warmup_num_steps"),
    ({"scheduler.params.warmup_num_steps": None}, "scheduler.params.warmup_num_steps"),
    ({"autotuning": {"start_profile_step": 5, "end_profile_step": 3}}, "autotuning.end_profile_step"),
    ({"comet": {"samples_log_interval": 0}}, "comet.samples_log_interval"),
    # -- not among the choices
    ({"optimizer.type": "AdmW"}, "optimizer.type"),
    ({"optimizer.type": "WarmupLR"}, "optimizer.type"),
    ({"scheduler.type": "WarmupLRR"}, "scheduler.type"),
    ({"communication_data_type": "fp8"}, "communication_data_type"),
    ({"gradient_allreduce_op": "avg"}, "gradient_allreduce_op"),
    ({"zero_optimization.offload_optimizer.device": "gpu"}, "zero_optimization.offload_optimizer.device"),
    ({"data_types.grad_accum_dtype": "fp8"}, "data_types.grad_accum_dtype"),
    ({"checkpoint.tag_validation": "Maybe"}, "checkpoint.tag_validation"),
    ({"torch_autocast": {"dtype": "fp4"}}, "torch_autocast.dtype"),
    ({"log_level": "loud"}, "log_level"),
    ({"compile": {"passes": ["z2"]}}, "compile.passes.0"),
    ({"curriculum_learning": {"schedule_type": "linear"}}, "curriculum_learning.schedule_type"),
    # -- a key in the wrong section
    ({"fp16.gradient_clipping": 1.0}, "gradient_clipping"),
    ({"zero_optimization.train_batch_size": 8}, "train_batch_size"),
    ({"zero_optimization.pin_memory": True}, "pin_memory"),
    ({"bf16.loss_scale": 0}, "fp16.loss_scale"),
    ({"bf16.initial_scale_power": 16}, "fp16.initial_scale_power"),
    ({"zero_optimization.offload_optimizer.stage": 2}, "zero_optimization.stage"),
    ({"tensorboard.project": "x"}, "project"),
    # -- what does not go together
    ({"fp16.enabled": True}, "bf16.enabled"),
    ({"amp": {"enabled": True}}, "amp.enabled"),
    ({"torch_autocast": {"enabled": True, "dtype": "fp16"}}, "torch_autocast.dtype"),
    ({"data_types.param_dtype": "fp16"}, "data_types.param_dtype"),
    ({"train_micro_batch_size_per_gpu": 5}, "train_batch_size"),
    ({"train_batch_size": DROP, "train_micro_batch_size_per_gpu": DROP}, "train_batch_size"),
    ({"bf16.bf16_optimizer_states": True}, "bf16.bf16_optimizer_states"),
    (
        {"bf16.bf16_master_weights_and_grads": True, "zero_optimization.stage": 0},
        "bf16.bf16_master_weights_and_grads",
    ),
    ({"fp16.fp16_master_weights_and_grads": True}, "fp16.fp16_master_weights_and_grads"),
    ({"zero_optimization.offload_optimizer.device": "nvme"}, "zero_optimization.offload_optimizer.nvme_path"),
    ({"zero_optimization.offload_optimizer.ratio": 0.5}, "zero_optimization.offload_optimizer.ratio"),
    ({"zero_optimization.cpu_offload": True}, "zero_optimization"),
    ({"optimizer.params.max_grad_norm": 1.0}, "optimizer.params.max_grad_norm"),
    ({"zero_optimization.legacy_stage1": True}, "zero_optimization.legacy_stage1"),
    ({"managed_gradient_accumulation": False, "zero_optimization.stage": 1}, "managed_gradient_accumulation"),
    ({"gradient_allreduce_op": "sum", "compile": {"deepcompile": True}}, "gradient_allreduce_op"),
]


def mutated(changes: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(GOOD)
    for dotted, value in changes.items():
        *parents, leaf = dotted.split(".")
        owner = config
        for part in parents:
            owner = owner[part]
        if value is DROP:
            owner.pop(leaf, None)
        else:
            owner[leaf] = value
    return config


def look_at(config: dict[str, Any]) -> Analysis:
    return analyse(read_config(config), axes_of(config, 1))


def test_the_original_is_fine() -> None:
    found = look_at(GOOD)
    assert (found.errors, found.warnings) == ([], [])


def test_contiguous_inputs_without_their_number_are_kept_one_by_one() -> None:
    found = look_at(mutated({"activation_checkpointing": {"contiguous_memory_optimization": True}}))
    assert found.errors == [] and len(found.warnings) == 2
    assert all("kept one by one" in str(warning) for warning in found.warnings)


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 100


@pytest.mark.parametrize(
    ("changes", "key"), MUTANTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_mutant(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(DeepSpeedConfigError) as caught:
        DeepSpeedConfig(mutated(changes))
    assert key in str(caught.value)
    written = {dotted for dotted, value in changes.items() if value is not DROP}
    wrong = [problem for problem in caught.value.problems if key in str(problem)]
    assert wrong and len(caught.value.problems) <= max(1, len(written)) + 1
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, AssertionError)


def test_all_mutations_at_once() -> None:
    """One mistake hides no other."""
    several = {
        "graident_clipping": 1.0,
        "gradient_clipping": DROP,
        "zero_optimization.stage": 7,
        "zero_optimization.reduce_bucket_size": "big",
        "fp16.loss_scal": 1,
        "checkpoint.tag_validation": "Maybe",
        "optimizer.type": "AdmW",
        "train_micro_batch_size_per_gpu": 5,
        "fp16.enabled": True,
    }
    found = {problem.key for problem in look_at(mutated(several)).errors}
    assert found == {
        "graident_clipping",
        "zero_optimization.stage",
        "zero_optimization.reduce_bucket_size",
        "fp16.loss_scal",
        "checkpoint.tag_validation",
        "optimizer.type",
        "train_batch_size",
        "bf16.enabled",
    }


def misspellings(word: str) -> set[str]:
    """Everything at Damerau-Levenshtein distance 1, with a few letters for those that come in."""
    cuts = [(word[:i], word[i:]) for i in range(len(word) + 1)]
    letters = "aeqx_"
    found = {left + right[1:] for left, right in cuts if right}
    found |= {left + right[1] + right[0] + right[2:] for left, right in cuts if len(right) > 1}
    found |= {left + letter + right[1:] for left, right in cuts if right for letter in letters}
    found |= {left + letter + right for left, right in cuts for letter in letters}
    return {key for key in found if key and key[0] in string.ascii_letters} - {word}


SECTIONS = [((), TrainingConfig)] + [
    ((name,), keys_of(TrainingConfig)[name].section)
    for name in (
        "zero_optimization",
        "fp16",
        "bf16",
        "tensorboard",
        "compile",
        "checkpoint",
        "activation_checkpointing",
    )
]


@pytest.mark.parametrize(
    ("path", "model"), SECTIONS, ids=lambda value: ".".join(value) if isinstance(value, tuple) else ""
)
def test_every_key_misspelt_by_one(path: tuple[str, ...], model: Any) -> None:
    """All keys of a section, every misspelling at distance 1: all are caught, with the right suggestion."""
    known = list(keys_of(model))
    checked = 0
    for name, field in model.model_fields.items():
        spelling = documented_name(name, field)
        for wrong in itertools.islice(sorted(misspellings(spelling)), 0, None, 7):
            rivals = [
                key for key in known if keys_of(model)[key].name != name and distance(wrong, key, 1) <= 1
            ]
            if wrong in known or rivals or len(spelling) < 3:
                continue
            config: dict[str, Any] = {wrong: None}
            for part in reversed(path):
                config = {part: config}
            source = read_config(
                {"train_micro_batch_size_per_gpu": 1, **config} if spelling[:5] != "train" else config
            )
            errors = [
                problem for problem in analyse(source, None).errors if problem.key == ".".join((*path, wrong))
            ]
            assert errors, f"{wrong} for {spelling} went through"
            meant = [f"'{'.'.join((*path, known_as))}'" for known_as in {spelling, name}]
            assert any(text in errors[0].message for text in meant), f"{wrong}: {errors[0].message}"
            checked += 1
    assert checked > 10


def test_unknown_top_level_keys_far_away_are_one_warning_each() -> None:
    found = look_at(
        GOOD | {"my_experiment": "a", "reduce_bucket_size": 5, "zero_optimization.stage": 3, "_note": "x"}
    )
    assert not found.errors
    assert len(found.warnings) == 2
    assert "'my_experiment' is unknown and ignored" in found.warnings[0]
    assert "zero_optimization.reduce_bucket_size" in found.warnings[1]


def test_a_near_key_beside_the_right_one_is_a_warning() -> None:
    found = look_at(GOOD | {"gradient_clippings": 2.0})
    assert not found.errors and "gradient_clippings" in found.warnings[0]


def test_short_keys_need_distance_one() -> None:
    assert not look_at({"train_batch_size": 8, "fp8": {}, "ampere": {}}).errors
    assert look_at({"train_batch_size": 8, "apm": {}}).errors


def test_loss_scaling_under_fp8_is_a_clients_and_ignored() -> None:
    scaling = {"enabled": True, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
    found = look_at({"train_batch_size": 8, "fp8": scaling})
    assert not found.errors and found.config is not None and not found.config.fp8.enabled
    assert "'fp8' is ignored" in found.warnings[0] and "hysteresis" in found.warnings[0]
    mixed = look_at({"train_batch_size": 8, "fp8": {**scaling, "emulate": True}})
    assert [error.key for error in mixed.errors] == [f"fp8.{key}" for key in list(scaling)[1:]]


@pytest.mark.parametrize(
    "name", ["optimizer", "checkpoint", "aio", "activation_checkpointing", "elasticity", "flops_profiler"]
)
def test_lenient_sections_note_far_away_keys(name: str) -> None:
    assert issubclass(keys_of(TrainingConfig)[name].section, LenientConfigModel)  # type: ignore[arg-type]
    found = look_at({"train_batch_size": 8, name: {"something_else_entirely": 1}})
    assert not found.errors and f"{name}.something_else_entirely" in found.warnings[0]


def test_strict_sections_refuse_far_away_keys_and_list_what_they_know() -> None:
    found = look_at({"train_batch_size": 8, "bf16": {"something_else_entirely": 1}})
    assert [problem.key for problem in found.errors] == ["bf16.something_else_entirely"]
    assert "immediate_grad_update" in found.errors[0].message


def test_line_numbers(tmp_path: Any) -> None:
    file = tmp_path / "c.json"
    file.write_text(
        '{\n "train_batch_size": 8,\n "bf16": {\n  "enabled": true,\n  "enabeld": 1\n },\n "fp61": {}\n}'
    )
    with pytest.raises(DeepSpeedConfigError) as caught:
        DeepSpeedConfig(file)
    assert [(problem.key, problem.line) for problem in caught.value.problems] == [
        ("bf16.enabeld", 5),
        ("fp61", 7),
    ]
    assert f"bf16.enabeld ({file}:5:3)" in str(caught.value)


def test_settings_without_effect_are_warnings() -> None:
    found = look_at(mutated({"torch_autocast": {"enabled": True}, "vocabulary_size": 50257}))
    assert not found.errors and len(found.warnings) == 1 and "vocabulary_size" in found.warnings[0]
    found = look_at(mutated({"zero_optimization.offload_param": {"device": "cpu"}}))
    assert not found.errors and "offload_param' has no effect at stage 2" in found.warnings[0]


def test_a_misspelt_key_that_published_configs_carry_is_ignored_with_its_default() -> None:
    found = look_at(mutated({"train_micro_batch_size_per_gp": 1}))  # as a released client writes it
    assert not found.errors and "did you mean 'train_micro_batch_size_per_gpu'?" in found.warnings[0]
    found = look_at(mutated({"grandient_accumulation_steps": 1}))
    assert not found.errors and "grandient_accumulation_steps" in found.warnings[0]
    found = look_at(mutated({"grandient_accumulation_steps": 4}))
    assert len(found.errors) == 1
