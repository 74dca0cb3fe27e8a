"""Model families: a table entry for what differs, and code only for what is truly new.

Semantics follow the reference implementation of each architecture in llama.cpp (src/models/*.cpp).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ...proto.errors import UnsupportedModelError
from ...proto.model import Activation, LayerSpec, RopeKind
from ...proto.shown import shown


def scale_by_key_width(layers: int, hidden: int, heads: int, key_width: int) -> float:
    """The usual attention scale, 1 / sqrt(key width)."""
    return 1.0 / math.sqrt(key_width)


def gemma3_scale(layers: int, hidden: int, heads: int, key_width: int) -> float:
    """As usual, but the 27B model, known by its 62 layers, was trained with 1 / sqrt(hidden / heads)."""
    return (
        1.0 / math.sqrt(hidden // heads)
        if layers == 62
        else scale_by_key_width(layers, hidden, heads, key_width)
    )


@dataclass(frozen=True, slots=True)
class Family:
    """What sets one architecture apart from a plain pre-norm, gated, rotary transformer."""

    architecture: str  # general.architecture
    rope_kind: RopeKind
    activation: Activation = Activation.SILU
    query_key_norms: bool = False
    post_norms: bool = False  # norms after attention and feed-forward, before each residual
    rope_factors: bool = False  # rope_freqs.weight, or a long/short pair, may be in the file
    scaled_embedding: bool = False  # embeddings are multiplied by sqrt(hidden)
    window_period: int = 0  # every n-th layer is global, the others have a sliding window; 0: no windows
    local_rope_base: float = 0.0  # default of the sliding-window layers
    attention_scale: Callable[[int, int, int, int], float] = (
        scale_by_key_width  # layers, hidden, heads, key width
    )


FAMILIES = {
    family.architecture: family
    for family in (
        # Mistral, SmolLM2 and many others are "llama" files.
        Family("llama", RopeKind.INTERLEAVED, rope_factors=True),
        Family("qwen2", RopeKind.HALVES),
        Family("qwen3", RopeKind.HALVES, query_key_norms=True),
        Family(
            "gemma3",
            RopeKind.HALVES,
            activation=Activation.GELU_TANH,
            query_key_norms=True,
            post_norms=True,
            scaled_embedding=True,
            window_period=6,
            local_rope_base=10_000.0,
            attention_scale=gemma3_scale,
        ),
    )
}

# Metadata that changes results and that no family here knows, with the value at which it changes nothing.
# A file that sets one otherwise is refused: ignoring it would give quiet nonsense.
NEUTRAL_VALUES: dict[str, float | bool | None] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.key_length_mla": None,
    "attention.key_length_swa": None,
    "attention.max_alibi_bias": 0.0,
    "attention.output_scale": 1.0,
    "attention.scale": 0.0,
    "attention.shared_kv_layers": 0,
    "attention.temperature_length": 0,
    "attention.temperature_scale": 0.0,
    "attention.value_length_swa": None,
    "attn_logit_softcapping": 0.0,
    "embedding_length_per_layer_input": 0,
    "embedding_scale": 1.0,
    "expert_count": 0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "rope.dimension_count_swa": None,
    "rope.dimension_sections": None,
    "rope.scaling.alpha": 0.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "use_parallel_residual": False,
}


def family_of(architecture: str, source: str) -> Family:
    """The family of an architecture; raises UnsupportedModelError with the list of known ones."""
    family = FAMILIES.get(architecture)
    if family is None:
        raise UnsupportedModelError(
            f"{source}: the architecture {shown(architecture)} is not supported; known are: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return family


def model_shapes(hidden: int, vocab: int) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Tensors outside the layers: needed ones and optional ones, with shapes in torch order."""
    needed = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    return needed, {"output.weight": (vocab, hidden)}


def layer_shapes(
    family: Family, layer: LayerSpec, hidden: int
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Tensors of one layer: needed ones and optional ones, with shapes in torch order (rows = outputs)."""
    query_rows = layer.query_heads * layer.key_width
    key_rows = layer.kv_heads * layer.key_width
    value_rows = layer.kv_heads * layer.value_width
    needed: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (query_rows, hidden),
        "attn_k.weight": (key_rows, hidden),
        "attn_v.weight": (value_rows, hidden),
        "attn_output.weight": (hidden, layer.query_heads * layer.value_width),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (layer.feed_forward, hidden),
        "ffn_up.weight": (layer.feed_forward, hidden),
        "ffn_down.weight": (hidden, layer.feed_forward),
    }
    if family.query_key_norms:
        needed |= {"attn_q_norm.weight": (layer.key_width,), "attn_k_norm.weight": (layer.key_width,)}
    if family.post_norms:
        needed |= {"post_attention_norm.weight": (hidden,), "post_ffw_norm.weight": (hidden,)}
    optional: dict[str, tuple[int, ...]] = {
        "attn_q.bias": (query_rows,),
        "attn_k.bias": (key_rows,),
        "attn_v.bias": (value_rows,),
        "attn_output.bias": (hidden,),
    }
    return needed, optional
