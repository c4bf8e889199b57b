"""The arithmetic: closed forms of the papers, optimizers' states, gathers, models given as lists."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.config.deepspeed_config import DeepSpeedConfig
from deepspeed.config.plan import make_plan
from deepspeed.config.sections.model import TiledComputeConfig
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.adam.compact_adam import CompactAdam
from deepspeed.ops.lion import FusedLion
from deepspeed.ops.sgd import SGD
from deepspeed.planning import counted_activations
from deepspeed.planning.activations import TransformerShape, activation_bytes, shape_of, tiles_of
from deepspeed.planning.ledger import Ledger, MemoryKind, MemoryPhase, MemoryPlace
from deepspeed.planning.optimizer_states import ADAM, StateSize, profile_optimizer
from deepspeed.planning.planned_model import planned_model_of
from deepspeed.planning.planner import PlanSetting, plan_memory
from deepspeed.planning.request import PlanRequest, answer
from deepspeed.transforms.lora import Init, LoRAConfig, QuantizationConfig, init_lora
from tests.planning.memory.models import MODELS, ParamRow, config_for, planned_model_of_rows

STATES = (MemoryKind.PARAMETERS, MemoryKind.MASTERS, MemoryKind.STATE, MemoryKind.GRADIENTS)


def ledger_for(config: dict[str, Any], ranks: int, **options: Any) -> tuple[Ledger, int]:
    with torch.device("meta"):
        model = MODELS["gpt"]()
    found = answer(PlanRequest(module=model, config=config, ranks=ranks, **options))
    return found.ledger, found.setting.model.numel


@pytest.mark.parametrize("ranks", [1, 4, 64])
@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_model_states_per_parameter(stage: int, bf16: bool, ranks: int) -> None:
    """Rajbhandari et al. 2020, table 1, with Adam; padding is at most a sixteenth of a shard's elements here."""
    zero = {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    }
    ledger, numel = ledger_for(config_for(stage, bf16=bf16, **zero), ranks)
    n = ranks if stage else 1
    expected = {
        (0, True): 16,
        (0, False): 16,
        (1, True): 4 + 12 / n,
        (1, False): 8 + 8 / n,
        (2, True): 2 + 14 / n,
        (2, False): 4 + 12 / n,
        (3, True): 16 / n,
        (3, False): 16 / n,
    }[stage, bf16]
    found = sum(ledger.entries[MemoryPhase.STEP, MemoryPlace.DEVICE, kind] for kind in STATES) / numel
    assert expected * 0.999 <= found <= expected * (1.02 if ranks < 64 else 1.1)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: FusedAdam(p), StateSize((4, 4), 4)),
        (lambda p: DeepSpeedCPUAdam(p, fp32_optimizer_states=False), StateSize((2, 2), 4)),
        (lambda p: CompactAdam(p), StateSize((1, 1), 4, per_block=8, block=256)),
        (lambda p: FusedLion(p), StateSize((4,), 4)),
        (lambda p: SGD(p, lr=0.1), StateSize((), 4)),
        (lambda p: SGD(p, lr=0.1, momentum=0.9), StateSize((4,), 4)),
        (lambda p: torch.optim.AdamW(p), StateSize((2, 2), 4)),
        (lambda p: torch.optim.Adafactor(p), StateSize((), 4 + 2 * 4 * 2)),
        (lambda p: torch.optim.LBFGS(p), StateSize()),
    ],
)
def test_what_optimizers_keep(make: Any, expected: StateSize) -> None:
    """Per element and per tensor of [4, 4] masters in bf16. LBFGS wants a closure: Adam is assumed."""
    with torch.device("meta"):
        optimizer = make([nn.Parameter(torch.zeros(4, 4))])
    before = {key: value for key, value in optimizer.__dict__.items() if key != "state"}
    assert profile_optimizer(optimizer, torch.bfloat16).groups == (expected,)
    assert not optimizer.state
    assert {key: value for key, value in optimizer.__dict__.items() if key != "state"} == before


