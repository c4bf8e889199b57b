"""``InferenceEngineV2`` as its clients use it: they schedule, it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.inference import (
    InferenceEngineV2,
    RaggedInferenceEngineConfig,
    build_engine_from_ds_checkpoint,
    build_hf_engine,
)
from deepspeed.inference.quantized.selection import FrozenLinear
from deepspeed.inference.v2 import engine_factory
from deepspeed.inference.v2.checkpoint import CheckpointEngineBase
from deepspeed.inference.v2.checkpoint.in_memory_engine import InMemoryModelEngine
from deepspeed.inference.v2.policy import InferenceV2Policy
from deepspeed.inference.v2.scheduling_utils import SchedulingError, SchedulingResult
from tests.clients.kit import clean_clients
from tests.pool import distributed

transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")

from tests.clients.architectures import make  # noqa: E402
from tests.clients.test_inference import expected, prompts  # noqa: E402

NEW = 6


def config(blocks: int = 16, **manager: Any) -> RaggedInferenceEngineConfig:
    memory = {"mode": "allocate", "size": blocks}
    return RaggedInferenceEngineConfig(state_manager={"memory_config": memory, **manager})  # type: ignore[arg-type]


def engine_of(model: Any, settings: RaggedInferenceEngineConfig | None = None) -> InferenceEngineV2:
    return InferenceEngineV2(InferenceV2Policy(InMemoryModelEngine(model)), settings or config())


def generate(engine: InferenceEngineV2, given: list[list[int]], new: int = NEW) -> list[list[int]]:
    """Prompts in two parts, the second of which shares forwards with others' tokens."""
    tokens = [list(each) for each in given]
    first = engine.put(range(len(given)), [torch.tensor(each[:2]) for each in given])
    assert first.shape == (len(given), 96)
    rest = [torch.tensor(each[2:]) for each in given]
    for _ in range(new):
        chosen = engine.put(range(len(given)), rest).argmax(-1)
        for each, token in zip(tokens, chosen.tolist(), strict=True):
            each.append(token)
        rest = [chosen[index : index + 1] for index in range(len(given))]
    for uid in range(len(given)):
        engine.flush(uid)
    return tokens


def test_put_gives_the_tokens_of_generate_from_saved_weights(tmp_path: Path) -> None:
    model = make("llama").eval()
    wanted = expected(model, prompts(), NEW)
    model.save_pretrained(tmp_path / "saved")
    engine = build_hf_engine(str(tmp_path / "saved"), config())
    assert engine._policy._checkpoint_engine.model_config.max_seq_length == 2048
    assert generate(engine, prompts()) == wanted
    assert engine._config.state_manager.max_ragged_batch_size == 768 and engine.model is engine._model
    assert engine.free_blocks.tolist() == [16] and engine.n_kv_cache_groups == 1
    engine.serialize(str(tmp_path / "engine"))
    again = build_engine_from_ds_checkpoint(str(tmp_path / "engine"), config())
    assert generate(again, prompts()) == wanted
    assert generate(build_hf_engine(str(tmp_path / "engine"), config()), prompts()) == wanted


def test_a_model_in_memory_is_not_changed() -> None:
    model = make("falcon").eval()
    wanted = expected(model, prompts(), NEW)
    assert generate(engine_of(model), prompts()) == wanted
    assert expected(model, prompts(), NEW) == wanted


