"""One process of plain PyTorch that sees the data of all ranks, and how near to it a cell has to be."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.ops.adam.compact_adam import CompactAdam
from tests.cells import formulas
from tests.cells.cell import CLIP, DECAY, EPS, FREEZE, RATE, STEPS, WARMUP_FROM, Cell
from tests.cells.models import BALANCE, PlainMixture, alone, freeze, tokens, uses_sometimes, whole_value
from tests.cells.wires import Gradients, Wire, Wires, has_formula, imagined

CONTEXTS = (4, 6, 8)
"""Tokens that generation has seen."""
DTYPES = {"bf16": torch.bfloat16, "bf16 masters": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Tolerance:
    """``loss`` and ``norm`` are relative. A weight may differ by ``moved`` times its distance from the initial value,
    plus ``rounding`` times its norm."""

    loss: float
    norm: float
    moved: float
    rounding: float


TOLERANCES = {
    # Sums in another order, over 3 steps of Adam with an eps that is not small compared with the gradients.
    "fp32": Tolerance(2e-5, 1e-4, 2e-3, 1e-6),
    # Products in 8 (11) bits; the oracle rounds at the same places, but sums are in another order.
    "bf16": Tolerance(1e-2, 5e-2, 0.15, 2**-8),
    "fp16": Tolerance(3e-3, 1e-2, 0.05, 2**-10),
    "autocast": Tolerance(1e-2, 5e-2, 0.15, 1e-6),
    # Each update rounds the masters to 8 bits: of small updates, little is left.
    "bf16 masters": Tolerance(2e-2, 8e-2, 0.6, 2**-6),
}
LOSSY: dict[tuple[str, Any], Tolerance] = {
    # Moments of 8 bits, one scale per 256 elements: those of a part that tensor-parallel ranks have begin elsewhere.
    ("optimizer", "8-bit"): Tolerance(5e-3, 3e-2, 0.1, 1e-6),
    # Weights of 8 bits (of slices of at least 256 elements).
    ("wire", "qwz"): Tolerance(2e-2, 5e-2, 0.3, 1e-6),
    # Gradients of 4 bits, with a scale for elements of several tensors: `Expected.moved` is of all of them.
    ("wire", "qgz"): Tolerance(3e-2, 0.15, 0.3, 1e-6),
    # Gradients of 8 bits, with error feedback, for which a few steps are too few.
    ("wire", "int8"): Tolerance(1e-2, 3e-2, 0.25, 1e-6),
    # A rounding to 3 bits may fall on the other side where sums are in another order.
    ("fp8", True): Tolerance(1e-2, 5e-2, 0.2, 1e-6),
    ("compression", "weights"): Tolerance(1e-3, 1e-2, 0.05, 1e-6),
    ("compression", "activations"): Tolerance(1e-3, 1e-2, 0.05, 1e-6),
    # Small singular values are enlarged, and with them what sums in another order differ by.
    ("optimizer", "Muon"): Tolerance(1e-4, 1e-3, 0.02, 1e-6),
    # Gradients rounded once to 8 bits.
    ("wire", "bf16"): Tolerance(2e-3, 1e-2, 0.03, 1e-6),
    # The same by their formulas (`wires.py`): what is left is a code that falls on the other side of a tie.
    ("wire", "qwz by formula"): Tolerance(3e-4, 3e-3, 0.03, 1e-6),
    ("wire", "qgz by formula"): Tolerance(1e-3, 1e-2, 0.1, 1e-6),
    ("wire", "int8 by formula"): Tolerance(3e-4, 3e-3, 0.03, 1e-6),
    ("wire", "bf16 by formula"): Tolerance(1e-4, 1e-3, 0.01, 1e-6),
}


NOISE = {"fp32": 2**-22, "fp16": 2**-12}
TINY = 4e-3
"""Of a tensor's mean variance: where gradients are a sixteenth of its others, a rounding of those to 8 bits is 3 %."""
OTHER_NOISE = 2**-9
"""Half of what the last digit of a weight stands for."""
NOISED = 12
"""Runs of the oracle with other roundings, for a cell that is not within its limits."""


