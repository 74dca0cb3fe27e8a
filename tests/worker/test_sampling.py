"""The sampler's chain against a plain numpy reference, its statistics, and the field cases."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from gearshift.proto.errors import ProtocolError
from gearshift.proto.ids import RequestId
from gearshift.proto.reports import SampledToken
from gearshift.proto.sampling import SamplingParameters
from gearshift.worker.sampling import RequestSampler, Sampler, TokenCounts, best_ids

ONE = RequestId(1)
VOCAB = 3000
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def rows(seed: int, count: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return 3.0 * torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed))


def sampler_of(parameters: SamplingParameters, prompt: tuple[int, ...] = (), vocab: int = VOCAB) -> Sampler:
    sampler = Sampler(vocab)
    sampler.open(ONE, parameters, prompt)
    return sampler


def penalised_reference(logits: np.ndarray, history: list[int], parameters: SamplingParameters) -> np.ndarray:
    """Bias and penalties, token by token."""
    logits = logits.astype(np.float64)
    for token, bias in parameters.logit_bias:
        logits[token] += bias
    window = len(history) if parameters.penalty_window < 0 else parameters.penalty_window
    seen = history[max(0, len(history) - window) :]
    for token in set(seen):
        if logits[token] > 0:
            logits[token] /= parameters.repetition_penalty
        else:
            logits[token] *= parameters.repetition_penalty
        logits[token] -= parameters.presence_penalty + seen.count(token) * parameters.frequency_penalty
    return logits


def distribution_reference(logits: np.ndarray, parameters: SamplingParameters) -> np.ndarray:
    """Probability of each id after top_k, top_p, min_p and temperature: everything sorted, nothing clever."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if parameters.top_k > 0:
        order = order[: parameters.top_k]
    if parameters.top_p < 1.0:
        weights = np.exp(logits[order] - logits[order[0]])
        weights /= weights.sum()
        cumulative, kept = 0.0, 0
        for weight in weights:
            cumulative += weight
            kept += 1
            if cumulative >= parameters.top_p:
                break
        order = order[:kept]
    if parameters.min_p > 0.0:
        weights = np.exp(logits[order] - logits[order[0]])
        order = [token for token, weight in zip(order, weights, strict=True) if weight >= parameters.min_p]
    probabilities = np.zeros(len(logits))
    scaled = logits[order] / parameters.temperature
    probabilities[order] = np.exp(scaled - scaled.max())
    return probabilities / probabilities.sum()


CHAINS = [
    {},
    {"top_k": 5},
    {"top_k": 1},
    {"top_p": 0.6},
    {"top_p": 1e-9},
    {"top_p": 0.999},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7},
    {"top_p": 0.7, "min_p": 0.02},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8},
    {"top_k": 10_000, "temperature": 3.0},
    {"temperature": 1e6, "top_k": 7},
]


@pytest.mark.parametrize("chain", CHAINS)
def test_what_is_drawn_has_the_distribution_of_the_plain_reference(chain):
    parameters = SamplingParameters(**(NEUTRAL | chain), seed=11)
    logits_V = rows(3, vocab=60)[0]
    truth = distribution_reference(logits_V.double().numpy(), parameters)
    sampler = sampler_of(parameters, vocab=60)
    draws = 2000
    counts = np.bincount([sampler.choose(ONE, logits_V).token for _ in range(draws)], minlength=60)
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(truth)), "an id that the chain cuts was drawn"
    # Five standard deviations of each count, and one for ids too rare to have a spread.
    spread = 5 * np.sqrt(draws * truth * (1 - truth)) + 1
    assert (np.abs(counts - draws * truth) <= spread).all()


@pytest.mark.parametrize("chain", CHAINS)
def test_the_ids_a_chain_leaves_are_those_of_the_reference_on_a_large_vocabulary(chain):
    parameters = SamplingParameters(**(NEUTRAL | chain), seed=5)
    logits = rows(8, 10)
    sampler = sampler_of(parameters)
    for logits_V in logits:
        truth = distribution_reference(logits_V.double().numpy(), parameters)
        for _ in range(5):
            assert truth[sampler.choose(ONE, logits_V).token] > 0


