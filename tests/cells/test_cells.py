"""Combinations of features against plain PyTorch: a fixed choice of cells, and the tester itself."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

import deepspeed
from tests.cells import draw, matrix, shrink
from tests.cells.__main__ import rows_of
from tests.cells.cell import CHOICES, STEPS, Cell, config_of, parse, why_not
from tests.cells.copies import expected_of
from tests.cells.models import EXPERTS, WIDTH, Language, PlainMixture
from tests.cells.oracle import Alone
from tests.cells.routing import by_replica, nearly_tied
from tests.cells.run import OUTCOMES, compare, layouts, run_cell
from tests.cells.worker import Seen

COUNT, SEED = 40, 23
DRAWN = list(itertools.islice(draw.cells(SEED), COUNT))


@pytest.mark.parametrize("cell", DRAWN, ids=str)
def test_a_cell_of_a_fixed_seed(cell: Cell) -> None:
    result = run_cell(cell, SEED)
    assert not result.is_fault, f"{result.outcome}: {result.what}\n{result.details}"


FOUND = [
    "accumulation=3 parameters=late backward=tensor",
    "ranks=4 axes=pp+tp recompute=documented",
    "ranks=4 axes=tp+sp",
    "ranks=4 axes=tp+sp stage=3 recompute=partitioned clip=true resume=dp",
    "ranks=2 wire=int8 resume=stage",
    "model=moe ranks=4 axes=pp+ep stage=2 shards=mics",
    "stage=1 tier=zenflow parameters=late",
    "model=moe ranks=2 axes=tp wire=fp32",
    "model=moe ranks=4 axes=tp+ep stage=2",
    "model=moe ranks=2 axes=ep buckets=tiny parameters=unused_somewhere",
    "model=moe ranks=4 axes=ep stage=3 tier=ratio buckets=tiny parameters=unused_somewhere",
    "optimizer=0/1_Adam resume=same",
    "model=gru ranks=2 stage=2 tier=cpu precision=autocast wire=qgz parameters=twice evaluate=true "
    "optimizer=SGD",
    "optimizer=SGD accumulation=3 parameters=late backward=tensor fp8=true",
    "ranks=2 axes=pp optimizer=Muon parameters=tied resume=stage",
    "model=moe ranks=2 axes=ep optimizer=0/1_Adam",
    "ranks=2 stage=2 optimizer=8-bit buckets=tiny",
    "model=moe ranks=2 axes=ep optimizer=1-bit_LAMB",
    "model=moe ranks=4 axes=ep optimizer=1-bit_LAMB stage=2 shards=mics",
    "model=moe ranks=4 axes=sp+ep optimizer=1-bit_LAMB",
    "model=moe ranks=4 axes=ep optimizer=1-bit_Adam stage=1 shards=mics",
    "model=moe ranks=4 axes=tp+sp precision=bf16",
    "ranks=2 stage=3 wire=qwz parameters=frozen",
    "ranks=4 stage=3 optimizer=SGD resume=2x2,_1",
    "ranks=2 stage=3 recompute=torch data=uneven resume=same token_drop=true",
    "ranks=2 optimizer=Muon wire=bf16 parameters=late",
    "ranks=2 axes=tp optimizer=Muon parameters=late",
    "ranks=2 stage=3 parameters=unused_somewhere evaluate=true lora=true",
    "stage=3 buckets=tiny parameters=late batch_change=true backward=tensor",
    "ranks=4 stage=1 shards=mics wire=int8 resume=ranks",
    "model=gru ranks=2 parameters=unused_somewhere compression=weights",
    "ranks=2 axes=pp optimizer=Muon wire=bf16",
    "precision=bf16 optimizer=0/1_Adam evaluate=true batch_change=true schedule=warmup compression=weights "
    "token_drop=true",
    "ranks=2 axes=pp order=zero-bubble-v fp8=true",
    "model=moe ranks=4 axes=tp+ep stage=2 shards=mics optimizer=1-bit_LAMB",
    "ranks=2 stage=3 wire=qwz compression=pruning",
    "model=moe precision=autocast optimizer=Muon",
    "ranks=2 optimizer=1-bit_Adam wire=int8",
    "ranks=2 stage=2 tier=zenflow optimizer=SGD resume=stage",
    "ranks=2 axes=tp optimizer=0/1_Adam resume=dp",
    "ranks=4 axes=tp optimizer=1-bit_Adam wire=int8",
    "model=moe ranks=4 axes=tp+ep stage=1 optimizer=Muon clip=true resume=same",
    "ranks=2 stage=2 accumulation=2 wire=int8 parameters=late",
    "stage=3 optimizer=callable parameters=late",
    "ranks=4 stage=1 shards=mics optimizer=local_0/1_Adam parameters=late",
    "model=moe ranks=4 axes=sp+ep stage=1 shards=mics optimizer=local_0/1_Adam resume=same",
]
"""Cells that failed once, made small."""


@pytest.mark.parametrize("line", FOUND)
def test_a_cell_that_failed_once(line: str) -> None:
    result = run_cell(parse(line))
    assert result.outcome == "equal", f"{result.what}\n{result.details}"


def test_a_cell_is_one_line() -> None:
    assert str(Cell()) == "plain" and parse("plain") == Cell()
    for cell in DRAWN:
        assert parse(str(cell)) == cell
    assert parse('{"ranks": 2, "axes": "tp"}') == Cell(ranks=2, axes="tp")
    with pytest.raises(ValueError, match="'rank' is no feature"):
        parse("rank=2")
    with pytest.raises(ValueError, match="stage=4 is not known: use one of 0, 1, 2, 3"):
        parse("stage=4")


def test_every_feature_is_in_some_pair() -> None:
    assert {feature for pair in draw.pairs() for feature in pair} == set(draw.features())
    assert all(getattr(Cell(), name) == values[0] for name, values in CHOICES.items())


def test_what_is_drawn() -> None:
    again = list(itertools.islice(draw.cells(SEED), COUNT))
    assert again == DRAWN
    assert list(itertools.islice(draw.cells(SEED + 1), COUNT)) != DRAWN
    assert not any(why_not(cell) for cell in DRAWN)
    assert sum(cell.ranks == 4 for cell in DRAWN) >= COUNT / 3


def test_every_pair_has_its_turn() -> None:
    drawn = itertools.islice(draw.cells(SEED), 600)
    had = {pair for cell in drawn for pair in draw.pairs_of(cell)}
    assert set(draw.pairs()) <= had


def test_a_failing_cell_becomes_small() -> None:
    """With an injected fault that takes two features and more than one rank."""

    def fails(cell: Cell) -> bool:
        return cell.tier == "nvme" and cell.clip and cell.ranks > 1

    large = parse("ranks=4 axes=tp stage=3 tier=nvme optimizer=SGD accumulation=3 clip=true parameters=tied")
    assert fails(large) and not why_not(large)
    small = shrink.shrunk(large, fails)
    assert str(small) == "ranks=2 stage=1 tier=nvme clip=true"
    text = shrink.script(small, "weights are 1e-3 away")
    assert len(text.splitlines()) < 40
    compile(text, "script", "exec")
    assert "tests.cells" not in text
    moe = shrink.script(Cell(model="moe", ranks=2, axes="ep"), "crash")
    compile(moe, "script", "exec")
    assert len(moe.splitlines()) < 40


def test_the_oracle_sees_all_ranks() -> None:
    """Two replicas of one micro-batch are one replica of two, but for their order."""
    wide, long = expected_of([Cell(ranks=2)]), Alone(Cell(accumulation=2))
    source = iter([(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)])
    loss = long.loss
    long.loss = lambda cell, replica, number, step: loss(cell, *next(source), step)  # type: ignore[method-assign]
    for step in range(3):
        long.step(step, Cell(accumulation=2))  # type: ignore[arg-type]
    assert wide.norms == pytest.approx(long.expected.norms, rel=1e-5)
    for name, param in long.named.items():
        torch.testing.assert_close(wide.weights[name], param.detach(), rtol=1e-5, atol=1e-6)


def test_the_oracle_s_mixture() -> None:
    """Token by token."""
    torch.manual_seed(0)
    layer, x = PlainMixture(), torch.randn(2, 3, WIDTH)
    output, balance, _ = layer(x)
    chances = torch.softmax(x.reshape(6, -1) @ layer.deepspeed_moe.gate.wg.weight.T, 1)  # type: ignore[union-attr]
    for token, chance, found in zip(x.reshape(6, -1), chances, output.reshape(6, -1), strict=True):
        (p, q), (first, second) = chance.topk(2)
        experts = layer.deepspeed_moe.experts.deepspeed_experts  # type: ignore[union-attr]
        wanted = (p * experts[first](token) + q * experts[second](token)) / (p + q)  # type: ignore[index]
        torch.testing.assert_close(found, wanted)
    counts = torch.bincount(chances.argmax(1), minlength=4) / 6
    torch.testing.assert_close(balance, 4 * (counts * chances.mean(0)).sum())


@pytest.mark.parametrize("turned", [False, True])
def test_the_oracle_follows_choices_and_judges_them(turned: bool) -> None:
    """Its own choices change nothing; a token that goes to its least probable experts is found."""
    cell, chosen = Cell(model="moe"), list[torch.Tensor]()
    alone = Alone(cell)
    alone.mixtures[0].register_forward_hook(lambda layer, *_: chosen.append(layer.chosen.clone()))
    for step in range(STEPS):
        alone.step(step, cell)
    if turned:
        others = [each for each in range(EXPERTS) if each not in chosen[1][5]]
        chosen[1][5] = torch.tensor(others[:2])
    expected = expected_of([cell], choices=[[chosen]])
    assert (expected.losses == alone.expected.losses) is not turned
    assert (expected.doubt > nearly_tied(cell)) is turned
    if turned:
        outcome, what, _ = compare(cell, [cell], [], expected, "")
        assert outcome == "wrong" and "less probable" in what


def test_ranks_with_the_same_tokens_choose_alike() -> None:
    cell, choices = Cell(model="moe", ranks=4, axes="tp+sp"), torch.zeros(8, 2, dtype=torch.int64)
    assert by_replica(cell, [[choices], [choices], [choices + 1], [choices + 1]])[0][0][::4, 0].tolist() == [
        0,
        1,
        0,
        1,
    ]
    with pytest.raises(ValueError, match="rank 1 routes its tokens otherwise"):
        by_replica(cell, [[choices], [choices + 1], [choices], [choices]])


@pytest.mark.parametrize("what", ["loss", "norm", "weight", "nothing"])
def test_what_is_wrong_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell, expected = Cell(), expected_of([Cell()])
    weights = {name: value.clone() for name, value in expected.weights.items()}
    losses, norms = [[each[0][0]] for each in expected.losses], list(expected.norms)
    name = "layers.1.feed.up.weight"
    if what == "loss":
        losses[2][0] += 1e-3
    if what == "norm":
        norms[1] *= 1.01
    if what == "weight":
        weights[name] += 0.1 * (weights[name] - expected.start[name])
    monkeypatch.setattr("tests.cells.run._export", lambda *_: ())
    seen = Seen(losses=losses, norms=norms, weights=weights)
    outcome, found, _ = compare(cell, [cell], [[seen]], expected, "")
    wanted = {"loss": "loss of step 2", "norm": "norm of step 1", "weight": name, "nothing": ""}[what]
    assert outcome == ("equal" if what == "nothing" else "wrong") and found.startswith(wanted)


@pytest.mark.parametrize(
    ("line", "name", "least", "most"),
    [
        ("plain", "layers.1.feed.up.weight", 1e-9, 1e-4),
        ("precision=bf16", "layers.1.feed.up.weight", 1e-3, 0.15),
        # it divides by what bf16 left of the first gradients of rare tokens
        ("precision=bf16 optimizer=0/1_Adam schedule=warmup", "layers.0.weight", 0.05, 4.0),
    ],
)
def test_what_other_roundings_change(line: str, name: str, least: float, most: float) -> None:
    cell = parse(line)
    expected = expected_of([cell])
    assert expected.spread(lambda each: each.weights[name]) == 0
    expected.noised = [expected_of([cell], noise=seed) for seed in (1, 2)]
    assert least < expected.spread(lambda each: each.weights[name]) / expected.moved(name) < most


def test_a_resumed_run_has_two_layouts() -> None:
    assert layouts(Cell(ranks=4, stage=1, resume="stage"))[1].stage == 3
    assert layouts(Cell(ranks=4, resume="ranks"))[1].ranks == 2
    chain = layouts(parse("ranks=4 stage=3 wire=qwz resume=2x2,_1"))
    assert [(each.ranks, each.axes, each.wire) for each in chain] == [
        (4, "dp", "qwz"),
        (4, "tp", "qwz"),
        (1, "dp", "plain"),
    ]
    first, second = layouts(parse("ranks=2 axes=tp stage=1 recompute=partitioned resume=dp"))
    assert (first.recompute, second.axes, second.recompute) == ("partitioned", "dp", "no")


def test_refusals_name_a_key() -> None:
    """Every refusal of ``check_config`` among the drawn cells names key and remedy, and nothing is refused later."""
    for cell in draw_some(400):
        for problem in deepspeed.check_config(config_of(cell), world_size=cell.ranks).errors:
            assert problem.key and len(str(problem)) > len(problem.key) + 20, str(problem)


def draw_some(count: int) -> list[Cell]:
    return list(itertools.islice(draw.cells(5), count))


def test_the_page(tmp_path: Path) -> None:
    file = tmp_path / "seed_1.jsonl"
    rows = [
        {"cell": "ranks=2 stage=2 clip=true", "outcome": "equal", "what": "", "seed": 1},
        {"cell": "ranks=4 axes=pp+tp stage=2", "outcome": "refused", "what": "a: b", "seed": 1},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"cell": "cut')
    assert list(rows_of(file)) == rows
    results = matrix.gathered(rows_of(file))
    assert results.squares["stage 2", "clip"].equal == 1
    assert results.squares["axes tp", "stage 2"].refused == results.squares["axes pp", "stage 2"].refused == 1
    text = matrix.page(results)
    assert "50.0% are equal" in text and "| 1 | a: b | `ranks=4 axes=pp+tp stage=2` |" in text
    assert set(results.outcomes) <= set(OUTCOMES)


def test_the_model_of_a_cell_is_the_oracle_s() -> None:
    for cell in draw_some(20):
        assert set(dict(Language(cell).named_parameters())) == set(Alone(cell).named)
