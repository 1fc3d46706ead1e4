"""Input of a collection: checks on a KeyedJaggedTensor, and its split into features.

TorchRec's own messages for broken input ("shape [-1, 105] is invalid") name neither the feature
nor the numbers that disagree, and some broken inputs pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

_ID_TYPES = (torch.int32, torch.int64)


def check_features(
    features: KeyedJaggedTensor, feature_names: Sequence[str], is_weighted: bool = False
) -> KeyedJaggedTensor:
    """Checks that a KeyedJaggedTensor has the features and is consistent in itself.

    Never waits for a GPU: what needs the lengths themselves is checked for CPU tensors only (a
    cached `length_per_key` is used on any device). Does nothing while `torch.compile` or
    `torch.export` trace.

    Args:
        features: the input, F keys and B examples; in variable-batch form too.
        feature_names: features that will be looked up.
        is_weighted: whether weights are needed.

    Returns:
        `features`, unchanged; empty tensors of another type, as `torch.tensor([])` is, come back as
        int64, so that ranks without ids can exchange them with others.

    Raises:
        TypeError: not a KeyedJaggedTensor; ids, lengths or offsets that are not int32 or int64;
            integer weights.
        ValueError: a missing feature or one given twice; ids or weights that are not one row;
            neither lengths nor offsets, or both and they contradict each other; a number of lengths
            other than F * B; a negative length; lengths that do not sum to the number of values;
            missing weights or too few of them. The message holds the feature and the numbers.

    Example::

        features = KeyedJaggedTensor(["a", "b"], values=torch.arange(4),
                                     lengths=torch.tensor([1, 1, 1, 2]))
        check_features(features, ["a"])
        # ValueError: lengths sum to 5 ({'a': 2, 'b': 3}), but there are 4 values: they end within
        # feature 'b'
    """
    if torch.compiler.is_compiling():
        return features
    if not isinstance(features, KeyedJaggedTensor):
        raise TypeError(f"features must be a KeyedJaggedTensor, got {type(features).__name__}")
    keys = features.keys()
    counts = Counter(keys)
    missing = [name for name in dict.fromkeys(feature_names) if name not in counts]
    if missing:
        raise ValueError(f"features {missing} are missing, the KeyedJaggedTensor has {keys}")
    if len(counts) < len(keys):
        twice = [name for name, count in counts.items() if count > 1]
        raise ValueError(f"features {twice} occur more than once in the KeyedJaggedTensor: {keys}")
    features = _check_types(features)
    _check_weights(features, is_weighted)
    if keys:
        _check_lengths(features)
    return features


def split_features(features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
    """`features.to_dict()`, for an empty batch too: there each feature has no ids and no bags."""
    if torch.compiler.is_compiling() or _num_lengths(features) > 0:
        return features.to_dict()
    nothing = features.values().new_empty(0, dtype=torch.int64)
    offsets = nothing.new_zeros(1)
    weights = features.weights_or_none()
    return {
        key: JaggedTensor(nothing, weights=weights, lengths=nothing, offsets=offsets)
        for key in features.keys()  # noqa: SIM118 - not a dict
    }


def without_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same ids and lengths, for collections that are not weighted.

    FBGEMM's dense tables weigh their rows whenever there are weights, as for another collection of
    the model; unsharded collections and TT tables do not.
    """
    if features.weights_or_none() is None:
        return features
    return KeyedJaggedTensor(
        features.keys(),
        features.values(),
        lengths=features.lengths_or_none(),
        offsets=features.offsets_or_none(),
        stride=features.stride(),
        length_per_key=features.length_per_key_or_none(),
        offset_per_key=features.offset_per_key_or_none(),
    )


def check_ids(features: KeyedJaggedTensor, limits: Mapping[str, tuple[str, int]]) -> None:
    """Checks that the ids of a sound KeyedJaggedTensor have rows, where that costs no waiting.

    Does nothing for tensors on a GPU, and in a traced graph.

    Args:
        features: the input, after `check_features`.
        limits: feature -> table and its number of rows; other features are not looked at.

    Raises:
        ValueError: an id has no row; names table and feature, the id and the limit.

    Example::

        check_ids(features, {"user": ("users", 97)})
        # ValueError: table 'users', feature 'user': id 97 is outside 0..96 (1 such ids)
    """
    indices_L = features.values()
    if torch.compiler.is_compiling() or indices_L.device.type != "cpu":
        return
    parts = indices_L.split(features.length_per_key())
    for feature, part in zip(features.keys(), parts, strict=True):
        if feature in limits and part.numel():
            table, num_embeddings = limits[feature]
            lowest, highest = part.aminmax()
            if lowest < 0 or highest >= num_embeddings:
                error = outside_table(table, feature, part, num_embeddings)
                assert error is not None
                raise error


def outside_table(
    table_name: str, feature_name: str, indices_L: Tensor, num_embeddings: int
) -> ValueError | None:
    """What is wrong with the ids of a table; None when they all have a row."""
    bad = indices_L[(indices_L < 0) | (indices_L >= num_embeddings)]
    if bad.numel() == 0:
        return None
    return ValueError(
        f"table {table_name!r}, feature {feature_name!r}: id {int(bad[0])} is outside "
        f"0..{num_embeddings - 1} ({bad.numel()} such ids)"
    )


