"""Shares for ranks of unequal speed: those kept from before, else measured now and kept."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from ... import __version__
from ...coordinator.costs.cost_model import Costs
from ...coordinator.driver_settings import DriverSettings
from ...coordinator.group.cluster import Group
from ...coordinator.shares.auto_shares import equal_stages, suggested_lengths
from ...coordinator.shares.speed_probe import ProbedShares, alike, probe_shares
from ...proto.model import ModelSpec
from ...proto.reports import Hello
from ..console import note
from ..settings.options import GroupSettings
from ..settings.user_folders import costs_folder

MAX_KEPT_BYTES = 1 << 20  # of a file of shares


def settle_shares(
    group: Group, hellos: Sequence[Hello], spec: ModelSpec, settings: GroupSettings, loading: DriverSettings
) -> GroupSettings:
    """The settings, with shares where they name none and the ranks are not alike. Before a model is loaded.

    Ranks of one kind keep equal shares without being timed. `loading`: device and types to time with.
    """
    layers_open = settings.layer_split is None and settings.layer_shares is None
    parts_open = settings.tensor_shares is None
    if alike(hellos) or not (layers_open or parts_open):
        return settings
    path = _kept_at(hellos, spec, loading)
    found = None if settings.measure else _read(path, group.ranks, len(spec.layers))
    if found is None:
        found = probe_shares(group, spec, loading)
        _keep(path, found)
    note(told_shares(found, len(spec.layers), layers_open, parts_open))
    layers, parts = found.shares.layers, found.shares.parts
    return replace(
        settings,
        layer_shares=tuple(map(float, layers))
        if layers_open and layers is not None
        else settings.layer_shares,
        tensor_shares=parts if parts_open and parts is not None else settings.tensor_shares,
    )


def told_shares(found: ProbedShares, layers: int, layers_open: bool, parts_open: bool) -> str:
    """`layers 20 + 10, parts 0.66 + 0.34: rank 1 reads at 0.5x, writes at 0.5x the speed of the fastest`."""
    ranks = len(found.reading)
    counts = found.shares.layers or equal_stages(layers, ranks)
    parts = found.shares.parts or (1 / ranks,) * ranks
    chosen = []
    if layers_open:
        chosen.append(f"layers {' + '.join(map(str, counts))}")
    if parts_open:
        chosen.append(f"parts {' + '.join(f'{part:.2f}' for part in parts)}")
    speeds = "; ".join(
        f"rank {rank} reads at {reading:.2f}x, writes at {writing:.2f}x"
        for rank, (reading, writing) in enumerate(zip(found.reading, found.writing, strict=True))
        if min(reading, writing) < 1
    )
    return f"{', '.join(chosen)}: measured, {speeds or 'all alike'} the speed of the fastest"


def told_differences(costs: Costs, hellos: Sequence[Hello], layers: int) -> str | None:
    """A word where ranks of one kind, which share equally, were measured to differ by more than noise."""
    if costs.layer_seconds is None or not alike(hellos):
        return None
    found = suggested_lengths(costs.layer_seconds, layers)
    if found is None:
        return None
    speeds, lengths = found
    slowest = speeds.index(min(speeds))
    return (
        f"rank {slowest} was measured at {speeds[slowest]:.2f}x the speed of rank {speeds.index(max(speeds))}, though "
        f"their devices are alike: --layer-share {','.join(map(str, lengths))} would even prompts out"
    )


def _kept_at(hellos: Sequence[Hello], spec: ModelSpec, loading: DriverSettings) -> Path:
    """One file for each model, devices and version."""
    facts = (
        [file.fingerprint for file in spec.files],
        [(hello.device, hello.pace, hello.torch_version) for hello in hellos],
        (loading.device, loading.compute_type, msgspec.to_builtins(loading.kv_format)),
        __version__,
        *(["exact activations"] if loading.exact_activations else []),
    )
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return costs_folder() / f"shares-{digest}.json"


def _read(path: Path, ranks: int, layers: int) -> ProbedShares | None:
    """What is kept there, None where nothing is that can be used."""
    try:
        if not path.is_file():
            return None  # a pipe would be waited for
        with path.open("rb") as file:
            found = msgspec.json.decode(file.read(MAX_KEPT_BYTES), type=ProbedShares)
    except (OSError, msgspec.MsgspecError):
        return None
    counts, parts = found.shares.layers, found.shares.parts
    fits = len(found.reading) == len(found.writing) == ranks
    fits = fits and (counts is None or (len(counts) == ranks and sum(counts) == layers and min(counts) >= 0))
    return (
        found if fits and (parts is None or (len(parts) == ranks and min(parts) >= 0 < sum(parts))) else None
    )


def _keep(path: Path, found: ProbedShares) -> None:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_bytes(msgspec.json.encode(found))
            unfinished.replace(path)  # whole or not at all: other starts may read it now
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
    except OSError as error:
        note(f"measured shares are not kept: {path.parent}: {error.strerror or error}")