def tolerance(cell: Cell) -> Tolerance:
    """The widest of what its precision and its lossy features need."""
    found = [TOLERANCES[cell.precision]]
    features = dict(cell.features())
    if (
        cell.optimizer == "8-bit" and cell.axis("tp") == 1
    ):  # the oracle's differs by no more than the order of sums
        del features["optimizer"]
    if has_formula(cell):
        features["wire"] = f"{cell.wire} by formula"
    found += [each for (name, value), each in LOSSY.items() if features.get(name) == value]
    exact = cell.precision == "fp32" and len(found) == 1
    if cell.optimizer == "Lion":  # the sign of what is nearly zero may differ
        found.append(Tolerance(1e-4, 1e-3, 0.02 if exact else 0.9, 1e-6))
    if cell.fp8 and cell.precision != "fp32":
        # One rounding to 16 bits decides on which side of a rounding to 3 bits a value falls: noise of 2^-11 in the
        # first weights moves the oracle's own losses by 3e-2 and its updates by half.
        found.append(Tolerance(5e-2, 0.2, 0.9, 1e-6))
    elif cell.fp8 and cell.wire not in ("plain", "fp32") and not has_formula(cell):
        # So does one rounding of gradients: with it the oracle's own losses of step 2 differ by 9e-3.
        found.append(Tolerance(3e-2, 0.1, 0.5, 1e-6))
    if cell.wire == "bf16" and cell.optimizer == "Muon" and not has_formula(cell):
        # Small singular values of what was rounded: noise of 2^-10 in the first weights moves the oracle's by 0.1.
        found.append(Tolerance(3e-3, 1e-2, 0.15, 1e-6))
    if cell.wire == "qgz" and cell.optimizer != "SGD" and not has_formula(cell):
        # Of a gradient that is small beside others of its block nothing is left, and what is divided by the gradients'
        # size then does not move, instead of as far as others: SGD is what shows how exact the wire is.
        found.append(Tolerance(6e-2, 0.25, 1.1, 1e-6))
    if cell.fp8 and cell.optimizer == "Muon":
        # The small singular values of what was rounded to 3 bits: without fp8, or with another optimizer, equal.
        found.append(Tolerance(3e-2, 0.1, 0.5, 1e-6))
    if cell.optimizer == "DiLoCo" and cell.wire in ("bf16", "qgz", "int8"):
        # The outer update takes 0.7 x 1.9 times what the wire changed, and its momentum takes it once more.
        found = [Tolerance(*(2 * each for each in dataclasses.astuple(one))) for one in found]
    return widest(found)


def widest(found: Sequence[Tolerance]) -> Tolerance:
    return Tolerance(*(max(values) for values in zip(*map(dataclasses.astuple, found), strict=True)))


