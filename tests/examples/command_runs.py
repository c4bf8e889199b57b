"""Which test runs a printed command in a short form; or why none does.

A command is known by its *target*: the script or module that it runs, `ds TOOL`, or the program. A test counts for
the options that its file names, so that a command that is printed with another option needs another run.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.examples.printed_commands import READERS_SCRIPTS, Command, is_quick
from tests.tools.launcher.programs import REPOSITORY

_QUICK = "tests/benchmarks/test_quick.py::test_quick_form_prints_its_table"
_WITH_CLIENTS = "tests/benchmarks/test_quick.py::test_quick_form_with_a_client_prints_its_table"
_CLIENTS = "tests/examples/test_clients.py::"
_LAUNCH, _HOSTS = "tests/tools/launcher/test_launch.py::", "tests/tools/launcher/test_several.py::"
_COMPRESSION = "tests/examples/test_compression.py::"

RUN_BY: dict[str, list[str]] = {
    # ---- examples: their main function in this process or their script in others, with small sizes
    **{
        f"examples/{name}/train.py": [_CLIENTS + "test_short_form"]
        for name in "accelerate_loop dpo_trl hf_trainer lightning_module lora_zero3".split()
        + "long_sequence parallel_axes qlora sparse_attention".split()
    },
    "examples/autotuning/train.py": [
        "tests/examples/test_autotuning.py::test_the_script_trains_with_a_config_and_a_batch_of_the_tuner"
    ],
    "examples/bert_pretraining/train.py": ["tests/examples/test_bert_pretraining.py::test_both_phases"],
    "examples/bert_squad/train.py": [
        "tests/examples/test_bert_squad.py::test_it_learns_with_both_kinds_of_attention",
        "tests/examples/test_bert_squad.py::test_it_begins_with_a_checkpoint_of_pre_training",
    ],
    "examples/cifar/train.py": [
        "tests/examples/test_cifar.py::test_it_learns",
        "tests/examples/test_cifar.py::test_original_files",
    ],
    "examples/clusters/ray/train.py": [
        "tests/examples/test_ray.py::test_a_worker_is_lost_and_training_goes_on"
    ],
    "examples/compression/from_config.py": [_COMPRESSION + "test_techniques_of_the_config"],
    "examples/compression/moq.py": [_COMPRESSION + "test_moq"],
    "examples/compression/xtc.py": [_COMPRESSION + "test_extreme_compression"],
    "examples/compression/zeroquant.py": [_COMPRESSION + "test_zeroquant"],
    "examples/data_efficiency/by_metric.py": [
        "tests/examples/test_data_efficiency.py::test_a_curriculum_by_a_metric"
    ],
    "examples/data_efficiency/train.py": ["tests/examples/test_data_efficiency.py::test_the_short_form"],
    "examples/deepnvme/files.py": ["tests/examples/test_deepnvme.py::test_tensors_and_files"],
    "examples/elastic/train.py": ["tests/examples/test_elastic.py::test_the_same_command_begins_and_goes_on"],
    "examples/flops_profiler/alexnet.py": ["tests/examples/test_flops_profiler.py::test_alexnet"],
    "examples/flops_profiler/bert.py": ["tests/examples/test_flops_profiler.py::test_bert_large"],
    "examples/gan/train.py": ["tests/examples/test_gan.py::test_engines_train_as_torch_does"],
    "examples/generate_text/generate.py": [_CLIENTS + "test_generate_text"],
    "examples/lr_tuning/train.py": ["tests/examples/test_lr_tuning.py::test_limits_and_cycle"],
    "examples/megatron_3d/train.py": ["tests/examples/test_megatron_3d.py::test_it_goes_on_with_fewer_parts"],
    "examples/moe_gpt/compare.py": ["tests/examples/test_moe_gpt.py::test_against_the_dense_model"],
    "examples/moe_gpt/train.py": [
        "tests/examples/test_moe_gpt.py::test_printed_teacher_and_student",
        "tests/examples/test_moe_gpt.py::test_teacher_and_student",
    ],
    "examples/pipeline/train.py": ["tests/examples/test_pipeline.py::test_every_schedule_learns_the_same"],
    "examples/pretrain_gpt/data.py": ["tests/examples/test_pretrain_gpt.py::test_short_demo"],
    "examples/pretrain_gpt/demo.py": ["tests/examples/test_pretrain_gpt.py::test_short_demo"],
    "examples/pretrain_gpt/train.py": [
        "tests/examples/test_pretrain_gpt.py::test_every_stage_and_precision_trains_by_json_alone",
        "tests/examples/test_pretrain_gpt.py::test_a_divided_model_exports_and_writes_text",
    ],
    "examples/recipes/twin.py": ["tests/examples/test_recipes.py::test_twins_learn"],
    "examples/rlhf/train.py": [
        "tests/examples/test_rlhf.py::test_all_steps_and_a_chat",
        "tests/examples/test_rlhf.py::test_flags_on_two_ranks",
        "tests/examples/test_rlhf_ranks.py::test_passes_over_the_data",
    ],
    "examples/slow_links/train.py": ["tests/examples/test_slow_links.py::test_the_short_form_over_a_link"],
    "examples/zero_inference/generate.py": [_CLIENTS + "test_zero_inference"],
    # ---- tools
    "ds bench": [
        "tests/comm/test_benchmark.py::test_the_command_starts_the_ranks",
        "tests/comm/test_benchmark.py::test_options",
    ],
    "ds check": ["tests/examples/test_printed_commands.py::test_printed_commands_are_accepted"],
    "ds diff": ["tests/observe/audit/test_diff.py::"],
    "ds doctor": ["tests/tools/launcher/test_doctor.py::test_machines_of_a_hostfile"],
    "ds init": ["tests/tools/starter/test_init.py::test_what_it_writes_trains_and_resumes"],
    "ds live": ["tests/observe/monitor/test_live.py::test_the_page_and_its_data"],
    "ds plan": [
        "tests/examples/test_printed_commands.py::test_printed_commands_are_accepted",
        "tests/planning/memory/test_command.py::test_table_and_verdict",
        "tests/planning/step_time/test_command.py::test_a_step_on_a_device",
    ],
    "ds report": ["tests/ops/op_builder/test_env_report.py::test_versions_and_machine"],
    "ds serve": ["tests/clients/test_serving.py::"],
    "ds stacks": ["tests/comm/test_hang_watch.py::"],
    "ds top": ["tests/observe/monitor/test_live.py::test_top_once_without_a_terminal"],
    "ds trace": ["tests/observe/profiling/test_timeline.py::"],
    "deepspeed.tools.ds_to_universal": ["tests/checkpoint/test_universal_export.py::"],
    "deepspeed.checkpoint.ds_to_universal": ["tests/checkpoint/test_universal_export.py::"],
    "deepspeed.tools.hf_to_universal": ["tests/checkpoint/test_plain_weights.py::"],
    "deepspeed.checkpoint.foreign.upstream_export": ["tests/checkpoint/test_upstream_export.py::"],
    "deepspeed.tools.launcher.launcher_helper": [_HOSTS + "test_other_launchers_start_the_same_ranks"],
    "deepspeed.tools.launcher.rendezvous": [_LAUNCH + "test_ranks_meet_under_the_launcher"],
    "tools/check_commits.py": [
        "tests/tools/test_check_commits.py::test_a_subject_of_another_form_is_refused"
    ],
    "tools/draw_curves.py": ["tests/tools/test_draw_curves.py::test_two_curves_with_a_legend"],
    "tools/wheel.py": ["tests/tools/test_wheel.py::test_the_wheel_of_the_source_archive_trains_alone"],
    "tools/write_stubs.py": ["tests/tools/test_wheel.py::test_the_wheel_of_the_source_archive_trains_alone"],
    # ---- scripts of the reader's: what starts them
    "deepspeed": [
        _LAUNCH + "test_each_rank_gets_its_environment_and_arguments",
        _LAUNCH + "test_module_without_local_rank",
        _HOSTS + "test_every_machine_gets_its_ranks_and_its_environment",
        _HOSTS + "test_machines_that_are_started_by_hand",
        "tests/tools/launcher/test_arguments.py::",
        "tests/tools/autotuning/test_space.py::",
        "tests/examples/test_first_training.py::test_its_script_can_be_tuned",
    ],
    "torchrun": [
        _LAUNCH + "test_an_engine_trains_under_torchrun_and_under_plain_python",
        "tests/examples/test_from_ddp.py::test_both_scripts_print_the_same_losses",
    ],
    "python": ["tests/examples/test_first_training.py::test_the_tutorial"],
    # ---- benchmarks: their quick forms
    "benchmarks/everything.py": ["tests/benchmarks/test_everything.py::test_a_run_ends_in_a_table"],
    "benchmarks/growth.py": ["tests/benchmarks/test_growth.py::"],
    "benchmarks/claims.py": ["tests/benchmarks/test_claims.py::"],
    "benchmarks/performance.py": [
        "tests/examples/test_readme.py::test_every_number_of_the_pages_is_one_that_a_benchmark_printed"
    ],
    "benchmarks/links.py": ["tests/benchmarks/test_links.py::test_the_command"],
    "benchmarks/nvme.py": ["tests/benchmarks/test_quick.py::test_quick_form_on_a_disk"],
    **{
        f"benchmarks/{name}.py": [_QUICK]
        for name in "adam checkpoint codecs comm_shared_memory compact_adam compiled_stage3".split()
        + "compressed_loss compression going_on offload_budget offload_swap save_stall".split()
        + "counted_claims data_analysis engine_cost expert_products fp_quantizer layer_dropping live".split()
        + "long_sequence moe offload_stalls peer_compression pipeline pipeline_bubbles quantized_base".split()
        + "scale sparse_attention start train_step zero_memory".split()
    },
    **{
        f"benchmarks/{name}.py": [_WITH_CLIENTS]
        for name in "inference quantized_perplexity random_ltd serving soak streamed_weights".split()
        + "tensor_parallel transformer_layer".split()
    },
}

_GPU, _PEER = "needs a GPU", "needs an interpreter with another release, installed from the internet"
_LINK = "measures links between network namespaces for minutes: `test_links.py` tests the links"

NOT_RUN: dict[str, str] = {
    "make": "is what runs the tests, or builds what other tests start from",
    "pip": "downloads",
    "venv": "makes an environment to download into",
    "tools/house.py": "is what `make lint` runs",
    **{
        f"benchmarks/gpu/{name}.py": _GPU
        for name in "attention_kernels kernels lightning_strategy offload train_step".split()
    },
    **{
        f"benchmarks/{name}.py": _PEER
        for name in "before_after deepspeed_chat ppo_step rollouts trainer_step trl_step".split()
    },
    "benchmarks/rlhf_curves.py": "trains for minutes what `test_rlhf_ranks.py` compares in short",
    **{
        f"benchmarks/{name}.py": _LINK
        for name in "domino job_start pipeline_links predicted_steps slow_links".split()
    },
}
"""Targets that no test runs, and why. All are parsed by their programs."""

OPTIONS_NOT_RUN: dict[tuple[str, str], str] = {
    ("benchmarks/", "--save"): "writes into `benchmarks/results`",
    ("benchmarks/", "--peer"): _PEER,
    ("ds bench", "--hostfile"): "needs several machines",
    (
        "ds serve",
        "--tp-size",
    ): "the ranks share the layers as in `test_two_ranks_serve_by_continuous_batching`",
    ("examples/rlhf/train.py", "--model_name_or_path"): "wants a trained model; the default is a small one",
    ("deepspeed.tools.launcher.launcher_helper", "--world_info"): "is made by the launcher",
}
"""Options that no test gives to a target, or to those in a folder, and why."""
PLANS_OF_RECIPES = "tests/examples/test_recipes.py::test_planned_memory_and_time_are_what_the_tool_prints"
"""Runs every `ds plan` of a recipe, with the recipe's config."""


