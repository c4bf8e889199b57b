"""Random-LTD: the tokens, the operations and the layers, against what plain indexing gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.data.data_routing.basic_layer import Batch, KeptTokens, RandomLayerTokenDrop, TokenLayout
from deepspeed.data.data_routing.helper import (
    convert_to_random_ltd,
    remove_random_ltd_state_dict,
    save_without_random_ltd,
)
from deepspeed.data.data_routing.layer_token_lr import LayerTokenLR
from deepspeed.data.data_routing.sampling import TokenPositions, TokenSampler
from deepspeed.data.data_routing.scheduler import RandomLTDScheduler
from deepspeed.observe.flops.profiler import FlopsProfiler
from deepspeed.ops.random_ltd.dropping_utils import (
    GatherTokens,
    ScatterTokens,
    gpt_sample_tokens,
)

SECTION: dict[str, Any] = {
    "enabled": True,
    "total_layer_num": 4,
    "random_ltd_layer_num": 2,
    "random_ltd_layer_id": [1, 2],
    "model_mask_name": "attention_mask",
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 4,
        "max_value": 16,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 6, "seq_per_step": 4},
    },
    "global_batch_size": 2,
}


# The operations --------------------------------------------------------------------------------------------


def test_samples_are_sorted_and_without_repetition() -> None:
    torch.manual_seed(0)
    mask = torch.randn(3, 1, 16, 16)
    indices, masks = gpt_sample_tokens(5, 16, 3, 4, "cpu", mask)
    assert indices.shape == (4, 3, 5)
    assert (indices.diff(dim=-1) > 0).all() and indices.min() >= 0 and indices.max() < 16
    assert len({tuple(row) for row in indices.flatten(0, 1).tolist()}) > 6
    assert masks is not None and torch.equal(masks, mask[:, :, :5, :5])
    assert gpt_sample_tokens(5, 16, 3)[1] is None
    with pytest.raises(ValueError, match="reserved_length=17"):
        gpt_sample_tokens(17, 16, 3)


def test_every_token_is_as_likely() -> None:
    torch.manual_seed(0)
    counts = gpt_sample_tokens(4, 16, 500, 8)[0].flatten().bincount(minlength=16)
    assert (counts.float() / 4000 - 0.25).abs().max() < 0.03


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gather_and_scatter_against_plain_indexing(batch_first: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    indices = gpt_sample_tokens(5, 12, 3)[0][0]
    shape = (3, 12, 8) if batch_first else (12, 3, 8)
    dim = 1 if batch_first else 0
    where = (indices if batch_first else indices.t()).unsqueeze(-1)
    ours, plain = (torch.randn(shape, dtype=dtype).requires_grad_() for _ in range(2))
    with torch.no_grad():
        plain.copy_(ours)

    whole, part = GatherTokens.apply(ours, indices.int(), batch_first)
    expected_part = plain.take_along_dim(where, dim)
    assert torch.equal(whole, plain) and torch.equal(part, expected_part)
    results = ScatterTokens.apply(whole, part * 3, indices.int(), batch_first)
    expected = plain.scatter(dim, where.expand_as(expected_part), expected_part * 3)
    assert torch.equal(results, expected)
    weights = torch.randn(shape, dtype=dtype)
    (results * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.equal(ours.grad, plain.grad)


def test_gradients_of_each_operation_alone() -> None:
    indices = gpt_sample_tokens(3, 6, 2)[0][0]
    whole, part = (torch.randn(2, n, 3, dtype=torch.float64).requires_grad_() for n in (6, 3))
    assert torch.autograd.gradcheck(lambda x: GatherTokens.apply(x, indices, True), whole)
    assert torch.autograd.gradcheck(lambda x: GatherTokens.apply(x, indices, True)[1], whole)
    assert torch.autograd.gradcheck(lambda x, y: ScatterTokens.apply(x, y, indices, True), (whole, part))
    assert torch.autograd.gradgradcheck(
        lambda x, y: ScatterTokens.apply(x, y**2, indices, True), (whole, part)
    )


# Which tokens ----------------------------------------------------------------------------------------------


def drawn(place: TokenPositions, batch: int, *, layer: int = 0, seed: int = 1) -> Tensor:
    return TokenSampler(3, seed, lambda: place).draw(layer, 6, 32, batch, torch.device("cpu"))


def test_a_row_keeps_the_same_tokens_wherever_it_is_computed() -> None:
    together = drawn(TokenPositions(5, 0), 4)
    assert torch.equal(together[:2], drawn(TokenPositions(5, 0), 2)) and torch.equal(
        together[2:], drawn(TokenPositions(5, 1), 2)
    )
    others = [
        drawn(TokenPositions(5, 2), 4),
        drawn(TokenPositions(6, 0), 4),
        drawn(TokenPositions(5, 0), 4, layer=1),
    ]
    others += [drawn(TokenPositions(5, 0), 4, seed=2)]
    assert not any(torch.equal(together, other) for other in others)
    assert (together.diff(dim=-1) > 0).all()


def test_the_tokens_are_spread_evenly() -> None:
    kept = torch.cat([drawn(TokenPositions(step, 0), 64).flatten() for step in range(60)])
    share = kept.bincount(minlength=32) / (64 * 60)
    assert (share - 6 / 32).abs().max() < 0.03
    pairs = torch.stack([torch.isin(torch.arange(32), row) for row in kept.view(-1, 6)]).float()
    together = pairs.T @ pairs / len(pairs)
    off = together[~torch.eye(32, dtype=torch.bool)]
    assert (off - 6 * 5 / (32 * 31)).abs().max() < 0.015


def test_no_random_state_is_touched() -> None:
    before = torch.get_rng_state()
    drawn(TokenPositions(0, 0), 2)
    assert torch.equal(before, torch.get_rng_state())


# The schedule ----------------------------------------------------------------------------------------------


def test_the_schedule_against_its_formula() -> None:
    scheduler = RandomLTDScheduler(SECTION)
    lengths, consumed = [], 0
    for step in range(9):
        scheduler.update_seq(step)
        scheduler.update_seq(step)  # a second micro-batch
        lengths.append(scheduler.get_current_seq())
        consumed += 2 * (2 * lengths[-1] + 2 * 16)
        assert scheduler.state["consumed_layer_tokens"] == consumed
    assert lengths == [4, 4, 8, 8, 12, 12, 16, 16, 16]
    assert scheduler.get_random_ltd_layer_num() == 2 and scheduler.model_layer_num == 4
    other = RandomLTDScheduler(SECTION)
    other.load_state_dict(scheduler.state_dict())
    assert other.state == scheduler.state
    assert RandomLTDScheduler(SECTION).get_total_layer_tokens(9) == consumed
    scheduler.reset_to_init()
    assert scheduler.get_state() == RandomLTDScheduler(SECTION).state
    scheduler.set_current_seq(7)
    assert scheduler.get_current_seq() == 7
    scheduler.set_state({"current_value": 3})
    assert scheduler.get_current_seq() == 3


@pytest.mark.parametrize(("minimum", "unit", "first"), [(8, 16, 16), (10, 8, 16), (16, 8, 16), (1, 1, 1)])
def test_a_schedule_begins_at_the_first_multiple_from_its_minimum_on(
    minimum: int, unit: int, first: int
) -> None:
    details = {"require_steps": 50, "seq_per_step": unit}
    schedule = {
        "min_value": minimum, "max_value": 64, "schedule_type": "fixed_linear", "schedule_config": details,
    }  # fmt: skip
    scheduler = RandomLTDScheduler({**SECTION, "random_ltd_schedule": schedule})
    lengths = [scheduler.get_value(step) for step in range(51)]
    assert lengths[0] == first == min(lengths) and lengths[-1] == 64 and lengths == sorted(lengths)
    assert all(length % unit == 0 for length in lengths)


def test_tokens_that_were_cut_away_are_not_counted() -> None:
    scheduler = RandomLTDScheduler(SECTION)  # 2 of 4 layers keep 4 of 16 tokens, 2 sequences
    scheduler.update_seq(0, longest=10)
    scheduler.update_seq(1, longest=3)
    scheduler.update_seq(2, longest=99)
    kept = [scheduler.get_value(step) for step in range(3)]
    assert scheduler.state["consumed_layer_tokens"] == sum(
        2 * (2 * min(own, length) + 2 * length) for own, length in zip(kept, (10, 3, 16), strict=True)
    )


def test_what_a_schedule_needs() -> None:
    schedule = SECTION["random_ltd_schedule"]
    for wrong, told in (
        ({"min_value": None}, "min_value is missing"),
        ({"min_value": 17}, "min_value=17 is above max_value=16"),
        ({"schedule_config": {"require_steps": 3}}, "schedule_config.seq_per_step is missing"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=told):
            RandomLTDScheduler({**SECTION, "random_ltd_schedule": {**schedule, **wrong}})
    with pytest.raises(RuntimeError, match="fixed_linear"):
        RandomLTDScheduler({**SECTION, "random_ltd_schedule": None}).get_value(0)


@pytest.mark.parametrize("kind", ["linear", "log"])
def test_a_learning_rate_by_layer_tokens(kind: str) -> None:
    scheduler = RandomLTDScheduler(SECTION)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    rates = LayerTokenLR(
        optimizer, scheduler, total_layer_tokens=500, warmup_layer_tokens=100, warmup_type=kind
    )
    found = []
    for step in range(8):
        found.append(rates.get_last_lr()[0])
        scheduler.update_seq(step)
        rates.step()
    # 80, 80, 96, 96, 112, 112, 128 layer tokens
    early = (
        0.4
        if kind == "linear"
        else 0.5 * float(torch.log(torch.tensor(81.0)) / torch.log(torch.tensor(101.0)))
    )
    expected = [0.0, early, *(0.5 * (500 - n) / 400 for n in (160, 256, 352, 464)), 0.0, 0.0]
    assert found == pytest.approx(expected, abs=1e-6)
    with pytest.raises(DeepSpeedConfigError, match="warmup_layer_tokens=500"):
        LayerTokenLR(optimizer, scheduler, total_layer_tokens=500, warmup_layer_tokens=500)


# What a layer is given -------------------------------------------------------------------------------------


def test_forms_of_arguments() -> None:
    batch = Batch(2, 8, True)
    for name, shape, layout in (
        ("attention_mask", (2, 1, 8, 8), TokenLayout(0, (-2, -1), True)),
        ("attention_mask", (1, 1, 1, 8), TokenLayout(0, (-2, -1), True)),
        ("attention_mask", (2, 8), TokenLayout(0, (1,))),
        ("src_mask", (8, 8), TokenLayout(None, (0, 1))),
        ("position_bias", (1, 4, 8, 8), TokenLayout(0, (-2, -1), True)),
        ("alibi", (8, 1, 8), TokenLayout(0, (-2, -1), True)),
        ("position_ids", (1, 8), TokenLayout(0, (1,))),
        ("position_ids", (3, 2, 8), TokenLayout(1, (2,))),
        ("position_embeddings", (1, 8, 6), TokenLayout(0, (1,))),
        ("position_embeddings", (2, 1, 8, 6), TokenLayout(0, (2,))),
        ("position_embeddings", (3, 2, 8, 6), TokenLayout(1, (2,))),
        ("rotation", (8, 3), TokenLayout(None, (0,))),
        ("encoder_attention_mask", (2, 1, 8, 8), None),
        ("head_mask", (2, 4), None),
    ):
        assert batch.layout(name, torch.zeros(shape)) == layout, (name, shape)
    other = Batch(2, 8, False)
    assert other.layout("hidden", torch.zeros(8, 2, 6)) == TokenLayout(1, (0,))
    assert other.layout("rotary_pos_emb", torch.zeros(8, 1, 1, 6)) == TokenLayout(1, (0,))


def test_arguments_at_the_kept_tokens() -> None:
    indices = torch.tensor([[1, 4, 6], [0, 2, 7]])
    kept = KeptTokens(Batch(2, 8, True), indices, False)
    mask, table, heads = torch.randn(2, 1, 8, 8), torch.randn(1, 8, 6), torch.randn(2 * 4, 1, 8)
    for row, chosen in enumerate(indices):
        assert torch.equal(kept.of("mask", mask)[row, 0], mask[row, 0][chosen][:, chosen])
        assert torch.equal(kept.of("position_embeddings", (table,))[0][row], table[0, chosen])
        by_head = kept.of("alibi", heads).view(2, 4, 1, 3)[row]
        assert torch.equal(by_head, heads.view(2, 4, 1, 8)[row][..., chosen])
    axes = torch.arange(48).view(3, 2, 8)
    assert torch.equal(kept.of("position_ids", axes), axes.take_along_dim(indices[None], 2))
    assert torch.equal(kept.of("cache_position", torch.arange(8)), indices)
    assert kept.of("use_cache", True) is False and kept.of("past_key_values", object()) is None
    assert kept.of("output_attentions", False) is False
    with pytest.raises(ValueError, match="cu_seq_lens_q packs"):
        kept.of("cu_seq_lens_q", torch.arange(3))
    last = KeptTokens(Batch(2, 8, False), indices, False).of("rotary", torch.arange(8.0).view(8, 1, 1, 1))
    assert torch.equal(last[..., 0, 0], indices.t().float())


class Block(nn.Module):
    """Causal attention with rotation tables [tokens, size] or masks, on activations of either order."""

    def __init__(self, width: int = 8, heads: int = 2, batch_first: bool = True) -> None:
        super().__init__()
        self.heads, self.batch_first = heads, batch_first
        self.kind = "full"
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        y = x if self.batch_first else x.transpose(0, 1)
        q, k, v = self.qkv(self.norm(y)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)
        if positions is not None:
            q, k = q + positions, k + positions
        z = F.scaled_dot_product_attention(q, k, v, attention_mask, is_causal=attention_mask is None)
        y = y + self.out(z.transpose(1, 2).flatten(-2))
        y = y + self.mlp(y)
        return y if self.batch_first else y.transpose(0, 1)


class Stack(nn.Module):
    def __init__(self, layers: int = 4, width: int = 8, batch_first: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, batch_first=batch_first) for _ in range(layers))
        self.head = nn.Linear(width, 1)
        self.recompute: bool | None = None

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            assert layer.kind == "full"
            if self.recompute is None:
                x = layer(x, attention_mask)
            else:
                x = checkpoint(layer, x, attention_mask, use_reentrant=self.recompute)
        return self.head(x).square().mean()


def dropping(layer: nn.Module, kept: int, **changes: Any) -> RandomLayerTokenDrop:
    scheduler = RandomLTDScheduler({**SECTION, **changes})
    scheduler.set_current_seq(kept)
    scheduler.sampler = TokenSampler(2, 0, lambda: TokenPositions(0, 0))
    wrapped = RandomLayerTokenDrop(layer)
    wrapped.init_config({**SECTION, **changes}, scheduler, 1)
    return wrapped


def expected_output(block: Block, x: Tensor, indices: Tensor, **arguments: Any) -> Tensor:
    """Each row alone with its own tokens."""
    rows = []
    for row, chosen in zip(x, indices, strict=True):
        given = {name: make(chosen) for name, make in arguments.items()}
        rows.append(row.index_copy(0, chosen, block(row[chosen][None], **given)[0]))
    return torch.stack(rows)


@pytest.mark.parametrize("model_type", ["encoder", "decoder"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_layer_against_each_row_alone(model_type: str, masked: bool) -> None:
    torch.manual_seed(0)
    x, block = torch.randn(3, 16, 8), Block()
    mask = torch.randn(3, 1, 16, 16) if masked else None
    wrapped = dropping(block, 6, model_type=model_type)
    indices = wrapped.random_ltd_scheduler.sampler.draw(1, 6, 16, 3, x.device)  # type: ignore[union-attr]
    found = wrapped(x, attention_mask=mask) if masked else wrapped(x, mask)
    rows = [
        expected_output(
            block, x[i : i + 1], indices[i : i + 1],
            **({"attention_mask": lambda c, m=mask[i]: m[:, c][:, :, c]} if mask is not None else {}),
        )
        for i in range(3)
    ]  # fmt: skip
    torch.testing.assert_close(found, torch.cat(rows))
    wrapped.eval()
    assert torch.equal(wrapped(x, mask), block(x, mask))
    wrapped.train()
    wrapped.random_ltd_scheduler.set_current_seq(16)  # type: ignore[union-attr]
    assert torch.equal(wrapped(x, mask), block(x, mask))


def test_tables_without_a_batch_make_rows_keep_the_same_tokens() -> None:
    torch.manual_seed(0)
    x, table, block = torch.randn(3, 16, 8), torch.randn(16, 4), Block()
    wrapped = dropping(block, 6)
    chosen = wrapped.random_ltd_scheduler.sampler.draw(1, 6, 16, 3, x.device)[0]  # type: ignore[union-attr]
    expected = x.index_copy(1, chosen, block(x[:, chosen], positions=table[chosen]))
    torch.testing.assert_close(wrapped(x, positions=table), expected)
    causal = torch.ones(16, 16, dtype=torch.bool).tril()
    expected = x.index_copy(1, chosen, block(x[:, chosen]))
    torch.testing.assert_close(wrapped(x, attention_mask=causal), expected)


def test_tokens_before_sequences() -> None:
    torch.manual_seed(0)
    x, block = torch.randn(16, 3, 8), Block(batch_first=False)
    wrapped = dropping(block, 6, hidden_state_order="seq_batch_dim")
    indices = wrapped.random_ltd_scheduler.sampler.draw(1, 6, 16, 3, x.device)  # type: ignore[union-attr]
    block.batch_first, plain = True, x.transpose(0, 1)
    expected = expected_output(block, plain, indices).transpose(0, 1)
    block.batch_first = False
    torch.testing.assert_close(wrapped(x), expected)


def test_what_a_layer_may_return() -> None:
    class Pair(nn.Module):
        def forward(self, hidden: Tensor) -> tuple[Tensor, int]:
            return hidden + 1, 7

    class Other(nn.Module):
        def forward(self, hidden: Tensor) -> dict[str, Tensor]:
            return {"hidden": hidden}

    x = torch.zeros(2, 16, 8)
    whole, rest = dropping(Pair(), 6, model_mask_name=None)(hidden=x)
    assert rest == 7 and whole.sum() == 2 * 6 * 8
    with pytest.raises(ValueError, match="Other returns dict"):
        dropping(Other(), 6, model_mask_name=None)(x)
    with pytest.raises(
        DeepSpeedConfigError, match="model_mask_name='attention_mask' is not an argument of Pair"
    ):
        dropping(Pair(), 6)
    with pytest.raises(DeepSpeedConfigError, match="model_type='both'"):
        dropping(Pair(), 6, model_type="both", model_mask_name=None)


def test_half_of_the_tokens_take_half_of_the_products() -> None:
    block, x = Block(64, 4), torch.randn(2, 256, 64, requires_grad=True)
    counted = []
    for kept in (256, 128):
        layer = dropping(block, kept)
        profiler = FlopsProfiler(layer)
        profiler.start_profile()
        layer(x).sum().backward()
        profiler.stop_profile()
        counted.append(int(profiler.get_total_flops()) + int(profiler.get_total_backward_flops()))
        profiler.end_profile()
    assert counted[1] / counted[0] <= 0.5


# Names -----------------------------------------------------------------------------------------------------


def test_names_are_those_of_the_plain_model() -> None:
    plain, model = Stack(), Stack()
    parameters = [name for name, _ in plain.named_parameters()]
    modules = [name for name, _ in plain.named_modules()]
    assert convert_to_random_ltd(model, Block) is model
    assert [name for name, _ in model.named_parameters()] == parameters
    assert list(model.state_dict()) == list(plain.state_dict()) == list(save_without_random_ltd(model))
    assert list(dict.fromkeys(name for name, _ in model.named_modules())) == modules
    assert sum(isinstance(each, RandomLayerTokenDrop) for each in model.modules()) == 4
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model.state_dict()["layers.2.out.weight"], plain.layers[2].out.weight)
    assert model.get_submodule("layers.1.out") is model.layers[1].random_ltd_layer.out
    convert_to_random_ltd(model, Block)  # again: nothing more
    assert sum(isinstance(each, RandomLayerTokenDrop) for each in model.modules()) == 4


def test_state_dicts_with_longer_names() -> None:
    plain, model = Stack(), convert_to_random_ltd(Stack(), Block)
    longer = {
        name.replace("layers.", "layers.", 1)
        .replace(".", "*", 2)
        .replace("*", ".", 1)
        .replace("*", ".random_ltd_layer.")
        if name.startswith("layers")
        else name: value
        for name, value in plain.state_dict().items()
    }
    assert "layers.0.random_ltd_layer.out.weight" in longer
    assert list(remove_random_ltd_state_dict(longer)) == list(plain.state_dict())
    model.load_state_dict(longer)
    assert torch.equal(model.layers[3].out.weight, plain.layers[3].out.weight)
    del longer["layers.0.random_ltd_layer.out.weight"]
    longer["layers.0.random_ltd_layer.other"] = torch.zeros(1)
    found = model.load_state_dict(longer, strict=False)
    assert found.missing_keys == ["layers.0.out.weight"] and found.unexpected_keys == ["layers.0.other"]


def test_a_class_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="Stack has no layer of class Conv2d"):
        convert_to_random_ltd(Stack(), nn.Conv2d)
