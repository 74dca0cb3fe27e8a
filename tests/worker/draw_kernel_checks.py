"""Sampled choices of a device against the sampler's own chain, on fresh random logits. Run as `quant_kernel_checks` is.

Several ranks play on one device: those that do not sample first note what they send, as their peers would hear of it.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, nan, sqrt
from typing import Any

import torch

from gearshift.proto.device_sizes import BEST_BLOCK
from gearshift.proto.ids import RequestId
from gearshift.proto.ranges import VocabRange
from gearshift.proto.sampling import SamplingParameters
from gearshift.tests.helpers.kernel_checks import DEVICE
from gearshift.worker.kernels import draw_ops, step_ops
from gearshift.worker.kernels.draw_ops import DrawBuffers
from gearshift.worker.kernels.exchange import Exchange
from gearshift.worker.kernels.step_ops import StepState
from gearshift.worker.penalties import DevicePenalties
from gearshift.worker.sampling import Sampler, is_penalised

LINES = 8
WIDTH = 32

CHAINS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.3, "top_p": 1.0, "min_p": 0.0, "top_k": 64},
    {"temperature": 0.0},
    {"temperature": 0.4, "top_p": 0.3, "min_p": 0.0},
    {"top_k": 1},
    {"temperature": 2.0, "top_k": 5, "top_p": 0.999},
    {"temperature": 1.0, "top_p": 1.0, "min_p": 1.0},
    {"temperature": 1e-5, "min_p": 1e-9},
    {"temperature": 1e6, "top_k": 7, "min_p": 0.0, "top_p": 1.0},
    {"top_p": 1e-9},
)


@dataclass
class Ranks:
    """All ranks of a group, each with its own part of the vocabulary."""

    cuts: list[int]  # where each part begins, and the end
    chains: list[SamplingParameters]
    scale: float = 1.0

    def __post_init__(self) -> None:
        size, ranks = len(self.chains), len(self.cuts) - 1
        inboxes = torch.zeros(ranks, Exchange.inbox_words(ranks, WIDTH), dtype=torch.int32, device=DEVICE)
        self.inboxes = inboxes
        addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], dtype=torch.int64, device=DEVICE)
        self.exchanges = [Exchange.over(addresses, ranks, rank, WIDTH) for rank in range(ranks)]
        self.parts = [end - first for first, end in zip(self.cuts, self.cuts[1:], strict=False)]
        self.buffers = [DrawBuffers.empty(size, part, ranks, LINES, DEVICE) for part in self.parts]
        self.numbers = torch.zeros(ranks, 3, size, dtype=torch.int32, device=DEVICE)
        self.numbers[:, 1] = 40
        self.results = torch.zeros(ranks, 2, LINES, size, dtype=torch.int32, device=DEVICE)
        self.host, self.device = (Sampler(self.cuts[-1]) for _ in range(2))
        self.requests = [RequestId(number) for number in range(size)]
        self.prompts = [torch.randint(self.cuts[-1], (300,)).tolist() for _ in self.chains]
        for request, chain, prompt in zip(self.requests, self.chains, self.prompts, strict=True):
            for sampler in (self.host, self.device):
                sampler.open(request, chain, prompt)
        self.penalised = any(is_penalised(chain) for chain in self.chains)
        pairs = list(zip(self.chains, self.prompts, strict=True))
        owns = [VocabRange(first, end) for first, end in zip(self.cuts, self.cuts[1:], strict=False)]
        self.penalties = [[self._penalties(*pair, own) for pair in pairs] for own in owns]
        for buffers, penalties in zip(self.buffers, self.penalties, strict=True):
            assert buffers.set_penalties(penalties) == self.penalised

    @staticmethod
    def _penalties(
        chain: SamplingParameters, prompt: list[int], own: VocabRange
    ) -> DevicePenalties | None:
        return DevicePenalties.of(chain, prompt, own, DEVICE) if is_penalised(chain) else None

    def feed(self, steps: int) -> None:
        self.numbers[:, 2] = 0
        for rank, buffers in enumerate(self.buffers):
            sampling = rank == len(self.parts) - 1
            buffers.feed(self.device.drawn(self.requests, steps) if sampling else None)

    def choose(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """One step on every rank: the ids and log-probabilities, which all ranks must have alike."""
        step, last = int(self.numbers[0, 2, 0]), len(self.parts) - 1
        for rank in range(last):  # sends its keys; nobody has chosen, and it does not wait
            self._launch(rank, logits, waits=False)
        self._launch(last, logits)
        for rank in range(last):  # the same again, now that there is a choice
            self._launch(rank, logits)
        if faults := self.faults(step):
            raise AssertionError(f"after step {step}: " + "; ".join(faults))
        return self.results[last, 0, step].tolist(), self.results[last, 1, step].view(torch.float32).tolist()

    def faults(self, step: int) -> list[str]:
        """What is not as it must be after a step: ranks that waited in vain, or have other numbers than the last."""
        found = [f"rank {rank} waited in vain" for rank, one in enumerate(self.exchanges) if int(one.failed.item())]
        for name, of_ranks in (
            ("tokens, positions, steps", self.numbers),
            ("ids", self.results[:, 0]),
            ("logprobs", self.results[:, 1]),
        ):
            for rank, line, row in (of_ranks != of_ranks[-1]).nonzero().tolist():
                values = " not ".join(map(shown, (of_ranks[rank, line, row], of_ranks[-1, line, row])))
                found.append(f"{name}, rank {rank}, line {line}, row {row}: {values}")
        tokens, _, steps = self.numbers[-1]
        for row in ((steps != step + 1) | (tokens != self.results[-1, 0, step])).nonzero().flatten().tolist():
            found.append(f"row {row} is not a step further")
        return found

    def _launch(self, rank: int, logits: torch.Tensor, waits: bool = True) -> None:
        exchange, own = self.exchanges[rank], logits[:, self.cuts[rank] : self.cuts[rank + 1]].contiguous()
        numbers, results = self.numbers[rank], self.results[rank]
        counts = [penalties.counts for penalties in self.penalties[rank] if penalties is not None]
        changed = [numbers, results, exchange.draw_sequence, *counts]
        kept = [tensor.clone() for tensor in changed]
        exchange.failed.fill_(0 if waits else 1)
        state = StepState(*numbers, results[0], results[1].view(torch.float32))
        best = torch.zeros(len(own), -(-own.shape[1] // BEST_BLOCK), 4, device=DEVICE)
        draw_ops.draw(own, self.cuts[rank], self.scale, best, self.buffers[rank], state, exchange, self.penalised)
        if not waits:
            for tensor, before in zip(changed, kept, strict=True):
                tensor.copy_(before)
        exchange.failed.fill_(0 if not waits else int(exchange.failed.item()))


def shown(word: torch.Tensor) -> str:
    """An int32, also as the f32 that it may be."""
    return f"{word.item()} ({word.view(torch.float32).item():.9g})"


def chains_of(*chains: dict[str, Any]) -> list[SamplingParameters]:
    return [SamplingParameters(**chain, seed=100 + row) for row, chain in enumerate(chains)]


def differences(ranks: Ranks, rows: Sequence[torch.Tensor]) -> tuple[int, float]:
    """Ids that are not the sampler's, and how far the farthest log-probability is off."""
    wrong, far = 0, 0.0
    ranks.feed(len(rows))
    for logits in rows:
        ids, logprobs = ranks.choose(logits)
        for request, token, logprob, scaled in zip(
            ranks.requests, ids, logprobs, logits * ranks.scale, strict=True
        ):
            wanted = ranks.host.choose(request, scaled)
            if wanted.error is None:
                ranks.device.accept(request, token)
                wrong += token != wanted.token
                far = max(far, abs(logprob - wanted.logprob) if logprob == logprob else inf)
            else:
                wrong += not (token == 0 and logprob != logprob)
    return wrong, far


