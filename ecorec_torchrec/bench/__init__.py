"""Measurements: what a TT lookup costs beside other patterns, and what TT tables cost in quality.

Every one is a sub-command of `ecorec bench` and writes a CSV file below `docs/benchmarks`. They
take the place of TorchRec's `torchrec.distributed.benchmark`.
"""