@pytest.mark.parametrize(("masters", "expected"), [(False, 10.0), (True, 6.0)])
@pytest.mark.parametrize("stage", [1, 2])
def test_small_states_per_parameter(stage: int, masters: bool, expected: float) -> None:
    """Weights, masters, gradients and moments of one rank; the scales of 256 elements add 8 bytes."""
    params = {"lr": 0.01, "state_bits": 8, "stochastic_rounding": masters}
    config = config_for(stage, bf16=True, optimizer={"type": "AdamW", "params": params})
    config["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": masters}
    ledger, numel = ledger_for(config, 1)
    found = sum(ledger.entries[MemoryPhase.STEP, MemoryPlace.DEVICE, kind] for kind in STATES) / numel
    assert expected + 8 / 256 <= found <= 1.03 * expected


def test_states_that_leave_the_device_between_updates() -> None:
    """``compile.offload_opt_states``: 12 bytes per parameter on the device in the update alone, and room for them on
    the host."""
    plain, numel = ledger_for(config_for(1, bf16=True), 1)
    moving = {"compile": {"deepcompile": True, "offload_opt_states": True}}
    ledger, _ = ledger_for({**config_for(1, bf16=True), **moving}, 1)
    for phase in (MemoryPhase.FORWARD, MemoryPhase.BACKWARD):
        saved = plain.total(phase, MemoryPlace.DEVICE) - ledger.total(phase, MemoryPlace.DEVICE)
        assert 12 * numel <= saved <= 12.5 * numel
        assert ledger.total(phase, MemoryPlace.HOST) - plain.total(phase, MemoryPlace.HOST) == saved
    assert ledger.total(MemoryPhase.STEP, MemoryPlace.DEVICE) == plain.total(
        MemoryPhase.STEP, MemoryPlace.DEVICE
    )


def test_frozen_weights_of_few_bits_take_their_bytes() -> None:
    numels = {}
    for bits in (None, 8, 6):
        quantization = None if bits is None else QuantizationConfig(q_bits=bits)
        with Init(LoRAConfig(lora_r=4, target_mods=["up", "down"]), quantization), torch.device("meta"):
            model = nn.ModuleDict({name: nn.Linear(512, 512, bias=False) for name in ("up", "down")})
        init_lora(model)
        config = config_for(3, bf16=True, stage3_param_persistence_threshold=0)
        ledger = answer(PlanRequest(module=model, config=config, ranks=4)).ledger
        numels[bits] = ledger.entries[MemoryPhase.STEP, MemoryPlace.DEVICE, MemoryKind.PARAMETERS]
    adapters = 2 * 2 * 4 * 2 * 512 / 4
    for bits, each in ((None, 2), (8, 1 + 4 / 512), (6, 0.75 + 4 / 512)):
        assert numels[bits] == pytest.approx(adapters + each * 2 * 512 * 512 / 4, rel=0.02)


def test_muon_keeps_one_value_for_matrices_and_two_for_the_rest() -> None:
    ledger, _ = ledger_for(config_for(1, optimizer={"type": "Muon", "params": {"lr": 0.01}}), 1)
    with torch.device("meta"):
        model = MODELS["gpt"]()
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n)
    others = sum(p.numel() for p in model.parameters()) - matrices
    state = ledger.entries[MemoryPhase.STEP, MemoryPlace.DEVICE, MemoryKind.STATE]
    assert 4 * matrices + 8 * others <= state <= 4 * matrices + 8 * others + 1000


def test_a_model_given_as_a_list_is_planned_like_the_module() -> None:
    config = DeepSpeedConfig(config_for(2, bf16=True))
    plan = make_plan(config)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 30)) for _ in range(5)))
    rows = [
        ParamRow(name=name, numel=param.numel(), unit=int(name.split(".")[0]))
        for name, param in module.named_parameters()
    ]
    ledgers = [
        plan_memory(PlanSetting(model=model, plan=plan, zero=config.zero_config, optimizer=ADAM, ranks=2))
        for model in (planned_model_of(module, plan), planned_model_of_rows(rows, plan))
    ]
    assert ledgers[0].entries == ledgers[1].entries


