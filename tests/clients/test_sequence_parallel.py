"""Ulysses as Accelerate and the Trainer use it: the same losses and weights as one rank with whole sequences."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed
from deepspeed.parallel.sequence.hf.registration import attention_function, unregister
from deepspeed.transforms.errors import TransformError
from deepspeed.utils import groups
from tests.clients.kit import clean_clients, llama, llama_config, lora, whole_weights
from tests.pool import distributed

pytest.importorskip("transformers", reason="the clients extra is not installed")
pytest.importorskip("accelerate", reason="the clients extra is not installed")

TEXT = (Path(__file__).parents[2] / "README.md").read_bytes()
LENGTH, RATE = 45, 0.5
MODEL: dict[str, Any] = {
    "vocab_size": 256,
    "num_attention_heads": 4,
    "hidden_size": 48,
    "attn_implementation": "sdpa",
    "use_cache": False,
}


class Text(torch.utils.data.Dataset):
    """Rows of real text as bytes. The labels of most of a row's first part do not count, as with prompts."""

    def __init__(self, size: int = 8, same: bool = False, packed: bool = False, length: int = LENGTH) -> None:
        at = [0 if same else length * row for row in range(size)]
        self.rows = torch.stack([torch.tensor(list(TEXT[start : start + length])) for start in at])
        self.packed = packed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row, prompt = self.rows[index], 5 + 8 * (index % 3)
        positions, labels = torch.arange(len(row)), row.clone()
        labels[1:prompt] = -100
        if self.packed:
            begin = 19 + index
            positions[begin:] -= begin
            labels[begin] = -100
        return {"input_ids": row, "labels": labels, "position_ids": positions}


def parallelism(size: int = 2) -> Any:
    from accelerate.utils import ParallelismConfig

    return ParallelismConfig(sp_backend="deepspeed", sp_size=size)


def plain_losses(model: Any, batches: list[dict[str, Tensor]]) -> list[float]:
    """SGD on one rank."""
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def shared_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss over all ranks of the sequence as Accelerate's documentation computes it."""
    group = groups._get_sequence_parallel_group()
    unwrapped, labels = model.module, batch["shift_labels"]
    logits = model(**{key: value for key, value in batch.items() if key != "shift_labels"}).logits
    loss = unwrapped.loss_function(
        logits=logits, labels=None, shift_labels=labels, vocab_size=unwrapped.config.vocab_size
    )
    losses = torch.distributed.nn.functional.all_gather(loss, group=group)
    counts = torch.distributed.nn.functional.all_gather((labels != -100).sum(), group=group)
    good = [a * b for a, b in zip(losses, counts, strict=True) if b > 0]
    return sum(good) / sum(counts)  # type: ignore[return-value]


def assert_equal_weights(engine: Any, plain: Any) -> None:
    ours = whole_weights(engine)
    for name, wanted in plain.state_dict().items():
        found = next(value for key, value in ours.items() if key.endswith(name))
        assert (found - wanted).abs().max() <= 1e-5 * max(1.0, wanted.abs().max()), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_accelerate(stage: int) -> None:
    from accelerate import Accelerator, DeepSpeedPlugin

    shared = {0: {}, 1: {"num_key_value_heads": 1}, 2: {"num_attention_heads": 1, "num_key_value_heads": 1}}
    changes = {**MODEL, **shared.get(stage, {})}
    with clean_clients():
        plugin = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=1e9)
        launched = Accelerator(deepspeed_plugin=plugin, parallelism_config=parallelism())
        data = torch.utils.data.DataLoader(Text(packed=stage == 3), batch_size=2)
        plain, model = llama(**changes), llama(**changes)
        batches = list(data)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        model, optimizer, data = launched.prepare(model, optimizer, data)
        assert len(data) == 4
        losses = []
        for batch in data:
            assert "labels" not in batch and batch["input_ids"].shape[1] in (22, 23)
            loss = shared_loss(model, batch)
            launched.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses == pytest.approx(plain_losses(plain, batches), rel=1e-5)
        assert_equal_weights(model, plain)
        _evaluates_and_generates(model, plain)
        launched.free_memory()


