"""The same request gives the same bits; chosen tokens depend on the seed alone and are the same on all ranks."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gearshift.coordinator.chunks.plan import Fixed
from gearshift.coordinator.evaluation import collect_logits
from gearshift.coordinator.generation import FinishedEvent, GenerationRequest, TokenEvent
from gearshift.coordinator.group.talk import POLL_SECONDS
from gearshift.proto.errors import InputError
from gearshift.proto.ids import Layout
from gearshift.proto.sampling import SamplingParameters
from gearshift.tests.helpers.answers import answer, ids_of
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.tests.helpers.npz import read_npz
from gearshift.tests.helpers.running_groups import RunningGroups

L, T = Layout.LAYER, Layout.TENSOR
POSITIONS, RUNS, VOCAB = 64, 5, 128


@pytest.mark.parametrize("name", ["llama-gqa-oddvocab", "qwen2-bias-tied", "gemma3-swa-mqa"])
@pytest.mark.parametrize(
    ("workers", "prefill", "decode"),
    [(1, L, L), (2, L, L), (2, T, T), (2, L, T), pytest.param(4, L, L, marks=pytest.mark.slow)],
)
def test_one_layout_gives_the_same_bits_each_time_and_the_references_logits(
    groups: RunningGroups, tiny_model: Callable[[str], Path], tiny_reference: Callable[[str], Path], name: str,
    workers: int, prefill: Layout, decode: Layout,
) -> None:  # fmt: skip
    """F21: plain, tied, sliding windows; 64 positions and the steps after them, chunks of 1, 7 and 64."""
    path, reference = tiny_model(name), read_npz(tiny_reference(name))
    wanted = (read_npz(path.with_suffix(".exact.npz")) if name.startswith("gemma3") else reference)["logits"]
    ids = [int(token) for token in reference["ids"]]
    driver = groups.load(path, workers)
    for chunk in (1, 7, POSITIONS):
        runs = [collect_logits(driver, ids, POSITIONS, prefill, decode, Fixed((chunk,)))[0] for _ in range(RUNS)]
        assert np.abs(runs[0] - wanted).max() < 1e-3, chunk
        assert all(np.array_equal(runs[0], run) for run in runs[1:]), chunk


@pytest.fixture(scope="module")
def one_kv_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every rank holds the one KV head: ranks that fed different tokens would hold different keys."""
    path = tmp_path_factory.mktemp("repeat") / "repeat.gguf"
    return build_model(path, "qwen3", layers=2, kv_heads=1, head_width=32, vocab=VOCAB, seed=9)


@pytest.mark.parametrize(("prefill", "decode"), [(L, T), (T, T), (L, L), (T, L)])
def test_the_same_seed_gives_the_same_text_in_twenty_runs(
    groups: RunningGroups, one_kv_head: Path, prefill: Layout, decode: Layout
) -> None:
    driver = groups.load(one_kv_head, 2)

    def text(seed: int) -> tuple[int, ...]:
        sampling = SamplingParameters(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
        request = GenerationRequest(
            tuple(range(30)), 40, sampling, prefill=prefill, decode=decode, chunk_rule=Fixed((7,))
        )
        return ids_of(answer(driver, request))

    texts = {text(11) for _ in range(20)}
    assert len(texts) == 1
    assert text(12) not in texts


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("seed", [0, 5, 2**64 - 1])
def test_ranks_feed_the_same_tokens_however_hot_the_sampling(
    groups: RunningGroups, one_kv_head: Path, workers: int, seed: int
) -> None:
    """F19: 200 tokens at temperature 1.5, and every rank's keys and values are the same after each of ten looks."""
    driver = groups.load(one_kv_head, workers)
    sampling = SamplingParameters(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
    prompt = tuple(range(20))
    request = driver.submit(GenerationRequest(prompt, 200, sampling, prefill=T, decode=T))
    tokens, looks, finished = 0, 0, False
    while not finished:
        for event in driver.step(POLL_SECONDS):
            finished = isinstance(event, FinishedEvent)
            if isinstance(event, TokenEvent):
                tokens += 1
                if event.index % 20 == 10 and event.index < 180:
                    # Token i was sampled: all tokens before it have been fed, and their rows written.
                    digests = driver.hash_kv(request, len(prompt) + event.index)
                    looks += 1
                    assert digests.keys() == {(0, 0), (1, 0)}
                    assert all(len(found) == 1 for found in digests.values()), event.index
    assert (tokens, looks) == (200, 9)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_outside_64_bits_is_refused(groups: RunningGroups, one_kv_head: Path, seed: int) -> None:
    driver = groups.load(one_kv_head, 2)
    with pytest.raises(InputError, match="seed"):
        driver.submit(GenerationRequest((1, 2), 1, SamplingParameters(seed=seed)))
