"""Host graphs: the operations of a whole forward, passed to the native library in one call (`ds_run`).

An operation is described once, with the addresses of its tensors; a run then costs one call, whatever the number of
operations. Tensors must keep their addresses while the graph is in use; it keeps them alive.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.native import DTYPE_CODES, address, fields, library


class Weights(enum.IntEnum):
    """Storage formats of a weight matrix."""

    BFLOAT16 = 0
    INT8 = 1
    INT4 = 2
    FLOAT32 = 3


class Activation(enum.IntEnum):
    """Activations. GELU uses the error function, GELU_TANH the hyperbolic tangent."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU = 3


class PagedPiece(ctypes.Structure):
    _fields_ = fields("blocks", "start count row", "", "writes attends")


class GraphPagedLayer(ctypes.Structure):
    _fields_ = fields(
        "keys values query new_keys new_values output sinks",
        "heads kv_heads block_size key_size value_size query_head_stride query_token_stride key_head_stride "
        "key_token_stride value_head_stride value_token_stride window",
        "scale softcap",
        "dtype query_dtype",
    )


class _Matrix(ctypes.Structure):
    _fields_ = fields("values scales bias", "outputs row_bytes group", "", "bias_dtype")


class _Product(ctypes.Structure):
    _fields_ = fields(
        "output input matrices",
        "count columns input_stride output_stride",
        "",
        "weights input_dtype output_dtype",
    )


class _GraphEmbedding(ctypes.Structure):
    _fields_ = fields("output table", "size", "", "table_dtype")


class _Norm(ctypes.Structure):
    _fields_ = fields(
        "stream delta sum output weight bias", "size", "eps offset", "centered dtype weight_dtype"
    )


class _Rotary(ctypes.Structure):
    _fields_ = [
        *fields("projected keys values cosines sines query_weight key_weight"),
        *fields("", "heads kv_heads key_size value_size block_size rotary", "", "interleaved"),
        *fields("", "", "eps", "dtype cache_dtype weight_dtype"),
    ]


class _Gate(ctypes.Structure):
    _fields_ = fields("output gate up", "size input_stride output_stride", "", "activation dtype")


class _Largest(ctypes.Structure):
    _fields_ = fields("output input", "size input_stride", "", "dtype")


_KINDS = (_GraphEmbedding, _Norm, _Product, _Rotary, GraphPagedLayer, _Gate, _Largest)
"""Arguments of operations by their kind (``enum ds_kind``)."""


class _Operation(ctypes.Structure):
    _fields_ = fields("arguments", "", "", "kind on_last")


class _Step(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int64),
        *fields("tokens positions last pieces"),
        ("count", ctypes.c_int64),
        ("piece_count", ctypes.c_int64),
    ]


@dataclass(frozen=True, slots=True)
class GraphMatrix:
    """Weights [outputs, columns] of a product.

    ``values``: [outputs, columns] in fp32 or bfloat16, or the words of a ``QuantizedMatrix`` with its ``scales`` and
    ``group``.
    """

    kind: Weights
    values: Tensor
    columns: int
    bias: Tensor | None = None
    scales: Tensor | None = None
    group: int = 0

    @property
    def outputs(self) -> int:
        return self.values.shape[0]


class GraphStep:
    """The tokens of a forward. ``tokens`` and ``positions``: one per row; ``last``: rows whose results are wanted;
    ``pieces``: an array of `PagedPiece`."""

    __slots__ = ("_kept", "count", "rows", "struct")

    def __init__(
        self,
        rows: int,
        tokens: Sequence[int] = (),
        positions: Sequence[int] = (),
        last: Sequence[int] = (),
        pieces: Any = None,
    ) -> None:
        self.rows, self.count = rows, len(last)
        numbers = (ctypes.c_int64 * (len(tokens) + len(positions) + len(last)))(*tokens, *positions, *last)
        start = ctypes.addressof(numbers)
        at = start + 8 * len(tokens), start + 8 * (len(tokens) + len(positions))
        self._kept = numbers, pieces
        described = None if pieces is None else ctypes.addressof(pieces)
        self.struct = _Step(rows, start, *at, described, self.count, 0 if pieces is None else len(pieces))


