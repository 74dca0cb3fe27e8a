"""A model that writes what a test wants: each token has one successor, whatever came before it.

Embeddings are one-hot, the layer adds nothing, and the head maps each token to the one that shall follow. So a greedy
answer follows the script, in every layout, through the real path: workers, sampler, text stream.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gearshift.tests.helpers.gguf_builder import build_model

UNKNOWN, BEGIN, END, FIRST_BYTE = 0, 1, 2, 3
BYTES = 256
WIDTH = 288  # vocabulary and hidden size: special tokens, all bytes, and the pieces of a script
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6


@dataclass(frozen=True, slots=True)
class ScriptedModel:
    """`prompt` starts the script; the answer is `answer`, then the end-of-text token (or the script again)."""

    path: Path
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def build_scripted_model(
    path: Path,
    script: Sequence[str | bytes],
    *,
    endless: bool = False,
    controls: Collection[str] = (),
    **metadata: Any,
) -> ScriptedModel:
    """`script`: a str is a token of that text (a control token where `controls` has it), a single byte a byte token;
    no token may come twice."""
    texts = [one for one in script if isinstance(one, str)]
    start = FIRST_BYTE + BYTES
    pieces = {text: start + 1 + number for number, text in enumerate(texts)}
    assert start + 1 + len(pieces) <= WIDTH, "too many pieces"
    answer = tuple(pieces[one] if isinstance(one, str) else FIRST_BYTE + one[0] for one in script)
    assert len(set(answer)) == len(script), "a token has one successor only"
    chain = [start, *answer, answer[0] if endless else END]
    head = np.zeros((WIDTH, WIDTH), np.float32)
    for token, following in pairwise(chain):
        head[following, token] = 1.0
    byte_texts = [f"<0x{byte:02X}>" for byte in range(BYTES)]
    tokens = ["<unk>", "<s>", "</s>", *byte_texts, "<start>", *pieces]
    kinds = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * BYTES, _CONTROL]
    kinds += [_CONTROL if text in controls else _NORMAL for text in pieces]
    build_model(
        path,
        layers=1,
        hidden=WIDTH,
        vocab=WIDTH,
        tensors={
            "token_embd.weight": np.eye(WIDTH, dtype=np.float32),
            "output.weight": head,
            "output_norm.weight": np.ones(WIDTH, np.float32),
            "blk.0.attn_output.weight": np.zeros((WIDTH, 64), np.float32),
            "blk.0.ffn_down.weight": np.zeros((WIDTH, 128), np.float32),
        },
        **{
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.scores": [0.0] * len(tokens),
            "tokenizer.ggml.bos_token_id": BEGIN,
            "tokenizer.ggml.eos_token_id": END,
        }
        | metadata,
    )
    return ScriptedModel(path, (start,), answer)
