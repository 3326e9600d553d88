"""Expressions agree with Python's own arithmetic, refuse everything else, and never hang or crash on noise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsc.runtime.expressions import (
    LETTERS,
    MAX_DEPTH,
    MAX_LENGTH,
    ExpressionError,
    evaluate,
    names_of,
    parse,
    parse_guard,
)

VALUES = dict.fromkeys(LETTERS, 7) | {"T": 129, "B": 3, "SMS": 132}
PYTHON = {"ceil_div": lambda a, b: -(-a // b), "min": min, "max": max, "__builtins__": {}}


@st.composite
def expressions(draw, depth=4):
    if depth == 0 or draw(st.booleans()):
        return draw(st.one_of(st.integers(0, 999).map(str), st.sampled_from(sorted(VALUES))))
    left, right = draw(expressions(depth=depth - 1)), draw(expressions(depth=depth - 1))
    if draw(st.booleans()):
        return f"{draw(st.sampled_from(['ceil_div', 'min', 'max']))}({left},{right})"
    return f"({left} {draw(st.sampled_from(['+', '-', '*', '//']))} {right})"


@given(expressions())
def test_agrees_with_python(text):
    try:
        wanted = eval(text, PYTHON, VALUES)  # noqa: S307 - our own strategy's text, over arithmetic only
    except ZeroDivisionError:
        with pytest.raises(ExpressionError, match="division by zero"):
            evaluate(text, VALUES)
        return
    assert evaluate(text, VALUES) == wanted


@given(expressions(), st.sampled_from(sorted(LETTERS)))
def test_what_grows_never_shrinks(text, letter):
    if not parse(text).grows():
        return
    try:
        sizes = [evaluate(text, VALUES | {letter: value}) for value in (0, 1, 2, 5, 64, 1000)]
    except ExpressionError:  # division by zero
        return
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("text", ["T*4", "ceil_div(T,64)", "T+B*2", "T-1", "min(T,64)", "max(T,8)*N", "T//2"])
def test_sizes_that_grow(text):
    assert parse(text).grows()


@pytest.mark.parametrize("text", ["64-T", "T//B", "ceil_div(64,T)", "T*(B-4)", "B-T"])
def test_sizes_that_may_shrink(text):
    assert not parse(text).grows()


def test_precedence_and_names():
    assert evaluate("2+3*4//5-1", {}) == 3
    assert evaluate("10-3-2", {}) == 5
    assert evaluate("-T*2", {"T": 3}) == -6
    assert evaluate(12, {}) == 12
    assert names_of("ceil_div(T, 64) * SMS + I") == {"T", "SMS", "I"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "wanted a number or a letter, got the end"),
        ("T**2", "got '*'"),
        ("T/2", "unexpected '/'"),
        ("X+1", "unknown letter X, known: T, B"),
        ("__import__('os')", 'unexpected "\'"'),
        ("min(T)", "wanted ,, got ')'"),
        ("(T", "wanted ), got the end"),
        ("T 2", "wanted an operator, got '2'"),
        ("min", "wanted (, got the end"),
        ("1.5", "unexpected '.'"),
        ("T+" * MAX_LENGTH + "T", "at most 400 are read"),
    ],
)
def test_refuses(text, message):
    with pytest.raises(ExpressionError) as caught:
        parse(text)
    assert message in str(caught.value)


@given(st.text(max_size=60))
def test_noise_is_refused_or_read(text):
    try:
        parse(text)
        parse_guard(text)
    except ExpressionError:
        pass


def test_deep_nesting_stays_within_the_stack():
    depth = MAX_DEPTH - 1
    assert evaluate("(" * depth + "1" + ")" * depth, {}) == 1
    assert evaluate("+".join("T" * (MAX_LENGTH // 2)), {"T": 1}) == MAX_LENGTH // 2
    for text in ("(" * 199 + "1" + ")" * 199, "-" * 300 + "1"):
        with pytest.raises(ExpressionError, match="nested deeper than 20"):
            parse(text)


def test_a_letter_without_a_value():
    with pytest.raises(ExpressionError, match=r"T\*B: B has no value"):
        evaluate("T*B", {"T": 1})


def test_guards():
    guard = parse_guard("T <= 64 and B*2 > 4")
    assert guard.names() == {"T", "B"}
    assert guard.holds({"T": 64, "B": 3})
    assert not guard.holds({"T": 65, "B": 3})
    assert not guard.holds({"T": 64, "B": 2})
    assert parse_guard("").holds({})
    for text in ("T", "T < B < 3", "T <= 64 or B > 1", "T = 3", "T != 3", "T <"):
        with pytest.raises(ExpressionError):
            parse_guard(text)
