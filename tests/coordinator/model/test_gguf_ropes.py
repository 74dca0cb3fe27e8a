"""Ropes and windows of each layer: scaling, frequency factors, gemma3's local layers (F07)."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.proto.errors import ModelFileError, UnsupportedModelError
from gearshift.proto.model import ModelSpec, RopeKind, RopeScaling, RopeSpec
from gearshift.tests.helpers.gguf_builder import build_model


def built(folder: Path, *, context_tokens: int | None = None, **arguments: Any) -> ModelSpec:
    path = build_model(folder / "model.gguf", **arguments)
    return build_spec(resolve_model(str(path)), context_tokens)


def factors(count: int, first: float = 1.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.linspace(first, 8.0, count, dtype=np.float32)


# F07: ropes


def test_f07_rope_freqs_are_used_on_every_layer(tmp_path: Path) -> None:
    spec = built(tmp_path, tensors={"rope_freqs.weight": factors(8)})
    assert {layer.rope.factors_tensor for layer in spec.layers} == {"rope_freqs.weight"}
    assert spec.tensors["rope_freqs.weight"].shape == (8,)


@pytest.mark.parametrize(
    ("context_tokens", "which"), [(16, "short"), (17, "long"), (64, "long"), (None, "long")]
)
@pytest.mark.parametrize("scaling_type", [None, "longrope"])
def test_f07_long_and_short_factors_follow_the_configured_context(
    context_tokens: int | None, which: str, scaling_type: str | None, tmp_path: Path
) -> None:
    spec = built(
        tmp_path,
        context_tokens=context_tokens,
        tensors={"rope_factors_long.weight": factors(8, 2.0), "rope_factors_short.weight": factors(8)},
        **{"rope.scaling.original_context_length": 16, "rope.scaling.type": scaling_type},
        **{"rope.scaling.attn_factor": 1.25},
    )
    assert {layer.rope.factors_tensor for layer in spec.layers} == {f"rope_factors_{which}.weight"}
    assert spec.layers[0].rope.attention_factor == 1.25
    assert spec.layers[0].rope.scaling is RopeScaling.NONE


def test_f07_rope_factors_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    long, short, plain = "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"
    for names, scaling_type in (
        ([long], None),
        ([short], None),
        ([long, short, plain], None),
        ([long, short], "yarn"),
        ([plain], "longrope"),
        ([], "longrope"),
    ):
        with pytest.raises(ModelFileError, match="rope factors do not fit together"):
            built(
                tmp_path, tensors={name: factors(8) for name in names}, **{"rope.scaling.type": scaling_type}
            )


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma3"])
def test_f07_rope_factors_are_refused_where_the_family_has_none(architecture: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs.weight is not supported"):
        built(tmp_path, arch=architecture, tensors={"rope_freqs.weight": factors(8)})


def test_f07_rope_factors_of_the_wrong_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"'rope_freqs.weight' has the shape \(16,\); expected \(8,\)"):
        built(tmp_path, tensors={"rope_freqs.weight": factors(16)})


def test_f07_yarn_keeps_all_its_numbers(tmp_path: Path) -> None:
    keys = {
        "type": "yarn",
        "factor": 4.0,
        "original_context_length": 32,
        "attn_factor": 1.5,
        "yarn_attn_factor": 0.5,
    }
    more = {"yarn_ext_factor": 0.25, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}
    spec = built(tmp_path, **{f"rope.scaling.{key}": value for key, value in (keys | more).items()})
    assert spec.layers[0].rope == RopeSpec(
        RopeKind.INTERLEAVED, 16, 10_000.0, RopeScaling.YARN, 4.0, 32, 0.75, 0.25, 16.0, 2.0
    )


@pytest.mark.parametrize(
    ("keys", "scaling", "factor"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, RopeScaling.LINEAR, 8.0),
        ({"rope.scaling.factor": 8.0}, RopeScaling.LINEAR, 8.0),
        ({"rope.scale_linear": 2.0}, RopeScaling.LINEAR, 2.0),
        ({"rope.scale_linear": 2.0, "rope.scaling.factor": 4.0}, RopeScaling.LINEAR, 4.0),
        ({"rope.scaling.factor": 0.0}, RopeScaling.NONE, 1.0),
        ({"rope.scaling.factor": 1.0}, RopeScaling.NONE, 1.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 8.0}, RopeScaling.NONE, 1.0),
    ],
)
def test_linear_scaling_has_old_and_new_keys(
    keys: dict[str, Any], scaling: RopeScaling, factor: float, tmp_path: Path
) -> None:
    rope = built(tmp_path, **keys).layers[0].rope
    assert (rope.scaling, rope.factor) == (scaling, factor)


def test_an_unknown_scaling_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"rope.scaling.type is 'dynamic'.*none, linear, yarn, longrope"
    ):
        built(tmp_path, **{"rope.scaling.type": "dynamic"})


def test_part_of_a_head_can_be_turned_but_not_more_than_it_has(tmp_path: Path) -> None:
    assert built(tmp_path, **{"rope.dimension_count": 8}).layers[0].rope.dimensions == 8
    for count in (7, 18):
        with pytest.raises(ModelFileError, match=f"rope turns {count} dimensions of heads 16 wide"):
            built(tmp_path, **{"rope.dimension_count": count})


# Gemma 3's windows


def test_gemma3_scales_global_layers_only(tmp_path: Path) -> None:
    keys = {"attention.sliding_window": 4, "rope.freq_base": 1e6, "rope.scaling.factor": 8.0}
    layers = built(tmp_path, arch="gemma3", layers=7, **keys, **{"rope.scaling.type": "linear"}).layers
    assert [one.sliding_window for one in layers] == [4, 4, 4, 4, 4, 0, 4]
    for layer in layers:
        expected = (
            (10_000.0, RopeScaling.NONE, 1.0) if layer.sliding_window else (1e6, RopeScaling.LINEAR, 8.0)
        )
        assert (layer.rope.base, layer.rope.scaling, layer.rope.factor) == expected


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [
        (None, [4, 4, 4, 4]),
        (2, [4, 0, 4, 0]),
        (1, [0, 0, 0, 0]),
        (0, [4, 4, 4, 4]),
        ([True, False, False, True], [4, 0, 0, 4]),
        ([1, 1, 0, 1], [4, 4, 0, 4]),
    ],
)
def test_gemma3_honours_the_files_window_pattern(pattern: Any, windows: list[int], tmp_path: Path) -> None:
    keys = {
        "attention.sliding_window": 4,
        "attention.sliding_window_pattern": pattern,
        "rope.freq_base_swa": 500.0,
    }
    layers = built(tmp_path, arch="gemma3", layers=4, **keys).layers
    assert [one.sliding_window for one in layers] == windows
    assert all(one.rope.base == 500.0 for one in layers if one.sliding_window)


def test_gemma3_without_a_window_key_is_global_throughout(tmp_path: Path) -> None:
    layers = built(tmp_path, arch="gemma3", layers=3, final_logit_softcapping=30.0).layers
    assert [(one.sliding_window, one.rope.base) for one in layers] == [(0, 10_000.0)] * 3


def test_gemma3_of_62_layers_has_the_27b_attention_scale(tmp_path: Path) -> None:
    small = {"hidden": 8, "heads": 2, "kv_heads": 1, "head_width": 16, "feed_forward": 8, "vocab": 8}
    assert built(tmp_path, arch="gemma3", layers=62, **small).attention_scale == 1 / math.sqrt(4)
    assert built(tmp_path, arch="gemma3", layers=61, **small).attention_scale == 1 / math.sqrt(16)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.freq_base", 1.0),
        *(("rope.scaling.yarn_beta_fast", value) for value in (2.0**-40, 2.0**40)),
        *(("rope.scaling.yarn_beta_slow", value) for value in (2.0**-40, 2.0**40)),
    ],
)
def test_what_yarn_takes_no_logarithm_of_is_refused_by_its_key(key: str, value: float, tmp_path: Path) -> None:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    with pytest.raises(ModelFileError, match=f"model.gguf: llama.{key} is '{value}'; expected a number"):
        built(tmp_path, **{**yarn, key: value})


def test_a_base_of_one_is_no_trouble_without_yarn(tmp_path: Path) -> None:
    assert built(tmp_path, **{"rope.freq_base": 1.0}).layers[0].rope.base == 1.0