def target_of(command: Command) -> tuple[str, list[str]]:
    """Return what a command runs, and the options that it gives to that."""
    words = shlex.split(re.sub(r"\[([^\]]*)\](?=\s|$)", r"\1", command.text).partition(" | ")[0])
    program, *rest = words
    program = program.rpartition("/bin/")[2]
    if program == "ds" or program.startswith("ds_"):
        return f"ds {rest[0] if program == 'ds' else program[3:]}", _options(rest)
    if program in ("python", "python3"):
        program = "python"
        if rest[0] == "-m":
            return rest[1], _options(rest[2:])
    rest = rest[: rest.index("--")] if "--" in rest and program == "python" else rest
    if program == "deepspeed" and "deepspeed.tools.serve" in rest:
        return "ds serve", _options(rest[rest.index("deepspeed.tools.serve") :])
    for place, word in enumerate(rest):
        if word.endswith(".py") and program in ("python", "deepspeed", "torchrun", "accelerate"):
            for folder in (command.source.parent, Path()):
                if (REPOSITORY / folder / word).exists():
                    return str(folder / word), _options(rest[place + 1 :])
            return (program if word in READERS_SCRIPTS else repr(word)), _options(rest[:place])
    return program, _options(rest)


def _options(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)]


def why_not_run(command: Command) -> str | None:
    """Return what is missing: a test of the command's target, or one that gives it an option. None: nothing."""
    target, options = target_of(command)
    if target in NOT_RUN or is_quick(command):
        return None
    if target not in RUN_BY:
        return f"no test runs {target}: name one in tests/examples/command_runs.py"
    tests = RUN_BY[target]
    if target == "ds plan" and command.source.parent.name == "recipes":
        tests = [PLANS_OF_RECIPES]
        options = []
    if tests[0] in (_QUICK, _WITH_CLIENTS):  # the quick form stands for all sizes and repetitions
        options = []
    text = "".join((REPOSITORY / test.partition("::")[0]).read_text(encoding="utf-8") for test in tests)
    for option in options:
        places = (target, f"{target.partition('/')[0]}/")
        known = any((place, option) in OPTIONS_NOT_RUN for place in places)
        if not known and not re.search(rf"(?<![\w-]){option}(?![\w-])", text):
            return f"no test that runs {target} gives it {option}"
    return None