def spread(rows: int, vocab: int) -> torch.Tensor:
    return 4 * torch.randn(rows, vocab, device=DEVICE)


def with_equals(rows: int, vocab: int) -> torch.Tensor:
    """Few different logits: equals everywhere, also at the border of top_k and on different ranks."""
    return (torch.randn(rows, vocab, device=DEVICE) * 2).round() * 0.5


def masked(rows: int, vocab: int) -> torch.Tensor:
    """Little but -inf, fewer than top_k tokens, and whole blocks and ranks without one."""
    logits = torch.full((rows, vocab), -inf, device=DEVICE)
    some = torch.randint(vocab - 2000, vocab, (rows, 12), device=DEVICE)
    return logits.scatter(1, some, torch.randn(rows, 12, device=DEVICE))


def signed_zeros(rows: int, vocab: int) -> torch.Tensor:
    logits = torch.full((rows, vocab), -5.0, device=DEVICE)
    logits[:, ::97] = 0.0
    logits[:, 5::97] = -0.0
    return logits


def non_finite(rows: int, vocab: int) -> torch.Tensor:
    logits = spread(rows, vocab)
    for row, bad in enumerate((nan, inf, -inf)):
        logits[row, (vocab - 1) * (row % 2)] = bad
    logits[3] = -inf
    logits[4] = nan
    return logits


