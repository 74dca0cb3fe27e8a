"""A program that behaves like llama-bench: its help, its JSON, its failures. `write` makes one."""

import sys
from pathlib import Path

HELP = "  -pg <pp,tg>                   (default: )\n  -sm, --split-mode <{modes}>   (default: layer)\n"
SOURCE = """#!{python}
import json, os, sys, time
words = sys.argv[1:]
if "--help" in words:
    print({help!r})
    sys.exit(0)
value = dict(zip(words, words[1:]))
mode = value["-sm"]
if mode in {failing!r}:
    print("CUDA error: out of memory", file=sys.stderr)
    sys.exit(1)
if mode in {hanging!r}:
    time.sleep(600)
if mode in {babbling!r}:
    print("| model | size |")
    sys.exit(0)
prompt, answer = map(int, value["-pg"].split(","))
with open({log!r}, "a") as log:
    log.write(" ".join(words) + "\\n")
build = {{"build_commit": "abc123", "build_number": 7}}
slower = 2 if mode == "layer" else 1
print(json.dumps([
    {{**build, "n_prompt": prompt, "n_gen": 0, "avg_ns": slower * 1_500_000_000,
      "samples_ns": [slower * 1_000_000_000, slower * 900_000_000, slower * 2_600_000_000]}},
    {{**build, "n_prompt": prompt, "n_gen": answer, "avg_ns": slower * 3_000_000_000,
      "samples_ns": [slower * 2_900_000_000, slower * 3_100_000_000]}},
]))
"""


def write(
    folder: Path,
    modes: str = "none|layer|row|tensor",
    failing: tuple[str, ...] = (),
    hanging: tuple[str, ...] = (),
    babbling: tuple[str, ...] = (),
    help_text: str | None = None,
) -> Path:
    """The program's path. Each measurement leaves its arguments as a line of `calls` beside it."""
    path = folder / "llama-bench"
    told = HELP.format(modes=modes) if help_text is None else help_text
    path.write_text(
        SOURCE.format(
            python=sys.executable, help=told, failing=failing, hanging=hanging, babbling=babbling,
            log=str(folder / "calls"),
        )
    )  # fmt: skip
    path.chmod(0o755)
    return path
