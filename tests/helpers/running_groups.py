"""Running groups of workers for tests: one a worker count, kept for the whole session, one model after another."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gearshift.coordinator.driver import Driver
from gearshift.coordinator.driver_settings import DriverSettings
from gearshift.coordinator.group.cluster import Cluster
from gearshift.coordinator.group.load_result import LoadResult
from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.launch.processes.local import local_cluster
from gearshift.proto.ids import ComputeType, KvType
from gearshift.proto.kv import KvFormat
from gearshift.proto.placement.cuts import place


@dataclass
class RunningGroups:
    """`load(path, workers, ...)` gives a driver with that model on that many workers."""

    stack: ExitStack
    device: str = "cpu"
    clusters: dict[int, Cluster] = field(default_factory=dict)
    drivers: dict[int, tuple[object, Driver]] = field(default_factory=dict)
    loaded: dict[int, LoadResult] = field(default_factory=dict)  # of the model that is on so many workers now

    def cluster(self, workers: int) -> Cluster:
        if workers not in self.clusters:
            if self.device == "cuda":
                _need_cards(workers)
            cluster = local_cluster(workers=workers, device=self.device, threads_per_worker=1)
            self.clusters[workers] = self.stack.enter_context(cluster)
        return self.clusters[workers]

    def load(
        self,
        path: Path,
        workers: int,
        *,
        compute_type: ComputeType = ComputeType.F32,
        kv_type: KvType | None = None,
        context_tokens: int = 256,
        max_chunk_tokens: int = 256,
        layer_cuts: tuple[int, ...] | None = None,
        layer_shares: tuple[float, ...] | None = None,
        tensor_shares: tuple[float, ...] | None = None,
        whole_layers: frozenset[int] = frozenset(),
        migrating_layers: frozenset[int] = frozenset(),
        parallel_requests: int = 1,
        shift_in_place: bool = False,
        exact_activations: bool = False,
        fresh: bool = False,
    ) -> Driver:
        key = (
            path, compute_type, kv_type, context_tokens, max_chunk_tokens, layer_cuts, layer_shares, tensor_shares,
            whole_layers, migrating_layers, parallel_requests, shift_in_place, exact_activations,
        )  # fmt: skip
        held = self.drivers.get(workers)
        if held is not None and held[0] == key and not fresh:
            return held[1]
        cluster = self.cluster(workers)
        spec = build_spec(resolve_model(str(path)), context_tokens)
        placement = place(
            spec, workers, layer_cuts=layer_cuts, layer_shares=layer_shares, tensor_shares=tensor_shares,
            whole_layers=whole_layers, migrating_layers=migrating_layers,
        )  # fmt: skip
        settings = DriverSettings(
            context_tokens=context_tokens,
            max_chunk_tokens=max_chunk_tokens,
            compute_type=compute_type,
            kv_format=None if kv_type is None else KvFormat(kv_type, kv_type),
            parallel_requests=parallel_requests,
            shift_in_place=shift_in_place,
            exact_activations=exact_activations,
            swap_blocks=1,
            device=self.device,
            tick_timeout_seconds=60.0 if self.device == "cpu" else 240.0,  # kernels are compiled in the first steps
            answer_timeout_seconds=60.0 if self.device == "cpu" else 240.0,
        )
        driver = Driver(cluster, spec, placement, settings)
        self.loaded[workers] = driver.load()
        self.drivers[workers] = key, driver
        return driver


def _need_cards(workers: int) -> None:
    import torch  # late: tests without cards do without it

    if (cards := torch.cuda.device_count()) < workers:
        pytest.skip(f"{workers} workers take as many cards; here are {cards}")


@contextmanager
def running_groups(device: str = "cpu") -> Iterator[RunningGroups]:
    """Ends all groups on leaving."""
    with ExitStack() as stack:
        yield RunningGroups(stack, device)
