"""Flags that several commands share, each with its help text: annotations for typer."""

from typing import Annotated

import typer

from ...proto.sampling import SamplingParameters
from .options import Device

DEFAULTS = SamplingParameters()

GROUP = "Workers and layout"
SAMPLING = "Sampling"
OUTPUT = "Output"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A GGUF file, a folder with one, a name in `model_folders` (see `gearshift config`), or `demo`.",
        show_default=False,
    ),
]

OptionalModel = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A GGUF file, a folder with one, a name in `model_folders` (see `gearshift config`), or `demo`.",
        show_default=False,
    ),
]
KeyFile = Annotated[
    str | None,
    typer.Option("--key-file", metavar="FILE", help="The group's keys (made by `gearshift keys`)."),
]
Connect = Annotated[
    str | None,
    typer.Option(
        "--connect",
        metavar="tcp://HOST:PORT",
        help="Use a running `gearshift coordinator` instead of a MODEL of one's own.",
    ),
]

Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="S",
        min=1,
        max=64,
        help="Worker processes, one a device. Left out: 1.",
        rich_help_panel=GROUP,
    ),
]
DeviceFlag = Annotated[
    Device | None,
    typer.Option("--device", help="Where the workers compute. Left out: auto.", rich_help_panel=GROUP),
]
Prefill = Annotated[
    str | None,
    typer.Option(
        "--prefill",
        metavar="auto|layer|tensor",
        help="Layout that reads the prompt: a pipeline of layers, or every layer cut over all workers.",
        rich_help_panel=GROUP,
    ),
]
Decode = Annotated[
    str | None,
    typer.Option(
        "--decode", metavar="auto|layer|tensor", help="Layout that writes the answer.", rich_help_panel=GROUP
    ),
]
ChunkRule = Annotated[
    str | None,
    typer.Option(
        "--chunk",
        metavar="auto|sqrt[:RATIO]|N[,N..]",
        help="How the prompt is cut for the pipeline: by measured costs, by the square-root rule, or these lengths.",
        rich_help_panel=GROUP,
    ),
]
MaxChunk = Annotated[
    int | None,
    typer.Option(
        "--max-chunk", metavar="N", min=1, help="Longest chunk the buffers take.", rich_help_panel=GROUP
    ),
]
MaxTokenGap = Annotated[
    float | None,
    typer.Option(
        "--max-token-gap",
        metavar="MS",
        help="Most milliseconds between two tokens of an answer while other prompts are read (inter-token latency):"
        " their chunks become as short as that needs.",
        rich_help_panel=GROUP,
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        "-c",
        metavar="N",
        min=1,
        help="Tokens of prompt and answer together. Left out: enough for the prompt, and told.",
        rich_help_panel=GROUP,
    ),
]
LayerSplit = Annotated[
    str | None,
    typer.Option(
        "--layer-split", metavar="N,..", help="Cut points between stages: 12,24,36.", rich_help_panel=GROUP
    ),
]
LayerShare = Annotated[
    str | None,
    typer.Option(
        "--layer-share",
        metavar="auto|X,..",
        help="Share of the layers each stage owns: 3,1. auto: equal; unequal devices are timed.",
        rich_help_panel=GROUP,
    ),
]
TensorShare = Annotated[
    str | None,
    typer.Option(
        "--tensor-share",
        metavar="auto|X,..",
        help="Share of every layer each worker owns: 3,1. auto: equal; unequal devices are timed.",
        rich_help_panel=GROUP,
    ),
]
ComputeTypeFlag = Annotated[
    str | None,
    typer.Option(
        "--compute-type",
        metavar="auto|f32|f16|bf16",
        help="Type that matrices are multiplied in. auto: on CPU the faster of f32 and bf16, bf16 where f32 takes too "
        "much memory; cards: bf16, older ones f16.",
        rich_help_panel=GROUP,
    ),
]
KvTypeFlag = Annotated[
    str | None,
    typer.Option(
        "--kv-type",
        metavar="auto|f32|f16|bf16|q8_0",
        help="Type of the KV cache; two with a comma are for keys and values. auto: the compute type.",
        rich_help_panel=GROUP,
    ),
]
ExactActivations = Annotated[
    bool | None,
    typer.Option(
        "--exact-activations/--no-exact-activations",
        help="On GPUs answers are written without activations in int8: slower. On CPU they never are.",
        rich_help_panel=GROUP,
    ),
]
NoPeer = Annotated[
    bool | None,
    typer.Option(
        "--no-peer",
        help="For tests: GPUs do not reach into each other's memory, as cards without peer access cannot.",
        rich_help_panel=GROUP,
    ),
]
ThrottleLink = Annotated[
    float | None,
    typer.Option(
        "--throttle-link",
        metavar="GB/S",
        help="For tests: what workers send each other takes as long as over a link of this speed.",
        rich_help_panel=GROUP,
    ),
]
Reserve = Annotated[
    str | None,
    typer.Option(
        "--reserve",
        metavar="SIZE",
        help="Memory left free on each device: 256M, 1G. Left out: 256M, 768M on a card with a display.",
        rich_help_panel=GROUP,
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE,..",
        help="Most memory each worker may hold: 8G for all, or 8G,6G for each.",
        rich_help_panel=GROUP,
    ),
]
ResidencyFlag = Annotated[
    str | None,
    typer.Option(
        "--residency",
        metavar="auto|both|migrate|owner",
        help="Where layers lie: for both layouts, moved at a shift, or whole on one worker. auto: as many both as fit.",
        rich_help_panel=GROUP,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", metavar="N", min=1, max=1024, help="CPU threads of each worker.", rich_help_panel=GROUP
    ),
]

