"""Model facts made up for tests: no file behind them, but shapes, types and byte counts that agree."""

from collections.abc import Callable, Sequence

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import strategies

from gearshift.proto.model import Activation, FileFacts, LayerSpec, ModelSpec, RopeKind, RopeSpec, TensorInfo

ROPE = RopeSpec(kind=RopeKind.HALVES, dimensions=8, base=10_000.0)

TypeOf = Callable[
    [int, str], str
]  # (layer, tensor name within the layer) -> type name; the head's layer is -1


def layer_spec(
    query_heads: int = 8,
    kv_heads: int = 2,
    feed_forward: int = 192,
    *,
    key_width: int = 8,
    value_width: int | None = None,
    sliding_window: int = 0,
    rope: RopeSpec = ROPE,
) -> LayerSpec:
    return LayerSpec(
        query_heads=query_heads,
        kv_heads=kv_heads,
        key_width=key_width,
        value_width=key_width if value_width is None else value_width,
        feed_forward=feed_forward,
        sliding_window=sliding_window,
        rope=rope,
    )


def layer_shapes(
    layer: LayerSpec, hidden: int, *, biases: bool = False, head_norms: bool = False
) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's tensors, in torch order, by their names within the layer."""
    queries, keys = layer.query_heads * layer.key_width, layer.kv_heads * layer.key_width
    values, outputs = layer.kv_heads * layer.value_width, layer.query_heads * layer.value_width
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (queries, hidden),
        "attn_k.weight": (keys, hidden),
        "attn_v.weight": (values, hidden),
        "attn_output.weight": (hidden, outputs),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (layer.feed_forward, hidden),
        "ffn_up.weight": (layer.feed_forward, hidden),
        "ffn_down.weight": (hidden, layer.feed_forward),
    }
    if biases:
        shapes |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (values,)}
        shapes |= {"attn_output.bias": (hidden,)}
    if head_norms:
        shapes |= {"attn_q_norm.weight": (layer.key_width,), "attn_k_norm.weight": (layer.key_width,)}
    return shapes


def model_spec(
    layers: Sequence[LayerSpec],
    *,
    hidden: int = 64,
    vocab: int = 100,
    types: TypeOf | str = "F32",
    tied: bool = False,
    biases: bool = False,
    head_norms: bool = False,
) -> ModelSpec:
    """A model of these layers. `types` are the matrices' types; vectors are F32."""
    type_of: TypeOf = types if callable(types) else lambda layer, name: types
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab, hidden),
        "output_norm.weight": (hidden,),
    }
    chosen = {"token_embd.weight": type_of(-1, "token_embd.weight")}
    if not tied:
        shapes["output.weight"] = (vocab, hidden)
        chosen["output.weight"] = type_of(-1, "output.weight")
    for index, layer in enumerate(layers):
        for name, shape in layer_shapes(layer, hidden, biases=biases, head_norms=head_norms).items():
            shapes[f"blk.{index}.{name}"] = shape
            if len(shape) == 2:
                chosen[f"blk.{index}.{name}"] = type_of(index, name)
    return ModelSpec(
        architecture="llama",
        name="made up",
        files=(FileFacts(path="made-up.gguf", byte_count=0, fingerprint="0" * 64),),
        tensors=_tensors(shapes, chosen),
        layers=tuple(layers),
        hidden=hidden,
        vocab=vocab,
        trained_context=2048,
        norm_epsilon=1e-5,
        activation=Activation.SILU,
        attention_scale=1.0,
    )


def whole_bytes(type_name: str, shape: tuple[int, ...]) -> int:
    """File bytes of a whole tensor, row by row."""
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    *outer, columns = shape
    assert columns % block == 0, f"{columns} columns are not whole {type_name} blocks"
    rows = outer[0] if outer else 1
    return rows * (columns // block) * block_bytes


def _tensors(shapes: dict[str, tuple[int, ...]], types: dict[str, str]) -> dict[str, TensorInfo]:
    tensors, offset = {}, 4096
    for name, shape in shapes.items():
        type_name = types.get(name, "F32")
        byte_count = whole_bytes(type_name, shape)
        tensors[name] = TensorInfo(
            name=name, type_name=type_name, shape=shape, file=0, offset=offset, byte_count=byte_count
        )
        offset += -(-byte_count // 32) * 32
    return tensors


def share_lists(ranks: int) -> strategies.SearchStrategy[tuple[float, ...] | None]:
    """Equal shares, or whole ratios with zeros and lopsided ones among them; never all zero."""
    whole = strategies.lists(strategies.integers(0, 20), min_size=ranks, max_size=ranks).filter(any)
    return strategies.none() | whole.map(lambda values: tuple(float(value) for value in values))


@strategies.composite
def small_layers(draw: strategies.DrawFn) -> LayerSpec:
    """A layer whose matrices may be quantised in blocks of 32: groups, MQA and plain heads; K and V widths apart."""
    kv_heads = draw(strategies.integers(1, 6))
    return layer_spec(
        query_heads=kv_heads * draw(strategies.sampled_from([1, 2, 3, 7])),
        kv_heads=kv_heads,
        feed_forward=32 * draw(strategies.integers(1, 8)),
        key_width=draw(strategies.sampled_from([4, 8])),
        value_width=32,
    )


@strategies.composite
def small_models(draw: strategies.DrawFn) -> ModelSpec:
    """One to four layers, all alike or each its own, with types mixed within a layer."""
    layers = draw(
        strategies.lists(small_layers(), min_size=1, max_size=4)
        | strategies.builds(lambda layer, count: [layer] * count, small_layers(), strategies.integers(1, 4))
    )
    choices = draw(
        strategies.lists(strategies.sampled_from(["F32", "F16", "Q8_0", "Q4_0"]), min_size=1, max_size=5)
    )
    return model_spec(
        layers,
        hidden=32,
        vocab=draw(strategies.integers(1, 300)),
        types=lambda layer, name: choices[(layer * 3 + len(name)) % len(choices)],
        tied=draw(strategies.booleans()),
        biases=draw(strategies.booleans()),
        head_norms=draw(strategies.booleans()),
    )
