"""Where each row lies in the file: the hottest rows first, so that they share pages."""

from __future__ import annotations

import numpy as np


class RowOrder:
    """A permutation of N rows in memory of the hot rows only.

    A record is small and a page holds many: rows that are often used together with others are
    read with fewer pages when they lie side by side (Eisenman et al., "Bandana: using non-volatile
    memory for storing deep learning models", MLSys 2019).

    Args:
        table: its name, for errors.
        num_rows: N.
        hot_ids: H ids in the order in which they come first, each once; the others follow by id.

    Raises:
        ValueError: an id is out of range or occurs twice.

    Example::

        order = RowOrder("ads", 6, np.array([4, 1]))
        order.positions(np.array([4, 1, 0, 2, 5]))   # [0, 1, 2, 3, 5]
        order.ids(np.array([0, 3]))                  # [4, 2]
    """

    def __init__(self, table: str, num_rows: int, hot_ids: np.ndarray) -> None:
        self.num_rows = num_rows
        self.hot_ids = hot_ids.astype(np.int64, copy=False)
        self._by_id = np.argsort(self.hot_ids, kind="stable")
        self._sorted = self.hot_ids[self._by_id]
        outside = self.hot_ids[(self.hot_ids < 0) | (self.hot_ids >= num_rows)]
        if len(outside):
            raise ValueError(f"table {table}: hot row {outside[0]} is not in [0, {num_rows})")
        twice = self._sorted[1:][self._sorted[1:] == self._sorted[:-1]]
        if len(twice):
            raise ValueError(f"table {table}: hot row {twice[0]} is named twice")
        # How many rows that are not hot come before each hot one, by id.
        self._cold_before = self._sorted - np.arange(len(self._sorted))

    def positions(self, ids: np.ndarray) -> np.ndarray:
        """Place in the file of each row."""
        if not len(self._sorted):
            return ids
        smaller = np.searchsorted(self._sorted, ids)
        positions = len(self._sorted) + ids - smaller
        at = np.minimum(smaller, len(self._sorted) - 1)
        hot = self._sorted[at] == ids
        positions[hot] = self._by_id[at[hot]]
        return positions

    def ids(self, positions: np.ndarray) -> np.ndarray:
        """Row at each place of the file."""
        num_hot = len(self._sorted)
        cold = positions - num_hot
        ids = cold + np.searchsorted(self._cold_before, cold, side="right")
        hot = np.flatnonzero(cold < 0)
        ids[hot] = self.hot_ids[positions[hot]]
        return ids
