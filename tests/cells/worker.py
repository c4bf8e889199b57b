"""One rank of a cell: builds its model, trains, and reports the results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

from tests.cells import models
from tests.cells.cell import DECAY, EPS, FAMILIES, RATE, STEPS, Cell, config_of
from tests.cells.formulas import BLOCK, LORA_RANK, LORA_SCALE
from tests.cells.oracle import CONTEXTS, balances
from tests.cells.routing import noted, place_of
from tests.cells.wires import Wire, has_formula, wires_of
from tests.optim.test_one_bit_shards import InFull


@dataclass
class Seen:
    """Of one rank. ``losses`` by step, then micro-batch (a pipeline: the mean of a step); ``weights`` whole, by the
    oracle's names."""

    replica: int = 0
    losses: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    generated: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    choices: list[Tensor] = field(default_factory=list)
    """Of each forward of a mixture: experts [tokens, 2]."""
    kept: list[Tensor] = field(default_factory=list)
    """Of each forward of a layer that drops tokens: those that it keeps [batch, n]."""
    wires: list[Wire] = field(default_factory=list)


class Refused(Exception):
    """The error of ``initialize``: its kind and its text."""


def train(line: dict[str, Any], folder: str, first_step: int = 0, load: bool = False, seed: int = 0) -> Seen:
    """Trains the cell on this rank, from ``first_step`` on, and saves to ``folder``. Collective."""
    cell, init = Cell(**line), nn.Module.__init__
    try:
        seen = Seen()
        with (
            noted(seen.choices, seen.kept)
            if cell.model == "moe" or cell.token_drop
            else contextlib.nullcontext()
        ):
            _train(cell, seen, folder, first_step, load, seed)
        return seen
    finally:
        if cell.compile != "no" or cell.optimizer == "callable":
            torch.compiler.reset()
            nn.Module.__init__ = init  # torch's compiler patches it for good
            os.environ.pop("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", None)  # its own note, too


def _train(cell: Cell, seen: Seen, folder: str, first_step: int, load: bool, seed: int) -> None:
    import deepspeed
    from deepspeed.config.problems import DeepSpeedConfigError
    from deepspeed.transforms.errors import TransformRefusedError

    try:
        module = build(cell)
        engine = deepspeed.initialize(**arguments(cell, module, folder))[0]
    except (DeepSpeedConfigError, TransformRefusedError, NotImplementedError) as error:
        # Raised again, as other ranks may go on and would wait for this one.
        raise Refused(f"{type(error).__name__}: {' '.join(str(error).split())}") from None
    if cell.sends_signs:  # formulas of what signs lose would have to know how tensors lie in the exchange
        engine.core.store.optimizer.exchange.codec = InFull()
    if cell.compile != "no":
        torch._inductor.config.compile_threads = 1  # threads would outlive the cell
        engine.compile(backend=cell.compile)
    if has_formula(cell) and cell.sends_signs:  # later gradients stay on their ranks
        seen.wires = wires_of(cell, engine, models.names)
    seen.replica, _ = place_of(cell, dist.get_rank())
    if cell.token_drop:
        from deepspeed.data.data_routing.helper import convert_to_random_ltd

        engine = convert_to_random_ltd(engine, models.Block)
    seen.choices.clear()  # what following the model's forward left
    runner = Pipeline(cell, engine, seen, seed) if cell.axis("pp") > 1 else Plain(cell, engine, seen, seed)
    if load:
        path, _ = engine.load_checkpoint(f"{folder}/saved")
        assert path is not None, "the checkpoint was not found"
        runner.micro = sum(cell.accumulation_at(step) for step in range(first_step))
    for step in range(first_step, first_step + STEPS):
        runner.step(step)
        seen.norms.append(float(engine.get_global_grad_norm()))
        if cell.generate and step == first_step:
            runner.generate()
    if cell.evaluate:
        runner.evaluate()
    engine.save_checkpoint(f"{folder}/saved")
    seen.weights = live_weights(cell, engine)
    if has_formula(cell) and not cell.sends_signs:
        seen.wires = wires_of(cell, engine, models.names)
    engine.destroy()


def live_weights(cell: Cell, engine: Any) -> dict[str, Tensor]:
    """Whole weights as the module computes with them. Collective."""
    found: dict[str, Tensor] = {}
    for name, param in engine.module.named_parameters():
        whole = engine.whole_tensor(param)
        if "deepspeed_experts" not in name:  # a rank has some, numbered from 0
            found[models.names(name)] = whole.detach().float().cpu().clone()
    return found


# ------------------------------------------------------------------------------------------------- building


def build(cell: Cell) -> nn.Module:
    """The module for ``initialize``, with the oracle's weights."""
    kit = models.Kit(attend=attention(cell), mixture=mixtures(cell), recompute=recompute(cell))
    if cell.lora:
        kit = dataclasses.replace(kit, feed=lora_layer)
    if cell.axis("pp") > 1:
        module = pipeline(cell, kit)
    elif cell.model in FAMILIES:
        module = models.alone(cell)
    else:
        module = models.Language(cell, kit)
    named = {models.names(name): param for name, param in module.named_parameters()}
    fill(cell, module)
    models.freeze(cell, named)
    if cell.compression != "no":
        from deepspeed.compression.compress import init_compression

        module = init_compression(module, config_of(cell))
    return module


