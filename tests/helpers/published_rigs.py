"""What was published about two rigs, and the costs that follow from it: where the numbers of `examples/rigs` come from.

A 4070 and a 3060 of 12 GB, a 27B model in Q5_K_M with a q8_0 cache, and the same in IQ2_M; four GP100 dies, a mixture
of experts of 48 layers in IQ3_XXS. All tokens a second, seconds, or tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gearshift.coordinator.costs.cost_model import ChunkCost, Costs, ShiftCost, StepCost

UBATCH = 512  # tokens of the peer's chunks, where nothing else is said
ANSWER = 128  # tokens, in every run
STEPS = ANSWER - 1


@dataclass(frozen=True)
class Batched:
    """`npl` prompts of 2,048 tokens and as many answers of 128 at once, in one layout."""

    prompt_rate: Mapping[int, float]  # by npl
    answer_rate: Mapping[int, float]


PROMPT = 2048
LAYER_BATCHED = Batched({1: 950.2, 2: 1011.0, 4: 1034.1, 8: 1041.5}, {1: 18.85, 2: 33.09, 4: 46.91, 8: 57.60})
TENSOR_BATCHED = Batched({1: 591.2, 2: 590.9, 4: 591.3, 8: 591.3}, {1: 25.17, 2: 41.78, 4: 58.35, 8: 71.10})


@dataclass(frozen=True)
class Run:
    """One long prompt and an answer of 128 tokens, in each pure layout and with a reload between."""

    prompt: int
    layer_answer_rate: float
    tensor_answer_rate: float
    reload_seconds: float
    layer_wall: float
    tensor_wall: float
    reload_wall: float
    layer_prompt_rate: float | None = None
    tensor_prompt_rate: float | None = None
    break_even_tokens: float = 0.0
    break_even_at_300_ms: float = 0.0
    control_wall: float | None = None  # the wrong way round: read in the tensor layout, a reload, answered in layers

    @property
    def load_seconds(self) -> float:
        """The walls hold one load of the model, taken to be as long as the reload of the same file."""
        return self.reload_seconds

    @property
    def tensor_prompt_seconds(self) -> float:
        """What the walls leave for the prompt under tensor parallelism; where there are two such, their mean."""
        seconds = [self.tensor_wall - self.load_seconds - STEPS / self.tensor_answer_rate]
        if self.control_wall is not None:
            rest = self.load_seconds + self.reload_seconds + STEPS / self.layer_answer_rate
            seconds.append(self.control_wall - rest)
        return sum(seconds) / len(seconds)

    @property
    def depth(self) -> float:
        """Cached tokens of the answer's steps, on average."""
        return self.prompt + STEPS / 2


Q5_K_M = Run(58_300, 14.80, 19.76, 5.2, 86, 153, 91, 807.57, 507.92, 300, 18, 156)
IQ2_M = Run(17_055, 24.77, 28.86, 3.1, 25, 37, 27, break_even_tokens=540, break_even_at_300_ms=52)


def chunk_seconds_of_stages() -> tuple[float, float]:
    """Seconds of a chunk of 512 on the fast and the slow stage, from how the batched prompt rate rises with npl.

    npl prompts are 4 npl chunks through a pipeline of two stages: one chunk on the fast stage, then all of them on the
    slow one. Least squares over the four rows.
    """
    seconds = {npl: npl * PROMPT / rate for npl, rate in LAYER_BATCHED.prompt_rate.items()}
    rows = np.array([[1 / seconds[npl], npl * PROMPT / UBATCH / seconds[npl]] for npl in seconds])
    fast, slow = np.linalg.lstsq(rows, np.ones(len(seconds)), rcond=None)[0]
    return float(fast), float(slow)


def stage_costs(prompt: int, seconds: float, pair_cost: float | None = None) -> tuple[ChunkCost, ChunkCost]:
    """Both stages, so that a prompt takes `seconds`; attention from the difference to the short prompts, or given."""
    fast, slow = chunk_seconds_of_stages()
    short = slow / UBATCH  # a token of a prompt of 2,048, attention included
    rest = seconds - fast
    if pair_cost is None:
        pair_cost = (rest / prompt - short) / (prompt - PROMPT)
    per_token = rest / prompt - pair_cost * prompt
    share = fast / slow
    return ChunkCost(0.0, per_token * share, pair_cost * share), ChunkCost(0.0, per_token, pair_cost)


