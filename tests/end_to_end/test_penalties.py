"""A real model with a repetition penalty: the same text in every layout, and a first token that needs no replay."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from gearshift.coordinator.driver import Driver
from gearshift.coordinator.evaluation import collect_logits
from gearshift.coordinator.generation import GenerationRequest
from gearshift.coordinator.model.gguf_header import read_header
from gearshift.coordinator.tokenizer import build_tokenizer
from gearshift.proto.generation_result import GenerationResult
from gearshift.proto.ids import Layout
from gearshift.proto.sampling import SamplingParameters
from gearshift.tests.helpers.answers import answer, first_difference, ids_of
from gearshift.tests.helpers.running_groups import RunningGroups

PENALTY, TOKENS, NEAR_TIE = 1.3, 64, 0.02
TEXT = "The river rose. The river rose again, and the bridge over the river was"
LAYOUTS = [(prefill, decode) for prefill in Layout for decode in Layout]


def penalised_logits(driver: Driver, history: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """What the sampler should choose from after `history`, by hand: a token seen loses a part of its logit."""
    rows, _ = collect_logits(driver, history, len(history), Layout.LAYER, Layout.LAYER)
    logits: npt.NDArray[np.float64] = rows[-1].astype(np.float64)
    seen = sorted(set(history))
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / PENALTY, logits[seen] * PENALTY)
    return logits


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_all_combinations_write_the_same_text_up_to_a_near_tie(
    groups: RunningGroups, smollm2_path: Path, workers: int
) -> None:
    driver = groups.load(smollm2_path, workers, context_tokens=512, max_chunk_tokens=512)
    prompt = tuple(build_tokenizer(read_header(smollm2_path).metadata).encode(TEXT))
    sampling = SamplingParameters(temperature=0.0, repetition_penalty=PENALTY)
    found: dict[tuple[Layout, Layout], GenerationResult] = {}
    for prefill, decode in LAYOUTS:
        request = GenerationRequest(prompt, TOKENS, sampling, prefill=prefill, decode=decode, verify_shift=True)
        result = found[prefill, decode] = answer(driver, request)
        # The prompt is read once; its last chunk gives the first token, each step one more.
        assert sum(result.prefill.chunks) == result.prompt_tokens == len(prompt)
        assert (len(result.tokens), result.decode.steps) == (TOKENS, TOKENS - 1)
        if result.shift is not None:
            assert result.shift.hashes_equal is True

    texts = [ids_of(result) for result in found.values()]
    for text in texts[1:]:
        parting = first_difference(texts[0], text)
        if parting is not None:
            second, first = np.sort(penalised_logits(driver, prompt + text[:parting]))[-2:]
            assert first - second < NEAR_TIE, parting
    print("tokens up to the first difference:", [first_difference(texts[0], text) for text in texts[1:]])

    for index in (0, 1, 7, 31, TOKENS - 1):
        logits = penalised_logits(driver, prompt + texts[0][:index])
        assert logits.max() - logits[texts[0][index]] < NEAR_TIE, index

    plain = answer(driver, GenerationRequest(prompt, TOKENS, SamplingParameters(temperature=0.0)))
    assert ids_of(plain) != texts[0]
