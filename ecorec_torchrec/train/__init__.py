"""The trainer behind `ecorec train`: configuration, data sets, loop, metrics, checkpoints.

It takes the place of the training scripts of the DLRM examples; the models, pipelines and planners
are TorchRec's.
"""
