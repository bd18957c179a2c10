"""Every fix text of the code is executed by a test, or the table says why it is not.

`others.toml` has two kinds of sections: a test that executes a fix text outside this folder, and a reason why a fix
text is executed by none. A fix text that is new has to come into one of them, or into a row of this folder.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.fixes import (
    test_chat_and_data,
    test_commands,
    test_endings,
    test_engine,
    test_loading,
    test_memory,
    test_mixtures,
    test_models_and_rows,
    test_prompts_and_tokens,
    test_queues_and_resumes,
    test_results,
    test_settings,
    test_sweeps_and_shares,
    test_unexpected_ends,
)
from tests.fixes.rows import TEXTS, text_of
from tests.fixes.walk import ROOT

OTHERS = tomllib.loads(Path(__file__).with_name("others.toml").read_text("utf-8"))
KNOWN = {text.key for text in TEXTS}
WALKED = {
    text_of(key).key
    for key in (
        *test_commands.ROWS, *test_settings.ROWS, *test_settings.ENVIRONMENTS, *test_settings.FOLDERS,
        *test_engine.CASES, *test_endings.WALKED, *test_chat_and_data.ROWS, *test_chat_and_data.UNDER_LAUNCHER,
        *test_results.ROWS, *test_results.WALKED, *test_models_and_rows.ROWS, *test_models_and_rows.WALKED,
        *test_prompts_and_tokens.ROWS, *test_prompts_and_tokens.WALKED,
        *test_loading.WALKED, *test_memory.WALKED, *test_mixtures.WALKED,
        *test_queues_and_resumes.WALKED,
        *test_sweeps_and_shares.WALKED,
        *test_unexpected_ends.WALKED,
    )
}  # fmt: skip
ELSEWHERE = {key: test for test, keys in OTHERS["tests"].items() for key in keys}
NOT_EXECUTED = {key: reason for reason, keys in OTHERS["reasons"].items() for key in keys}


def test_every_fix_text_is_executed_or_has_a_reason() -> None:
    missing = KNOWN - WALKED - ELSEWHERE.keys() - NOT_EXECUTED.keys()
    assert not missing, "\n".join(sorted(missing))


def test_the_table_names_what_exists_once() -> None:
    named = [*ELSEWHERE, *NOT_EXECUTED]
    assert set(named) <= KNOWN, "\n".join(sorted(set(named) - KNOWN))
    assert len(named) == len(set(named)), "\n".join(sorted(key for key in set(named) if named.count(key) > 1))
    assert not set(named) & WALKED, "\n".join(sorted(set(named) & WALKED))


@pytest.mark.parametrize("test", OTHERS["tests"])
def test_a_test_that_the_table_names_exists(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text("utf-8")
