"""Matrices kept as GGUF's own blocks: what the kernels know of the types, and how work is shared."""

import numpy as np
import pytest
import torch
from gguf import quants

from gearshift.proto.placement.device_rows import PLANES, has_blocks
from gearshift.tests.helpers.block_rows import random_block_rows
from gearshift.worker.kernels.block_decoders import DECODERS
from gearshift.worker.kernels.block_ops import sharing_warps, sources_of
from gearshift.worker.kernels.block_source import ROW_WARPS, Kernel, batch_warps, shared_bytes, source
from gearshift.worker.kernels.block_types import (
    BLOCK_FORMATS,
    blocks_from_gguf,
    expanded_blocks,
    stack_blocks,
)
from gearshift.worker.kernels.codebooks import grid_words, table_words


@pytest.mark.parametrize("type_name", sorted(BLOCK_FORMATS))
def test_a_type_kept_as_blocks_has_a_decoder_and_no_planes(type_name: str) -> None:
    assert type_name in DECODERS
    assert type_name not in PLANES


def test_widths_that_are_no_whole_blocks_have_none() -> None:
    assert has_blocks("IQ4_NL", 96)
    assert not has_blocks("IQ4_XS", 96)
    assert not has_blocks("IQ4_XS", 0)
    assert not has_blocks("Q4_K", 256)


def test_rows_of_blocks_can_be_cut_and_stacked() -> None:
    raw = torch.from_numpy(random_block_rows("IQ3_XXS", 5, 512))
    whole = blocks_from_gguf("IQ3_XXS", raw)
    again = stack_blocks([whole.slice_rows(0, 2), whole.slice_rows(2, 5)])
    assert (again.rows, again.columns, again.byte_count) == (5, 512, raw.numel())
    assert torch.equal(again.data, raw)
    assert torch.equal(expanded_blocks(whole.slice_rows(3, 4)), expanded_blocks(whole)[3:4])


@pytest.mark.parametrize("type_name", ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M"])
def test_entries_of_eight_number_the_values_of_the_codebook(type_name: str) -> None:
    form = getattr(quants, type_name)
    numbers = np.array(grid_words(type_name), dtype=np.uint32)[:, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15
    assert np.array_equal(np.array(form.grid_map)[numbers], form.grid.reshape(form.grid_shape))


@pytest.mark.parametrize("type_name", ["IQ3_XXS", "IQ3_S"])
def test_entries_of_four_are_the_values_of_the_codebook(type_name: str) -> None:
    form = getattr(quants, type_name)
    values = np.array(grid_words(type_name), dtype="<u4").view(np.uint8).reshape(-1, 4)
    assert np.array_equal(values, form.grid.reshape(form.grid_shape))


def test_tables_of_four_bits_are_those_of_the_gguf_package() -> None:
    for type_name in ("IQ4_NL", "MXFP4", "NVFP4"):
        assert BLOCK_FORMATS[type_name].table == getattr(quants, type_name).kvalues
    assert BLOCK_FORMATS["IQ4_XS"].table == quants.IQ4_NL.kvalues
    assert table_words((1, -1, 0, 127)) == [0x7F00FF01]


@pytest.mark.parametrize("kernel", list(Kernel))
def test_tables_and_tiles_fit_what_a_kernel_may_have_without_asking(kernel: Kernel) -> None:
    assert max(shared_bytes(form, kernel) for form in BLOCK_FORMATS.values()) <= 48 << 10


def test_sources_of_two_types_or_kernels_are_never_the_same() -> None:
    sources = [source(form, kernel) for form in BLOCK_FORMATS.values() for kernel in Kernel]
    assert len(set(sources)) == len(sources)


@pytest.mark.parametrize("exact", [False, True])
def test_all_kernels_that_steps_and_prompts_take_are_compiled_ahead_each_once(exact: bool) -> None:
    kernels = (Kernel.EXPAND_F32,) if exact else (Kernel.ROW, Kernel.BATCH_8, Kernel.BATCH_16)
    forms = BLOCK_FORMATS["IQ2_S"], BLOCK_FORMATS["Q2_K"]
    wanted = {source(form, kernel) for form in forms for kernel in (*kernels, Kernel.EXPAND_F16)}
    found = sources_of(["IQ2_S", "Q2_K", "IQ2_S"], torch.float16, exact)
    assert set(found) == wanted
    assert len(found) == len(wanted)


@pytest.mark.parametrize(("rows", "units"), [(14336, 128), (4096, 448), (512, 128), (64, 8), (1, 1), (151936, 160)])
def test_few_rows_are_shared_by_warps_that_all_have_columns(rows: int, units: int) -> None:
    sharing = sharing_warps(rows, units)
    assert sharing in (1, 2, 4, 8)
    assert ROW_WARPS % sharing == 0
    assert sharing == 1 or 32 * (sharing - 1) < units
    assert sharing > 1 or rows >= 8192 or units < 64


@pytest.mark.parametrize("columns", [32, 256, 416, 4096, 27648])
def test_every_warp_of_a_batch_has_columns(columns: int) -> None:
    assert 1 <= batch_warps(columns) <= -(-columns // 256)
