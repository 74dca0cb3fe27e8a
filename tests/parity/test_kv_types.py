"""Keys and values in fewer bits on a real model: how far its logprobs may move."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from gearshift.coordinator.evaluation import collect_logits
from gearshift.coordinator.model.gguf_header import read_header
from gearshift.coordinator.tokenizer import build_tokenizer
from gearshift.proto.ids import KvType, Layout
from gearshift.tests.helpers.running_groups import RunningGroups

TOKENS, PROMPT = 160, 128
TOLERANCES = {  # (mean Kullback-Leibler divergence from f32 in nats, share of positions with another likeliest token)
    KvType.F16: (1e-5, 0.01),
    KvType.BF16: (3e-4, 0.03),
    KvType.Q8_0: (5e-3, 0.03),
}


def logprobs(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    shifted = rows.astype(np.float64) - rows.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def test_a_smaller_cache_moves_the_logprobs_a_little(
    groups: RunningGroups, smollm2_path: Path, golden_dir: Path
) -> None:
    ids = build_tokenizer(read_header(smollm2_path).metadata).encode((golden_dir / "perplexity.txt").read_text())
    found = {}
    for kv_type in KvType:
        driver = groups.load(smollm2_path, 2, kv_type=kv_type)
        rows, _ = collect_logits(driver, ids[:TOKENS], PROMPT, Layout.LAYER, Layout.TENSOR)
        found[kv_type] = logprobs(rows)
    exact = found[KvType.F32]
    for kv_type, (divergence_limit, parting_limit) in TOLERANCES.items():
        near = found[kv_type]
        divergence = float((np.exp(exact) * (exact - near)).sum(axis=1).mean())
        parting = float((exact.argmax(axis=1) != near.argmax(axis=1)).mean())
        top = np.abs(exact - near)[np.arange(TOKENS), exact.argmax(axis=1)].max()
        print(f"{kv_type}: divergence {divergence:.2e}, {parting:.1%} part, likeliest token's logprob off by {top:.1e}")
        assert 0 < divergence < divergence_limit, kv_type
        assert parting <= parting_limit, kv_type
