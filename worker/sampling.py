"""Chooses tokens, on one rank only: cards of different kinds are not bit-equal, so nobody samples alone.

The chain, in this order (the order and the definitions are llama.cpp's defaults, as far as they are offered here):

    ids without a token   never chosen, and no part of any probability
    logit bias            added
    penalties             over the last `penalty_window` tokens of prompt and answer: the logit of each id seen there is
                          divided by the repetition penalty (multiplied where it is <= 0), then loses
                          presence_penalty + count * frequency_penalty
    temperature < 1e-5    the greatest logit, the lowest id among equals: done
    top_k                 the k greatest logits, lower ids first among equals
    top_p                 the shortest run of the greatest whose probabilities, among what top_k left, reach p
    min_p                 those with at least p times the probability of the greatest
    temperature           logits divided by it
    draw                  one uniform number a token, through the inverse of the cumulative probabilities

Random numbers are Philox4x64 (counter based, the same on every platform) keyed with the request's seed: 53 bits of one
64-bit word a token. So the same seed, logits and parameters give the same ids; a greedy choice draws nothing.

A GPU of that rank runs the chain by itself where it can (`suits_device`): `kernels/draw_triton.py`, by these
definitions and with these random numbers.

Logprobs are those of the model, not of the chain: the log-softmax of the logits before bias and penalties.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, log

import numpy as np
import torch
from torch import Tensor

from ..proto.errors import LOGITS_ARE_NO_NUMBERS, ProtocolError
from ..proto.ids import ComputeType, RequestId
from ..proto.reports import SampledToken
from ..proto.sampling import SamplingParameters

GREEDY_BELOW = 1e-5  # dividing by less only overflows
BIAS_LIMIT = 1e30  # beyond this f32 would turn a bias into an infinity, and the softmax into NaN
NUCLEUS_GUESS = 1024  # tokens sorted before the whole vocabulary is, when only top_p limits


class TokenCounts:
    """How often each id occurs in the last `window` tokens (-1: in all); ids seen, not the vocabulary, take memory."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._recent: deque[int] = deque()
        self._place: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)

    def add(self, token: int) -> None:
        if self._window == 0:
            return
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        self._counts[place] += 1
        if self._window > 0:
            self._recent.append(token)
            if len(self._recent) > self._window:
                self._counts[self._place[self._recent.popleft()]] -= 1

    def seen(self) -> tuple[Tensor, Tensor]:
        """(ids, counts), each [n]; every id once, counts above 0, f32."""
        used = len(self._place)
        present = self._counts[:used] > 0
        return torch.from_numpy(self._ids[:used][present]), torch.from_numpy(self._counts[:used][present])


@dataclass(frozen=True, slots=True)
class Brought:
    """What a choice among the greatest needs, on the host. Falling logits, lower ids first among equals."""

    logits: np.ndarray  # f64 [K], as bias and penalties have changed them
    ids: np.ndarray
    own_logits: np.ndarray  # f64 [K], the model's own
    greatest: float  # of the model's own logits
    total: float  # the log of the sum of their exponentials


