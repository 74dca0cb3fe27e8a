"""How a model is shared out among ranks of unequal speed. Pure arithmetic.

Layers and parts are shared out apart from each other: prompts are read at the pace of the slowest stage, so stages take
equal times; answers at that of the slowest part, so parts do.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import floor, gcd, inf

from ..costs.cost_model import LayerSeconds

WORTH_IT = 0.02  # a gain below this may be noise, and equal shares read and write alike everywhere
TELLING = 0.1  # ranks of one kind that differ by more do not so by noise
SUGGESTING_TOKENS = 1024  # of the chunk they are compared by
SHARE_STEPS = 100  # parts are shared out in hundredths
BISECTIONS = 60

Seconds = Sequence[float]


@dataclass(frozen=True, slots=True)
class PartPace:
    """A decode step through a rank's parts of all layers and of the head: `fixed` + share * `whole` seconds."""

    fixed: float
    whole: float

    def seconds(self, share: float) -> float:
        return self.fixed + share * self.whole if share > 0 else 0.0

    @classmethod
    def through(cls, first: tuple[float, float], second: tuple[float, float] | None = None) -> "PartPace":
        """Of one or two measured (share, seconds). Two that lie too close or contradict the form: of the last alone."""
        share, seconds = second or first
        alone = cls(0.0, seconds / share)
        if second is None or abs(second[0] - first[0]) < 2 / SHARE_STEPS:
            return alone
        whole = (second[1] - first[1]) / (second[0] - first[0])
        fixed = seconds - whole * share
        return cls(fixed, whole) if whole > 0 and fixed >= 0 else alone


@dataclass(frozen=True, slots=True)
class AutoShares:
    """Shares of the ranks; None: equal ones. `layers` are whole counts."""

    layers: tuple[int, ...] | None = None
    parts: tuple[float, ...] | None = None


def stage_lengths(layer_seconds: Sequence[Seconds]) -> tuple[int, ...]:
    """Layers of each stage, in rank order, so that the slowest stage is as quick as can be.

    `layer_seconds[rank][layer]` is that layer's time there. Among the splits with the least slowest stage one with the
    least sum is taken: the first chunk goes through all stages.
    """
    layers = len(layer_seconds[0])
    before = [(0.0, *accumulate(seconds)) for seconds in layer_seconds]
    longest = _least_longest(layer_seconds, layers) * (1 + 1e-9)
    # best[end]: (sum, lengths) of the stages so far over the first `end` layers, none above `longest`
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for sums in before:
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first, (total, lengths) in best.items():
            for end in range(first, layers + 1):
                stage = sums[end] - sums[first]
                if stage > longest:
                    break
                found = total + stage, (*lengths, end - first)
                following[end] = min(found, following.get(end, (inf, ())))
        best = following
    return best[layers][1]


def _least_longest(layer_seconds: Sequence[Seconds], layers: int) -> float:
    """The least time within which stages that each take all they can cover the model: by bisection."""
    low, high = 0.0, max(sum(seconds) for seconds in layer_seconds)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        layer = 0
        for seconds in layer_seconds:
            room = middle
            while layer < layers and seconds[layer] <= room:
                room -= seconds[layer]
                layer += 1
        low, high = (low, middle) if layer == layers else (middle, high)
    return high


def part_shares(paces: Sequence[PartPace]) -> tuple[float, ...]:
    """Shares, in hundredths, with which the parts take equal times; none for a rank that would only hold all up."""
    working = set(range(len(paces)))
    while True:
        # fixed + share * whole = seconds on every working rank, and the shares add up to 1
        rate = sum(1 / paces[rank].whole for rank in working)
        seconds = (1 + sum(paces[rank].fixed / paces[rank].whole for rank in working)) / rate
        late = {rank for rank in working if paces[rank].fixed >= seconds}
        if not late:
            break
        working -= late
    exact = [
        (seconds - pace.fixed) / pace.whole if rank in working else 0.0 for rank, pace in enumerate(paces)
    ]
    return _in_steps(exact)


def _in_steps(shares: Sequence[float]) -> tuple[float, ...]:
    """Rounded to hundredths that add up to one: the largest remainders are rounded up."""
    steps = [floor(share * SHARE_STEPS + 1e-9) for share in shares]
    order = sorted(range(len(shares)), key=lambda rank: steps[rank] - shares[rank] * SHARE_STEPS)
    for rank in order[: SHARE_STEPS - sum(steps)]:
        steps[rank] += 1
    return tuple(step / SHARE_STEPS for step in steps)