@dataclass
class Expected:
    """``losses`` by step, then replica, then micro-batch; ``weights`` in fp32 by name."""

    losses: list[list[list[float]]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluations: list[list[float]] = field(default_factory=list)
    generated: list[list[list[float]]] = field(default_factory=list)
    """By phase, replica, and length of the context."""
    start: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    doubt: float = 0.0
    """Of the engine's choices of experts: ``routing.doubt``."""
    chances: list[Tensor] = field(default_factory=list)
    """Logarithms of the experts' probabilities [tokens, experts], of every forward of a mixture."""
    rounding_decides: dict[str, Tensor] = field(default_factory=dict)
    """Masks of elements whose frozen variance is of gradients that are rounding errors: their steps have any size."""
    apart: list[dict[str, Tensor]] = field(default_factory=list)
    """The weights of each copy, where copies train alone; ``weights`` are those of the first."""
    noised: list[Expected] = field(default_factory=list)
    """The same run with other roundings, and with codes of other layouts where the engine's is not known."""

    def of_copy(self, number: int) -> Expected:
        """The same with the weights of another copy."""
        if not self.apart:
            return self
        noised = [each.of_copy(number) for each in self.noised]
        return dataclasses.replace(self, weights=self.apart[number], noised=noised)

    def spread(self, read: Callable[[Expected], Tensor | float]) -> float:
        """Twice the furthest that other roundings move what ``read`` takes."""
        own = torch.as_tensor(read(self))
        return 2 * max(
            (float((torch.as_tensor(read(each)) - own).norm()) for each in self.noised), default=0.0
        )

    def decided(self, name: str, difference: Tensor) -> Tensor:
        """``difference`` with zeros where rounding decides."""
        mask = self.rounding_decides.get(name)
        return difference if mask is None else difference.masked_fill(mask, 0.0)

    def undecided(self) -> float:
        """By how much other roundings bring two experts' logarithms nearer to each other."""
        pairs = [pair for each in self.noised for pair in zip(self.chances, each.chances, strict=True)]
        return 2 * max((float((own - other).abs().max()) for own, other in pairs), default=0.0)

    def moved(self, name: str, *, like_others: bool = False) -> float:
        """Return the distance of a tensor from its initial value; ``like_others``: at least the mean of tensors of its
        size."""
        own = float((self.weights[name] - self.start[name]).norm())
        if not like_others:
            return own
        squares = sum(self.moved(each) ** 2 for each in self.weights)
        share = self.weights[name].numel() / sum(each.numel() for each in self.weights.values())
        return max(own, (squares * share) ** 0.5)


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, betas 0.9 and 0.999."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override] (no closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                update = (0.9 * average + 0.1 * param.grad).sign()
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)
                average.mul_(0.999).add_(param.grad, alpha=0.001)


def optimizer_of(cell: Cell, params: Any, names: dict[Tensor, str] | None = None) -> torch.optim.Optimizer:
    """The optimizer of ``config_of`` in plain PyTorch. Muon tells matrices by their names."""
    adam = {"lr": RATE, "eps": EPS, "weight_decay": DECAY}
    match cell.optimizer:
        case "Adam":
            return torch.optim.Adam(params, **adam)
        case "SGD":
            return torch.optim.SGD(params, lr=RATE, momentum=0.9, weight_decay=DECAY)
        case "Adagrad":
            return torch.optim.Adagrad(params, lr=RATE, eps=EPS)
        case "Lion":
            return Lion(params, lr=RATE / 4, weight_decay=DECAY)
        case "NAdam":
            return torch.optim.NAdam(params, **adam)
        case "LAMB":
            return formulas.Lamb(params)
        case "Muon":
            return formulas.Muon(params, names=names)
        case "callable":
            return formulas.RootMeanSquare(params)
        case "1-bit Adam":
            return formulas.OneBitAdam(params)
        case "0/1 Adam":
            return formulas.ZeroOneAdam(params)
        case "local 0/1 Adam":
            return formulas.LocalZeroOneAdam(params)
        case "1-bit LAMB":
            return formulas.OneBitLamb(params)
        case "8-bit":
            # our own, whose formula has its tests (tests/ops): which way a moment is rounded is fixed by its element
            return CompactAdam(params, **adam)
        case _:
            return torch.optim.AdamW(params, **adam)


def rate_at(cell: Cell, step: int) -> float:
    """Learning rate of a step, as a factor. The schedule's first two updates have its minimum, as in release 0.19."""
    return (
        WARMUP_FROM + (1 - WARMUP_FROM) * min(max(step - 1, 0) / STEPS, 1)
        if cell.schedule == "warmup"
        else 1.0
    )


@dataclass(frozen=True)
class Layout:
    """A layout of one run: its ``choices`` and tokens ``kept`` by replica and forward, and its ``wires``."""

    cell: Cell
    choices: list[list[Tensor]]
    kept: list[list[Tensor]]
    wires: list[Wire]


