"""From checked files to the facts that a placement and the workers need: `build_spec`.

Every tensor of the file must be known: one that we would not use is refused by name, since leaving out an expert, a
bias or a norm would give quiet nonsense. Only blocks that predict further tokens (nextn, MTP) are left aside.
"""

import math
import re
from dataclasses import dataclass

import numpy as np

from ...proto.errors import ModelFileError, UnsupportedModelError
from ...proto.model import LayerSpec, ModelSpec, TensorInfo
from ...proto.shown import printable, shown
from .families import NEUTRAL_VALUES, Family, family_of, layer_shapes, model_shapes
from .files import ModelFiles
from .gguf_metadata import Metadata
from .rope import FACTOR_TENSORS, Ropes, read_ropes

MAX_LAYERS = 512  # the deepest known has 126: what fits is looked for layer by layer
LONGEST_NAME = 200  # characters of a model's name that are shown

_BLOCK_TENSOR = re.compile(r"blk\.(\d{1,6})\.(.+)")


def build_spec(files: ModelFiles, context_tokens: int | None = None) -> ModelSpec:
    """The model's facts, with every tensor's presence and shape checked.

    `context_tokens` is the configured context (None: the trained one). It decides, once for the run, between long and
    short rope factors: long where it is above the original context length. Nothing switches within a sequence.
    The vocabulary is what token_embd has rows; rows past the tokenizer's last token are padding.
    Raises UnsupportedModelError (architecture, tensor or key not known here) and ModelFileError (damaged facts).
    """
    source = _open_source(files)
    metadata, family = source.metadata, source.family
    hidden = metadata.positive("embedding_length")
    trained_context = metadata.positive("context_length")
    context = context_tokens or trained_context
    _refuse_unknown_keys(metadata)
    _check_window(source, context)
    layers = _layers(source, hidden, read_ropes(family, metadata, source.tensors, trained_context, context))
    tensors = {name: info for name, info in source.tensors.items() if _block_of(name) < source.layers}
    vocab = _vocab_rows(source, files)
    _check_tensors(source, tensors, _expected_shapes(source, layers, hidden, vocab))
    return ModelSpec(
        architecture=family.architecture,
        name=_model_name(files),
        files=files.facts,
        tensors=tensors,
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        trained_context=trained_context,
        norm_epsilon=metadata.number_from_zero("attention.layer_norm_rms_epsilon"),
        activation=family.activation,
        attention_scale=family.attention_scale(
            len(layers), hidden, layers[0].query_heads, layers[0].key_width
        ),
        embedding_scale=math.sqrt(hidden) if family.scaled_embedding else 1.0,
        logit_softcap=metadata.number("final_logit_softcapping", 0.0),
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """What a spec is built from."""

    family: Family
    metadata: Metadata
    tensors: dict[str, TensorInfo]
    layers: int  # that are run
    blocks: int  # in the file: the layers, then those that predict further tokens

    @property
    def file(self) -> str:
        return self.metadata.source

    def per_layer(self, key: str, default: int | None = None) -> tuple[int, ...]:
        return self.metadata.per_layer(key, self.layers, self.blocks, default)


def _open_source(files: ModelFiles) -> _Source:
    path = str(files.path)
    architecture = files.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelFileError(
            f"{path}: general.architecture is missing: this GGUF does not hold a language model"
        )
    family = family_of(architecture, path)
    metadata = Metadata(files.metadata, architecture, path)
    tensors = files.tensors()
    return _Source(family, metadata, tensors, *_count_layers(metadata, tensors))


def _model_name(files: ModelFiles) -> str:
    name = files.metadata.get("general.name")
    if not isinstance(name, str) or not name:
        return files.path.stem
    # Bytes that are no text cannot travel in a message, and a terminal would obey what is not printable.
    shown_name = printable(name[:LONGEST_NAME])
    return shown_name + "..." if len(name) > LONGEST_NAME else shown_name


def _block_of(tensor_name: str) -> int:
    """The block a tensor belongs to; -1 for those outside the blocks."""
    match = _BLOCK_TENSOR.fullmatch(tensor_name)
    return int(match[1]) if match else -1


def _count_layers(metadata: Metadata, tensors: dict[str, TensorInfo]) -> tuple[int, int]:
    """Layers that are run, and all blocks in the file; blocks that predict further tokens are the last ones."""
    declared = metadata.positive("block_count")
    predicting = {_block_of(name) for name in tensors if ".nextn." in name}
    for name in tensors:
        if _block_of(name) >= declared and _block_of(name) not in predicting:
            raise ModelFileError(
                f"{metadata.source}: tensor {shown(name)} lies beyond the {declared} blocks that the file declares"
            )
    layers = declared - metadata.integer("nextn_predict_layers", 0)
    while layers - 1 in predicting:
        layers -= 1
    if not 1 <= layers <= MAX_LAYERS:
        raise ModelFileError(f"{metadata.source}: {layers} layers to run; expected 1 to {MAX_LAYERS}")
    return layers, max([declared, *(block + 1 for block in predicting)])


def _refuse_unknown_keys(metadata: Metadata) -> None:
    for key, neutral in NEUTRAL_VALUES.items():
        value = metadata.get(key)
        if value is None or (neutral is not None and not isinstance(value, np.ndarray) and value == neutral):
            continue
        raise UnsupportedModelError(
            f"{metadata.source}: {metadata.name(key)} is {shown(repr(value))}, which changes the model's results and "
            "is not supported"
        )


def _check_window(source: _Source, context_tokens: int) -> None:
    """A window that the family does not know is harmless only while the whole context fits in it."""
    window = source.metadata.integer("attention.sliding_window", 0)
    if not source.family.window_period and 0 < window < context_tokens:
        raise UnsupportedModelError(
            f"{source.file}: {source.metadata.name('attention.sliding_window')} is {window}, but sliding windows are "
            f"not supported for {source.family.architecture!r}; it can run with a context of up to {window} tokens"
        )


def _layers(source: _Source, hidden: int, ropes: Ropes) -> tuple[LayerSpec, ...]:
    query_heads = source.per_layer("attention.head_count")
    no_kv_key = source.metadata.get("attention.head_count_kv") is None
    kv_heads = query_heads if no_kv_key else source.per_layer("attention.head_count_kv")
    _check_heads(source.file, query_heads, kv_heads)
    default_width = None if hidden % query_heads[0] else hidden // query_heads[0]
    key_widths = _above_zero(source, "attention.key_length", default_width)
    value_widths = _above_zero(source, "attention.value_length", default_width)
    feed_forward = _above_zero(source, "feed_forward_length")
    windows = _windows(source)
    if len(set(key_widths)) > 1:  # one attention scale serves all layers
        raise UnsupportedModelError(
            f"{source.file}: layers of different attention.key_length are not supported"
        )
    return tuple(
        LayerSpec(
            query_heads=query_heads[layer],
            kv_heads=kv_heads[layer],
            key_width=key_widths[layer],
            value_width=value_widths[layer],
            feed_forward=feed_forward[layer],
            sliding_window=windows[layer],
            rope=ropes.of_layer(key_widths[layer], local=windows[layer] > 0),
        )
        for layer in range(source.layers)
    )


def _above_zero(source: _Source, key: str, default: int | None = None) -> tuple[int, ...]:
    values = source.per_layer(key, default)
    if 0 in values:
        raise UnsupportedModelError(
            f"{source.file}: {source.metadata.name(key)} of layer {values.index(0)} is 0"
        )
    return values


def _check_heads(file: str, query_heads: tuple[int, ...], kv_heads: tuple[int, ...]) -> None:
    for layer, (queries, keys) in enumerate(zip(query_heads, kv_heads, strict=True)):
        if queries == 0 or keys == 0:
            raise UnsupportedModelError(
                f"{file}: layer {layer} has {queries} query heads and {keys} KV heads; layers without attention are "
                "not supported"
            )
        if queries % keys:
            raise ModelFileError(
                f"{file}: layer {layer} has {queries} query heads, no multiple of its {keys} KV heads"
            )


def _windows(source: _Source) -> tuple[int, ...]:
    """The sliding window of each layer, 0 for global ones.

    With period p, layer i is global when i + 1 is a multiple of p. The key attention.sliding_window_pattern replaces
    the family's period: by another (0: every layer has a window), or by a flag for each layer (true: window).
    """
    window = source.metadata.integer("attention.sliding_window", 0)
    if not source.family.window_period or not window:
        return (0,) * source.layers
    key = "attention.sliding_window_pattern"
    flags = source.metadata.layer_flags(key, source.layers, source.blocks)
    if flags is None:
        period = source.metadata.integer(key, source.family.window_period)
        flags = tuple(period == 0 or (layer + 1) % period != 0 for layer in range(source.layers))
    return tuple(window if flag else 0 for flag in flags)


def _vocab_rows(source: _Source, files: ModelFiles) -> int:
    embedding = source.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFileError(f"{source.file}: tensor 'token_embd.weight' is missing")
    vocab = embedding.shape[0]
    tokens = files.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > vocab:
        raise ModelFileError(
            f"{source.file}: the tokenizer has {len(tokens)} tokens, but token_embd.weight only {vocab} rows"
        )
    return vocab


@dataclass(frozen=True, slots=True)
class _Shapes:
    """Tensors a model must and may have, by full name, in torch order."""

    needed: dict[str, tuple[int, ...]]
    optional: dict[str, tuple[int, ...]]


def _expected_shapes(source: _Source, layers: tuple[LayerSpec, ...], hidden: int, vocab: int) -> _Shapes:
    needed, optional = model_shapes(hidden, vocab)
    for index, layer in enumerate(layers):
        layer_needed, layer_optional = layer_shapes(source.family, layer, hidden)
        needed |= {f"blk.{index}.{part}": shape for part, shape in layer_needed.items()}
        optional |= {f"blk.{index}.{part}": shape for part, shape in layer_optional.items()}
        if layer.rope.factors_tensor:
            # Both tables of a long/short pair are checked: the other one serves another context.
            optional |= dict.fromkeys(FACTOR_TENSORS, (layer.rope.dimensions // 2,))
    return _Shapes(needed, optional)


def _check_tensors(source: _Source, tensors: dict[str, TensorInfo], expected: _Shapes) -> None:
    for name in expected.needed:
        if name not in tensors:
            raise ModelFileError(
                f"{source.file}: tensor {name!r}, which every {source.family.architecture!r} model needs, is missing"
            )
    shapes = expected.optional | expected.needed
    for name, info in tensors.items():
        shape = shapes.get(name)
        if shape is None:
            raise UnsupportedModelError(
                f"{source.file}: tensor {shown(name)} is not known for {source.family.architecture!r}; "
                "the model would be wrong without it"
            )
        if info.shape != shape:
            raise ModelFileError(
                f"{source.file}: tensor {shown(name)} has the shape {info.shape}; expected {shape} (rows, columns)"
            )