@pytest.mark.parametrize(("live", "expected"), [(0, 1), (10**9, 8)])
def test_gathered_units(live: int, expected: int) -> None:
    """A budget of nothing gathers one block after the other; without a limit all stay."""
    zero = {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": live,
    }
    config = DeepSpeedConfig(config_for(3, **zero))
    plan = make_plan(config)
    rows = [ParamRow(name=str(i), numel=6400, unit=i) for i in range(8)]
    ledger = plan_memory(
        PlanSetting(
            model=planned_model_of_rows(rows, plan),
            plan=plan,
            zero=config.zero_config,
            optimizer=ADAM,
            ranks=2,
            device_type="cpu",
        )
    )
    assert ledger.entries[MemoryPhase.BACKWARD, MemoryPlace.HOST, MemoryKind.GATHERED] == expected * 6400 * 4


def test_prefetching_takes_memory_on_devices() -> None:
    zero = {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 2 * 6400,
    }
    config = DeepSpeedConfig(config_for(3, **zero))
    plan = make_plan(config)
    model = planned_model_of_rows([ParamRow(name=str(i), numel=6400, unit=i) for i in range(8)], plan)
    ledger = plan_memory(
        PlanSetting(model=model, plan=plan, zero=config.zero_config, optimizer=ADAM, ranks=2)
    )
    gathered = ledger.entries[MemoryPhase.FORWARD, MemoryPlace.DEVICE, MemoryKind.GATHERED]
    assert gathered == 3 * 6400 * 4  # one in use, two ahead


def test_building_under_zero_init_never_holds_the_model() -> None:
    config = config_for(3, bf16=True)
    whole, numel = ledger_for(config, 4)
    assert whole.entries[MemoryPhase.BUILD, MemoryPlace.HOST, MemoryKind.PARAMETERS] == 4 * numel
    assert whole.entries[MemoryPhase.INITIALIZE, MemoryPlace.DEVICE, MemoryKind.PARAMETERS] >= 4 * numel
    cut, _ = ledger_for(config, 4, zero_init=True)
    assert cut.total(MemoryPhase.BUILD, MemoryPlace.HOST) < 1000
    shards_and_a_bucket = cut.entries[MemoryPhase.INITIALIZE, MemoryPlace.DEVICE, MemoryKind.PARAMETERS]
    assert shards_and_a_bucket < 2.1 * numel


def test_sums_in_16_bit_need_buffers_on_devices() -> None:
    """Buckets pass them on, so what is needed is that of the largest, at every stage."""
    ledger, numel = ledger_for(config_for(1, bf16=True), 2)
    assert 0 < ledger.entries[MemoryPhase.BACKWARD, MemoryPlace.DEVICE, MemoryKind.COMMUNICATION] <= 2 * numel
    ledger, numel = ledger_for(config_for(2, bf16=True), 2)
    assert (
        0
        < ledger.entries[MemoryPhase.BACKWARD, MemoryPlace.DEVICE, MemoryKind.COMMUNICATION]
        <= 2 * 200_000 * 2
    )
    ledger, _ = ledger_for(config_for(1), 2)
    assert ledger.entries[MemoryPhase.BACKWARD, MemoryPlace.DEVICE, MemoryKind.COMMUNICATION] == 0


@pytest.mark.parametrize("stage", [0, 1])
def test_sums_over_messages_receive_into_buffers(stage: int) -> None:
    """Ranks without shared memory get this rank's shard from all others, for every bucket that is under way."""
    config = config_for(stage)
    ledger, numel = ledger_for(config, 4, device_type="cpu", nodes=4)
    together = ledger_for(config, 4, device_type="cpu")[0]
    alone = ledger_for(config | {"comm": {"shared_memory": False}}, 4, device_type="cpu")[0]
    kind = (MemoryPhase.BACKWARD, MemoryPlace.HOST, MemoryKind.COMMUNICATION)
    assert ledger.entries[kind] == alone.entries[kind] == pytest.approx(3 * numel / 4 * 4, rel=0.02)
    assert not together.entries[kind]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_plan_is_made_of_the_parts_of_a_run(stage: int) -> None:
    """A wire format that the plan names is rehearsed, without a line about it in ``memory_plan``."""
    sums = []

    class Counted:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def start(self, local: Tensor, *rest: Any) -> Any:
            sums.append(local.device.type)
            return self.inner.start(local, *rest)

    config = DeepSpeedConfig(config_for(stage))
    plan = make_plan(config)
    plan = replace(plan, gradients=replace(plan.gradients, formats=(Counted,)))
    model = planned_model_of_rows([ParamRow(name=str(i), numel=6400, unit=i) for i in range(3)], plan)
    plan_memory(PlanSetting(model=model, plan=plan, zero=config.zero_config, optimizer=ADAM, ranks=2))
    assert sums and set(sums) == {"meta"}


