"""A second opinion on random models: their logits in float64 numpy, from first principles, read by another reader.

One position at a time over whole sequences, with explicit masks and no cache; nothing of the engine is used. Knows
llama, qwen2, qwen3 and gemma3, rope divisors and linear scaling; yarn is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ReferenceModel:
    """Weights by GGUF name in float64, and the metadata without the architecture's prefix."""

    architecture: str
    metadata: dict[str, Any]
    tensors: dict[str, Array]

    def logits(self, ids: Sequence[int], *, ignore_windows: bool = False) -> Array:
        """[tokens, vocab] of a whole sequence."""
        hidden_TD = self.tensors["token_embd.weight"][list(ids)]
        if self.architecture == "gemma3":
            hidden_TD = hidden_TD * np.sqrt(hidden_TD.shape[1])
        for layer in range(self.metadata["block_count"]):
            window = 0 if ignore_windows else self._window(layer)
            hidden_TD = self._layer(hidden_TD, layer, window, local=self._window(layer) > 0)
        head = self.tensors.get("output.weight", self.tensors["token_embd.weight"])
        return self._norm(hidden_TD, "output_norm.weight") @ head.T

    def _layer(self, hidden_TD: Array, layer: int, window: int, *, local: bool) -> Array:
        gemma = self.architecture == "gemma3"
        attended = self._attention(self._norm(hidden_TD, f"blk.{layer}.attn_norm.weight"), layer, window, local)
        if gemma:
            attended = self._norm(attended, f"blk.{layer}.post_attention_norm.weight")
        hidden_TD = hidden_TD + attended
        normed = self._norm(hidden_TD, f"blk.{layer}.ffn_norm.weight")
        gate, up = (normed @ self.tensors[f"blk.{layer}.ffn_{name}.weight"].T for name in ("gate", "up"))
        activated = _gelu_tanh(gate) if gemma else gate / (1 + np.exp(-gate))
        fed = (activated * up) @ self.tensors[f"blk.{layer}.ffn_down.weight"].T
        if gemma:
            fed = self._norm(fed, f"blk.{layer}.post_ffw_norm.weight")
        return hidden_TD + fed

    def _attention(self, normed_TD: Array, layer: int, window: int, local: bool) -> Array:
        width = self.metadata.get("attention.key_length") or normed_TD.shape[1] // self._heads(layer)
        query, key, value = (self._project(normed_TD, f"blk.{layer}.attn_{name}", width) for name in "qkv")
        if f"blk.{layer}.attn_q_norm.weight" in self.tensors:
            query = self._norm(query, f"blk.{layer}.attn_q_norm.weight")
            key = self._norm(key, f"blk.{layer}.attn_k_norm.weight")
        query, key = self._turned(query, local), self._turned(key, local)
        tokens, heads, _ = query.shape
        group = heads // key.shape[1]
        mixed = np.empty((tokens, heads, value.shape[2]))
        for position in range(tokens):
            first = max(0, position + 1 - window) if window else 0
            for head in range(heads):
                seen = slice(first, position + 1)
                scores = key[seen, head // group] @ query[position, head] / np.sqrt(width)
                weights = np.exp(scores - scores.max())
                mixed[position, head] = weights / weights.sum() @ value[seen, head // group]
        return mixed.reshape(tokens, -1) @ self.tensors[f"blk.{layer}.attn_output.weight"].T

    def _project(self, normed_TD: Array, name: str, width: int) -> Array:
        """[tokens, heads, width]."""
        rows = normed_TD @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0)
        return cast(Array, rows.reshape(len(rows), -1, width))

    def _turned(self, heads_THK: Array, local: bool) -> Array:
        """Rotary embedding, as multiplication of complex numbers: pairs (2i, 2i+1) for llama, (i, i + n/2) else."""
        count = self.metadata.get("rope.dimension_count") or heads_THK.shape[2]
        base = self.metadata.get("rope.freq_base", 10_000.0)
        scale = self.metadata.get("rope.scaling.factor", 1.0)
        if local:
            base, scale = self.metadata.get("rope.freq_base_swa", 10_000.0), 1.0
        frequencies = base ** (-np.arange(0, count, 2) / count) / scale
        if "rope_freqs.weight" in self.tensors:
            frequencies = frequencies / self.tensors["rope_freqs.weight"]
        angles = np.arange(len(heads_THK))[:, None, None] * frequencies
        interleaved = self.architecture == "llama"
        real = slice(0, count, 2) if interleaved else slice(0, count // 2)
        imaginary = slice(1, count, 2) if interleaved else slice(count // 2, count)
        turned = (heads_THK[..., real] + 1j * heads_THK[..., imaginary]) * np.exp(1j * angles)
        result = heads_THK.copy()
        result[..., real], result[..., imaginary] = turned.real, turned.imag
        return result

    def _norm(self, rows: Array, name: str) -> Array:
        epsilon = self.metadata["attention.layer_norm_rms_epsilon"]
        size = np.sqrt((rows**2).mean(axis=-1, keepdims=True) + epsilon)
        return cast(Array, rows / size * self.tensors[name])

    def _heads(self, layer: int) -> int:
        heads = self.metadata["attention.head_count"]
        return int(heads[layer] if isinstance(heads, list) else heads)

    def _window(self, layer: int) -> int:
        """Gemma 3: every n-th layer sees all, the others their window."""
        window = self.metadata.get("attention.sliding_window", 0)
        period = self.metadata.get("attention.sliding_window_pattern", 6)
        return window if self.architecture == "gemma3" and (layer + 1) % period else 0


def read_reference(path: Path) -> ReferenceModel:
    """The whole model of one GGUF file."""
    reader = GGUFReader(path)
    values = {name: field.contents() for name, field in reader.fields.items()}
    architecture = values["general.architecture"]
    metadata = {name.removeprefix(f"{architecture}."): value for name, value in values.items()}
    assert metadata.get("rope.scaling.type", "linear") in ("linear", "none"), "this reference knows no yarn"
    tensors = {
        tensor.name: dequantize(tensor.data, tensor.tensor_type).astype(np.float64) for tensor in reader.tensors
    }
    return ReferenceModel(architecture, metadata, tensors)


def _gelu_tanh(x: Array) -> Array:
    return cast(Array, 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))
