"""Small GGUF files for tests: whole models with random weights, and single bytes for hostile ones.

    build_model(path, arch="qwen3", layers=3, quant="Q8_0", **{"rope.freq_base": 1e6})

Models are written by the `gguf` package, so that our reader is tested against another hand's writer.
"""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFEndian, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

Number = int | Sequence[int]  # for all layers, or one a layer

# Where the f16 scales of a block lie, and their relation: the `gguf` package cannot quantise these types, so blocks
# are random bytes under scales that centre the weights and give them the size asked for.
_SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q2_K": ((80, 1.0), (82, 1.5)),
    "Q3_K": ((108, 1.0),),
    "Q4_K": ((0, 1.0), (2, 7.5)),
    "Q5_K": ((0, 1.0), (2, 15.5)),
    "Q6_K": ((208, 1.0),),
    **dict.fromkeys(
        ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ4_NL", "IQ4_XS"), ((0, 1.0),)
    ),
}
_ARCHITECTURES_WITH_BIASES = ("qwen2",)
_ARCHITECTURES_WITH_QK_NORMS = ("qwen3", "gemma3")
_ARCHITECTURES_WITH_POST_NORMS = ("gemma3",)
_GLOBAL_KEYS = ("general.", "tokenizer.", "split.")


def build_model(
    path: Path,
    arch: str = "llama",
    layers: int = 2,
    hidden: int = 64,
    heads: Number = 4,
    kv_heads: Number = 2,
    head_width: int = 16,
    feed_forward: Number = 128,
    vocab: int = 256,
    quant: str = "F32",
    seed: int = 0,
    *,
    tied: bool = False,
    biases: bool | None = None,
    types: Mapping[str, str] | None = None,
    tensors: Mapping[str, NDArray[Any] | None] | None = None,
    big_endian: bool = False,
    shards: int = 1,
    **metadata: Any,
) -> Path:
    """Writes a model that loads, unless asked otherwise; returns the path to open (of the first shard, if split).

    `types` gives a type to tensors by the end of their name ("ffn_down.weight"); `tensors` adds or replaces whole
    tensors (None: leaves one out). `metadata` adds, replaces or (None) leaves out keys; the architecture goes before
    all but general., tokenizer. and split. keys. Same arguments, same bytes.
    """
    heads, kv_heads, feed_forward = (_per_layer(one, layers) for one in (heads, kv_heads, feed_forward))
    shapes = _model_shapes(arch, hidden, vocab, tied)
    for layer in range(layers):
        parts = _layer_shapes(
            arch, hidden, heads[layer], kv_heads[layer], head_width, feed_forward[layer], biases
        )
        shapes |= {f"blk.{layer}.{part}": shape for part, shape in parts.items()}
    values = {name: _random(name, shape, seed) for name, shape in shapes.items()} | dict(tensors or {})
    keys: dict[str, Any] = {
        "general.name": path.stem,
        "block_count": layers,
        "context_length": 512,
        "embedding_length": hidden,
        "feed_forward_length": _scalar_if_equal(feed_forward),
        "attention.head_count": _scalar_if_equal(heads),
        "attention.head_count_kv": _scalar_if_equal(kv_heads),
        "attention.key_length": head_width,
        "attention.value_length": head_width,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "none",
    }
    keys |= metadata
    present = {name: value for name, value in values.items() if value is not None}
    typed = {name: _typed(name, value, quant, types or {}, seed) for name, value in present.items()}
    return write_gguf(path, arch, keys, typed, big_endian=big_endian, shards=shards)