def test_a_nucleus_wider_than_the_first_guess_is_still_whole():
    parameters = SamplingParameters(temperature=1.0, top_k=0, top_p=0.9, min_p=0.0, seed=2)
    logits_V = torch.linspace(0.01, 0.0, 5_000)  # nearly flat: 0.9 of the mass is 4,500 tokens
    sampler = sampler_of(parameters, vocab=5_000)
    drawn = [sampler.choose(ONE, logits_V).token for _ in range(200)]
    assert max(drawn) < 4_520
    assert max(drawn) > 4_200
    assert abs(np.mean(drawn) - 2_250) < 400


def test_one_uniform_number_a_token_goes_through_the_cumulative_probabilities():
    """The draw, spelled out: Philox keyed with the seed, 53 bits, greatest logits first."""
    parameters = SamplingParameters(temperature=0.7, top_k=40, top_p=1.0, min_p=0.0, seed=2**64 - 1)
    sampler = sampler_of(parameters)
    random = np.random.Philox(key=2**64 - 1)
    for logits_V in rows(21, 50):
        probabilities = distribution_reference(logits_V.double().numpy(), parameters)
        order = np.argsort(-logits_V.numpy(), kind="stable")[:40]
        uniform = (int(random.random_raw()) >> 11) * 2.0**-53
        expected = order[np.searchsorted(np.cumsum(probabilities[order]), uniform, side="right")]
        assert sampler.choose(ONE, logits_V).token == expected


@pytest.mark.parametrize("window", [-1, 0, 1, 5, 64])
def test_penalties_and_bias_are_those_of_the_reference_token_by_token(window):
    parameters = SamplingParameters(
        temperature=0.0,
        repetition_penalty=1.4,
        presence_penalty=0.7,
        frequency_penalty=-0.3,
        penalty_window=window,
        logit_bias=((3, 2.5), (40, -100.0), (3, 0.25)),
    )
    vocab = 50
    history = [int(token) for token in np.random.default_rng(4).integers(0, vocab, 30)]
    sampler = sampler_of(parameters, tuple(history), vocab)
    for step, logits_V in enumerate(rows(17, 200, vocab)):
        expected = penalised_reference(logits_V.numpy(), history, parameters)
        chosen = sampler.choose(ONE, logits_V).token
        assert chosen == int(expected.argmax()), step
        history.append(chosen)
        if step % 7 == 0:
            sampler.accept(ONE, step % vocab)
            history.append(step % vocab)


def test_penalties_see_the_whole_prompt():
    logits_V = torch.zeros(VOCAB)
    logits_V[7], logits_V[9] = 5.0, 4.0
    parameters = SamplingParameters(temperature=0.0, repetition_penalty=2.0)
    prompt = (7, *range(100, 2000))  # the penalised id is the very first
    assert sampler_of(parameters, prompt).choose(ONE, logits_V).token == 9
    assert sampler_of(parameters, prompt[1:]).choose(ONE, logits_V).token == 7


def test_a_window_forgets_what_has_left_it():
    counts = TokenCounts(3)
    for token in (5, 5, 6, 8, 8):
        counts.add(token)
    ids, numbers = counts.seen()
    assert dict(zip(ids.tolist(), numbers.tolist(), strict=True)) == {6: 1.0, 8: 2.0}


def test_counts_of_more_ids_than_were_foreseen_are_right():
    counts = TokenCounts(-1)
    tokens = [int(token) for token in np.random.default_rng(1).integers(0, 700, 5000)]
    for token in tokens:
        counts.add(token)
    ids, numbers = counts.seen()
    truth = np.bincount(tokens, minlength=700)
    assert dict(zip(ids.tolist(), numbers.tolist(), strict=True)) == {i: n for i, n in enumerate(truth) if n}


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_f19_the_same_seed_gives_the_same_tokens_and_another_seed_others(seed):
    logits = rows(30, 100)

    def run(seed: int) -> list[int]:
        sampler = sampler_of(SamplingParameters(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=seed))
        return [sampler.choose(ONE, logits_V).token for logits_V in logits]

    assert run(seed) == run(seed)
    assert run(seed) != run(seed ^ 1)


