"""Plan entries that carry a TT shape: they extend TorchRec's `ParameterSharding`."""

from .entries import TT_COMPUTE_KERNEL, TTParameterSharding, tt_data_parallel, tt_table_wise

__all__ = ["TT_COMPUTE_KERNEL", "TTParameterSharding", "tt_data_parallel", "tt_table_wise"]
