# ruff: noqa: E501 (a table of sentences)
"""The headline results of DeepSpeed's documents, each with what this package measured: writes `docs/claims.md`.

    python benchmarks/claims.py            writes the page from the files in `results`
    python benchmarks/claims.py --check    says whether it is up to date, with its exit code

Numbers are cells of saved tables, or groups of a pattern in a saved report; none is typed here. A claim without a number
says what would measure it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from saved import Cell, Found, Ratio, Source, parser_of, reports_of, write_or_check

PAGE = Path(__file__).resolve().parents[1] / "docs" / "claims.md"


@dataclass(frozen=True)
class Claim:
    """A headline, what stands for it here, and how far that carries. ``result`` is formatted with the texts of
    ``numbers``; without numbers it says what is missing."""

    headline: str
    conditions: str
    analog: str
    command: str
    verdict: str
    """``yes``, ``in part``, ``no`` (both with the reason in ``carries``) or ``no number``."""
    result: str
    numbers: tuple[Source, ...]
    carries: str


SLOW = "50M GPT, bf16, 2 hosts x 2 ranks"
SPARSE = "forward and backward, 8 heads of 64"
DECODE = "decoding 48 tokens after 32, 88M Llama, "
RIVALS = "serving_rivals_cpu2_bf16"


def plain(stage: str) -> tuple[Source, ...]:
    title = "model states of one of 64 ranks"
    return tuple(Cell("zero_memory_cpu", title, stage, column) for column in ("x 7.5B", "ds plan", "paper"))


CLAIMS: dict[str, tuple[Claim, ...]] = {
    "Memory": (
        Claim(
            "ZeRO divides the model states by 4, 8, and the number of ranks",
            "7.5B parameters, 64 GPUs, mixed precision: 120, 31.4, 16.6, 1.9 GB",
            "bytes that one rank of 64 holds of a 10M GPT, per parameter, times 7.5B; and `ds plan` for 7.5B",
            "benchmarks/zero_memory.py",
            "yes",
            "{0}, {3}, {6}, {9} GB counted; {1}, {4}, {7}, {10} GB planned",
            (*plain("0"), *plain("1"), *plain("2"), *plain("3")),
            "Allocations of the real engine on a group of 64 of which one rank runs; activations are not in it.",
        ),
        Claim(
            "Models 10 x larger on one device: 13B on one V100 of 32 GB (ZeRO-Offload), beyond it with NVMe (ZeRO-Infinity)",
            "PyTorch fits 1.4B there",
            "a 3.0B model trained under a memory limit that the kernel enforces, states on disk",
            "benchmarks/offload_budget.py",
            "yes",
            "{0} GiB of states trained in {1} GiB of memory",
            (
                Cell("offload_budget_3B_cpu2", "3001M", "model states (2 + 2 + 12 bytes), GiB", ""),
                Cell("offload_budget_3B_cpu2", "3001M", "peak of private memory, GiB", ""),
            ),
            "Memory carries over to any device; seconds do not: the steps of this run are bound by its disk.",
        ),
        Claim(
            "Sequences an order of magnitude longer (sparse attention; later Ulysses and ALST)",
            "10 x longer sequences than dense attention",
            "the longest sequence in a fixed memory: tiles, recomputation, inputs on the host, attention in chunks",
            "benchmarks/long_sequence.py",
            "yes",
            "{0} x plain training ({1} x without moving inputs)",
            (
                Cell("long_sequence_cpu2", "hidden 128", "and attention in chunks", "x plain"),
                Cell("long_sequence_cpu2", "hidden 128", "and tiles", "x plain"),
            ),
            "A narrow model with a large vocabulary, for which logits are most of the memory; wide ones gain less.",
        ),
    ),
    "Slow networks": (
        Claim(
            "1-bit Adam: up to 5 x less communication, up to 3.5 x faster",
            "BERT-Large pre-training on up to 256 GPUs, networks of limited bandwidth; 15 to 20 % of the steps are warm-up",
            "50M GPT, 2 hosts x 2 ranks, 100 Mbit/s, after the warm-up",
            "benchmarks/slow_links.py",
            "yes",
            "{0} x fewer bytes, {1} x faster; loss apart by {2} after 2,000 steps",
            (
                Ratio(
                    Cell("slow_links_50M_100mbit", SLOW, "Adam", "bytes"),
                    Cell("slow_links_50M_100mbit", SLOW, "1-bit Adam", "bytes"),
                ),
                Ratio(
                    Cell("slow_links_50M_100mbit", SLOW, "Adam", "ms/step"),
                    Cell("slow_links_50M_100mbit", SLOW, "1-bit Adam", "ms/step"),
                ),
                Cell("compressed_loss_cpu", "loss, nats", "1-bit Adam", "difference"),
            ),
            "With 15 % of the steps as warm-up the same bytes are 1 / (0.15 + 0.85 / 15.7) = 4.9 x fewer over the run: the "
            "documents' 5 is this bound.",
        ),
        Claim(
            "0/1 Adam: up to 26 x less communication, up to 6.6 x faster",
            "BERT-Large, bandwidth-limited clusters",
            "as above, local steps of 8",
            "benchmarks/slow_links.py",
            "yes",
            "{0} x fewer bytes, {1} x faster; loss apart by {2} after 2,000 steps",
            (
                Ratio(
                    Cell("slow_links_50M_100mbit", SLOW, "Adam", "bytes"),
                    Cell("slow_links_50M_100mbit", SLOW, "0/1 Adam, every 8 steps", "bytes"),
                    0,
                ),
                Ratio(
                    Cell("slow_links_50M_100mbit", SLOW, "Adam", "ms/step"),
                    Cell("slow_links_50M_100mbit", SLOW, "0/1 Adam, every 8 steps", "ms/step"),
                ),
                Cell("compressed_loss_cpu", "loss, nats", "0/1 Adam", "difference"),
            ),
            "Bytes are counted with headers. The loss of so few steps with the interval fixed at 8 is higher; the schedule of "
            "the paper, with which the 2,000 steps ran, begins at 1.",
        ),
        Claim(
            "1-bit LAMB: 4.6 x less communication, up to 2.8 x faster",
            "BERT-Large, batches of 8K to 64K",
            "50M GPT, 2 hosts x 2 ranks, 100 Mbit/s, after the warm-up; bytes over a run with the paper's warm-up of 1,000 of 5,993 steps",
            "benchmarks/slow_links.py",
            "yes",
            "{0} x fewer bytes, {1} x faster, {2} fewer bytes over the run; loss apart by {3} after 2,000 steps",
            (
                Ratio(
                    Cell("slow_links_50M_100mbit_lamb", SLOW, "LAMB", "bytes"),
                    Cell("slow_links_50M_100mbit_lamb", SLOW, "1-bit LAMB", "bytes"),
                ),
                Ratio(
                    Cell("slow_links_50M_100mbit_lamb", SLOW, "LAMB", "ms/step"),
                    Cell("slow_links_50M_100mbit_lamb", SLOW, "1-bit LAMB", "ms/step"),
                ),
                Cell("counted_claims_cpu", "bytes that one of 4 ranks", "1-bit LAMB, a run", "fewer"),
                Cell("compressed_loss_cpu_lamb", "loss, nats", "1-bit LAMB", "difference"),
            ),
            "The documents' 4.6 is the bytes over the run, against 16-bit gradients. A fifth of the 2,000 steps is warm-up; one "
            "seed, a rate of 1e-2 for both.",
        ),
        Claim(
            "ZeRO++: 4 x less communication than ZeRO-3, the same quality",
            "against ZeRO-3",
            "50M GPT, 2 hosts x 2 ranks, 100 Mbit/s; loss after 2,000 steps with qwZ and qgZ",
            "benchmarks/slow_links.py",
            "yes",
            "{0} x fewer bytes, {1} x faster; loss apart by {2}",
            (
                Ratio(
                    Cell("slow_links_50M_100mbit", SLOW, "ZeRO-3", "bytes"),
                    Cell("slow_links_50M_100mbit", SLOW, "ZeRO-3 with ZeRO++", "bytes"),
                ),
                Ratio(
                    Cell("slow_links_50M_100mbit", SLOW, "ZeRO-3", "ms/step"),
                    Cell("slow_links_50M_100mbit", SLOW, "ZeRO-3 with ZeRO++", "ms/step"),
                ),
                Cell("compressed_loss_cpu", "loss, nats", "ZeRO-3, qwZ and qgZ", "difference"),
            ),
            "Bytes between hosts, where the ratio depends on the ranks of a host; three seeds for the loss.",
        ),
        Claim(
            "Pipelines: 2 to 7 x less communication, up to 7 x faster on low bandwidth",
            "clusters with limited network bandwidth",
            "50M GPT, two hosts, 100 Mbit/s, two stages against data parallelism",
            "benchmarks/pipeline_links.py",
            "yes",
            "{0} x as fast, {1} x fewer bytes",
            (
                Cell("pipeline_links_100mbit", "50M GPT", "2 stages, 1f1b", "x data"),
                Ratio(
                    Cell("pipeline_links_100mbit", "50M GPT", "data parallel", "MB"),
                    Cell("pipeline_links_100mbit", "50M GPT", "2 stages, 1f1b", "MB"),
                    0,
                ),
            ),
            "The ratio grows with the model and falls with the tokens of a step.",
        ),
    ),
    "Kernels and attention": (
        Claim(
            "CPU Adam: 5.1 to 6.5 x torch's",
            "AVX-512, 1 to 10B parameters, torch's unfused Adam of its time",
            "AdamW on 100M parameters, one and two threads, against torch's that is not fused",
            "benchmarks/adam.py --plain",
            "yes",
            "{0} x on one thread, {1} x on two, where a step takes {2} of the time of a plain stream over the same bytes",
            (
                Ratio(
                    Cell("adam_plain", "100M parameters, 1 thread, fp32", "torch, not fused", "ms"),
                    Cell("adam_plain", "100M parameters, 1 thread, fp32", "ours", "ms"),
                ),
                Ratio(
                    Cell("adam_plain", "100M parameters, 2 threads, fp32", "torch, not fused", "ms"),
                    Cell("adam_plain", "100M parameters, 2 threads, fp32", "ours", "ms"),
                ),
                Cell("adam_plain", "100M parameters, 2 threads, fp32", "ours", "of the stream"),
            ),
            "The update is bound by memory, so more threads than fill it gain nothing; torch's fused AdamW is as fast.",
        ),
        Claim(
            "Sparse attention: up to 6 x faster than dense, 1.5 to 3 x faster than other sparse kernels",
            "comparable accuracy",
            "forward and backward, 8 heads of 64, blocks of 16, one thread, against dense SDPA",
            "benchmarks/sparse_attention.py",
            "yes",
            "{0} x (fixed, 8,192 tokens), {1} x (BigBird); scores of {2} MiB are not made; forward {3} x FlexAttention (fixed), {4} x (BigBird)",
            (
                Cell("sparse_attention_cpu", SPARSE, ("8192", "fixed"), "gain"),
                Cell("sparse_attention_cpu", SPARSE, ("8192", "bigbird"), "gain"),
                Cell("sparse_attention_cpu", SPARSE, ("8192", "fixed"), "dense scores"),
                Cell(
                    "sparse_attention_flex_cpu",
                    "forward, 8 heads of 64",
                    ("8192", "fixed"),
                    "x FlexAttention",
                ),
                Cell(
                    "sparse_attention_flex_cpu",
                    "forward, 8 heads of 64",
                    ("8192", "bigbird"),
                    "x FlexAttention",
                ),
            ),
            "FlexAttention is the one other sparse kernel that runs on a CPU, without backward; the ratios to it were taken beside other work, hence their ranges. Accuracy: examples/bert_squad, dense and sparse.",
        ),
        Claim(
            "Transformer kernels: BERT-Large pre-trained in 44 minutes",
            "1,024 V100",
            "one layer of BERT with dropout, forward and backward, against Transformers' own",
            "benchmarks/transformer_layer.py",
            "in part",
            "{0} x as fast (128 tokens), {1} x (512)",
            (
                Cell("transformer_layer_cpu", "4 x 128 tokens, dropout 0.1", "ours", "x eager"),
                Cell("transformer_layer_cpu", "4 x 512 tokens, dropout 0.1", "ours", "x eager"),
            ),
            "The ratio of a layer; a whole pre-training is out of reach of a CPU. On GPUs: benchmarks/gpu/kernels.py.",
        ),
        Claim(
            "Over 30 TFLOPS per GPU with offloaded states; 40 for a model of 10B",
            "V100",
            "the part of a step that waits for the host, beside a simulated device",
            "benchmarks/offload_stalls.py",
            "in part",
            "{0} of the step with plain offload, {1} with ZenFlow",
            (
                Cell("offload_stalls_shared", "48M parameters", "plain offload", "of the step"),
                Cell("offload_stalls_shared", "48M parameters", "ZenFlow", "of the step"),
            ),
            "The same share of a GPU's peak is what benchmarks/gpu/offload.py and benchmarks/gpu/train_step.py would show.",
        ),
    ),
    "Efficient training": (
        Claim(
            "Data efficiency: up to 2 x less data and time at the same quality, or better quality",
            "GPT-3 and BERT pre-training, GPT and ViT fine-tuning; curriculum with random-LTD",
            "GPT of 6 layers, three seeds, curriculum with random-LTD, operations counted",
            "examples/data_efficiency/train.py",
            "yes",
            "{0} of the operations, loss lower by {1} nats",
            (
                Found("data_efficiency_text", r"mean +300 .* (0\.\d+) +-"),
                Found("data_efficiency_text", r"mean +300 .* -(0\.\d+)\n"),
            ),
            "A better loss for less work; a plain run of as much work with smaller batches comes near (in the file).",
        ),
        Claim(
            "Curriculum learning: 3.3 x faster pre-training of GPT-2 with larger batches and rates",
            "8 x the batch, 4 x the rate",
            "GPT of 4 layers, curriculum alone with 65 % of the operations, three seeds",
            "examples/data_efficiency/train.py",
            "no",
            "loss higher by {0} nats with {1} of the operations",
            (
                Found("curriculum_alone_text", r"mean: loss \+(0\.\d+)"),
                Found("curriculum_alone_text", r"with (0\.\d+) of the operations\n$"),
            ),
            "No gain here: 200 steps of a GPT of 4 layers with 128 tokens are too few for the instability that the curriculum "
            "prevents, and the documents' factor comes from the batch and the rate that it allows, which were not changed. With "
            "random-LTD there is one, in the row above.",
        ),
        Claim(
            "Progressive layer dropping: 2.5 to 2.8 x faster convergence, 24 % less time per sample",
            "BERT pre-training",
            "GPT of 8 layers, theta 0.5, three seeds, operations counted",
            "benchmarks/layer_dropping.py",
            "in part",
            "{0} of the work; held-out loss {1} with 20 passes over the text, {2} with 34",
            (
                Cell("layer_dropping_some_passes", "loss, nats", "layers dropped", "work"),
                Cell("layer_dropping_some_passes", "loss, nats", "layers dropped", "difference"),
                Cell("layer_dropping_many_passes", "loss, nats", "layers dropped", "difference"),
            ),
            "Only where text is seen often: with 14 passes the loss is 1.3 % higher, and stopping early (fewer steps for the "
            "same work) does better with 20. The documents' factor includes the larger learning rate that their architecture allows.",
        ),
        Claim(
            "Mixture of experts: up to 5 x cheaper training at the same quality",
            "auto-regressive language models",
            "a GPT with experts in every other layer against the dense one, three seeds",
            "examples/moe_gpt/compare.py",
            "in part",
            "the dense model's loss in {0}, {1}, {2} x fewer steps",
            tuple(Found("moe_text", rf"seed {seed}: .* in ([\d.]+) x fewer steps") for seed in range(3)),
            "8 small experts cannot show 128 large ones; with a wider model and fewer steps there was no gain (in the "
            "file). The step costs 1.03 to 1.06 x a dense one with the same operations (benchmarks/moe.py).",
        ),
        Claim(
            "PR-MoE: up to 3 x fewer parameters; mixture of students: 3.7 x smaller",
            "against a standard mixture of experts",
            "parameters of the documents' models, built of this package's layers on the meta device",
            "benchmarks/counted_claims.py",
            "in part",
            "350M: PR-MoE {0} fewer, its student {1}; 1.3B: {2} and {3}",
            tuple(
                Cell("counted_claims_cpu", "parameters in billions", row, "fewer")
                for row in (
                    "350M + PR-MoE-32/64",
                    "350M + PR-MoE-32/64, 21 layers (MoS)",
                    "1.3B + PR-MoE-64/128",
                    "1.3B + PR-MoE-64/128, 21 layers (MoS)",
                )
            ),
            "The sizes; that the losses are equal was not measured (examples/moe_gpt trains and distils both).",
        ),
        Claim(
            "Compression: extreme compression (XTC) to 50 x smaller, 8 bits without loss",
            "BERT, binary weights and fewer layers",
            "a classifier of text, students taught for 150 steps (binary: 300)",
            "benchmarks/compression.py --only quality",
            "in part",
            "{0} smaller at {1} of the teacher's accuracy (binary, half of the layers); 8 bits: {2}",
            (
                Cell("compression_quality_cpu", "accuracy", "half of the layers, binary", "smaller"),
                Cell("compression_quality_cpu", "accuracy", "half of the layers, binary", "of teacher"),
                Cell("compression_quality_cpu", "accuracy", "8-bit weights and activations", "of teacher"),
            ),
            "32 (bits) x 2 (layers) x what stays dense: embeddings are binary too, norms and biases are not, and they are a "
            "larger share of a small model.",
        ),
        Claim(
            "Learning-rate range test: the boundaries with less than 2 % of the data",
            "Megatron GPT-2",
            "a network that predicts bytes: 1Cycle between the limits that the test found, and its lower limit alone",
            "examples/lr_tuning/train.py",
            "in part",
            "with {0} steps before a training of 3,000 (2.7 %) the cycle ends at a loss of {1}, the lower limit at {2}; with {3} (1.8 %) at "
            "{4} and {5}",
            tuple(
                Found("lr_range_text", pattern.format(steps=steps))
                for steps in (80, 55)
                for pattern in (
                    r"range test: ({steps}) steps",
                    r"range test: {steps} steps.*\n1Cycle: loss ([\d.]+)",
                    r"range test: {steps} steps.*\n.*\nWarmupLR: loss ([\d.]+)",
                )
            ),
            "The longer test finds limits that pay; the shorter one ends before the loss grows clearly, and its upper limit is too "
            "high. A training of Megatron's length has many more steps, of which as many are less than 2 %.",
        ),
    ),
    "Inference and RLHF": (
        Claim(
            "Inference kernels: 1.9 to 4.4 x lower latency, 3.4 to 6.2 x throughput",
            "BERT, GPT-2 and GPT-Neo against PyTorch, FP16",
            "decoding an 88M Llama against Transformers' generate, two threads",
            "benchmarks/inference.py",
            "yes",
            "batch 1: {0} x (fp32), {1} x (bf16), {2} x (int8); batch 16: {3} x (bf16)",
            (
                Cell("inference_decode_zen4", DECODE + "fp32", "kernels, fp32", "to Transformers"),
                Cell("inference_decode_zen4", DECODE + "bf16", "kernels, bf16", "to Transformers"),
                Cell("inference_decode_zen4", DECODE + "int8", "kernels, int8", "to Transformers"),
                Cell("inference_decode_zen4", DECODE + "bf16", ("kernels, bf16", "16"), "to Transformers"),
            ),
            "At batch 1 it runs at the stream of memory, which is the limit on any device.",
        ),
        Claim(
            "FastGen: higher throughput than other serving systems",
            "large language models on A100s",
            "88M Llama, bf16, against vLLM's server for CPUs; 64 mixed requests against Transformers' continuous batches (benchmarks/inference.py)",
            "benchmarks/serving.py --vllm PYTHON",
            "yes",
            "{0} x vLLM's tokens per second with 16 clients, {1} x with one; at 8 requests per second {2} answered in "
            "time (vLLM: {3}); {4} x Transformers' continuous batches, {5} x its static ones; a short prompt waits "
            "{6} ms under load (idle: {7})",
            (
                Ratio(
                    Cell(RIVALS, "88M, bf16, prompts of 48", "16 clients, ours", "tokens/s"),
                    Cell(RIVALS, "88M, bf16, prompts of 48", "16 clients, vLLM", "tokens/s"),
                ),
                Ratio(
                    Cell(RIVALS, "88M, bf16, prompts of 48", "1 clients, ours", "tokens/s"),
                    Cell(RIVALS, "88M, bf16, prompts of 48", "1 clients, vLLM", "tokens/s"),
                ),
                Cell(RIVALS, "88M, bf16, 2 x", "8/s, ours", "good"),
                Cell(RIVALS, "88M, bf16, 2 x", "8/s, vLLM", "good"),
                Cell("inference_serving", "64 requests", "Transformers, continuous batches", "to ours"),
                Cell("inference_serving", "64 requests", "Transformers, static batches of 16", "to ours"),
                Cell(
                    "inference_first_token",
                    "time to the first token",
                    "under load, 64 tokens per forward",
                    "32 tokens",
                ),
                Cell("inference_first_token", "time to the first token", "idle machine", "32 tokens"),
            ),
            "On a CPU with AVX-512 BF16. In int8 vLLM, which rounds activations too, has the shorter first token "
            "(serving_rivals_cpu2_int8.txt); ours keeps them in 16 bits.",
        ),
        Claim(
            "Mixture-of-experts inference: 7.3 x better latency and cost; 4.5 x faster and 9 x cheaper than dense models of equal quality; Mixtral 2.4 x",
            "prompts of 1,200 tokens, 60 generated",
            "parameters that a token passes, in the documents' pair of equal quality",
            "benchmarks/counted_claims.py",
            "in part",
            "{0} billion with 1.3B + MoE-128, {1} in the dense 6.7B: {2} x fewer",
            (
                Cell("counted_claims_cpu", "parameters in billions", "1.3B + MoE-128", "of a token"),
                Cell("counted_claims_cpu", "parameters in billions", "dense 6.7B", "of a token"),
                Ratio(
                    Cell("counted_claims_cpu", "parameters in billions", "dense 6.7B", "of a token"),
                    Cell("counted_claims_cpu", "parameters in billions", "1.3B + MoE-128", "of a token"),
                ),
            ),
            "The bound on what a mixture saves in operations, and in bytes of weights at batch 1; latency and cost were not measured.",
        ),
        Claim(
            "DeepSpeed-Chat: over 15 x faster RLHF than other systems, 10 x on one GPU",
            "against DDP and Colossal-AI",
            "a PPO step with four 15M Llamas on two ranks against TRL under DDP; rollouts against the module's own generate",
            "benchmarks/ppo_step.py",
            "in part",
            "{0} x TRL (stage 2), {1} x (stage 3); rollouts at stage 3 {2} x the module's (bf16: {3} x)",
            (
                Cell("ppo_step_cpu_zen4", "PPO", "ours, stage 2", "x TRL"),
                Cell("ppo_step_cpu_zen4", "PPO", "ours, stage 3", "x TRL"),
                Cell(
                    "rollouts_cpu_zen4",
                    "Llama of 14.7M parameters, fp32",
                    "hybrid engine, stage 3",
                    "x the module",
                ),
                Cell(
                    "rollouts_cpu_zen4",
                    "Llama of 14.7M parameters, bf16",
                    "hybrid engine, stage 3",
                    "x the module",
                ),
            ),
            "The documents' factor is the cost of gathering weights for every token, which a fast link between ranks of one "
            "host hides: the rollouts reach half of the rate at which weights are read once per token.",
        ),
        Claim(
            "ZeRO-Inference: models larger than the memory, from NVMe",
            "one GPU",
            "110M Llama whose weights stay in a file",
            "benchmarks/streamed_weights.py",
            "in part",
            "{0} MB of weights in {1} MB of memory, at {2} of the storage's rate",
            (
                Cell("streamed_weights_shared", "Llama of 110M", "bf16", "streamed"),
                Cell("streamed_weights_shared", "Llama of 110M", "bf16", "own memory"),
                Cell("streamed_weights_shared", "Llama of 110M", "bf16", "of it"),
            ),
            "Bound by the disk, as on a GPU by its link.",
        ),
    ),
    "Scale, files, tools": (
        Claim(
            "Near-linear scaling to hundreds of GPUs; over a trillion parameters",
            "400 GPUs: 15 petaFLOPS; 512 V100: 25 petaFLOPS, 40 % of the peak",
            "what one rank of 8 to 1,024 sends and holds, counted",
            "benchmarks/scale.py",
            "in part",
            "stage 3 sends {0} MB of a 10M model at 8 ranks and {1} MB at 1,024, in {2} collectives",
            (
                Cell("scale_cpu2", "stage 3, 10M", "8", "MB sent"),
                Cell("scale_cpu2", "stage 3, 10M", "1024", "MB sent"),
                Found("scale_cpu2", r"stage 3, 10M(?:.*\n)+?1024 .*?(\d+ all_gather)"),
            ),
            "Counts carry over, times do not: no network of that size was there.",
        ),
        Claim(
            "DeepNVMe: near the peak of the storage",
            "reads and writes of tensors",
            "1 GiB through the handle against fio",
            "benchmarks/nvme.py",
            "yes",
            "reads at {0} GB/s (fio {1}), new files at {2} (fio {3})",
            (
                Cell("nvme_cpu2", "1024 MiB, pinned", ("read", "ours"), "GB/s"),
                Cell("nvme_cpu2", "1024 MiB, pinned", ("read", "fio"), "GB/s"),
                Cell("nvme_cpu2", "1024 MiB, pinned", ("new", "ours"), "GB/s"),
                Cell("nvme_cpu2", "1024 MiB, pinned", ("new", "fio"), "GB/s"),
            ),
            "One virtual disk.",
        ),
        Claim(
            "Elastic training goes on when nodes are lost",
            "no number in the documents",
            "kill -9 of one of four ranks",
            "benchmarks/going_on.py",
            "yes",
            "training again after {0} s, {1} steps lost (stage 3)",
            (
                Cell("going_on_4_ranks", "4 ranks", "3", "seconds still"),
                Cell("going_on_4_ranks", "4 ranks", "3", "steps lost"),
            ),
            "A small state; the time of a large one is that of reading it.",
        ),
        Claim(
            "Autotuning finds a configuration faster than by hand",
            "a search over stages and micro-batches",
            "its choice against every config of a grid, two ranks, limits of memory",
            "benchmarks/autotuning.py",
            "yes",
            "{0} of the best of the grid with 4 GiB, in {1} s",
            (
                Cell("autotuning_10M", "10M GPT", "4 GiB", "ratio"),
                Cell("autotuning_10M", "10M GPT", "4 GiB", "seconds"),
            ),
            "One model on two ranks.",
        ),
    ),
}

HEAD = """# Claims

