"""Attention of some query heads over gathered keys and values, plain torch.

Three ways, one result: a single row (decode), many rows through the library's own attention, and on CPUs many rows
through oneDNN's matrix product, which is 1.6 to 1.9 times as fast there (docs/lab_notes.md).
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.backends import cuda

from ...proto.device_sizes import KEPT_MASKS, MOST_SCORES
from .cards import is_older
from .matrix import fast_linear, has_fast_linear

FEWEST_FAST_ROWS = 32  # below, a product of its own for every shape costs more than it saves
FLASH_WIDTHS = 8  # a head's width is a multiple of this
LOWER_RIGHT = 2  # torch's name for the newest row's seeing all


def attend(
    query_TQK: Tensor, key_HLK: Tensor, value_HLV: Tensor, kv_head_of_query: tuple[int, ...], scale: float,
    sliding_window: int, dtype: torch.dtype,
) -> Tensor:
    """softmax(q k^T * scale) v for the T newest of L positions: [T, Q, V].

    Row t stands at position L - T + t of the gathered keys and sees itself and what came before; with a window W it
    sees at most W positions, itself included. Scores and weights are f32; weights meet the values in `dtype`. Query
    heads are in the order of the KV heads that they read, and each of these is read.
    """
    rows = query_TQK.shape[0]
    if rows == 1 and (margins := group_margins(kv_head_of_query)) is not None:
        return _one_row(query_TQK, key_HLK, value_HLV, margins, scale, sliding_window)
    if len(runs := head_runs(kv_head_of_query)) > 1:
        how = (scale, sliding_window, dtype)
        pieces = [
            attend(query_TQK[:, run.query], key_HLK[run.kv], value_HLV[run.kv], run.kv_head_of_query, *how)
            for run in runs
        ]
        return torch.cat(pieces, dim=1)
    group = runs[0].group
    if rows * key_HLK.shape[1] * group > MOST_SCORES:
        return _in_two(query_TQK, key_HLK, value_HLV, kv_head_of_query, scale, sliding_window, dtype)
    if rows >= FEWEST_FAST_ROWS and has_fast_linear(query_TQK.device, dtype):
        return _many_rows_fast(query_TQK, key_HLK, value_HLV, group, scale, sliding_window, dtype)
    return _many_rows(query_TQK, key_HLK, value_HLV, scale, sliding_window)


def _in_two(
    query_TQK: Tensor, key_HLK: Tensor, value_HLV: Tensor, kv_head_of_query: tuple[int, ...], scale: float,
    sliding_window: int, dtype: torch.dtype,
) -> Tensor:
    """Half the rows at a time, the earlier ones without the keys that only the later ones see."""
    later = query_TQK.shape[0] // 2
    seen = key_HLK.shape[1] - later
    how = (kv_head_of_query, scale, sliding_window, dtype)
    first = attend(query_TQK[:-later], key_HLK[:, :seen], value_HLV[:, :seen], *how)
    second = attend(query_TQK[-later:], key_HLK, value_HLV, *how)
    return torch.cat((first.to(dtype), second.to(dtype)))


def _one_row(
    query_1QK: Tensor, key_HLK: Tensor, value_HLV: Tensor, margins: tuple[int, int], scale: float, sliding_window: int
) -> Tensor:
    """`margins`: query heads that the first and the last group lack; they are added: one product takes all groups."""
    (heads, length, _), (before, after), own = key_HLK.shape, margins, query_1QK.shape[1]
    if before or after:
        query_1QK = functional.pad(query_1QK, (0, 0, before, after))
    query_HGK = query_1QK.view(heads, (before + own + after) // heads, -1).to(key_HLK.dtype)
    scores_HGL = _scores(query_HGK, key_HLK).mul_(scale)
    if 0 < sliding_window < length:
        scores_HGL[..., : length - sliding_window] = float("-inf")
    weights_HGL = torch.softmax(scores_HGL, dim=-1).to(value_HLV.dtype)
    attended_1QV = torch.bmm(weights_HGL, value_HLV).view(1, before + own + after, -1)
    return attended_1QV[:, before : before + own]


def _many_rows(
    query_TQK: Tensor, key_HLK: Tensor, value_HLV: Tensor, scale: float, sliding_window: int
) -> Tensor:
    mask_TL = causal_mask(query_TQK.shape[0], key_HLK.shape[1], sliding_window, query_TQK.device)
    return attend_by_library(query_TQK.to(key_HLK.dtype), key_HLK, value_HLV, mask_TL, scale)


def attend_by_library(
    query_TQK: Tensor, key_HLK: Tensor, value_HLV: Tensor, mask: Tensor | None, scale: float,
    older: bool | None = None,
) -> Tensor:
    """The library's own, [T, Q, V]; query heads are whole groups in order. `mask` [T, L]; None: causal, as in `attend`.

    `older`: as on a card whose best way takes no groups: then each head of a group at a time, with all KV heads.
    """
    group = query_TQK.shape[1] // key_HLK.shape[0]
    key, value = key_HLK[None], value_HLV[None]
    if group == 1 or not (is_older(query_TQK.device) if older is None else older):
        attended = _by_library(query_TQK.transpose(0, 1)[None], key, value, mask, scale, group > 1)
        return attended[0].transpose(0, 1)
    heads = [
        _by_library(query_TQK[:, head::group].transpose(0, 1)[None], key, value, mask, scale, False)[0].transpose(0, 1)
        for head in range(group)
    ]
    return torch.stack(heads, dim=2).flatten(1, 2)


def _by_library(
    query_1QTK: Tensor, key_1HLK: Tensor, value_1HLV: Tensor, mask: Tensor | None, scale: float, grouped: bool
) -> Tensor:
    """As torch.nn.attention.bias chooses, whose import would take seconds (it brings torch's compiler)."""
    rows, length = query_1QTK.shape[2], key_1HLK.shape[2]
    if mask is None and rows != length:
        facts = cuda.SDPAParams(query_1QTK, key_1HLK, value_1HLV, None, 0.0, False, grouped)
        if query_1QTK.shape[3] % FLASH_WIDTHS == 0 and cuda.can_use_flash_attention(facts):
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(query_1QTK, key_1HLK, value_1HLV, 0.0, True, False, scale=scale)[0]
        if cuda.can_use_efficient_attention(facts):
            turned = (each.transpose(1, 2) for each in (query_1QTK, key_1HLK, value_1HLV))
            found = torch.ops.aten._efficient_attention_forward(
                *turned, bias=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
                dropout_p=0.0, custom_mask_type=LOWER_RIGHT, compute_log_sumexp=False, scale=scale, seqlen_k=None,
            )  # fmt: skip
            return found[0].transpose(1, 2)
        mask = causal_mask(rows, length, 0, query_1QTK.device)
    return functional.scaled_dot_product_attention(
        query_1QTK, key_1HLK, value_1HLV, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _scores(query_HGK: Tensor, key_HLK: Tensor) -> Tensor:
    """q k^T, f32 [H, G, L]: before it is scaled it may be beyond f16."""
    turned = key_HLK.transpose(1, 2)
    if key_HLK.dtype is torch.float16:
        if key_HLK.is_cuda:
            return torch.bmm(query_HGK, turned, out_dtype=torch.float32)
        return torch.bmm(query_HGK.float(), turned.float())
    return torch.bmm(query_HGK, turned).float()


def _many_rows_fast(
    query_TQK: Tensor, key_HLK: Tensor, value_HLV: Tensor, group: int, scale: float, sliding_window: int,
    dtype: torch.dtype,
) -> Tensor:
    """One product a KV head, its group's query heads below one another. Keys are f32; values turned once."""
    rows = query_TQK.shape[0]
    heads, length, _ = key_HLK.shape
    width = value_HLV.shape[2]
    mask_TL = causal_mask(rows, length, sliding_window, query_TQK.device)
    # Without a window, what came before this chunk is seen whole: only the last square needs the mask.
    masked = slice(0, length) if sliding_window else slice(length - rows, length)
    query_HGTK = query_TQK.unflatten(1, (heads, group)).permute(1, 2, 0, 3).float() * scale
    value_HVL = torch.empty((heads, width, length), dtype=dtype, device=value_HLV.device)
    value_HVL.copy_(value_HLV.transpose(1, 2))
    attended_TQV = torch.empty((rows, heads * group, width), dtype=dtype, device=query_TQK.device)
    for head in range(heads):
        scores_GTL = fast_linear(query_HGTK[head].flatten(0, 1), key_HLK[head].float()).view(group, rows, length)
        scores_GTL[..., masked].masked_fill_(~mask_TL[:, masked], float("-inf"))
        weights = torch.softmax(scores_GTL, dim=-1).to(dtype).flatten(0, 1)
        product_GTV = fast_linear(weights, value_HVL[head]).view(group, rows, width)
        attended_TQV[:, head * group : (head + 1) * group] = product_GTV.transpose(0, 1)
    return attended_TQV


@lru_cache(maxsize=KEPT_MASKS)
def causal_mask(rows: int, length: int, sliding_window: int, device: torch.device) -> Tensor:
    """bool [rows, length]: True where row t (at position length - rows + t) may look. The same for every layer."""
    position = torch.arange(length - rows, length, device=device)[:, None]
    column = torch.arange(length, device=device)[None, :]
    mask = column <= position
    if sliding_window:
        mask &= column > position - sliding_window
    return mask


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Query heads, and the KV heads that these read, with as many of the former to each of the latter."""

    query: slice
    kv: slice
    group: int  # query heads of each KV head

    @property
    def kv_head_of_query(self) -> tuple[int, ...]:
        """Index within `kv`."""
        return tuple(head // self.group for head in range(self.query.stop - self.query.start))


@lru_cache(maxsize=256)
def head_runs(kv_head_of_query: tuple[int, ...]) -> tuple[HeadRun, ...]:
    """One run where groups are whole: a group that a part begins or ends inside is one of its own."""
    runs, query, kv = [], 0, 0
    for group, alike in groupby(len(list(readers)) for _, readers in groupby(kv_head_of_query)):
        heads = len(list(alike))
        runs.append(HeadRun(slice(query, query + heads * group), slice(kv, kv + heads), group))
        query, kv = query + heads * group, kv + heads
    return tuple(runs)


@lru_cache(maxsize=256)
def group_margins(kv_head_of_query: tuple[int, ...]) -> tuple[int, int] | None:
    """Query heads that the first and the last group lack to be as large as all others; None: these differ too."""
    groups = [len(list(readers)) for _, readers in groupby(kv_head_of_query)]
    largest = max(groups)
    return None if set(groups[1:-1]) - {largest} else (largest - groups[0], largest - groups[-1])
