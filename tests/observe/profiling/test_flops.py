"""Counts of the flops profiler, compared with formulas, and its report."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from deepspeed.observe.flops import FlopsProfiler, get_model_profile, report
from deepspeed.observe.flops import profiler as documented
from deepspeed.observe.flops.counting import WorkCount, total_work
from deepspeed.observe.flops.report import FlopsTotals, ModuleTimes, RankCounts, summary

# Sizes: batch, sequence, width, inner width
B, S, W, N = 3, 8, 16, 40


class Attention(nn.Module):
    def __init__(self, heads: int = 2, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, W // heads
        self.query, self.out = nn.Linear(W, W), nn.Linear(W, W, bias=False)
        self.both = nn.Linear(W, 2 * groups * self.size)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).view(B, S, self.heads, self.size).transpose(1, 2)
        key, value = self.both(x).view(B, S, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.groups != self.heads
        )
        return self.out(mixed.transpose(1, 2).reshape(B, S, W))


class ByHand(nn.Module):
    """Attention of einsums, whose scores are a plain function of the module."""

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("bqd,bkd->bqk", x, x)
        return torch.einsum("bqk,bkd->bqd", scores.softmax(-1), x)


class Experts(nn.Module):
    """Each token to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(W, 2, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(W, N), nn.SiLU(), nn.Linear(N, W)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, W)
        chosen = self.router(tokens).softmax(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            mine = torch.arange(len(tokens)) % 2 == number
            out = out.index_add(0, mine.nonzero().view(-1), expert(tokens[mine]) * chosen[mine, number, None])
        return out.view_as(x)


class LowRank(nn.Module):
    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(W, N).requires_grad_(False)
        self.down, self.up = nn.Linear(W, rank, bias=False), nn.Linear(rank, N, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight) @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        inner = grad @ weight.T
        return inner @ weight.T, (x @ weight).reshape(-1, W).T @ grad.reshape(-1, W)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(W, W))

    def forward(self, x: Tensor) -> Tensor:
        return Squared.apply(x, self.weight)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **more: Any) -> None:
        super().__init__()
        self.layer = kind(W, N, batch_first=True, **more)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def image(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


def tokens() -> Tensor:
    return torch.randn(B, S, W)


T = B * S
DENSE = T * 2 * W * N
ATTENTION = T * 4 * W * W + 2 * B * S * S * W
# name -> (model, input, MACs of the forward)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "linear": (lambda: nn.Linear(W, N), tokens, T * W * N),
    "mlp": (
        lambda: nn.Sequential(nn.LayerNorm(W), nn.Linear(W, N), nn.GELU(), nn.Linear(N, W)),
        tokens,
        DENSE,
    ),
    "bilinear": (lambda: Pair(nn.Bilinear(W, W, 5)), tokens, T * 5 * W * W),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), image(2, 4, 10), 2 * 8 * 6 * 4 * 3),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), image(2, 4, 8, 8), 2 * 16 * 6 * 4 * 9),
    "grouped": (lambda: nn.Conv2d(4, 8, 3, groups=2, bias=False), image(2, 4, 9, 9), 2 * 49 * 8 * 2 * 9),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, dilation=2), image(1, 2, 6, 6, 6), 64 * 3 * 2 * 8),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), image(2, 4, 8, 8), 2 * 64 * 4 * 6 * 9),
    "rnn": (lambda: Recurrent(nn.RNN), tokens, T * (W * N + N * N)),
    "gru": (lambda: Recurrent(nn.GRU), tokens, T * 3 * (W * N + N * N)),
    "lstm": (lambda: Recurrent(nn.LSTM), tokens, T * 4 * (W * N + N * N)),
    "both ways": (
        lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
        tokens,
        T * 8 * (W * N + N * N) + T * 8 * (2 * N * N + N * N),
    ),
    "attention": (Attention, tokens, ATTENTION),
    "shared heads": (lambda: Attention(4, 2), tokens, T * 3 * W * W + 2 * B * S * S * W),
    "multihead": (lambda: Triple(nn.MultiheadAttention(W, 2, batch_first=True)), tokens, ATTENTION),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(W, 2, N, dropout=0.0, batch_first=True),
        tokens,
        ATTENTION + DENSE,
    ),
    "einsum": (ByHand, tokens, 2 * B * S * S * W),
    "experts": (Experts, tokens, DENSE + T * W * 2),
    "low rank": (LowRank, tokens, T * (W * N + W * 4 + 4 * N)),
    "custom function": (Custom, tokens, 2 * T * W * W),
}


