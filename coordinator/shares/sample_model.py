"""A small model cut out of a large one: some layers of each kind for every stage, to time devices with. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ...proto.model import ModelSpec, TensorInfo

SAMPLED_BYTES = 128 << 20  # of one rank's part: more than a device's caches keep from layer to layer
MOST_LAYERS = 4  # of a kind in a stage


@dataclass(frozen=True, slots=True)
class SampleModel:
    """`spec` has `layers_per_stage` layers in each of the stages, the same ones. `kind_of_layer[l]` is that of layer
    l of the large model; `layer_of_kind[k]` the first layer of kind k within a stage of the small one."""

    spec: ModelSpec
    layers_per_stage: int
    kind_of_layer: tuple[int, ...]
    layer_of_kind: tuple[int, ...]

    def layer(self, stage: int, kind: int) -> int:
        """A layer of a kind in a stage of the small model."""
        return stage * self.layers_per_stage + self.layer_of_kind[kind]


def sample_model(spec: ModelSpec, ranks: int) -> SampleModel:
    """Tensors lie where they do in the large model's files: nothing is copied."""
    kinds: dict[object, list[int]] = {}
    for layer in range(len(spec.layers)):
        kinds.setdefault(_kind(spec, layer), []).append(layer)
    chosen = [_some(layers, _wanted(spec, layers[0], ranks)) for layers in kinds.values()]
    sources = [layer for layers in chosen for layer in layers]
    firsts = [sum(map(len, chosen[:kind])) for kind in range(len(chosen))]
    number = {layer: kind for kind, layers in enumerate(kinds.values()) for layer in layers}
    return SampleModel(
        spec=_with_layers(spec, sources * ranks),
        layers_per_stage=len(sources),
        kind_of_layer=tuple(number[layer] for layer in range(len(spec.layers))),
        layer_of_kind=tuple(firsts),
    )


def _with_layers(spec: ModelSpec, sources: Sequence[int]) -> ModelSpec:
    tensors = {name: tensor for name, tensor in spec.tensors.items() if not name.startswith("blk.")}
    for layer, source in enumerate(sources):
        for part, tensor in _tensors_of(spec, source).items():
            tensors[f"blk.{layer}.{part}"] = tensor
    return replace(spec, tensors=tensors, layers=tuple(spec.layers[source] for source in sources))


def _tensors_of(spec: ModelSpec, layer: int) -> dict[str, TensorInfo]:
    prefix = f"blk.{layer}."
    return {
        name.removeprefix(prefix): tensor for name, tensor in spec.tensors.items() if name.startswith(prefix)
    }


def _kind(spec: ModelSpec, layer: int) -> object:
    """Alike in facts, and in their matrices' shapes and types."""
    matrices = sorted((part, one.type_name, one.shape) for part, one in _tensors_of(spec, layer).items())
    return spec.layers[layer], tuple(matrices)


def _wanted(spec: ModelSpec, layer: int, ranks: int) -> int:
    part_bytes = sum(tensor.byte_count for tensor in _tensors_of(spec, layer).values()) / ranks
    return max(1, min(MOST_LAYERS, round(SAMPLED_BYTES / max(1.0, part_bytes))))


def _some(layers: Sequence[int], count: int) -> list[int]:
    """Spread evenly."""
    count = min(count, len(layers))
    return [layers[index * len(layers) // count] for index in range(count)]
