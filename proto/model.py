"""Facts of a model, read from its GGUF header by the coordinator and sent to the workers. Pure data.

Shapes are in torch order (slowest first): a matrix is (rows = outputs, columns = inputs).
"""

from enum import StrEnum

from msgspec import Struct


class TensorInfo(Struct, frozen=True):
    """One tensor as it lies in its file."""

    name: str
    type_name: str  # ggml's name: "F32", "Q4_K", ...
    shape: tuple[int, ...]  # torch order
    file: int  # index into ModelSpec.files
    offset: int  # absolute byte offset in that file
    byte_count: int


class FileFacts(Struct, frozen=True):
    """One GGUF file (a shard, or the whole model)."""

    path: str
    byte_count: int
    fingerprint: str  # hex SHA-256 of header bytes, size and 64 sampled 4 KiB blocks
    header_bytes: int = 0  # length of the header, for whoever checks the fingerprint


class RopeKind(StrEnum):
    """Which pairs of a head's dimensions are turned together."""

    INTERLEAVED = "interleaved"  # (0, 1), (2, 3), ...: llama files, whose q and k are permuted for it
    HALVES = "halves"  # (0, d/2), (1, d/2 + 1), ...: "neox"


class RopeScaling(StrEnum):
    """How a rotary embedding is stretched beyond the trained context."""

    NONE = "none"
    LINEAR = "linear"
    YARN = "yarn"


class RopeSpec(Struct, frozen=True):
    """Rotary embedding of one layer. All lengths in dimensions or tokens."""

    kind: RopeKind
    dimensions: int  # leading dimensions of each head that are turned
    base: float
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0  # context extension: positions are divided by it (linear, yarn)
    original_context: int = 0  # trained length before yarn
    attention_factor: float = 1.0  # the file's own magnitude factor (yarn)
    extrapolation_mix: float = 1.0  # yarn's ext_factor; 0 switches the ramp off
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    factors_tensor: str | None = None  # frequency divisors: rope_freqs.weight or a long/short table


class LayerSpec(Struct, frozen=True):
    """One transformer layer. Widths in elements, heads counted whole."""

    query_heads: int
    kv_heads: int
    key_width: int  # per head
    value_width: int  # per head
    feed_forward: int
    sliding_window: int  # 0: full attention; W: a token sees itself and W-1 earlier ones
    rope: RopeSpec


class Activation(StrEnum):
    """Of the feed-forward's gate."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


class ModelSpec(Struct, frozen=True):
    """All that is needed to place and run a model; the tokenizer's facts are not here."""

    architecture: str
    name: str
    files: tuple[FileFacts, ...]
    tensors: dict[str, TensorInfo]  # keys are GGUF names
    layers: tuple[LayerSpec, ...]
    hidden: int
    vocab: int
    trained_context: int
    norm_epsilon: float
    activation: Activation
    attention_scale: float  # scores are multiplied by it
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # 0: none

    @property
    def head_tensor(self) -> str:
        """Name of the output matrix; tied models use the token embedding."""
        return "output.weight" if "output.weight" in self.tensors else "token_embd.weight"

    def layer_tensor(self, layer: int, part: str) -> TensorInfo | None:
        """`blk.{layer}.{part}`, or None where the file has none (`part` as in "attn_q.weight")."""
        return self.tensors.get(f"blk.{layer}.{part}")