def test_replicas_add_their_sums() -> None:
    """MiCS on devices: the second sum, over the replicas, needs buffers even where one rank holds a whole copy."""
    communication = MemoryPhase.BACKWARD, MemoryPlace.DEVICE, MemoryKind.COMMUNICATION
    zero = {"mics_shard_size": 1}
    alone, _ = ledger_for(config_for(3, bf16=True, **zero), 1)
    assert alone.entries[communication] == 0
    replicated, _ = ledger_for(config_for(3, bf16=True, **zero), 2)
    assert replicated.entries[communication] > 0


def test_a_collective_update_leaves_nothing_on_the_device() -> None:
    """Twin-Flow is for elementwise optimizers: LAMB's norms are of everything at once (``make_tier``)."""
    share = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    state = MemoryPhase.STEP, MemoryPlace.DEVICE, MemoryKind.STATE
    for name, expected in (("Adam", True), ("Lamb", False)):
        ledger, _ = ledger_for(config_for(3, optimizer={"type": name, "params": {"lr": 1e-3}}, **share), 2)
        assert (ledger.entries[state] > 0) is expected


SHAPE = TransformerShape(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=32,
    head_dim=128,
    intermediate=16384,
    vocabulary=0,
    mlp_tensors=2,
    scores_kept=False,
)


def test_activations_of_a_classical_layer() -> None:
    """Korthikanti et al. 2022: 34 bytes per token, layer and hidden value in 16 bits, without scores; dropout masks (3)
    are not in ours, norms in fp32 are."""
    per_value = activation_bytes(SHAPE, micro_batch=2, sequence=1024, itemsize=2, checkpointing=False) / (
        2 * 1024 * 32 * 4096
    )
    assert per_value == pytest.approx(2 * (4 + 7 + 8) + 8, rel=1e-9)
    checkpointed = activation_bytes(SHAPE, micro_batch=2, sequence=1024, itemsize=2, checkpointing=True)
    assert checkpointed == 2 * 1024 * 4096 * (32 * 2 + per_value)


def test_activations_with_8_bit_products() -> None:
    """Of a classical layer, 2 bytes each: both normalized inputs (h each) and the MLP's inner one (4h) take a byte
    less, and the output of attention (h) a byte more."""
    shape = TransformerShape(
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=4,
        head_dim=16,
        intermediate=256,
        vocabulary=0,
        mlp_tensors=2,
        scores_kept=False,
    )
    sizes = {"micro_batch": 2, "sequence": 8, "itemsize": 2, "checkpointing": False}
    less = activation_bytes(shape, **sizes) - activation_bytes(shape, **sizes, float8=True)
    assert less == 2 * 16 * (2 * 64 + 256 - 64)


