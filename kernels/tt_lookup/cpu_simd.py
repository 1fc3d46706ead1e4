"""SIMD building blocks of the CPU engine: matrix product, sum of rows, transpose.

LLVM does not keep the accumulators of a numba loop in registers when they live in an array, so the
inner loops are emitted as LLVM IR with explicit vectors: a small fixed set of register tiles, one
compiled code for every TT shape. Strides and sizes are run-time values, so nothing is compiled per
shape, and numba's on-disk cache serves all processes.

Addresses are integers (bytes), strides count float32 elements. Callers keep the arrays alive.

Every output element is one chain of fused multiply-adds in ascending k (or ascending lookup),
whatever tile computes it. Results therefore do not depend on how callers cut their work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llvmlite.binding
from ecorec_torchrec.kernels.tt_index.cpu_jit import compiled
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic


def _host_has_avx512() -> bool:
    # NUMBA_CPU_FEATURES is what numba compiles for, and part of the key of its cache.
    if config.CPU_FEATURES is not None:
        return "+avx512f" in config.CPU_FEATURES
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512f", False))


_WIDE = _host_has_avx512()
LANES = 16 if _WIDE else 8
"""float32 elements of a vector register."""
PREFETCH_DISTANCE = 12
"""Lookups between the prefetch of a gathered row and its use."""

_I1, _I32, _I64, _FLOAT = ir.IntType(1), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_MASK = ir.VectorType(_I1, LANES)
_ELEMENT_BYTES = 4
_CACHE_LINE_BYTES = 64


def _signature(num_arguments: int) -> Any:
    """All arguments int64. Stated, since numba would compile once more per constant argument."""
    return types.void(*[types.int64] * num_arguments)


class _Emitter:
    """Emits vector loads, stores and arithmetic into one numba function."""

    def __init__(self, builder: ir.IRBuilder, lanes: ir.Value | None = None) -> None:
        self.builder = builder
        self._mask = None if lanes is None else self._first_lanes(lanes)

    def _first_lanes(self, lanes: ir.Value) -> ir.Value:
        index = ir.Constant(ir.VectorType(_I64, LANES), list(range(LANES)))
        return self.builder.icmp_signed("<", index, self._splat(lanes, _I64))

    def _splat(self, scalar: ir.Value, element: ir.Type) -> ir.Value:
        vector = ir.VectorType(element, LANES)
        first = self.builder.insert_element(
            ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0)
        )
        return self.shuffle(first, first, [0] * LANES)

    def shuffle(self, x: ir.Value, y: ir.Value, order: Sequence[int]) -> ir.Value:
        mask = ir.Constant(ir.VectorType(_I32, len(order)), list(order))
        return self.builder.shuffle_vector(x, y, mask)

    def offset(self, address: ir.Value, count: ir.Value | int, stride: ir.Value | int) -> ir.Value:
        """address + count * stride."""
        count, stride = (ir.Constant(_I64, x) if isinstance(x, int) else x for x in (count, stride))
        return self.builder.add(address, self.builder.mul(count, stride))

    def load_scalar(self, address: ir.Value, element: ir.Type = _FLOAT) -> ir.Value:
        return self.builder.load(self.builder.inttoptr(address, element.as_pointer()), align=4)

    def broadcast(self, address: ir.Value) -> ir.Value:
        return self._splat(self.load_scalar(address), _FLOAT)

    def load(self, address: ir.Value, masked: bool = False, vector: ir.Type = _VECTOR) -> ir.Value:
        pointer = self.builder.inttoptr(address, vector.as_pointer())
        if not masked:
            return self.builder.load(pointer, align=4)
        function = self._function(
            f"llvm.masked.load.v{LANES}f32.p0", _VECTOR, pointer.type, _I32, _MASK, _VECTOR
        )
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        return self.builder.call(function, [pointer, ir.Constant(_I32, 4), self._mask, zero])

    def store(self, value: ir.Value, address: ir.Value, masked: bool = False) -> None:
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        if not masked:
            self.builder.store(value, pointer, align=4)
            return
        function = self._function(
            f"llvm.masked.store.v{LANES}f32.p0", ir.VoidType(), _VECTOR, pointer.type, _I32, _MASK
        )
        self.builder.call(function, [value, pointer, ir.Constant(_I32, 4), self._mask])

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """x * y + z, fused where the host can."""
        function = self._function(f"llvm.fmuladd.v{LANES}f32", _VECTOR, _VECTOR, _VECTOR, _VECTOR)
        return self.builder.call(function, [x, y, z])

    def prefetch(self, address: ir.Value) -> None:
        pointer = self.builder.inttoptr(address, ir.IntType(8).as_pointer())
        function = self._function("llvm.prefetch.p0", ir.VoidType(), pointer.type, _I32, _I32, _I32)
        read, keep, data = (ir.Constant(_I32, x) for x in (0, 3, 1))
        self.builder.call(function, [pointer, read, keep, data])

    def accumulators(
        self, addresses: list[ir.Value], load: ir.Value, masked: list[bool]
    ) -> list[ir.Value]:
        """Registers that start from memory if `load` is not 0, else from zero."""
        slots = [cgutils.alloca_once(self.builder, _VECTOR) for _ in addresses]
        with self.builder.if_else(cgutils.is_not_null(self.builder, load)) as (then, otherwise):
            with then:
                for slot, address, mask in zip(slots, addresses, masked, strict=True):
                    self.builder.store(self.load(address, mask), slot)
            with otherwise:
                for slot in slots:
                    self.builder.store(ir.Constant(_VECTOR, [0.0] * LANES), slot)
        return slots

    def _function(self, name: str, result: ir.Type, *arguments: ir.Type) -> ir.Function:
        signature = ir.FunctionType(result, arguments)
        return cgutils.get_or_insert_function(self.builder.module, signature, name)


def _matmul_tile(rows: int, vectors: int, masked: bool = False) -> Any:
    """C[i, :] (+)= sum_k A[i, k] * B[k, :] for `rows` x `vectors` registers of C.

    Strides in bytes. `masked`: only the first `lanes` columns of the last vector exist.
    """
    vector_bytes = LANES * _ELEMENT_BYTES

    @intrinsic
    def tile(typing_context, c, c_row, a, a_row, a_k, b, b_k, k, accumulate, lanes):  # type: ignore[no-untyped-def]
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            c, c_row, a, a_row, a_k, b, b_k, k, accumulate, lanes = args
            emit = _Emitter(builder, lanes if masked else None)
            is_tail = [masked and j == vectors - 1 for j in range(vectors)] * rows
            targets = [
                emit.offset(emit.offset(c, i, c_row), j, vector_bytes)
                for i in range(rows)
                for j in range(vectors)
            ]
            a_rows = [emit.offset(a, i, a_row) for i in range(rows)]
            sums = emit.accumulators(targets, accumulate, is_tail)
            with cgutils.for_range(builder, k) as loop:
                b_row = emit.offset(b, loop.index, b_k)
                b_vectors = [
                    emit.load(emit.offset(b_row, j, vector_bytes), is_tail[j])
                    for j in range(vectors)
                ]
                for i in range(rows):
                    scalar = emit.broadcast(emit.offset(a_rows[i], loop.index, a_k))
                    for j in range(vectors):
                        slot = sums[i * vectors + j]
                        value = emit.fma(scalar, b_vectors[j], builder.load(slot))
                        builder.store(value, slot)
            for slot, target, tail in zip(sums, targets, is_tail, strict=True):
                emit.store(builder.load(slot), target, tail)
            return context.get_dummy_value()

        return _signature(10), codegen

    return tile


def _gather_sum_tile(vectors: int, weighted: bool, masked: bool = False) -> Any:
    """out[:] (+)= sum_l weights[l] * table[index[l], :], `vectors` registers wide.

    `row_bytes` is the table's stride. `ahead` is the number of entries of `index` that may be read
    from here on: rows are prefetched some lookups before their use, past `count` too, because the
    next call goes on where this one ends.
    """
    vector_bytes = LANES * _ELEMENT_BYTES

    @intrinsic
    def tile(  # type: ignore[no-untyped-def]
        typing_context, out, table, row_bytes, index, weights, count, ahead, accumulate, lanes
    ):
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            out, table, row_bytes, index, weights, count, ahead, accumulate, lanes = args
            emit = _Emitter(builder, lanes if masked else None)
            is_tail = [masked and j == vectors - 1 for j in range(vectors)]
            targets = [emit.offset(out, j, vector_bytes) for j in range(vectors)]
            sums = emit.accumulators(targets, accumulate, is_tail)
            last = builder.sub(ahead, ir.Constant(_I64, 1))

            def row_address(position: ir.Value) -> ir.Value:
                row = emit.load_scalar(emit.offset(index, position, _ELEMENT_BYTES), _I32)
                return emit.offset(table, builder.sext(row, _I64), row_bytes)

            with cgutils.for_range(builder, count) as loop:
                later = builder.add(loop.index, ir.Constant(_I64, PREFETCH_DISTANCE))
                later = builder.select(builder.icmp_signed("<", later, last), later, last)
                later_row = row_address(later)
                for line in range(0, vectors * vector_bytes, _CACHE_LINE_BYTES):
                    emit.prefetch(emit.offset(later_row, line, 1))
                row = row_address(loop.index)
                if weighted:
                    weight = emit.broadcast(emit.offset(weights, loop.index, _ELEMENT_BYTES))
                for j in range(vectors):
                    value = emit.load(emit.offset(row, j, vector_bytes), is_tail[j])
                    total = builder.load(sums[j])
                    total = (
                        emit.fma(weight, value, total) if weighted else builder.fadd(total, value)
                    )
                    builder.store(total, sums[j])
            for slot, target, tail in zip(sums, targets, is_tail, strict=True):
                emit.store(builder.load(slot), target, tail)
            return context.get_dummy_value()

        return _signature(9), codegen

    return tile


def _transpose_tile(size: int) -> Any:
    """target[j, i] = source[i, j] of a `size` x `size` square (a power of 2); strides in bytes."""

    @intrinsic
    def tile(typing_context, target, target_row, source, source_row):  # type: ignore[no-untyped-def]
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            target, target_row, source, source_row = args
            emit = _Emitter(builder)
            vector = ir.VectorType(_FLOAT, size)
            rows = [
                emit.load(emit.offset(source, i, source_row), vector=vector) for i in range(size)
            ]
            # Swap the off-diagonal blocks of width 1, 2, 4, ..: after each step, bit `width` of the
            # row number and of the column number have changed places.
            width = 1
            while width < size:
                low = [j if not j & width else size + j - width for j in range(size)]
                high = [j + width if not j & width else size + j for j in range(size)]
                for i in (i for i in range(size) if not i & width):
                    x, y = rows[i], rows[i + width]
                    rows[i], rows[i + width] = emit.shuffle(x, y, low), emit.shuffle(x, y, high)
                width *= 2
            for i, row in enumerate(rows):
                emit.store(row, emit.offset(target, i, target_row))
            return context.get_dummy_value()

        return _signature(4), codegen

    return tile


def _copy_tile() -> Any:
    """Copies one element."""

    @intrinsic
    def tile(typing_context, target, source):  # type: ignore[no-untyped-def]
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            emit = _Emitter(builder)
            emit.store(emit.load_scalar(args[1]), args[0])
            return context.get_dummy_value()

        return _signature(2), codegen

    return tile


# A strip of C is as many vectors wide as leaves registers for 6 rows of accumulators.
_STRIP = 4 if _WIDE else 2
_HALF = _STRIP // 2
_strip_6, _strip_4, _strip_2, _strip_1 = (_matmul_tile(rows, _STRIP) for rows in (6, 4, 2, 1))
_half_8, _half_4, _half_2, _half_1 = (_matmul_tile(rows, _HALF) for rows in (8, 4, 2, 1))
_single_16, _single_8, _single_4, _single_2, _single_1 = (
    _matmul_tile(rows, 1) for rows in (16 if _WIDE else 12, 8, 4, 2, 1)
)
_tail_8, _tail_4, _tail_2, _tail_1 = (_matmul_tile(rows, 1, masked=True) for rows in (8, 4, 2, 1))
_TALL = 16 if _WIDE else 12


@compiled(_signature(11))
def matmul(c, c_row, a, a_row, a_k, b, b_row, rows, columns, k, accumulate):  # type: ignore[no-untyped-def]
    """C (+)= A B, with C (rows, columns) and B (k, columns) contiguous along their rows.

    Args:
        c, a, b: addresses of the first elements.
        c_row, b_row: elements from one row to the next.
        a_row, a_k: strides of A (rows, k), any: a transposed A costs nothing.
        rows, columns, k: sizes.
        accumulate: 1 to add to C, 0 to overwrite it.
    """
    c_row, a_row, a_k, b_row = 4 * c_row, 4 * a_row, 4 * a_k, 4 * b_row
    while columns >= _STRIP * LANES:
        x, y, left = c, a, rows
        while left >= 6:
            _strip_6(x, c_row, y, a_row, a_k, b, b_row, k, accumulate, 0)
            x, y, left = x + 6 * c_row, y + 6 * a_row, left - 6
        if left >= 4:
            _strip_4(x, c_row, y, a_row, a_k, b, b_row, k, accumulate, 0)
            x, y, left = x + 4 * c_row, y + 4 * a_row, left - 4
        if left >= 2:
            _strip_2(x, c_row, y, a_row, a_k, b, b_row, k, accumulate, 0)
            x, y, left = x + 2 * c_row, y + 2 * a_row, left - 2
        if left >= 1:
            _strip_1(x, c_row, y, a_row, a_k, b, b_row, k, accumulate, 0)
        c, b, columns = c + 4 * _STRIP * LANES, b + 4 * _STRIP * LANES, columns - _STRIP * LANES
    if columns >= _HALF * LANES:
        x, y, left = c, a, rows
        while left >= 8:
            _half_8(x, c_row, y, a_row, a_k, b, b_row, k, accumulate, 0)
            x, y, left = x + 8 * c_row, y + 8 * a_row, left - 8
        if left >= 4:
            _half_4(x, c_row, y, a_row, a_k, b, b_row, k, accumulate, 0)
            x, y, left = x + 4 * c_row, y + 4 * a_row, left - 4
        if left >= 2:
            _half_2(x, c_row, y, a_row, a_k, b, b_row, k, accumulate, 0)
            x, y, left = x + 2 * c_row, y + 2 * a_row, left - 2
        if left >= 1:
            _half_1(x, c_row, y, a_row, a_k, b, b_row, k, accumulate, 0)
        c, b, columns = c + 4 * _HALF * LANES, b + 4 * _HALF * LANES, columns - _HALF * LANES
    if columns >= LANES:
        x, y, left = c, a, rows
        while left >= _TALL:
            _single_16(x, c_row, y, a_row, a_k, b, b_row, k, accumulate, 0)
            x, y, left = x + _TALL * c_row, y + _TALL * a_row, left - _TALL
        if left >= 8:
            _single_8(x, c_row, y, a_row, a_k, b, b_row, k, accumulate, 0)
            x, y, left = x + 8 * c_row, y + 8 * a_row, left - 8
        if left >= 4:
            _single_4(x, c_row, y, a_row, a_k, b, b_row, k, accumulate, 0)
            x, y, left = x + 4 * c_row, y + 4 * a_row, left - 4
        if left >= 2:
            _single_2(x, c_row, y, a_row, a_k, b, b_row, k, accumulate, 0)
            x, y, left = x + 2 * c_row, y + 2 * a_row, left - 2
        if left >= 1:
            _single_1(x, c_row, y, a_row, a_k, b, b_row, k, accumulate, 0)
        c, b, columns = c + 4 * LANES, b + 4 * LANES, columns - LANES
    if columns > 0:
        x, y, left = c, a, rows
        while left >= 8:
            _tail_8(x, c_row, y, a_row, a_k, b, b_row, k, accumulate, columns)
            x, y, left = x + 8 * c_row, y + 8 * a_row, left - 8
        if left >= 4:
            _tail_4(x, c_row, y, a_row, a_k, b, b_row, k, accumulate, columns)
            x, y, left = x + 4 * c_row, y + 4 * a_row, left - 4
        if left >= 2:
            _tail_2(x, c_row, y, a_row, a_k, b, b_row, k, accumulate, columns)
            x, y, left = x + 2 * c_row, y + 2 * a_row, left - 2
        if left >= 1:
            _tail_1(x, c_row, y, a_row, a_k, b, b_row, k, accumulate, columns)


_sum_4, _sum_1, _sum_tail = (
    _gather_sum_tile(4, weighted=False),
    _gather_sum_tile(1, weighted=False),
    _gather_sum_tile(1, weighted=False, masked=True),
)
_weighted_sum_4, _weighted_sum_1, _weighted_sum_tail = (
    _gather_sum_tile(4, weighted=True),
    _gather_sum_tile(1, weighted=True),
    _gather_sum_tile(1, weighted=True, masked=True),
)


@compiled(_signature(9))
def gather_sum(out, table, table_row, columns, index, weights, count, ahead, accumulate):  # type: ignore[no-untyped-def]
    """out[:columns] (+)= sum over l < count of weights[l] * table[index[l]].

    Args:
        out, table, index, weights: addresses; index is int32, `weights` is 0 for "all ones".
        table_row: elements from one row of the table to the next.
        ahead: entries of `index` that exist from here on, >= count: rows are prefetched past it.
        accumulate: 1 to add to out, 0 to overwrite it.
    """
    table_row = 4 * table_row
    while columns >= 4 * LANES:
        if weights == 0:
            _sum_4(out, table, table_row, index, 0, count, ahead, accumulate, 0)
        else:
            _weighted_sum_4(out, table, table_row, index, weights, count, ahead, accumulate, 0)
        out, table, columns = out + 16 * LANES, table + 16 * LANES, columns - 4 * LANES
    while columns >= LANES:
        if weights == 0:
            _sum_1(out, table, table_row, index, 0, count, ahead, accumulate, 0)
        else:
            _weighted_sum_1(out, table, table_row, index, weights, count, ahead, accumulate, 0)
        out, table, columns = out + 4 * LANES, table + 4 * LANES, columns - LANES
    if columns > 0:
        if weights == 0:
            _sum_tail(out, table, table_row, index, 0, count, ahead, accumulate, columns)
        else:
            _weighted_sum_tail(
                out, table, table_row, index, weights, count, ahead, accumulate, columns
            )


_transpose_16, _transpose_4 = _transpose_tile(16), _transpose_tile(4)
_copy = _copy_tile()


@compiled(_signature(6))
def transpose(target, target_row, source, source_row, rows, columns):  # type: ignore[no-untyped-def]
    """target[j, i] = source[i, j] for i < rows, j < columns; addresses and element strides."""
    source_row, target_row = 4 * source_row, 4 * target_row
    i = 0
    while i < rows:
        height = 16 if rows - i >= 16 else (4 if rows - i >= 4 else 1)
        j = 0
        while j < columns:
            x, y = source + i * source_row + 4 * j, target + j * target_row + 4 * i
            if height == 16 and columns - j >= 16:
                _transpose_16(y, target_row, x, source_row)
                j += 16
            elif height >= 4 and columns - j >= 4:
                for band in range(0, height, 4):
                    _transpose_4(y + 4 * band, target_row, x + band * source_row, source_row)
                j += 4
            else:
                for band in range(height):
                    _copy(y + 4 * band, x + band * source_row)
                j += 1
        i += height
