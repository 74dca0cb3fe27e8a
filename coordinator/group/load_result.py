"""What came of loading a model."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...proto.ids import ComputeType
from ...proto.kv import KvFormat
from ...proto.reports import ModelLoaded


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What the workers allocated, by rank."""

    seconds: float
    compute_type: ComputeType
    kv_format: KvFormat
    weight_bytes: tuple[int, ...]
    kv_bytes: tuple[int, ...]
    without_nccl: bool = False

    @classmethod
    def of(cls, loaded: Sequence[ModelLoaded], seconds: float) -> "LoadResult":
        """From all ranks' reports, by rank; they chose types alike."""
        return cls(
            seconds=seconds,
            compute_type=loaded[0].compute_type,
            kv_format=loaded[0].kv_format,
            weight_bytes=tuple(report.weight_bytes for report in loaded),
            kv_bytes=tuple(report.kv_bytes for report in loaded),
            without_nccl=any(report.without_nccl for report in loaded),
        )