@dataclass(frozen=True, slots=True)
class Look:
    """Shares that were tried, and the seconds that a step's parts then took, by rank."""

    shares: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def slowest(self) -> float:
        return max(self.seconds)


def next_shares(looks: Sequence[Look]) -> tuple[float, ...]:
    """What to try after these: parts by speed alone, then by speed and what does not depend on their size."""
    before, last = looks[max(0, len(looks) - 2)], looks[-1]
    points = zip(before.shares, before.seconds, last.shares, last.seconds, strict=True)
    shares = part_shares([PartPace.through((s0, t0), (s1, t1)) for s0, t0, s1, t1 in points])
    # A rank without any part could not be timed, and noise may say that it should have none.
    tried = [max(share, 1 / SHARE_STEPS) for share in shares]
    tried[shares.index(max(shares))] -= sum(tried) - 1
    return tuple(round(share, 2) for share in tried)


def choose_layers(layer_seconds: Sequence[Seconds]) -> tuple[int, ...] | None:
    """Stages of equal time; None, equal ones, where the unequal would gain no more than noise may feign."""
    equal = equal_stages(len(layer_seconds[0]), len(layer_seconds))
    lengths = stage_lengths(layer_seconds)
    gain = slowest_stage(layer_seconds, equal) / slowest_stage(layer_seconds, lengths)
    return lengths if gain > 1 + WORTH_IT else None


def heads_shared_out(kv_heads: Iterable[int], ranks: int) -> int:
    """In so many equal steps layers of so many KV heads can all be shared out whole; 0: none can.

    A layer with fewer of them than there are ranks has one that several read, whatever the shares.
    """
    return gcd(*(heads for heads in kv_heads if heads >= ranks))


def whole_groups(shares: Sequence[float], kv_heads: int) -> tuple[float, ...] | None:
    """The nearest shares with which no KV head is read by two ranks; None: a rank would get none.

    `kv_heads`: of a layer, or where layers differ as `heads_shared_out` has it.

    As exact as floats are: in hundredths, 128 query heads over 8 KV heads would be cut inside a group.
    """
    exact = [share * kv_heads for share in shares]
    heads = [floor(share + 1e-9) for share in exact]
    order = sorted(range(len(shares)), key=lambda rank: heads[rank] - exact[rank])
    for rank in order[: kv_heads - sum(heads)]:
        heads[rank] += 1
    return tuple(count / kv_heads for count in heads) if min(heads, default=0) > 0 else None


def choose_parts(looks: Sequence[Look], whole: Look | None = None) -> tuple[float, ...] | None:
    """Of what was tried the quickest, the first look being at equal shares: None, those, where that gains little.

    `whole`: a look at shares that cut no KV group in two. A head that two ranks read is kept by both and moves with
    both: unless that makes steps quicker by more than noise may feign, there is to be none.
    """
    best = min(looks, key=lambda look: look.slowest)
    if whole is not None and whole.slowest <= best.slowest * (1 + WORTH_IT):
        best = whole
    return best.shares if looks[0].slowest / best.slowest > 1 + WORTH_IT else None


def suggested_lengths(costs: LayerSeconds, layers: int) -> tuple[tuple[float, ...], tuple[int, ...]] | None:
    """Each rank's speed and the stages that suit it, where ranks that share equally turn out to differ; else None."""
    by_layer = {layer: kind for kind in costs.kinds for layer in kind.layers}
    ranks = range(len(costs.tensor_shares))
    seconds = [
        [by_layer[layer].whole[rank].seconds(0, SUGGESTING_TOKENS) for layer in range(layers)]
        for rank in ranks
    ]
    totals = [sum(one) for one in seconds]
    if not min(totals) > 0 or max(totals) <= (1 + TELLING) * min(totals):
        return None
    return tuple(min(totals) / total for total in totals), stage_lengths(seconds)


def equal_stages(layers: int, ranks: int) -> tuple[int, ...]:
    """Layers of each stage, in rank order, as even as whole layers allow."""
    ends = [floor(layers * rank / ranks + 0.5) for rank in range(ranks + 1)]
    return tuple(end - first for first, end in pairwise(ends))


def slowest_stage(layer_seconds: Sequence[Seconds], lengths: Sequence[int]) -> float:
    """Seconds of the stage that takes longest; `layer_seconds[rank][layer]`."""
    ends = list(accumulate(lengths))
    return max(
        sum(seconds[end - length : end])
        for seconds, length, end in zip(layer_seconds, lengths, ends, strict=True)
    )