class Pair(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


class Triple(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("name", MODELS)
def test_products_of_forward_and_backward(name: str) -> None:
    make, data, macs = MODELS[name]
    model, x = make(), data().requires_grad_()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(x).sum().backward()
    profiler.stop_profile()
    assert profiler.get_total_macs() == macs
    backward = profiler.totals.backward.macs
    if name == "low rank":  # no gradient of the frozen weight
        assert backward == 2 * macs - T * W * N
    elif name == "custom function":  # what the function really does
        assert backward == 4 * T * W * W
    elif name == "bilinear":  # one sum for the gradient of each factor
        assert backward == 3 * macs
    elif name in ("rnn", "gru"):  # no gradient of the state before the first step
        assert backward == 2 * macs - (3 if name == "gru" else 1) * B * N * N
    else:
        assert backward == pytest.approx(2 * macs, rel=5e-3)
    assert profiler.totals.recomputed.macs == 0
    profiler.end_profile()
    assert not any("_flops" in key for module in model.modules() for key in vars(module))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("experts",)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_same_without_gradients_and_without_memory(name: str, device: str) -> None:
    make, data, macs = MODELS[name]
    model, x = make().to(device), data().to(device)
    with torch.inference_mode():
        assert get_model_profile(model, args=[x], print_profile=False, warm_up=0, as_string=False)[1] == macs


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, as_function: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(W, W, bias=False)
        self.block = nn.Sequential(nn.Linear(W, N), nn.ReLU(), nn.Linear(N, W), nn.ReLU())
        self.reentrant, self.as_function = reentrant, as_function

    def forward(self, x: Tensor) -> Tensor:
        inner = self.block
        if self.as_function:
            inner = lambda y: F.relu(F.linear(y, self.first.weight))  # noqa: E731
        return checkpoint(inner, self.first(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpointing_repeats(reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(tokens()).sum().backward()
    profiler.stop_profile()
    first = T * W * W
    assert profiler.macs == DENSE + first
    assert profiler.totals.backward.macs == 2 * DENSE + first  # no gradient of the input
    assert profiler.totals.recomputed.macs == DENSE
    assert profiler.get_total_recomputed_flops() == 2 * DENSE + T * N + T * W
    of_block = total_work(model.block, "backward"), total_work(model.block, "recomputed")
    assert [amount.macs for amount in of_block] == [2 * DENSE, DENSE]
    profiler.end_profile()


def test_a_function_that_is_checkpointed_belongs_to_the_module_around_it() -> None:
    model = Checkpointed(False, as_function=True)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(tokens()).sum().backward()
    profiler.stop_profile()
    assert profiler.totals.recomputed.macs == T * W * W
    assert total_work(model.first, "recomputed").macs == 0
    assert profiler.totals.backward.macs == 3 * T * W * W
    profiler.end_profile()


def test_compiled_modules_count_as_they_are_written() -> None:
    model = nn.Sequential(nn.Linear(W, N), nn.Sequential(nn.GELU(), nn.Linear(N, W)))
    model[1].compile(backend="aot_eager")
    x = tokens()
    model(x).sum().backward()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(x).sum().backward()
    profiler.stop_profile()
    assert (profiler.macs, profiler.totals.backward.macs) == (DENSE, 2 * DENSE - T * W * N)
    assert documented.get_module_macs(model[1][1]) == T * W * N
    profiler.end_profile()
    model(x).sum().backward()


class LeNet(nn.Module):
    """The network of LeCun et al., "Gradient-based learning applied to document recognition" (1998)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
            nn.Conv2d(16, 120, 5), nn.Tanh(),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.classifier(torch.flatten(self.features(x), 1))
        return logits, F.softmax(logits, dim=1)


def test_flops_are_those_of_release_0_19() -> None:
    """Measured with that release at a batch of 1024: products, biases of convolutions, pooling, softmax."""
    numbers = get_model_profile(LeNet(), (16, 1, 32, 32), print_profile=False, as_string=False)
    assert [number * 64 for number in numbers[:2]] == [866076672, 426516480]
    assert numbers[2] == 61706


# What release 0.19 answered for single layers: (flops, MACs)
SINGLE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, int]]] = {
    "linear": (lambda: nn.Linear(5, 7), (3, 5), (210, 105)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 8, 8), (56064, 27648)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 8, 8), (58764, 27648)),
    "batch norm": (lambda: nn.BatchNorm2d(4), (2, 4, 8, 8), (1024, 0)),
    "batch norm, plain": (lambda: nn.BatchNorm2d(4, affine=False), (2, 4, 8, 8), (512, 0)),
    "layer norm": (lambda: nn.LayerNorm(8), (2, 3, 8), (240, 0)),
    "layer norm, plain": (lambda: nn.LayerNorm(8, elementwise_affine=False), (2, 3, 8), (192, 0)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 8), (320, 0)),
    "instance norm": (lambda: nn.InstanceNorm2d(4), (2, 4, 8, 8), (2048, 0)),
    "gelu": (nn.GELU, (3, 5), (15, 0)),
    "silu": (nn.SiLU, (3, 5), (15, 0)),
    "prelu": (nn.PReLU, (3, 5), (15, 0)),
    "tanh": (nn.Tanh, (3, 5), (0, 0)),
    "softmax": (lambda: nn.Softmax(-1), (3, 5), (15, 0)),
    "dropout": (nn.Dropout, (3, 5), (0, 0)),
    "pool": (lambda: nn.MaxPool2d(2), (2, 4, 8, 8), (512, 0)),
    "adaptive pool": (lambda: nn.AdaptiveAvgPool2d(2), (2, 4, 8, 8), (512, 0)),
    "resize": (lambda: nn.Upsample(scale_factor=2), (2, 4, 8, 8), (2048, 0)),
}


@pytest.mark.parametrize("name", SINGLE)
def test_single_layers_count_as_in_release_0_19(name: str) -> None:
    make, shape, expected = SINGLE[name]
    assert get_model_profile(make(), shape, print_profile=False, as_string=False)[:2] == expected


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            for _ in range(2)
        )
        self.head, self.unused = nn.Linear(64, 100, bias=False), nn.Linear(3, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_the_printed_form(capsys: pytest.CaptureFixture[str]) -> None:
    ids = torch.randint(0, 100, (4, 16))
    told = get_model_profile(Net(), args=[ids], top_modules=2)
    assert told == ("9.28 M", "4.6 MMACs", "79.24 K")
    out = re.sub(r"[\d.]+ (us|ms)", "<t>", capsys.readouterr().out)
    out = re.sub(
        r"[\d.]+% latency, [\d.]+ [GMK]?FLOPS", "<r>", re.sub(r"[\d.]+ [GMK]?FLOPS$", "<r>", out, flags=re.M)
    )
    assert "DeepSpeed Flops Profiler" in out and "Profile Summary at step 1:" in out
    for line in (
        "params per gpu: 79.24 K",
        "params of model = params per GPU * mp_size: 79.24 K",
        "fwd MACs per GPU: 4.6 M",
        "fwd flops per GPU: 9.28 M",
        "fwd flops of model = fwd flops per GPU * mp_size: 9.28 M",
        "fwd latency: <t>",
        "fwd FLOPS per GPU = fwd flops per GPU / fwd latency: <r>",
        "Top 2 modules in terms of params, MACs or fwd latency at different model depths:",
        "depth 1:",
        "params - {'ModuleList': '66.43 K', 'Linear': '6.41 K'}",
        "MACs - {'ModuleList': '4.19 MMACs', 'Linear': '409.6 KMACs'}",
        "fwd latency - {'Net': '<t>'}",
        "79.24 K, 100.00% Params, 4.6 MMACs, 100.00% MACs, <t>, <r>,",
        "(emb): Embedding(6.4 K, 8.08% Params, 0 MACs, 0.00% MACs, <t>, 0.00% latency, 0 FLOPS, 100, 64)",
        "(blocks): ModuleList(",
        "(1): Linear(16.64 K, 21.00% Params, 1.05 MMACs, 22.78% MACs, <t>, <r>, in_features=64, out_features=256, "
        "bias=True)",
    ):
        flat = [" ".join(found.split()) for found in out.splitlines()]
        if line.startswith("(emb)"):
            assert any(re.sub("<r>", "0.00% latency, 0 FLOPS", found) == line for found in flat), out
        else:
            assert line in flat, (line, out)
    assert "depth 3" not in out  # the innermost
    assert "(unused): Linear(12, 0.02% Params, 0 MACs, 0.00% MACs, 0 s" in out


# The summaries that the tutorial shows, of BERT-large and of a GPT-2 of Megatron-LM. From 10^12 on, release 0.19 and we
# write T and no ".0", where the tutorial's example still has 3139.93 G and 102.0 T.
DOCUMENTED = [
    (
        FlopsTotals(
            336_230_000, WorkCount(3139_930_000_000, 6279_860_000_000), WorkCount(), WorkCount(), 0.07639
        ),
        ModuleTimes(0.07667, 0.108025, 34.09e-6),
        RankCounts(world=1, data=1, model=1, batch=80, forward_flops=6279_860_000_000),
        """world size: 1
        data parallel size: 1
        model parallel size: 1
        batch size per GPU: 80
        params per gpu: 336.23 M
        params of model = params per GPU * mp_size: 336.23 M
        fwd MACs per GPU: 3.14 T
        fwd flops per GPU: 6.28 T
        fwd flops of model = fwd flops per GPU * mp_size: 6.28 T
        fwd latency: 76.67 ms
        bwd latency: 108.02 ms
        fwd FLOPS per GPU = fwd flops per GPU / fwd latency: 81.91 TFLOPS
        bwd FLOPS per GPU = 2 * fwd flops per GPU / bwd latency: 116.27 TFLOPS
        fwd+bwd FLOPS per GPU = 3 * fwd flops per GPU / (fwd+bwd latency): 102 TFLOPS
        step latency: 34.09 us
        iter latency: 184.73 ms
        samples/second: 433.07""",
    ),
    (
        FlopsTotals(
            1_290_000, WorkCount(41271_950_000_000, 82543_900_000_000), WorkCount(), WorkCount(), 1.84
        ),
        ModuleTimes(1.89, 5.38, 34.12),
        RankCounts(world=1, data=1, model=1, batch=1024, forward_flops=82543_900_000_000),
        """world size: 1
        data parallel size: 1
        model parallel size: 1
        batch size per GPU: 1024
        params per gpu: 1.29 M
        params of model = params per GPU * mp_size: 1.29 M
        fwd MACs per GPU: 41.27 T
        fwd flops per GPU: 82.54 T
        fwd flops of model = fwd flops per GPU * mp_size: 82.54 T
        fwd latency: 1.89 s
        bwd latency: 5.38 s
        fwd FLOPS per GPU = fwd flops per GPU / fwd latency: 43.67 TFLOPS
        bwd FLOPS per GPU = 2 * fwd flops per GPU / bwd latency: 30.69 TFLOPS
        fwd+bwd FLOPS per GPU = 3 * fwd flops per GPU / (fwd+bwd latency): 34.06 TFLOPS
        step latency: 34.12 s
        iter latency: 41.39 s
        samples/second: 24.74""",
    ),
]


@pytest.mark.parametrize(("totals", "times", "ranks", "expected"), DOCUMENTED, ids=["bert", "gpt2"])
def test_the_documented_summaries(
    totals: FlopsTotals, times: ModuleTimes, ranks: RankCounts, expected: str
) -> None:
    """Line by line, in the documents' order; rates come from rounded times here, and differ in their last digit."""
    printed = [" ".join(line.split()) for line in summary(totals, 10, 0.0, times, ranks)]
    assert printed[1:3] == [report.TITLE, "Profile Summary at step 10:"]
    first = printed.index("world size: 1")
    lines = [line.strip() for line in expected.splitlines()]
    assert printed[first : first + len(lines)] == lines


FIRST_OPERATION = """
import sys, torch
import deepspeed
from deepspeed.observe.flops import FlopsProfiler

model = torch.nn.Linear(4, 4)
profiler = FlopsProfiler(model)
profiler.start_profile()
before = set(sys.modules)
model(torch.ones(2, 4))
print(len(set(sys.modules) - before), profiler.macs)
"""


def test_what_torch_imports_for_its_first_dispatch_is_no_time_of_the_model() -> None:
    command = [sys.executable, "-c", FIRST_OPERATION]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stdout.split() == ["0", "32"], found


def test_ranks_of_an_engine_that_has_not_reported(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    engine = SimpleNamespace(
        world_size=8,
        dp_world_size=None,
        seq_dp_world_size=4,
        mp_world_size=2,
        train_micro_batch_size_per_gpu=lambda: 3,
    )
    profiler = FlopsProfiler(model, engine)
    profiler.start_profile()
    model(torch.ones(2, 8))
    profiler.print_model_profile(detailed=False)
    profiler.end_profile()
    printed = capsys.readouterr().out
    for label, value in (("world size", 8), ("data parallel size", 4), ("model parallel size", 2)):
        assert re.search(rf"{label}:\s+{value}\b", printed), printed


def test_files_and_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = Net(), tmp_path / "new" / "profile.txt"
    model.train()
    ids = torch.randint(0, 100, (4, 16))
    get_model_profile(model, kwargs={"ids": ids}, args=None, detailed=False, output_file=str(file))
    assert "Profile Summary" in file.read_text() and "Detailed" not in file.read_text()
    assert capsys.readouterr().out == "" and model.training and model.blocks[0].training
    plain = get_model_profile(model, args=[ids], print_profile=False, as_string=False)
    assert (
        get_model_profile(model, args=[ids], print_profile=False, as_string=False, ignore_modules=[nn.Linear])
        == plain
    )
    with pytest.raises(ValueError, match="input_shape, args or kwargs"):
        get_model_profile(model)
    with pytest.raises(ValueError, match="'forward', 'generate'"):
        get_model_profile(model, args=[ids], mode="train")


def test_the_documented_workflow(capsys: pytest.CaptureFixture[str]) -> None:
    """The training loop of the tutorial."""
    model, ids = Net(), torch.randint(0, 100, (4, 16))
    profiler = FlopsProfiler(model)
    for step in range(3):
        if step == 1:
            profiler.start_profile()
        loss = model(ids).sum()
        if step == 1:
            profiler.stop_profile()
            assert profiler.get_total_flops() == 9281536
            assert profiler.get_total_macs(as_string=True) == "4.6 MMACs"
            assert profiler.get_total_params() == sum(param.numel() for param in model.parameters())
            assert 0 < profiler.get_total_duration() < 5
            assert profiler.get_total_duration(as_string=True).endswith("s")
            profiler.print_model_profile(profile_step=step)
            profiler.end_profile()
        loss.backward()
    assert "Profile Summary at step 1:" in capsys.readouterr().out
    assert profiler.get_total_macs() == 4603904
    profiler.reset_profile()
    assert profiler.get_total_macs() == 0


def test_functions_that_torch_does_not_see() -> None:
    def kernel(x: Tensor) -> Tensor:
        return x @ x

    counted = documented.wrapFunc(kernel, lambda x: (7, 3))

    class Uses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return counted(x)

    assert get_model_profile(Uses(), (4, 4), print_profile=False, as_string=False)[:2] == (7, 3)
    assert torch.equal(counted(torch.eye(2)), torch.eye(2))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (documented.number_to_string(1234), "1.23 K"),
        (documented.number_to_string(7e9), "7 G"),
        (documented.number_to_string(-7e9, "k"), "-7000000 k"),
        (documented.number_to_string(2.5e9, "M"), "2500 M"),
        (documented.flops_to_string(81.9e12), "81.9 TFLOPS"),
        (documented.flops_to_string(0.0), "0 FLOPS"),
        (documented.macs_to_string(0), "0 MACs"),
        (documented.macs_to_string(3139.93e9, "G"), "3139.93 GMACs"),
        (documented.params_to_string(336.23e6), "336.23 M"),
        (documented.params_to_string(2.5e9), "2.5 B"),
        (documented.params_to_string(110), "110"),
        (documented.bytes_to_string(1.5e6), "1.5 MB"),
        (documented.duration_to_string(34.09e-6), "34.09 us"),
        (documented.duration_to_string(0.07667), "76.67 ms"),
        (documented.duration_to_string(41.39), "41.39 s"),
        (documented.duration_to_string(0.5, "ms"), "500 ms"),
    ],
)
def test_numbers_as_they_are_written(text: str, expected: str) -> None:
    assert text == expected