def test_of_tiles_with_8_bit_products_one_is_smaller() -> None:
    """4 tiles: a fourth of the MLP's inner input was counted, and a fourth takes a byte less."""
    sizes = {"micro_batch": 2, "sequence": 8, "itemsize": 2, "checkpointing": False, "mlp_tiles": 4}
    less = activation_bytes(SHAPE, **sizes) - activation_bytes(SHAPE, **sizes, float8=True)
    assert less == 32 * 16 * (2 * 4096 + 16384 // 4 - 4096)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_scores_of_a_shared_sequence(ranks: int) -> None:
    """Scores and their softmax, 2 bytes each, of heads / ranks x 64 x 64 tokens on each rank."""
    sections = {"sequence_parallel_size": ranks, "train_micro_batch_size_per_gpu": 2}
    key = (MemoryPhase.FORWARD, MemoryPlace.DEVICE, MemoryKind.ACTIVATIONS)

    def activations(shape: TransformerShape) -> int:
        asked = {"shape": shape, "sequence": 64, "ranks_per_sequence": ranks}
        return ledger_for(config_for(0, bf16=True) | sections, 8, **asked)[0].entries[key]

    scores = activations(replace(SHAPE, scores_kept=True)) - activations(SHAPE)
    assert scores == 32 * 2 * 2 * 2 * (32 // ranks) * 64 * 64


def test_a_budget_is_counted_on_the_tokens_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:

    seen: list[tuple[int, int]] = []

    def choose_recomputation(
        module: Any, limit: float, micro_batch: int, sequence: int, precision: Any
    ) -> Any:
        seen.append((micro_batch, sequence))
        raise counted_activations.CannotCount("enough")

    monkeypatch.setattr(counted_activations, "choose_recomputation", choose_recomputation)
    sections = {"sequence_parallel_size": 8, "activation_checkpointing": {"memory_budget": 0.5}}
    ledger_for(config_for(0) | sections, 8, shape=SHAPE, sequence=60, ranks_per_sequence=8)
    assert [sequence for _, sequence in seen] == [8]


def test_activations_in_tiles_of_shared_sequences_with_inputs_on_the_host() -> None:
    """8 ranks share 64 tokens. Bytes per token and hidden value: of one layer, and the inputs of 32 layers."""
    sections = {
        "sequence_parallel_size": 8,
        "tiled_compute": {"enabled": True, "mlp_shards": 4},
        "activation_checkpointing": {"cpu_checkpointing": True},
    }
    asked = {"shape": SHAPE, "sequence": 64, "checkpointing": True, "ranks_per_sequence": 8}
    whole, _ = ledger_for(config_for(0, bf16=True), 8, **asked)
    tiled, _ = ledger_for(config_for(0, bf16=True) | sections, 8, **asked)
    per_token, inputs = (4 + 7 + 8 / 4) * 2 + 8, 32 * 2
    key = MemoryKind.ACTIVATIONS
    assert whole.entries[MemoryPhase.FORWARD, MemoryPlace.DEVICE, key] == 8 * 4096 * (46 + inputs)
    assert tiled.entries[MemoryPhase.FORWARD, MemoryPlace.DEVICE, key] == 8 * 4096 * per_token
    assert tiled.entries[MemoryPhase.FORWARD, MemoryPlace.HOST, key] == 8 * 4096 * inputs


def test_tiles_are_those_of_the_section_or_its_defaults() -> None:
    from dataclasses import replace

    shape = replace(SHAPE, vocabulary=4096 * 3 + 1)
    section = TiledComputeConfig(enabled=True)
    assert tiles_of(shape, 4096 * 2, section) == (2, 4)
    assert tiles_of(shape, 4096 * 2, TiledComputeConfig(enabled=True, mlp=False, loss_shards=7)) == (1, 7)
    assert tiles_of(shape, 4096 * 2, TiledComputeConfig()) == (1, 1)


def test_a_memory_budget_is_what_activations_take() -> None:
    def activations(limit: float | None) -> tuple[int, list[str]]:
        section = {} if limit is None else {"activation_checkpointing": {"memory_budget": limit}}
        ledger, _ = ledger_for(config_for(0) | section, 1, shape=SHAPE, sequence=128)
        return ledger.entries[MemoryPhase.FORWARD, MemoryPlace.DEVICE, MemoryKind.ACTIVATIONS], ledger.notes

    everything, _ = activations(None)
    share, notes = activations(0.6)
    assert share == int(0.6 * everything) and any("memory_budget" in note for note in notes)
    assert activations(1e9)[0] == min(10**9, everything)


def test_the_shape_is_read_from_configs() -> None:
    class Llama:
        num_hidden_layers, hidden_size, num_attention_heads, num_key_value_heads = 4, 64, 8, 2
        intermediate_size, vocab_size, hidden_act = 128, 1000, "silu"

    class Gpt2:
        n_layer, n_embd, n_head, n_inner, vocab_size, activation_function = 2, 32, 4, None, 50, "gelu_new"

    llama, gpt2 = shape_of(Llama()), shape_of(Gpt2())
    assert llama is not None and gpt2 is not None
    assert (llama.kv_heads, llama.head_dim, llama.mlp_tensors) == (2, 8, 4)
    assert (gpt2.layers, gpt2.intermediate, gpt2.mlp_tensors) == (2, 128, 8)
    assert shape_of(object()) is None