def check_chains(ranks: int, vocab: int, scale: float = 1.0) -> dict[str, float]:
    cuts = [vocab * rank // ranks for rank in range(ranks + 1)]
    group = Ranks(cuts, chains_of(*CHAINS), scale)
    count = len(CHAINS)
    rows = [spread(count, vocab), with_equals(count, vocab), masked(count, vocab), signed_zeros(count, vocab)]
    if ranks < 3:
        rows += [spread(count, vocab) * 0.2, -spread(count, vocab).abs()]
    wrong, far = differences(group, rows)
    more, further = differences(group, [spread(count, vocab)])  # another table: the numbers go on
    name = f"chains over {ranks} ranks, {vocab} ids"
    return {f"{name}: ids": float(wrong + more), f"{name}: logprobs": max(far, further) / 10}


def check_penalties(ranks: int, vocab: int, scale: float = 1.0) -> dict[str, float]:
    """Few ids, said over and over: each step depends on what was chosen before. Beside rows without penalties."""
    chains: list[dict[str, Any]] = [
        {"repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.3}, {}, {"temperature": 0.0},
        {"frequency_penalty": 0.7, "presence_penalty": -0.4, "repetition_penalty": 0.8},
        {"temperature": 0.0, "frequency_penalty": 1.9, "presence_penalty": 0.3},
    ]  # fmt: skip
    group = Ranks([vocab * rank // ranks for rank in range(ranks + 1)], chains_of(*chains), scale)
    logits, wrong, far = spread(len(chains), vocab), 0, 0.0
    for steps in (LINES // 2, 3):
        more, further = differences(group, [logits + 0.3 * spread(*logits.shape) for _ in range(steps)])
        wrong, far = wrong + more, max(far, further)
    name = f"penalties over {ranks} ranks, {vocab} ids"
    return {f"{name}: ids": float(wrong), f"{name}: logprobs": far / 10}


def check_usual(rows: int, vocab: int, penalised: bool = False) -> dict[str, float]:
    """What users have who set nothing, or a repetition penalty alone."""
    chains = chains_of(*[{"repetition_penalty": 1.1} if penalised else {}] * rows)
    wrong, far = differences(Ranks([0, vocab], chains), [spread(rows, vocab)])
    return {"usual chain: ids": float(wrong), "usual chain: logprobs": far / 10}


def check_no_numbers(ranks: int, vocab: int) -> dict[str, float]:
    group = Ranks([vocab * rank // ranks for rank in range(ranks + 1)], chains_of(*[{}] * 6))
    wrong, far = differences(group, [non_finite(6, vocab)])
    return {f"no numbers over {ranks} ranks": float(wrong) + far / 10}


def check_turns(vocab: int) -> dict[str, float]:
    """Tokens chosen by the host between the device's: each takes the next of the request's numbers."""
    penalised = {"repetition_penalty": 1.4, "temperature": 0.0}
    group = Ranks([0, vocab], chains_of({}, {"temperature": 0.0}, penalised))
    wrong = 0
    for _ in range(3):
        wrong += differences(group, [spread(3, vocab), spread(3, vocab)])[0]
        logits = spread(3, vocab)
        for request, row in zip(group.requests, logits, strict=True):
            token = group.device.choose(request, row).token
            wrong += token != group.host.choose(request, row).token
            for penalties in group.penalties:
                if (own := penalties[request]) is not None:
                    own.add(token)
    return {"host and device in turn": float(wrong)}


def check_greedy_alike(vocab: int) -> dict[str, float]:
    """A greedy request among sampled ones gets bit for bit what it gets alone."""
    group = Ranks([0, vocab], chains_of({"temperature": 0.0}, {}))
    logits = spread(2, vocab)
    group.feed(1)
    ids, logprobs = group.choose(logits)
    numbers, results = torch.zeros(3, 1, dtype=torch.int32, device=DEVICE), torch.zeros(2, 1, 1, device=DEVICE)
    state = StepState(*numbers, results[0].view(torch.int32), results[1])
    best = torch.zeros(1, -(-vocab // BEST_BLOCK), 4, device=DEVICE)
    step_ops.choose(logits[:1].contiguous(), 0, 1.0, best, state, Exchange.alone(DEVICE, WIDTH))
    same = ids[0] == int(numbers[0, 0]) and logprobs[0] == results[1].item()
    return {"greedy among sampled": 0.0 if same else 1.0}


def check_distribution(vocab: int, draws: int) -> dict[str, float]:
    """How often each id is drawn: five standard deviations at most from what the chain says."""
    chain = SamplingParameters(temperature=1.1, top_k=6, top_p=0.97, min_p=0.03, seed=9)
    logits = spread(1, vocab)
    group = Ranks([0, vocab // 3, vocab], [chain])
    counts: dict[int, int] = {}
    for _ in range(draws // LINES):
        group.feed(LINES)
        for _ in range(LINES):
            token = group.choose(logits)[0][0]
            counts[token] = counts.get(token, 0) + 1
    top = logits[0].double().topk(6)
    share = torch.softmax(top.values, 0)
    kept = (share.cumsum(0) - share < 0.97) & (share >= 0.03 * share[0])
    truth = torch.softmax(torch.where(kept, top.values / 1.1, -inf), 0)
    wanted = {int(token): float(value) for token, value in zip(top.indices, truth, strict=True) if value > 0}
    number = sum(counts.values())
    far = max(abs(counts.get(t, 0) - number * p) - 5 * sqrt(number * p * (1 - p)) for t, p in wanted.items())
    return {"distribution": 0.0 if far <= 1 and set(counts) <= set(wanted) else 1.0}


def checks() -> Iterator[dict[str, float]]:
    yield check_greedy_alike(5001)
    if DEVICE.type == "cpu":  # the interpreter's time goes by programs: a few large ones, from here on
        draw_ops.MINE, draw_ops.CHUNK = 512, 2048
    yield check_no_numbers(1, 2300)
    yield check_no_numbers(2, 4100)
    yield check_turns(2100)
    yield check_penalties(1, 300)
    yield check_penalties(2, 2300, scale=0.3)
    yield check_chains(1, 5001)
    yield check_chains(2, 5001, scale=0.7)
    yield check_chains(3, 2500)
    yield check_distribution(150, 32 if DEVICE.type == "cpu" else 2000)
    if DEVICE.type == "cuda":
        yield check_greedy_alike(4000)  # as many blocks as a power of two: all threads have one
        yield check_penalties(2, 128256)
        yield check_penalties(4, 5000)
        yield check_chains(1, 128256)
        yield check_chains(2, 128256)
        yield check_chains(8, 128256)
        yield check_chains(1, 262144)


def main() -> int:
    torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else torch.seed() % (1 << 31))
    print("seed", torch.initial_seed())
    if DEVICE.type == "cpu":
        from gearshift.tests.helpers.interpreted_triton import mend_scalars

        mend_scalars()
    wrong = 0
    for check in checks():
        for name, value in check.items():
            print(name, "right" if value < 1.5e-4 else "wrong", value, flush=True)
            wrong += not value < 1.5e-4
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
