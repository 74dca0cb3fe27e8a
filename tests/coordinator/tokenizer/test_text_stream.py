"""An answer's tokens as text: whole characters, stop strings, and the same text however it was cut."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gearshift.coordinator.tokenizer.text_stream import MAX_STOP_CHARACTERS, TextStream, parse_stops
from gearshift.proto.errors import InputError


def stream_of(pieces: Sequence[bytes], stops: object = None) -> TextStream:
    """A stream whose token n adds pieces[n]."""
    return TextStream(pieces.__getitem__, stops)


def fed(pieces: Sequence[bytes], stops: object = None) -> tuple[list[str], TextStream]:
    """What each token gave, then what the end gave."""
    stream = stream_of(pieces, stops)
    return [*(stream.feed(token) for token in range(len(pieces))), stream.finish()], stream


def letters(text: str) -> list[bytes]:
    return [bytes([byte]) for byte in text.encode()]


def test_f10_a_character_over_four_tokens_is_sent_when_it_is_whole() -> None:
    assert fed(letters("😀"))[0] == ["", "", "", "😀", ""]


def test_f10_a_character_cut_off_at_the_end_becomes_one_replacement_character() -> None:
    assert fed(letters("a😀")[:3])[0] == ["a", "", "", "\ufffd"]


@pytest.mark.parametrize(
    "bad", [b"\xc0\x80", b"\xed\xa0\x80", b"\x98", b"\xf0\x9f\x98a", b"\xff\xfe", b"\xe4\xbd\xe4\xbd\xa0"]
)
def test_f10_invalid_bytes_become_what_decoding_at_once_makes_of_them(bad: bytes) -> None:
    pieces = [bytes([byte]) for byte in b"x" + bad + b"y"]
    assert "".join(fed(pieces)[0]) == (b"x" + bad + b"y").decode("utf-8", "replace")


def test_f10_two_streams_that_take_turns_do_not_mix() -> None:
    pieces = letters("😀é")
    first, second = stream_of(pieces), stream_of(pieces)
    sent = ["", ""]
    for token in range(len(pieces)):
        sent[0] += first.feed(token)
        sent[1] += second.feed(token)
    assert [sent[0] + first.finish(), sent[1] + second.finish()] == ["😀é", "😀é"]


def test_f32_nothing_of_a_stop_over_seven_tokens_is_sent() -> None:
    sent, stream = fed(letters("abDEFGHIJz"), ["DEFGHIJ"])
    assert sent == ["a", "b", *[""] * 9]
    assert (stream.stopped, stream.stop) == (True, "DEFGHIJ")


def test_f32_text_held_for_a_stop_that_does_not_come_is_sent_when_that_is_clear() -> None:
    sent, stream = fed(letters("DEFGHIJ"), ["HIX"])
    assert sent == ["D", "E", "F", "G", "", "", "HIJ", ""]
    assert not stream.stopped


def test_f32_text_held_when_the_answer_ends_is_sent_then() -> None:
    sent, stream = fed(letters("GHI"), ["HIX"])
    assert sent == ["G", "", "", "HI"]
    assert (stream.stopped, stream.stop) == (False, None)


def test_f32_the_stop_that_is_complete_first_wins() -> None:
    sent, stream = fed(letters("DEFGHIJ"), ["GH", "FGHI"])
    assert "".join(sent) == "DEF"
    assert stream.stop == "GH"


def test_f32_of_stops_complete_at_once_the_longer_wins() -> None:
    sent, stream = fed([b"xFG", b"Hy"], ["GH", "FGH"])
    assert sent == ["x", "", ""]
    assert stream.stop == "FGH"


def test_f32_a_stop_inside_one_token_cuts_it() -> None:
    sent, stream = fed([b"one two three"], ["two"])
    assert sent == ["one ", ""]
    assert stream.stopped


def test_f32_a_stop_may_be_split_inside_a_character() -> None:
    sent, stream = fed(letters("aé你b"), ["é你"])
    assert "".join(sent) == "a"
    assert stream.stop == "é你"


def test_a_replacement_character_can_be_a_stop_at_the_very_end() -> None:
    sent, stream = fed([b"a\xf0\x9f"], ["\ufffd"])
    assert sent == ["a", ""]
    assert stream.stopped


def test_a_start_that_repeats_itself_is_not_missed() -> None:
    assert "".join(fed(letters("aaab"), ["aab"])[0]) == "a"
    assert "".join(fed(letters("abababc"), ["ababc"])[0]) == "ab"


def test_after_a_stop_or_the_end_nothing_more_is_sent() -> None:
    stream = stream_of([b"a", b"stop", b"b"], "stop")
    assert [stream.feed(0), stream.feed(1), stream.feed(2), stream.feed(0), stream.finish()] == [
        "a",
        "",
        "",
        "",
        "",
    ]
    ended = stream_of([b"a"])
    assert [ended.finish(), ended.feed(0), ended.finish()] == ["", "", ""]


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        ("", "stop string 0 is empty"),
        (["a", ""], "stop string 1 is empty"),
        (["a", 7], "stop string 1 is int"),
        ([None], "stop string 0 is NoneType"),
        (7, "not int"),
        ({"a": 1}, "not dict"),
        (["a"] * 17, "17 stop strings are too many"),
    ],
)
def test_f32_stops_that_make_no_sense_are_refused(stops: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        stream_of([], stops)


def test_f32_stops_may_be_none_one_or_up_to_sixteen() -> None:
    assert parse_stops(None) == parse_stops([]) == ()
    assert parse_stops("ab") == ("ab",)
    assert len(parse_stops([str(number) for number in range(16)])) == 16


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The rule, over the whole text: the stop that ends first, of those the longest, and all from it on is cut."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def split_anywhere(content: bytes, draw: Callable[[st.SearchStrategy[int]], int]) -> list[bytes]:
    """Pieces of 1 to 5 bytes, and one empty piece somewhere."""
    pieces = []
    while content:
        count = draw(st.integers(1, min(len(content), 5)))
        pieces.append(content[:count])
        content = content[count:]
    pieces.insert(draw(st.integers(0, len(pieces))), b"")
    return pieces


@st.composite
def answers(draw: st.DrawFn) -> list[bytes]:
    """Bytes, valid or not, cut anywhere."""
    characters = st.sampled_from(
        [b"a", b"b", "é".encode(), "😀".encode(), b"\xf0\x9f", b"\x98", b"\xed\xa0\x80", b"\xc0"]
    )
    content = b"".join(draw(st.lists(characters | st.binary(max_size=3), max_size=15)))
    return split_anywhere(content, draw)


@given(answers())
def test_the_text_in_pieces_is_the_text_at_once(pieces: list[bytes]) -> None:
    assert "".join(fed(pieces)[0]) == b"".join(pieces).decode("utf-8", "replace")


STOPS = st.lists(st.text("abé\ufffd", min_size=1, max_size=4), max_size=4)


@given(answers(), STOPS)
def test_with_stops_too_the_text_does_not_depend_on_the_cuts(pieces: list[bytes], stops: list[str]) -> None:
    sent, stream = fed(pieces, stops)
    expected, stop = cut_at_stop(b"".join(pieces).decode("utf-8", "replace"), stops)
    assert ("".join(sent), stream.stop) == (expected, stop)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4))
def test_no_more_is_held_back_than_a_stop_could_need(text: str, stops: list[str]) -> None:
    stream = stream_of(letters(text), stops)
    sent = ""
    for token in range(len(text)):
        sent += stream.feed(token)
        if stream.stopped:
            break
        held = text[len(sent) : token + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_the_longest_stop_string_is_found_and_a_longer_one_refused() -> None:
    stop = "ab" * (MAX_STOP_CHARACTERS // 2)
    texts, stream = fed([b"x", b"ab", stop.encode(), b"y"], stop)
    assert "".join(texts) == "x"
    assert stream.stop == stop
    with pytest.raises(InputError, match="stop string 1 has 4097 characters: 4096 are possible"):
        parse_stops(["a", stop + "a"])
