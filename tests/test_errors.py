"""What a user is told of an exception."""

from __future__ import annotations

import pytest

from autotune.errors import MAX_ERROR_CHARS, first_line


def raised(error: Exception) -> Exception:
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


def test_the_first_line_that_says_something() -> None:
    assert first_line(raised(ValueError("\n  \n too large\nby 3"))) == "too large"
    assert len(first_line(ValueError("x" * 1000))) == MAX_ERROR_CHARS


def test_an_error_without_a_message_is_told_by_what_raised_it_and_not_by_its_type() -> None:
    with pytest.raises(AssertionError) as caught:
        _check(3)
    said = first_line(caught.value)
    assert said.startswith("it failed without a message, in line ")
    assert said.endswith("of test_errors.py: raise AssertionError")
    assert first_line(ZeroDivisionError()) == "it failed without a message"


def _check(width: int) -> None:
    if width % 2:
        raise AssertionError
