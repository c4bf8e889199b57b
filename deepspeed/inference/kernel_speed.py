"""Benchmark the inference kernels on this machine, each against the equivalent PyTorch operations, for
``ds_report --bench``.

A case is one kernel call of a forward, in the sizes of a small model that decodes ``ROWS`` sequences. Weights and the
paged cache are cold, as after the other layers of a model: a buffer larger than the CPU caches is read before each
call. These cases are also compared with memory bandwidth; the others only with PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deepspeed.base.accelerator import get_accelerator
from deepspeed.inference.cache.pages import LayerShape, PagedCache, PagePiece
from deepspeed.inference.generation.logits import filtered
from deepspeed.inference.generation.sampling import Sampler
from deepspeed.inference.model.attention import AttentionTerms, PackedBatch, paged_attention
from deepspeed.inference.scheduling.requests import Request, SamplingParams
from deepspeed.observe.op_speed import seconds_of
from deepspeed.ops import gpu, native
from deepspeed.ops.host_graph import Activation, GraphMatrix, GraphStep, HostGraph, Weights, bind, largest_of
from deepspeed.ops.op_builder.builder import ISA_TITLES, PYTORCH
from deepspeed.ops.paged_attention import PagedPieces
from deepspeed.ops.small_product import QuantizedMatrix, quantized_product
from deepspeed.parallel.expert.grouped import grouped_linear

COLUMNS, OUTPUTS = 2048, 8192  # of a weight matrix: 64 MiB in fp32
ROWS = 16  # sequences that decode together
CONTEXT = 1024  # tokens per sequence, and per prompt
HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 16, 8, 64, 16
EXPERTS = 8
VOCABULARY = 32_000
BEYOND_CACHES = 256 << 20  # bytes
SECONDS = 0.1  # per measurement, at least three calls

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Case:
    """``kernel``: None if this machine has none and PyTorch computes. Both calls return their result. ``nbytes``: bytes
    read from memory; 0: the data fits into the caches."""

    name: str
    kernel: Call | None
    plain: Call
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class KernelSpeed:
    """Speed of one call. ``share``: fraction of memory bandwidth, None if the call is not memory-bound. ``times``:
    speed-up over PyTorch's operations, None if these are what runs."""

    name: str
    path: str
    seconds: float
    share: float | None
    times: float | None

    def __str__(self) -> str:
        text = f"{self.path:15} {self.seconds * 1e3:8.3f} ms"
        if self.share is not None:
            text += f", {self.share:.0%} of the memory stream"
        return text if self.times is None else f"{text}, {self.times:.1f} x PyTorch"


