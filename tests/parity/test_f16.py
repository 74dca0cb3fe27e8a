"""f16: near the reference in every layout, with gates beyond what it holds; beyond its own end told by name."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gearshift.coordinator.chunks.plan import Fixed
from gearshift.coordinator.evaluation import collect_logits, measure_perplexity
from gearshift.coordinator.generation import FinishedEvent, GenerationRequest
from gearshift.coordinator.one_request import generate
from gearshift.proto.errors import RequestFailedError
from gearshift.proto.generation_result import FinishReason
from gearshift.proto.ids import ComputeType, Layout
from gearshift.tests.helpers.divergence import mean_divergence
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.tests.helpers.npz import read_npz
from gearshift.tests.helpers.running_groups import RunningGroups

LAYOUTS = [(Layout.LAYER, Layout.TENSOR), (Layout.TENSOR, Layout.LAYER)]
WORKERS = 2


@pytest.mark.parametrize("name", ["llama-q4k-mix", "qwen2-bias-tied", "gemma3-swa-mqa"])
def test_logits_are_a_tenth_as_far_from_the_reference_as_bf16s_may_be(
    groups: RunningGroups, tiny_model: Callable[[str], Path], tiny_reference: Callable[[str], Path], name: str
) -> None:  # fmt: skip
    reference = read_npz(tiny_reference(name))
    ids = [int(token) for token in reference["ids"]]
    driver = groups.load(tiny_model(name), WORKERS, compute_type=ComputeType.F16)
    for prefill, decode in LAYOUTS:
        rows, _ = collect_logits(driver, ids, 37, prefill, decode, Fixed((16,)))
        assert mean_divergence(reference["logits"], rows) < 1e-3, (prefill, decode)


@pytest.fixture(scope="module")
def fed_wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], Path]:
    """Small models whose feed-forward blocks are fed this many times what is usual."""
    folder = tmp_path_factory.mktemp("wide")

    def write(times: float) -> Path:
        norm = np.full(64, times, np.float32)
        return build_model(folder / f"{times:g}.gguf", "llama", tensors={"blk.1.ffn_norm.weight": norm}, seed=3)

    return write


def test_gates_may_let_by_more_than_f16_holds(groups: RunningGroups, fed_wide: Callable[[float], Path]) -> None:
    path, ids = fed_wide(400.0), [int(token) for token in np.random.default_rng(1).integers(0, 256, 40)]
    wanted, _ = collect_logits(groups.load(path, WORKERS), ids, 30)
    found, _ = collect_logits(groups.load(path, WORKERS, compute_type=ComputeType.F16), ids, 30)
    assert mean_divergence(wanted, found) < 1e-3


def test_numbers_beyond_f16_end_a_request_by_name(groups: RunningGroups, fed_wide: Callable[[float], Path]) -> None:
    driver = groups.load(fed_wide(1e6), WORKERS, compute_type=ComputeType.F16)
    request = GenerationRequest(tuple(range(20)), 4)
    result = next(event.result for event in generate(driver, request) if isinstance(event, FinishedEvent))
    assert result.finish_reason is FinishReason.ERROR
    assert "f16 ends at 65,504" in (result.error or "")
    with pytest.raises(RequestFailedError, match=r"not numbers.*f16 ends at 65,504"):
        measure_perplexity(driver, list(range(20)), 20, None)
