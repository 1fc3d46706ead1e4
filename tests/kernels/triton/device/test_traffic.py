"""The byte formula of the Triton kernels against the loads and stores that they do.

Counted in the interpreter: bytes of floats under the mask of every load and store; ids and offsets
are left out, as in the formula.
"""

import os
from collections import Counter
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from ecorec_torchrec.kernels.tt_lookup import batched_tt_embedding_bag

from ecorec_torchrec.bench.counters import Workload, count, single_table, triton_kernel_bytes
from ecorec_torchrec.tt import TTSpec

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter does the counting"
)

CASES = {
    # spec, lookups, exponent of the skew: many prefixes per i2; many rows per prefix; wide blocks
    "prefixes": (TTSpec(2_000, (50, 4, 10), (4, 4, 4), (16, 16)), 300, 1),
    "rows": (TTSpec(2_400, (4, 6, 100), (4, 2, 8), (8, 16)), 500, 2),
    "blocks": (TTSpec(1_500, (30, 5, 10), (4, 4, 8), (72, 40)), 250, 1),
}


@contextmanager
def counted():
    """Bytes loaded and stored per kernel; and those at addresses that no program had yet used."""
    from triton.runtime import interpreter

    issued, distinct, kernel = Counter(), Counter(), []
    seen = {}
    call, builder = interpreter.GridExecutor.__call__, interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def note(kind, pointers, mask):
        element = pointers.get_element_ty()
        if not element.is_floating():
            return
        addresses = pointers.data[np.asarray(mask.data, bool)]
        size = element.primitive_bitwidth // 8
        issued[kernel[-1]] += size * addresses.size
        new = set(addresses.ravel().tolist()) - seen.setdefault(kind, set())
        seen[kind] |= new
        distinct[kernel[-1]] += size * len(new)

    def noted_call(self, *args, **kwargs):
        kernel.append(self.fn.__name__)
        seen.clear()
        return call(self, *args, **kwargs)

    def noted_load(self, pointers, mask, *args):
        note("load", pointers, mask)
        return load(self, pointers, mask, *args)

    def noted_store(self, pointers, value, mask, *args):
        note("store", pointers, mask)
        return store(self, pointers, value, mask, *args)

    with (
        mock.patch.object(interpreter.GridExecutor, "__call__", noted_call),
        mock.patch.object(builder, "create_masked_load", noted_load),
        mock.patch.object(builder, "create_masked_store", noted_store),
    ):
        yield issued, distinct


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_formula(case):
    spec, num_lookups, skew = CASES[case]
    ids = (torch.rand(num_lookups).pow(skew) * spec.num_embeddings).long()
    offsets = torch.arange(0, num_lookups + 1, 10)
    cores = [torch.randn(shape).requires_grad_() for shape in spec.core_shapes]
    with counted() as (issued, distinct):
        out = batched_tt_embedding_bag(ids, offsets, cores, single_table(spec), backend="triton")
        out.backward(torch.randn_like(out))
    workload = Workload.of(ids, offsets, spec)
    formula = triton_kernel_bytes(workload)
    assert set(issued) == set(formula)
    for name, expected in formula.items():
        assert issued[name] == pytest.approx(expected, rel=0.1), name
    total = count("grouped_triton", workload).num_bytes
    assert sum(issued.values()) == pytest.approx(total, rel=0.1)
    # What caches can serve: a launch needs the rest from memory at least once.
    assert all(0 < distinct[name] <= issued[name] for name in issued)