def test_what_can_be_scheduled() -> None:
    engine = engine_of(
        make("llama").eval(),
        config(
            4,
            max_tracked_sequences=3,
            max_ragged_batch_size=150,
            max_ragged_sequence_count=2,
            max_context=200,
        ),
    )
    assert (engine.query(0, 100, 4)[0], engine.query(0, 100, 4)[1].tolist()) == (100, [2])
    assert (engine.query(0, 100, 1)[0], engine.query(0, 100, 1)[1].tolist()) == (64, [1])
    assert engine.query(0, 500, 99)[0] == 200
    assert engine.get_remaining_block_capacity(0) == 0
    engine.put([0], [torch.arange(70) % 96])
    assert engine.free_blocks.tolist() == [2] and engine.get_remaining_block_capacity(0) == 58
    assert (engine.query(0, 60, 1)[0], engine.query(0, 60, 1)[1].tolist()) == (60, [1])
    assert engine.query(0, 60, 0)[0] == 58
    results = {
        ((0,), (1,)): SchedulingResult.Success,
        ((0, 1, 2), (1, 1, 1)): SchedulingResult.BatchSequenceLimitExceeded,
        ((0, 1), (1, 150)): SchedulingResult.BatchTokenLimitExceeded,
        ((0,), (131,)): SchedulingResult.SequenceTokenLimitExceeded,
        ((1, 2), (65, 65)): SchedulingResult.KVCacheLimitExceeded,
    }
    for (uids, lengths), result in results.items():
        assert engine.can_schedule(uids, lengths) is result, result
    with pytest.raises(SchedulingError, match="KVCacheLimitExceeded"):
        engine.put([1, 2], [torch.ones(65, dtype=torch.long)] * 2)
    with pytest.raises(SchedulingError, match="KVCacheLimitExceeded"):
        engine.put([1, 2], [torch.ones(65, dtype=torch.long)] * 2, do_checks=False)
    assert engine.free_blocks.tolist() == [2]
    engine.put([1, 2], [torch.tensor([1]), torch.tensor([2])])
    assert engine.can_schedule([3], [1]) is SchedulingResult.EngineSequenceLimitExceeded
    assert engine.query(3, 5, 5)[0] == 0
    for uid in (0, 1, 2, 2):
        engine.flush(uid)
    assert engine.free_blocks.tolist() == [4]
    with pytest.raises(ValueError, match="each uid once"):
        engine.put([1, 1], [torch.tensor([1])] * 2)


def test_tokens_are_integers_of_any_container() -> None:
    engine, tokens = engine_of(make("llama").eval()), [3, 14, 15, 92]
    wanted = engine.put([0], [torch.tensor(tokens)])
    kinds = tokens, tuple(tokens), np.array(tokens), torch.tensor([tokens], dtype=torch.int32)
    for uid, given in enumerate(kinds, start=1):
        torch.testing.assert_close(engine.put([uid], [given]), wanted)
    with pytest.raises(TypeError, match="float32"):  # 0.7 is not the token 0
        engine.put([9], [torch.tensor([0.7, 1.2])])
    with pytest.raises(ValueError, match="each uid once"):
        engine.put([9], [[]])


@pytest.mark.parametrize("name", ["llama", "bloom"])
@pytest.mark.parametrize("wrong", [96, -2])
def test_a_put_that_fails_leaves_nothing_behind(name: str, wrong: int) -> None:
    """Tokens outside the vocabulary, which native kernels read unchecked; blocks that a new sequence shares."""
    model = make(name).eval()
    engine, common = engine_of(model), [(7 * i + 3) % 96 for i in range(64)]
    engine.put([1], [torch.tensor([*common, 5])])  # publishes a block that others begin with
    with pytest.raises(IndexError):
        engine.put([2], [torch.tensor([*common, wrong])])
    with pytest.raises(IndexError):
        engine.put([1], [torch.tensor([wrong])])
    for uid, tokens, more in ((2, [4, 5, 6], [4, 5, 6]), (1, [*common, 5, 8], [8])):
        with torch.no_grad():
            wanted = model(torch.tensor([tokens])).logits[0, -1]
        torch.testing.assert_close(engine.put([uid], [torch.tensor(more)])[0], wanted, rtol=1e-3, atol=1e-4)
        engine.flush(uid)
    assert engine.free_blocks.tolist() == [16]


