"""Settings of TT tables, as read from TorchRec's `fused_params`."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode

from ecorec_torchrec.lookup import TTSettings
from ecorec_torchrec.tt import TTSpec

SPEC = TTSpec(60, (3, 4, 5), (2, 2, 2), (3, 4))


def settings(**fused_params) -> TTSettings:
    return TTSettings.from_fused_params("users", SPEC, fused_params, data_parallel=False)


def test_values_are_taken_over() -> None:
    found = settings(
        bounds_check_mode=BoundsCheckMode.V2_WARNING,
        output_dtype=SparseType.BF16,
        workspace_bytes=1 << 20,
        backend="reference",
    )
    assert (found.bounds_check, found.output_dtype) == ("warning", torch.bfloat16)
    assert (found.workspace_bytes, found.backend) == (1 << 20, "reference")


def test_settings_pass_through_a_group_config() -> None:
    found = settings(optimizer=EmbOptimType.ADAM, learning_rate=0.1)
    assert TTSettings.of(found.as_fused_params()) == found
    assert len({found, settings(optimizer=EmbOptimType.ADAM, learning_rate=0.1)}) == 1
    assert found != settings(optimizer=EmbOptimType.ADAM, learning_rate=0.2)


def test_data_parallel_tables_have_no_fused_optimizer() -> None:
    fused_params = {"optimizer": EmbOptimType.LAMB}
    assert (
        TTSettings.from_fused_params("t", SPEC, fused_params, data_parallel=True).optimizer is None
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"workspace_bytes": 0}, "'users': workspace_bytes=0"),
        ({"backend": "cuda"}, "'users': backend='cuda'"),
        ({"output_dtype": SparseType.INT8}, "'users': output_dtype"),
        ({"bounds_check_mode": "fatal"}, "'fatal' is not supported; .* BoundsCheckMode.FATAL"),
    ],
)
def test_bad_values_are_refused(setting: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**setting)


@pytest.mark.parametrize("value", [1e6, "1000000", True])
def test_bytes_are_integers(value: object) -> None:
    with pytest.raises(TypeError, match="'users': workspace_bytes must be an integer"):
        settings(workspace_bytes=value)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"learning_rate": -0.1}, "Invalid learning rate: -0.1"),
        ({"learning_rate": "0.1"}, "'str' and 'float'"),
        ({"optimizer": EmbOptimType.ADAM, "beta1": 2.0}, "Invalid beta"),
        ({"optimizer": EmbOptimType.EXACT_ADAGRAD, "eps": -1.0}, "Invalid epsilon"),
    ],
)
def test_settings_that_the_optimizer_refuses(setting: dict, reason: str) -> None:
    """On every rank: where the owner of a table fails alone, the others wait for it."""
    with pytest.raises(ValueError, match=f"'users': .* cannot be made of .*{reason}"):
        settings(**({"optimizer": EmbOptimType.EXACT_SGD} | setting))


def test_settings_of_fbgemm_that_do_not_apply_are_named() -> None:
    with pytest.warns(UserWarning, match=r"\['cache_load_factor'\] do not apply to TT tables"):
        settings(cache_load_factor=0.2)


def test_settings_of_the_update() -> None:
    assert settings().step_in_backward and settings().nonfinite_gradients == "ignore"
    found = settings(step_in_backward=False, nonfinite_gradients="skip")
    assert (found.step_in_backward, found.nonfinite_gradients) == (False, "skip")
    assert found != settings()  # another group


def test_clipping_as_fbgemm_has_it() -> None:
    """Only with `gradient_clipping`, and then to 1 unless `max_gradient` says otherwise."""
    assert settings().max_gradient is None
    assert settings(gradient_clipping=True).max_gradient == 1.0
    assert settings(gradient_clipping=True, max_gradient=0.1).max_gradient == 0.1
    with pytest.warns(UserWarning, match="'users': max_gradient=0.1 is ignored without"):
        assert settings(max_gradient=0.1).max_gradient is None


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ({"step_in_backward": "no"}, TypeError, "'users': step_in_backward must be True or False"),
        ({"nonfinite_gradients": "raise"}, ValueError, "'users': nonfinite_gradients='raise'"),
        ({"gradient_clipping": True, "max_gradient": 0.0}, ValueError, "max_gradient=0.0 must be"),
    ],
)
def test_bad_settings_of_the_update_are_refused(setting, error, message: str) -> None:
    with pytest.raises(error, match=message):
        settings(**setting)