class Alone:
    """Trains the cell's model in this process.

    Masters are fp32; with 16-bit weights a copy of that dtype computes, and each gradient is rounded once. With
    ``noise`` (which seeds it) each weight that computes is off by about as much as its precision rounds. ``replicas``:
    whose data it sees; None: of all of them.
    """

    def __init__(
        self, cell: Cell, seed: int = 0, noise: int = 0, replicas: Sequence[int] | None = None
    ) -> None:
        self.cell, self.seed, self.replicas, self.last = cell, seed, replicas, cell
        self.noise = torch.Generator().manual_seed(noise) if noise else None
        self.masters: Any = alone(cell)
        with torch.no_grad():
            for name, param in self.masters.named_parameters():
                param.copy_(whole_value(name, param.shape))
        for each in self.masters.modules():
            if isinstance(each, formulas.Compressed):
                each.prune()
        self.named = dict(self.masters.named_parameters())
        freeze(cell, self.named)
        dtype = DTYPES.get(cell.precision)
        apart = dtype is not None or cell.wire == "qwz" or noise > 0
        self.computing = copy.deepcopy(self.masters).to(dtype) if apart else self.masters
        self.copies = dict(self.computing.named_parameters())
        self.mixtures = [each for each in self.computing.modules() if isinstance(each, PlainMixture)]
        self.choices: list[Iterator[Tensor]] = []
        self.kept: list[Iterator[Tensor]] = []
        self.wires, self.senders = Wires([]), 0
        self.publish()
        every = [
            param for param in self.masters.parameters() if param.requires_grad or cell.parameters == "late"
        ]
        # the engine's own name of a pipeline's tied weight
        tied = cell.axis("pp") > 1 and cell.parameters == "tied"
        names = {p: "embed" if tied and name == "layers.0.weight" else name for name, p in self.named.items()}
        self.optimizer = optimizer_of(cell, every, names)
        self.base_rate = self.optimizer.param_groups[0]["lr"]
        self.micro = 0
        self.expected = Expected(start=self.snapshot())

    def begin(self, layout: Layout, noise: int = 0) -> None:
        """Go on in another layout."""
        wires = layout.wires or (imagined(layout.cell, self.named, noise) if noise else [])
        self.follow(layout.choices, layout.kept)
        self.send_by(wires, len(self.sees(layout.cell)))
        self.last = layout.cell

    def sees(self, cell: Cell) -> Sequence[int]:
        """The replicas whose data it has in this layout."""
        return range(cell.replicas) if self.replicas is None else self.replicas

    def follow(self, choices: list[list[Tensor]], kept: list[list[Tensor]]) -> None:
        """Sends the tokens of each replica's next forwards to these experts [tokens, 2], and only those ``kept``
        [batch, n] through the first layer."""
        self.choices, self.kept = [iter(each) for each in choices], [iter(each) for each in kept]

    def send_by(self, wires: list[Wire], senders: int) -> None:
        """Use these wire formats for weights and gradients from now on, among so many replicas; error feedback is kept
        if both are the same."""
        if wires != self.wires.all or senders != self.senders:
            self.wires, self.senders = Wires(wires), senders
            self.publish()

    def finish(self) -> None:
        """Complete ``expected``."""
        self.expected.weights = self.snapshot()
        if self.last.sends_signs and (self.last.precision != "fp32" or self.last.wire == "bf16"):
            self.expected.rounding_decides = self.tiny_variances()
        self.expected.chances = [each for mixture in self.mixtures for each in mixture.chances]
        self.expected.doubt = max((each.doubt for each in self.mixtures), default=0.0)

    def tiny_variances(self) -> dict[str, Tensor]:
        """Masks of elements whose gradients are small beside their tensor's, as of noise that sums cancel."""
        found = {name: self.optimizer.state[param].get("v") for name, param in self.named.items()}
        return {name: v < TINY * v.mean() for name, v in found.items() if v is not None}

    def snapshot(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.named.items()}

    @torch.no_grad()
    def publish(self) -> None:
        for name, param in self.named.items():
            if self.copies[name] is not param:
                self.copies[name].copy_(param)
        self.wires.publish(self.copies)
        if self.noise is not None:
            size = NOISE.get(self.cell.precision, OTHER_NOISE)
            for copied in self.copies.values():
                copied.mul_(1 + size * torch.randn(copied.shape, generator=self.noise))

    def loss(self, cell: Cell, replica: int, number: int, step: int | None = None) -> tuple[Tensor, Tensor]:
        """(what is reported, what is differentiated) of one micro-batch in the layout of ``cell``. Without a ``step``
        the model is evaluated: nothing is cut or dropped."""
        inputs, labels = tokens(self.cell, replica, number, self.seed)
        more = {}
        if step is not None:
            length = formulas.length_at(cell, step)
            inputs, labels = inputs[:, :length], labels[:, :length]
            more = {"progressive_layer_drop": True, "pld_theta": formulas.theta_at(cell, step)}
        self.computing.with_sometimes = uses_sometimes(replica, number)
        self.read(replica, None if step is None else formulas.kept_at(cell, step), inputs.shape[1])
        with torch.autocast("cpu", torch.bfloat16, enabled=self.cell.precision == "autocast"):
            loss = self.computing(inputs, labels, **(more if cell.layer_drop else {}))
        balance = self.computing.balance if balances(cell) else None
        return loss.detach(), loss if balance is None else loss + BALANCE * balance

    def read(self, replica: int, kept: int | None = None, length: int = 0) -> None:
        """Makes the next forward one of this replica, of ``length`` tokens, of which the first layer keeps some."""
        self.computing.kept = None
        if kept is not None and kept < length:
            self.computing.kept = places = next(self.kept[replica])
            assert places.shape[1] == kept and (places.diff(dim=1) > 0).all(), "tokens that random-LTD keeps"
        for each in self.mixtures:
            each.follows = self.choices[replica] if self.choices else None

    def step(self, step: int, cell: Cell) -> None:
        """One update with the data of all replicas of ``cell``, which may be another layout's."""
        self.update(step, cell, self.norm(self.differentiate(step, cell), step, cell))

    def differentiate(self, step: int, cell: Cell) -> list[Tensor]:
        """Gradients of the masters' means over micro-batches and replicas. Return [i]: all of them, end to end, of the
        first i + 1 replicas."""
        replicas = self.sees(cell)
        count = cell.accumulation_at(step)
        # A plain loss.backward() is divided where the gradients are summed, before they are encoded: what encoding lost
        # is owed to gradients that another number of micro-batches may divide.
        before, after = (1, count) if cell.backward == "tensor" else (count, 1)
        freeze(cell, self.named, step)
        for name, param in self.named.items():
            self.copies[name].requires_grad_(param.requires_grad)
        losses: list[list[float]] = []
        own: list[Tensor] = []
        rounds: list[list[Gradients]] = [
            [{} for _ in replicas] for _ in range(self.wires.rounds(cell, count))
        ]
        travel = bool(self.wires.gradients) and not wants_local_gradients(cell, step)
        for at, replica in enumerate(replicas):
            losses.append([])
            for number in range(self.micro, self.micro + count):
                reported, loss = self.loss(cell, replica, number, step)
                (loss / before / len(replicas)).backward()
                losses[-1].append(reported.item())
                self.collect()
                if travel:
                    self.hand_over(rounds[min(number - self.micro, len(rounds) - 1)][at])
            own.append(self.gradients() / after)
        self.micro += count
        if travel:
            shares = [
                [{name: grad / after for name, grad in sums.items()} for sums in each] for each in rounds
            ]
            for name, grad in self.wires.total(shares).items():
                self.named[name].grad = grad
            own, after = [self.gradients()], 1
        for param in self.used():
            assert param.grad is not None
            param.grad /= after
        self.expected.losses.append(losses)
        return own

    def used(self) -> list[nn.Parameter]:
        return [param for param in self.named.values() if param.grad is not None]

    def update(self, step: int, cell: Cell, norm: float) -> None:
        """An update by the gradients of the masters, whose norm is ``norm``."""
        used = self.used()
        if cell.clip:
            nn.utils.clip_grads_with_norm_(used, CLIP, torch.tensor(norm))
        self.optimizer.param_groups[0]["lr"] = self.base_rate * rate_at(cell, step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.publish()
        self.expected.norms.append(norm)

    def hand_over(self, sums: Gradients) -> None:
        """Moves the gradients to those of one replica's round."""
        for name, param in self.named.items():
            if param.grad is not None:
                sums[name] = sums[name] + param.grad if name in sums else param.grad
                param.grad = None

    def gradients(self) -> Tensor:
        """All of them, end to end."""
        return torch.cat(
            [
                torch.zeros(param.numel()) if param.grad is None else param.grad.flatten()
                for param in self.named.values()
            ]
        )

    def norm(self, sums: list[Tensor], step: int, cell: Cell) -> float:
        """Of the whole gradient; of 1-bit optimizers after their first updates the root mean square of the copies' own
        norms. ``sums`` [i]: gradients of the first i + 1 replicas.

        Ranks that share experts hold one copy of them, with the gradient of all these ranks' tokens.
        """
        if not wants_local_gradients(cell, step):
            return float(sums[-1].norm())
        size = 2 if cell.shards == "mics" else 1
        experts = torch.cat(
            [torch.full((param.numel(),), "deepspeed_experts" in name) for name, param in self.named.items()]
        )
        dense = mean_square([each[~experts] for each in sums], size)
        return (dense + mean_square([each[experts] for each in sums], size * cell.axis("ep"))) ** 0.5

    def collect(self) -> None:
        """Adds the gradients of a 16-bit copy to those of the masters."""
        for name, param in self.named.items():
            copied = self.copies[name]
            if copied is not param and copied.grad is not None:
                grad = copied.grad.float()
                param.grad = grad if param.grad is None else param.grad + grad
                copied.grad = None

    @torch.no_grad()
    def evaluate(self, cell: Cell) -> None:
        self.expected.evaluations.append(
            [float(self.loss(cell, replica, 900)[0]) for replica in self.sees(cell)]
        )

    @torch.no_grad()
    def generate(self, cell: Cell) -> None:
        """The largest logit after contexts that grow."""
        self.expected.generated.append([])
        for replica in self.sees(cell):
            inputs, _ = tokens(self.cell, replica, 900, self.seed)
            self.computing.with_sometimes = False
            self.read(replica)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.cell.precision == "autocast"):
                found = [float(self.computing(inputs[:, :length])[:, -1].max()) for length in CONTEXTS]
            self.expected.generated[-1].append(found)


def wants_local_gradients(cell: Cell, step: int) -> bool:
    """Return whether no rank has the gradient of all ranks' data in this step, counted from 0."""
    if cell.steps_alone:
        return step > 0
    full = step < FREEZE or cell.optimizer == "0/1 Adam" and step & (step + 1) == 0
    return cell.sends_signs and not full


def mean_square(sums: list[Tensor], size: int) -> float:
    """The mean over copies of their squared norms; each copy has the data of ``size`` replicas, or of all if there are
    fewer: where ranks share sequences, or layers besides experts, groups are of ranks with the same data."""
    size = min(size, len(sums))
    ends = [torch.zeros_like(sums[0]), *sums[size - 1 :: size]]
    parts = [(after - before) * (len(ends) - 1) for before, after in zip(ends, ends[1:], strict=False)]
    return float(torch.stack([part.norm().square() for part in parts]).mean())


def balances(cell: Cell) -> bool:
    """Return whether the balancing loss counts: it is omitted if ranks share tokens, or pass only tensors."""
    return cell.model == "moe" and all(cell.axis(name) == 1 for name in ("tp", "sp", "pp"))
