"""Every code block, config and command of DeepSpeed's documents: where it is printed, what it should do, and which test
of ours does it.

The documents are no part of this repository, and their code is not copied: a test has its own program with the same
names, calls and keys. Documents: *features* (the overview), *config* (the page of the config's keys), the tutorials by
their subjects, *wiki* (the encyclopedia's article), *article* (the introduction with MoQ and inference).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    document: str
    place: str
    does: str
    test: str
    """File below `tests`, `::`, function."""


CODE = "examples/test_documented_blocks.py"
CONFIGS = "config/test_documents.py"
SECTIONS = f"{CONFIGS}::test_a_printed_section_has_no_problem"


def sections(document: str, *places: str) -> tuple[Block, ...]:
    return tuple(Block(document, place, "is a config without problems", SECTIONS) for place in places)


BLOCKS = (
    # Features
    Block("features", "mixed precision, clipping, clock, profiler, autotuning, sparse attention",
          "are configs without problems", f"{CONFIGS}::test_a_printed_config_has_no_problem"),
    Block("features", "command with a hostfile", "parses", f"{CONFIGS}::test_a_printed_command_parses"),
    Block("features", "the functions of an mpu", "say which ranks are replicas",
          "engine/test_arguments.py::test_mpu_says_which_ranks_are_replicas"),
    Block("features", "initialize, backward, step, add_config_arguments, load_checkpoint, store_checkpoint",
          "train and go on", f"{CODE}::test_the_core_api"),
    # Training overview
    *sections("training overview", "fp16", "activation_checkpointing", "flops_profiler", "autotuning",
              "autotuning 2", "tensorboard, wandb, csv_monitor", "comms_logger", "sparse_attention"),
    Block("training overview", "log_summary", "prints what the ranks sent", f"{CODE}::test_communication_is_summed_up"),
    # Tutorials
    Block("DeepNVMe", "making an aio_handle", "has the printed defaults", f"{CODE}::test_a_handle_as_it_is_printed"),
    Block("DeepNVMe", "making a gds_handle", "works or says what to use instead",
          "ops/aio/test_gds.py::test_refused_with_what_to_use_instead"),
    Block("DeepNVMe", "completion of the handle's names", "lists them", f"{CODE}::test_a_handle_as_it_is_printed"),
    Block("DeepNVMe", "blocking, non-blocking, parallel write, pinned tensor", "write the file",
          f"{CODE}::test_a_tensor_becomes_a_file"),
    Block("DeepNVMe", "a write that races with its tensor", "is safe behind wait()",
          f"{CODE}::test_wait_comes_before_a_change"),
    Block("DeepNVMe", "pinned tensors of a gds_handle", "are pinned and released",
          "ops/aio/test_gds.py::test_pinned_memory"),
    Block("DeepNVMe", "help of the constructor, tuned handle", "takes the printed arguments",
          f"{CODE}::test_a_handle_as_it_is_printed"),
    Block("DeepNVMe", "ds_nvme_tune", "prints the section aio", "tools/nvme/test_tools.py::test_ds_nvme_tune"),
    Block("DeepNVMe", "help of ds_nvme_tune", "has the printed options", f"{CODE}::test_options_of_the_tuner"),
    Block("DeepNVMe", "ds_report", "says which ops there are",
          "ops/op_builder/test_env_report.py::test_every_op_has_a_line_with_status_and_path"),
    Block("DeepNVMe", "warnings of ds_report", "name the remedy",
          "ops/op_builder/test_env_report.py::test_hints_name_the_remedy_and_can_be_hidden"),
    *sections("DeepNVMe", "aio"),
    Block("MoE for NLG", "flags of the standard mixture", "set capacities",
          "examples/test_moe_gpt.py::test_flags_of_capacity"),
    Block("MoE for NLG", "experts by layer, residual", "fit the layers",
          "examples/test_moe_gpt.py::test_numbers_of_experts_fit_the_layers"),
    Block("MoE for NLG", "mixture of students", "learns from a teacher",
          "examples/test_moe_gpt.py::test_teacher_and_student"),
    *sections("learning-rate range test", "scheduler", "OneCycle"),
    Block("learning-rate range test", "the tuning of a large batch", "finds limits and trains within them",
          "examples/test_lr_tuning.py::test_limits_and_cycle"),
    *sections("flops profiler", "flops_profiler 2"),
    Block("flops profiler", "AlexNet", "has its 714 MMACs", "examples/test_flops_profiler.py::test_alexnet"),
    Block("flops profiler", "BERT", "has its MACs", "examples/test_flops_profiler.py::test_bert_large"),
    Block("flops profiler", "training workflow", "profiles one step and trains on",
          f"{CODE}::test_a_training_loop_with_a_profiler"),
    Block("flops profiler", "summary, aggregated and detailed profile", "has the printed lines",
          "observe/profiling/test_flops.py::test_the_documented_summaries"),
    *sections("monitor", "tensorboard, wandb, csv_monitor", "comet 2"),
    Block("monitor", "custom events in a training loop", "write a curve over samples",
          f"{CODE}::test_events_of_ones_own"),
    # The page of keys
    *sections("config", "optimizer", "optimizer 2", "optimizer 3", "optimizer 4", "scheduler 2", "fp16 2", "bf16",
              "amp", "zero_optimization", "offload_param", "offload_optimizer", "aio 2", "autotuning 3",
              "flops_profiler 3", "activation_checkpointing 2", "sparse_attention 2", "data_efficiency",
              "curriculum_learning", "tensorboard", "wandb", "comet", "csv_monitor", "comms_logger 2",
              "compression_training", "compression_training 2", "activation_quantization", "compression_training 3",
              "compression_training: snip_momentum", "compression_training 4", "compression_training 5",
              "compression_training 6", "checkpoint", "data_types"),
    Block("config", "elasticity", "is refused by its words for numbers; with numbers it is accepted",
          f"{CODE}::test_the_printed_section_of_elasticity"),
    # The article and the wiki
    Block("article", "MoQ and init_inference", "the arguments of both calls are taken",
          f"{CODE}::test_quantized_training_then_inference"),
    Block("wiki", "TrainingArguments", "trains by a config file",
          "examples/test_clients.py::test_short_form"),
    Block("wiki", "initialize and the loop", "trains", f"{CODE}::test_the_core_api"),
    Block("wiki", "configuration example", "is a config without problems",
          f"{CONFIGS}::test_a_printed_config_has_no_problem"),
    Block("wiki", "command with --num_gpus", "parses", f"{CONFIGS}::test_a_printed_command_parses"),
)  # fmt: skip
