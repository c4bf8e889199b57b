"""Cells of the matrix {tensor parallelism, sequence parallelism, both} x ZeRO stage x feature: what each is, and a
short run of it against the same steps on one rank. ``python -m tests.clients.parallel_cells`` prints the table of
docs/compatibility.md.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

AXES: dict[str, dict[str, Any]] = {
    "TP": {"tensor_parallel": {"autotp_size": 2}},
    "SP": {"sequence_parallel_size": 2},
    "TP x SP": {"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2},
}
RANKS = {"TP": 2, "SP": 2, "TP x SP": 4}
STAGES = (0, 1, 2, 3)
FEATURES = ("offload", "LoRA", "checkpointing", "compile", "bf16")
STEPS, BATCH, LENGTH, VOCAB = 3, 2, 13, 64
RATE, EPS, DECAY, CLIP = 1e-2, 1e-3, 0.1, 1.0


@dataclass(frozen=True)
class Cell:
    axis: str
    stage: int
    features: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.axis}, stage {self.stage}, {' + '.join(self.features)}"


REFUSED: dict[Cell, str] = {}
"""What the error says, of those that do not train."""


def cells(axis: str, stage: int) -> list[Cell]:
    """Every feature alone."""
    return [Cell(axis, stage, (feature,)) for feature in FEATURES]


def every_feature_once(axis: str) -> list[Cell]:
    """Few of them: at different stages, several at once, and none that takes long (compiling does)."""
    first = list(AXES).index(axis)
    together = [("offload", "LoRA", "checkpointing"), ("bf16",)]
    return [Cell(axis, (3, 1, 2, 0)[(first + at) % 4], features) for at, features in enumerate(together)]


def pairs_of_features(axis: str) -> list[Cell]:
    """Each at one stage."""
    first = list(AXES).index(axis)
    pairs = itertools.combinations(FEATURES, 2)
    return [Cell(axis, STAGES[(first + at) % 4], pair) for at, pair in enumerate(pairs)]


def model(*, adapted: bool) -> Any:
    """A tiny Llama with grouped heads whose attention is far from even; with adapters on all linear layers."""
    from tests.clients.kit import llama, lora

    made = llama(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(1)
    for param in made.parameters():
        nn.init.normal_(param, 0.7 if param.ndim == 1 else 0.0, 0.3 if param.ndim == 1 else 0.15)
    if adapted:
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        made = lora(made, target_modules=names, init_lora_weights=False)
    return made.train()


def batches() -> Iterator[dict[str, Tensor]]:
    """Rows whose labels count from different places on."""
    draw = torch.Generator().manual_seed(3)
    for step in range(STEPS):
        tokens = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=draw)
        labels = tokens.clone()
        labels[0, : 4 + step] = -100
        yield {"input_ids": tokens, "labels": labels}


def config(cell: Cell, folder: Path) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": cell.stage,
        "stage3_param_persistence_threshold": 0,
        "sub_group_size": 500,
    }
    # To files: on a host whose ranks compute on CPUs all else stays where it is.
    if "offload" in cell.features:
        storage = {"device": "nvme", "nvme_path": str(folder)}
        zero["offload_optimizer"] = storage
        if cell.stage == 3:
            zero["offload_param"] = {**storage, "max_in_cpu": 0}
    return {
        **AXES[cell.axis],
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "eps": EPS, "weight_decay": DECAY}},
        "bf16": {"enabled": "bf16" in cell.features},
        "zero_optimization": zero,
    }


class OneRank:
    """The losses and final weights of one rank in plain torch."""

    def __init__(self, *, adapted: bool, bf16: bool) -> None:
        masters = model(adapted=adapted)
        self.start = {name: param.detach().clone() for name, param in masters.named_parameters()}
        computing = copy.deepcopy(masters).bfloat16() if bf16 else masters
        trained = [param for param in masters.parameters() if param.requires_grad]
        used = [param for param in computing.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=RATE, eps=EPS, weight_decay=DECAY)
        self.losses: list[float] = []
        for batch in batches():
            loss = computing(**batch).loss
            loss.backward()
            self.losses.append(loss.item())
            for master, param in zip(trained, used, strict=True):
                assert param.grad is not None
                master.grad = param.grad.float()
            nn.utils.clip_grad_norm_(trained, CLIP)
            optimizer.step()
            with torch.no_grad():
                for master, param in zip(trained, used, strict=True):
                    param.copy_(master)
                    param.grad = None
        self.weights = {name: param.detach() for name, param in masters.named_parameters()}


def run(cell: Cell, folder: Path, backend: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and whole final weights of the cell; ``backend``: of the compiler. Collective."""
    import deepspeed

    net = model(adapted="LoRA" in cell.features)
    if "checkpointing" in cell.features:
        net.gradient_checkpointing_enable()
    engine = deepspeed.initialize(model=net, config=config(cell, folder))[0]
    if "compile" in cell.features:
        engine.compile(backend=backend)
    losses: list[float] = []
    for batch in batches():
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = {name: engine.whole_tensor(param).float() for name, param in engine.module.named_parameters()}
    engine.destroy()
    return losses, weights


