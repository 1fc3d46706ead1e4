"""From timed samples to costs per unit of work."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sample:
    """One timed run of an operation.

    Args:
        work: unit -> how much of it.
        ms: how long it took.
        known_ms: the part of it that other costs explain.
    """

    work: Mapping[str, float]
    ms: float
    known_ms: float = 0.0


def fit_costs_ns(samples: Sequence[Sample]) -> dict[str, float]:
    """Nanoseconds per unit, none below 0, with the least sum of squared relative errors.

    All choices of units that may cost something are tried: the best without negative costs is the
    solution of the non-negative least squares problem.

    Example::

        samples = [Sample({"calls": 1, "bytes": n}, 0.01 + n * 1e-6) for n in (1000, 100_000)]
        fit_costs_ns(samples)   # {"calls": 10_000, "bytes": 1.0}
    """
    units = list(dict.fromkeys(unit for sample in samples for unit in sample.work))
    ms_S = np.array([sample.ms for sample in samples])
    work_SU = np.array([[sample.work.get(unit, 0.0) for unit in units] for sample in samples])
    scaled_SU = work_SU / ms_S[:, None]
    wanted_S = 1.0 - np.array([sample.known_ms for sample in samples]) / ms_S
    size_U = np.abs(scaled_SU).max(axis=0)
    scaled_SU = scaled_SU / np.where(size_U > 0, size_U, 1.0)  # columns of one size: well posed
    best, costs_U = float(wanted_S @ wanted_S), np.zeros(len(units))
    for count in range(1, len(units) + 1):
        for chosen in map(list, itertools.combinations(range(len(units)), count)):
            solution, *_ = np.linalg.lstsq(scaled_SU[:, chosen], wanted_S, rcond=None)
            error = float(np.sum((scaled_SU[:, chosen] @ solution - wanted_S) ** 2))
            if (solution >= 0).all() and error < best * (1 - 1e-9):
                best, costs_U = error, np.zeros(len(units))
                costs_U[chosen] = solution
    in_ns_U = costs_U / np.where(size_U > 0, size_U, 1.0) * 1e6
    return dict(zip(units, in_ns_U.tolist(), strict=True))


def median_error(samples: Sequence[Sample], costs_ns: Mapping[str, float]) -> float:
    """Of the fitted times, relative to the measured ones."""
    errors = []
    for sample in samples:
        fitted_ms = sum(costs_ns[unit] * count for unit, count in sample.work.items()) / 1e6
        errors.append(abs(sample.known_ms + fitted_ms - sample.ms) / sample.ms)
    return float(np.median(errors))
