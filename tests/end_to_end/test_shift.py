"""The shift both ways over running workers: keys and values stay bit for bit, no weight moves, bytes are as planned."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gearshift.coordinator.chunks.plan import Fixed
from gearshift.coordinator.driver import Driver
from gearshift.coordinator.evaluation import collect_logits
from gearshift.coordinator.generation import FinishedEvent, GenerationRequest, TokenEvent
from gearshift.coordinator.group.talk import POLL_SECONDS
from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.proto.ids import KvType, Layout
from gearshift.proto.kv import BLOCK_TOKENS, KvFormat, row_bytes
from gearshift.proto.model import ModelSpec
from gearshift.proto.placement import memory
from gearshift.proto.placement.bundles import bundle_bytes
from gearshift.proto.placement.cuts import place
from gearshift.proto.placement.plan import Placement
from gearshift.tests.helpers.answers import GREEDY, answer
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.tests.helpers.running_groups import RunningGroups

VOCAB = 192
PROMPTS = [1, 63, 64, 65, 128]  # around the edges of blocks of 64
SHIFTS = [(Layout.LAYER, Layout.TENSOR), (Layout.TENSOR, Layout.LAYER)]
LONG = 8 * 64 + 30  # tokens whose keys and values leave in two pieces, where one chunk writes them
CHUNK = Fixed((40,))  # full blocks leave while later chunks are read; edges of chunks and blocks differ
MODELS = {
    "even": {"arch": "llama", "layers": 4, "heads": 4, "kv_heads": 4},
    "one-kv-head": {"arch": "gemma3", "layers": 3, "heads": 4, "kv_heads": 1},
    "uneven": {"arch": "qwen3", "layers": 5, "heads": 6, "kv_heads": 3},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A random model of `MODELS`; heads are 32 wide, so that q8_0 rows are whole blocks."""
    folder = tmp_path_factory.mktemp("shift")

    def build(name: str) -> Path:
        path = folder / f"{name}.gguf"
        return path if path.exists() else build_model(path, head_width=32, vocab=VOCAB, **MODELS[name])  # type: ignore[arg-type]

    return build


def random_ids(count: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(count).integers(0, VOCAB, count))


def placed(path: Path, workers: int) -> tuple[ModelSpec, Placement]:
    spec = build_spec(resolve_model(str(path)))
    return spec, place(spec, workers)


