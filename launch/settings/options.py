"""What the settings mean: text in, frozen settings out. Every error names the flag, variable or file it came from.

A flag that is None was not given: environment, config file, model file and built-in values follow.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar

from ...proto.commands import LinkOptions
from ...proto.decode_sums_choice import DECODE_SUMS_VARIABLE, parse_decode_sums
from ...proto.errors import InputError
from ...proto.ids import ComputeType, KvType, Layout
from ...proto.kv import KvFormat
from ...proto.nccl_choice import NCCL_VARIABLE, NcclAsked, parse_nccl
from ...proto.words import counted
from .residency_option import ResidencyWish, parse_residency
from .settings import SAMPLING_SETTINGS, Settings
from .user_folders import current_settings

if TYPE_CHECKING:
    from ...coordinator.chunks.plan import ChunkRule

T = TypeVar("T")

AUTO = "auto"
USUAL_RESTARTS = 2  # of a command that somebody is at, or many are
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(?:i?b)?)?", re.IGNORECASE)
MOST_BYTES = 1 << 60  # 1,048,576T
SIZE_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Device(StrEnum):
    """Where the workers compute; `auto` is CUDA where every worker gets a device of its own, else the CPU."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The workers, how the model lies on them, and what they hold it in. None: chosen by the program."""

    workers: int
    device: Device
    threads: int | None  # of each worker
    max_chunk_tokens: int | None
    layer_split: tuple[int, ...] | None  # cut points between the stages
    layer_shares: tuple[float, ...] | None
    tensor_shares: tuple[float, ...] | None
    compute_type: ComputeType | None
    kv_format: KvFormat | None
    exact_activations: bool = False  # on GPUs no activations in int8
    reserve_bytes: int | None = None  # of each device's memory
    memory_limits: tuple[int, ...] | None = None  # bytes; one for all workers, or one for each
    residency: ResidencyWish | None = None  # of each layer; None: by what fits
    link_options: LinkOptions = LinkOptions()  # noqa: RUF009 (frozen)
    measure: bool = False  # though costs are kept from before
    token_gap_seconds: float | None = None  # the most between two tokens of an answer while prompts are read
    nccl: NcclAsked = NcclAsked.AUTO  # of workers started here


@dataclass(frozen=True, slots=True)
class LayoutSettings:
    """Layouts of a request's two phases (None: by the policy) and the rule its prompt is cut by."""

    prefill: Layout | None
    decode: Layout | None
    chunk_rule: "ChunkRule"


GROUP_FLAGS = (
    "workers", "device", "threads", "max_chunk", "layer_split", "layer_share", "tensor_share", "compute_type",
    "kv_type", "exact_activations", "reserve", "memory_limit", "residency", "no_peer", "throttle_link",
)  # fmt: skip
SAMPLING_FLAGS = tuple(setting.name for setting in SAMPLING_SETTINGS)


