"""What tests on cards share: groups that stay up for a module, and small models of every quantisation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gearshift.benchmarks.synthetic_models import write_model
from gearshift.proto.nccl_choice import NCCL_VARIABLE
from gearshift.tests.helpers.running_groups import RunningGroups, running_groups


@pytest.fixture(scope="module")
def on_cuda() -> Iterator[RunningGroups]:
    """Decode sums go one way: what is quickest may differ from load to load, and adds in another order."""
    with _groups_on_cuda("one-shot") as running:
        yield running


@pytest.fixture(scope="module")
def on_cuda_by_nccl() -> Iterator[RunningGroups]:
    """Decode sums are NCCL's, inside the graphs."""
    with _groups_on_cuda("nccl", NCCL_VARIABLE, "on") as running:
        yield running


@pytest.fixture(params=["auto", "on"])
def on_cuda_without_peer_access(request: pytest.FixtureRequest) -> Iterator[RunningGroups]:
    """Groups of two by staged copies alone, and by NCCL. For one test: other groups' workers are not to see that."""
    with _groups_on_cuda("one-shot", "GEARSHIFT_NO_PEER", "1", NCCL_VARIABLE, request.param) as running:
        yield running


@contextmanager
def _groups_on_cuda(decode_sums: str, *variables: str) -> Iterator[RunningGroups]:
    """`variables`: names, and behind each its value."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEARSHIFT_DECODE_SUMS", decode_sums)
        for name, value in zip(variables[::2], variables[1::2], strict=True):
            patch.setenv(name, value)
        with running_groups("cuda") as running:
            yield running


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[RunningGroups]:
    with running_groups("cpu") as running:
        yield running


@pytest.fixture(scope="module")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Synthetic models by shape and type, wide enough that every part is whole quant blocks."""
    folder = tmp_path_factory.mktemp("models")

    def write(shape: str, quant: str) -> Path:
        path = folder / f"{shape}-{quant}.gguf"
        if not path.exists():
            write_model(str(path), shape, quant)
        return path

    return write
