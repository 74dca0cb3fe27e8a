"""Bytes that a worker needs beside weights and KV: buffers that stay, and what passes in each phase. Pure.

Follows what the workers allocate (worker/model, worker/kernels, worker/links); upper ends where the exact figure
depends on how slots happen to lie. T rows of a chunk, L cached positions, D hidden: shape letters as in worker/model.
"""

from collections.abc import Collection, Iterator

from msgspec import Struct

from ..device_sizes import (
    EXACT_BYTES,
    KEPT_MASKS,
    MOST_ROWS,
    MOST_SCORES,
    bucket_sizes,
    chunk_bucket,
    expanded_bytes,
)
from ..ids import KvType, Layout
from ..kv import BLOCK_TOKENS, block_count, most_moved_blocks
from ..model import LayerSpec, ModelSpec
from ..past_runs import FEWEST_CACHED
from .bundles import bundle_bytes
from .device_rows import BLOCKS
from .plan import PartCut, Placement
from .slices import layer_slice
from .step_buffers import inbox_bytes, layer_step_bytes, step_bytes
from .working_case import WorkingCase

MEBIBYTE = 1 << 20
FUSED_WIDTHS = (32, 64, 128, 256)  # of heads, for the kernels between the products
USUAL_BATCH = 8  # requests that decode together, at most: steps of more are captured when they come
CHUNK_GRAPH_BYTES = 128 << 10  # a layer's graphs of one bucket: what the driver keeps for a dozen launches
# The code of the libraries for products and attention, 75 MiB on an H200, and the first one's workspace, 32 there.
LIBRARY_BYTES = 107 * MEBIBYTE
FRAGMENTS_BYTES = 32 * MEBIBYTE  # freed blocks of the caching allocator that nothing fits into


class Working(Struct, frozen=True):
    """Bytes of one rank beside weights and KV. `standing` stays; the others pass, each at its phase's peak."""

    standing: int
    prefill: int
    shift: int  # a streamed shift goes on beside the prefill
    decode: int


def working(spec: ModelSpec, placement: Placement, rank: int, case: WorkingCase) -> Working:
    """What rank `rank` needs for these journeys."""
    reads = {prefill for prefill, _ in case.journeys}
    writes = {decode for _, decode in case.journeys}
    shifts = any(prefill is not decode for prefill, decode in case.journeys)
    prefill = max(_pass_bytes(spec, placement, rank, case, layout, case.chunk_rows) for layout in reads)
    decode = max(_pass_bytes(spec, placement, rank, case, layout, 1) for layout in writes)
    decode += case.batch * _logit_bytes(spec, placement, rank)
    staged = _shift_bytes(spec, placement, rank, case) if shifts and placement.ranks > 1 else 0
    return Working(
        standing=_standing_bytes(spec, placement, rank, case, reads, writes),
        prefill=prefill + _logit_bytes(spec, placement, rank),
        shift=prefill + staged,
        decode=decode,
    )


def _parts_run(placement: Placement, rank: int, layout: Layout) -> Iterator[tuple[int, tuple[PartCut, ...]]]:
    """(layer, the parts of it that a rank runs in a layout)."""
    if layout is Layout.LAYER:
        for layer in placement.stages[rank]:
            yield layer, placement.layers[layer].parts
    else:
        for layer, cut in enumerate(placement.layers):
            yield layer, (cut.parts[rank],)


def _pass_bytes(
    spec: ModelSpec, placement: Placement, rank: int, case: WorkingCase, layout: Layout, rows: int
) -> int:
    """Peak of one pass of T rows through the layers a rank runs: the widest half block, and what goes through all."""
    fused = case.on_gpu and _fused(spec)  # once: it looks at every layer
    if fused and rows > MOST_ROWS:
        return _gpu_chunk_bytes(spec, placement, rank, case, layout, rows)
    widest = 0
    for layer, parts in _parts_run(placement, rank, layout):
        facts = spec.layers[layer]
        if fused:
            attention = _fused_attention_bytes(facts, parts, rows, case, spec.hidden)
            forward = _gpu_forward_bytes(parts, rows, spec.hidden, case)
        elif case.on_gpu:
            attention = _plain_gpu_attention_bytes(facts, parts, rows, case)
            forward = max(_gpu_forward_bytes((part,), rows, spec.hidden, case) for part in parts)
        else:
            attention = _cpu_attention_bytes(facts, parts, rows, case)
            forward = max(3 * case.element_bytes * rows * len(part.feed_forward) for part in parts)
        widest = max(widest, attention, forward)
    # Hidden rows twice, their norms, two sums.
    row_bytes_through = 2 * 4 + case.element_bytes + 2 * (case.sum_bytes if case.on_gpu else 4)
    return rows * spec.hidden * row_bytes_through + widest