def moved_bytes(spec: ModelSpec, placement: Placement, kv_format: KvFormat, tokens: int) -> int:
    """All bundles (s, r) with s != r, of all blocks."""
    ranks = range(placement.ranks)
    off_diagonal = [(stage, part) for stage in ranks for part in ranks if stage != part]
    one_block = sum(bundle_bytes(spec, placement, stage, part, kv_format) for stage, part in off_diagonal)
    return -(-tokens // BLOCK_TOKENS) * one_block


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kv_type", KvType)
def test_keys_and_values_are_the_same_after_a_shift_and_no_weight_moves(
    groups: RunningGroups, model: Callable[[str], Path], name: str, workers: int, kv_type: KvType
) -> None:
    path = model(name)
    driver = groups.load(path, workers, kv_type=kv_type)
    spec, placement = placed(path, workers)
    for prefill, decode in SHIFTS:
        for prompt in PROMPTS:
            request = GenerationRequest(
                random_ids(prompt), 3, GREEDY, prefill=prefill, decode=decode, chunk_rule=CHUNK, verify_shift=True
            )
            result = answer(driver, request)
            assert result.shift is not None, (prefill, prompt)
            assert result.warning is None
            assert (result.shift.source, result.shift.to) == (prefill, decode)
            assert result.decode.layout is decode
            assert result.shift.hashes_equal is True, (prefill, prompt)
            assert result.shift.weight_bytes == 0
            assert result.shift.kv_bytes == moved_bytes(spec, placement, KvFormat(kv_type, kv_type), prompt)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_long_chunk_leaves_in_pieces_while_it_is_read_and_arrives_whole(
    groups: RunningGroups, model: Callable[[str], Path], workers: int
) -> None:
    path = model("uneven")
    driver = groups.load(path, workers, kv_type=KvType.F16, context_tokens=LONG + 8, max_chunk_tokens=LONG)
    spec, placement = placed(path, workers)
    for sizes in ((LONG,), (100, LONG - 100)):
        request = GenerationRequest(
            random_ids(LONG), 3, GREEDY, prefill=Layout.LAYER, decode=Layout.TENSOR, chunk_rule=Fixed(sizes),
            verify_shift=True,
        )  # fmt: skip
        result = answer(driver, request)
        assert result.shift is not None
        assert result.shift.hashes_equal is True, sizes
        assert result.shift.kv_bytes == moved_bytes(spec, placement, KvFormat(KvType.F16, KvType.F16), LONG)
        assert (result.prefill.chunks, result.warning) == (sizes, None)


@pytest.mark.parametrize(
    ("name", "workers"),
    [("even", 2), ("uneven", 3), pytest.param("uneven", 2, marks=pytest.mark.slow),
     pytest.param("one-kv-head", 2, marks=pytest.mark.slow)],
)  # fmt: skip
def test_keys_and_values_that_fit_once_change_places_and_come_back_the_same(
    groups: RunningGroups, model: Callable[[str], Path], name: str, workers: int
) -> None:
    path = model(name)
    driver = groups.load(path, workers, shift_in_place=True)  # 4 blocks of context, one of them a tick
    assert driver.kv_slots == ((4 * workers,) * 2,) * workers
    for prefill, decode in SHIFTS:
        for prompt in (1, 65, 250):
            ids = random_ids(prompt + 4)
            request = GenerationRequest(
                ids[:prompt], 3, GREEDY, prefill=prefill, decode=decode, chunk_rule=CHUNK, verify_shift=True
            )
            shift = answer(driver, request).shift
            assert shift is not None, (prefill, prompt)
            assert shift.hashes_equal is True, (prefill, prompt)
            assert shift.kv_bytes == moved_bytes(*placed(path, workers), KvFormat(KvType.F32, KvType.F32), prompt)
        stays, _ = collect_logits(driver, ids[:100], 90, prefill, prefill, CHUNK)
        shifts, _ = collect_logits(driver, ids[:100], 90, prefill, decode, CHUNK)
        assert np.abs(stays - shifts).max() < 1e-3, prefill
    assert driver.kv_slots == ((4 * workers,) * 2,) * workers


@pytest.mark.parametrize("shares", [(3.0, 1.0), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("name", ["even", "uneven"])
def test_uneven_shares_shift_alike(
    groups: RunningGroups, model: Callable[[str], Path], name: str, shares: tuple[float, float]
) -> None:
    path = model(name)
    for cut in ("tensor_shares", "layer_shares"):
        driver = groups.load(path, 2, **{cut: shares})  # type: ignore[arg-type]
        for prefill, decode in SHIFTS:
            request = GenerationRequest(
                random_ids(65), 3, GREEDY, prefill=prefill, decode=decode, chunk_rule=CHUNK, verify_shift=True
            )
            result = answer(driver, request)
            assert result.shift is not None, (cut, prefill)
            assert (result.shift.hashes_equal, result.shift.weight_bytes) == (True, 0), (cut, prefill)
            stays, _ = collect_logits(driver, random_ids(70), 65, prefill, prefill, CHUNK)
            shifts, _ = collect_logits(driver, random_ids(70), 65, prefill, decode, CHUNK)
            assert np.abs(stays - shifts).max() < 1e-3, (cut, prefill)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_logits_after_a_shift_are_those_without_one(
    groups: RunningGroups, model: Callable[[str], Path], name: str, workers: int
) -> None:
    driver = groups.load(model(name), workers, kv_type=KvType.F32)
    for prefill, decode in SHIFTS:
        for prompt in PROMPTS:
            ids = random_ids(prompt + 4)
            stays, _ = collect_logits(driver, ids, prompt, prefill, prefill, CHUNK)
            shifts, _ = collect_logits(driver, ids, prompt, prefill, decode, CHUNK)
            assert np.array_equal(stays[:prompt], shifts[:prompt])
            assert np.abs(stays - shifts).max() < 1e-3, (prefill, prompt)


@pytest.mark.parametrize("workers", [2, 4])
def test_a_hash_covers_every_head_and_ranks_that_share_one_agree(
    groups: RunningGroups, model: Callable[[str], Path], workers: int
) -> None:
    """One KV head: every rank holds it. A token more or another prompt gives other digests.

    Copies have the same bits where the parts have the same shape: not so with 4 query heads on 3 ranks.
    """
    driver = groups.load(model("one-kv-head"), workers)
    prompt = random_ids(70)
    for prefill, decode in SHIFTS:
        digests = hash_after_first_token(driver, prompt, prefill, decode, 70)
        assert digests.keys() == {(layer, 0) for layer in range(3)}
        assert all(len(found) == 1 for found in digests.values())
        assert digests == hash_after_first_token(driver, prompt, prefill, decode, 70)
        other_prompt = (*prompt[:-1], (prompt[-1] + 1) % VOCAB)
        for other in (
            hash_after_first_token(driver, prompt, prefill, decode, 69),
            hash_after_first_token(driver, other_prompt, prefill, decode, 70),
        ):
            assert all(other[head] != digests[head] for head in digests)


def hash_after_first_token(
    driver: Driver, prompt: tuple[int, ...], prefill: Layout, decode: Layout, tokens: int
) -> dict[tuple[int, int], frozenset[str]]:
    """Digests in the decode layout, while the request is being answered."""
    request = driver.submit(
        GenerationRequest(prompt, 150, GREEDY, prefill=prefill, decode=decode, one_step_at_a_time=True)
    )
    while not any(isinstance(event, TokenEvent) for event in driver.step(POLL_SECONDS)):
        pass
    digests = driver.hash_kv(request, tokens)
    driver.cancel(request)
    while not any(isinstance(event, FinishedEvent) for event in driver.step(POLL_SECONDS)):
        pass
    return digests


@pytest.mark.parametrize("workers", [2, 4])
def test_each_rank_holds_its_share_of_weights_and_receives_its_share_of_keys_and_values(
    groups: RunningGroups, model: Callable[[str], Path], workers: int
) -> None:
    """Even cuts, counted by hand: p + d - p·d of the layers' weights, and K(S-1)/S² of the KV for each rank."""
    path = model("even")
    driver = groups.load(path, workers, fresh=True)
    spec, _ = placed(path, workers)
    loaded = groups.loaded[workers]

    layer_bytes = 4 * sum(
        info.shape[0] * info.shape[1]
        for name, info in spec.tensors.items()
        if name.startswith("blk.") and len(info.shape) == 2
    )
    vector_bytes = 4 * sum(info.shape[0] for info in spec.tensors.values() if len(info.shape) == 1)
    head_bytes = 4 * VOCAB * spec.hidden
    share = 1 / workers
    by_hand = layer_bytes * (share + share - share * share) + head_bytes / workers + vector_bytes
    assert loaded.weight_bytes == pytest.approx([by_hand] * workers, rel=0.01)

    result = answer(
        driver, GenerationRequest(random_ids(128), 2, GREEDY, prefill=Layout.LAYER, decode=Layout.TENSOR)
    )
    kv_bytes = 128 * sum(2 * layer.kv_heads * row_bytes(KvType.F32, layer.key_width) for layer in spec.layers)
    assert result.shift is not None
    assert result.shift.kv_bytes == workers * kv_bytes * (workers - 1) // workers**2


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_bytes_held_are_the_bytes_planned(
    groups: RunningGroups, model: Callable[[str], Path], name: str, workers: int
) -> None:
    path = model(name)
    driver = groups.load(path, workers, fresh=True)
    spec, placement = placed(path, workers)
    loaded = groups.loaded[workers]
    assert loaded.weight_bytes == tuple(memory.weight_bytes(spec, placement, rank, 4) for rank in range(workers))
    if workers > 1:
        answer(driver, GenerationRequest(random_ids(128), 5, GREEDY, prefill=Layout.LAYER, decode=Layout.TENSOR))
    for report, weight_bytes, kv_bytes in zip(
        driver.memory(), loaded.weight_bytes, loaded.kv_bytes, strict=True
    ):
        assert report.planned_bytes == weight_bytes + kv_bytes
        assert report.peak_bytes == report.planned_bytes