MaxTokens = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--max-tokens",
        metavar="N",
        min=0,
        help="Tokens to write; 0: none. Left out: to the context's end.",
    ),
]
Prompt = Annotated[
    str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt, taken as it stands.")
]
PromptFile = Annotated[
    str | None, typer.Option("--file", "-f", metavar="FILE", help="A UTF-8 file; `-` is standard input.")
]
TokensFile = Annotated[
    str | None,
    typer.Option(
        "--tokens-file",
        metavar="IDS.json",
        help="A JSON list of token ids, or what `tokenize --json` prints; no BOS is added.",
    ),
]

Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        "--temp",
        metavar="X",
        help="0 is greedy. Left out, here and below: what the model's file recommends, else 0.8.",
        rich_help_panel=SAMPLING,
    ),
]
TopK = Annotated[
    int | None, typer.Option("--top-k", metavar="N", help="0: all. Else 40.", rich_help_panel=SAMPLING)
]
TopP = Annotated[
    float | None, typer.Option("--top-p", metavar="X", help="1: off. Else 0.95.", rich_help_panel=SAMPLING)
]
MinP = Annotated[
    float | None, typer.Option("--min-p", metavar="X", help="0: off. Else 0.05.", rich_help_panel=SAMPLING)
]
RepeatPenalty = Annotated[
    float | None,
    typer.Option(
        "--repeat-penalty",
        "--repetition-penalty",
        metavar="X",
        help="1: off. Sees the whole prompt.",
        rich_help_panel=SAMPLING,
    ),
]
RepeatLastN = Annotated[
    int | None,
    typer.Option(
        "--repeat-last-n",
        metavar="N",
        help="Tokens that the penalties look at; -1: all.",
        rich_help_panel=SAMPLING,
    ),
]
PresencePenalty = Annotated[
    float | None, typer.Option("--presence-penalty", metavar="X", rich_help_panel=SAMPLING)
]
FrequencyPenalty = Annotated[
    float | None, typer.Option("--frequency-penalty", metavar="X", rich_help_panel=SAMPLING)
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        metavar="ID=BIAS",
        help="Added to a token's logit; repeatable.",
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="-1: a random one. Left out: 0.", rich_help_panel=SAMPLING)
]
Logprobs = Annotated[
    int,
    typer.Option(
        "--logprobs",
        metavar="N",
        help="Likeliest tokens told for each step (--json).",
        rich_help_panel=SAMPLING,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="Ends the answer before this text; repeatable."),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Write on past the end-of-text token.")]
VerifyShift = Annotated[
    bool | None,
    typer.Option(
        "--verify-shift/--no-verify-shift",
        help="Hash keys and values before and after the shift.",
        rich_help_panel=GROUP,
    ),
]
Measure = Annotated[
    bool | None,
    typer.Option(
        "--measure/--no-measure",
        help="Time chunks, steps and links at start, though costs of such a group are kept from before.",
        rich_help_panel=GROUP,
    ),
]
Restarts = Annotated[
    int | None,
    typer.Option(
        "--restarts",
        metavar="N",
        min=0,
        max=1000,
        help="Times within 10 minutes that lost workers are started again, and open requests go on. "
        "Left out: 2, but for run 0.",
        rich_help_panel=GROUP,
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="One line of JSON on stdout, all else on stderr.", rich_help_panel=OUTPUT),
]

TraceFile = Annotated[
    str | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Write what every rank did when, for Perfetto or chrome://tracing: FILE.json or FILE.json.gz.",
        rich_help_panel=OUTPUT,
    ),
]

CHAT = "Chat"

System = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", help="A system message before all others.", rich_help_panel=CHAT),
]
MessagesFile = Annotated[
    str | None,
    typer.Option(
        "--messages",
        metavar="FILE.json",
        help="A JSON list of messages to go on from; `-` is standard input.",
        rich_help_panel=CHAT,
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        "--template",
        metavar="NAME|FILE",
        help="One of the model file's named chat templates, or a file with one.",
        rich_help_panel=CHAT,
    ),
]
TemplateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--template-option",
        metavar="NAME=VALUE",
        help="A variable of the template, as JSON or text: enable_thinking=false; repeatable.",
        rich_help_panel=CHAT,
    ),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat", help="The prompt is a user's message, written by the chat template.", rich_help_panel=CHAT
    ),
]