def lora_layer(inputs: int, outputs: int, name: str) -> nn.Module:
    from deepspeed.linear import LoRAConfig, OptimizedLinear

    config = LoRAConfig(lora_r=LORA_RANK, lora_alpha=LORA_RANK * LORA_SCALE)
    return OptimizedLinear(inputs, outputs, bias=True, lora_config=config, dtype=torch.float32)


@torch.no_grad()
def fill(cell: Cell, module: nn.Module) -> None:
    local = models.EXPERTS // cell.axis("ep")
    apart = cell.ranks // cell.axis("pp")
    neighbours = cell.axis("tp")
    share = dist.get_rank() % apart // neighbours % cell.axis("ep")
    for name, param in module.named_parameters():
        known = models.names(name)
        if "deepspeed_experts." in known:
            before, _, after = known.partition("deepspeed_experts.")
            number, _, rest = after.partition(".")
            known = f"{before}deepspeed_experts.{int(number) + share * local}.{rest}"
        param.copy_(models.whole_value(known, param.shape))


def attention(cell: Cell) -> Callable[[], nn.Module] | None:
    local: Callable[[], Any] = (lambda: Sparse(cell)) if cell.attention == "sparse" else lambda: models.attend
    if cell.axis("sp") == 1:
        return local if cell.attention == "sparse" else None
    from deepspeed.parallel.sequence.layer import DistributedAttention

    group = sequence_group(cell)

    return lambda: DistributedAttention(local(), group, scatter_idx=2, gather_idx=1)


class Sparse(nn.Module):
    """The oracle's ``SparseWindow`` by a layout of blocks."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        from deepspeed.ops.sparse_attention import LocalSlidingWindowSparsityConfig, SparseSelfAttention

        pattern = LocalSlidingWindowSparsityConfig(models.HEADS // cell.axis("sp"), BLOCK, 3)
        self.blocks = SparseSelfAttention(pattern, max_seq_length=4 * models.LENGTH)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: int = 0) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (query, key, value))
        causal = torch.ones(q.shape[2], q.shape[2], device=q.device).tril()
        return self.blocks(q, k, v, attn_mask=causal).transpose(1, 2)


def sequence_group(cell: Cell) -> Any:
    """The ranks of this rank's sequence: neighbours, or with layers in common every second one. Collective."""
    from deepspeed.parallel.sequence.hf import parallel_state_sp

    if cell.axis("tp") == 1:
        parallel_state_sp.initialize_sequence_parallel(2)
        return parallel_state_sp.get_sequence_parallel_group()
    groups = [dist.new_group([first, first + 2]) for first in range(2)]
    return groups[dist.get_rank() % 2]


def mixtures(cell: Cell) -> Callable[[int], nn.Module] | None:
    if cell.model != "moe":
        return None
    from deepspeed.parallel.expert.layer import MoE

    return lambda number: MoE(
        models.WIDTH,
        models.expert(),
        models.EXPERTS,
        cell.axis("ep"),
        k=2,
        drop_tokens=False,
        top2_2nd_expert_sampling=False,
        use_rts=False,
    )


def recompute(cell: Cell) -> models.Recompute | None:
    import deepspeed

    return {
        "no": None,
        "torch": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
        "reentrant": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
        "documented": deepspeed.checkpointing.checkpoint,
        "partitioned": deepspeed.checkpointing.checkpoint,
    }[cell.recompute]


def pipeline(cell: Cell, kit: models.Kit) -> nn.Module:
    from deepspeed.parallel.pipeline import LayerSpec, PipelineModule, TiedLayerSpec

    blocks = [LayerSpec(models.Flat, number, cell.model, kit) for number in range(2)]
    if cell.parameters == "tied":
        first: Any = TiedLayerSpec("embed", models.Embed)
        last: list[Any] = [
            LayerSpec(TiedHeadNorm),
            TiedLayerSpec("embed", models.Embed, forward_fn=lambda embed, x: x @ embed.weight.T),
        ]
    else:
        first, last = LayerSpec(models.Embed), [LayerSpec(models.Head)]
    example = torch.zeros(2, models.LENGTH, dtype=torch.int64)
    return PipelineModule(
        [first, *blocks, *last],
        num_stages=2,
        chunks=cell.chunks,
        zigzag=cell.order == "zero-bubble-v",
        loss_fn=pipeline_loss(cell),
        partition_method="uniform",
        profile_input=example,
        activation_checkpoint_interval=0 if cell.recompute == "no" else 1,
        **({"activation_checkpoint_func": recompute(cell)} if cell.recompute != "no" else {}),
    )


