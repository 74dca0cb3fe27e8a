"""`gearshift logits`: the logits of every position, for comparison with other programs and other layouts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...proto.errors import InputError, RequestFailedError
from ...proto.words import counted
from ..console import note, warn
from ..outputs import writable_output
from ..prompts import PromptTokens, prompt_tokens
from ..settings import flags
from ..settings.options import GROUP_FLAGS, flags_named, group_settings, layout_settings
from ..settings.user_folders import current_settings

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

EXAMPLES = """\
gearshift logits demo --tokens-file ids.json --prompt-length 37 --out logits.npy

gearshift logits demo --tokens-file ids.json --prompt-length 37 --workers 2 --prefill layer --decode tensor --out l.npy
"""

TokensFile = Annotated[
    str,
    typer.Option(
        "--tokens-file",
        metavar="IDS.json",
        help="A JSON list of token ids, or what `tokenize --json` prints.",
    ),
]
PromptLength = Annotated[
    int | None,
    typer.Option("--prompt-length", metavar="K", min=1, help="Tokens read as the prompt. Left out: all."),
]
Out = Annotated[
    str, typer.Option("--out", metavar="FILE.npy", help="Where the array goes: f32, tokens by vocabulary.")
]


def logits(
    model: flags.Model,
    tokens_file: TokensFile,
    out: Out,
    prompt_length: PromptLength = None,
    workers: flags.Workers = None,
    device: flags.DeviceFlag = None,
    threads: flags.Threads = None,
    prefill: flags.Prefill = None,
    decode: flags.Decode = None,
    chunk: flags.ChunkRule = None,
    max_chunk: flags.MaxChunk = None,
    context: flags.Context = None,
    layer_split: flags.LayerSplit = None,
    layer_share: flags.LayerShare = None,
    tensor_share: flags.TensorShare = None,
    compute_type: flags.ComputeTypeFlag = None,
    kv_type: flags.KvTypeFlag = None,
    exact_activations: flags.ExactActivations = None,
    reserve: flags.Reserve = None,
    memory_limit: flags.MemoryLimit = None,
    residency: flags.ResidencyFlag = None,
    no_peer: flags.NoPeer = None,
    throttle_link: flags.ThrottleLink = None,
    trace: flags.TraceFile = None,
) -> None:
    """Write the logits of every position: the first K are read as a prompt, the rest fed one by one as an answer."""
    arguments = locals()
    from ...coordinator.evaluation import collect_logits
    from ..inputs import read_token_list
    from ..start.session_setup import chosen_context, open_model, open_session

    settings = group_settings(**flags_named(GROUP_FLAGS, arguments))
    layouts = layout_settings(prefill, decode, chunk)
    values = PromptTokens(tuple(read_token_list(tokens_file)), tokens_file)
    target = writable_output("--out", out, "an array goes")
    opened = open_model(model)
    tokens = prompt_tokens(values, opened.tokenizer, opened.spec.vocab)
    if prompt_length is not None and prompt_length > len(tokens):
        raise InputError(
            f"--prompt-length {prompt_length} is more than the {counted(len(tokens), 'token')} of {tokens_file}"
        )
    chosen = current_settings({"context": context})
    context_wish = chosen_context(chosen, len(tokens), 0, opened.spec.trained_context)
    with open_session(opened, settings, layouts, context_wish, trace_path=trace) as session:
        rows, result = collect_logits(
            session.driver,
            tokens,
            prompt_length or len(tokens),
            layouts.prefill,
            layouts.decode,
            layouts.chunk_rule,
        )
        refuse_non_finite(rows)
    if result.warning is not None:
        warn(result.warning)
    _write(target, rows)
    used = f"prompt in the {result.prefill.layout} layout, the rest in {result.decode.layout}"
    note(f"{target}: f32 {list(rows.shape)}, {used}")


def refuse_non_finite(rows: "npt.NDArray[np.float32]") -> None:
    """RequestFailedError where a row's greatest value is none."""
    import numpy as np

    wrong = ~np.isfinite(rows.max(axis=1))
    if wrong.any():
        first = int(wrong.argmax())
        told = f"those of {counted(int(wrong.sum()), 'position')}, {first} the first"
        raise RequestFailedError(f"the logits are not numbers: {told}")


def _write(target: Path, rows: "npt.NDArray[np.float32]") -> None:
    import numpy as np

    try:
        with target.open("wb") as file:  # np.save given a name would add .npy to one that ends otherwise
            np.save(file, rows)
    except OSError as error:
        raise InputError(f"--out: cannot write {target}: {error.strerror or error}") from None