def _evaluates_and_generates(engine: Any, plain: Any) -> None:
    """In evaluation every rank has whole sequences, as Accelerate asks for."""
    engine.eval()
    plain.eval()
    prompt = Text(1)[0]["input_ids"][None]
    with torch.no_grad():
        torch.testing.assert_close(
            engine(input_ids=prompt).logits, plain(input_ids=prompt).logits, atol=1e-4, rtol=1e-4
        )
    if engine.plan.zero.stage < 3:
        settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        ours = engine.module.generate(prompt, **settings)
        assert torch.equal(ours, plain.generate(prompt, **settings))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_trainer(tmp_path: Path, stage: int) -> None:
    from transformers import Trainer, TrainingArguments

    changes = {**MODEL, "num_attention_heads": (4, 3, 2, 1)[stage], "head_dim": 8, "num_key_value_heads": 1}
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.0,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
    }
    with clean_clients():
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            deepspeed=config,
            accelerator_config={"use_configured_state": False},
            parallelism_config=parallelism(),
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            max_steps=4,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        same, model = Text(same=True), llama(**changes)
        same.rows[1:] = same.rows[0]
        collate = _Repeated(same)
        run = Trainer(
            model=model, args=arguments, train_dataset=same, eval_dataset=same, data_collator=collate
        )
        run.train()
        plain = llama(**changes)
        expected = plain_losses(plain, [collate([same[0]])] * 4)
        losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
        assert losses == pytest.approx(expected, rel=1e-4)  # the log rounds
        assert_equal_weights(run.model_wrapped, plain)
        plain.eval()
        with torch.no_grad():
            wanted = plain(**collate([same[0]])).loss.item()
        assert run.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-4)


class _Repeated:
    """Batches that are all the same, so that their order does not matter."""

    def __init__(self, data: Text) -> None:
        self.batch = {key: torch.stack([data[i][key] for i in (1, 2)]) for key in data[0]}

    def __call__(self, rows: list[Any]) -> dict[str, Tensor]:
        return {key: value.clone() for key, value in self.batch.items()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=4)
def test_one_line_in_the_config_of_an_unchanged_script(stage: int) -> None:
    """Four ranks, two per sequence: the inputs are whole sequences, and the loss is that of whole sequences."""
    import deepspeed

    changes = {**MODEL, "num_attention_heads": (4, 3, 2, 1)[stage], "head_dim": 8, "num_key_value_heads": 1}
    config = {
        "sequence_parallel_size": 2,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
    }
    if stage == 1:
        config |= {"activation_checkpointing": {"partition_activations": False}}
    with clean_clients():
        plain, data = llama(**changes), Text(packed=stage == 2)
        engine, _, loader, _ = deepspeed.initialize(model=llama(**changes), config=config, training_data=data)
        optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
        if stage == 3:
            engine.module.gradient_checkpointing_enable()
        for batch in loader:
            batch["labels"][0, :30] = -100
            if stage == 1:
                batch["attention_mask"] = torch.ones_like(batch["input_ids"])
                batch["attention_mask"][1, 40:] = 0
            loss = engine(**batch).loss
            whole = plain(**batch).loss
            assert loss.item() == pytest.approx(whole.item(), rel=1e-5)
            engine.backward(loss)
            engine.step()
            whole.backward()
            for param in plain.parameters():  # the mean over what the two sequences give
                dist.all_reduce(param.grad)
                param.grad /= 4
            optimizer.step()
            optimizer.zero_grad()
        assert_equal_weights(engine, plain)
        _evaluates_and_generates(engine, plain)
        engine.destroy()


# ranks, heads, heads of keys, packed documents: even, uneven, fewer heads of keys than ranks, fewer heads than ranks
CELLS = [
    (2, 4, 4, False),
    (2, 3, 1, True),
    (3, 4, 2, True),
    (3, 2, 2, False),
    (4, 4, 4, True),
    (4, 6, 2, False),
    (4, 4, 1, True),
    (4, 2, 1, True),
    (4, 1, 1, False),
]