def test_sequences_that_begin_alike_share_blocks() -> None:
    model = make("llama").eval()
    engine, common = engine_of(model), (torch.arange(130) * 7) % 96
    first = engine.put([0], [common])
    assert engine.free_blocks.tolist() == [13]
    second = engine.put([1], [torch.cat([common, torch.tensor([5])])])
    assert engine.free_blocks.tolist() == [12]  # two full blocks are shared
    with torch.no_grad():
        rows = model(torch.cat([common, torch.tensor([5])])[None]).logits[0]
    torch.testing.assert_close(first[0], rows[-2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second[0], rows[-1], rtol=1e-4, atol=1e-4)


def test_a_source_of_weights_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the tests of client packages do."""
    model = make("mistral").eval()

    class Source(CheckpointEngineBase):
        def __init__(self, name: str) -> None:
            self.model_config = model.config
            self.model_config.max_seq_length = 99

        def parameters(self) -> Any:
            return model.named_parameters()

    monkeypatch.setattr(engine_factory, "HuggingFaceCheckpointEngine", Source)
    engine = build_hf_engine("some/name", config())
    assert generate(engine, prompts()) == expected(model, prompts(), NEW)
    assert engine._policy._checkpoint_engine.model_config.max_seq_length == 99


def test_memory_that_stays_free_decides_the_number_of_blocks() -> None:
    few = {"max_tracked_sequences": 4, "max_ragged_sequence_count": 4, "max_context": 256}
    engine = engine_of(make("llama").eval(), RaggedInferenceEngineConfig(state_manager=few))  # type: ignore[arg-type]
    assert engine.free_blocks.tolist() == [16]
    large = {"memory_config": {"size": 2**60}}
    with pytest.raises(DeepSpeedConfigError, match="no block of .* fits beside"):
        engine_of(make("llama").eval(), RaggedInferenceEngineConfig(state_manager=large))  # type: ignore[arg-type]


def test_idle_sequences_leave_their_blocks_to_others() -> None:
    """More sequences than the cache holds: blocks move to the host, and what comes back is what left."""
    model, common = make("llama").eval(), torch.arange(70) % 96
    small, large = engine_of(model, config(3, offload=True)), engine_of(model, config(64))
    given = [torch.cat([common[:66], torch.tensor([uid])]) for uid in range(5)]
    for uid, tokens in enumerate(given):
        assert torch.equal(small.put([uid], [tokens]), large.put([uid], [tokens]))
    with pytest.raises(SchedulingError) as refused:
        small.put([0, 1, 2], [torch.arange(80)] * 3)
    assert refused.value.result is SchedulingResult.KVCacheLimitExceeded
    assert small.can_schedule([3], [1]) is SchedulingResult.Success
    moved = small.blocks_moved
    for uid in (3, 0, 4, 0, 1, 2):
        token = torch.tensor([uid + 7])
        torch.testing.assert_close(small.put([uid], [token]), large.put([uid], [token]))
    assert small.blocks_moved > moved
    for uid in range(5):
        small.flush(uid)
    assert small.free_blocks.tolist() == [3]
    plain = engine_of(model, config(3))
    plain.put([0], [given[0]])
    with pytest.raises(SchedulingError):
        plain.put([1], [torch.arange(90)])


def test_weights_of_six_bits() -> None:
    model = make("llama").eval()
    wanted = engine_of(model).put([0], [torch.arange(9)])
    engine = engine_of(
        model, six := RaggedInferenceEngineConfig(quantization={"quantization_mode": "wf6af16"})
    )  # type: ignore[arg-type]
    assert six.quantization.quantization_mode == "wf6af16"
    found = engine.put([0], [torch.arange(9)])
    assert 0 < (found - wanted).norm() < 0.2 * wanted.norm()
    stored = [layer.weight for layer in engine.model.modules() if isinstance(layer, FrozenLinear)]
    assert stored and all(weight.dtype is torch.uint8 for weight in stored)


def test_what_is_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ds_model_config.pkl").touch()
    with pytest.raises(DeepSpeedConfigError, match="pickled layers of another implementation"):
        build_hf_engine(str(tmp_path), config())
    with pytest.raises(DeepSpeedConfigError, match=r"has no ds_engine.json"):
        build_engine_from_ds_checkpoint(str(tmp_path.parent), config())


@distributed(world_size=2)
def test_two_ranks_share_the_layers() -> None:
    with clean_clients(deepspeed_state=False):
        model = make("llama").eval()
        wanted = expected(model, prompts(), NEW)
        settings = config()
        settings.tensor_parallel.tp_size = 2
        engine = engine_of(model, settings)
        assert engine.runner.shapes[0].heads == 1
        assert generate(engine, prompts()) == wanted


def test_the_names_of_the_package_fit_together() -> None:
    """As servers write it; ``init_inference`` has a class of the same name, which is taken as well."""
    from deepspeed.inference import DeepSpeedTPConfig
    from deepspeed.inference.config import DeepSpeedTPConfig as OfInitInference
    from deepspeed.inference.v2 import config_v2

    assert DeepSpeedTPConfig is config_v2.DeepSpeedTPConfig
    for kind in (DeepSpeedTPConfig, OfInitInference):
        made = RaggedInferenceEngineConfig(tensor_parallel=kind(tp_size=2))
        assert type(made.tensor_parallel) is DeepSpeedTPConfig and made.tensor_parallel.tp_size == 2