def test_f19_requests_with_one_seed_do_not_disturb_each_other():
    logits = rows(31, 40)
    parameters = SamplingParameters(temperature=1.5, top_k=0, seed=9)
    alone, together = sampler_of(parameters), sampler_of(parameters)
    together.open(RequestId(2), parameters, ())
    for logits_V in logits:
        first = together.choose(ONE, logits_V).token
        assert together.choose(RequestId(2), logits_V).token == first
        assert alone.choose(ONE, logits_V).token == first


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("written", [0, 1, 7, 39])
def test_an_answer_that_another_sampler_began_goes_on_as_if_it_were_the_same(temperature: float, written: int) -> None:
    logits, prompt = rows(32, 40), (5, 6, 7)
    parameters = SamplingParameters(temperature=temperature, top_k=0, seed=9, repetition_penalty=1.3, penalty_window=20)
    whole = sampler_of(parameters, prompt)
    tokens = [whole.choose(ONE, logits_V).token for logits_V in logits]
    second = Sampler(VOCAB)
    second.open(ONE, parameters, (*prompt, *tokens[:written]), sampled=written)
    assert [second.choose(ONE, logits_V).token for logits_V in logits[written:]] == tokens[written:]


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-6])
def test_f37_a_tiny_temperature_acts_as_greedy(temperature):
    sampler = sampler_of(SamplingParameters(temperature=temperature, top_p=0.5, min_p=0.1, seed=3))
    for logits_V in rows(40, 20):
        assert sampler.choose(ONE, logits_V).token == int(logits_V.numpy().argmax())


def test_greedy_takes_the_lowest_id_among_equals():
    logits_V = torch.zeros(VOCAB)
    logits_V[[20, 10, 2999]] = 4.0
    assert sampler_of(SamplingParameters(temperature=0.0)).choose(ONE, logits_V).token == 10


def test_top_k_takes_the_lowest_ids_among_equals():
    logits_V = torch.zeros(5000)
    logits_V[[4000, 17]] = 1.0
    assert best_ids(logits_V, 5).tolist() == [17, 4000, 0, 1, 2]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("damage", ["one NaN", "all NaN", "a positive infinity", "all -inf"])
def test_f22_logits_that_are_no_numbers_end_the_request_with_an_error(damage, temperature):
    sampler = sampler_of(
        SamplingParameters(temperature=temperature, seed=1, repetition_penalty=1.1, logprobs=3)
    )
    logits_V = rows(2)[0]
    good = logits_V.clone()
    match damage:
        case "one NaN":
            logits_V[1234] = torch.nan
        case "all NaN":
            logits_V.fill_(torch.nan)
        case "a positive infinity":
            logits_V[3] = torch.inf
        case _:
            logits_V.fill_(-torch.inf)
    sampled = sampler.choose(ONE, logits_V)
    assert sampled.error is not None
    assert math.isfinite(sampled.logprob)
    fresh = sampler_of(
        SamplingParameters(temperature=temperature, seed=1, repetition_penalty=1.1, logprobs=3)
    )
    assert sampler.choose(ONE, good) == fresh.choose(ONE, good), "a failed choice changed the state"


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_ids_that_are_no_tokens_are_never_chosen_and_have_no_share_of_the_probability(temperature):
    sampler = Sampler(20, range(16, 20))
    parameters = SamplingParameters(
        **(NEUTRAL | {"temperature": temperature}), logprobs=20, logit_bias=((18, 50.0),)
    )
    sampler.open(ONE, parameters, ())
    logits_V = torch.zeros(20)
    logits_V[16:] = 30.0
    logits_V[19] = torch.nan  # padding rows may hold anything
    before = logits_V.clone()
    for _ in range(50):
        sampled = sampler.choose(ONE, logits_V)
        assert sampled.error is None
        assert sampled.token < 16
        assert [token for token, _ in sampled.top] == list(range(16))
        assert sampled.logprob == pytest.approx(-math.log(16), abs=1e-6)
    assert torch.equal(logits_V.nan_to_num(), before.nan_to_num()), "the caller's logits were written to"


def test_logprobs_are_the_models_own_before_bias_penalties_and_temperature():
    parameters = SamplingParameters(
        temperature=0.3, top_k=3, repetition_penalty=1.5, logit_bias=((5, 90.0),), logprobs=7, seed=4
    )
    sampler = sampler_of(parameters, (1, 2, 3))
    for logits_V in rows(50, 10):
        sampled = sampler.choose(ONE, logits_V)
        exact = logits_V.double().numpy()
        truth = exact - np.logaddexp.reduce(exact)
        assert sampled.token == 5
        assert sampled.logprob == pytest.approx(truth[5], abs=1e-5)
        best = np.argsort(-truth, kind="stable")[:7]
        assert [token for token, _ in sampled.top] == list(best)
        assert [logprob for _, logprob in sampled.top] == pytest.approx(truth[best], abs=1e-5)


