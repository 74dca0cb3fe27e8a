"""`gearshift plan`: how a request would be run and why, by measured costs, before it is run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...proto.errors import InputError
from ...proto.words import counted
from ..console import stdout_console
from ..settings import flags
from ..settings.options import GROUP_FLAGS, LayoutSettings, flags_named, group_settings, layout_settings
from ..settings.user_folders import current_settings

if TYPE_CHECKING:
    from ...coordinator.costs.cost_model import Costs
    from ...coordinator.policy.forecast import Task
    from ...coordinator.policy.outlook import Outlook
    from ..plan.costs import FoundCosts
    from ..plan.report import PlanFacts

EXAMPLES = """\
gearshift plan demo --workers 2 --prompt-tokens 2000 --output-tokens 200

gearshift plan model.gguf --workers 2 --prompt-tokens 40000 --output-tokens 800 --json

gearshift plan --costs examples/rigs/4070_3060_q5_k_m.json --prompt-tokens 58300 --output-tokens 128

gearshift plan --costs examples/rigs/4070_3060_q5_k_m.json --prompt-tokens 58300 --output-tokens 128 --shift-seconds 0.3
"""

PromptTokens = Annotated[
    int,
    typer.Option(
        "-p", "--prompt-tokens", metavar="N", min=1, max=10_000_000, help="Length of the prompt.", show_default=False
    ),
]
MOST_CHUNKS = 100_000  # of all ranks: a plan beyond takes minutes, and nobody reads it

OutputTokens = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--output-tokens",
        metavar="N",
        min=1,
        max=10_000_000,
        help="Length of the answer. Left out: what is guessed before any answer was seen.",
    ),
]
CostsFile = Annotated[
    str | None,
    typer.Option(
        "--costs",
        metavar="FILE",
        help="Measured costs (docs/costs.md). With them no MODEL is needed, and no worker is started.",
    ),
]
Requests = Annotated[
    int,
    typer.Option(
        "--requests",
        metavar="N",
        min=1,
        max=1024,
        help="So many alike at once: prompts one by one, then one batch.",
    ),
]
ShiftSeconds = Annotated[
    float | None,
    typer.Option(
        "--shift-seconds",
        metavar="X",
        min=0,
        max=1e9,
        help="What if an answer waited so long for its shift, in either direction.",
    ),
]


def plan(
    prompt_tokens: PromptTokens,
    model: flags.OptionalModel = None,
    output_tokens: OutputTokens = None,
    costs: CostsFile = None,
    requests: Requests = 1,
    shift_seconds: ShiftSeconds = None,
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
    measure: flags.Measure = None,
    as_json: flags.Json = False,
) -> None:
    """Compare the four pairs of layouts for a prompt and an answer: times, the choice and why, chunks, who works when.

    Costs come from --costs, else from an earlier measurement of this model on this machine, else workers are started
    and measured.
    """
    arguments = locals()
    from ...coordinator.policy.answer_length import AnswerLengths
    from ...coordinator.policy.forecast import Task
    from ..plan.costs import costs_of_file, costs_of_model
    from ..plan.report import plan_json, show_plan

    settings = group_settings(**flags_named((*GROUP_FLAGS, "measure"), arguments))
    layouts = layout_settings(prefill, decode, chunk)
    answer = output_tokens or AnswerLengths().expected_tokens
    if model is not None:
        chosen = current_settings({"context": context})
        file = None if costs is None else Path(costs)
        found = costs_of_model(model, settings, layouts, (prompt_tokens, answer), chosen, file)
    elif costs is not None:
        found = costs_of_file(Path(costs), workers, max_chunk)
    else:
        raise InputError("give a MODEL, or measured costs by --costs")
    if found.planned is not None:  # as a run would end it; where the model does not fit nothing is known of it
        answer = min(answer, max(1, found.planned.context_tokens - prompt_tokens + 1))
    _refuse_many_chunks(prompt_tokens, found, layouts)
    facts = _plan(found, Task(prompt_tokens, answer - 1, requests=requests), layouts, shift_seconds)
    if as_json:
        print(json.dumps(plan_json(facts)))
    else:
        show_plan(facts, stdout_console())


def _refuse_many_chunks(prompt_tokens: int, found: "FoundCosts", layouts: LayoutSettings) -> None:
    from ...coordinator.chunks.plan import Fixed

    longest, ranks = found.limits.max_chunk, len(found.costs.stages)
    if isinstance(layouts.chunk_rule, Fixed):
        longest = min(longest, layouts.chunk_rule.sizes[-1])
    chunks = prompt_tokens // longest
    if chunks * ranks > MOST_CHUNKS:
        raise InputError(
            f"--prompt-tokens {prompt_tokens} are {counted(chunks, 'chunk')} of at most {counted(longest, 'token')} "
            f"on {counted(ranks, 'rank')}: "
            f"more than {MOST_CHUNKS} are not planned; take longer chunks (--chunk, --max-chunk) or a shorter prompt"
        )


def _plan(
    found: "FoundCosts", task: "Task", layouts: LayoutSettings, shift_seconds: float | None
) -> "PlanFacts":
    from ...coordinator.costs.cost_model import ShiftCost
    from ...coordinator.policy.outlook import look_ahead
    from ..plan.report import PlanFacts

    def outlook(costs: "Costs") -> "Outlook":
        return look_ahead(
            task, costs, layouts.prefill, layouts.decode, rule=layouts.chunk_rule, limits=found.limits, regret=regret,
            allowed=allowed,
        )  # fmt: skip

    planned = found.planned
    regret = planned.regret(found.costs) if planned is not None else None
    left_open = layouts.prefill is None and layouts.decode is None
    allowed = planned.case.journeys if planned is not None and left_open else None
    facts = PlanFacts(outlook(found.costs), found.model, found.told, found.facts, planned)
    if shift_seconds is None:
        return facts
    shift = ShiftCost(shift_seconds)
    return replace(
        facts,
        outlook=outlook(replace(found.costs, to_tensor=shift, to_layer=shift)),
        costs_from=f"{found.told}, but a shift of {shift_seconds:g} s",
        as_measured=facts.outlook,
    )