def _gpu_chunk_bytes(
    spec: ModelSpec, placement: Placement, rank: int, case: WorkingCase, layout: Layout, rows: int
) -> int:
    """What passes beside a chunk's static buffers: rows in and out, keys and values gathered, attention's results."""
    attention = 0
    for layer, parts in _parts_run(placement, rank, layout):
        facts = spec.layers[layer]
        seen, heads = gathered_positions(facts, rows, case.context_tokens), sum(len(part.query) for part in parts)
        for part in parts:  # one at a time
            gathered = seen * len(part.kv) * (facts.key_width + facts.value_width) * 2
            on_the_way = seen * len(part.kv) * max(facts.key_width, facts.value_width) * 2
            # A square of the chunk and what no run of its past has: queries in the strides of all parts' heads, keys,
            # values and its result, with logs. Then a run's: queries filled up to a bucket, and another result.
            square = chunk_bucket(rows + FEWEST_CACHED - 1)
            newest = square * (heads + len(part.query) + 2 * len(part.kv)) * 2 * facts.value_width
            joined = (square + 2 * chunk_bucket(rows)) * len(part.query) * 2 * facts.value_width
            logs = 2 * square * len(part.query) * 4
            attention = max(attention, gathered + on_the_way + max(newest, joined) + logs)
    return 2 * 4 * rows * spec.hidden + attention


def chunk_scratch_columns(spec: ModelSpec, placement: Placement, rank: int) -> int:
    """16-bit columns of a chunk's scratch: queries, attention's results and projections, or gates and what they let by.

    The latter lie on the gates, but where parts are of different widths.
    """
    widest = 0
    for layer, facts in enumerate(spec.layers):
        parts = [placement.layers[layer].parts[part] for part in placement.parts_run(layer, rank)]
        query, kv = sum(len(part.query) for part in parts), sum(len(part.kv) for part in parts)
        forward = [len(part.feed_forward) for part in parts if len(part.feed_forward)]
        turns = 3 if len(set(forward)) > 1 else 2
        widest = max(widest, (3 * query + 2 * kv) * facts.key_width, turns * sum(forward))
    return widest


def _chunk_buffer_bytes(spec: ModelSpec, placement: Placement, rank: int, case: WorkingCase) -> int:
    """Static buffers of chunks, and their graphs: some a layer and bucket."""
    rows = chunk_bucket(case.chunk_rows)
    tables = (2 * placement.ranks - 1) * (block_count(case.context_tokens) + 1) * 8
    angles = len({layer.rope for layer in spec.layers}) * max(layer.rope.dimensions for layer in spec.layers) * 4
    buckets = len(bucket_sizes(rows))
    graphs = buckets * len(spec.layers) * CHUNK_GRAPH_BYTES
    columns = chunk_scratch_columns(spec, placement, rank)
    hidden = spec.hidden * (4 + 2 + case.sum_bytes)  # the rows, their norms, a share of their sums
    return rows * (hidden + 2 * columns + buckets * angles + 4) + tables + graphs


def _fused(spec: ModelSpec) -> bool:
    """Whether the kernels of a GPU cover this model (worker/model/device_decoder.py `fits_kernels`)."""
    widths = {(layer.key_width, layer.value_width) for layer in spec.layers}
    return all(key == value and key in FUSED_WIDTHS for key, value in widths)


