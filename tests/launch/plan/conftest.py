"""What tests of `gearshift plan` are given."""

from pathlib import Path

import pytest

from gearshift.coordinator.costs.files import write_costs
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.tests.helpers.plans import COSTS


@pytest.fixture
def costs_file(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    write_costs(path, COSTS, {"devices": ["cpu", "cpu"]})
    return path


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained for 512 tokens; 2 layers."""
    return build_model(tmp_path_factory.mktemp("models") / "small.gguf")
