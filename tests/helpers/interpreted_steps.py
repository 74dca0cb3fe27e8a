"""What the programs that check whole steps in Triton's interpreter share: small models, plain products, the set-up."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gearshift.proto import device_sizes
from gearshift.tests.helpers.interpreted_triton import mend_scalars
from gearshift.tests.helpers.kernel_checks import report_lines
from gearshift.tests.helpers.layer_stages import Upload
from gearshift.worker.kernels import draw_ops, quant_ops
from gearshift.worker.kernels.block_types import Blocks, expanded_blocks
from gearshift.worker.kernels.quant_ops import QuantizedRows
from gearshift.worker.kernels.quant_planes import Planes, dequantize
from gearshift.worker.weights import device_load

Found = Iterator[tuple[str, float, float]]  # (what, found, most allowed)

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_width": 32, "feed_forward": 128, "vocab": 320,
}  # fmt: skip
# At 9 to 7 attention's results are cut inside a block of Q4_K, and query heads inside a group. One bias more.
CUT = SHAPE | {"heads": 16, "kv_heads": 4, "types": {"attn_output.weight": "Q4_K"}}
CUT["tensors"] = {"blk.1.attn_output.bias": np.linspace(-2.0, 2.0, SHAPE["hidden"], dtype=np.float32)}
POSITIONS = (70, 5, 0)


def plain_product(planes: Planes | Blocks, x: QuantizedRows, out: torch.Tensor, *_: object, **__: object) -> None:
    """`quant_ops.multiply`, which has its own checks and takes most of the interpreter's time."""
    dense = expanded_blocks(planes) if isinstance(planes, Blocks) else dequantize(planes)
    out.copy_(x.expanded(torch.float32) @ dense.T)


def plain_exact_product(planes: Planes | Blocks, x: torch.Tensor, out: torch.Tensor) -> None:
    """`quant_ops.multiply_exactly` likewise."""
    out.copy_(x.float() @ (expanded_blocks(planes) if isinstance(planes, Blocks) else dequantize(planes)).T)


def run_checks(checks: Callable[[Path], Iterable[Found]]) -> int:
    """Of a program: 1 if any is wrong. `checks`: those over models that are written into a folder."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "a device runs these in tests/parity"
    mend_scalars()
    torch.manual_seed(0)
    device_load.Uploader = Upload  # type: ignore[assignment, misc]
    quant_ops.multiply = plain_product  # type: ignore[assignment]
    quant_ops.multiply_exactly = plain_exact_product
    device_sizes.SPLITS = 2
    draw_ops.MINE, draw_ops.CHUNK = 512, 2048  # the interpreter's time goes by programs
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        return 1 if report_lines(checks(Path(folder))) else 0
