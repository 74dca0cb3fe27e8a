"""GGUF files of real models' shapes with random weights, for speed and memory; sizes and mixes follow public ones.

python benchmarks/synthetic_models.py OUT.gguf --shape llama-8b --quant Q4_K

Scales are such that every matrix keeps the size of what it multiplies, so logits are ordinary numbers.
"""

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Quant

POOL_BLOCKS = 1 << 15  # random blocks, repeated: fast, and no two neighbouring rows alike


@dataclass(frozen=True)
class Shape:
    architecture: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_width: int
    feed_forward: int
    vocab: int


SHAPES = {
    "llama-8b": Shape("llama", 32, 4096, 32, 8, 128, 14336, 128256),
    "qwen2-32b": Shape("qwen2", 64, 5120, 40, 8, 128, 27648, 152064),
    "qwen3-32b": Shape("qwen3", 64, 5120, 64, 8, 128, 25600, 151936),
    "small": Shape("llama", 4, 1024, 16, 8, 64, 2048, 4096),
    "tiny": Shape("llama", 2, 256, 2, 2, 32, 1024, 2048),  # 32,768 tokens are read in seconds on two cores
    "small-qwen2": Shape("qwen2", 3, 1024, 8, 4, 128, 2048, 2048),
    "small-qwen3": Shape("qwen3", 3, 512, 8, 4, 128, 1024, 2048),
}
# Bytes in a block that hold its f16 scales, and the spread of a weight where such a scale is 1.
SCALES = {
    Quant.Q4_K: (((0, 1.0), (2, 7.5)), 200.0),
    Quant.Q5_K: (((0, 1.0), (2, 15.5)), 400.0),
    Quant.Q6_K: (((208, 1.0),), 1366.0),
    Quant.Q8_0: (((0, 1.0),), 74.0),
    Quant.Q4_0: (((0, 1.0),), 4.6),
    Quant.Q4_1: (((0, 1.0), (2, -7.5)), 4.6),
    Quant.Q5_0: (((0, 1.0),), 9.2),
    Quant.Q5_1: (((0, 1.0), (2, -15.5)), 9.2),
    Quant.Q2_K: (((80, 1.0), (82, 1.5)), 13.9),
    Quant.Q3_K: (((108, 1.0),), 43.4),
    Quant.IQ4_NL: (((0, 1.0),), 67.2),
    Quant.IQ4_XS: (((0, 1.0),), 1245.0),
    Quant.IQ2_XXS: (((0, 1.0),), 53.4),
    Quant.IQ2_XS: (((0, 1.0),), 55.9),
    Quant.IQ2_S: (((0, 1.0),), 56.4),
    Quant.IQ3_XXS: (((0, 1.0),), 142.0),
    Quant.IQ3_S: (((0, 1.0),), 140.0),
    Quant.IQ1_S: (((0, 1.0),), 7.2),
}
K_TYPES = (Quant.Q4_K, Quant.Q5_K)


