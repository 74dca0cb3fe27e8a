"""Time a rank's own products of a decode step on a GPU, as a captured step runs them: without the host in between."""

from collections.abc import Callable, Sequence

import torch

from .kernels.activations import room_for
from .kernels.first_runs import FirstRuns
from .kernels.quant_matrix import QuantMatrix
from .model.captured import captured, place_on
from .timing import Stopwatch
from .weights.layer import LayerWeights


def own_product_seconds(
    layers: Sequence[LayerWeights], batch: int, device: torch.device, watch: Stopwatch
) -> float:
    """Seconds of one layer's own part, over some layers: its four products of `batch` rows, captured as one graph."""
    products = [_product(matrix, batch, device) for layer in layers for matrix in _matrices(layer)]

    def launch() -> None:
        for product in products:
            product()

    replay = captured(place_on(device, FirstRuns()), launch, f"{len(products)} products of {batch} rows")
    return watch.alone(replay) / len(layers)


def _matrices(layer: LayerWeights) -> list[QuantMatrix]:
    own = layer.own
    matrices = (own.qkv, own.attention_output, own.gate_up, own.down)
    return [matrix for matrix in matrices if isinstance(matrix, QuantMatrix) and matrix.rows and matrix.columns]


def _product(matrix: QuantMatrix, batch: int, device: torch.device) -> Callable[[], None]:
    rows = room_for(batch, matrix.held_columns, device, matrix.exact)
    out = torch.empty((batch, matrix.rows), dtype=torch.float32, device=device)
    return lambda: matrix.multiply_quantized(rows, out)
