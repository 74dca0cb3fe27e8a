"""GGUF files of real models' shapes with random weights, for speed and memory; sizes and mixes follow public ones.

python benchmarks/synthetic_models.py OUT.gguf --shape llama-8b --quant Q4_K

Scales are such that every matrix keeps the size of what it multiplies, so logits are ordinary numbers.
"""

import argparse
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
    "qwen3-32b": Shape("qwen3", 64, 5120, 64, 8, 128, 25600, 151936),
    "small": Shape("llama", 4, 1024, 16, 8, 64, 2048, 4096),
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
}
K_TYPES = (Quant.Q4_K, Quant.Q5_K)


def random_matrix(generator: np.random.Generator, quant: Quant, rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Quantised rows [rows, bytes], weights of spread 1 / sqrt(columns)."""
    block_columns, block_bytes = gguf.GGML_QUANT_SIZES[quant]
    count = rows * columns // block_columns
    pool = generator.integers(0, 256, (min(count, POOL_BLOCKS), block_bytes), dtype=np.uint8)
    places, spread = SCALES[quant]
    for offset, factor in places:
        scales = generator.uniform(0.7, 1.3, len(pool)) * factor / (spread * columns**0.5)
        pool[:, offset : offset + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    blocks = np.tile(pool, (-(-count // len(pool)), 1))[:count]
    return blocks.reshape(rows, columns // block_columns * block_bytes)


class Writer:
    """One file being written."""

    def __init__(self, path: str, shape: Shape, quant: Quant, seed: int) -> None:
        self._file = gguf.GGUFWriter(path, shape.architecture)
        self._shape, self._quant, self._generator = shape, quant, np.random.default_rng(seed)

    def write(self, name: str) -> None:
        self._facts(name)
        self._vocabulary()
        shape = self._shape
        self._matrix("token_embd.weight", shape.vocab, shape.hidden, self._quant)
        self._vector("output_norm.weight", shape.hidden)
        self._matrix("output.weight", shape.vocab, shape.hidden, Quant.Q6_K if self._mixed else self._quant)
        for layer in range(shape.layers):
            self._layer(layer)
        self._file.write_header_to_file()
        self._file.write_kv_data_to_file()
        self._file.write_tensors_to_file()
        self._file.close()

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

    def _layer(self, layer: int) -> None:
        shape, at = self._shape, f"blk.{layer}."
        queries, keys = shape.query_heads * shape.head_width, shape.kv_heads * shape.head_width
        # The *_K_M mixes keep half of attn_v and ffn_down in Q6_K.
        more = Quant.Q6_K if self._mixed and layer % 2 == 0 else self._quant
        self._vector(at + "attn_norm.weight", shape.hidden)
        self._vector(at + "ffn_norm.weight", shape.hidden)
        if shape.architecture == "qwen3":
            self._vector(at + "attn_q_norm.weight", shape.head_width)
            self._vector(at + "attn_k_norm.weight", shape.head_width)
        self._matrix(at + "attn_q.weight", queries, shape.hidden, self._quant)
        self._matrix(at + "attn_k.weight", keys, shape.hidden, self._quant)
        self._matrix(at + "attn_v.weight", keys, shape.hidden, more)
        self._matrix(at + "attn_output.weight", shape.hidden, queries, self._quant)
        self._matrix(at + "ffn_gate.weight", shape.feed_forward, shape.hidden, self._quant)
        self._matrix(at + "ffn_up.weight", shape.feed_forward, shape.hidden, self._quant)
        self._matrix(at + "ffn_down.weight", shape.hidden, shape.feed_forward, more)

    def _vector(self, name: str, size: int) -> None:
        values = 1.0 + 0.02 * self._generator.standard_normal(size)
        self._file.add_tensor(name, values.astype(np.float32))

    def _matrix(self, name: str, rows: int, columns: int, quant: Quant) -> None:
        self._file.add_tensor(name, random_matrix(self._generator, quant, rows, columns), raw_dtype=quant)


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
