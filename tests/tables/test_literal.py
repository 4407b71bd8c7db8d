"""The literal reader against hostile and honest sources."""

from __future__ import annotations

import ast
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.tables.literal import MAX_ENTRIES, Entries, LiteralError, assigned, names_assigned


def plain(value):
    """Entries as the dict that Python would make of it."""
    if isinstance(value, Entries):
        return {key: plain(inner) for key, inner, _ in value.items}
    return value


scalars = st.one_of(
    st.integers(0, 10**17),
    st.text(st.characters(codec="ascii", exclude_characters="\\'\"", exclude_categories=["C"]), max_size=8),
    st.none(),
)
literals = st.recursive(
    st.one_of(scalars, st.lists(scalars, max_size=12).map(tuple)),
    lambda inner: st.dictionaries(st.one_of(scalars, st.tuples(scalars, scalars)), inner, max_size=4),
    max_leaves=12,
).filter(lambda value: value is not None)


@given(literals)
def test_reads_what_python_would(value):
    try:
        got = assigned(f"import os\nT = {value!r}  # done\n", "T")
    except LiteralError as error:
        assert "nested deeper" in str(error)
    else:
        assert plain(got["T"]) == value


def test_comments_strings_and_other_names_are_passed_over():
    text = (
        '"""T = {1: 2}"""\n# T = {3: 4}\ns = "\\"\\nT = 5"\nTT = {}\n'
        "T: dict = {  # a comment, with a {\n 1: (2, 3,),}\n"
    )
    assert plain(assigned(text, "T")["T"]) == {1: (2, 3)}
    assert assigned('"""T = {1: 2}"""', "T") == {}


def test_reading_a_table_does_not_change_it():
    text = (
        "T = {1: (2, 3)}\nassert T[1] == (2, 3)\nprint(T)\nlen(T)\nf = dict(T=3)\nx = g(T)\n"
        "def look(d, k):\n    tb = T[d]\n    if d in T:\n        tb = tb[k]\n    return T.get(d) or tb\n"
        "for d, rows in T.items():\n    size = len(rows)\n    total[d] = rows[1]\ndel d, rows\n"
    )
    assert plain(assigned(text, "T")["T"]) == {1: (2, 3)}


def test_other_constants_that_are_no_literals_are_left_out():
    text = "O = 100 * 1024\nP = {'a': f()}\nQ = 'kept'\nT = {1: 2}\nR = 1\nR = 2\nif x:\n    Q = 'not this'\n"
    found = assigned(text, "T", ["O", "P", "Q", "R"])
    assert sorted(found) == ["Q", "T"]
    assert (found["Q"], plain(found["T"])) == ("kept", {1: 2})


def test_names_that_a_module_assigns():
    text = '"""A = 1"""\nA: dict[int, int] = {}\nb = 2\n  c = 3\nA == 4\n# D = 5\ndef E(f=6): ...\nA = 7\n'
    assert names_assigned(text) == ["A", "b"]


def test_parentheses_make_a_tuple_only_with_a_comma():
    text = "T = ({(1): ((2), (3)), (4,): (((5, 6))), 7: ((8,))})"
    assert plain(assigned(text, "T")["T"]) == {1: (2, 3), (4,): (5, 6), 7: (8,)}


