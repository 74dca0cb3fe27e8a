"""Which context and which layouts a group is started with, from what fits; or why it cannot be, and what would. Pure.

What the user asked for is kept or refused, never changed. What was left to the program takes what fits, and is told.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd

from ...proto.errors import DoesNotFitError
from ...proto.ids import KvType, Layout
from ...proto.kv import KvFormat, row_bytes
from ...proto.placement.memory import Holding
from ...proto.placement.plan import Placement
from ...proto.words import counted
from .device_memory import MEBIBYTE, rank_budgets, told_bytes
from .memory import OTHER_BYTES, OTHER_PART, FitCase, Pool, RankMemory, Shortfall, largest_context, shortfalls
from .remake import Remake
from .residency import with_residency

CHUNKS = (2048, 1024, 512)  # longest chunks to choose from, where the user names none
SHORT_CHUNKS = (512, 256)  # where memory is short
LEAST_CHUNK_TOKENS = 256
LIMIT_STEP_BYTES = 16 * MEBIBYTE
SHARE_PERCENT = 100

LAYER_ONLY = ((Layout.LAYER, Layout.LAYER),)
IN_PLACE = "keys and values are held for one layout at a time, and change places at a shift"


@dataclass(frozen=True, slots=True)
class ContextWish:
    """`tokens` were asked for, or are what the usual rule says; below `needed` a context is of no use.

    `cut`: what was told of an answer that the context cuts short.
    """

    tokens: int
    asked: bool
    needed: int = 1
    cut: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One set of layouts to run the model in. `warning`: what it gives up; empty for what was asked for.

    `chunks`: longest chunks to try beside the case's own, where the user named none. `note`: what else to tell.
    """

    case: FitCase
    warning: str = ""
    chunks: tuple[int, ...] = ()
    note: str = ""

    @property
    def cases(self) -> tuple[FitCase, ...]:
        shorter = (chunk for chunk in self.chunks if chunk < self.case.max_chunk_tokens)
        return (self.case, *(self.case.with_max_chunk(chunk) for chunk in shorter))


