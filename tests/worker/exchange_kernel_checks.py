"""Sums over ranks inside kernels against plain torch, on fresh random data. Run as `quant_kernel_checks` is."""

import itertools
import sys

import torch

from gearshift.tests.helpers.kernel_checks import DEVICE, randn, relative_error, report_worst, worst
from gearshift.tests.worker.test_quant_planes import random_rows
from gearshift.worker.kernels import step_ops
from gearshift.worker.kernels.exchange import Exchange
from gearshift.worker.kernels.quant_ops import QuantizedRows, Sent, multiply, quantize
from gearshift.worker.kernels.quant_planes import from_gguf

EPSILON = 1e-5


def check_exchange(ranks: int, rows: int, width: int, sent: bool, on_host: bool, rounds: int = 12) -> dict[str, float]:
    """Ranks on streams of one device: every one adds what all have sent, round after round, into the same inboxes.

    `sent`: by the products. `on_host`: as where inboxes are far (they are not, here).
    """
    words = Exchange.inbox_words(ranks, width)
    inboxes = [torch.zeros(words, dtype=torch.int32, device=DEVICE) for _ in range(ranks)]
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], dtype=torch.int64, device=DEVICE)
    exchanges = [Exchange.over(addresses, ranks, rank, width, on_host) for rank in range(ranks)]
    weight, start, columns = randn(width), randn(rows, width), 512
    raw = [torch.from_numpy(random_rows("Q8_0", width, columns, rank)).to(DEVICE) for rank in range(ranks)]
    matrices = [from_gguf("Q8_0", each) for each in raw]
    inputs = [[quantize(randn(rows, columns)) for _ in range(rounds)] for _ in range(ranks)]
    partials = torch.full((ranks, rounds, rows, width), float("nan"), device=DEVICE)
    for rank in range(ranks):
        for number in range(rounds):
            multiply(matrices[rank], inputs[rank][number], partials[rank, number])
    wanted = start + partials.sum(dim=(0, 1))
    hidden = [start.clone() for _ in range(ranks)]
    outs = [QuantizedRows.empty(rows, width, DEVICE) for _ in range(ranks)]

    def send(rank: int, number: int, exchange: Exchange) -> None:
        if sent:
            own = partials[rank, number].fill_(float("nan"))
            multiply(matrices[rank], inputs[rank][number], own, sent=Sent(exchange, 0))

    def add(rank: int, number: int, exchange: Exchange, onto: torch.Tensor) -> None:
        own = partials[rank, number]
        step_ops.finish_half(own, onto, weight, None, EPSILON, outs[rank], exchange, sent)

    # Loading a kernel may wait for those that run: each is loaded once where all that it waits for has come.
    come = torch.full((words // 2,), 1 << 32, dtype=torch.int64, device=DEVICE)
    kept = partials.clone()
    for rank in range(ranks):
        addresses_of_come = torch.full((ranks,), come.data_ptr(), device=DEVICE)
        warm = Exchange.over(addresses_of_come, ranks, rank, width, on_host)
        send(rank, 0, warm)
        add(rank, 0, warm, start.clone())
        torch.cuda.synchronize()
        come.fill_(1 << 32)
    partials.copy_(kept)
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    torch.cuda.synchronize()
    for number in range(rounds):
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                send(rank, number, exchanges[rank])
        # One device has all ranks here: sums that wait on every multiprocessor would keep another rank's product, whose
        # share of shared memory is set up otherwise, from starting at all.
        products = [stream.record_event() for stream in streams] if sent else []
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                for product in products:
                    stream.wait_event(product)
                add(rank, number, exchanges[rank], hidden[rank])
    torch.cuda.synchronize()
    same = all(torch.equal(hidden[0], other) for other in hidden[1:])
    failed = sum(int(exchange.failed.item()) for exchange in exchanges)
    name = f"exchange{' by products' * sent}{' by many programs' * on_host}"
    return {
        name: worst(*(relative_error(rows, wanted) for rows in hidden)),
        f"{name}: ranks alike, all came": 0.0 if same and not failed else 1.0,
    }


def check_sums_in_turn(on_host: bool, rounds: int = 3) -> dict[str, float]:
    """Two ranks one after the other, each product before either's sum: what is sent, where to, and who counts.

    Then a sum whose peer has sent nothing, after one that failed: nobody waits.
    """
    ranks, width, columns = 2, 96, 64
    inboxes = torch.zeros(ranks, Exchange.inbox_words(ranks, width), dtype=torch.int32, device=DEVICE)
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], dtype=torch.int64, device=DEVICE)
    exchanges = [Exchange.over(addresses, ranks, rank, width, on_host) for rank in range(ranks)]
    pieces = [[from_gguf("Q8_0", torch.from_numpy(random_rows("Q8_0", rows, columns, rank)).to(DEVICE))
               for rows in (64, 32)] for rank in range(ranks)]  # fmt: skip
    weight, wanted = randn(width), torch.zeros(1, width, device=DEVICE)
    hidden = [torch.zeros(1, width, device=DEVICE) for _ in range(ranks)]
    out, partials = QuantizedRows.empty(1, width, DEVICE), torch.zeros(ranks, 1, width, device=DEVICE)
    for _ in range(rounds):
        for rank, exchange in enumerate(exchanges):
            x = quantize(randn(1, columns))
            for first, planes in zip((0, 64), pieces[rank], strict=True):
                columns_here = partials[rank][:, first : first + planes.rows]
                multiply(planes, x, columns_here, sent=Sent(exchange, first))
        wanted = wanted + partials.sum(dim=0)
        for rank, exchange in enumerate(exchanges):
            step_ops.finish_half(partials[rank], hidden[rank], weight, None, EPSILON, out, exchange, sent=True)
    counted = all(exchange.sums_sequence[:2].tolist() == [rounds, 0] for exchange in exchanges)
    came = not any(int(exchange.failed.item()) for exchange in exchanges)
    exchanges[0].failed.fill_(1)
    step_ops.finish_half(partials[0], hidden[0].clone(), weight, None, EPSILON, out, exchanges[0])
    return {
        "sums in turn": worst(*(relative_error(rows, wanted) for rows in hidden)),
        "sums in turn: counted, all came": 0.0 if counted and came else 1.0,
    }  # fmt: skip


def main() -> int:
    if DEVICE.type == "cpu":
        from gearshift.tests.helpers.interpreted_triton import mend_scalars

        mend_scalars()
    checks = [check_sums_in_turn(False), check_sums_in_turn(True)]
    if DEVICE.type == "cuda":
        for sent, on_host in itertools.product((False, True), repeat=2):
            for ranks, rows, width in ((2, 1, 4096), (2, 16, 4096), (4, 3, 5120)):
                checks.append(check_exchange(ranks, rows, width, sent, on_host))
    return 1 if report_worst(checks) else 0


if __name__ == "__main__":
    sys.exit(main())
