"""The remote API over a fake group whose tokens are letters: what a test of the protocol needs, without processes."""

from random import Random

from gearshift.coordinator.api.remote import RemoteApi
from gearshift.coordinator.api.service import Service
from gearshift.coordinator.driver import Driver
from gearshift.coordinator.driver_settings import DriverSettings
from gearshift.coordinator.model.file_blame import FileBlame
from gearshift.coordinator.tokenizer import Tokenizer, build_tokenizer
from gearshift.proto.channel import ClientPeer
from gearshift.proto.client_messages import AnyReply
from gearshift.proto.ids import Layout
from gearshift.proto.placement.cuts import place
from gearshift.tests.helpers.fake_group import FakeGroup
from gearshift.tests.helpers.fake_model import expected_answer
from gearshift.tests.helpers.serving import service_of
from gearshift.tests.helpers.specs import layer_spec, model_spec

CONTEXT = 128
LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?;:'"
VOCAB = len(LETTERS) + 1  # token 0 is unknown
SPEC = model_spec([layer_spec()] * 4, vocab=VOCAB)


def letters_tokenizer() -> Tokenizer:
    """One token a letter; BOS (the letter a) only where there is nothing else."""
    return build_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["<unk>", *(letter.replace(" ", "\u2581") for letter in LETTERS), "</s>"],
            "tokenizer.ggml.token_type": [2, *[1] * len(LETTERS), 3],
            "tokenizer.ggml.scores": [0.0] * (VOCAB + 1),
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": VOCAB,  # which the fake model never says
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.ggml.add_space_prefix": False,
        }
    )


def letters(ids: list[int]) -> str:
    return "".join(LETTERS[token - 1] if token else "?" for token in ids)


def answer_ids(prompt: str | tuple[int, ...], count: int) -> list[int]:
    """What the fake model says after a prompt."""
    ids = tuple(LETTERS.index(letter) + 1 for letter in prompt) if isinstance(prompt, str) else prompt
    return expected_answer(ids, count, VOCAB)


class ApiGroup:
    """Driver, service and a fresh `RemoteApi` over a fake group."""

    def __init__(
        self, ranks: int = 2, *, prefill: Layout | None = None, decode: Layout | None = None, slots: int = 400,
        parallel: int = 8, max_open: int = 8, failing_after: int | None = None, blame: FileBlame | None = None,
    ) -> None:  # fmt: skip
        placement = place(SPEC, ranks)
        settings = DriverSettings(
            context_tokens=CONTEXT, max_chunk_tokens=64, prefill=prefill, decode=decode,
            parallel_requests=parallel, max_open=max_open,
        )  # fmt: skip
        self.group = FakeGroup(ranks, (slots,) * ranks, vocab=VOCAB, random=Random(3), failing_after=failing_after)
        self.driver = Driver(self.group, SPEC, placement, settings)
        self.driver.load()
        self.service: Service = service_of(self.driver, placement, letters_tokenizer())
        self.api = RemoteApi(self.driver, self.service, blame=blame)

    @property
    def at_rest(self) -> bool:
        """No request anywhere, every slot free."""
        return self.driver.queue_counts == (0, 0, 0) and all(free == full for free, full in self.driver.kv_slots)


def run(group: ApiGroup) -> list[tuple[ClientPeer, AnyReply]]:
    """Work until nothing is left; all that clients are told."""
    told: list[tuple[ClientPeer, AnyReply]] = []
    for _ in range(2000):
        told += group.api.heard(group.driver.step(0.01))
        if group.driver.idle:
            return told
    raise AssertionError("it does not end")