@pytest.mark.parametrize(("world_size", "heads", "kv_heads", "packed"), CELLS)
@distributed()
def test_loss_and_every_gradient_are_those_of_one_rank(
    world_size: int, heads: int, kv_heads: int, packed: bool
) -> None:
    import deepspeed

    changes = {**MODEL, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8}
    config = {
        "sequence_parallel_size": world_size,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": heads % 4, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
    }
    with clean_clients():
        plain = llama(**changes)
        batch = next(iter(torch.utils.data.DataLoader(Text(packed=packed), batch_size=2)))
        whole = plain(**batch).loss
        whole.backward()
        engine, *_ = deepspeed.initialize(model=llama(**changes), config=config)
        loss = engine(**batch).loss
        assert loss.item() == pytest.approx(whole.item(), rel=1e-5)
        engine.backward(loss)
        wanted = dict(plain.named_parameters())
        for name, param in engine.module.named_parameters():
            found, expected = deepspeed.utils.safe_get_full_grad(param), wanted[name].grad
            assert (found - expected).abs().max() <= 1e-5 * expected.abs().max(), name
        engine.destroy()


@pytest.mark.parametrize("architecture", ["mixtral", "gpt2"])
@pytest.mark.parametrize("counted", [False, True])
@distributed(world_size=2)
def test_losses_that_are_no_mean_over_tokens_and_those_of_no_kind(architecture: str, counted: bool) -> None:
    """Experts are balanced over whole sequences; GPT-2, whose name says no kind of loss, has the causal one."""
    import transformers

    def make() -> Any:
        torch.manual_seed(3)
        if architecture == "gpt2":
            sizes: Any = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
            made = transformers.GPT2Config(vocab_size=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **sizes)
            return transformers.GPT2LMHeadModel(made).train()
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        more: Any = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
        made = transformers.MixtralConfig(
            vocab_size=64, num_key_value_heads=2, num_local_experts=4, **sizes, **more
        )
        return transformers.MixtralForCausalLM(made).train()

    tokens = torch.randint(64, (2, 13), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    batch["labels"][:, :8] = -100
    if counted:
        batch |= {"num_items_in_batch": 17, "attention_mask": torch.ones_like(tokens)}
    with clean_clients():
        plain = make()
        whole = plain(**batch).loss
        whole.backward()
        config = {"sequence_parallel_size": 2, "train_micro_batch_size_per_gpu": 2}
        config |= {"optimizer": {"type": "SGD", "params": {"lr": RATE}}, "zero_optimization": {"stage": 1}}
        engine, *_ = deepspeed.initialize(model=make(), config=config)
        loss = engine(**batch).loss
        assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
        engine.backward(loss)
        wanted = dict(plain.named_parameters())
        for name, param in engine.module.named_parameters():
            found, expected = deepspeed.utils.safe_get_full_grad(param), wanted[name].grad
            assert (found - expected).abs().max() <= 1e-5 * expected.abs().max(), name
        if architecture == "mixtral":
            batch["attention_mask"] = torch.ones_like(tokens).index_fill(1, torch.tensor([12]), 0)
            with pytest.raises(TransformError, match="output_router_logits"):
                engine(**batch)
        engine.destroy()


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_adapters_with_state_in_host_memory(stage: int) -> None:
    import deepspeed

    config = {
        "sequence_parallel_size": 2,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
    }
    with clean_clients():
        plain, model = lora(llama(**MODEL)), lora(llama(**MODEL))
        assert model.config is model.base_model.model.config
        engine, *_ = deepspeed.initialize(model=model, config=config)
        optimizer = torch.optim.Adam([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
        for at, batch in enumerate(torch.utils.data.DataLoader(Text(), batch_size=2)):
            loss, whole = engine(**batch).loss, plain(**batch).loss
            assert loss.item() == pytest.approx(whole.item(), rel=1e-5)
            engine.backward(loss)
            engine.step()
            (whole / 2).backward()
            if at % 2:
                optimizer.step()
                optimizer.zero_grad()
        engine.destroy()


@distributed(world_size=3)
def test_sliding_windows_of_a_model() -> None:
    """Three ranks, four heads; layers with and without a window; a masked language model."""
    from transformers import BertConfig, BertForMaskedLM, Qwen2Config, Qwen2ForCausalLM

    import deepspeed

    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 4,
    }
    windows = Qwen2Config(
        **sizes,
        num_hidden_layers=2,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
    )
    bert = BertConfig(**sizes, num_hidden_layers=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = {
        "sequence_parallel_size": 3,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
    }
    with clean_clients():
        for kind, model_config in ((Qwen2ForCausalLM, windows), (BertForMaskedLM, bert)):
            models = []
            for _ in range(2):
                torch.manual_seed(0)
                models.append(kind(model_config).train())
            batch = next(iter(torch.utils.data.DataLoader(Text(), batch_size=2)))
            whole = models[1](**batch).loss
            whole.backward()
            engine, *_ = deepspeed.initialize(model=models[0], config=config)
            loss = engine(**batch).loss
            assert loss.item() == pytest.approx(whole.item(), rel=1e-5)
            engine.backward(loss)
            for (name, ours), theirs in zip(
                engine.module.named_parameters(), models[1].parameters(), strict=True
            ):
                if theirs.grad is not None:
                    found = deepspeed.utils.safe_get_full_grad(ours)
                    assert (found - theirs.grad).abs().max() <= 1e-5 * max(1e-2, theirs.grad.abs().max()), (
                        name
                    )
            engine.destroy()


def registered(model: Any, size: int = 2, **options: Any) -> Any:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    core = options.pop("core", "sdpa")
    return UlyssesSPAttentionHF.register_with_transformers(model, core, size, 1, **options)


@pytest.mark.parametrize("by_config", [False, True])
@distributed(world_size=2)
def test_a_model_that_is_named_first_and_loaded_later(by_config: bool, tmp_path: Path) -> None:
    """As scripts without Accelerate do: the model does not know of sequence parallelism. The size in the config as well
    does not shard the shards again."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {"train_batch_size": 1, "sequence_parallel_size": 2}
    with clean_clients():
        torch.manual_seed(0)
        llama(**MODEL).save_pretrained(tmp_path / str(dist.get_rank()))
        path = str(tmp_path / "0")
        dist.barrier()
        row = Text()[0]["input_ids"][:44]
        whole = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval()
        with torch.no_grad():
            expected = whole(input_ids=row[None]).logits
        try:
            for _ in range(2):  # the second over Transformers' own attention again, not over the first
                named = SimpleNamespace(config=AutoConfig.from_pretrained(path)) if by_config else path
                mpu = registered(named)
                model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
                engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
                part = slice(22 * dist.get_rank(), 22 * dist.get_rank() + 22)
                positions = torch.arange(44)[part]
                with torch.no_grad():
                    found = engine.train()(input_ids=row[None, part], position_ids=positions[None]).logits
                torch.testing.assert_close(found, expected[:, part], rtol=1e-5, atol=1e-5)
                engine.destroy()
        finally:
            unregister()
        with torch.no_grad():
            assert torch.equal(whole(input_ids=row[None]).logits, expected)
        groups.set_mesh(None)


class Silent(torch.nn.Module):
    """Takes any attention and uses none, not even a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.config = llama_config()
        self.config._attn_implementation = "sdpa"

    def forward(self, x: Tensor) -> Tensor:
        return x


@distributed(world_size=2)
def test_models_that_compute_attention_themselves_are_refused() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    with clean_clients():
        model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2))
        model.config._attn_implementation = "sdpa"  # which it accepts
        registered(model)
        with pytest.raises(ValueError, match="computes attention itself"):
            model.train()(input_ids=torch.ones(1, 4, dtype=torch.int64))
        silent = Silent()
        registered(silent)
        with pytest.raises(ValueError, match="Silent cannot be trained.*0 of its 2 layers"):
            silent(torch.ones(1, 4))
        groups.set_mesh(None)


@distributed(world_size=2)
def test_what_does_not_fit_is_refused() -> None:
    with clean_clients():
        assert registered(llama(), 1) is None
        with pytest.raises(ValueError, match="does not match model config attn_implementation='sdpa'"):
            registered(llama(), core="flash_attention_2")
        with pytest.raises(ValueError, match="'eager' cannot be the attention of one rank"):
            registered(llama(attn_implementation="eager"), core="eager")
        with pytest.raises(ValueError, match="no config.*DistributedAttention"):
            registered(torch.nn.Linear(1, 1))
        with pytest.raises(ValueError, match="does not divide the job's 2 ranks"):
            registered(llama(), 3)
        with pytest.raises(ValueError, match="seq_length=5 with"):
            registered(llama(), seq_length=5, seq_length_is_variable=False)
        assert registered(SimpleNamespace(config=llama().config)).get_sequence_parallel_world_size() == 2
        unregister()
        model = llama()
        model.config.layer_types = ["linear_attention", "full_attention"]
        with pytest.raises(ValueError, match="layers of type linear_attention"):
            registered(model)
        model = llama()
        registered(model)
        with pytest.raises(ValueError, match="made for its shard"):
            model(input_ids=torch.ones(1, 4, dtype=torch.int64), attention_mask=torch.ones(1, 1, 4, 4))
        groups.set_mesh(None)


KERNEL = "kernels-community/of-a-test"


@distributed(world_size=2)
def test_kernels_of_the_hub_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a model is loaded with one: Transformers registers it, as it does for models."""
    from transformers import modeling_flash_attention_utils, modeling_utils

    functions = modeling_utils.ALL_ATTENTION_FUNCTIONS

    def fetch(name: str) -> None:
        if name != KERNEL:
            raise ImportError("the package kernels is missing")
        functions.register(name, functions["sdpa"])

    monkeypatch.setattr(modeling_flash_attention_utils, "lazy_import_flash_attention", fetch)
    own = attention_function("sdpa")
    try:
        assert attention_function(KERNEL) is own
    finally:
        functions.__class__._global_mapping.pop(KERNEL, None)
    for name, said in (
        ("kernels-community/absent", "could not be loaded: the package"),
        ("absent", "is not among"),
    ):
        with pytest.raises(ValueError, match=f"core_attn_implementation='{name}' {said}"):
            attention_function(name)
    monkeypatch.delattr(modeling_flash_attention_utils, "lazy_import_flash_attention")
    with pytest.raises(ValueError, match=f"'{KERNEL}' is not among"):  # an older release
        attention_function(KERNEL)


@pytest.mark.parametrize("variable", [True, False])
@distributed(world_size=2)
def test_packing_that_one_rank_sees_is_refused_on_all(variable: bool) -> None:
    """By a model that does not tell its attention the positions; the next batch trains."""
    with clean_clients():
        model = llama(use_cache=False).train()
        registered(model, seq_length=8, seq_length_is_variable=variable)
        for layer in model.model.layers:
            layer.self_attn.forward = _without_positions(layer.self_attn.forward)
        ids, positions = torch.ones(1, 4, dtype=torch.int64), torch.arange(4)[None] + 4 * dist.get_rank()
        begins = positions.clone() if dist.get_rank() == 0 else torch.tensor([[4, 5, 0, 1]])
        with pytest.raises(ValueError, match="pad instead of packing"):
            model(input_ids=ids, position_ids=begins)
        assert model(input_ids=ids, position_ids=positions).logits.isfinite().all()
        groups.set_mesh(None)


def _without_positions(forward: Any) -> Any:
    return lambda *args, position_ids, **kwargs: forward(*args, **kwargs)