@dataclass(frozen=True, slots=True)
class Fit:
    """What is to be loaded. `notes` and `warnings` are for the user."""

    case: FitCase
    context_tokens: int
    memory: tuple[RankMemory, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def candidates(
    case: FitCase,
    pools: Sequence[Pool],
    wish: ContextWish,
    remake: Remake,
    chunks: tuple[int, ...] = (),
    shares_open: bool = False,
) -> Iterator[Candidate]:
    """The case as asked for; with keys and values held for one layout at a time; with layers that migrate or stay
    whole; with fewer layouts where they are open.

    Where the user named no shares (`shares_open`), each also with shares like the room on the devices.
    """
    placements = [(case, remake, "")]
    shares = shares_by_room(case, pools, wish.tokens)
    if shares_open and len(set(shares)) > 1 and any(shares):
        shared = partial(_with_shares, remake, shares)
        told = f"shares {','.join(f'{share:g}' for share in shares)}, as the room on the devices"
        placements.append((replace(case, placement=shared()), shared, told))
    for one, place_again, note in placements:
        first = Candidate(one, chunks=chunks, note=note)
        yield first
        last = first
        if any(prefill is not decode for prefill, decode in one.journeys):
            # It frees as many bytes as it moves; weights that migrate are moved there and back.
            last = Candidate(replace(one, in_place=True), chunks=chunks, note=_joined(note, IN_PLACE))
            yield last
        if (resident := _resident(last, pools, wish, place_again)) is not None:
            yield resident
    for one, place_again, note in placements:
        yield from _fewer_layouts(one, place_again, chunks, note)


def _with_shares(
    remake: Remake,
    shares: tuple[float, ...],
    *,
    whole_layers: frozenset[int] = frozenset(),
    migrating_layers: frozenset[int] = frozenset(),
    **_: object,
) -> Placement:
    return remake(shares=shares, whole_layers=whole_layers, migrating_layers=migrating_layers)


def _fewer_layouts(case: FitCase, remake: Remake, chunks: tuple[int, ...], note: str) -> Iterator[Candidate]:
    """Without a shift a request keeps its layout: no rank holds keys and values of both. With the layer layout alone
    every layer stays whole on its owner, which holds it once.
    """
    staying = tuple(journey for journey in case.journeys if journey[0] is journey[1])
    if len(staying) > 1:
        lost = "no request is shifted between layouts: what that takes does not fit"
        yield Candidate(replace(case, journeys=staying), lost, chunks, note)
    if LAYER_ONLY[0] in case.journeys and case.placement.ranks > 1:
        lost = "only the layer layout is used: what the tensor layout takes beside it does not fit"
        yield Candidate(layer_only(case, remake), lost if len(case.journeys) > 1 else "", chunks, note)


def _resident(first: Candidate, pools: Sequence[Pool], wish: ContextWish, remake: Remake) -> Candidate | None:
    """The first candidate with another residency, layer by layer, for the longest context and chunks that allow one."""
    contexts = (wish.tokens,) if wish.asked else (wish.tokens, max(wish.needed, wish.tokens // 2), wish.needed)
    for tokens in dict.fromkeys(contexts):
        for case in first.cases:
            if not shortfalls(case.memory(tokens), pools):
                break  # fits as it is: nothing has to be given up for this context
            found = with_residency(case, pools, tokens, remake)
            # With every layer whole the tensor layout would be one in name alone.
            if found is not None and len(found[1].whole) < len(case.spec.layers):
                told = f"weights: {found[1].told(len(case.spec.layers))}"
                return Candidate(found[0], note=_joined(first.note, told))
    return None


def _joined(note: str, more: str) -> str:
    return f"{note}; {more}" if note else more


def layer_only(case: FitCase, remake: Remake) -> FitCase:
    """The case with nothing but the layer layout: layers whole on their owners."""
    everything = frozenset(range(len(case.spec.layers)))
    return replace(case, journeys=LAYER_ONLY, placement=remake(whole_layers=everything))


def choose_fit(
    candidates: Iterable[Candidate], pools: Sequence[Pool], wish: ContextWish, remake: Remake | None = None
) -> Fit:
    """The first candidate in which the wished context fits; else the largest context that the first one allows.

    A context that the program chose may halve before layouts are given up. Raises `DoesNotFitError` with the devices'
    figures, and what would fit.
    """
    best: list[tuple[Candidate, FitCase, int]] = []
    for candidate in candidates:
        case, context = _best_case(candidate, pools, wish)
        if context >= (wish.tokens if wish.asked else max(wish.needed, wish.tokens // 2)):
            return _fit(candidate, case, context, pools, wish)
        best.append((candidate, case, context))
    for candidate, case, context in best:
        if context >= wish.needed and not wish.asked:
            return _fit(candidate, case, context, pools, wish)
    raise DoesNotFitError(refusal([candidate for candidate, _, _ in best], pools, wish, remake))


def _best_case(candidate: Candidate, pools: Sequence[Pool], wish: ContextWish) -> tuple[FitCase, int]:
    """The first case with the whole context, else the one with the largest."""
    best, most = candidate.case, 0
    for case in candidate.cases:
        context = _largest(case, pools, wish)
        if context > most:
            best, most = case, context
        if most == wish.tokens:
            break
    return best, most


def _largest(case: FitCase, pools: Sequence[Pool], wish: ContextWish) -> int:
    if wish.asked:
        return 0 if shortfalls(case.memory(wish.tokens), pools) else wish.tokens
    return largest_context(case, pools, wish.tokens)


def _fit(candidate: Candidate, case: FitCase, context: int, pools: Sequence[Pool], wish: ContextWish) -> Fit:
    notes = [candidate.note] if candidate.note else []
    if case.max_chunk_tokens < candidate.case.max_chunk_tokens:
        chunk = counted(case.max_chunk_tokens, "token")
        notes.append(f"chunks of at most {chunk}, as memory is short (--max-chunk sets it)")
    if context < wish.tokens:
        tight = shortfalls(case.memory(wish.tokens), pools)[0]
        notes.append(
            f"context: {counted(context, 'token')}, the most that fits beside the weights on {tight.pool.name} "
            f"({tight.pool.why}); {wish.tokens} would need {told_bytes(tight.needed_bytes)}"
        )
    elif not wish.asked:
        most = largest_context(case, pools, max(context, case.spec.trained_context))
        beyond = f"; up to {most} fit" if most > context else ""
        notes.append(f"context: {counted(context, 'token')} (--context names another{beyond})")
    warnings = (candidate.warning,) if candidate.warning else ()
    return Fit(case, context, case.memory(context), tuple(notes), warnings)


def with_usual_chunk(
    case: FitCase, context_tokens: int, process_bytes: Sequence[int], room_bytes: Sequence[int] = ()
) -> FitCase:
    """The longest usual chunk for which all that is neither weights nor KV stays small on every card.

    `process_bytes`: what each rank's process holds without a model, `room_bytes`: what its card has beside others'.
    """
    small = [max(OTHER_BYTES, room // OTHER_PART) for room in room_bytes] or [OTHER_BYTES] * len(process_bytes)
    if case.holding is not Holding.PLANES:
        return case.with_max_chunk(CHUNKS[0])
    for chunk in CHUNKS:
        found = case.with_max_chunk(chunk)
        each = zip(found.memory(context_tokens), process_bytes, small, strict=True)
        if all(one.other_bytes + held <= most for one, held, most in each):
            break
    return found


def refusal(
    candidates: Sequence[Candidate], pools: Sequence[Pool], wish: ContextWish, remake: Remake | None = None
) -> str:
    """Numbers by device of the first candidate at its mildest, then each change that alone would make it fit."""
    case = candidates[0].cases[-1]
    memory = case.memory(wish.tokens)
    where = "; ".join(told_shortfall(one, memory) for one in shortfalls(memory, pools))
    others = [mildest.cases[-1] for mildest in candidates[1:]]
    ways = list(ways_to_fit(case, pools, wish, remake, others))
    advice = "; ".join(ways) if ways else "more or larger devices, or a smaller quantisation of the model"
    wanted = f"{case.spec.name} with {counted(wish.tokens, 'token')} of context"
    return f"{wanted} does not fit: {where}. What would: {advice}"


def told_shortfall(short: Shortfall, memory: Sequence[RankMemory]) -> str:
    """`rank 1 needs 9.12 GiB (7.00 GiB of weights, 1.50 GiB of KV, 640 MiB else) of 8.00 GiB (...)`."""
    members = [memory[rank] for rank in short.pool.ranks]
    weights, kv = sum(one.weight_bytes for one in members), sum(one.kv_bytes for one in members)
    rest = short.needed_bytes - weights - kv
    return (
        f"{short.pool.name} needs {told_bytes(short.needed_bytes)} ({told_bytes(weights)} of weights, "
        f"{told_bytes(kv)} of KV, {told_bytes(rest)} else) of {told_bytes(short.pool.budget_bytes)} "
        f"({short.pool.why})"
    )


def ways_to_fit(
    case: FitCase,
    pools: Sequence[Pool],
    wish: ContextWish,
    remake: Remake | None = None,
    others: Sequence[FitCase] = (),
) -> Iterator[str]:
    """Single changes after which the wished context fits, each as the flag that makes it.

    `others`: cases that would be taken without being asked for.
    """
    most = max(largest_context(one, pools, wish.tokens) for one in (case, *others))
    if most:
        yield f"--context {most} or less"
    told = set()
    for flag, changed in _changes(case, pools, wish, remake):
        name = flag if flag.startswith("--residency") else flag.split()[0]
        if name not in told and _fits(changed, pools, wish):
            told.add(name)  # the mildest change of a kind is enough
            yield flag
    yield from _budget_flags(shortfalls(case.memory(wish.tokens), pools))


def _fits(case: FitCase, pools: Sequence[Pool], wish: ContextWish) -> bool:
    """As it stands, or with keys and values held for one layout at a time, as a start would have it next."""
    shifts = any(prefill is not decode for prefill, decode in case.journeys)
    ways = (case, replace(case, in_place=True)) if shifts else (case,)
    return any(not shortfalls(one.memory(wish.tokens), pools) for one in ways)


def _budget_flags(short: Sequence[Shortfall]) -> Iterator[str]:
    """What the user has bounded the memory with, where that alone is what is in the way."""
    bases = [one.pool.limit_base_bytes for one in short]
    least = [one.needed_bytes + base for one, base in zip(short, bases, strict=True) if base is not None]
    reserves = [one.pool.most_bytes - one.needed_bytes for one in short]
    if least and len(least) == len(short):
        steps = -(-max(least) // LIMIT_STEP_BYTES) + 1  # what a process takes differs a little from run to run
        yield f"--memory-limit {steps * LIMIT_STEP_BYTES // MEBIBYTE}M or more"
    elif reserves and not least and min(reserves) >= 0:
        yield f"--reserve {min(reserves) // MEBIBYTE}M or less"


def _changes(
    case: FitCase, pools: Sequence[Pool], wish: ContextWish, remake: Remake | None
) -> Iterator[tuple[str, FitCase]]:
    for requests in range(case.parallel_requests - 1, 0, -1):
        yield f"--parallel {requests}", replace(case, parallel_requests=requests)
    for kv_type in (KvType.F16, KvType.Q8_0):
        smaller = KvFormat(kv_type, kv_type)
        if _is_smaller(case, smaller):
            yield f"--kv-type {kv_type}", replace(case, kv_format=smaller)
    chunk = case.max_chunk_tokens // 2
    while chunk >= LEAST_CHUNK_TOKENS:
        yield f"--max-chunk {chunk}", case.with_max_chunk(chunk)
        chunk //= 2
    if case.holding is Holding.F32:
        yield "--compute-type bf16", replace(case, holding=Holding.BF16)
    if remake is not None and case.placement.ranks > 1:
        shares = shares_by_room(case, pools, wish.tokens)
        told = ",".join(f"{share:g}" for share in shares)
        if any(shares):
            yield f"--layer-share {told} --tensor-share {told}", replace(case, placement=remake(shares=shares))
        if LAYER_ONLY[0] in case.journeys and len(case.journeys) > 1:
            yield "--prefill layer --decode layer (each layer whole on its owner)", layer_only(case, remake)
        everything = frozenset(range(len(case.spec.layers)))
        yield "--residency migrate", replace(case, placement=remake(migrating_layers=everything))
        yield "--residency owner", replace(case, placement=remake(whole_layers=everything))


def _is_smaller(case: FitCase, other: KvFormat) -> bool:
    """Whether a type takes less than the case's own, and suits the heads' widths."""
    try:
        return all(
            row_bytes(other.key, layer.key_width) + row_bytes(other.value, layer.value_width)
            < row_bytes(case.kv_format.key, layer.key_width) + row_bytes(case.kv_format.value, layer.value_width)
            for layer in case.spec.layers
            if layer.kv_heads
        )
    except ValueError:
        return False


def shares_by_room(case: FitCase, pools: Sequence[Pool], context_tokens: int) -> tuple[float, ...]:
    """Shares like what the devices have for weights and KV, in the smallest whole numbers of about a percent."""
    budgets, memory = rank_budgets(pools, case.placement.ranks), case.memory(context_tokens)
    room = [max(0, budget - one.other_bytes) for budget, one in zip(budgets, memory, strict=True)]
    total = sum(room)
    if not total:
        return (0.0,) * len(room)
    percent = [round(SHARE_PERCENT * held / total) for held in room]
    divisor = gcd(*percent) or 1
    return tuple(float(one // divisor) for one in percent)
