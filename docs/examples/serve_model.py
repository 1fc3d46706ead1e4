"""Serves an exported model in plain PyTorch, without TorchRec and FBGEMM:

python docs/examples/serve_model.py model.pt2
"""

import sys

import torch

import ecorec_torchrec.kernels  # noqa: F401 - the operators of TT tables

model = torch.export.load(sys.argv[1]).module()
with torch.inference_mode():
    floats, values, lengths = torch.load(sys.argv[1] + ".example")
    print(f"probability {model(floats, values, lengths).item():.6f}")
    nobody = torch.rand(0, 4), torch.empty(0, dtype=torch.int64), torch.empty(2, 0).long()
    print(f"{model(*nobody).numel()} probabilities of no examples")
