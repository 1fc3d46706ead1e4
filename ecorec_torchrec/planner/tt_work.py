"""What one training step costs for one TT table: FLOPs, bytes moved, bytes held.

Counts of the grouped computation (see kernels/tt_lookup/README.md): the rows of a batch are
deduplicated, every distinct prefix of row digits is multiplied once, prefixes are grouped so that a
row of an inner core is read once per group.

Legend: L lookups, N rows, D columns, K cores, p and q row and column factors, r ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ecorec_torchrec.tt import TTSpec

from .profile import TableProfile

# What the kernels compute and accumulate in, whatever the cores are stored in.
_COMPUTE_BYTES = 4
_CPU_GRADIENT_COPIES = 8
# Nine int32 arrays of the index plan, and a 64-bit key with its index while they are sorted.
_INDEX_PLAN_BYTES_PER_LOOKUP = 9 * 4 + 2 * (8 + 8)


@dataclass(frozen=True)
class TTWork:
    """One step of one table on one rank.

    Args:
        forward_flops, backward_flops: floating point operations; a multiply-add is two.
        forward_bytes, backward_bytes: main memory traffic if nothing but the operands of one
            product stays in caches; backward includes gradient and optimizer passes over the cores.
        workspace_bytes: the most intermediate results can hold at once, whatever the ids are.
        index_plan_bytes: the sorted and deduplicated ids that forward leaves to backward.
    """

    forward_flops: float
    backward_flops: float
    forward_bytes: float
    backward_bytes: float
    workspace_bytes: int
    index_plan_bytes: int

    @classmethod
    def of(cls, spec: TTSpec, lookups: float, profile: TableProfile | None = None) -> TTWork:
        """The work of L = `lookups` ids.

        With a profile they repeat as in its data; without one they are drawn uniformly, the least
        reuse that a batch can have.

        With P_k distinct prefixes of k + 1 digits, the product with core k does
        2 * (q_1..q_k) * r_{k-1} * q_k * r_k operations per prefix; backward recomputes all but the
        last product and makes two more per product, one for either factor.
        """
        results = _result_sizes(spec)
        core_rows = [math.prod(shape[1:]) for shape in spec.core_shapes]
        last = spec.num_cores - 1
        flops = [0.0] * spec.num_cores
        forward_elements = backward_elements = 2.0 * lookups * spec.embedding_dim
        for k in range(1, spec.num_cores):
            distinct = distinct_prefixes(spec, k, lookups, profile)
            left, right = results[k - 1], results[k]
            flops[k] = distinct * 2.0 * left * spec.col_factors[k] * (*spec.ranks, 1)[k]
            if k == last:
                forward_elements += distinct * (left + core_rows[k] + right)
                backward_elements += distinct * (left + 2 * core_rows[k] + 2 * right)
            else:
                core_reads = min(distinct, spec.row_factors[k]) * core_rows[k]
                forward_elements += distinct * (left + right) + core_reads
                backward_elements += distinct * (3 * left + 5 * right) + 3 * core_reads
        backward_elements += 3.0 * spec.num_parameters
        return cls(
            forward_flops=sum(flops),
            backward_flops=3.0 * sum(flops) - flops[last],
            forward_bytes=_COMPUTE_BYTES * forward_elements,
            backward_bytes=_COMPUTE_BYTES * backward_elements,
            workspace_bytes=_workspace_bytes(spec, lookups),
            index_plan_bytes=math.ceil(lookups * _INDEX_PLAN_BYTES_PER_LOOKUP),
        )


def cpu_workspace_bytes(spec: TTSpec, lookups: float) -> int:
    """What the CPU engine holds at most: it computes prefixes anew instead of keeping them.

    Forward the unique rows; backward copies of the outer cores' gradients, one per task.
    """
    if spec.num_cores != 3:  # leading cores are multiplied out, see the engine's README
        return _workspace_bytes(spec, lookups)
    rows = min(math.ceil(lookups), spec.num_embeddings)
    first, _, last = (math.prod(shape) for shape in spec.core_shapes)
    elements = max(rows * spec.embedding_dim, _CPU_GRADIENT_COPIES * (first + last) + last)
    return _COMPUTE_BYTES * elements


def _workspace_bytes(spec: TTSpec, lookups: float) -> int:
    """Unique rows, and for every inner level the prefix products and their gradients."""
    rows = min(math.ceil(lookups), spec.num_embeddings)
    elements = rows * spec.embedding_dim
    for k, size in list(enumerate(_result_sizes(spec)))[1:-1]:
        elements += 2 * min(rows, _num_prefixes(spec, k)) * size
    return _COMPUTE_BYTES * elements


def _result_sizes(spec: TTSpec) -> list[int]:
    """Elements of one product of the cores 0..k: (q_1..q_{k+1}) * r_{k+1}."""
    right = (*spec.ranks, 1)
    return [math.prod(spec.col_factors[: k + 1]) * right[k] for k in range(spec.num_cores)]


def _num_prefixes(spec: TTSpec, k: int) -> int:
    return min(spec.num_embeddings, math.prod(spec.row_factors[: k + 1]))


def distinct_prefixes(spec: TTSpec, k: int, lookups: float, profile: TableProfile | None) -> float:
    """Of k + 1 digits, among so many ids."""
    if profile is None:
        return expected_distinct(_num_prefixes(spec, k), lookups)
    samples = lookups / profile.all_lookups_per_sample
    return profile.unique_prefixes(samples, spec, num_digits=k + 1)


def expected_distinct(population: int, draws: float) -> float:
    """How many of `population` values occur among uniform draws."""
    if draws <= 0:
        return 0.0
    if population == 1:
        return 1.0
    return -population * math.expm1(draws * math.log1p(-1.0 / population))


def lookup_flops(spec: TTSpec, unique_rows: float, prefixes: float) -> tuple[float, float]:
    """Operations of forward and backward of U unique rows with P prefixes, of 3 or more cores.

    P E1 + U E2 forward; 3 P E1 + 2 U E2 backward, which computes the prefixes again: E1 and E2 are
    those of a prefix and of a row from its prefix (see `TTWork.of`).
    """
    results, ranks = _result_sizes(spec), (*spec.ranks, 1)
    last = spec.num_cores - 1
    of_row = 2.0 * results[last - 1] * spec.col_factors[last] * ranks[last]
    of_prefix = sum(2.0 * results[k - 1] * spec.col_factors[k] * ranks[k] for k in range(1, last))
    first, second = prefixes * of_prefix, unique_rows * of_row
    return first + second, 3 * first + 2 * second
