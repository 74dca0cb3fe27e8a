"""The rotary embedding of each layer, from the file's metadata.

Scaling follows llama.cpp: without a type a factor means linear; "longrope" takes its frequency factors from a pair of
tensors. Which of the pair is fixed by the configured context, so that a cached sequence never changes half way.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from ...proto.errors import ModelFileError, UnsupportedModelError
from ...proto.model import RopeScaling, RopeSpec, TensorInfo
from ...proto.shown import shown
from .families import Family
from .gguf_metadata import Metadata

DEFAULT_ROPE_BASE = 10_000.0
MOST_TURNS = 1e9
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"
FACTOR_TENSORS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
_KNOWN_SCALINGS = ("none", "linear", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class Ropes:
    """Ropes of global layers (the file's, scaled) and of layers with a sliding window (their own base, unscaled)."""

    source: str
    global_rope: RopeSpec  # `dimensions` 0: as many as the key is wide
    local_base: float

    def of_layer(self, key_width: int, *, local: bool) -> RopeSpec:
        """The rope of one layer; raises ModelFileError where it does not fit the key."""
        dimensions = self.global_rope.dimensions or key_width
        if dimensions % 2 or dimensions > key_width:
            raise ModelFileError(
                f"{self.source}: rope turns {dimensions} dimensions of heads {key_width} wide; it must be an even "
                "number up to that width"
            )
        if not local:
            return replace(self.global_rope, dimensions=dimensions)
        return RopeSpec(
            self.global_rope.kind,
            dimensions,
            self.local_base,
            attention_factor=self.global_rope.attention_factor,
        )


def read_ropes(
    family: Family,
    metadata: Metadata,
    tensors: dict[str, TensorInfo],
    trained_context: int,
    context_tokens: int,
) -> Ropes:
    """Reads all rope keys; `context_tokens` is the configured context."""
    original_context = metadata.positive("rope.scaling.original_context_length", trained_context)
    rope = RopeSpec(
        kind=family.rope_kind,
        dimensions=metadata.integer("rope.dimension_count", 0),
        base=metadata.positive_number("rope.freq_base", DEFAULT_ROPE_BASE),
        original_context=original_context,
        attention_factor=metadata.positive_number("rope.scaling.attn_factor", 1.0),
        factors_tensor=_factors_tensor(family, metadata, tensors, long=context_tokens > original_context),
    )
    local_base = metadata.positive_number("rope.freq_base_swa", family.local_rope_base or DEFAULT_ROPE_BASE)
    return Ropes(metadata.source, _scaled(rope, metadata), local_base)


def _scaled(rope: RopeSpec, metadata: Metadata) -> RopeSpec:
    """The rope with the file's context extension."""
    kind = metadata.text("rope.scaling.type", "linear")
    factor = _factor(metadata)
    if kind not in _KNOWN_SCALINGS:
        raise UnsupportedModelError(
            f"{metadata.source}: {metadata.name('rope.scaling.type')} is {shown(kind)}; supported are: "
            f"{', '.join(_KNOWN_SCALINGS)}"
        )
    if kind == "yarn":
        if factor < 1.0:
            raise metadata.fail("rope.scaling.factor", "a yarn factor of at least 1")
        if rope.base == 1.0:
            raise metadata.fail("rope.freq_base", "a number above 0 other than 1, which yarn cannot scale")
        return replace(
            rope,
            scaling=RopeScaling.YARN,
            factor=factor,
            attention_factor=rope.attention_factor
            * metadata.positive_number("rope.scaling.yarn_attn_factor", 1.0),
            extrapolation_mix=_extrapolation_mix(metadata),
            beta_fast=_turns(metadata, "rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=_turns(metadata, "rope.scaling.yarn_beta_slow", 1.0),
        )
    if kind == "none" or factor == 1.0:
        return rope
    return replace(rope, scaling=RopeScaling.LINEAR, factor=factor)


def _factor(metadata: Metadata) -> float:
    """The context extension; rope.scale_linear is the key's older name, 0 stands for none."""
    old = metadata.number("rope.scale_linear", 1.0)
    factor = metadata.number("rope.scaling.factor", old) or 1.0
    if factor < 0:
        raise metadata.fail("rope.scaling.factor", "a number above 0")
    return factor


def _turns(metadata: Metadata, key: str, default: float) -> float:
    """Within the original context, where yarn's ramp begins or ends: bounded, as its logarithm is taken."""
    turns = metadata.positive_number(key, default)
    if not 1 / MOST_TURNS <= turns <= MOST_TURNS:
        raise metadata.fail(key, f"a number from {1 / MOST_TURNS:g} to {MOST_TURNS:g}")
    return turns


def _extrapolation_mix(metadata: Metadata) -> float:
    """yarn's ext_factor; a negative one stands for "not set"."""
    mix = metadata.number("rope.scaling.yarn_ext_factor", 1.0)
    return 1.0 if mix < 0 else mix


def _factors_tensor(
    family: Family, metadata: Metadata, tensors: dict[str, TensorInfo], *, long: bool
) -> str | None:
    """Name of the tensor of frequency divisors, if the file has one."""
    present = [name for name in FACTOR_TENSORS if name in tensors]
    kind = metadata.text("rope.scaling.type", "longrope" if LONG_FACTORS in present else "linear")
    if not present and kind != "longrope":
        return None
    if not family.rope_factors:
        raise UnsupportedModelError(
            f"{metadata.source}: {present[0] if present else 'longrope scaling'} is not supported for the architecture "
            f"{family.architecture!r}"
        )
    if kind != "longrope" and present == [ROPE_FACTORS]:
        return ROPE_FACTORS
    if kind != "longrope" or present != [LONG_FACTORS, SHORT_FACTORS]:
        raise ModelFileError(
            f"{metadata.source}: the rope factors do not fit together: scaling type {shown(kind)} with "
            f"{', '.join(present) or 'no factor tensors'}; expected {ROPE_FACTORS} alone, or longrope with "
            f"{LONG_FACTORS} and {SHORT_FACTORS}"
        )
    return LONG_FACTORS if long else SHORT_FACTORS