class TiedHeadNorm(nn.Module):
    """The head's norm, named as in a ``Head``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def pipeline_loss(cell: Cell) -> Callable[[Tensor, Tensor], Tensor]:
    return functools.partial(shared_loss, cell)


def shared_loss(cell: Cell, logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the tokens of all ranks of a sequence."""
    loss = models.mean_loss(logits, labels)
    if cell.axis("sp") == 1:
        return loss
    from deepspeed.comm import documented_groups
    from deepspeed.parallel.sequence.hf.loss import token_mean

    return token_mean(loss, (labels != -100).sum(), documented_groups._get_sequence_parallel_group())


def arguments(cell: Cell, module: nn.Module, folder: str) -> dict[str, Any]:
    given: dict[str, Any] = {"model": module, "config": config_of(cell, folder)}
    if cell.optimizer == "client":
        params = [param for param in module.parameters() if param.requires_grad or cell.parameters == "late"]
        given["optimizer"] = torch.optim.AdamW(
            params or [{"params": []}], lr=RATE, eps=EPS, weight_decay=DECAY
        )
    if cell.optimizer == "callable":
        given["optimizer"] = Scripts
    return given


class Scripts(torch.optim.Optimizer):
    """An optimizer as a script brings it along, with an update that it compiles."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": RATE})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] (no closure is given)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    square = state.setdefault("square", torch.zeros_like(param))
                    root_mean_square(param, param.grad, square, group["lr"])


@torch.compile(backend="eager", dynamic=True)
def root_mean_square(param: Tensor, grad: Tensor, square: Tensor, rate: float) -> None:
    square.mul_(0.5).addcmul_(grad, grad, value=0.5)
    param.sub_(rate * grad / (square.sqrt() + EPS))


# ------------------------------------------------------------------------------------------------- training


class Plain:
    """Forward, backward and step, as a script writes them."""

    def __init__(self, cell: Cell, engine: Any, seen: Seen, seed: int) -> None:
        self.cell, self.engine, self.seen, self.seed = cell, engine, seen, seed
        self.micro = 0

    def own(self, number: int) -> tuple[Tensor, Tensor]:
        """This rank's part of a micro-batch."""
        drawn = models.tokens(self.cell, self.seen.replica, number, self.seed)
        both = drawn[0].to(self.engine.device), drawn[1].to(self.engine.device)
        if self.cell.axis("sp") == 1:
            return both
        _, part = place_of(self.cell, dist.get_rank())
        inputs, labels = (each.chunk(2, 1)[part].contiguous() for each in both)
        return inputs, labels

    def loss(self, number: int) -> Tensor:
        inputs, labels = self.own(number)
        if self.cell.parameters == "unused somewhere":
            self.engine.module.with_sometimes = models.uses_sometimes(self.seen.replica, number)
        if self.cell.axis("sp") == 1:
            return self.engine(inputs, labels)
        return shared_loss(self.cell, self.engine(inputs), labels)

    def step(self, step: int) -> None:
        engine, count = self.engine, self.cell.accumulation_at(step)
        if engine.gradient_accumulation_steps() != count:
            engine.set_train_batch_size(
                count * engine.train_micro_batch_size_per_gpu() * engine.dp_world_size
            )
        if self.cell.parameters == "late":
            models.freeze(self.cell, dict(engine.module.named_parameters()), step)
        self.seen.losses.append([])
        for number in range(self.micro, self.micro + count):
            last = number == self.micro + count - 1
            with (
                engine.no_sync() if self.cell.backward == "no_sync" and not last else contextlib.nullcontext()
            ):
                loss = self.loss(number)
                self.seen.losses[-1].append(float(loss))
                self.backward(loss + models.BALANCE * engine.module.balance if balances(self.cell) else loss)
            engine.step()
        self.micro += count

    def backward(self, loss: Tensor) -> None:
        if self.cell.backward == "tensor":
            self.engine.scale(loss).backward()
        else:
            self.engine.backward(loss)

    @torch.no_grad()
    def evaluate(self) -> None:
        self.engine.eval()
        self.seen.evaluations.append(float(self.loss(900)))
        self.engine.train()

    @torch.no_grad()
    def generate(self) -> None:
        self.engine.eval()
        if self.cell.parameters == "unused somewhere":
            self.engine.module.with_sometimes = False
        inputs, _ = self.own(900)
        self.seen.generated += [float(self.engine(inputs[:, :length])[:, -1].max()) for length in CONTEXTS]
        self.engine.train()


class Pipeline(Plain):
    """Whole batches."""

    def batches(self, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield self.own(first)
            first += 1

    def step(self, step: int) -> None:
        engine, count = self.engine, self.cell.accumulation_at(step)
        if engine.gradient_accumulation_steps() != count:
            engine.set_train_batch_size(
                count * engine.train_micro_batch_size_per_gpu() * engine.dp_world_size
            )
        self.seen.losses.append([float(engine.train_batch(self.batches(self.micro)))])
        self.micro += count

    def evaluate(self) -> None:
        self.seen.evaluations.append(float(self.engine.eval_batch(self.batches(900), num_micro_batches=1)))