def test_lines_are_those_of_the_entries():
    text = "# first\nT = {\n  1: 2,\n\n  3: {\n    4: 5,\n  },\n}\n"
    entries = assigned(text, "T")["T"]
    assert [line for _, _, line in entries.items] == [3, 5]
    assert [line for _, _, line in entries.items[1][1].items] == [6]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("T = {1: f()}", r"line 1: 'f\(\)}' is no literal: a function call"),
        ("\nT = {1: __import__('os').system('x')}", "line 2.*function call"),
        ("T = dict()", "function call"),
        ("T = {1: [2, 3]}", "a list or an index"),
        ("T = {1: x}", "a name or a keyword"),
        ("T = {1: -2}", "only dicts, tuples"),
        ("T = {1: f'{x}'}", "a string with a prefix"),
        ("T = {'\\x41': 1}", "a string with a prefix, an escape"),
        ("T = {1: (2, 3)", "the end of the file"),
        ("T = {1: 2}.copy()", "after the literal"),
        ("T = {1: 2} | more", "after the literal"),
        ("T = {1: 2}\nT[3] = 4", "line 2: .* changes T after its literal in line 1"),
        ("T = {1: 2}\nT = {}", "changes T after its literal in line 1"),
        ("T |= {1: 2}", "changes T with no literal"),
        ("T.update({1: 2})", "changes T with no literal"),
        (
            "T = {}\nfor k in keys:\n    T[k] = 1\n",
            r"line 3: 'T\[k\] = 1' changes T after its literal in line 1",
        ),
        ("T = {}\ndef fill():\n\tfor d in x:\n\t\tT['TPU'][(d, 1)] = (8, 32)\n", "line 4: .*changes T"),
        ("T = {}\nfor d in T:\n  T[d] |= more", "line 3: .*changes T"),
        ("T = {}\nif True: T.setdefault('a', {})[1] = 2", "line 2: .*changes T"),
        (
            "T = {1: {}}\nfor rows in T.values():\n    rows.update(more)",
            "line 3: 'rows.update.* of which it is a",
        ),
        ("T = {1: {}}\nfor d, rows in T.items():\n    rows[k] = 2", "line 3: 'rows"),
        ("T = {1: {}}\nrows = T\nif x:\n    rows['a'] = 2", "line 4: .rows"),
        ("T = {1: {}}\nfill(T)", r"line 2: 'T\)' changes T"),
        ("T = {1: {}}\ndel T[1]", "line 2: .*changes T"),
        ("try:\n    T = {1: 2}\nexcept X:\n    pass", "line 2: .*changes T with no literal"),
        ("T = {1: 2 3: 4}", "expected ',' or '}'"),
        ("T = {1, 2}", "expected ':'"),
        ("T = {{}: 1}", "a dict cannot be a key"),
        ("T = " + "{1: " * 1000 + "2" + "}" * 1000, "nested deeper than 8"),
        ("T = " + "(" * 1000 + ")" * 1000, "nested deeper than 8"),
        ("T = {1: " + "9" * 5000 + "}", "a number of 5000 characters"),
        ("T = (" + "1," * 1000 + ")", "a tuple of more than 16"),
    ],
)
def test_refusals_are_one_short_line(text, said):
    with pytest.raises(LiteralError) as caught:
        assigned(text, "T")
    message = str(caught.value)
    assert re.search(said, message), message
    assert "\n" not in message and len(message) < 200


def test_entries_are_bounded_before_memory_is():
    text = "T = {" + "1:1," * (MAX_ENTRIES + 1) + "}"
    with pytest.raises(LiteralError, match="more than 1,000,000 entries"):
        assigned(text, "T")


@pytest.mark.parametrize(
    "unit",
    [
        '"""',
        "'''",
        '"',
        "'",
        "#",
        "(",
        "T",
        "T =",
        "{1:",
        "\\",
        "\n",
        "1,",
        "x = T\n",
        "x[",
        "T[",
        "for x in T:\n",
        "y=T;",
    ],
)
def test_hostile_repetition_takes_no_time(unit):
    text = unit * (1 << 20)
    start = time.process_time()
    for source in (text, "T = " + text, '"""' + text, "T = {}\nx = T\n" + text):
        try:
            assigned(source, "T")
        except LiteralError as error:
            assert len(str(error)) < 200
    assert time.process_time() - start < 5


def test_real_python_agrees_about_the_installed_table():
    from autotune.tables.load import published

    table = published()
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes

    assert {d: dict(rows) for d, rows in table.devices.items()} == tuned_block_sizes.TUNED_BLOCK_SIZES
    source = open(tuned_block_sizes.__file__, encoding="utf-8").read()  # noqa: PTH123, SIM115
    tree = ast.parse(source)
    literal = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "TUNED_BLOCK_SIZES"
    )
    for device, rows in zip(literal.keys, literal.values, strict=True):
        for key in rows.keys:
            assert table.lines[device.value, ast.literal_eval(key)] == key.lineno
