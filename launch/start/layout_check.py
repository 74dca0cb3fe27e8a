"""Whether the layouts of a running group say the same: a made-up prompt and a few tokens in each, logits side by side.

What every layout computes is the same but for rounding, so a link, a kernel or a card that goes wrong in one of them
alone shows here, before anybody relies on it. So it is with steps, whose kernels are others than those of a prompt: the
same ids are read as a prompt, too. A row or two may lie where rounding decides; most cannot.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import monotonic

import numpy as np
import numpy.typing as npt

from ...coordinator.chunks.plan import Fixed
from ...coordinator.driver import Driver
from ...coordinator.evaluation import collect_logits
from ...coordinator.generation import GenerationRequest, TokenEvent
from ...coordinator.one_request import generate
from ...coordinator.policy.policy import Journey, journeys
from ...proto.errors import LOGITS_ARE_NO_NUMBERS, RequestFailedError
from ...proto.ids import Layout
from ...proto.sampling import SamplingParameters
from ...proto.words import counted
from ..console import note, warn

PROMPT_TOKENS, STEPS = 24, 8  # more rows than steps of a batch have; few, as all logits come to the host
COMPARED_ROWS = 16  # the prompt's last and the steps'
MOST_DIVERGENCE = 0.01  # Kullback-Leibler, of the median row
NEAR_TIE = 0.05  # of logits: here rounding may choose another token
STEP_TIE = 0.5  # the same of steps on cards, whose activations are in int8
EXACT_STEP_TIE = 0.2  # where they are f32: a prompt's, in bf16, move logits by some 0.1
MOST_STEP_DIVERGENCE = 0.05  # and their divergence from what a prompt's products say
MOST_PARTED = 0.25  # of the rows, that choose another one beyond a near-tie
DAMAGED = 10  # times as much divergence, or three times as many rows: nothing that rounding does

USUAL: Journey = (Layout.LAYER, Layout.LAYER)  # what others are held against: no sum over ranks is in it
OTHERS: tuple[Journey, ...] = ((Layout.TENSOR, Layout.TENSOR), (Layout.LAYER, Layout.TENSOR))  # the latter: a shift
AS_PROMPT = "steps read as a prompt"
Rows = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class LayoutDifference:
    """One way against `USUAL`: divergence of the median row, shares of rows and of greedy tokens."""

    way: str  # such as `tensor->tensor`
    rows: int
    divergence: float
    parted_rows: float
    parted_tokens: float
    limit: float = MOST_DIVERGENCE

    @property
    def agrees(self) -> bool:
        """False for anything that is no number."""
        parted = max(self.parted_rows, self.parted_tokens)
        return self.divergence <= self.limit and parted <= MOST_PARTED

    @property
    def damaged(self) -> bool:
        """So far off that answers would be of no use."""
        parted = max(self.parted_rows, self.parted_tokens)
        return not (self.divergence <= DAMAGED * self.limit and parted <= 3 * MOST_PARTED)

    @property
    def told(self) -> str:
        return (
            f"{self.way}: KL {self.divergence:.2g} in the median of {counted(self.rows, 'row')}; "
            f"beyond near-ties {self.parted_rows:.0%} of them and {self.parted_tokens:.0%} of {STEPS} tokens differ"
        )


def check_layouts(driver: Driver, *, left_open: bool) -> None:
    """Compare, and tell. Where one is damaged and they were `left_open`, requests keep to the layer layout."""
    begun = monotonic()
    try:
        found = compare_layouts(driver)
    except RequestFailedError as error:
        warn(f"the layouts could not be compared: {error}")
        return
    seconds = monotonic() - begun
    wrong = [one.told for one in found if not one.agrees]
    if found and not wrong:
        worst = max(found, key=lambda one: one.divergence)
        note(f"layouts compared on a made-up prompt in {seconds:.1f} s: they agree ({worst.told})")
    for told in wrong:
        warn(f"these logits are not those of layer->layer: {told}")
    if left_open and any(one.damaged for one in found if one.way != AS_PROMPT):
        warn("only the layer layout is used; look for what is wrong with the cards or their links (gearshift doctor)")
        driver.keep_to((USUAL,))


def compare_layouts(driver: Driver) -> tuple[LayoutDifference, ...]:
    """With no request open. OTHERS, as far as there is room for them; empty where nothing can be compared.

    Raises RequestFailedError where `USUAL` itself fails, or its logits are no numbers.
    """
    if driver.settings.context_tokens < PROMPT_TOKENS + STEPS:
        return ()
    possible = journeys(driver.placement.ranks, None, None, driver.settings.journeys)
    others = [journey for journey in OTHERS if journey in possible]
    if USUAL not in possible or not others:
        return ()
    prompt = np.random.default_rng(0).integers(0, driver.spec.vocab, PROMPT_TOKENS).tolist()
    written = {journey: _greedy(driver, prompt, journey) for journey in (USUAL, *others)}
    ids = [*prompt, *written[USUAL]]
    usual = _rows(driver, ids, USUAL)
    if not np.isfinite(usual.max(axis=-1)).all():  # nothing to hold others against: it is the model, or its type
        room = "" if driver.settings.compute_type is None else driver.settings.compute_type.room
        raise RequestFailedError(f"{LOGITS_ARE_NO_NUMBERS} in layer->layer{room}")
    read, _ = collect_logits(driver, ids, len(ids), Layout.LAYER, Layout.LAYER, Fixed((len(ids),)))
    tie, limit = step_limits(driver.settings.exact_activations)
    as_prompt = replace(difference(AS_PROMPT, usual[-STEPS:], read[-STEPS:], tie=tie), limit=limit)
    as_layouts = (
        difference(_name(one), usual, _rows(driver, ids, one), written[USUAL], written[one]) for one in others
    )
    return (as_prompt, *as_layouts)


def step_limits(exact_activations: bool) -> tuple[float, float]:
    """Of steps against the same ids read as a prompt: what counts as a near-tie, and the divergence allowed."""
    return (EXACT_STEP_TIE, MOST_DIVERGENCE) if exact_activations else (STEP_TIE, MOST_STEP_DIVERGENCE)


def difference(
    way: str, usual: Rows, rows: Rows, usual_tokens: Sequence[int] = (), tokens: Sequence[int] = (),
    tie: float = NEAR_TIE,
) -> LayoutDifference:  # fmt: skip
    """`usual`, `rows`: logits [rows, V] of the same ids; where there are tokens, one row more than these is theirs.

    Tokens count up to the first that differs: what follows answers another text. An answer that ended before, as its
    logits were no numbers, differs there.
    """
    with np.errstate(invalid="ignore"):  # of infinities no number comes, which agrees with nothing
        wanted, found = _log_softmax(usual), _log_softmax(rows)
        divergence = np.median((np.exp(wanted) * (wanted - found)).sum(axis=-1))
    # Parted: the row's choice is no near-tie in the other's eyes.
    lost = usual.max(axis=-1) - np.take_along_axis(usual, rows.argmax(axis=-1)[:, None], axis=-1)[:, 0]
    parted_rows = 1 - np.mean(lost <= tie)
    longest, shortest = max(len(usual_tokens), len(tokens)), min(len(usual_tokens), len(tokens))
    first = next((n for n in range(shortest) if usual_tokens[n] != tokens[n]), shortest)
    parted_tokens = 0.0
    if first < longest:
        row = usual[len(usual) - 1 - len(usual_tokens) + first]
        if first == shortest or not row.max() - row[tokens[first]] <= STEP_TIE:
            parted_tokens = 1 - first / longest
    return LayoutDifference(way, len(usual), float(divergence), float(parted_rows), parted_tokens)


def _name(journey: Journey) -> str:
    return f"{journey[0]}->{journey[1]}"


def _greedy(driver: Driver, prompt: Sequence[int], journey: Journey) -> list[int]:
    request = GenerationRequest(
        tuple(prompt), STEPS, SamplingParameters(temperature=0.0), prefill=journey[0], decode=journey[1],
        chunk_rule=Fixed((PROMPT_TOKENS,)),
    )  # fmt: skip
    return [event.token.token for event in generate(driver, request) if isinstance(event, TokenEvent)]


def _rows(driver: Driver, ids: Sequence[int], journey: Journey) -> Rows:
    rows, _ = collect_logits(driver, ids, PROMPT_TOKENS, *journey, Fixed((PROMPT_TOKENS,)))
    return rows[-COMPARED_ROWS:]


def _log_softmax(rows: Rows) -> Rows:
    shifted = rows.astype(np.float64) - rows.max(axis=-1, keepdims=True)
    result: Rows = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
