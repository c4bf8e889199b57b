r"""A GPT with mixtures of experts on real text: the source of Python's standard library, byte by byte.

    deepspeed --num_gpus 2 train.py --num-experts 4 --moe-expert-parallel-size 2

A pyramid with residual experts (PR-MoE), and a smaller student that learns from it and then without it (MoS):

    deepspeed --num_gpus 2 train.py --num-experts 4 8 --mlp-type residual --save out/teacher
    deepspeed --num_gpus 2 train.py --num-layers 3 --num-experts 8 --mlp-type residual --mos \
        --load-teacher out/teacher --num-layers-teacher 4 --num-experts-teacher 4 8 --mos-stop 200

Every second layer has experts. `--num-experts 1` is the dense model with as many FLOPs per token as `--topk 1`.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepspeed
import deepspeed.comm as dist
from deepspeed.moe.layer import MoE
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

VOCABULARY = 256  # bytes


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--num-layers", type=int, default=4)
    add("--hidden-size", type=int, default=128)
    add("--num-attention-heads", type=int, default=4)
    add("--seq-length", type=int, default=128)
    add("--micro-batch-size", type=int, default=8, help="sequences per rank")
    add("--train-iters", type=int, default=300)
    add("--eval-interval", type=int, default=50)
    add("--lr", type=float, default=2e-3)
    add("--seed", type=int, default=0)
    add("--zero-stage", type=int, default=1, choices=range(4))
    add("--save", type=Path, help="folder for a checkpoint at the end")
    add("--num-experts", type=int, nargs="+", default=[4], help="of all layers with experts, or of each")
    add("--moe-expert-parallel-size", type=int, default=1, help="ranks that share the experts of a layer")
    add("--topk", type=int, default=1, help="experts per token")
    add("--moe-loss-coeff", type=float, default=0.01, help="of the balancing loss")
    add("--moe-train-capacity-factor", type=float, default=1.0)
    add("--moe-eval-capacity-factor", type=float, default=1.0)
    add("--moe-min-capacity", type=int, default=4)
    add("--disable-moe-token-dropping", action="store_true")
    add("--mlp-type", choices=["standard", "residual"], default="standard", help="residual: PR-MoE")
    add("--mos", action="store_true", help="learn from a teacher, too (mixture of students)")
    add("--load-teacher", type=Path, help="its folder of checkpoints")
    add("--num-layers-teacher", type=int)
    add("--hidden-size-teacher", type=int)
    add("--num-experts-teacher", type=int, nargs="+")
    add("--kd-beta-ce", type=float, default=1.0, help="weight of the teacher's distribution in the loss")
    add("--kd-temp", type=float, default=1.0, help="its temperature")
    add("--mos-stop", type=int, help="step from which the student learns alone; default: two thirds")
    add("--local_rank", type=int, default=0, help="set by the launcher")
    arguments = parser.parse_args(argv)
    if arguments.mos and arguments.load_teacher is None:
        parser.error("--mos needs --load-teacher")
    arguments.num_layers_teacher = arguments.num_layers_teacher or arguments.num_layers
    arguments.num_experts_teacher = arguments.num_experts_teacher or arguments.num_experts
    for whose in ("", "-teacher") if arguments.mos else ("",):
        flags = f"--num-layers{whose}", f"--num-experts{whose}"
        layers, experts = (getattr(arguments, flag[2:].replace("-", "_")) for flag in flags)
        if len(experts) not in (1, layers // 2):
            parser.error(
                f"{flags[1]} {' '.join(map(str, experts))}: give one number, or {layers // 2}: one for each layer "
                f"with experts, which is every second of {flags[0]} {layers}"
            )
    return arguments


class Block(nn.Module):
    """``experts``: 0 for a layer without."""

    def __init__(self, hidden: int, experts: int, args: argparse.Namespace) -> None:
        super().__init__()
        self.heads = args.num_attention_heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.mlp: nn.Module = mlp
        if experts > 1:
            self.mlp = MoE(
                hidden,
                mlp,
                experts,
                min(args.moe_expert_parallel_size, experts),
                k=min(args.topk, experts),
                capacity_factor=args.moe_train_capacity_factor,
                eval_capacity_factor=args.moe_eval_capacity_factor,
                min_capacity=args.moe_min_capacity,
                drop_tokens=not args.disable_moe_token_dropping,
                use_residual=args.mlp_type == "residual",
            )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        made = self.mlp(self.norms[1](x))
        output, l_aux = made[:2] if isinstance(made, tuple) else (made, x.new_zeros(()))
        return x + output, l_aux


class GPT(nn.Module):
    """``experts``: of each second layer; one number for all of them."""

    def __init__(self, layers: int, hidden: int, experts: Sequence[int], args: argparse.Namespace) -> None:
        super().__init__()
        mixed = layers // 2
        counts = list(experts) * mixed if len(experts) == 1 else list(experts)
        self.embed, self.place = nn.Embedding(VOCABULARY, hidden), nn.Embedding(args.seq_length, hidden)
        self.blocks = nn.ModuleList(
            Block(hidden, counts[number // 2] if number % 2 else 0, args) for number in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T] -> logits [B, T, 256], and the sum of the balancing losses."""
        x, total = self.embed(tokens) + self.place.weight[: tokens.shape[1]], torch.zeros(())
        for block in self.blocks:
            x, l_aux = block(x)
            total = total + l_aux
        return self.head(self.norm(x)), total


