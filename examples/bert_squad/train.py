r"""BERT on questions in SQuAD's form: the passage of a text that answers is found by its first and last token.

    python train.py
    python train.py --attention sparse --length 512
    deepspeed --num_gpus 2 train.py --pretrained out/bert

The encoder is that of examples/bert_pretraining, with its kernels; `--pretrained` begins with its checkpoint. The
questions are made from local text, or read from files of SQuAD's form (`--questions FOLDER`, with train.json and
dev.json). With `--attention sparse` the same weights attend to blocks only.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "bert_pretraining"), str(HERE.parent / "pretrain_gpt")]

import data  # noqa: E402
from bert import Bert  # noqa: E402
from questions import Question, Window, make, read, scores, stacked, windows  # noqa: E402

import deepspeed  # noqa: E402
from deepspeed import DeepSpeedTransformerLayer  # noqa: E402
from deepspeed import comm as dist  # noqa: E402
from deepspeed.ops.sparse_attention import FixedSparsityConfig, SparseSelfAttention  # noqa: E402
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint  # noqa: E402

LONGEST_ANSWER = 20  # tokens


class SparseLayer(nn.Module):
    """A layer of the kernels whose tokens attend to blocks: their own window, and one block of each other window."""

    attn_qkvw: nn.Parameter
    attn_qkvb: nn.Parameter
    attn_ow: nn.Parameter
    attn_ob: nn.Parameter
    attn_nw: nn.Parameter
    attn_nb: nn.Parameter
    inter_w: nn.Parameter
    inter_b: nn.Parameter
    output_w: nn.Parameter
    output_b: nn.Parameter
    norm_w: nn.Parameter
    norm_b: nn.Parameter

    def __init__(self, given: DeepSpeedTransformerLayer, longest: int) -> None:
        super().__init__()
        self.config = given.config
        for name, parameter in given.named_parameters():
            self.register_parameter(name, parameter)
        pattern = FixedSparsityConfig(given.config.heads, block=16, num_local_blocks=4)
        self.attention = SparseSelfAttention(pattern, key_padding_mask_mode="add", max_seq_length=longest)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        config = self.config
        fused = functional.linear(x, self.attn_qkvw, self.attn_qkvb).unflatten(-1, (3, config.heads, -1))
        query, key, value = fused.permute(2, 0, 3, 1, 4)
        context = self.attention(query, key, value, key_padding_mask=mask).transpose(1, 2).flatten(2)
        x = self.added(x, functional.linear(context, self.attn_ow, self.attn_ob), self.attn_nw, self.attn_nb)
        inner = functional.gelu(functional.linear(x, self.inter_w, self.inter_b))
        return self.added(x, functional.linear(inner, self.output_w, self.output_b), self.norm_w, self.norm_b)

    def added(self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        total = residual + functional.dropout(x, self.config.hidden_dropout_ratio, self.training)
        return functional.layer_norm(total, weight.shape, weight, bias, self.config.layer_norm_eps)


class Reader(nn.Module):
    """BERT with two scores for each token: of being the first of the answer, and the last."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        sizes = copy.copy(options)
        sizes.layers_of, sizes.lengths = "deepspeed", [max(options.length, options.positions)]
        self.bert = Bert(sizes)
        if options.pretrained:
            self.bert.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(str(options.pretrained)))
        if options.attention == "sparse":
            self.bert.layers = nn.ModuleList(SparseLayer(each, options.length) for each in self.bert.layers)
        for unused in (self.bert.transform, self.bert.order):  # the heads of pre-training
            unused.requires_grad_(False)
        self.bert.bias.requires_grad_(False)
        self.ends = nn.Linear(options.width, 2)

    def forward(self, ids: Tensor, segments: Tensor, mask: Tensor) -> Tensor:
        """Scores [batch, 2, length]."""
        scored = self.ends(self.bert.hidden(ids, segments, mask)).transpose(1, 2)
        return scored.masked_fill(segments[:, None] == 0, -10_000.0) + mask[:, 0]  # in the passage


def loss_of(scored: Tensor, spans: Tensor) -> Tensor:
    return functional.cross_entropy(scored.flatten(0, 1), spans.flatten())


