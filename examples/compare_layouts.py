"""The same prompt in all four pairs of layouts: what each phase takes here, and whether the answers agree.

    python examples/compare_layouts.py demo --workers 2 --prompt-tokens 512 --max-tokens 32

Run it on an idle machine; the first round warms up and is not shown.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from statistics import median

from gearshift.coordinator.driver import Driver
from gearshift.coordinator.generation import FinishedEvent, GenerationRequest
from gearshift.coordinator.one_request import generate
from gearshift.launch.settings.options import Device, group_settings, layout_settings
from gearshift.launch.start.session_setup import open_model, open_session
from gearshift.proto.errors import GearshiftError
from gearshift.proto.generation_result import GenerationResult
from gearshift.proto.ids import Layout
from gearshift.proto.sampling import SamplingParameters

GREEDY = SamplingParameters(temperature=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Four pairs of layouts, one prompt.")
    parser.add_argument("model", help="a GGUF file, a folder with one, or demo")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compute-type", default="auto")
    options = parser.parse_args()

    model = open_model(options.model)
    prompt = tuple(index % model.spec.vocab for index in range(7, 7 + options.prompt_tokens))
    settings = group_settings(workers=options.workers, device=Device.CPU, compute_type=options.compute_type)
    context_tokens = options.prompt_tokens + options.max_tokens
    with open_session(model, settings, layout_settings(), context_tokens) as session:
        rounds = [_one_round(session.driver, prompt, options.max_tokens) for _ in range(options.rounds + 1)][1:]
    print("prefill  decode   prompt, s  shift exposed, s  answer, s")
    for index, (prefill, decode) in enumerate(product(Layout, Layout)):
        results = [results[index] for results in rounds]
        prompt_seconds = median(result.prefill.seconds for result in results)
        exposed = median(result.shift.exposed_seconds if result.shift else 0.0 for result in results)
        answer_seconds = median(result.decode.seconds for result in results)
        print(f"{prefill:7}  {decode:7}  {prompt_seconds:9.3f}  {exposed:16.4f}  {answer_seconds:9.3f}")
    answers = {tuple(token.token for token in result.tokens) for results in rounds for result in results}
    print("all answers are equal" if len(answers) == 1 else f"{len(answers)} different answers: a near-tie was passed")


def _one_round(driver: Driver, prompt: Sequence[int], max_tokens: int) -> list[GenerationResult]:
    """One result for each (prefill, decode), taken one after another so that a busy moment hits no pair alone."""
    return [_run(driver, prompt, max_tokens, prefill, decode) for prefill, decode in product(Layout, Layout)]


def _run(driver: Driver, prompt: Sequence[int], max_tokens: int, prefill: Layout, decode: Layout) -> GenerationResult:
    request = GenerationRequest(tuple(prompt), max_tokens, GREEDY, prefill=prefill, decode=decode)
    for event in generate(driver, request):
        if isinstance(event, FinishedEvent):
            return event.result
    raise RuntimeError("the request ended without a result")


if __name__ == "__main__":  # workers are processes: importing this file must start nothing
    try:
        main()
    except GearshiftError as error:  # a model that is not there, say: its message is for whoever reads
        sys.exit(str(error))
