"""Values of a model's files that are no numbers are found, and where they are is named."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import _type_traits, dequantize

from gearshift.coordinator.model import non_finite
from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.non_finite import are_finite, first_non_finite
from gearshift.coordinator.model.spec import build_spec
from gearshift.tests.helpers.gguf_builder import build_model

DECODED = sorted(kind.name for kind in (*_type_traits, GGMLQuantizationType.F32, GGMLQuantizationType.F16))


@pytest.mark.parametrize("type_name", DECODED)
def test_blocks_are_numbers_where_the_files_decoder_says_so(type_name: str) -> None:
    """A NaN and an infinity in f16 at every place of a block of ones in turn."""
    kind = GGMLQuantizationType[type_name]
    block_bytes = GGML_QUANT_SIZES[kind][1]
    places = block_bytes - 1 if block_bytes > 1 else 0
    blocks = np.full((2 * places + 1, block_bytes), 1, dtype=np.uint8)
    for place in range(places):
        blocks[2 * place, place : place + 2] = 0x00, 0x7E
        blocks[2 * place + 1, place : place + 2] = 0x00, 0xFC
    with np.errstate(all="ignore"):
        wanted = np.isfinite(dequantize(blocks, kind)).all(axis=1)
    assert wanted[-1]
    assert np.array_equal(are_finite(blocks, type_name), wanted)


@pytest.mark.parametrize(
    ("name", "quant", "row"),
    [("blk.1.ffn_up.weight", "Q8_0", 100), ("blk.0.attn_norm.weight", "F32", 0), ("token_embd.weight", "F16", 255)],
)
def test_the_tensor_and_the_row_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, quant: str, row: int
) -> None:
    path = build_model(tmp_path / "model.gguf", types={name: quant}, quant="Q8_0", shards=2)
    spec = build_spec(resolve_model(str(path)), 64)
    assert first_non_finite(spec) is None
    tensor = spec.tensors[name]
    row_bytes = tensor.byte_count // (tensor.shape[0] if len(tensor.shape) > 1 else 1)
    with open(spec.files[tensor.file].path, "r+b") as file:
        file.seek(tensor.offset + row * row_bytes)
        file.write(np.array([np.nan], np.float32 if quant == "F32" else np.float16).tobytes())
    monkeypatch.setattr(non_finite, "PIECE_BYTES", 1000)  # not whole blocks
    found = first_non_finite(spec)
    assert found is not None
    assert found.startswith(f"{spec.files[tensor.file].path}: row {row} of tensor {name!r} ({quant})")


def test_a_file_that_was_cut_off_since_is_no_reason_to_stop(tmp_path: Path) -> None:
    path = build_model(tmp_path / "model.gguf", quant="Q8_0")
    spec = build_spec(resolve_model(str(path)), 64)
    with open(path, "r+b") as file:
        file.truncate(spec.files[0].byte_count // 2)
    assert first_non_finite(spec) is None