def _num_lengths(features: KeyedJaggedTensor) -> int:
    lengths, offsets = features.lengths_or_none(), features.offsets_or_none()
    if lengths is not None:
        return lengths.numel()
    return 0 if offsets is None else max(0, offsets.numel() - 1)


def _check_types(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    keys = features.keys()
    parts = {
        "values": features.values(),
        "lengths": features.lengths_or_none(),
        "offsets": features.offsets_or_none(),
    }
    wrong = {k: v for k, v in parts.items() if v is not None and v.dtype not in _ID_TYPES}
    for name, part in wrong.items():
        if part.numel() > 0:
            what = "ids" if name == "values" else name
            raise TypeError(f"{what} of features {keys} must be int32 or int64, got {part.dtype}")
    if parts["values"].dim() != 1:
        shape = tuple(parts["values"].shape)
        raise ValueError(f"ids of features {keys} must have one dimension, got shape {shape}")
    if keys and parts["lengths"] is None and parts["offsets"] is None:
        raise ValueError(f"features {keys} have neither lengths nor offsets")
    if not wrong:
        return features
    integers = parts | {name: part.long() for name, part in wrong.items()}
    return KeyedJaggedTensor(
        keys, **integers, weights=features.weights_or_none(), stride=features.stride()
    )


def _check_weights(features: KeyedJaggedTensor, is_weighted: bool) -> None:
    weights, num_values = features.weights_or_none(), features.values().numel()
    if weights is None:
        if is_weighted:
            raise ValueError(
                f"the collection is weighted, but the KeyedJaggedTensor of features "
                f"{features.keys()} has no weights"
            )
        return
    if weights.numel() != num_values:
        raise ValueError(
            f"features {features.keys()} have {num_values} values but {weights.numel()} weights"
        )
    if weights.dim() != 1:
        raise ValueError(
            f"weights of features {features.keys()} must have one dimension, got shape "
            f"{tuple(weights.shape)}"
        )
    if is_weighted and not weights.is_floating_point():
        raise TypeError(
            f"weights of features {features.keys()} must be floating point, got {weights.dtype}"
        )


def _check_lengths(features: KeyedJaggedTensor) -> None:
    keys, num_lengths = features.keys(), _num_lengths(features)
    if features.variable_stride_per_key():
        strides = features.stride_per_key()
    else:
        strides = [features.stride()] * len(keys)
    if sum(strides) != num_lengths:
        needed = dict(zip(keys, strides, strict=True))
        raise ValueError(
            f"{num_lengths} lengths do not fit {len(keys)} features with batch sizes {needed}, "
            f"which need {sum(strides)}"
        )
    lengths, offsets = features.lengths_or_none(), features.offsets_or_none()
    if lengths is None:
        assert offsets is not None
        lengths = torch.diff(offsets)
    if offsets is not None and offsets.device.type == "cpu":
        _check_offsets(offsets, lengths.flatten())
    sums = features.length_per_key_or_none()
    if sums is None:
        if lengths.device.type != "cpu":
            return
        sums = _sums_per_feature(keys, strides, lengths)
    num_values = features.values().numel()
    if sum(sums) != num_values:
        raise ValueError(
            f"lengths sum to {sum(sums)} ({dict(zip(keys, sums, strict=True))}), but there are "
            f"{num_values} values: they end {_place_of_end(keys, sums, num_values)}"
        )


def _check_offsets(offsets: Tensor, lengths: Tensor) -> None:
    """TorchRec sends lengths to other ranks, but looks up by offsets."""
    ends = torch.cumsum(lengths, 0)
    if offsets.numel() != ends.numel() + 1 or bool((offsets[1:] != ends).any()):
        raise ValueError(
            f"offsets {_start_of(offsets)} do not belong to lengths {_start_of(lengths)}: they "
            f"must start with 0 and go on with the sums of the lengths, {_start_of(ends)}"
        )


def _start_of(tensor: Tensor, count: int = 8) -> str:
    more = ", .." if tensor.numel() > count else ""
    return f"[{', '.join(map(str, tensor[:count].tolist()))}{more}]"


def _sums_per_feature(keys: list[str], strides: list[int], lengths: Tensor) -> list[int]:
    if lengths.numel() > 0 and int(lengths.min()) < 0:
        for key, part in zip(keys, lengths.flatten().split(strides), strict=True):
            for example in (part < 0).nonzero()[:1, 0].tolist():
                raise ValueError(
                    f"feature {key!r} has length {int(part[example])} at example {example}: "
                    "lengths must not be negative, offsets not decrease"
                )
    if len(set(strides)) == 1:
        return lengths.reshape(len(keys), strides[0]).sum(dim=1).tolist()
    return [int(part.sum()) for part in lengths.flatten().split(strides)]


def _place_of_end(keys: list[str], sums: list[int], num_values: int) -> str:
    end = 0
    for key, length in zip(keys, sums, strict=True):
        end += length
        if end > num_values:
            return f"within feature {key!r}"
    return f"after the last feature, {keys[-1]!r}"
