"""Norms, gates and choices between a step's products against plain torch, on fresh random data.

Run as `quant_kernel_checks` is. Attention: `attention_kernel_checks`; sums over ranks: `exchange_kernel_checks`.
"""

import sys

import torch
import torch.nn.functional as functional

from gearshift.proto.device_sizes import BEST_BLOCK
from gearshift.proto.model import Activation
from gearshift.tests.helpers.kernel_checks import DEVICE, randn, relative_error, report_worst, worst
from gearshift.worker.kernels import step_ops
from gearshift.worker.kernels.exchange import Exchange
from gearshift.worker.kernels.quant_ops import QuantizedRows
from gearshift.worker.kernels.step_ops import StepState

EPSILON = 1e-5


def beyond_rounding(x: QuantizedRows, wanted: torch.Tensor) -> float:
    """How much more than half a step of its scale, which the greatest of its columns sets, a value is off."""
    together = 32 if x.rows == 1 else 256
    padded = functional.pad(wanted, (0, -wanted.shape[1] % together)).unflatten(1, (-1, together))
    step = (padded.abs().amax(-1, keepdim=True) / 127).expand_as(padded).flatten(1)[:, : wanted.shape[1]]
    return worst(0.0, float(((x.expanded(torch.float32) - wanted).abs() / step).max()) - 0.5) / 10


def check_halves(rows: int, width: int, post: bool) -> dict[str, float]:
    hidden, partial, weight, after = randn(rows, width), randn(rows, width), randn(width), randn(width)
    total = functional.rms_norm(partial, (width,), after, EPSILON) if post else partial
    wanted = functional.rms_norm(hidden + total, (width,), weight, EPSILON)
    out = QuantizedRows.empty(rows, width, DEVICE)
    kept, dense = hidden.clone(), torch.empty(rows, width, dtype=torch.bfloat16, device=DEVICE)
    exact = torch.full_like(hidden, float("nan"))
    step_ops.finish_half(partial, hidden.clone(), weight, after if post else None, EPSILON, exact)
    step_ops.finish_half(partial, kept, weight, after if post else None, EPSILON, out)
    step_ops.finish_half(None, kept.clone(), weight, None, EPSILON, dense)
    return {
        "halves: hidden": relative_error(kept, hidden + total), "halves: int8": beyond_rounding(out, wanted),
        "halves: bf16": relative_error(dense, wanted) / 100, "halves: f32": relative_error(exact, wanted),
    }  # fmt: skip


def check_gate(rows: int, width: int, activation: Activation) -> dict[str, float]:
    both = randn(rows, 2 * width)
    gate, up = both.chunk(2, dim=1)
    wanted = (
        functional.silu(gate) if activation is Activation.SILU else functional.gelu(gate, approximate="tanh")
    ) * up
    out, dense = QuantizedRows.empty(rows, width, DEVICE), torch.empty(rows, width, device=DEVICE)
    step_ops.gate(both, activation, out)
    step_ops.gate(both, activation, dense)
    shrunk = torch.empty_like(dense, dtype=torch.float16)
    step_ops.gate(both, activation, shrunk, 32.0)
    return {
        "gate": relative_error(dense, wanted), "gate: int8": beyond_rounding(out, wanted),
        "gate: f16": relative_error(32.0 * shrunk.float(), wanted) / 1000,
    }  # fmt: skip


def check_choice(rows: int, vocab: int) -> dict[str, float]:
    logits = randn(rows, vocab)
    logits[0, 77] = logits[0, vocab - 3] = 9.0  # the lower id of equals
    numbers = torch.zeros(3, rows, dtype=torch.int32, device=DEVICE)
    numbers[1] = 40
    numbers[2] = 2
    ids, logprobs = (
        torch.zeros(5, rows, dtype=torch.int32, device=DEVICE),
        torch.zeros(5, rows, device=DEVICE),
    )
    state = StepState(numbers[0], numbers[1], numbers[2], ids, logprobs)
    best = torch.zeros(rows, -(-vocab // BEST_BLOCK), 4, device=DEVICE)
    step_ops.choose(logits, 1000, 1.0, best, state, Exchange.alone(DEVICE, 32))
    wanted = logits.argmax(-1)
    right = (
        torch.equal(ids[2].long(), wanted + 1000)
        and torch.equal(numbers[0], ids[2])
        and int(ids[2, 0]) == 1077
    )
    moved = numbers[1].tolist() == [41] * rows and numbers[2].tolist() == [3] * rows
    return {
        "choice": 0.0 if right and moved else 1.0,
        "choice: logprob": relative_error(logprobs[2], torch.log_softmax(logits, -1).amax(-1)),
    }


def check_choice_among_no_numbers(vocab: int) -> dict[str, float]:
    """A row without numbers gets no log-probability, and a next input that is in the table; others see nothing."""
    logits = randn(2, vocab)
    logits[1] = float("nan")
    numbers = torch.zeros(3, 2, dtype=torch.int32, device=DEVICE)
    ids, logprobs = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE), torch.zeros(1, 2, device=DEVICE)
    state = StepState(numbers[0], numbers[1], numbers[2], ids, logprobs)
    best = torch.zeros(2, -(-vocab // BEST_BLOCK), 4, device=DEVICE)
    step_ops.choose(logits, 1000, 1.0, best, state, Exchange.alone(DEVICE, 32))
    right = int(numbers[0, 0]) == 1000 + int(logits[0].argmax()) and bool(logprobs[0, 0].isfinite())
    nothing = int(numbers[0, 1]) == 0 and bool(logprobs[0, 1].isnan())
    return {"choice among no numbers": 0.0 if right and nothing else 1.0}


def main() -> int:
    if DEVICE.type == "cpu":
        from gearshift.tests.helpers.interpreted_triton import mend_scalars

        mend_scalars()
    checks = [check_halves(3, 288, False), check_halves(1, 64, True), check_gate(3, 352, Activation.SILU)]
    checks += [check_gate(2, 64, Activation.GELU_TANH), check_choice(2, 5001), check_choice_among_no_numbers(5001)]
    if DEVICE.type == "cuda":
        checks += [check_halves(16, 4096, False), check_halves(5, 5120, True)]
        checks += [check_gate(16, 7168, Activation.SILU), check_choice(16, 64128)]
    return 1 if report_worst(checks) else 0


if __name__ == "__main__":
    sys.exit(main())
