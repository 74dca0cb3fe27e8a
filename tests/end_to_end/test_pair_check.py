"""F22: a pair of ranks between which bytes arrive changed is refused by name, before a model is read."""

import itertools

import pytest
import torch

from gearshift.launch.processes.local import local_cluster
from gearshift.proto.errors import PairDamagedError
from gearshift.worker.links.pair_check import PATTERN_BYTES, Way, pattern


def start_two_workers() -> None:
    with local_cluster(workers=2, device="cpu", threads_per_worker=1) as cluster:
        assert cluster.receive(30.0) is None


def test_f22_the_pair_that_spoils_what_it_moves_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEARSHIFT_FAULT", "corrupt-pair source=0 target=1")
    with pytest.raises(PairDamagedError) as caught:
        start_two_workers()
    told = str(caught.value)
    assert "arrives changed from rank 0 to rank 1 (keys and values, hidden rows)" in told
    assert "from rank 1" not in told


def test_f22_patterns_differ_in_every_word_between_pairs_ways_and_places() -> None:
    cpu = torch.device("cpu")
    cases = [(0, 1, Way.KV), (1, 0, Way.KV), (0, 1, Way.PIPELINE), (1, 2, Way.PIPELINE), (0, 2, Way.KV)]
    patterns = [pattern(*case, cpu).view(torch.int64) for case in cases]
    for one, other in itertools.combinations(patterns, 2):
        assert not (one == other).any()
    for words in patterns:
        assert len(words.unique()) == PATTERN_BYTES // 8
        assert (words != 0).all()