class Machine:
    """The device that models run on here, and its kernels."""

    def __init__(self) -> None:
        accelerator = get_accelerator()
        self.device = torch.device(accelerator.current_device_name() if accelerator.is_available() else "cpu")
        self.is_host = self.device.type == "cpu"
        self.dtype = torch.float32 if self.is_host else torch.bfloat16
        self.native = self.is_host and native.library() is not None
        self.triton = gpu.usable(torch.empty(1, device=self.device))
        isa = native.isa() or ""
        self.path = (
            f"native {ISA_TITLES.get(isa, isa)}" if self.native else "triton" if self.triton else PYTORCH
        )

        self._other = torch.ones(BEYOND_CACHES // 4, device=self.device)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def seconds(self, call: Call, *, cold: bool = False) -> float:
        """Measure the seconds of one call. ``cold``: with its inputs evicted from the caches."""
        synchronize = (lambda: None) if self.is_host else get_accelerator().synchronize
        before = self._other.sum if cold else (lambda: None)
        return seconds_of(call, synchronize, before=before, span=SECONDS)

    def stream(self) -> float:
        """Measure memory bandwidth in bytes/s: on the host the read rate of the faster of two sums, on a device the
        traffic of a copy."""
        values = torch.ones(OUTPUTS * COLUMNS, device=self.device)
        if not self.is_host:
            return 2 * values.nbytes / self.seconds(values.clone, cold=True)
        readers = (values.sum, partial(native.sum_of_squares, [values]))
        return max(values.nbytes / self.seconds(reader, cold=True) for reader in readers)


@torch.inference_mode()
def kernel_speeds(machine: Machine, stream: float) -> Iterator[KernelSpeed]:
    """Yield the speed of each kernel. ``stream``: memory bandwidth of the machine, in bytes/s."""
    for case in cases(machine):
        cold = case.nbytes > 0
        plain = machine.seconds(case.plain, cold=cold)
        seconds = plain if case.kernel is None else machine.seconds(case.kernel, cold=cold)
        yield KernelSpeed(
            case.name,
            PYTORCH if case.kernel is None else machine.path,
            seconds,
            case.nbytes / seconds / stream if case.nbytes else None,
            None if case.kernel is None else plain / seconds,
        )


def cases(machine: Machine) -> Iterator[Case]:
    """Yield all cases, creating each on demand."""
    for group in (_products, _norm, _rotary, _attention, _gate, _experts, _sampling):
        yield from group(machine)


def _products(machine: Machine) -> Iterator[Case]:
    """Yield matrix products; quantized ones are compared with PyTorch's product with the unquantized weights."""
    weight = machine.draw(OUTPUTS, COLUMNS)
    integers = {bits: QuantizedMatrix.of(weight, bits, min(128, COLUMNS)) for bits in (8, 4)}
    half = weight.bfloat16()
    for rows in (1, ROWS):
        input = machine.draw(rows, COLUMNS)
        plain = partial(functional.linear, input, weight)
        if machine.is_host:
            whole = GraphMatrix(Weights.FLOAT32, weight, COLUMNS)
            yield Case(f"product_fp32_{rows}", _product(machine, input, whole), plain, weight.nbytes)
        kernel = _product(machine, input, GraphMatrix(Weights.BFLOAT16, half, COLUMNS))
        in_half = partial(functional.linear, input.bfloat16(), half)
        yield Case(f"product_bf16_{rows}", kernel, in_half, half.nbytes)
        for bits, matrix in integers.items():
            kernel = _product(machine, input, matrix.described())
            if machine.triton:
                kernel = partial(quantized_product, input, matrix, None)
            nbytes = matrix.words.nbytes + matrix.scales.nbytes
            by_torch = plain if kernel else partial(quantized_product, input, matrix, None)
            yield Case(f"product_int{bits}_{rows}", kernel, by_torch, nbytes if kernel else 0)


def _product(machine: Machine, input: Tensor, matrix: GraphMatrix) -> Call | None:
    if not machine.native:
        return None
    program, output = HostGraph(), torch.empty(len(input), matrix.outputs)
    program.product(input, output, [matrix])
    return _running(program, GraphStep(len(input)), output)


def _running(program: HostGraph, step: GraphStep, output: Tensor) -> Call:
    def run() -> Tensor:
        program.run(step)
        return output

    return run


def _norm(machine: Machine) -> Iterator[Case]:
    stream, delta, weight = (machine.draw(*shape) for shape in ((ROWS, COLUMNS), (ROWS, COLUMNS), (COLUMNS,)))

    other = stream.clone()  # both calls add in place

    def plain() -> Tensor:
        return functional.rms_norm(other.add_(delta), (COLUMNS,), weight, 1e-6)

    kernel = None
    if machine.native:
        program, output = HostGraph(), torch.empty_like(stream)
        program.norm(stream, output, weight, delta=delta)
        kernel = _running(program, GraphStep(ROWS), output)
    elif machine.triton:
        from deepspeed.ops.gpu import norms  # imports Triton

        kernel = lambda: norms.norm(delta, weight, residual=stream)[1]  # noqa: E731
    yield Case("norm_residual", kernel, plain)


def _rotary(machine: Machine) -> Iterator[Case]:
    """Yield the rotary embedding, including the store to the cache."""
    projected = machine.draw(ROWS, (HEADS + 2 * KV_HEADS) * HEAD_SIZE)
    angles = torch.rand(CONTEXT, HEAD_SIZE // 2, device=machine.device)
    cosines, sines = angles.cos(), angles.sin()
    cache, batch = _decoding(machine)
    positions, slots = batch.positions[0], (batch.blocks, batch.offsets)
    sizes = [HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE]

    other = projected.clone()  # both calls rotate in place

    def plain() -> Tensor:
        cos, sin = cosines[positions, None].to(machine.dtype), sines[positions, None].to(machine.dtype)
        *turned, values = (part.view(ROWS, -1, HEAD_SIZE) for part in other.split(sizes, dim=1))
        for part in turned:
            a, b = part.chunk(2, dim=-1)
            part.copy_(torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1))
        cache.write(0, *slots, turned[1], values)
        return other

    kernel = None
    if machine.native:
        program = HostGraph()
        made = program.rotary(
            *(projected, cosines, sines),
            heads=HEADS,
            kv_heads=KV_HEADS,
            key_size=HEAD_SIZE,
            value_size=HEAD_SIZE,
        )
        bind(made, cache.pages(0))
        described = PagedPieces([(p.blocks, p.start, p.count) for p in batch.pieces], [True] * ROWS)
        step = GraphStep(ROWS, positions=positions.tolist(), pieces=described.array)
        kernel = _running(program, step, projected)
    elif machine.triton:
        kernel = partial(_rotated_on_gpu, projected, (cosines, sines), positions, slots, cache.pages(0))
    yield Case("rotary_cache_write", kernel, plain)


def _rotated_on_gpu(projected: Tensor, *where: Any) -> Tensor:
    from deepspeed.ops.gpu import rotary  # imports Triton

    rotary.rotate_and_store(projected, *where, heads=HEADS)
    return projected


def _attention(machine: Machine) -> Iterator[Case]:
    """Yield attention over the paged cache: one decode step of every sequence, and the prefill of one prompt."""
    cache, decoding = _decoding(machine)
    prompt = PackedBatch([PagePiece([0] * CONTEXT, 0, decoding.pieces[0].blocks)], cache, machine.device)
    token_bytes = cache.shapes[0].token_bytes
    for name, batch, nbytes in (
        ("paged_attention_decode", decoding, ROWS * CONTEXT * token_bytes),
        ("paged_attention_prompt", prompt, 0),
    ):
        tokens = batch.tokens.shape[1]
        query, key, value = (
            machine.draw(tokens, n, HEAD_SIZE).transpose(0, 1) for n in (HEADS, KV_HEADS, KV_HEADS)
        )
        terms = AttentionTerms(HEAD_SIZE**-0.5)
        kernel = None
        if all(batch.by_kernel) or batch.gpu_pieces is not None:
            kernel = partial(paged_attention, query, key, value, batch, 0, terms)
        yield Case(
            name, kernel, partial(paged_attention, query, key, value, _plainly(batch), 0, terms), nbytes
        )


def _decoding(machine: Machine) -> tuple[PagedCache, PackedBatch]:
    """Return a one-layer cache and ``ROWS`` sequences of ``CONTEXT`` tokens in it, whose last token is not computed."""
    shape = LayerShape(KV_HEADS, HEAD_SIZE, HEAD_SIZE, machine.dtype, machine.device)
    each = -(-CONTEXT // BLOCK)
    cache = PagedCache({0: shape}, ROWS * each, BLOCK)
    for pages in cache.pages(0):
        pages.normal_()
    pieces = [PagePiece([0], CONTEXT - 1, range(row * each, (row + 1) * each)) for row in range(ROWS)]
    return cache, PackedBatch(pieces, cache, machine.device)


def _plainly(batch: PackedBatch) -> PackedBatch:
    """Return the same batch, to be computed by PyTorch."""
    plain = PackedBatch(batch.pieces, batch.cache, batch.device)
    plain.kernel = plain.gpu_pieces = None
    plain.by_kernel = [False] * len(plain.pieces)
    return plain


def _gate(machine: Machine) -> Iterator[Case]:
    """Yield the activation of a gated MLP, between its matrix products."""
    gate, up = machine.draw(ROWS, OUTPUTS), machine.draw(ROWS, OUTPUTS)
    kernel = None
    if machine.native:
        program, output = HostGraph(), torch.empty_like(gate)
        program.gate(gate, up, output, Activation.SILU)
        kernel = _running(program, GraphStep(ROWS), output)
    elif machine.triton:
        from deepspeed.ops.gpu import gates  # imports Triton

        kernel = partial(gates.gated, gate, up, Activation.SILU)
    yield Case("gated_silu", kernel, lambda: functional.silu(gate) * up)


def _experts(machine: Machine) -> Iterator[Case]:
    """Yield the products of stacked experts, each with its share of the rows."""
    rows, weight = machine.draw(4 * EXPERTS, COLUMNS), machine.draw(EXPERTS, COLUMNS, OUTPUTS // EXPERTS)
    counts = [4] * EXPERTS
    plain = partial(grouped_linear, rows, weight, counts, triton=False)
    kernel = partial(grouped_linear, rows, weight, counts) if machine.triton else None
    yield Case("moe_grouped_product", kernel, plain, weight.nbytes)


def _sampling(machine: Machine) -> Iterator[Case]:
    logits = machine.draw(ROWS, VOCABULARY)
    greedy = partial(largest_of, logits) if machine.native else None
    yield Case("sampling_greedy", greedy, lambda: logits.argmax(-1).tolist())
    params = SamplingParams(temperature=0.8, top_k=50, top_p=0.9)
    requests = [Request(number, [0], params) for number in range(ROWS)]

    def plain() -> list[int]:
        scores = filtered(logits.float(), [params] * ROWS)
        return scores.softmax(-1).multinomial(1)[:, 0].tolist()

    drawn = partial(Sampler().choose, logits, requests)
    yield Case("sampling_top_k_top_p", drawn if machine.triton else None, plain)
