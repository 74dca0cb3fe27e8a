"""What a failed request is blamed on."""

from pathlib import Path

import pytest

from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.launch.start.blame import file_is_blamed
from gearshift.proto.errors import InputError, RequestFailedError
from gearshift.proto.model import ModelSpec
from gearshift.tests.helpers.gguf_builder import build_model


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return build_spec(resolve_model(str(build_model(tmp_path / "sound.gguf", quant="Q8_0"))), 64)


def test_a_request_that_fails_over_a_sound_file_stays_a_failed_request(
    spec: ModelSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RequestFailedError, match="f16 ends"), file_is_blamed(spec):
        raise RequestFailedError("the logits are not numbers: f16 ends at 65,504")
    assert "looking whether the model's file is to blame" in capsys.readouterr().err


def test_nothing_is_read_for_a_request_that_fails_otherwise(
    spec: ModelSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RequestFailedError), file_is_blamed(spec):
        raise RequestFailedError("the layer layout cannot be run")
    assert capsys.readouterr().err == ""


def test_other_errors_are_not_looked_into(spec: ModelSpec, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError), file_is_blamed(spec):
        raise InputError("no such flag")
    assert capsys.readouterr().err == ""


def test_a_file_that_has_gone_leaves_the_error_as_it_is(spec: ModelSpec) -> None:
    Path(spec.files[0].path).unlink()
    with pytest.raises(RequestFailedError), file_is_blamed(spec):
        raise RequestFailedError("the logits are not numbers")
