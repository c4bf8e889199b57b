"""The transformer layer for training against the layer of Transformers' BERT: forward and backward of one layer.

Contenders have the same weights and input, and take turns in one process. ``eager`` and ``sdpa`` are the attention
implementations of Transformers; ``compiled`` is torch.compile of the second and of ours. Without dropout outputs and
gradients are compared as well: the largest difference, as a share of the largest number.

    python benchmarks/transformer_layer.py --save cpu
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from report import Report, common_arguments

sys.path.insert(0, str(Path(__file__).parents[1]))

Run = Callable[[], tuple[Tensor, ...]]


def models(arguments: argparse.Namespace, ratio: float) -> dict[str, nn.Module]:
    """Encoders of one layer by name."""
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer, BertModel

    from deepspeed.module_inject.inject import module_inject

    made: dict[str, nn.Module] = {}
    for name in ("eager", "sdpa", "ours"):
        config = BertConfig(
            vocab_size=64,
            hidden_size=arguments.hidden,
            intermediate_size=4 * arguments.hidden,
            num_hidden_layers=1,
            num_attention_heads=arguments.heads,
            hidden_dropout_prob=ratio,
            attention_probs_dropout_prob=ratio,
            attn_implementation="sdpa" if name == "ours" else name,
        )
        torch.manual_seed(0)
        model = BertModel(config, add_pooling_layer=False).train()
        if name == "ours":
            module_inject(BertLayer, model, config, arguments.batch, 512, 1, False, False)
        made[name] = model.encoder.layer[0]
    return made


def run_of(layer: Callable[..., Any], of: list[Tensor], x: Tensor, grad: Tensor) -> Run:
    def run() -> tuple[Tensor, ...]:
        out = layer(x, None)
        out = out[0] if isinstance(out, tuple) else out
        return out.detach(), *torch.autograd.grad(out, of, grad)

    return run


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def measure(arguments: argparse.Namespace, report: Report, tokens: int, ratio: float) -> None:
    layers = models(arguments, ratio)
    x = torch.randn(arguments.batch, tokens, arguments.hidden, requires_grad=True)
    grad = torch.randn_like(x)
    callables: dict[str, Callable[..., Any]] = dict(layers)
    if not arguments.no_compile:
        for name in ("sdpa", "ours"):
            torch._dynamo.reset()
            callables[f"{name}, compiled"] = torch.compile(layers[name])
    runs: dict[str, Run] = {}
    for name, layer in callables.items():
        of = [x, *layers[name.split(",")[0]].parameters()]
        runs[name] = run_of(layer, of, x, grad)
    times: dict[str, list[float]] = {name: [] for name in runs}
    results: dict[str, tuple[Tensor, ...]] = {}
    for number in range(arguments.rounds + 2):  # the first compiles, the second warms up
        for name, run in runs.items():
            start = time.perf_counter()
            results[name] = run()
            if number > 1:
                times[name].append(time.perf_counter() - start)
    found = {name: median(values) * 1e3 for name, values in times.items()}
    title = f"{arguments.batch} x {tokens} tokens, dropout {ratio}"
    report.data[title] = times
    rows = []
    for name, value in found.items():
        equal = ""
        if ratio == 0:
            equal = f"{max(apart(a, b) for a, b in zip(results[name][:2], results['eager'][:2], strict=True)):.1e}"
        rows.append(
            [name, f"{value:.1f}", f"{found['eager'] / value:.2f}", f"{found['sdpa'] / value:.2f}", equal]
        )
    report.table(title, ["", "ms", "x eager", "x sdpa", "apart from eager"], rows)


def main() -> None:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.1, 0.0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.hidden, arguments.heads, arguments.tokens, arguments.rounds = 64, 4, [32], 3
        arguments.no_compile = True
    torch.set_num_threads(arguments.threads)
    report = Report("transformer_layer", arguments)
    for tokens in arguments.tokens:
        for ratio in arguments.dropout:
            measure(arguments, report, tokens, ratio)
    report.save()


if __name__ == "__main__":
    main()
