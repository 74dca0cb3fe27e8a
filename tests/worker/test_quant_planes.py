"""Planes hold exactly what the file holds."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from gearshift.worker.kernels.quant_planes import (
    FORMATS,
    dequantize,
    from_gguf,
    has_planes,
    sort_by_rows,
    stack,
)

ROWS, COLUMNS = 5, 512


def random_rows(type_name: str, rows: int, columns: int, seed: int = 3) -> np.ndarray:
    """Random blocks with finite scales."""
    form = FORMATS[type_name]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows, columns // form.block_columns, form.block_bytes), dtype=np.uint8)
    scale_at = {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2)}.get(type_name, (0,))
    for offset in scale_at:
        scales = generator.uniform(-0.01, 0.01, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, offset : offset + 2] = scales.view(np.uint8).reshape(*blocks.shape[:2], 2)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("type_name", sorted(FORMATS))
def test_planes_dequantise_to_the_same_values_as_the_file(type_name: str) -> None:
    raw = random_rows(type_name, ROWS, COLUMNS)
    wanted = gguf_dequantize(raw, GGMLQuantizationType[type_name])
    found = dequantize(from_gguf(type_name, torch.from_numpy(raw))).numpy()
    np.testing.assert_allclose(found, wanted, rtol=2e-7, atol=1e-9)


@pytest.mark.parametrize("type_name", sorted(FORMATS))
def test_planes_take_no_more_than_three_percent_over_the_file(type_name: str) -> None:
    raw = random_rows(type_name, ROWS, COLUMNS)
    planes = from_gguf(type_name, torch.from_numpy(raw))
    assert raw.nbytes <= planes.byte_count <= raw.nbytes * 1.03
    assert planes.byte_count == round(ROWS * COLUMNS * planes.format.bits_a_column / 8)


@pytest.mark.parametrize("type_name", sorted(FORMATS))
@pytest.mark.parametrize("rows_at_once", [1, 2, 4, ROWS, 100])
def test_rows_sorted_a_few_at_a_time_are_the_same_planes(type_name: str, rows_at_once: int) -> None:
    raw = torch.from_numpy(random_rows(type_name, ROWS, COLUMNS))
    whole = from_gguf(type_name, raw)
    reads: list[int] = []

    def read(first: int, end: int) -> torch.Tensor:
        reads.append(end - first)
        return raw[first:end]

    found = sort_by_rows(type_name, ROWS, rows_at_once, read)
    assert sum(reads) == ROWS
    assert max(reads) <= rows_at_once
    assert (found.rows, found.columns, found.byte_count) == (whole.rows, whole.columns, whole.byte_count)
    for name in ("codes", "high", "scales", "supers"):
        assert torch.equal(getattr(found, name), getattr(whole, name))


@pytest.mark.parametrize("type_name", sorted(FORMATS))
@pytest.mark.parametrize("rows_at_once", [2, ROWS])
def test_rows_are_sorted_into_the_memory_that_is_named(type_name: str, rows_at_once: int) -> None:
    raw, rooms = torch.from_numpy(random_rows(type_name, ROWS, COLUMNS)), list[torch.Tensor]()

    def room(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        rooms.append(torch.empty(shape, dtype=dtype))
        return rooms[-1]

    whole = from_gguf(type_name, raw)
    found = sort_by_rows(type_name, ROWS, rows_at_once, lambda first, end: raw[first:end], room)
    assert found.byte_count == whole.byte_count
    for name, there in zip(("codes", "high", "scales", "supers"), rooms, strict=True):
        assert getattr(found, name) is there
        assert torch.equal(there, getattr(whole, name))


def test_rows_can_be_cut_and_stacked() -> None:
    raw = torch.from_numpy(random_rows("Q5_K", ROWS, COLUMNS))
    whole = from_gguf("Q5_K", raw)
    again = stack([whole.slice_rows(0, 2), whole.slice_rows(2, ROWS)])
    assert torch.equal(dequantize(again), dequantize(whole))


def test_widths_that_are_no_whole_groups_have_no_planes() -> None:
    assert has_planes("Q4_0", 128)
    assert not has_planes("Q4_0", 96)
    assert not has_planes("IQ2_XS", 256)
