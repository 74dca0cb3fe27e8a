"""What captured decode steps keep on a GPU: static buffers and graphs of each batch size, and inboxes for sums. Pure.

Follows what worker/model/decode_steps.py and layer_steps.py allocate.
"""

from ..device_sizes import (
    BEST_BLOCK,
    DRAW_KEYS,
    FLAG_WORDS,
    MOST_ROWS,
    MOST_STEPS,
    SPAN,
    SPLITS,
    STEP_BATCHES,
    draw_group,
    splits_for,
)  # fmt: skip
from ..kv import block_count
from ..model import ModelSpec
from .plan import Placement
from .slices import layer_slice
from .working_case import WorkingCase

MEBIBYTE = 1 << 20
LAUNCHES_A_PART = 9  # of a layer in a step
GRAPH_BYTES = 16 * MEBIBYTE  # captured steps of a batch size: their nodes' arguments and what their launches keep
LAUNCH_BYTES = 11 << 10  # one launch of a graph (as working.CHUNK_GRAPH_BYTES counts them)


def step_bytes(spec: ModelSpec, placement: Placement, rank: int, case: WorkingCase) -> int:
    """Static buffers and graphs of decode steps under tensor parallelism."""
    parts = [cut.parts[rank] for cut in placement.layers]
    facts = spec.layers
    query = max(len(part.query) * layer.key_width for part, layer in zip(parts, facts, strict=True))
    projected = max(
        len(part.query) * layer.key_width + len(part.kv) * (layer.key_width + layer.value_width)
        for part, layer in zip(parts, facts, strict=True)
    )
    forward = max(len(part.feed_forward) for part in parts)
    heads = max(len(part.query) for part in parts)
    splits = heads * 2 * SPLITS * (max(layer.value_width for layer in facts) + 2) * 4
    table = placement.ranks * (block_count(case.context_tokens) + 1) * 8
    floats = 2 * spec.hidden + projected + 2 * forward + len(placement.vocab[rank])
    row = 4 * floats + 2 * query + splits + table + 2 * MOST_STEPS * 4 + _draw_bytes(placement, rank)
    sizes = _captured_batches(case)
    held = max(_held_columns(spec, placement, layer, rank) for layer in range(len(facts)))
    quantised = sum(_activation_bytes(case, size, width) for size in sizes for width in (spec.hidden, held, forward))
    counts = case.batch * 4 * len(placement.vocab[rank])  # of ids that penalties are for
    return sum(sizes) * row + quantised + len(sizes) * GRAPH_BYTES + counts


def layer_step_bytes(spec: ModelSpec, placement: Placement, rank: int, case: WorkingCase) -> int:
    """The same of decode steps through the stages: buffers of all parts, which run side by side."""
    sizes, stage = _captured_batches(case), placement.stages[rank]
    splits = splits_for(case.context_tokens)
    table = block_count(case.context_tokens) + 1
    angles = len({layer.rope for layer in spec.layers}) * max(layer.rope.dimensions for layer in spec.layers)
    row = 4 * (spec.hidden + len(placement.vocab[rank]) + angles) + 2 * MOST_STEPS * 4
    row += _draw_bytes(placement, rank)
    quantised, launches = [spec.hidden], len(stage) * (2 + LAUNCHES_A_PART * placement.ranks)
    for part in range(placement.ranks if len(stage) else 0):
        facts = [(placement.layers[layer].parts[part], spec.layers[layer]) for layer in stage]
        query = max(len(cut.query) * layer.key_width for cut, layer in facts)
        columns = max(
            len(cut.query) * layer.key_width + len(cut.kv) * (layer.key_width + layer.value_width)
            for cut, layer in facts
        )
        forward = max(len(cut.feed_forward) for cut, _ in facts)
        shapes = {(len(cut.query), layer.value_width) for cut, layer in facts}
        row += 4 * (spec.hidden + columns + 2 * forward) + 2 * query + table * 8
        row += sum(heads * splits * (width + 2) * 4 for heads, width in shapes)
        quantised += [max(_held_columns(spec, placement, layer, part) for layer in stage), forward]
    activations = sum(_activation_bytes(case, size, width) for size in sizes for width in quantised)
    return sum(sizes) * row + activations + len(sizes) * launches * LAUNCH_BYTES


def _held_columns(spec: ModelSpec, placement: Placement, layer: int, part: int) -> int:
    """Of attention's results: the part's, and those beside it that its quant blocks of the last matrix cover."""
    if spec.layer_tensor(layer, "attn_output.weight") is None:
        return len(placement.layers[layer].parts[part].query) * spec.layers[layer].value_width
    return len(layer_slice(spec, placement, layer, "attn_output.weight", part).held)


def _draw_bytes(placement: Placement, rank: int) -> int:
    """A row's room for sampled choices."""
    vocab = len(placement.vocab[rank])
    group = draw_group(vocab)
    groups = -(-vocab // BEST_BLOCK) * (BEST_BLOCK // group)
    keys = groups + DRAW_KEYS * (group + 2 * placement.ranks + 2)
    return 8 * (keys + 4 + MOST_STEPS + 1) + 4 * (vocab + 3)


def _activation_bytes(case: WorkingCase, rows: int, columns: int) -> int:
    """In int8. One row: with scales and sums a 32 and 16 columns; more: always 16, by 256 columns."""
    if case.exact_activations:
        return 4 * rows * columns
    if rows == 1:
        return columns * 3 // 2
    return -(-columns // SPAN) * (MOST_ROWS * (SPAN + 4 + 2 * SPAN // 16))


def _captured_batches(case: WorkingCase) -> list[int]:
    """Batch sizes that steps are captured for."""
    return [size for index, size in enumerate(STEP_BATCHES) if index == 0 or STEP_BATCHES[index - 1] < case.batch]


def inbox_bytes(spec: ModelSpec, placement: Placement) -> int:
    """What other ranks write their sums and choices into."""
    words = 2 * 2 * spec.hidden + 2 * 4 + FLAG_WORDS + 2 * 4 * DRAW_KEYS
    return 4 * placement.ranks * MOST_ROWS * words