def test_f36_only_finite_logprobs_are_reported():
    sampler = sampler_of(SamplingParameters(temperature=0.0, logprobs=10), vocab=6)
    sampled = sampler.choose(ONE, torch.tensor([-torch.inf, 1.0, -torch.inf, 0.0, -torch.inf, -1e30]))
    assert [token for token, _ in sampled.top] == [1, 3, 5]
    assert all(math.isfinite(logprob) for _, logprob in sampled.top)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("bias", [-100.0, -1e300])
def test_a_large_negative_bias_bans_a_token_and_a_large_positive_one_forces_it(bias, temperature):
    logits_V = rows(60)[0]
    best = int(logits_V.argmax())
    chain = NEUTRAL | {"temperature": temperature, "top_k": 40}
    banned = sampler_of(SamplingParameters(**chain, logit_bias=((best, bias),)))
    forced = sampler_of(SamplingParameters(**(chain | {"min_p": 0.5}), logit_bias=((77, -bias),)))
    for _ in range(50):
        assert banned.choose(ONE, logits_V).token != best
        sampled = forced.choose(ONE, logits_V)
        assert sampled.token == 77
        assert sampled.error is None


def test_a_token_with_no_probability_is_not_drawn_even_if_top_k_reaches_it():
    logits_V = torch.full((100,), -torch.inf)
    logits_V[[30, 60]] = 0.0
    sampler = sampler_of(
        SamplingParameters(**(NEUTRAL | {"top_k": 50, "temperature": 1e6}), seed=8), vocab=100
    )
    assert {sampler.choose(ONE, logits_V).token for _ in range(100)} == {30, 60}


def test_requests_open_once_close_silently_and_are_unknown_afterwards():
    sampler = sampler_of(SamplingParameters())
    with pytest.raises(ProtocolError, match="open at the sampler already"):
        sampler.open(ONE, SamplingParameters(), ())
    sampler.close(ONE)
    sampler.close(ONE)
    with pytest.raises(ProtocolError, match="request 1 is not open"):
        sampler.choose(ONE, torch.zeros(VOCAB))
    with pytest.raises(ProtocolError, match="request 1 is not open"):
        sampler.accept(ONE, 3)
    sampler.open(ONE, SamplingParameters(), ())
    with pytest.raises(ProtocolError, match="shape"):
        sampler.choose(ONE, torch.zeros(VOCAB + 1))


@pytest.mark.parametrize("steps", [1, 8])  # of logits a unit: the fewer, the more equals
@pytest.mark.parametrize(
    "chain",
    [
        {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
        {"top_k": 5, "top_p": 1.0, "min_p": 0.0, "temperature": 1.5},
        {"top_k": 199, "top_p": 0.7, "min_p": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.0, "logit_bias": ((3, 4.0), (7, -100.0)), "frequency_penalty": 0.2},
    ],
)
def test_what_is_brought_at_once_is_chosen_from_as_what_is_looked_at_bit_by_bit(
    chain: dict[str, Any], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng()
    rows = [torch.from_numpy(np.round(rng.normal(0, 3, 200) * steps) / steps).float() for _ in range(40)]
    rows[5][17] = -torch.inf
    parameters = SamplingParameters(seed=int(rng.integers(1 << 30)), **chain)

    def told() -> list[SampledToken]:
        sampler = Sampler(200, (11, 12))
        sampler.open(RequestId(1), parameters, [3, 5, 5])
        return [sampler.choose(RequestId(1), row) for row in rows]

    brought = told()
    assert {type(token.logprob) for token in brought} == {float}  # what can be sent
    used = [RequestSampler(parameters, []).bring(row) is not None for row in rows]
    assert any(used) or steps == 1  # whole numbers: nearly every border has equals
    monkeypatch.setattr(RequestSampler, "bring", lambda self, logits: None)
    assert brought == told()


def test_equals_at_the_border_of_top_k_are_not_brought() -> None:
    logits = torch.zeros(50)
    logits[9] = 1.0
    sampler = RequestSampler(SamplingParameters(top_k=3, temperature=1.0), [])
    assert sampler.bring(logits) is None
    logits[[4, 2]] = 0.5
    brought = sampler.bring(logits)
    assert brought is not None
    assert brought.ids.tolist() == [9, 2, 4]