def text(limit: int = 8_000_000) -> tuple[Tensor, Tensor]:
    """Training and validation bytes."""
    root = Path(sysconfig.get_path("stdlib"))
    data = b"".join(path.read_bytes() for path in sorted(root.glob("*.py")))[:limit]
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    cut = len(tokens) * 19 // 20
    return tokens[:cut], tokens[cut:]


def batches(tokens: Tensor, args: argparse.Namespace, seed: int) -> Iterator[Tensor]:
    """Endless [micro batch, T + 1], different on each rank."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    while True:
        starts = torch.randint(len(tokens) - args.seq_length, (args.micro_batch_size,), generator=generator)
        yield tokens[starts[:, None] + torch.arange(args.seq_length + 1)]


def teacher_of(args: argparse.Namespace) -> GPT:
    """On every rank whole, as no engine holds it; from a checkpoint of any number of ranks."""
    hidden = args.hidden_size_teacher or args.hidden_size
    alone = argparse.Namespace(**{**vars(args), "moe_expert_parallel_size": 1})
    model = GPT(args.num_layers_teacher, hidden, args.num_experts_teacher, alone)
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(args.load_teacher))
    return model.eval().requires_grad_(False)


def loss_of(
    engine: nn.Module, batch: Tensor, args: argparse.Namespace, teacher: GPT | None
) -> tuple[Tensor, Tensor]:
    """The loss to train on, and that of predicting the next byte."""
    logits, l_aux = engine(batch[:, :-1])
    logits = logits.flatten(0, 1).float()
    plain = F.cross_entropy(logits, batch[:, 1:].flatten())
    loss = plain + args.moe_loss_coeff * l_aux
    if teacher is not None:
        with torch.no_grad():
            wanted = teacher(batch[:, :-1])[0].flatten(0, 1).float() / args.kd_temp
        soft = F.kl_div(
            (logits / args.kd_temp).log_softmax(-1),
            wanted.log_softmax(-1),
            log_target=True,
            reduction="batchmean",
        )
        loss = loss + args.kd_beta_ce * args.kd_temp**2 * soft
    return loss, plain


@torch.no_grad()
def validate(engine: nn.Module, tokens: Tensor, args: argparse.Namespace) -> float:
    engine.eval()
    source = batches(tokens, args, 9)
    total = torch.stack([loss_of(engine, next(source), args, None)[1] for _ in range(8)]).mean()
    engine.train()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Returns the validation losses."""
    args = parse_arguments(argv)
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    model = GPT(args.num_layers, args.hidden_size, args.num_experts, args)
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.zero_stage},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    teacher = teacher_of(args) if args.mos else None
    stop = args.mos_stop if args.mos_stop is not None else args.train_iters * 2 // 3
    train, held_out = text()
    source, found = batches(train, args, args.seed), []
    for step in range(1, args.train_iters + 1):
        loss, _ = loss_of(engine, next(source), args, teacher if step <= stop else None)
        engine.backward(loss)
        engine.step()
        if step % args.eval_interval == 0 or step == args.train_iters:
            found.append(validate(engine, held_out, args))
            if dist.get_rank() == 0:
                print(f"step {step}: validation loss {found[-1]:.4f}", flush=True)
    if args.save is not None:
        engine.save_checkpoint(args.save)
    engine.destroy()
    return found


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