def check(cell: Cell, found: tuple[list[float], dict[str, Tensor]], expected: OneRank) -> None:
    """AssertionError: the cell does not train as one rank does."""
    losses, weights = found
    near = 5e-3 if "bf16" in cell.features else 1e-5
    for step, (ours, theirs) in enumerate(zip(losses, expected.losses, strict=True)):
        assert abs(ours - theirs) <= near * abs(theirs), f"loss of step {step}: {ours}, not {theirs}"
    assert weights.keys() == expected.weights.keys()
    for name, wanted in expected.weights.items():
        difference, moved = (weights[name] - wanted).norm(), (wanted - expected.start[name]).norm()
        if "bf16" in cell.features:
            allowed = 0.15 * moved + 2**-8 * wanted.norm()
        else:
            allowed = 1e-3 * moved + 1e-6 * wanted.norm()
        assert difference <= allowed, f"{name} is {difference:.2e} from one rank's, of {moved:.2e} moved"


def run_all(chosen: Iterable[Cell], folder: Path, backend: str = "aot_eager") -> dict[Cell, str]:
    """Runs each; what went wrong. Collective, also where a cell fails in the same way on all ranks."""
    from tests.clients.kit import clean_clients

    references: dict[tuple[bool, bool], OneRank] = {}
    wrong: dict[Cell, str] = {}
    for cell in chosen:
        key = ("LoRA" in cell.features, "bf16" in cell.features)
        if key not in references:
            references[key] = OneRank(adapted=key[0], bf16=key[1])
        init, begin = nn.Module.__init__, time.perf_counter()
        try:
            with clean_clients():
                check(cell, run(cell, folder, backend), references[key])
            if cell in REFUSED:
                wrong[cell] = "trains, but is listed as refused"
        except Exception as error:
            if cell not in REFUSED or REFUSED[cell] not in str(error):
                wrong[cell] = f"{type(error).__name__}: {error}"
        finally:
            print(f"{cell}: {time.perf_counter() - begin:.1f} s")
            if "compile" in cell.features:
                nn.Module.__init__ = init  # torch's compiler patches it for good
                torch.compiler.reset()
    return wrong


def table() -> str:
    """As Markdown: features down, axes and stages across."""
    places = [(axis, stage) for axis in AXES for stage in STAGES]
    head = ["feature", *(f"{axis}, {stage}" for axis, stage in places)]
    rows = [head, ["---"] * len(head)]
    for feature in FEATURES:
        rows.append([feature, *(_mark(Cell(axis, stage, (feature,))) for axis, stage in places)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _mark(cell: Cell) -> str:
    return "refused" if cell in REFUSED else "yes"


if __name__ == "__main__":
    print(table())
