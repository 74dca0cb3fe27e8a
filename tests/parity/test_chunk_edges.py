"""Prompts that end at, before and after the edge of a chunk, of a block and of the context (F24)."""

from pathlib import Path

import numpy as np
import pytest

from gearshift.coordinator.chunks.plan import Auto, Fixed
from gearshift.coordinator.evaluation import collect_logits
from gearshift.coordinator.generation import GenerationRequest
from gearshift.proto.errors import DoesNotFitError
from gearshift.proto.generation_result import FinishReason
from gearshift.proto.ids import Layout
from gearshift.tests.helpers.answers import GREEDY, answer, ids_of
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.tests.helpers.reference_model import ReferenceModel, read_reference
from gearshift.tests.helpers.running_groups import RunningGroups

VOCAB, CONTEXT, CHUNK = 128, 64, 8
LAYOUTS = [(prefill, decode) for prefill in Layout for decode in Layout]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ReferenceModel]:
    path = build_model(tmp_path_factory.mktemp("chunks") / "chunks.gguf", "qwen2", layers=4, vocab=VOCAB, seed=5)
    return path, read_reference(path)


def random_ids(count: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(count).integers(0, VOCAB, count))


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("prompt", [1, 7, 8, 9, 15, 16, 17, 24, 25])
def test_the_first_token_is_that_of_a_prompt_read_at_once(
    groups: RunningGroups, small: tuple[Path, ReferenceModel], workers: int, prompt: int
) -> None:
    path, reference = small
    ids = random_ids(prompt)
    wanted = reference.logits(ids)
    driver = groups.load(path, workers, context_tokens=CONTEXT, max_chunk_tokens=CONTEXT)
    for prefill, decode in LAYOUTS if workers > 1 else LAYOUTS[:1]:
        rows, _ = collect_logits(driver, ids, prompt, prefill, decode, Fixed((CHUNK,)))
        at_once, _ = collect_logits(driver, ids, prompt, prefill, decode, Fixed((CONTEXT,)))
        assert np.abs(rows - wanted).max() < 1e-3, (prefill, decode)
        assert np.abs(at_once - wanted).max() < 1e-3, (prefill, decode)
        request = GenerationRequest(ids, 3, GREEDY, prefill=prefill, decode=decode, chunk_rule=Fixed((CHUNK,)))
        result = answer(driver, request)
        assert result.prefill.chunks == (CHUNK,) * (prompt // CHUNK) + ((prompt % CHUNK,) if prompt % CHUNK else ())
        assert ids_of(result)[0] == wanted[-1].argmax()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("prompt", [1, 2, 63, 64])
def test_an_answer_may_fill_the_context_exactly(
    groups: RunningGroups, small: tuple[Path, ReferenceModel], workers: int, prompt: int
) -> None:
    """The last token sampled is never fed, so that it needs no cell: context + 1 tokens in all."""
    path, reference = small
    driver = groups.load(path, workers, context_tokens=CONTEXT, max_chunk_tokens=CONTEXT)
    for prefill, decode in LAYOUTS if workers > 1 else LAYOUTS[:1]:
        request = GenerationRequest(
            random_ids(prompt), None, GREEDY, prefill=prefill, decode=decode, chunk_rule=Fixed((CHUNK,))
        )
        result = answer(driver, request)
        assert len(result.tokens) == CONTEXT - prompt + 1
        assert result.finish_reason is FinishReason.LENGTH
        fed = (*request.prompt, *ids_of(result)[:-1])
        logits = reference.logits(fed)
        for index, token in enumerate(ids_of(result)):
            row = logits[prompt - 1 + index]
            assert row.max() - row[token] < 1e-3, (prefill, decode, index)
    with pytest.raises(DoesNotFitError, match="65 tokens do not fit in a context of 64"):
        driver.submit(GenerationRequest(random_ids(65), 1, GREEDY))


@pytest.mark.parametrize("prompt", [1, 2, 3])
def test_fewer_tokens_than_stages_pass_through_the_pipeline(
    groups: RunningGroups, small: tuple[Path, ReferenceModel], prompt: int
) -> None:
    path, reference = small
    driver = groups.load(path, 4, context_tokens=CONTEXT, max_chunk_tokens=CONTEXT)
    ids = random_ids(prompt)
    for rule in (Auto(), Fixed((1,))):
        rows, result = collect_logits(driver, ids, prompt, Layout.LAYER, Layout.TENSOR, rule)
        assert np.abs(rows - reference.logits(ids)).max() < 1e-3
        assert sum(result.prefill.chunks) == prompt
        assert all(1 <= chunk <= CONTEXT for chunk in result.prefill.chunks)


@pytest.mark.parametrize("prompt", [1, 31, 32, 33, 64])
def test_the_automatic_rule_with_one_stage_takes_what_the_buffers_take(
    groups: RunningGroups, small: tuple[Path, ReferenceModel], prompt: int
) -> None:
    path, reference = small
    driver = groups.load(path, 1, context_tokens=CONTEXT, max_chunk_tokens=32)
    ids = random_ids(prompt)
    rows, result = collect_logits(driver, ids, prompt, Layout.LAYER, Layout.LAYER, Auto())
    assert np.abs(rows - reference.logits(ids)).max() < 1e-3
    assert result.prefill.chunks == ((prompt,) if prompt <= 32 else (32, prompt - 32))
