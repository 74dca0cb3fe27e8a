"""Two workers, one slowed on demand: the model is shared out by what they were measured to do."""

from pathlib import Path

import pytest

from gearshift.tests.helpers.commands import answer, gearshift, tokens_file
from gearshift.tests.helpers.gguf_builder import build_model

COMMON = ("--workers", "2", "--prefill", "layer", "--decode", "tensor", "--compute-type", "f32", "-n", "12",
          "--temperature", "0", "--ignore-eos", "--chunk", "16")  # fmt: skip


@pytest.mark.slow
def test_a_slowed_worker_gets_less_of_the_model_and_the_answer_stays_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = build_model(
        tmp_path / "model.gguf", layers=16, hidden=256, heads=8, kv_heads=8, feed_forward=1024
    )
    words = (
        str(model),
        "--tokens-file",
        str(tokens_file(tmp_path, [index % 250 for index in range(60)])),
        *COMMON,
    )
    alike = answer(*words)
    monkeypatch.setenv("GEARSHIFT_FAULT", "slow rank=1 percent=800")
    unlike = answer(*words)
    assert unlike["completion_tokens"] == alike["completion_tokens"]
    assert [rank["planned_bytes"] == rank["peak_bytes"] for rank in unlike["memory"]] == [True, True]
    first, second = (rank["planned_bytes"] for rank in unlike["memory"])
    assert first > 1.5 * second
    kept = gearshift("run", *words, "--threads", "1").stderr
    assert "layers 1" in kept
    assert "rank 1 reads at 0." in kept