def random_matrix(
    generator: np.random.Generator, quant: Quant, rows: int, columns: int
) -> npt.NDArray[np.uint8]:
    """Quantised rows [rows, bytes], weights of spread 1 / sqrt(columns)."""
    block_columns, block_bytes = gguf.GGML_QUANT_SIZES[quant]
    count = rows * columns // block_columns
    pool = random_blocks(generator, quant, count, columns)
    blocks = np.tile(pool, (-(-count // len(pool)), 1))[:count]
    return blocks.reshape(rows, columns // block_columns * block_bytes)


def random_blocks(
    generator: np.random.Generator, quant: Quant, count: int, columns: int
) -> npt.NDArray[np.uint8]:
    """Up to `count` blocks [blocks, bytes], to be repeated, of a matrix of so many columns."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[quant]
    pool = generator.integers(0, 256, (min(count, POOL_BLOCKS), block_bytes), dtype=np.uint8)
    places, spread = SCALES[quant]
    for offset, factor in places:
        scales = generator.uniform(0.7, 1.3, len(pool)) * factor / (spread * columns**0.5)
        pool[:, offset : offset + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return pool


@dataclass(frozen=True)
class Tensor:
    """One tensor to be written; a vector has no `quant`: its values lie around `centre`."""

    name: str
    rows: int
    columns: int
    quant: Quant | None = None
    centre: float = 1.0

    @property
    def byte_count(self) -> int:
        if self.quant is None:
            return 4 * self.columns
        block_columns, block_bytes = gguf.GGML_QUANT_SIZES[self.quant]
        return self.rows * self.columns // block_columns * block_bytes

    def content(self, generator: np.random.Generator) -> npt.NDArray[np.uint8]:
        """Its bytes, or those that are repeated until there are enough."""
        if self.quant is None:
            values = self.centre + 0.02 * generator.standard_normal(self.columns)
            return values.astype(np.float32).view(np.uint8)
        count = self.rows * self.columns // gguf.GGML_QUANT_SIZES[self.quant][0]
        return random_blocks(generator, self.quant, count, self.columns).reshape(-1)


class Writer:
    """One file being written: all that describes its tensors first, then these, several at a time."""

    def __init__(self, path: str, shape: Shape, quant: Quant, seed: int) -> None:
        self._path, self._seed = path, seed
        self._file = gguf.GGUFWriter(path, shape.architecture)
        self._shape, self._quant = shape, quant

    def write(self, name: str) -> None:
        self._facts(name)
        self._vocabulary()
        tensors = list(self._tensors())
        for tensor in tensors:
            self._announce(tensor)
        self._file.write_header_to_file()
        self._file.write_kv_data_to_file()
        self._file.write_ti_data_to_file()
        alignment = self._file.data_alignment
        self._file.close()
        place = -(-os.path.getsize(self._path) // alignment) * alignment
        with open(self._path, "r+b") as file, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            done = []
            for number, tensor in enumerate(tensors):
                done.append(pool.submit(self._fill, file.fileno(), place, number, tensor))
                place += -(-tensor.byte_count // alignment) * alignment
            file.truncate(place)
            for one in done:
                one.result()

    def _announce(self, tensor: Tensor) -> None:
        if tensor.quant is None:
            kind: npt.DTypeLike = np.float32
            shape: tuple[int, ...] = (tensor.columns,)
        else:
            kind, shape = np.uint8, (tensor.rows, tensor.byte_count // tensor.rows)
        self._file.add_tensor_info(tensor.name, shape, np.dtype(kind), tensor.byte_count, tensor.quant)

    def _fill(self, descriptor: int, place: int, number: int, tensor: Tensor) -> None:
        content = memoryview(tensor.content(np.random.default_rng((self._seed, number))).data)
        left = tensor.byte_count
        while left:
            written = os.pwrite(descriptor, content[:left], place)
            if written % len(content):
                content = memoryview(
                    bytes(content[written:]) + bytes(content[:written])
                )  # go on where it stopped
            place, left = place + written, left - written

    @property
    def _mixed(self) -> bool:
        return self._quant in K_TYPES

    def _facts(self, name: str) -> None:
        file, shape = self._file, self._shape
        file.add_name(name)
        file.add_block_count(shape.layers)
        file.add_context_length(131072)
        file.add_embedding_length(shape.hidden)
        file.add_feed_forward_length(shape.feed_forward)
        file.add_head_count(shape.query_heads)
        file.add_head_count_kv(shape.kv_heads)
        file.add_layer_norm_rms_eps(1e-5)
        file.add_rope_freq_base(500000.0)
        file.add_rope_dimension_count(shape.head_width)
        file.add_key_length(shape.head_width)
        file.add_value_length(shape.head_width)
        file.add_vocab_size(shape.vocab)

    def _vocabulary(self) -> None:
        file, vocab = self._file, self._shape.vocab
        file.add_tokenizer_model("llama")
        tokens = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256))]
        file.add_token_list([*tokens, *(b"\xe2\x96\x81t%d" % number for number in range(vocab - 259))])
        file.add_token_scores([0.0] * 259 + [-float(number) for number in range(vocab - 259)])
        file.add_token_types([2, 3, 3] + [6] * 256 + [1] * (vocab - 259))
        file.add_bos_token_id(1)
        file.add_eos_token_id(2)

    def _tensors(self) -> Iterator[Tensor]:
        shape, quant = self._shape, self._quant
        yield Tensor("token_embd.weight", shape.vocab, shape.hidden, quant)
        yield Tensor("output_norm.weight", 1, shape.hidden)
        yield Tensor("output.weight", shape.vocab, shape.hidden, Quant.Q6_K if self._mixed else quant)
        for layer in range(shape.layers):
            yield from self._layer(layer)

    def _layer(self, layer: int) -> Iterator[Tensor]:
        shape, quant, at = self._shape, self._quant, f"blk.{layer}."
        queries, keys = shape.query_heads * shape.head_width, shape.kv_heads * shape.head_width
        # The *_K_M mixes keep half of attn_v and ffn_down in Q6_K.
        more = Quant.Q6_K if self._mixed and layer % 2 == 0 else quant
        yield Tensor(at + "attn_norm.weight", 1, shape.hidden)
        yield Tensor(at + "ffn_norm.weight", 1, shape.hidden)
        if shape.architecture == "qwen3":
            yield Tensor(at + "attn_q_norm.weight", 1, shape.head_width)
            yield Tensor(at + "attn_k_norm.weight", 1, shape.head_width)
        if shape.architecture == "qwen2":
            for name, width in (("q", queries), ("k", keys), ("v", keys)):
                yield Tensor(f"{at}attn_{name}.bias", 1, width, centre=0.0)
        yield Tensor(at + "attn_q.weight", queries, shape.hidden, quant)
        yield Tensor(at + "attn_k.weight", keys, shape.hidden, quant)
        yield Tensor(at + "attn_v.weight", keys, shape.hidden, more)
        yield Tensor(at + "attn_output.weight", shape.hidden, queries, quant)
        yield Tensor(at + "ffn_gate.weight", shape.feed_forward, shape.hidden, quant)
        yield Tensor(at + "ffn_up.weight", shape.feed_forward, shape.hidden, quant)
        yield Tensor(at + "ffn_down.weight", shape.hidden, shape.feed_forward, more)


def write_model(path: str, shape: str, quant: str, seed: int = 1) -> None:
    """Write `path`; raises KeyError for a shape or type that is not known."""
    Writer(path, SHAPES[shape], Quant[quant], seed).write(f"synthetic {shape} {quant}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a GGUF of a real model's shape with random weights.")
    parser.add_argument("out")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--quant", choices=[quant.name for quant in SCALES], default="Q4_K")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    write_model(options.out, options.shape, options.quant, options.seed)


if __name__ == "__main__":
    main()
