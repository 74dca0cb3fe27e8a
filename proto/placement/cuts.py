"""Makes a `Placement`: stages of layers, and the parts of every layer and of the head."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import ceil

from ..errors import InputError, UnsupportedModelError
from ..model import LayerSpec, ModelSpec, TensorInfo
from ..ranges import ColumnRange, HeadRange, LayerRange, VocabRange
from ..words import counted
from .plan import LayerCut, PartCut, Placement
from .quant_blocks import block_columns, file_bytes
from .shares import Grid, Shares, aligned_unit, apportion, boundaries, normalise

ALIGNED_COLUMNS = (32, 8)  # preferred units of float feed-forward widths, in elements
ALIGNED_ROWS = (64, 32, 8)  # preferred units of the vocab

Run = tuple[int, int]  # [first, end)


def place(
    spec: ModelSpec,
    ranks: int,
    *,
    layer_cuts: tuple[int, ...] | None = None,
    layer_shares: tuple[float, ...] | None = None,
    tensor_shares: tuple[float, ...] | None = None,
    whole_layers: frozenset[int] = frozenset(),
    migrating_layers: frozenset[int] = frozenset(),
) -> Placement:
    """Where a model lies on `ranks` workers.

    Stages follow `layer_cuts` (first layer of every stage but the first), or `layer_shares`, or are equal; parts
    follow `tensor_shares` or are equal. Shares are ratios. Stages and parts may be empty. `whole_layers` are not cut:
    their owner's part is the whole layer, in both layouts. `migrating_layers` are cut, and lie where one layout needs
    them at a time. Raises `InputError` that names the bad value, `UnsupportedModelError` for a layer that cannot be
    cut.
    """
    if ranks < 1:
        raise InputError(f"at least one worker is needed, not {ranks}")
    if layer_cuts is not None and layer_shares is not None:
        raise InputError("--layer-split and --layer-share: give one of them, not both")
    layers = len(spec.layers)
    if layer_cuts is not None:
        ends = (*_checked_cuts(layer_cuts, ranks, layers), layers)
    else:
        ends = boundaries(layers, normalise(layer_shares, ranks, "layer"))
    shares = normalise(tensor_shares, ranks, "tensor")
    rows = aligned_unit(spec.vocab, shares, ALIGNED_ROWS, ragged_end=True)
    stages = tuple(LayerRange(first, end) for first, end in pairwise((0, *ends)))
    for layer in sorted(migrating_layers):
        if layer in whole_layers or not 0 <= layer < layers:
            raise InputError(f"layer {layer} cannot migrate: it is no cut layer of the model's {layers}")
    return Placement(
        stages=stages,
        layers=_layer_cuts(spec, shares, _owners(stages, whole_layers, layers)),
        vocab=tuple(VocabRange(*run) for run in pairwise((0, *boundaries(spec.vocab, shares, rows)))),
        migrating=tuple(sorted(migrating_layers)) if ranks > 1 else (),
    )


def _checked_cuts(cuts: tuple[int, ...], ranks: int, layers: int) -> tuple[int, ...]:
    shown = _shown(cuts)
    if len(cuts) != ranks - 1:
        wanted = f"{counted(ranks - 1, 'cut point')} for {counted(ranks, 'worker')}"
        raise InputError(f"--layer-split {shown}: give {wanted}, not {len(cuts)}")
    for cut in cuts:
        if not 0 <= cut <= layers:
            raise InputError(f"--layer-split {shown}: {cut} is not within the model's 0 to {counted(layers, 'layer')}")
    refuse_unordered(cuts)
    return cuts


def refuse_unordered(cuts: tuple[int, ...]) -> None:
    """`InputError` for cut points that no model could have, however many layers it has."""
    if cuts and cuts[0] < 0:
        raise InputError(f"--layer-split {_shown(cuts)}: {cuts[0]} is below 0")
    for before, cut in pairwise(cuts):
        if cut <= before:
            fault = "is given twice" if cut == before else f"comes after {before}"
            raise InputError(f"--layer-split {_shown(cuts)}: {cut} {fault}; cut points must rise")


def _shown(cuts: tuple[int, ...]) -> str:
    return ",".join(map(str, cuts))


def _owners(stages: Sequence[LayerRange], whole_layers: frozenset[int], layers: int) -> dict[int, int]:
    """The stage of each layer that is not cut."""
    for layer in sorted(whole_layers):
        if not 0 <= layer < layers:
            raise InputError(f"layer {layer} cannot stay whole: the model has layers 0 to {layers - 1}")
    return {layer: stage for stage, held in enumerate(stages) for layer in held if layer in whole_layers}


def _layer_cuts(spec: ModelSpec, shares: Shares, owners: Mapping[int, int]) -> tuple[LayerCut, ...]:
    """`owners`: who has the whole of a layer. The others are cut as if these were not there."""
    cut_layers = [layer for layer in range(len(spec.layers)) if layer not in owners]
    heads = [_head_grid(spec, layer, shares) for layer in cut_layers]
    columns = [_feed_forward_grid(spec, layer, shares) for layer in cut_layers]
    grids = zip(heads, columns, apportion(heads, shares), apportion(columns, shares), strict=True)
    cuts = {
        layer: _parts(
            spec.layers[layer], _runs(head_units, head.unit_width), _runs(column_units, column.unit_width)
        )
        for layer, (head, column, head_units, column_units) in zip(cut_layers, grids, strict=True)
    }
    for layer, owner in owners.items():
        facts, all_or_none = spec.layers[layer], [int(rank == owner) for rank in range(len(shares))]
        _head_grid(spec, layer, shares)  # refuses what no rank could run
        cuts[layer] = _parts(facts, _runs(all_or_none, facts.query_heads), _runs(all_or_none, facts.feed_forward))
    return tuple(cuts[layer] for layer in range(len(spec.layers)))


def _parts(facts: LayerSpec, queries: Sequence[Run], feed_forward: Sequence[Run]) -> LayerCut:
    group = facts.query_heads // max(1, facts.kv_heads)
    heads = [HeadRange(*run) for run in queries]
    runs = zip(heads, feed_forward, strict=True)
    return LayerCut(tuple(PartCut(head, _cover(head, group), ColumnRange(*run)) for head, run in runs))


def _runs(units: Sequence[int], unit_width: int) -> list[Run]:
    return [(first * unit_width, end * unit_width) for first, end in pairwise((0, *accumulate(units)))]


def _cover(query: HeadRange, group: int) -> HeadRange:
    """The KV heads that these query heads read."""
    return HeadRange(query.first // group, -(-query.end // group)) if len(query) else HeadRange(0, 0)


def _head_grid(spec: ModelSpec, layer: int, shares: Shares) -> Grid:
    facts = spec.layers[layer]
    if facts.query_heads % max(1, facts.kv_heads) or (facts.query_heads and not facts.kv_heads):
        raise UnsupportedModelError(
            f"layer {layer}: {facts.query_heads} query heads do not fall into groups over {facts.kv_heads} KV heads"
        )
    whole = [spec.layer_tensor(layer, name) for name in ("attn_q.weight", "attn_output.weight")]
    unit = _head_unit(facts.query_heads, facts.kv_heads, shares)
    return _grid(facts.query_heads, unit, whole)


def _head_unit(query_heads: int, kv_heads: int, shares: Shares) -> int:
    """Query heads in a unit: a whole KV group, or one where groups are too coarse.

    They are too coarse where a rank that works would get none, or where one is over its share by more than half a
    group: all ranks wait for it in every layer. A group cut in two costs its KV head twice.
    """
    working = [share for share in shares if share]
    if not query_heads or min(working) * kv_heads < 1:
        return 1
    group = query_heads // kv_heads
    overload = max(ceil(share * kv_heads) * group - share * query_heads for share in working)
    return group if 2 * overload <= group else 1


def _feed_forward_grid(spec: ModelSpec, layer: int, shares: Shares) -> Grid:
    width = spec.layers[layer].feed_forward
    down = spec.layer_tensor(layer, "ffn_down.weight")
    block = 1 if down is None else block_columns(down.type_name)
    if width % block:
        raise UnsupportedModelError(
            f"layer {layer}: {width} columns of ffn_down are not whole blocks of {block}"
        )
    # A row split falls on quant blocks; where there are none, on widths that keep rows of the parts aligned.
    unit = block if block > 1 else aligned_unit(width, shares, ALIGNED_COLUMNS)
    whole = [spec.layer_tensor(layer, name) for name in ("ffn_gate.weight", "ffn_up.weight")]
    return _grid(width, unit, [*whole, down])


def _grid(width: int, unit: int, tensors: Sequence[TensorInfo | None]) -> Grid:
    """`tensors` are cut along this width, in rows or columns: each unit takes its share of their file bytes."""
    units = width // unit
    total = sum(_whole_file_bytes(tensor) for tensor in tensors if tensor is not None)
    return Grid(units=units, unit_width=unit, unit_bytes=max(1, total // max(1, units)))


def _whole_file_bytes(tensor: TensorInfo) -> int:
    rows, columns = tensor.shape
    return rows * file_bytes(tensor.type_name, columns)
