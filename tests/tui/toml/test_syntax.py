"""The highlighting of TOML: what each part of a line is, also over several lines and while a text is half typed."""

from __future__ import annotations

from tui.toml.syntax import scan


def parts(text: str) -> list[tuple[str, str]]:
    """The highlighted parts of a text, each with its kind."""
    lines = text.split("\n")
    return [
        (line[start:end], kind)
        for line, found in zip(lines, scan(lines), strict=True)
        for start, end, kind in found.spans
    ]


def test_each_part_of_a_line_has_its_kind() -> None:
    assert parts('[a.b] # x\nlr = 3e-4 # = "y"\n"q k".z = [true, "#", nan]') == [
        ("[a.b] ", "table"), ("# x", "comment"), ("lr", "key"), ("3e-4", "number"), ('# = "y"', "comment"),
        ('"q k".z', "key"), ("true", "number"), ('"#"', "string"), ("nan", "number"),
    ]  # fmt: skip


def test_a_string_may_go_on_over_lines() -> None:
    assert parts('a = """one\n[b]\n"""\nc = \'\'\'d\'\'\' # e') == [
        ("a", "key"), ('"""one', "string"), ("[b]", "string"), ('"""', "string"),
        ("c", "key"), ("'''d'''", "string"), ("# e", "comment"),
    ]  # fmt: skip


def test_an_array_that_is_being_typed_leaves_the_tables_below_it() -> None:
    assert parts('a = ["x",\n[train]\nb = {c = 1}') == [
        ("a", "key"), ('"x"', "string"), ("[train]", "table"), ("b", "key"), ("c", "key"), ("1", "number"),
    ]  # fmt: skip
