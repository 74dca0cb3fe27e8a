"""`gearshift tokenize`: a text as the ids of a model's tokenizer. Starts no worker."""

import json
from typing import Annotated

import typer

from ..console import warn
from ..prompts import read_prompt_text
from ..settings import flags
from ..start.models import open_files, open_tokenizer

EXAMPLES = """\
gearshift tokenize demo -p "Hello, world"

gearshift tokenize demo -f text.txt --json

echo -n "<|im_start|>" | gearshift tokenize demo -f - --no-special
"""

NoSpecial = Annotated[bool, typer.Option("--no-special", help="Text of control tokens stays text.")]
NoBos = Annotated[
    bool, typer.Option("--no-bos", help="Put no begin-of-text (or end-of-text) token around the text.")
]


def tokenize(
    model: flags.Model,
    prompt: flags.Prompt = None,
    file: flags.PromptFile = None,
    no_special: NoSpecial = False,
    no_bos: NoBos = False,
    as_json: flags.Json = False,
) -> None:
    """Show the token ids of a text; BOS is put in front where the model's file asks for it."""
    text = read_prompt_text(prompt, file)
    tokenizer = open_tokenizer(open_files(model))
    for warning in tokenizer.warnings:
        warn(warning)
    ids = tokenizer.encode(text, add_special=not no_bos, parse_special=not no_special)
    print(json.dumps({"ids": ids}) if as_json else " ".join(map(str, ids)))
