"""Broken KeyedJaggedTensors: the message names the feature and the numbers that disagree."""

import pytest
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from ecorec_torchrec.modules import check_features, split_features


def _kjt(
    lengths: list[int] | Tensor | None = None,
    num_values: int = 4,
    keys: tuple[str, ...] = ("a", "b"),
    **fields: object,
) -> KeyedJaggedTensor:
    fields = {"values": torch.arange(num_values)} | fields
    if lengths is not None:
        fields["lengths"] = torch.as_tensor(lengths)
    return KeyedJaggedTensor(keys=list(keys), **fields)  # type: ignore[arg-type]


def test_sound_input_comes_back_unchanged() -> None:
    features = _kjt([1, 1, 0, 2])
    assert check_features(features, ["b"]) is features
    offsets = _kjt(offsets=torch.tensor([0, 1, 2, 2, 4]), weights=torch.rand(4))
    assert check_features(offsets, ["a", "b"], is_weighted=True) is offsets


def test_lengths_that_do_not_sum_to_the_values() -> None:
    """TorchRec says 'sum of lengths should be the size of the indices tensor', naming neither."""
    with pytest.raises(ValueError, match=r"sum to 5 \({'a': 2, 'b': 3}\).* 4 values.*in .*'b'"):
        check_features(_kjt([1, 1, 1, 2]), ["a"])
    with pytest.raises(ValueError, match=r"sum to 6 .*they end within feature 'a'"):
        check_features(_kjt([3, 3, 0, 0]), ["a"])
    with pytest.raises(ValueError, match=r"sum to 3 .*they end after the last feature, 'b'"):
        check_features(_kjt([1, 1, 1, 0]), ["a"])
    with pytest.raises(ValueError, match="sum to 4 .* 0 values"):
        check_features(_kjt(offsets=torch.tensor([0, 1, 2, 2, 4]), num_values=0), ["a"])


def test_a_number_of_lengths_that_does_not_fit() -> None:
    """TorchRec's own message is "shape '[-1, 105]' is invalid", from deep inside."""
    keys = tuple(f"f{i}" for i in range(20))
    lengths = [0] * 2114
    with pytest.raises(ValueError, match=r"2114 lengths do not fit 20 features .*'f0': 105.*2100"):
        check_features(_kjt(lengths, 0, keys, stride=105), ["f0"])
    with pytest.raises(ValueError, match=r"3 lengths do not fit 2 features .*{'a': 1, 'b': 1}.* 2"):
        check_features(_kjt([1, 1, 2]), ["a"])
    with pytest.raises(ValueError, match=r"4 lengths .*{'a': 3, 'b': 3}.* need 6"):
        check_features(_kjt([1, 1, 1, 1], stride=3), ["a"])
    with pytest.raises(ValueError, match=r"3 lengths .*{'a': 2, 'b': 2}"):
        check_features(_kjt([1, 1, 2], stride_per_key_per_rank=[[2], [2]]), ["a"])


@pytest.mark.parametrize(
    "layout",
    [{"lengths": torch.tensor([0, 2, 3, -1])}, {"offsets": torch.tensor([0, 0, 2, 5, 4])}],
)
def test_negative_lengths(layout: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match=r"feature 'b' has length -1 at example 1"):
        check_features(_kjt(**layout), ["a"])


def test_missing_features() -> None:
    with pytest.raises(ValueError, match=r"\['c'\] are missing, .* has \['a', 'b'\]"):
        check_features(_kjt([1, 1, 1, 1]), ["a", "c"])


def test_weights() -> None:
    sound = _kjt([1, 1, 1, 1])
    with pytest.raises(ValueError, match=r"features \['a', 'b'\] has no weights"):
        check_features(sound, ["a"], is_weighted=True)
    with pytest.raises(ValueError, match=r"\['a', 'b'\] have 4 values but 3 weights"):
        check_features(_kjt([1, 1, 1, 1], weights=torch.rand(3)), ["a"])
    integers = _kjt([1, 1, 1, 1], weights=torch.arange(4))
    with pytest.raises(TypeError, match="floating point, got torch.int64"):
        check_features(integers, ["a"], is_weighted=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool])
