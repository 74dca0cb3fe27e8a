"""Learnt costs, where work is found to be quicker than they say. Pure."""

from dataclasses import fields, replace

from .cost_model import ChunkCost, Costs, StepCost
from .measuring import Measurement, first_seconds


def corrected(known: Costs, found: Measurement, much: float) -> Costs:
    """`known` with each kind of work that it has `much` times too long, or more, made as quick as it was found.

    It is the whole of that kind's cost, so its shape stays; `known` is of as many ranks. What is slower now stays.
    """
    now, then = first_seconds(found.costs, found.plan), first_seconds(known, found.plan)
    pairs = zip(now, then, strict=True)
    *stages, tensor_chunk, layer_step, tensor_step = [
        new / old if 0 < new < old / much else 1.0 for new, old in pairs
    ]
    return replace(
        known,
        stages=tuple(_scaled_chunk(cost, by) for cost, by in zip(known.stages, stages, strict=True)),
        tensor_prefill=known.tensor_prefill and _scaled_chunk(known.tensor_prefill, tensor_chunk),
        decode_layer=known.decode_layer and _scaled_step(known.decode_layer, layer_step),
        decode_tensor=known.decode_tensor and _scaled_step(known.decode_tensor, tensor_step),
    )


def _scaled_chunk(cost: ChunkCost, by: float) -> ChunkCost:
    return replace(cost, **{field.name: by * getattr(cost, field.name) for field in fields(cost)})


def _scaled_step(cost: StepCost, by: float) -> StepCost:
    batches = tuple((batch, by * seconds) for batch, seconds in cost.seconds_of_batch)
    return replace(cost, seconds_of_batch=batches, per_cached_token=by * cost.per_cached_token)
