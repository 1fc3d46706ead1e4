"""TorchRec's quantization for inference of models with TT tables."""

import copy

import pytest
import torch
from torch import nn
from torch.ao.quantization import PlaceholderObserver
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.embedding_configs import QuantConfig
from torchrec.quant import EmbeddingBagCollection as QuantEmbeddingBagCollection

from ecorec_torchrec.modules import TTEmbeddingBagCollection
from ecorec_torchrec.tt import TTSpec

TABLES = [
    EmbeddingBagConfig(90, 16, name="users", feature_names=["user"]),
    EmbeddingBagConfig(20, 16, name="genders", feature_names=["gender"]),
]
FEATURES = KeyedJaggedTensor(["user", "gender"], torch.tensor([7, 3]), lengths=torch.ones(2).int())


def _ours() -> TTEmbeddingBagCollection:
    return TTEmbeddingBagCollection(TABLES, {"users": TTSpec(90, (9, 10), (4, 4), (3,))})


def test_the_rest_of_a_model_is_quantized_and_tt_tables_stay() -> None:
    model = nn.ModuleDict({"stock": EmbeddingBagCollection(TABLES), "ours": _ours()})
    with pytest.warns(UserWarning, match=r"TT tables \['users'\] is not quantized, it stays"):
        quantized = quantize_embeddings(model, torch.qint8, inplace=False)
    assert isinstance(quantized["stock"], QuantEmbeddingBagCollection)
    found, expected = quantized["ours"](FEATURES).values(), model["ours"](FEATURES).values()
    assert torch.equal(found, expected)
    again = copy.deepcopy(quantized["ours"])
    assert not hasattr(again, "qconfig")


def test_quantizing_tt_tables_is_refused_by_name_and_cure() -> None:
    ebc = _ours()
    message = r"TT tables \['users'\] cannot be quantized .*torch.export.*to_dense"
    config = QuantConfig(PlaceholderObserver, PlaceholderObserver.with_args(dtype=torch.qint8))
    with pytest.raises(NotImplementedError, match=message):  # what `from_float` asks for
        ebc.qconfig = config
    with pytest.raises(NotImplementedError, match=message):
        quantize_embeddings(
            nn.ModuleDict({"ebc": ebc}),
            torch.qint8,
            inplace=False,
            additional_qconfig_spec_keys=[TTEmbeddingBagCollection],
            additional_mapping={TTEmbeddingBagCollection: QuantEmbeddingBagCollection},
        )
    assert ebc(FEATURES).values().dtype is torch.float32
