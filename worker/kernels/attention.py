"""Attention of some query heads over gathered keys and values, plain torch."""

import torch
import torch.nn.functional as functional
from torch import Tensor


def attend(
    query_TQK: Tensor, key_HLK: Tensor, value_HLV: Tensor, kv_head_of_query: tuple[int, ...], scale: float,
    sliding_window: int,
) -> Tensor:
    """softmax(q k^T * scale) v for the T newest of L positions: [T, Q, V].

    Row t stands at position L - T + t of the gathered keys and sees itself and what came before; with a window W it
    sees at most W positions, itself included.
    """
    rows, _, _ = query_TQK.shape
    length = key_HLK.shape[1]
    group = _even_group(kv_head_of_query, key_HLK.shape[0])
    if group == 0:
        index = torch.tensor(kv_head_of_query, device=key_HLK.device)
        key_HLK, value_HLV, group = key_HLK[index], value_HLV[index], 1
    heads = key_HLK.shape[0]
    if rows == 1:
        query_HGK = query_TQK.view(heads, group, -1)
        scores = torch.bmm(query_HGK, key_HLK.transpose(1, 2)).float().mul_(scale)
        if 0 < sliding_window < length:
            scores[..., : length - sliding_window] = float("-inf")
        weights = torch.softmax(scores, dim=-1).to(value_HLV.dtype)
        return torch.bmm(weights, value_HLV).view(1, heads * group, -1)
    mask = causal_mask(rows, length, sliding_window, query_TQK.device)
    attended = functional.scaled_dot_product_attention(
        query_TQK.transpose(0, 1).unsqueeze(0), key_HLK.unsqueeze(0), value_HLV.unsqueeze(0), attn_mask=mask,
        scale=scale, enable_gqa=group > 1,
    )
    return attended.squeeze(0).transpose(0, 1)


def causal_mask(rows: int, length: int, sliding_window: int, device: torch.device) -> Tensor:
    """bool [rows, length]: True where row t (at position length - rows + t) may look."""
    position = torch.arange(length - rows, length, device=device)[:, None]
    column = torch.arange(length, device=device)[None, :]
    mask = column <= position
    if sliding_window:
        mask &= column > position - sliding_window
    return mask


def _even_group(kv_head_of_query: tuple[int, ...], kv_heads: int) -> int:
    """Query heads per KV head where they are whole groups in order, else 0."""
    if kv_heads and len(kv_head_of_query) % kv_heads == 0:
        group = len(kv_head_of_query) // kv_heads
        if all(head == index // group for index, head in enumerate(kv_head_of_query)):
            return group
    return 0
