"""A request that fails over numbers in the model's file: its client is told so, and others are answered meanwhile."""

from threading import Event

from gearshift.coordinator.model.file_blame import LOOK_SECONDS, FileBlame
from gearshift.proto.channel import ClientPeer
from gearshift.proto.client_messages import Accepted, AnyReply, Failed, Finished, Generate
from gearshift.tests.helpers.api_group import ApiGroup, answer_ids, run

ANNA, BEN = ClientPeer(b"anna"), ClientPeer(b"ben")
DAMAGED = "model.gguf: row 3 of tensor 'blk.0.attn_q.weight' (Q8_0) holds values that are no numbers"
WAIT_SECONDS = 10.0


class Look:
    """At a file, which takes until it is let go on."""

    def __init__(self, found: str | None) -> None:
        self.found, self.go_on, self.times = found, Event(), 0
        self.blame = FileBlame(self)

    def __call__(self) -> str | None:
        self.times += 1
        assert self.go_on.wait(WAIT_SECONDS)
        return self.found

    def end(self) -> None:
        self.go_on.set()
        assert self.blame._thread is not None
        self.blame._thread.join(WAIT_SECONDS)
        assert self.blame.ended


def ask(group: ApiGroup, peer: ClientPeer, text: str = "abc", max_tokens: int = 3) -> Accepted:
    [(_, accepted)] = group.api.handle(peer, Generate(1, text=text, max_tokens=max_tokens, stream=False))
    assert isinstance(accepted, Accepted)
    return accepted


def error_of(told: list[tuple[ClientPeer, AnyReply]], peer: ClientPeer = ANNA) -> str | None:
    [(to, finished)] = told
    assert to == peer
    assert isinstance(finished, Finished)
    return finished.result.error


def test_the_client_is_told_what_is_wrong_with_the_file_and_others_need_not_wait_for_that() -> None:
    look = Look(DAMAGED)
    group = ApiGroup(failing_after=0, blame=look.blame)
    ask(group, ANNA)
    assert run(group) == [], "it is being looked for"
    group.group._failing_after = None
    ask(group, BEN, "hello", 5)
    [(peer, answered)] = run(group)
    assert peer == BEN
    assert isinstance(answered, Finished)
    assert [token.token for token in answered.result.tokens] == answer_ids("hello", 5)
    look.end()
    error = error_of(group.api.heard([]))
    assert error == f"the logits are not numbers; {DAMAGED}"
    assert group.api.heard([]) == []
    assert group.at_rest


def test_the_file_is_looked_at_once_however_many_requests_fail() -> None:
    look = Look(DAMAGED)
    group = ApiGroup(failing_after=0, blame=look.blame)
    for peer in (ANNA, BEN):
        ask(group, peer)
    assert run(group) == []
    look.end()
    assert {peer for peer, _ in group.api.heard([])} == {ANNA, BEN}
    ask(group, ANNA)
    assert DAMAGED in str(error_of(run(group))), "told at once"
    assert look.times == 1


def test_over_a_sound_file_the_error_is_told_as_it_is() -> None:
    look = Look(None)
    group = ApiGroup(failing_after=0, blame=look.blame)
    ask(group, ANNA)
    look.go_on.set()
    told = run(group)
    look.end()
    assert error_of(told + group.api.heard([])) == "the logits are not numbers"


def test_a_file_that_takes_too_long_to_look_at_keeps_no_client_waiting() -> None:
    look, now = Look(DAMAGED), [7.0]
    look.blame = FileBlame(look, lambda: now[0])
    group = ApiGroup(failing_after=0, blame=look.blame)
    ask(group, ANNA)
    assert run(group) == [], "looking begins"
    now[0] += LOOK_SECONDS
    assert group.api.heard([]) == [], "not yet"
    now[0] += 0.1
    assert error_of(group.api.heard([])) == "the logits are not numbers"
    look.end()
    ask(group, BEN)
    assert DAMAGED in str(error_of(run(group), BEN)), "what was found in the end holds for others"


def test_a_client_that_leaves_meanwhile_is_forgotten_and_one_of_a_group_that_ends_is_told_that() -> None:
    look = Look(DAMAGED)
    group = ApiGroup(failing_after=0, blame=look.blame)
    ask(group, ANNA)
    asked = ask(group, BEN)
    assert run(group) == []
    group.api.left(ANNA)
    told = [reply for peer, reply in group.api.end("a worker was lost") if peer == BEN]
    assert isinstance(told[0], Failed)
    assert told[0].request == asked.request
    look.end()
    assert group.api.heard([]) == []