def test_ids_of_a_wrong_type(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"\['a', 'b'\] must be int32 or int64, got {dtype}"):
        check_features(_kjt([1, 1, 1, 1], values=torch.ones(4, dtype=dtype)), ["a"])


def test_lengths_of_a_wrong_type() -> None:
    """TorchRec's constructor lets small integers pass, the lookups do not take them."""
    lengths = torch.ones(4, dtype=torch.int16)
    with pytest.raises(TypeError, match=r"lengths of .*'b'\] must be int32 or .*, got torch.int16"):
        check_features(_kjt(lengths), ["a"])


def test_empty_ids_have_a_type_too() -> None:
    """`torch.tensor([])` is of floats; sent to other ranks it would meet their integers."""
    checked = check_features(_kjt([0, 0, 0, 0], values=torch.tensor([])), ["a"])
    assert checked.values().dtype is torch.int64 and checked.stride() == 2
    with pytest.raises(ValueError, match="sum to 1 .* 0 values"):
        check_features(_kjt([0, 1], values=torch.tensor([])), ["a"])


def test_values_of_two_dimensions() -> None:
    with pytest.raises(ValueError, match=r"ids .* must have one dimension, got shape \(4, 1\)"):
        check_features(_kjt([1, 1, 1, 1], values=torch.ones(4, 1).long()), ["a"])
    with pytest.raises(ValueError, match=r"weights .* must have one dimension, got shape \(1, 4\)"):
        check_features(_kjt([1, 1, 1, 1], weights=torch.ones(1, 4)), ["a"])


def test_neither_lengths_nor_offsets() -> None:
    with pytest.raises(ValueError, match=r"\['a', 'b'\] have neither lengths nor offsets"):
        check_features(_kjt(), ["a"])


def test_lengths_and_offsets_that_contradict_each_other() -> None:
    """One rank's lookup would use the ones, another's the others."""
    with pytest.raises(
        ValueError, match=r"\[0, 1, 2, 3, 4\] do not belong to lengths \[2, 0, 1, 1\]"
    ):
        check_features(_kjt([2, 0, 1, 1], offsets=torch.arange(5)), ["a"])
    with pytest.raises(ValueError, match=r"offsets \[1, .*must start with 0"):
        check_features(_kjt(offsets=torch.arange(1, 6)), ["a"])
    asked = _kjt([1, 1, 0, 2])
    asked.offsets()  # now it keeps both
    assert check_features(asked, ["a", "b"]) is asked


def test_a_feature_given_twice() -> None:
    """TorchRec silently takes the last of the two."""
    with pytest.raises(ValueError, match=r"features \['a'\] occur more than once"):
        check_features(_kjt([1, 1, 2], keys=("a", "b", "a")), ["b"])


def test_something_else_than_features() -> None:
    with pytest.raises(TypeError, match="must be a KeyedJaggedTensor, got Tensor"):
        check_features(torch.arange(3), ["a"])  # type: ignore[arg-type]


def test_lengths_on_another_device_are_not_read() -> None:
    """Reading them would stop the host until the device is done; meta tensors cannot be read."""
    broken = _kjt([1, 1, 1, 2]).to(torch.device("meta"))
    assert check_features(broken, ["a"]) is broken
    known = KeyedJaggedTensor(
        ["a", "b"], broken.values(), lengths=broken.lengths(), length_per_key=[2, 3]
    )
    with pytest.raises(ValueError, match="sum to 5"):
        check_features(known, ["a"])


@pytest.mark.parametrize("stride", [0, None])
def test_an_empty_batch_has_its_features(stride: int | None) -> None:
    """`KeyedJaggedTensor.to_dict` dies with 'list index out of range' here."""
    features = _kjt([], num_values=0, stride=stride)
    jagged = split_features(check_features(features, ["a", "b"]))
    assert list(jagged) == ["a", "b"]
    assert jagged["b"].values().numel() == 0
    assert jagged["b"].offsets().tolist() == [0]


def test_split_is_that_of_torchrec() -> None:
    jagged = split_features(_kjt([1, 1, 0, 2]))
    assert jagged["b"].values().tolist() == [2, 3]
    assert jagged["b"].offsets().tolist() == [0, 0, 2]
