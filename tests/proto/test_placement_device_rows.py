"""The bytes that a plan counts for a GPU are those that the GPU's loader holds."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from gearshift.proto.ids import ComputeType, Layout
from gearshift.proto.placement.cuts import place
from gearshift.proto.placement.device_rows import BLOCKS, PLANES, device_row_bytes, has_planes
from gearshift.proto.placement.device_slack import lost_bytes, packed_bytes, slack_bytes
from gearshift.proto.placement.memory import (
    Holding,
    embedding_bytes,
    ends_bytes,
    held_bytes,
    holding_on,
    part_bytes,
)
from gearshift.tests.helpers.specs import layer_spec, model_spec
from gearshift.worker.kernels import block_types, quant_planes

MEBIBYTE = 1 << 20


@pytest.mark.parametrize("type_name", sorted(quant_planes.FORMATS))
@pytest.mark.parametrize("columns", [256, 768, 5120])
def test_a_row_takes_what_the_planes_take(type_name: str, columns: int) -> None:
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    raw = np.zeros((3, columns // block * block_bytes), dtype=np.uint8)
    planes = quant_planes.from_gguf(type_name, torch.from_numpy(raw))
    assert 3 * device_row_bytes(type_name, columns) == planes.byte_count


def test_the_same_types_and_widths_have_planes_in_plan_and_worker() -> None:
    assert PLANES.keys() == quant_planes.FORMATS.keys()
    for type_name in ("Q4_K", "Q8_0", "Q2_K", "F16", "IQ4_XS"):
        for columns in (0, 32, 64, 96, 256, 320):
            assert has_planes(type_name, columns) == quant_planes.has_planes(type_name, columns)


@pytest.mark.parametrize("type_name", BLOCKS)
def test_a_row_of_blocks_takes_what_it_takes_in_the_file(type_name: str) -> None:
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    raw = torch.zeros((3, 768 // block * block_bytes), dtype=torch.uint8)
    blocks = block_types.blocks_from_gguf(type_name, raw)
    assert (blocks.rows, blocks.columns) == (3, 768)
    assert 3 * device_row_bytes(type_name, 768) == blocks.byte_count == raw.numel()


def test_float_types_and_widths_that_are_no_whole_groups_are_held_in_bf16() -> None:
    assert device_row_bytes("F16", 640) == 1280
    assert device_row_bytes("Q8_0", 96) == 192  # no whole groups of 64


def test_a_gpu_holds_planes_in_bf16_alone() -> None:
    assert [holding_on("cuda", one) for one in (ComputeType.F16, ComputeType.BF16)] == [Holding.PLANES] * 2
    assert holding_on("cuda", ComputeType.F32) is Holding.F32
    halves = [holding_on("cpu", one) for one in (ComputeType.F16, ComputeType.BF16)]
    assert (holding_on("cpu", ComputeType.F32), *halves) == (Holding.F32, Holding.BF16, Holding.BF16)


@pytest.mark.parametrize("holding", list(Holding))
def test_a_ranks_bytes_are_its_parts_and_its_ends(holding: Holding) -> None:
    spec = model_spec([layer_spec(8, 2, 256)] * 5, types="Q8_0", biases=True, head_norms=True)
    placement = place(spec, 2, tensor_shares=(3.0, 1.0))
    for rank in range(2):
        parts = sum(
            part_bytes(spec, placement, layer, part, holding)
            for layer in range(5)
            for part in placement.parts_held(layer, rank)
        )
        assert held_bytes(spec, placement, rank, holding) == parts + ends_bytes(spec, placement, rank, holding)


def test_a_layer_that_stays_whole_costs_its_owner_alone() -> None:
    spec = model_spec([layer_spec(8, 2, 256, key_width=32)] * 4, types="Q8_0")
    cut, whole = place(spec, 2), place(spec, 2, whole_layers=frozenset({0, 1, 2, 3}))
    layer = part_bytes(spec, whole, 0, 0, Holding.PLANES)
    assert part_bytes(spec, whole, 0, 1, Holding.PLANES) == 0
    for rank in range(2):
        ends = ends_bytes(spec, whole, rank, Holding.PLANES)
        assert held_bytes(spec, whole, rank, Holding.PLANES) == 2 * layer + ends
        assert held_bytes(spec, cut, rank, Holding.PLANES) == 3 * layer + ends


def test_the_embedding_keeps_its_planes_or_float_type_in_host_memory() -> None:
    def embedding(type_name: str, width: int = 256) -> int:
        types = {"token_embd.weight": type_name}
        spec = model_spec([layer_spec()], hidden=width, vocab=100, types=lambda _, name: types.get(name, "F32"))
        return embedding_bytes(spec)

    assert embedding("Q4_K") == 100 * 148
    assert embedding("F16") == 100 * 512
    assert embedding("Q2_K") == 100 * 84
    assert embedding("NVFP4") == 100 * 144
    assert embedding("Q8_0", 96) == 100 * 384  # no whole groups of 64: expanded to f32


def test_large_tensors_lose_the_rest_of_their_last_piece_where_it_is_too_small_to_split() -> None:
    assert lost_bytes(9 * MEBIBYTE + 1) == 0
    assert lost_bytes(12 * MEBIBYTE) == 0
    assert lost_bytes(11 * MEBIBYTE) == MEBIBYTE
    assert lost_bytes(11 * MEBIBYTE + 1) == MEBIBYTE - 1
    assert lost_bytes(11 * MEBIBYTE - 1) == 0  # above 1 MiB: split off and used


def test_matrices_that_stay_lose_the_rest_of_one_piece_and_those_that_migrate_the_rest_of_each() -> None:
    # 5120 x 5120 in F16 is 50 MiB, held as one tensor for each of q, k and v: halves are 25 MiB. The others are small.
    large = model_spec([layer_spec(64, 64, 64, key_width=80)], hidden=5120, vocab=8, types="F16")
    head, forward = 8 // 2 * 5120 * 2, 3 * 64 // 2 * 5120 * 2
    placement = place(large, 2, layer_cuts=(1,))
    assert packed_bytes(large, placement, 1) == 4 * 25 * MEBIBYTE + forward + head
    assert slack_bytes(large, placement, 1) == 2 * MEBIBYTE - forward - head
    migrating = place(large, 2, layer_cuts=(1,), migrating_layers=frozenset({0}))
    assert packed_bytes(large, migrating, 1) == head
    assert slack_bytes(large, migrating, 1, Layout.TENSOR) == 4 * MEBIBYTE + 2 * MEBIBYTE - head