class RequestSampler:
    """One request's chain, its counts and its random numbers."""

    def __init__(self, parameters: SamplingParameters, prompt: Sequence[int], sampled: int = 0) -> None:
        self.parameters = parameters
        self._random = np.random.Philox(key=parameters.seed)
        self._random.random_raw(sampled, output=False)
        self._penalised = is_penalised(parameters)
        self._counts = TokenCounts(parameters.penalty_window)
        bias = dict.fromkeys((token for token, _ in parameters.logit_bias), 0.0)
        for token, value in parameters.logit_bias:
            bias[token] += max(-BIAS_LIMIT, min(BIAS_LIMIT, value))
        self._bias_ids = torch.tensor(list(bias), dtype=torch.int64)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32).clamp_(-BIAS_LIMIT, BIAS_LIMIT)
        for token in prompt:
            self.accept(token)

    def accept(self, token: int) -> None:
        if self._penalised:
            self._counts.add(token)

    def bring(self, logits_V: Tensor) -> Brought | None:
        """All that a choice needs in one transfer: on a GPU each look at a number waits for the device.

        None where it cannot be told in advance what is needed: without top_k, or with equals at its border.
        """
        count = self.parameters.top_k
        greedy = self.parameters.temperature < GREEDY_BELOW
        if greedy or self.parameters.logprobs or not 0 < count < logits_V.numel():
            return None
        top = self._adjust(logits_V).topk(count + 1)
        total = logits_V.logsumexp(0)
        numbers = [top.values, top.indices, logits_V[top.indices], torch.stack((logits_V.max(), total))]
        brought = torch.cat([number.double() for number in numbers]).cpu().numpy()
        values, ids, own = brought[:-2].reshape(3, count + 1)
        if values[count - 1] == values[count]:
            return None
        order = np.lexsort((ids[:count], -values[:count]))
        return Brought(values[order], ids[order].astype(np.int64), own[order], float(brought[-2]), float(brought[-1]))

    def choose_brought(self, brought: Brought) -> tuple[int, float]:
        """(the next id, its logit as the model has it)."""
        token = self._draw(*self._limited(brought.logits, brought.ids, brought.logits))
        return token, float(brought.own_logits[brought.ids == token][0])

    def choose(self, logits_V: Tensor) -> int:
        """The next id. `logits_V`: f32, masked with -inf, its greatest finite; left as it is."""
        adjusted_V = self._adjust(logits_V)
        if self.parameters.temperature < GREEDY_BELOW:
            return int(adjusted_V.argmax())  # the first among equals
        return self._draw(*self._candidates(adjusted_V))

    def _draw(self, logits_K: np.ndarray, ids_K: np.ndarray) -> int:
        scaled_K = (logits_K - logits_K.max()) / self.parameters.temperature
        cumulative_K = np.cumsum(np.exp(scaled_K))
        drawn = self._uniform() * cumulative_K[-1]
        place = min(int(np.searchsorted(cumulative_K, drawn, side="right")), len(cumulative_K) - 1)
        return int(ids_K[place])

    def _adjust(self, logits_V: Tensor) -> Tensor:
        """Bias and penalties, on a copy where there are any."""
        if not self._penalised and not len(self._bias_ids):
            return logits_V
        adjusted_V, device = logits_V.clone(), logits_V.device
        adjusted_V[self._bias_ids.to(device)] += self._bias.to(device)
        if self._penalised:
            ids, counts = (tensor.to(device) for tensor in self._counts.seen())
            parameters = self.parameters
            seen = adjusted_V[ids]
            repetition = parameters.repetition_penalty
            # By a tensor: on a GPU a number's inverse would be multiplied by, and devices that draw do divide.
            seen = torch.where(seen > 0, seen / torch.full_like(seen, repetition), seen * repetition)
            seen -= counts * parameters.frequency_penalty + parameters.presence_penalty
            adjusted_V[ids] = seen
        return adjusted_V

    def _candidates(self, logits_V: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """(logits f64, ids) that top_k, top_p and min_p leave, greatest first unless nothing limits them."""
        parameters = self.parameters
        if 0 < parameters.top_k < logits_V.numel():
            ids = best_ids(logits_V, parameters.top_k)
            considered = logits_V[ids]
        else:
            ids = self._near_the_top(logits_V)
            considered = logits_V  # top_p's probabilities are over all tokens, though few need be sorted
        logits_K = logits_V[ids].double().cpu().numpy()
        return self._limited(logits_K, ids.cpu().numpy(), considered)

    def _limited(
        self, logits_K: np.ndarray, ids_K: np.ndarray, considered: Tensor | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """What top_p, over all that are `considered`, and min_p leave."""
        parameters = self.parameters
        if parameters.top_p < 1.0:
            cumulative_K = np.cumsum(np.exp(logits_K - log_sum(considered)))
            logits_K = logits_K[: int(np.searchsorted(cumulative_K, parameters.top_p, side="left")) + 1]
        if parameters.min_p > 0.0:
            logits_K = logits_K[logits_K >= logits_K.max() + log(parameters.min_p)]
        # Where a limit was set the logits are in falling order, so what was cut is a tail.
        possible = np.isfinite(logits_K)
        return logits_K[possible], ids_K[: len(logits_K)][possible]

    def _near_the_top(self, logits_V: Tensor) -> Tensor:
        """Ids that min_p or top_p can leave, in falling order; all ids in id order where neither limits."""
        parameters = self.parameters
        if parameters.min_p > 0.0:
            bound = float(logits_V.max()) + log(parameters.min_p)
            return in_falling_order(logits_V, torch.nonzero(logits_V >= bound).view(-1))
        if parameters.top_p >= 1.0:
            return torch.arange(logits_V.numel(), device=logits_V.device)
        best = best_ids(logits_V, min(NUCLEUS_GUESS, logits_V.numel()))
        covered = float(logits_V[best].double().sub_(log_sum(logits_V)).exp_().sum())
        if covered >= parameters.top_p + 1e-9:
            return best
        return in_falling_order(logits_V, torch.arange(logits_V.numel(), device=logits_V.device))

    def chain(self) -> tuple[float, float, float, float]:
        """What a device wants of the chain: the temperature, top_k, top_p, and the log of min_p."""
        parameters = self.parameters
        if parameters.temperature < GREEDY_BELOW:
            return 1.0, 1.0, 1.0, -inf
        min_p = log(parameters.min_p) if parameters.min_p > 0.0 else -inf
        return parameters.temperature, float(parameters.top_k), parameters.top_p, min_p

    def uniforms(self, count: int) -> list[float]:
        """Random numbers of the next tokens, which these are then: `choose` goes on behind them. Greedy: none drawn."""
        if self.parameters.temperature < GREEDY_BELOW:
            return [0.0] * count
        return [self._uniform() for _ in range(count)]

    def _uniform(self) -> float:
        """In [0, 1)."""
        return float((int(self._random.random_raw()) >> 11) * 2.0**-53)


class Sampler:
    """All requests' samplers, on the rank that samples."""

    def __init__(
        self, vocab: int, tokens_masked: Sequence[int] | range = (), compute_type: ComputeType = ComputeType.F32
    ) -> None:
        """`vocab`: how many logits a row has. `tokens_masked`: ids among them that stand for no token.

        `compute_type`: what logits come from, told where they are no numbers.
        """
        self._vocab, self._compute_type = vocab, compute_type
        self._masked = torch.tensor(list(tokens_masked), dtype=torch.int64)
        self._requests: dict[RequestId, RequestSampler] = {}

    def open(
        self, request: RequestId, parameters: SamplingParameters, prompt: Sequence[int], sampled: int = 0
    ) -> None:
        """Begin. `prompt`: all its ids; penalties see them. `parameters` are valid (`proto.sampling.validate`).

        The last `sampled` of the prompt were chosen for this request before: their random numbers are drawn already.
        """
        if request in self._requests:
            raise ProtocolError(f"request {request} is open at the sampler already")
        self._requests[request] = RequestSampler(parameters, prompt, sampled)

    def choose(self, request: RequestId, logits_V: Tensor) -> SampledToken:
        """The next token, which also enters the history. `logits_V`: f32 on any device, left as it is.

        Only the tokens that the limits leave come to the host.

        Logits that are NaN or +inf, or leave no token, give a SampledToken with `error`, and change nothing.
        """
        sampler = self._open(request)
        if logits_V.shape != (self._vocab,):
            raise ProtocolError(
                f"request {request}: logits of shape {tuple(logits_V.shape)}, not ({self._vocab},)"
            )
        if len(self._masked):
            if self._masked.device != logits_V.device:
                self._masked = self._masked.to(logits_V.device)
            logits_V = logits_V.index_fill(0, self._masked, -torch.inf)
        brought = sampler.bring(logits_V)
        greatest = float(logits_V.max()) if brought is None else brought.greatest  # NaN if any is
        if not isfinite(greatest):
            told = f"{LOGITS_ARE_NO_NUMBERS} to choose by: greatest is {greatest}{self._compute_type.room}"
            return SampledToken(request, 0, 0.0, error=told)
        if brought is not None:
            token, logit = sampler.choose_brought(brought)
            sampler.accept(token)
            return SampledToken(request, token, logit - brought.total)
        token = sampler.choose(logits_V)
        sampler.accept(token)
        total = float(logits_V.logsumexp(0))
        top = likeliest(logits_V, total, sampler.parameters.logprobs)
        return SampledToken(request, token, float(logits_V[token]) - total, top)

    def drawn(self, requests: Sequence[RequestId], steps: int) -> Tensor:
        """What a device needs to choose the next tokens of these requests: f64 [4 + steps, requests].

        Their chains (`RequestSampler.chain`), then a uniform number a step. All `steps` must be run: their numbers are
        used up. The chains must suit (`suits_device`).
        """
        samplers = [self._open(request) for request in requests]
        columns = [[*sampler.chain(), *sampler.uniforms(steps)] for sampler in samplers]
        return torch.tensor(columns, dtype=torch.float64).T

    def accept(self, request: RequestId, token: int) -> None:
        """A token that was not chosen here enters the history."""
        self._open(request).accept(token)

    def close(self, request: RequestId) -> None:
        """End; a request that is not open is no error."""
        self._requests.pop(request, None)

    def _open(self, request: RequestId) -> RequestSampler:
        if request not in self._requests:
            raise ProtocolError(f"request {request} is not open at the sampler")
        return self._requests[request]


def is_plain_greedy(parameters: SamplingParameters) -> bool:
    """Whether the next token is the greatest logit's, nothing else changes it, and no alternatives are told."""
    return (
        parameters.temperature < GREEDY_BELOW
        and not is_penalised(parameters)
        and not parameters.logit_bias
        and parameters.logprobs == 0
    )


def suits_device(parameters: SamplingParameters, vocab: int, most: int) -> bool:
    """Whether a device can choose the next tokens by itself, from the `most` greatest logits; the same on all ranks."""
    few = parameters.temperature < GREEDY_BELOW or 0 < parameters.top_k <= min(most, vocab - 1)
    counted = not is_penalised(parameters) or parameters.penalty_window == -1
    return few and counted and not parameters.logit_bias and parameters.logprobs == 0


def is_penalised(parameters: SamplingParameters) -> bool:
    """Whether what was said before changes logits."""
    return (
        parameters.repetition_penalty != 1.0
        or parameters.presence_penalty != 0.0
        or parameters.frequency_penalty != 0.0
    )


def log_sum(logits_V: Tensor | np.ndarray) -> float:
    """log(sum(exp(logits))), in f64."""
    return float(torch.as_tensor(logits_V).double().logsumexp(0))


def likeliest(logits_V: Tensor, total: float, count: int) -> tuple[tuple[int, float], ...]:
    """(id, logprob) of the `count` likeliest tokens, best first; finite ones only, so perhaps fewer."""
    if count == 0:
        return ()
    ids = best_ids(logits_V, min(count, logits_V.numel()))
    pairs = zip(ids.tolist(), logits_V[ids].tolist(), strict=True)
    return tuple((token, logit - total) for token, logit in pairs if isfinite(logit))


def best_ids(logits_V: Tensor, count: int) -> Tensor:
    """Ids of the `count` greatest, in falling order, lower ids first among equals (topk alone leaves that open)."""
    least = logits_V.topk(count).values[-1]
    return in_falling_order(logits_V, torch.nonzero(logits_V >= least).view(-1))[:count]


def in_falling_order(logits_V: Tensor, ids: Tensor) -> Tensor:
    """`ids`, which rise, by falling logit; lower ids first among equals."""
    return ids[logits_V[ids].sort(descending=True, stable=True).indices]
