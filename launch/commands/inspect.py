"""`gearshift inspect`: what is in a model file, and where it would lie on S workers. Starts no worker."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...proto.errors import UnsupportedModelError
from ...proto.shown import printable, printable_lines, shortened
from ...proto.words import counted, plural
from ..console import stdout_console, warn
from ..settings import flags
from ..settings.options import GroupSettings, group_settings
from ..start.models import open_files

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from ...coordinator.model.files import ModelFiles
    from ...proto.model import ModelSpec
    from ...proto.placement.memory import RankPlan
    from ...proto.placement.plan import Placement

EXAMPLES = """\
gearshift inspect demo

gearshift inspect demo --workers 3 --tensors

gearshift inspect model.gguf --workers 2 --layer-share 3,1 --json
"""

LISTED_ELEMENTS = 8  # of a metadata array
TEXT_CHARACTERS = 100  # of a metadata string

Tensors = Annotated[
    bool, typer.Option("--tensors", help="List every tensor, not only the count of each type.")
]


def inspect(
    model: flags.Model,
    workers: flags.Workers = None,
    layer_split: flags.LayerSplit = None,
    layer_share: flags.LayerShare = None,
    tensor_share: flags.TensorShare = None,
    tensors: Tensors = False,
    as_json: flags.Json = False,
) -> None:
    """Show metadata, tensors and their types, and the parts that S workers would hold."""
    settings = group_settings(
        workers=workers, layer_split=layer_split, layer_share=layer_share, tensor_share=tensor_share
    )
    files = open_files(model)
    facts: dict[str, Any] = {
        "files": [
            {"path": one.path, "bytes": one.byte_count, "fingerprint": one.fingerprint} for one in files.facts
        ],
        "metadata": {key: _shortened(value) for key, value in files.metadata.items()},
        "tensor_types": _types(files),
        "tensors": [
            {"name": one.name, "type": one.type_name, "shape": list(one.shape), "bytes": one.byte_count}
            for one in files.tensors().values()
        ],
    }
    try:
        facts["parts"] = _parts(files, settings)
    except UnsupportedModelError as error:
        # The file itself is sound and can be shown; only running it is refused.
        facts["parts"] = []
        warn(str(error))
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
    else:
        _show(facts, settings.workers, tensors)


def _parts(files: "ModelFiles", settings: GroupSettings) -> list[dict[str, Any]]:
    from ...coordinator.model.spec import build_spec
    from ...proto.placement.cuts import place
    from ...proto.placement.memory import describe

    spec = build_spec(files)
    placement = place(
        spec,
        settings.workers,
        layer_cuts=settings.layer_split,
        layer_shares=settings.layer_shares,
        tensor_shares=settings.tensor_shares,
    )
    return [_part_facts(spec, placement, plan) for plan in describe(spec, placement)]


def _part_facts(spec: "ModelSpec", placement: "Placement", plan: "RankPlan") -> dict[str, Any]:
    from ...proto.placement.memory import Holding, held_bytes

    def held(holding: Holding) -> int:
        return held_bytes(spec, placement, plan.rank, holding)

    return {
        "rank": plan.rank,
        "layers": [plan.layers.first, plan.layers.end],
        "query_heads": [plan.query_heads.fewest, plan.query_heads.most],
        "kv_heads": [plan.kv_heads.fewest, plan.kv_heads.most],
        "feed_forward": [plan.feed_forward.fewest, plan.feed_forward.most],
        "vocab": [plan.vocab.first, plan.vocab.end],
        "share": plan.share,
        "file_bytes": plan.file_bytes,
        "f32_bytes": held(Holding.F32),
        "bf16_bytes": held(Holding.BF16),
        "gpu_bytes": held(Holding.PLANES),
    }


def _types(files: "ModelFiles") -> dict[str, dict[str, int]]:
    types: dict[str, dict[str, int]] = {}
    for tensor in files.tensors().values():
        entry = types.setdefault(tensor.type_name, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += tensor.byte_count
    return types


def _shortened(value: Any) -> Any:
    """A metadata value that fits a line: long arrays are told by length and first elements."""
    if isinstance(value, str):
        # Bytes that are not UTF-8 are kept as surrogates, which no output can encode.
        text = value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return (
            text if len(text) <= TEXT_CHARACTERS else f"{text[:TEXT_CHARACTERS]}... ({len(text)} characters)"
        )
    if isinstance(value, int | float):
        return value if value == value and abs(value) != float("inf") else str(value)
    first = [
        _shortened(one) for one in (value[:LISTED_ELEMENTS] if isinstance(value, list) else _plain(value))
    ]
    return first if len(value) <= LISTED_ELEMENTS else {"length": len(value), "first": first}


def _plain(values: Any) -> list[Any]:
    return list(values[:LISTED_ELEMENTS].tolist())


def _show(facts: dict[str, Any], workers: int, list_tensors: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    console = stdout_console()
    for file in facts["files"]:
        console.print(Text(f"{printable(file['path'])}  {file['bytes']:,} bytes"))
    metadata = Table("key", "value", title="metadata", title_justify="left")
    for key, value in facts["metadata"].items():
        metadata.add_row(_cell(key), Text(printable_lines(_told_value(value))))
    console.print(metadata)
    types = Table("type", "tensors", "bytes", title="tensor types", title_justify="left")
    for name, entry in facts["tensor_types"].items():
        types.add_row(name, str(entry["tensors"]), f"{entry['bytes']:,}")
    console.print(types)
    if list_tensors:
        listing = Table("tensor", "type", "shape", "bytes", title="tensors", title_justify="left")
        for one in facts["tensors"]:
            listing.add_row(
                _cell(one["name"]), one["type"], "x".join(map(str, one["shape"])), f"{one['bytes']:,}"
            )
        console.print(listing)
    if facts["parts"]:
        console.print(_parts_table(facts["parts"], workers))


def _cell(name: str) -> "Text":
    """A stranger's name: a terminal must not obey it."""
    from rich.text import Text

    return Text(printable(shortened(name, TEXT_CHARACTERS)))


def _told_value(value: Any) -> str:
    """A shortened metadata value for a person."""
    match value:
        case {"length": int(length), "first": list(first)}:
            return f"{length:,} {plural(length, 'value')}: {', '.join(map(str, first))}, ..."
        case list():
            return ", ".join(map(str, value))
        case _:
            return str(value)


def _parts_table(parts: list[dict[str, Any]], workers: int) -> "Table":
    from rich.table import Table

    table = Table("part", title=f"parts for {counted(workers, 'worker')}", title_justify="left")
    for part in parts:
        table.add_column(f"rank {part['rank']}", justify="right")
    table.add_row("layers owned as a stage", *(_half_open(part["layers"]) for part in parts))
    for label, key in (
        ("query heads", "query_heads"),
        ("kv heads", "kv_heads"),
        ("feed forward", "feed_forward"),
    ):
        table.add_row(f"{label} of every layer", *(_spread(part[key]) for part in parts))
    table.add_row("vocabulary", *(_half_open(part["vocab"]) for part in parts))
    table.add_row("share of the layers held", *(f"{part['share']:.1%}" for part in parts))
    for label, key in (
        ("in the file's types", "file_bytes"),
        ("in bf16", "bf16_bytes"),
        ("in f32", "f32_bytes"),
        ("on a GPU", "gpu_bytes"),
    ):
        table.add_row(f"MiB held {label}", *(f"{part[key] / 2**20:,.1f}" for part in parts))
    return table


def _half_open(ends: list[int]) -> str:
    return "none" if ends[0] == ends[1] else f"{ends[0]}..{ends[1] - 1}"


def _spread(ends: list[int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