def best(scored: Tensor, window: Window) -> tuple[float, int, int]:
    """Score, first and last token of the best answer in the window's passage, which is not too long."""
    places = slice(window.first, window.length - 1)
    first, last = scored[0, places], scored[1, places]
    both = first[:, None] + last[None, :]
    allowed = torch.ones_like(both).triu().tril(LONGEST_ANSWER - 1).bool()
    score, place = both.masked_fill(~allowed, -torch.inf).flatten().max(dim=0)
    return score.item(), *divmod(place.item(), len(last))


@torch.no_grad()
def answers(
    engine: Any, given: Sequence[Window], questions: Sequence[Question], batch: int
) -> dict[int, str]:
    """The best answer of all windows of each question."""
    engine.eval()
    found: dict[int, tuple[float, str]] = {}
    for begin in range(0, len(given), batch):
        chosen = given[begin : begin + batch]
        *inputs, _ = (each.to(engine.device) for each in stacked(chosen))
        for window, scored in zip(chosen, engine(*inputs).float().cpu(), strict=True):
            score, first, last = best(scored, window)
            text = questions[window.question].passage[window.offsets[first][0] : window.offsets[last][1]]
            if window.question not in found or score > found[window.question][0]:
                found[window.question] = score, text
    engine.train()
    return {number: text for number, (_, text) in found.items()}


def settings(options: argparse.Namespace) -> dict[str, Any]:
    rate = {"warmup_max_lr": options.lr, "warmup_num_steps": max(options.steps // 10, 2)}
    return {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": options.lr, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupDecayLR", "params": {**rate, "total_num_steps": options.steps + 1}},
        "zero_optimization": {"stage": options.stage},
    }


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attention", default="dense", choices=["dense", "sparse"])
    parser.add_argument(
        "--pretrained", type=Path, help="checkpoint of examples/bert_pretraining of the same sizes"
    )
    parser.add_argument("--length", type=int, default=192, help="of question and passage, in tokens")
    parser.add_argument(
        "--positions", type=int, default=256, help="of the encoder at least, as in pre-training"
    )
    parser.add_argument("--stride", type=int, default=96, help="tokens between windows of one passage")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16, help="questions of a step and rank")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--stage", type=int, default=1, choices=range(4))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--evaluated", type=int, default=500, help="questions, of those that are held out")
    parser.add_argument("--questions", type=Path, default=HERE / "out/questions", help="made if missing")
    parser.add_argument(
        "--text", type=Path, default=HERE.parent / "pretrain_gpt/out/text", help="made if missing"
    )
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[tuple[float, float]]:
    """Exact match and F1, before and after training."""
    options = parse_arguments(argv)
    deepspeed.init_distributed(auto_mpi_discovery=False)
    if dist.get_rank() == 0:
        if not (options.text / "tokens.npz").exists():
            data.make(options.text)
        if not (options.questions / "dev.json").exists():
            make(options.questions)
    dist.barrier()
    tokenizer = data.load(options.text).tokenizer
    train, dev = (read(options.questions / f"{split}.json") for split in ("train", "dev"))
    dev = dev[:: max(len(dev) // options.evaluated, 1)][: options.evaluated]
    learned = [each for each in windows(train, tokenizer, options.length, options.stride) if each.span]
    held_out = windows(dev, tokenizer, options.length, options.stride)

    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(model=Reader(options), config=settings(options))
    found = [scores(answers(engine, held_out, dev, options.batch), dev)]
    order = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(options.steps):
        chosen = torch.randint(len(learned), (options.batch,), generator=order).tolist()
        *inputs, spans = (each.to(engine.device) for each in stacked([learned[each] for each in chosen]))
        engine.backward(loss_of(engine(*inputs), spans))
        engine.step()
    found.append(scores(answers(engine, held_out, dev, options.batch), dev))
    if dist.get_rank() == 0:
        (exact, f1), (exact_after, f1_after) = found
        print(f"{len(train)} questions, {options.attention} attention, {options.steps} steps", flush=True)
        print(f"exact match {exact:.1f} -> {exact_after:.1f}, F1 {f1:.1f} -> {f1_after:.1f}", flush=True)
    engine.destroy()
    dist.barrier()
    return found


if __name__ == "__main__":
    main()