def _fused_attention_bytes(
    facts: LayerSpec, parts: Collection[PartCut], rows: int, case: WorkingCase, hidden: int
) -> int:
    """Projections, queries and results in bf16 of all parts; one part's keys and values gathered."""
    query = sum(len(part.query) for part in parts)
    kv = sum(len(part.kv) for part in parts)
    projected = rows * (query * facts.key_width + kv * (facts.key_width + facts.value_width)) * case.sum_bytes
    queries_and_results = rows * query * (facts.key_width + 2 * facts.value_width) * 2
    # On the way keys or values are there once more, where slots are scattered.
    widths = facts.key_width + facts.value_width + max(facts.key_width, facts.value_width)
    gathered = gathered_positions(facts, rows, case.context_tokens) * max(len(part.kv) for part in parts) * widths * 2
    return projected + queries_and_results + gathered + rows * hidden * case.sum_bytes


def _plain_gpu_attention_bytes(facts: LayerSpec, parts: Collection[PartCut], rows: int, case: WorkingCase) -> int:
    """One part's KV heads at a time by the library's own attention, which may lay scores of all heads out."""
    query = sum(len(part.query) for part in parts)
    if not query:
        return 0
    seen, most_kv = gathered_positions(facts, rows, case.context_tokens), max(len(part.kv) for part in parts)
    gathered = seen * most_kv * (facts.key_width + facts.value_width) * 2
    quantised = KvType.Q8_0 in (case.kv_format.key, case.kv_format.value)
    on_their_way = seen * most_kv * max(facts.key_width, facts.value_width) * (4 + 2 if quantised else 2)
    masks = KEPT_MASKS * min(rows * seen, MOST_SCORES)
    scores = 2 * most_kv * min(MOST_SCORES, rows * seen * _most_readers(facts, parts))
    results = rows * query * facts.value_width * 2
    return _projected_bytes(facts, parts, rows, 2) + gathered + on_their_way + masks + scores + results


def _projected_bytes(facts: LayerSpec, parts: Collection[PartCut], rows: int, element: int) -> int:
    """Queries, keys and values in the compute type and as f32; turned. As if all parts shared KV heads: then joined."""
    query, kv = sum(len(part.query) for part in parts), sum(len(part.kv) for part in parts)
    columns = query * facts.key_width + kv * (facts.key_width + facts.value_width)
    turned = (query + kv) * facts.key_width
    return rows * (columns * (min(2, len(parts)) * element + 4) + 2 * 4 * turned)