class HostGraph:
    """A sequence of operations, each on all rows of a step, or on the rows of its last tokens (``on_last``). Tensors
    are contiguous and on the host, with at least as many rows as any step."""

    def __init__(self) -> None:
        self._operations: list[_Operation] = []
        self._kept: list[Any] = []
        self._array: Any = None

    def embedding(self, table: Tensor, output: Tensor) -> None:
        """Append: output [rows, size] fp32 = the table's rows of the step's tokens."""
        made = _GraphEmbedding(output.data_ptr(), table.data_ptr(), table.shape[1], DTYPE_CODES[table.dtype])
        self._add(made, table, output)

    def norm(
        self,
        stream: Tensor,
        output: Tensor,
        weight: Tensor | None,
        bias: Tensor | None = None,
        *,
        delta: Tensor | None = None,
        sum: Tensor | None = None,
        eps: float = 1e-6,
        offset: float = 0.0,
        centered: bool = False,
        on_last: bool = False,
    ) -> None:
        """Append: stream += delta (or, with ``sum``, sum = stream + delta, leaving stream unchanged), and output = the
        normalized rows times (weight + offset), plus bias. ``centered``: LayerNorm, else RMSNorm. With
        ``on_last``, stream and delta still have all rows of the step; output has only the selected ones."""
        code = DTYPE_CODES[stream.dtype]
        weights = weight if weight is not None else bias
        made = _Norm(
            *map(address, (stream, delta, stream if sum is None else sum, output, weight, bias)),
            *(stream.shape[-1], eps, offset, int(centered), code),
            code if weights is None else DTYPE_CODES[weights.dtype],
        )
        self._add(made, stream, delta, sum, output, weight, bias, on_last=on_last)

    def product(
        self, input: Tensor, output: Tensor, matrices: Sequence[GraphMatrix], *, on_last: bool = False
    ) -> _Product:
        """Append: output [rows, outputs of all matrices] = input [rows, columns] times their transposes, plus their
        biases. Input and output may have row strides. ``matrices`` are all of one kind. ``output`` of the returned
        struct is the output's address, which the caller may change."""
        described = (_Matrix * len(matrices))(
            *[
                (
                    *map(address, (each.values, each.scales, each.bias)),
                    each.outputs,
                    each.values.stride(0) * each.values.itemsize,
                    each.group,
                    0 if each.bias is None else DTYPE_CODES[each.bias.dtype],
                )
                for each in matrices
            ]
        )
        first = matrices[0]
        made = _Product(
            *(output.data_ptr(), input.data_ptr(), ctypes.addressof(described)),
            *(len(matrices), first.columns, input.stride(0), output.stride(0), first.kind),
            *(DTYPE_CODES[input.dtype], DTYPE_CODES[output.dtype]),
        )
        self._add(made, described, input, output, *matrices, on_last=on_last)
        return made

    def rotary(
        self,
        projected: Tensor,
        cosines: Tensor,
        sines: Tensor,
        *,
        heads: int,
        kv_heads: int,
        key_size: int,
        value_size: int,
        interleaved: bool = False,
        query_weight: Tensor | None = None,
        key_weight: Tensor | None = None,
        eps: float = 1e-6,
    ) -> _Rotary:
        """Append: rotate queries and keys in the rows of ``projected`` in place by ``cosines`` and ``sines``
        [positions, pairs], after a per-head norm if it has weights. The caller sets the destination of keys and values
        in the returned struct with ``bind``."""
        weight = query_weight if query_weight is not None else key_weight
        code = DTYPE_CODES[projected.dtype]
        made = _Rotary(
            *(projected.data_ptr(), None, None, cosines.data_ptr(), sines.data_ptr()),
            *(address(query_weight), address(key_weight)),
            *(heads, kv_heads, key_size, value_size, 1, 2 * cosines.shape[1]),
            *(int(interleaved), eps, code, code),
            code if weight is None else DTYPE_CODES[weight.dtype],
        )
        self._add(made, projected, cosines, sines, query_weight, key_weight)
        return made

    def attention(
        self,
        projected: Tensor,
        output: Tensor,
        *,
        heads: int,
        kv_heads: int,
        key_size: int,
        value_size: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> GraphPagedLayer:
        """Append: output [rows, heads * value size] = attention of the queries in the rows of ``projected`` over the
        pages, which the caller sets in the returned struct with ``bind``."""
        code = DTYPE_CODES[projected.dtype]
        row = projected.stride(0)
        made = GraphPagedLayer(
            *(None, None, projected.data_ptr(), None, None, output.data_ptr(), None),
            *(heads, kv_heads, 1, key_size, value_size, key_size, row, 0, 0, 0, 0, window),
            *(scale, softcap, code, code),
        )
        self._add(made, projected, output)
        return made

    def gate(self, gate: Tensor, up: Tensor | None, output: Tensor, activation: Activation) -> None:
        """Append: output [rows, size] = activation(gate) * up. Rows may be strided."""
        made = _Gate(
            *map(address, (output, gate, up)),
            *(gate.shape[-1], gate.stride(0), output.stride(0), activation, DTYPE_CODES[gate.dtype]),
        )
        self._add(made, gate, up, output)

    def largest(self, input: Tensor, output: Tensor) -> None:
        """Append: output [rows] int64 = argmax of each row, the first of ties."""
        made = _Largest(
            *(output.data_ptr(), input.data_ptr(), input.shape[-1], input.stride(0), DTYPE_CODES[input.dtype])
        )
        self._add(made, input, output)

    def run(self, step: GraphStep, threads: int | None = None) -> None:
        """Run all operations. ``threads``: at most this many; None: torch's number."""
        lib = library()
        assert lib is not None
        if self._array is None:
            self._array = (_Operation * len(self._operations))(*self._operations)
        lib.ds_run(
            self._array, len(self._operations), ctypes.byref(step.struct), threads or torch.get_num_threads()
        )

    def _add(self, made: ctypes.Structure, *kept: Any, on_last: bool = False) -> None:
        kind = _KINDS.index(type(made))
        self._operations.append(_Operation(ctypes.addressof(made), kind, int(on_last)))
        self._kept.append((made, *kept))
        self._array = None


def bind(made: GraphPagedLayer | _Rotary, pages: tuple[Tensor, Tensor]) -> None:
    """Bind an operation to its keys [blocks, kv heads, size, block size] and values. They must outlive its use."""
    keys, values = pages
    made.keys, made.values = keys.data_ptr(), values.data_ptr()
    made.block_size = keys.shape[3]
    code = DTYPE_CODES[keys.dtype]
    if isinstance(made, GraphPagedLayer):
        made.dtype = code
    else:
        made.cache_dtype = code


def largest_of(rows: Tensor) -> list[int]:
    """Return the argmax of each of ``rows`` [rows, size]; by torch without a kernel."""
    if rows.device.type != "cpu" or rows.dtype not in DTYPE_CODES or rows.stride(1) != 1 or library() is None:
        return rows.argmax(-1).tolist()
    output, program = torch.empty(rows.shape[0], dtype=torch.int64), HostGraph()
    program.largest(rows, output)
    program.run(GraphStep(rows.shape[0]))
    return output.tolist()