For anyone who knows DeepSpeed's documents and asks which of their headline results this package reproduces. Each row has
the claim with its conditions, the corresponding measurement here with its command, the result, and how far it supports the
claim. `benchmarks/claims.py` writes this page from the saved reports in `benchmarks/results`, which record commit, date and
machine; no number is typed by hand. No GPU was available: claims that need one name the script in `benchmarks/gpu`, if any.
"""
SHOWN = {
    "yes": "shown",
    "in part": "shown in part",
    "no": "measured and not shown",
    "no number": "not measured",
}


def row_of(claim: Claim) -> str:
    result = claim.result.format(*(source.text() for source in claim.numbers))
    reports = dict.fromkeys(report for source in claim.numbers for report in reports_of(source))
    files = ", ".join(f"`{report}.txt`" for report in reports)
    command = f"`{claim.command}`" if claim.command else ""
    measured = f"{result} ({files})" if files else result
    verdict = f"**{claim.verdict}**" + (f": {claim.carries}" if claim.carries else "")
    cells = (f"{claim.headline} ({claim.conditions})", f"{claim.analog}. {command}", measured, verdict)
    return "| " + " | ".join(cells) + " |"


def page() -> str:
    claims = [claim for section in CLAIMS.values() for claim in section]
    count = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in SHOWN}
    parts = [
        HEAD,
        f"Of {len(claims)} claims "
        + ", ".join(f"{count[v]} are {words}" for v, words in SHOWN.items())
        + ".",
    ]
    for name, section in CLAIMS.items():
        parts += ["", f"## {name}", "", "| claim | here | result | shown? |", "|---|---|---|---|"]
        parts += map(row_of, section)
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    arguments = parser_of(__doc__).parse_args()
    write_or_check(PAGE, lambda _: page(), check=arguments.check)
