"""From timed samples to costs per unit of work."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sample:
    """One measured run of an operation.

    Args:
        work: unit -> how much of it.
        total: milliseconds, or bytes, that it took.
        known: the part of them that other costs explain.
    """

    work: Mapping[str, float]
    total: float
    known: float = 0.0


def fit_costs(samples: Sequence[Sample]) -> dict[str, float]:
    """What a unit of work costs, none below 0, with the least sum of squared relative errors.

    All choices of units that may cost something are tried: the best without negative costs is the
    solution of the non-negative least squares problem.

    Example::

        samples = [Sample({"calls": 1, "bytes": n}, 0.01 + n * 1e-6) for n in (1000, 100_000)]
        fit_costs(samples)   # {"calls": 0.01, "bytes": 1e-6}
    """
    units = list(dict.fromkeys(unit for sample in samples for unit in sample.work))
    total_S = np.array([sample.total for sample in samples])
    work_SU = np.array([[sample.work.get(unit, 0.0) for unit in units] for sample in samples])
    work_SU = work_SU / total_S[:, None]
    wanted_S = 1.0 - np.array([sample.known for sample in samples]) / total_S
    size_U = np.abs(work_SU).max(axis=0)
    size_U[size_U == 0] = 1.0
    scaled_SU = work_SU / size_U  # columns of one size: well posed
    best, costs_U = float(wanted_S @ wanted_S), np.zeros(len(units))
    for count in range(1, len(units) + 1):
        for chosen in map(list, itertools.combinations(range(len(units)), count)):
            solution, *_ = np.linalg.lstsq(scaled_SU[:, chosen], wanted_S, rcond=None)
            error = float(np.sum((scaled_SU[:, chosen] @ solution - wanted_S) ** 2))
            if (solution >= 0).all() and error < best * (1 - 1e-9):
                best, costs_U = error, np.zeros(len(units))
                costs_U[chosen] = solution
    return dict(zip(units, (costs_U / size_U).tolist(), strict=True))


def median_error(samples: Sequence[Sample], costs: Mapping[str, float]) -> float:
    """Of the fitted totals, relative to the measured ones."""
    errors = []
    for sample in samples:
        fitted = sample.known + sum(costs[unit] * count for unit, count in sample.work.items())
        errors.append(abs(fitted - sample.total) / sample.total)
    return float(np.median(errors))
