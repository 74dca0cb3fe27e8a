"""Answers from a running group: one streamed, then four at once from asyncio tasks.

    gearshift coordinator demo --workers 2 --listen tcp://127.0.0.1:5555      (in another terminal)
    python examples/remote_client.py tcp://127.0.0.1:5555
"""

import argparse
import asyncio
import sys

import gearshift
from gearshift.proto.errors import GearshiftError

PROMPTS = ("The capital of France is", "The capital of Italy is", "Water boils at", "Once upon a time")


def one_answer(address: str, key_file: str | None) -> None:
    with gearshift.Client(address, key_file=key_file) as client:
        status = client.status()
        print(f"{status.model} on {len(status.ranks)} workers, {status.state}")
        for piece in client.generate("Once upon a time", max_tokens=12, temperature=0.0):
            print(piece, end="", flush=True)
        print()


async def answers_at_once(address: str, key_file: str | None) -> None:
    async with gearshift.AsyncClient(address, key_file=key_file) as client:

        async def ask(prompt: str) -> str:
            answer = await client.generate(prompt, max_tokens=6, temperature=0.0)
            result = await answer.result()
            return f"{prompt}|{result.text!r} ({len(result.tokens)} tokens, {result.finish_reason})"

        for line in await asyncio.gather(*map(ask, PROMPTS)):
            print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description="A client of `gearshift coordinator`.")
    parser.add_argument("address", help="where the coordinator listens: tcp://HOST:PORT")
    parser.add_argument("--key-file", help="the group's keys, where it has some")
    options = parser.parse_args()
    one_answer(options.address, options.key_file)
    asyncio.run(answers_at_once(options.address, options.key_file))


if __name__ == "__main__":
    try:
        main()
    except GearshiftError as error:  # a model that is not there, say: its message is for whoever reads
        sys.exit(str(error))
