"""One answer from Python: starts a group of workers on this machine, streams the text, ends them.

    python examples/generate.py demo --workers 2 "The capital of France is"
"""

import argparse
import sys

from gearshift.coordinator.generation import GenerationRequest
from gearshift.coordinator.tokenizer.text_stream import TextStream
from gearshift.launch.answer import follow
from gearshift.launch.settings.options import Device, group_settings, layout_settings
from gearshift.launch.settings.sampling_settings import choose_sampling
from gearshift.launch.start.session_setup import open_model, open_session
from gearshift.proto.errors import GearshiftError


def main() -> None:
    parser = argparse.ArgumentParser(description="One answer from a group of local workers.")
    parser.add_argument("model", help="a GGUF file, a folder with one, or demo")
    parser.add_argument("prompt")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=24)
    options = parser.parse_args()

    model = open_model(options.model)
    prompt = tuple(model.tokenizer.encode(options.prompt))
    request = GenerationRequest(
        prompt=prompt,
        max_tokens=options.max_tokens,
        sampling=choose_sampling(model.files.metadata, {"temperature": 0.0}).parameters,
        stop_tokens=model.tokenizer.end_of_generation,
    )
    settings = group_settings(workers=options.workers, device=Device.CPU)
    with open_session(model, settings, layout_settings(), context=512) as session:
        stream = TextStream(model.tokenizer.token_bytes)
        _, result = follow(session.driver, request, stream, lambda piece: print(piece, end="", flush=True))
    print()
    print(f"prompt read in the {result.prefill.layout} layout: {result.prefill.reason}")
    print(f"{len(result.tokens)} tokens written in the {result.decode.layout} layout, ended by {result.finish_reason}")


if __name__ == "__main__":  # workers are processes: importing this file must start nothing
    try:
        main()
    except GearshiftError as error:  # a model that is not there, say: its message is for whoever reads
        sys.exit(str(error))