def tensor_cost(prompt: int, seconds: float, pair_cost: float | None = None) -> ChunkCost:
    short = 1 / TENSOR_BATCHED.prompt_rate[1]
    if pair_cost is None:
        pair_cost = (seconds / prompt - short) / (prompt - PROMPT)
    return ChunkCost(0.0, seconds / prompt - pair_cost * prompt, pair_cost)


def step_cost(batched: Batched, run: Run, rate: float, per_cached: float | None = None) -> StepCost:
    """Steps by batch at no depth. IQ2_M was published for one request alone."""
    depth = PROMPT + STEPS / 2
    if per_cached is None:
        per_cached = (1 / rate - 1 / batched.answer_rate[1]) / (run.depth - depth)
        points = [(npl, npl / seen - per_cached * npl * depth) for npl, seen in batched.answer_rate.items()]
    else:
        points = [(1, 1 / rate - per_cached * run.depth)]
    return StepCost(tuple(points), per_cached)


def q5_k_m() -> Costs:
    """Under tensor parallelism by the walls: both that read the prompt so agree within 3%, and its rate is far off."""
    run = Q5_K_M
    assert run.layer_prompt_rate is not None
    return Costs(
        stages=stage_costs(run.prompt, run.prompt / run.layer_prompt_rate),
        tensor_prefill=tensor_cost(run.prompt, run.tensor_prompt_seconds),
        decode_layer=step_cost(LAYER_BATCHED, run, run.layer_answer_rate),
        decode_tensor=step_cost(TENSOR_BATCHED, run, run.tensor_answer_rate),
        to_tensor=ShiftCost(run.reload_seconds),
        to_layer=ShiftCost(run.reload_seconds),
    )


def iq2_m() -> Costs:
    """Prompt rates were not published: what the walls leave. Attention is that of the same model in Q5_K_M, by its
    rates: what its walls take beyond them need not be attention.
    """
    run, other = IQ2_M, q5_k_m()
    assert Q5_K_M.tensor_prompt_rate is not None
    assert other.decode_layer is not None
    assert other.decode_tensor is not None
    attention = tensor_cost(Q5_K_M.prompt, Q5_K_M.prompt / Q5_K_M.tensor_prompt_rate).per_pair
    layer = run.layer_wall - run.load_seconds - STEPS / run.layer_answer_rate
    return Costs(
        stages=stage_costs(run.prompt, layer, other.stages[1].per_pair),
        tensor_prefill=tensor_cost(run.prompt, run.tensor_prompt_seconds, attention),
        decode_layer=step_cost(
            LAYER_BATCHED, run, run.layer_answer_rate, other.decode_layer.per_cached_token
        ),
        decode_tensor=step_cost(
            TENSOR_BATCHED, run, run.tensor_answer_rate, other.decode_tensor.per_cached_token
        ),
        to_tensor=ShiftCost(run.reload_seconds),
        to_layer=ShiftCost(run.reload_seconds),
    )


@dataclass(frozen=True)
class Prompted:
    """A prompt on the four GP100: the chunk that the rule chose, its rate, and that of the largest chunks."""

    tokens: int
    chunk: int
    rate: float
    rate_of_largest: float


GP100 = (
    Prompted(2_013, 1024, 228.0, 180.9),
    Prompted(3_865, 1024, 312.4, 207.6),
    Prompted(10_041, 2048, 432.6, 261.1),
    Prompted(28_998, 3328, 559.7, 475.7),
)
GP100_RATIO = 1024  # b/a in tokens
GP100_LAYER_SECONDS = 0.080  # b of a layer
GP100_STAGES: Sequence[int] = (12, 12, 12, 12)  # layers


def gp100() -> Costs:
    def stage(layers: int) -> ChunkCost:
        return ChunkCost(layers * GP100_LAYER_SECONDS, layers * GP100_LAYER_SECONDS / GP100_RATIO)

    return Costs(stages=tuple(stage(layers) for layers in GP100_STAGES))
