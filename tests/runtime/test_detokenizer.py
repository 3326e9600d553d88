"""Text as it comes: whole characters only, nothing taken back, the same however it is cut."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsc.runtime.detokenizer import BROKEN, Detokenizer, StopStrings, whole_text
from dsc.runtime.tokenizer import Tokenizer

TINY = Path(__file__).parents[2] / "examples" / "tiny-r1"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TINY)


def bytes_decode(ids):
    """A tokenizer whose tokens are bytes."""
    return bytes(ids).decode("utf-8", errors="replace")


def stream(decode, ids):
    detokenizer = Detokenizer(decode)
    return [*(detokenizer.add(i) for i in ids), detokenizer.finish()]


@given(st.text(max_size=12))
def test_whole_characters_come_as_soon_as_they_are_whole(text):
    pieces = stream(bytes_decode, text.encode())
    assert "".join(pieces) == text.rstrip(BROKEN)
    if BROKEN not in text:
        assert not any(BROKEN in piece for piece in pieces)
        assert pieces[-1] == ""


@settings(max_examples=300)
@given(st.binary(max_size=16))
@example(b"\xf0\x9f\x98")
@example(b"whole\xe2\x82")
@example(b"a\xffb\xc3")
def test_pieces_of_any_bytes_equal_the_whole(data):
    pieces = stream(bytes_decode, data)
    assert "".join(pieces) == whole_text(bytes_decode, data)
    assert not any(piece.endswith(BROKEN) for piece in pieces)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2047), max_size=24))
def test_pieces_of_any_tokens_equal_the_whole(tokenizer, ids):
    assert "".join(stream(tokenizer.decode, ids)) == tokenizer.decode(ids).rstrip(BROKEN)


@pytest.mark.parametrize("text", ["naïve café — 日本語 🙂🙂", "def f(x):\n    return x\n", "👩‍👩‍👧"])
def test_real_text_streams_without_broken_characters(tokenizer, text):
    pieces = stream(tokenizer.decode, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any(BROKEN in piece for piece in pieces)


def test_a_token_may_depend_on_the_one_before():
    """As with SentencePiece, whose first token loses its space."""
    words = ["▁a", "▁b", "c", "▁d"]
    decode = lambda ids: "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")  # noqa: E731
    assert "".join(stream(decode, [0, 1, 2, 3, 0])) == "a bc d a"


def cut(stops, pieces):
    checker, shown = StopStrings(stops), ""
    for piece in pieces:
        shown += checker.add(piece)
        if checker.found is not None:
            return shown, checker.found
    return shown + checker.finish(), None


letters = st.text("ab", max_size=14)


@settings(max_examples=400)
@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), letters, st.lists(st.integers(1, 5), max_size=14))
@example(["bb", "abba"], "abba", [4])
def test_stop_strings_cut_the_same_however_the_text_comes(stops, text, sizes):
    pieces, at = [], 0
    for size in [*sizes, len(text)]:
        pieces.append(text[at : at + size])
        at += size
    shown, found = cut(stops, pieces)
    assert (shown, found) == cut(stops, list(text))
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(s) for s in stops)]
    if not ends:
        assert (shown, found) == (text, None)
    else:
        assert found is not None
        assert shown + found == text[: ends[0]]
    assert not any(s in shown for s in stops)


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), letters)
def test_what_was_shown_is_never_part_of_a_stop_string(stops, text):
    final, _ = cut(stops, list(text))
    checker, shown = StopStrings(stops), ""
    for letter in text:
        shown += checker.add(letter)
        assert final.startswith(shown)
        if checker.found is not None:
            break
    assert checker.found is None or shown == final


def test_text_that_may_become_a_stop_string_waits():
    checker = StopStrings(["END"])
    assert [checker.add(piece) for piece in ("x", "E", "N", "x", "EEN")] == ["x", "", "", "ENx", "E"]
    assert checker.add("D!") == ""
    assert checker.found == "END"
