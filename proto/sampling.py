"""How tokens are chosen, as validated values."""

from math import isfinite

from msgspec import Struct

from .errors import InputError

MAX_BIASES = 65_536  # tokens that one request may name; of a client's frame it is known before any is built


class SamplingParameters(Struct, frozen=True):
    """temperature 0 is greedy. Ranges are checked by `validate`, once, at the edge."""

    temperature: float = 0.8
    top_k: int = 40  # 0: all
    top_p: float = 0.95
    min_p: float = 0.05
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = -1  # last tokens looked at, the prompt included; -1: all
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # 0 <= seed < 2^64
    logprobs: int = 0  # alternatives reported beside each token


def validate(parameters: SamplingParameters, vocab: int) -> SamplingParameters:
    """The same parameters, or an `InputError` that names the first bad field."""
    ranges: tuple[tuple[str, float, float], ...] = (
        ("temperature", 0.0, 1e6),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 1e-6, 1e6),
        ("presence_penalty", -1e6, 1e6),
        ("frequency_penalty", -1e6, 1e6),
        ("top_k", 0, 2**31 - 1),
        ("penalty_window", -1, 2**31 - 1),
        ("seed", 0, 2**64 - 1),
        ("logprobs", 0, 1000),
    )
    for field, low, high in ranges:
        value = getattr(parameters, field)
        if not isfinite(value) or not low <= value <= high:
            raise InputError(f"{field} must be between {low:g} and {high:g}, not {value}")
    if parameters.top_p == 0.0:
        raise InputError("top_p must be above 0; use temperature 0 for greedy")
    if len(parameters.logit_bias) > MAX_BIASES:
        raise InputError(f"logit_bias names {len(parameters.logit_bias)} tokens; at most {MAX_BIASES} can be")
    for token, bias in parameters.logit_bias:
        if not 0 <= token < vocab:
            raise InputError(f"logit_bias names token {token}; this model has tokens 0 to {vocab - 1}")
        if not isfinite(bias):
            raise InputError(f"logit_bias of token {token} must be a finite number, not {bias}")
    return parameters
