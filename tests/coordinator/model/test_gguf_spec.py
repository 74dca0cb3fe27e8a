"""From files to model facts: families, per-layer values, ropes, windows, and refusals by name (F05 to F08)."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gearshift.coordinator.model.families import FAMILIES
from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.proto.errors import InputError, ModelFileError, UnsupportedModelError
from gearshift.proto.model import Activation, LayerSpec, ModelSpec, RopeKind, RopeScaling, RopeSpec
from gearshift.tests.helpers.gguf_builder import build_model

TinyModel = Callable[[str], Path]


def spec_of(path: Path, context_tokens: int | None = None) -> ModelSpec:
    return build_spec(resolve_model(str(path)), context_tokens)


def built(folder: Path, *, context_tokens: int | None = None, **arguments: Any) -> ModelSpec:
    return spec_of(build_model(folder / "model.gguf", **arguments), context_tokens)


# The real models


def test_smollm2_is_a_tied_llama(smollm2_path: Path) -> None:
    spec = spec_of(smollm2_path)
    assert (spec.architecture, len(spec.layers), spec.hidden, spec.vocab) == ("llama", 30, 576, 49152)
    assert spec.trained_context == 8192
    assert spec.head_tensor == "token_embd.weight"
    assert spec.tensors["token_embd.weight"].type_name == "Q8_0"
    rope = RopeSpec(RopeKind.INTERLEAVED, 64, 100_000.0, original_context=8192)
    assert set(spec.layers) == {LayerSpec(9, 3, 64, 64, 1536, 0, rope)}
    assert (spec.activation, spec.attention_scale, spec.embedding_scale) == (Activation.SILU, 0.125, 1.0)


def test_gemma3_270m_has_windows_on_five_of_six_layers(gemma3_path: Path) -> None:
    spec = spec_of(gemma3_path)
    assert (spec.architecture, len(spec.layers), spec.hidden, spec.vocab) == ("gemma3", 18, 640, 262144)
    assert [layer.sliding_window for layer in spec.layers] == [512, 512, 512, 512, 512, 0] * 3
    assert [layer.rope.base for layer in spec.layers] == [10_000.0] * 5 + [1e6] + ([10_000.0] * 5 + [1e6]) * 2
    assert {layer.rope.kind for layer in spec.layers} == {RopeKind.HALVES}
    assert {(layer.query_heads, layer.kv_heads, layer.key_width) for layer in spec.layers} == {(4, 1, 256)}
    assert spec.activation is Activation.GELU_TANH
    assert spec.embedding_scale == math.sqrt(640)
    assert spec.attention_scale == 1 / 16
    assert spec.norm_epsilon == pytest.approx(1e-6)


# The tiny models with reference logits


@pytest.mark.parametrize(
    ("name", "architecture", "layers", "heads", "widths", "vocab", "tied"),
    [
        ("gemma3-swa-mqa", "gemma3", 7, (4, 1), (64, 32, 128), 256, True),
        ("llama-gqa-oddvocab", "llama", 4, (6, 2), (96, 16, 160), 257, False),
        ("llama-q4k-mix", "llama", 3, (8, 4), (256, 32, 768), 512, False),
        ("llama-wide-heads-ropefreqs", "llama", 3, (4, 2), (64, 32, 96), 130, False),
        ("llama-yarn", "llama", 3, (4, 4), (64, 16, 96), 128, False),
        ("qwen2-bias-tied", "qwen2", 4, (6, 3), (96, 16, 160), 300, True),
        ("qwen3-qknorm", "qwen3", 3, (8, 2), (128, 32, 192), 256, False),
    ],
)
def test_each_tiny_model_has_its_facts(
    name: str,
    architecture: str,
    layers: int,
    heads: tuple[int, int],
    widths: tuple[int, int, int],
    vocab: int,
    tied: bool,
    tiny_model: TinyModel,
) -> None:
    spec = spec_of(tiny_model(name))
    assert (spec.name, spec.architecture, len(spec.layers), spec.vocab) == (name, architecture, layers, vocab)
    assert (spec.head_tensor == "token_embd.weight") is tied
    hidden, head_width, feed_forward = widths
    assert spec.hidden == hidden
    for layer in spec.layers:
        assert (layer.query_heads, layer.kv_heads) == heads
        assert layer.key_width == layer.value_width == layer.rope.dimensions == head_width
        assert layer.feed_forward == feed_forward
        interleaved = architecture == "llama"
        assert layer.rope.kind is (RopeKind.INTERLEAVED if interleaved else RopeKind.HALVES)
    assert spec.attention_scale == pytest.approx(1 / math.sqrt(head_width))


def test_tiny_models_keep_what_makes_them_special(tiny_model: TinyModel) -> None:
    yarn = spec_of(tiny_model("llama-yarn")).layers[0].rope
    assert (yarn.scaling, yarn.factor, yarn.original_context) == (RopeScaling.YARN, 4.0, 32)
    assert (yarn.attention_factor, yarn.extrapolation_mix, yarn.beta_fast, yarn.beta_slow) == (1, 1, 32, 1)
    divided = spec_of(tiny_model("llama-wide-heads-ropefreqs"))
    assert {layer.rope.factors_tensor for layer in divided.layers} == {"rope_freqs.weight"}
    windows = [layer.sliding_window for layer in spec_of(tiny_model("gemma3-swa-mqa")).layers]
    assert windows == [16, 16, 16, 16, 16, 0, 16]
    biased = spec_of(tiny_model("qwen2-bias-tied"))
    assert biased.layer_tensor(3, "attn_k.bias") is not None
    assert biased.layer_tensor(3, "attn_output.bias") is None


# Architectures, tensors and keys


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*gemma3, llama, qwen2, qwen3"):
        built(tmp_path, arch="mamba")


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_each_needed_tensor_is_missed_by_name(architecture: str, tmp_path: Path) -> None:
    names = [name for name in built(tmp_path, arch=architecture).tensors if not name.endswith("bias")]
    for name in names:
        if name == "output.weight":
            continue
        with pytest.raises(ModelFileError, match=f"'{name}'.* is missing"):
            built(tmp_path, arch=architecture, tensors={name: None})


@pytest.mark.parametrize(
    "name", ["blk.1.ffn_down.weight", "output_norm.weight", "blk.0.attn_q.bias", "output.weight"]
)
def test_a_wrong_shape_is_refused_with_both_shapes(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=rf"'{name}' has the shape \(3, 5\); expected \("):
        built(tmp_path, tensors={name: np.zeros((3, 5), np.float32)})


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.ffn_gate_inp.weight",
        "blk.1.ffn_up_exps.weight",
        "blk.0.ffn_up.bias",
        "blk.0.attn_sub_norm.weight",
        "blk.0.attn_qkv.weight",
        "output.bias",
    ],
)
def test_a_tensor_that_would_be_ignored_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{name}' is not known"):
        built(tmp_path, tensors={name: np.zeros((64, 64), np.float32)})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 8),
        ("attn_logit_softcapping", 50.0),
        ("logit_scale", 0.5),
        ("attention.causal", False),
        ("rope.dimension_sections", [1, 2, 3, 4]),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("attention.sliding_window", 128),
    ],
)
def test_a_key_that_changes_results_is_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=f"llama.{key} is"):
        built(tmp_path, **{key: value})


def test_neutral_values_and_unknown_windows_beyond_the_context_do_no_harm(tmp_path: Path) -> None:
    plain = built(tmp_path)
    assert (
        built(tmp_path, expert_count=0, logit_scale=1.0, **{"attention.sliding_window": 512}).layers
        == plain.layers
    )
    assert built(tmp_path, context_tokens=128, **{"attention.sliding_window": 128}).layers == plain.layers


def test_biases_are_taken_by_every_family(tmp_path: Path) -> None:
    for architecture in FAMILIES:
        spec = built(
            tmp_path,
            arch=architecture,
            biases=True,
            tensors={"blk.1.attn_output.bias": np.zeros(64, np.float32)},
        )
        assert spec.layer_tensor(0, "attn_v.bias") is not None
        assert spec.layer_tensor(1, "attn_output.bias") is not None


def test_f05_one_expert_tensor_in_mxfp4_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'blk.1.ffn_up_exps.weight' is not known"):
        built(
            tmp_path,
            tensors={"blk.1.ffn_up_exps.weight": np.zeros((4, 64, 64), np.float32)},
            types={"ffn_up_exps.weight": "MXFP4"},
        )


def test_f05_mxfp4_in_a_known_tensor_loads(tmp_path: Path) -> None:
    spec = built(tmp_path, types={"ffn_up.weight": "MXFP4"})
    assert spec.tensors["blk.0.ffn_up.weight"].type_name == "MXFP4"


@pytest.mark.parametrize(
    "key",
    ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"],
)
def test_a_missing_or_senseless_number_is_named(key: str, tmp_path: Path) -> None:
    for value in (None, "four", -1, 1.5, True, [1, 2, 3]):
        with pytest.raises(InputError, match=f"llama.{key} "):
            built(tmp_path, **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.freq_base", 0.0),
        ("rope.freq_base", math.inf),
        ("rope.scaling.factor", math.nan),
        ("rope.freq_base", "x"),
    ],
)
def test_a_rope_number_without_sense_is_named(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=key):
        built(tmp_path, **{key: value})


def test_a_vocabulary_larger_than_the_embedding_is_refused_and_a_smaller_one_is_padding(
    tmp_path: Path,
) -> None:
    with pytest.raises(ModelFileError, match=r"257 tokens, but token_embd.weight only 256 rows"):
        built(tmp_path, **{"tokenizer.ggml.tokens": [f"t{number}" for number in range(257)]})
    assert built(tmp_path, **{"tokenizer.ggml.tokens": ["a", "b"]}).vocab == 256


def test_many_layers_that_are_claimed_only_are_refused_soon(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="expected 1 to 512"):
        built(tmp_path, block_count=2**31 - 1)


def test_a_models_name_is_shown_without_what_a_terminal_obeys(tmp_path: Path) -> None:
    assert built(tmp_path, **{"general.name": "a\x1b[31m\n"}).name == "a?[31m?"
    assert len(built(tmp_path, **{"general.name": "x" * 100_000}).name) < 300


def test_an_epsilon_below_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"layer_norm_rms_epsilon is .*0 or more"):
        built(tmp_path, **{"attention.layer_norm_rms_epsilon": -1.0})


# F06: numbers that are scalars or arrays


def test_f06_scalars_and_equal_arrays_give_the_same_layers(tmp_path: Path) -> None:
    scalar = built(tmp_path, layers=4)
    for key, value in {
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "feed_forward_length": 128,
        "attention.key_length": 16,
        "attention.value_length": 16,
    }.items():
        assert built(tmp_path, layers=4, **{key: [value] * 4}).layers == scalar.layers


def test_f06_each_layer_has_its_own_numbers(tmp_path: Path) -> None:
    spec = built(tmp_path, layers=3, heads=[4, 8, 2], kv_heads=[1, 4, 2], feed_forward=[64, 96, 128])
    assert [(one.query_heads, one.kv_heads, one.feed_forward) for one in spec.layers] == [
        (4, 1, 64),
        (8, 4, 96),
        (2, 2, 128),
    ]


def test_f06_a_layer_without_kv_heads_is_refused_by_number(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="layer 0 has 4 query heads and 0 KV heads"):
        built(tmp_path, layers=4, **{"attention.head_count_kv": [0, 2, 2, 2]})
    with pytest.raises(UnsupportedModelError, match="feed_forward_length of layer 2 is 0"):
        built(tmp_path, layers=4, feed_forward_length=[128, 128, 0, 128])


@pytest.mark.parametrize("count", [1, 3, 5])
def test_f06_an_array_of_the_wrong_length_is_refused(count: int, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"head_count_kv.*an array of 4, one for each layer"):
        built(tmp_path, layers=4, **{"attention.head_count_kv": [2] * count})


@pytest.mark.parametrize("declared_key", [None, 1])
@pytest.mark.parametrize("block_count", [4, 5])
def test_f06_a_last_block_for_predicting_further_tokens_is_left_out(
    declared_key: int | None, block_count: int, tmp_path: Path
) -> None:
    plain = built(tmp_path, layers=4)
    extra = {
        "blk.4.nextn.eh_proj.weight": np.zeros((64, 128), np.float32),
        "blk.4.attn_norm.weight": np.zeros(64, np.float32),
    }
    arguments: dict[str, Any] = {"block_count": block_count, "attention.head_count_kv": [2, 2, 2, 2, 0]}
    if block_count == 5:
        arguments["nextn_predict_layers"] = declared_key
    spec = built(tmp_path, layers=4, tensors=extra, **arguments)
    assert spec.layers == plain.layers
    assert spec.tensors.keys() == plain.tensors.keys()


def test_f06_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="layer 0 has 4 query heads, no multiple of its 3 KV heads"):
        built(tmp_path, **{"attention.head_count_kv": 3})


def test_head_widths_default_to_hidden_by_heads_and_kv_heads_to_heads(tmp_path: Path) -> None:
    absent = dict.fromkeys(("attention.key_length", "attention.value_length", "attention.head_count_kv"))
    (layer, _) = built(tmp_path, kv_heads=4, **absent).layers
    assert (layer.kv_heads, layer.key_width, layer.value_width, layer.rope.dimensions) == (4, 16, 16, 16)
    with pytest.raises(ModelFileError, match=r"attention.key_length is missing"):
        built(tmp_path, hidden=66, **absent)


# F08: tied, and keys that may be absent


@pytest.mark.parametrize("quant", ["F32", "Q8_0", "Q4_0"])
def test_f08_a_tied_model_takes_the_embedding_as_its_head(quant: str, tmp_path: Path) -> None:
    spec = built(tmp_path, tied=True, quant=quant)
    assert spec.head_tensor == "token_embd.weight"
    assert spec.tensors["token_embd.weight"].type_name == quant
    assert built(tmp_path, tied=False).head_tensor == "output.weight"


def test_f08_a_softcap_is_kept_and_its_absence_means_none(tmp_path: Path) -> None:
    assert built(tmp_path, arch="gemma3", final_logit_softcapping=30.0).logit_softcap == 30.0
    assert built(tmp_path, arch="gemma3").logit_softcap == 0.0


def test_f08_optional_keys_may_be_absent(tmp_path: Path) -> None:
    full = built(tmp_path)
    bare = built(tmp_path, **dict.fromkeys(("general.name", "tokenizer.ggml.model")))
    assert bare.layers == full.layers
    assert bare.name == "model"


def test_a_model_of_one_layer_is_a_model(tmp_path: Path) -> None:
    assert len(built(tmp_path, layers=1).layers) == 1