def _most_readers(facts: LayerSpec, parts: Collection[PartCut]) -> int:
    """Query heads that read one KV head: a whole group, or what the only part has of it."""
    return min(facts.query_heads // max(1, facts.kv_heads), sum(len(part.query) for part in parts))


def _gpu_forward_bytes(parts: Collection[PartCut], rows: int, hidden: int, case: WorkingCase) -> int:
    """Gates and what they are for, what they let by (in f16 once more, before it is), and the result."""
    width = sum(len(part.feed_forward) for part in parts)
    return rows * ((3 * width + hidden) * case.sum_bytes + (2 * width if case.wide_sums else 0))


def _cpu_attention_bytes(facts: LayerSpec, parts: Collection[PartCut], rows: int, case: WorkingCase) -> int:
    """f32 beside the compute type; one part's keys and values at a time as f32, scores of one KV head's group."""
    query = sum(len(part.query) for part in parts)
    if not query:
        return 0
    element, seen = case.element_bytes, gathered_positions(facts, rows, case.context_tokens)
    most_kv = max(len(part.kv) for part in parts)
    gathered = seen * most_kv * (4 * (facts.key_width + facts.value_width) + element * facts.value_width)
    scores = min(MOST_SCORES, rows * seen * _most_readers(facts, parts))
    masks = KEPT_MASKS * min(rows * seen, MOST_SCORES)
    # In twos: what a few KV heads' readers attended is joined, and is taken part by part then.
    results = rows * query * (2 * facts.value_width * element + facts.key_width * 4)
    return _projected_bytes(facts, parts, rows, element) + gathered + scores * (8 + element) + masks + results


def gathered_positions(facts: LayerSpec, rows: int, context_tokens: int) -> int:
    """Cached positions that a pass of so many rows gathers at most, in whole blocks."""
    seen = context_tokens
    if facts.sliding_window:
        seen = min(seen, facts.sliding_window + rows + BLOCK_TOKENS)
    return block_count(seen) * BLOCK_TOKENS


def _logit_bytes(spec: ModelSpec, placement: Placement, rank: int) -> int:
    """One row of logits: this rank's; on the sampler's also everybody's, as they come and joined."""
    own = len(placement.vocab[rank]) * 4
    return 2 * own + (3 * spec.vocab * 4 if rank == placement.ranks - 1 else 0)


def _shift_bytes(spec: ModelSpec, placement: Placement, rank: int, case: WorkingCase) -> int:
    """Bundles of the last chunk's blocks, on the CPU of the last two, copied to be sent and as they arrive.

    On a card those before have been put by then, but for some that staged copies still hold: together with what a
    chunk needs at its peak, which is not then, 191 MiB were measured where 250 are counted (docs/lab_notes.md).
    """
    chunks = 1 if case.on_gpu else 2
    blocks = min(chunks * most_moved_blocks(case.chunk_rows), block_count(case.context_tokens))
    others = [other for other in range(placement.ranks) if other != rank]
    as_stage = sum(bundle_bytes(spec, placement, rank, part, case.kv_format) for part in others)
    as_part = sum(bundle_bytes(spec, placement, stage, rank, case.kv_format) for stage in others)
    return blocks * (as_stage + as_part)


def _standing_bytes(
    spec: ModelSpec, placement: Placement, rank: int, case: WorkingCase, reads: set[Layout], writes: set[Layout]
) -> int:
    total = 0
    if Layout.LAYER in reads and placement.ranks > 1:
        edges = (rank > 0) + (rank < placement.ranks - 1)
        total += edges * 2 * case.chunk_rows * spec.hidden * 4  # two buffers each
    if case.on_gpu:
        total += LIBRARY_BYTES + FRAGMENTS_BYTES
        if case.chunk_rows > MOST_ROWS:
            total += _workspace_bytes(spec, placement, rank, case.chunk_rows)
            if _fused(spec):
                total += _chunk_buffer_bytes(spec, placement, rank, case)
        if Layout.TENSOR in writes or placement.ranks == 1:
            total += step_bytes(spec, placement, rank, case)
        if case.exact_activations and any(tensor.type_name in BLOCKS for tensor in spec.tensors.values()):
            total += (len(writes) + 1) * EXACT_BYTES  # in the graphs of each layout, and where pieces run first
        if placement.ranks > 1:
            total += inbox_bytes(spec, placement)
            if Layout.LAYER in writes and _fused(spec):
                total += layer_step_bytes(spec, placement, rank, case)
    return total


def _workspace_bytes(spec: ModelSpec, placement: Placement, rank: int, chunk_rows: int) -> int:
    """The workspace: the largest matrix in bf16, all parts that run side by side or stacked; so much at most."""
    return min(expanded_bytes(chunk_rows), 2 * max(_largest_values(spec, placement, rank, layout) for layout in Layout))


def _largest_values(spec: ModelSpec, placement: Placement, rank: int, layout: Layout) -> int:
    """Of the matrices that run together."""
    largest = 0
    for layer, _ in _parts_run(placement, rank, layout):
        numbers = range(placement.ranks) if layout is Layout.LAYER else (rank,)
        for names in (("attn_q.weight", "attn_k.weight", "attn_v.weight"), ("ffn_gate.weight", "ffn_up.weight")):
            held = [name for name in names if spec.layer_tensor(layer, name) is not None]
            cuts = [layer_slice(spec, placement, layer, name, part) for part in numbers for name in held]
            largest = max(largest, spec.hidden * sum(len(cut.rows) for cut in cuts))
        for name in ("attn_output.weight", "ffn_down.weight"):
            if spec.layer_tensor(layer, name) is not None:
                cuts = [layer_slice(spec, placement, layer, name, part) for part in numbers]
                largest = max(largest, spec.hidden * sum(len(cut.held) for cut in cuts))
    return largest
