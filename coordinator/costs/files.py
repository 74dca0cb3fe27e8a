"""Costs in a JSON file: docs/costs.md has the form. Whatever is wrong in one is an `InputError` that names it."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isinf
from pathlib import Path
from typing import NoReturn

import msgspec

from ...proto.errors import InputError
from ...proto.shown import shortened, shown
from ...proto.words import counted
from .cost_model import ChunkCost, Costs, LayerSeconds

FORMAT = 1
MAX_FILE_BYTES = 4 << 20
POSITIVE = "bytes_per_second"  # divides: at least LEAST_SPEED; all other numbers may be 0
LEAST_SPEED = 1e-3
MOST = 1e15  # of any number: beyond it no device is, and sums and products of such still have digits
MOST_OVERHEAD_SECONDS = 1e6  # of what is beside chunks, which is added to each and taken off again
MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class CostFile:
    """`facts`: what the costs were measured on, for people and for whoever has to know whether they still hold."""

    costs: Costs
    facts: Mapping[str, object]


def write_costs(path: Path, costs: Costs, facts: Mapping[str, object]) -> None:
    """Write them, whole or not at all: a file of that name stays as it was until the new one is complete.

    Of a link, where it leads. Raises `InputError` where it cannot be written, and for a device or a pipe.
    """
    path = Path(os.path.realpath(path))
    text = json.dumps({"gearshift_costs": FORMAT, "facts": facts, "costs": costs_to_json(costs)}, indent=1) + "\n"
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"cannot write {path}: no plain file")  # another file would come into its place
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None


def read_costs(path: Path) -> Costs:
    """The costs of a file. Raises `InputError` that names file and field."""
    return read_cost_file(path).costs


def read_cost_file(path: Path) -> CostFile:
    """As `read_costs`, with the facts."""
    table = _json_table(path)
    if table.get("gearshift_costs") is True or table.get("gearshift_costs") != FORMAT:
        found = table.get("gearshift_costs")
        raise InputError(f"{path} holds no costs: \"gearshift_costs\" must be {FORMAT}, not {shown(found)}")
    facts = table.get("facts", {})
    if not isinstance(facts, dict):
        raise InputError(f"{path}: facts must be an object")
    if unknown := table.keys() - {"gearshift_costs", "facts", "costs"}:
        raise InputError(f"{path}: there is no field {shortened(min(unknown))}")
    if "costs" not in table:
        raise InputError(f"{path}: there is no field costs")
    try:
        return CostFile(costs_from_json(table["costs"]), facts)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def costs_to_json(costs: Costs) -> dict[str, object]:
    """What `json.dumps` takes."""
    table: dict[str, object] = msgspec.to_builtins(costs)
    return table


def costs_from_json(table: object) -> Costs:
    """The inverse of `costs_to_json`; what is optional there may be left out. `InputError` names the field."""
    try:
        costs = msgspec.convert(table, Costs)
    except msgspec.ValidationError as error:
        raise InputError(_named(str(error))) from None
    except UnicodeEncodeError:  # msgspec's own, before it has looked for what should be there
        raise InputError("costs: a text in it is not Unicode") from None
    _refuse_unknown(table, costs_to_json(costs), "costs")
    for name, value in _numbers(costs_to_json(costs), "costs"):
        least = LEAST_SPEED if name.endswith(POSITIVE) else 0
        most = MOST_OVERHEAD_SECONDS if name.startswith("costs.overhead") else MOST
        if not least <= value <= most:
            raise InputError(f"{name} must be a number from {least} to {most:g}")
    _check_ranks(costs)
    _check_times(costs)
    return costs


def _check_times(costs: Costs) -> None:
    """An empty stage takes none, but a prompt does: what it takes divides."""
    if not any(stage.seconds(0, 1) > 0 for stage in costs.stages):
        raise InputError("costs.stages: a chunk must take some time on one of them at least")
    if costs.tensor_prefill is not None and not costs.tensor_prefill.seconds(0, 1) > 0:
        raise InputError("costs.tensor_prefill: a chunk must take some time")


def _check_ranks(costs: Costs) -> None:
    ranks = len(costs.stages)
    if not 1 <= ranks <= MOST_RANKS:
        raise InputError(f"costs.stages must have an entry for each worker, 1 to {MOST_RANKS} of them, not {ranks}")
    if costs.layer_seconds is not None:
        for name, values in _by_rank(costs.layer_seconds):
            if len(values) != ranks:
                raise InputError(f"costs.layer_seconds{name} must have an entry for each of {counted(ranks, 'stage')}")


def _by_rank(found: LayerSeconds) -> Iterator[tuple[str, tuple[float, ...] | tuple[ChunkCost, ...]]]:
    yield ".tensor_shares", found.tensor_shares
    yield ".head_step_seconds", found.head_step_seconds
    for index, kind in enumerate(found.kinds):
        yield f".kinds[{index}].whole", kind.whole
        yield f".kinds[{index}].part_chunk", kind.part_chunk
        yield f".kinds[{index}].part_step_seconds", kind.part_step_seconds


def _json_table(path: Path) -> dict[str, object]:
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"cannot read {path}: no plain file")  # a pipe would be waited for
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{path} is longer than {MAX_FILE_BYTES >> 20} MiB")
    try:
        table = json.loads(data.decode(), parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise InputError(f"{path} holds no costs: it must be a JSON object")
    return table


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _finite(word: str) -> float:
    """What `json.dumps` writes as JSON again: a float beyond all others it would not."""
    if isinf(value := float(word)):
        raise ValueError(f"{word} is beyond all floats")
    return value


def _named(message: str) -> str:
    """msgspec's words, its path as a field's name: "Expected `float`, got `str` - at `$.stages[0].per_chunk`"."""
    what, separator, where = message.partition(" - at `$")
    name = "costs" + where.rstrip("`") if separator else "costs"
    return f"{name}: {what[:1].lower()}{what[1:]}"


def _refuse_unknown(given: object, known: object, name: str) -> None:
    """What was left out on the way in and out again is what nobody knows."""
    if isinstance(given, dict) and isinstance(known, dict):
        for key, value in given.items():
            if key not in known:
                raise InputError(f"there is no field {name}.{shortened(key)}")
            _refuse_unknown(value, known[key], f"{name}.{key}")
    elif isinstance(given, list) and isinstance(known, list | tuple):
        for index, (one, other) in enumerate(zip(given, known, strict=False)):
            _refuse_unknown(one, other, f"{name}[{index}]")


def _numbers(table: object, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(table, dict):
        for key, value in table.items():
            yield from _numbers(value, f"{name}.{key}")
    elif isinstance(table, list | tuple):
        for index, value in enumerate(table):
            yield from _numbers(value, f"{name}[{index}]")
    elif isinstance(table, int | float):
        yield name, table