def flags_named(names: Iterable[str], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a command's arguments that have these names: what several commands take alike is handed on as one."""
    return {name: arguments[name] for name in names}


def group_settings(
    *,
    workers: int | None = None,
    device: Device | None = None,
    threads: int | None = None,
    max_chunk: int | None = None,
    layer_split: str | None = None,
    layer_share: str | None = None,
    tensor_share: str | None = None,
    compute_type: str | None = None,
    kv_type: str | None = None,
    exact_activations: bool | None = None,
    reserve: str | None = None,
    memory_limit: str | None = None,
    residency: str | None = None,
    no_peer: bool | None = None,
    throttle_link: float | None = None,
    measure: bool | None = None,
    max_token_gap: float | None = None,
) -> GroupSettings:
    """The flags of that name, as typer hands them over; what was not given comes from the user's settings."""
    chosen = current_settings(
        {
            "workers": workers,
            "device": device,
            "threads": threads,
            "max_chunk": max_chunk,
            "layer_split": layer_split,
            "layer_share": layer_share,
            "tensor_share": tensor_share,
            "compute_type": compute_type,
            "kv_type": kv_type,
            "exact_activations": exact_activations,
            "reserve": reserve,
            "memory_limit": memory_limit,
            "residency": residency,
            "no_peer": no_peer,
            "throttle_link": throttle_link,
            "measure": measure,
            "max_token_gap": max_token_gap,
        }
    )
    settings, limits = parse_group(chosen), chosen.place("memory_limit")
    if settings.memory_limits is not None and len(settings.memory_limits) not in (1, settings.workers):
        values = f"{counted(len(settings.memory_limits), 'value')} for {counted(settings.workers, 'worker')}"
        raise InputError(f"{limits}: {values}; give one, or one for each")
    parse_decode_sums(os.environ.get(DECODE_SUMS_VARIABLE, ""))  # the workers go by it
    return settings


def parse_group(chosen: Settings) -> GroupSettings:
    """What each of these settings means by itself, whatever the others are."""
    return GroupSettings(
        workers=chosen.whole_number("workers"),
        device=_choice(chosen.place("device"), chosen.text("device"), tuple(Device)),
        threads=chosen.whole_number_or_none("threads"),
        max_chunk_tokens=chosen.whole_number_or_none("max_chunk"),
        layer_split=parse_cut_points(chosen.place("layer_split"), chosen.text_or_none("layer_split")),
        layer_shares=parse_shares(chosen.place("layer_share"), chosen.text_or_none("layer_share")),
        tensor_shares=parse_shares(chosen.place("tensor_share"), chosen.text_or_none("tensor_share")),
        compute_type=parse_compute_type(chosen.place("compute_type"), chosen.text("compute_type")),
        kv_format=parse_kv_format(chosen.place("kv_type"), chosen.text("kv_type")),
        exact_activations=chosen.switch("exact_activations"),
        reserve_bytes=parse_size(chosen.place("reserve"), chosen.text_or_none("reserve")),
        memory_limits=parse_sizes(chosen.place("memory_limit"), chosen.text_or_none("memory_limit")),
        residency=parse_residency(chosen.place("residency"), chosen.text("residency")),
        link_options=LinkOptions(chosen.switch("no_peer"), _bytes_per_second(chosen.number_or_none("throttle_link"))),
        measure=chosen.switch("measure"),
        token_gap_seconds=_seconds(chosen.number_or_none("max_token_gap")),
        nccl=parse_nccl(os.environ.get(NCCL_VARIABLE, "")),
    )


def layout_settings(
    prefill: str | None = None, decode: str | None = None, chunk: str | None = None
) -> LayoutSettings:
    """The flags of that name, as typer hands them over; what was not given comes from the user's settings."""
    return parse_layouts(current_settings({"prefill": prefill, "decode": decode, "chunk": chunk}))


def parse_layouts(chosen: Settings) -> LayoutSettings:
    """What the settings of a request's layouts mean."""
    from ...coordinator.chunks.plan import parse_chunk_rule  # numpy is behind it: not for `--help`

    return LayoutSettings(
        prefill=parse_layout(chosen.place("prefill"), chosen.text("prefill")),
        decode=parse_layout(chosen.place("decode"), chosen.text("decode")),
        chunk_rule=parse_chunk_rule(chosen.text("chunk"), chosen.place("chunk")),
    )


def allowed_restarts(restarts: int | None, usual: int) -> int:
    """The flag, else the user's setting, else what is usual for the command."""
    chosen = current_settings({"restarts": restarts}).whole_number_or_none("restarts")
    return usual if chosen is None else chosen


def parse_layout(flag: str, text: str) -> Layout | None:
    """`auto` is None."""
    return None if text == AUTO else _choice(flag, text, tuple(Layout), auto=True)


def parse_compute_type(flag: str, text: str) -> ComputeType | None:
    """`auto` is None: the faster on this machine, measured by the workers."""
    return None if text == AUTO else _choice(flag, text, tuple(ComputeType), auto=True)


def parse_kv_format(flag: str, text: str) -> KvFormat | None:
    """`f16` for keys and values alike, `q8_0,f16` for keys and values apart, `auto` is None."""
    if text == AUTO:
        return None
    types = [_choice(flag, word.strip(), tuple(KvType)) for word in text.split(",")]
    if len(types) > 2:
        raise InputError(
            f"{flag} takes one type, or one for keys and one for values, not {len(types)}: {text!r}"
        )
    return KvFormat(key=types[0], value=types[-1])


def parse_cut_points(flag: str, text: str | None) -> tuple[int, ...] | None:
    """`12,24,36` are three cuts for four workers; whether they fit is for the placement to say."""
    return None if text is None else _numbers(flag, text, int, "whole numbers, as in 12,24,36")


def parse_shares(flag: str, text: str | None) -> tuple[float, ...] | None:
    """`3,1` or `0.75,0.25`: one number a worker; whether they fit is for the placement to say. `auto` is None."""
    return None if text is None or text == AUTO else _numbers(flag, text, float, "numbers, as in 3,1 or 0.75,0.25")


def parse_sizes(flag: str, text: str | None) -> tuple[int, ...] | None:
    """`8G` or `8G,6.5G`, in bytes."""
    return None if text is None else tuple(_size(flag, word) for word in text.split(","))


def parse_size(flag: str, text: str | None) -> int | None:
    """`256M`, `1.5G`, `0`, in bytes; units are powers of 1,024."""
    return None if text is None else _size(flag, text)


def parse_logit_bias(flag: str, entries: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """`ID=BIAS`, any number of times; a token named twice is an error."""
    biases: dict[int, float] = {}
    for entry in entries:
        token_text, separator, bias_text = entry.partition("=")
        try:
            token, bias = int(token_text), float(bias_text)
        except ValueError:
            raise InputError(f"{flag} takes ID=BIAS, as in 42=-1.5, not {entry!r}") from None
        if not separator or token < 0 or not isfinite(bias):
            raise InputError(f"{flag} takes a token id of 0 or more and a finite bias, not {entry!r}")
        if token in biases:
            raise InputError(f"{flag} names token {token} twice")
        biases[token] = bias
    return tuple(biases.items())


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _bytes_per_second(gigabytes: float | None) -> float | None:
    return None if gigabytes is None else 1e9 * gigabytes


def parse_seed(flag: str, seed: int) -> int:
    """0 <= seed < 2^64; -1, as other programs have it, draws one from the system."""
    if seed == -1:
        from secrets import randbits

        return randbits(64)
    if not 0 <= seed < 2**64:
        raise InputError(f"{flag} takes 0 to 2^64 - 1, or -1 for a random one, not {seed}")
    return seed


def _choice(flag: str, text: str, choices: tuple[T, ...], *, auto: bool = False) -> T:
    """`auto`: that word is taken too, and was seen to by the caller."""
    for choice in choices:
        if text == choice:
            return choice
    raise InputError(f"{flag} takes one of {', '.join(map(str, (*([AUTO] if auto else []), *choices)))}, not {text!r}")


def _size(flag: str, text: str) -> int:
    found = SIZE.fullmatch(text.strip())
    if found is None:
        raise InputError(f"{flag} takes sizes with a unit, as in 512M or 7.5G, not {text.strip()!r}")
    number, unit = found.groups()
    if unit is None and float(number):
        raise InputError(f"{flag} {number}: which unit? 512M and 7.5G have one")
    found_bytes = float(number) * SIZE_UNITS[(unit or "k").lower()]
    if found_bytes > MOST_BYTES:
        raise InputError(f"{flag} takes sizes up to {MOST_BYTES >> 40}T, not {text.strip()[:40]!r}")
    return int(found_bytes)


def _numbers(flag: str, text: str, kind: Callable[[str], T], wanted: str) -> tuple[T, ...]:
    try:
        return tuple(kind(word) for word in text.split(","))
    except ValueError:
        raise InputError(f"{flag} takes {wanted}, not {text!r}") from None