def write_gguf(
    path: Path,
    arch: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[NDArray[Any], str]],
    *,
    big_endian: bool = False,
    shards: int = 1,
) -> Path:
    """Writes metadata and tensors (their bytes, and the name of their type); returns the path to open."""
    per_shard = -(-len(tensors) // shards) if shards > 1 else 0
    endian = GGUFEndian.BIG if big_endian else GGUFEndian.LITTLE
    writer = GGUFWriter(path, arch, endianess=endian, split_max_tensors=per_shard)
    for key, value in metadata.items():
        if value is None:
            continue
        name = key if key.startswith(_GLOBAL_KEYS) else f"{arch}.{key}"
        if name == "general.alignment":
            writer.add_custom_alignment(value)
        elif name != "general.architecture":
            writer.add_key_value(name, *_typed_value(value))
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if shards == 1 else path.with_name(f"{path.stem}-00001-of-{shards:05}.gguf")


def string(text: str | bytes) -> bytes:
    """A GGUF string, for files written byte by byte."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def key(name: str | bytes, type_id: int, value: bytes) -> bytes:
    """One metadata entry; `value` is what follows the type."""
    return string(name) + struct.pack("<I", type_id) + value


def tensor(name: str, sizes: Sequence[int], type_id: int = 0, offset: int = 0) -> bytes:
    """One line of the tensor table; `sizes` in the file's order, row length first."""
    head = string(name) + struct.pack("<I", len(sizes))
    return head + struct.pack(f"<{len(sizes)}QIQ", *sizes, type_id, offset)


def raw_gguf(
    keys: Sequence[bytes] = (),
    table: Sequence[bytes] = (),
    *,
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
    data_bytes: int = 0,
) -> bytes:
    """A file from its pieces; counts may be made to lie. Data is zeros, after padding to `alignment`."""
    counts = struct.pack(
        "<IQQ",
        version,
        len(table) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    header = b"GGUF" + counts + b"".join(keys) + b"".join(table)
    padding = -len(header) % alignment if data_bytes else 0
    return header + bytes(padding + data_bytes)


def _per_layer(number: Number, layers: int) -> tuple[int, ...]:
    return (number,) * layers if isinstance(number, int) else tuple(number)


def _scalar_if_equal(numbers: tuple[int, ...]) -> int | list[int]:
    return numbers[0] if len(set(numbers)) == 1 else list(numbers)


def _model_shapes(arch: str, hidden: int, vocab: int, tied: bool) -> dict[str, tuple[int, ...]]:
    head = {} if tied or arch == "gemma3" else {"output.weight": (vocab, hidden)}
    return {"token_embd.weight": (vocab, hidden), **head, "output_norm.weight": (hidden,)}


def _layer_shapes(
    arch: str, hidden: int, heads: int, kv_heads: int, head_width: int, feed_forward: int, biases: bool | None
) -> dict[str, tuple[int, ...]]:
    queries, keys = heads * head_width, kv_heads * head_width
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (queries, hidden),
        "attn_k.weight": (keys, hidden),
        "attn_v.weight": (keys, hidden),
        "attn_output.weight": (hidden, queries),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (feed_forward, hidden),
        "ffn_up.weight": (feed_forward, hidden),
        "ffn_down.weight": (hidden, feed_forward),
    }
    if arch in _ARCHITECTURES_WITH_BIASES if biases is None else biases:
        shapes |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
    if arch in _ARCHITECTURES_WITH_QK_NORMS:
        shapes |= {"attn_q_norm.weight": (head_width,), "attn_k_norm.weight": (head_width,)}
    if arch in _ARCHITECTURES_WITH_POST_NORMS:
        shapes |= {"post_attention_norm.weight": (hidden,), "post_ffw_norm.weight": (hidden,)}
    return shapes


def _generator(name: str, seed: int) -> np.random.Generator:
    # Seeded by name: a model with one tensor more has all the others unchanged.
    return np.random.default_rng([seed, *name.encode()])


def _random(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    noise = _generator(name, seed).standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        return 1 + np.float32(0.1) * noise
    if len(shape) == 1:
        return np.float32(0.1) * noise
    return noise if name.startswith("token_embd") else noise / np.float32(np.sqrt(shape[-1]))


def _typed(
    name: str, value: NDArray[Any], quant: str, types: Mapping[str, str], seed: int
) -> tuple[NDArray[Any], str]:
    kind = next((one for end, one in types.items() if name.endswith(end)), quant if value.ndim > 1 else "F32")
    if value.dtype == np.uint8:  # already in its type's bytes
        return value, kind
    block = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
    assert value.shape[-1] % block == 0, f"{name}: rows of {value.shape[-1]} are no multiple of {kind}'s {block}"
    if kind in _SCALES:
        return _random_blocks(name, value, kind, seed), kind
    return quantize(value, GGMLQuantizationType[kind]), kind


def _random_blocks(name: str, value: NDArray[Any], kind: str, seed: int) -> NDArray[np.uint8]:
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    shape = (*value.shape[:-1], value.shape[-1] // block, block_bytes)
    blocks = _generator(name, seed).integers(0, 256, shape, dtype=np.uint8)
    _set_scales(blocks, kind, 1.0)
    size = float(dequantize(blocks.reshape(-1, block_bytes), GGMLQuantizationType[kind]).std())
    _set_scales(blocks, kind, float(value.std()) / size)
    return blocks.reshape(*value.shape[:-1], -1)


def _set_scales(blocks: NDArray[np.uint8], kind: str, scale: float) -> None:
    for start, relation in _SCALES[kind]:
        blocks[..., start : start + 2] = np.array([scale * relation], dtype="<f2").view(np.uint8)


def _typed_value(value: Any) -> tuple[Any, GGUFValueType] | tuple[Any, GGUFValueType, GGUFValueType]:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return (
            list(value),
            GGUFValueType.ARRAY,
            GGUFValueType.STRING if not value else _typed_value(value[0])[1],
        )
    if isinstance(value, bool):
        return value, GGUFValueType.BOOL
    if isinstance(value, int):
        return value, GGUFValueType.UINT32 if value >= 0 else GGUFValueType.INT32
    if isinstance(value, float):
        return value, GGUFValueType.FLOAT32
    return value, GGUFValueType.STRING
