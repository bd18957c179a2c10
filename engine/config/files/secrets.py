"""What a text must not show to others: tokens, keys and passwords. `report` takes them out, `push` does not send a file
that has one."""

from __future__ import annotations

import re

KINDS = (
    ("a token of the hub", r"\bhf_[A-Za-z0-9]{16,}"),
    ("an API key (sk-)", r"\bsk-[A-Za-z0-9_-]{16,}"),
    ("a token of GitHub", r"\b(?:gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{20,})"),
    ("a token of GitLab", r"\bglpat-[A-Za-z0-9_-]{16,}"),
    ("a token of Slack", r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}"),
    ("a key of AWS", r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    ("a key of Google", r"\bAIza[A-Za-z0-9_-]{35}"),
    ("a private key", r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"),
    ("a password in an address", r"://[^/\s:@\"']{1,200}:[^/\s@\"']{1,200}@"),
)
"""(what it is, how it looks)."""

SECRET = re.compile("|".join(f"(?P<k{number}>{pattern})" for number, (_, pattern) in enumerate(KINDS)))
SECRET_BYTES = re.compile(SECRET.pattern.encode())


def secrets_in(data: bytes) -> list[str]:
    """Return the kinds of secrets in `data`, each once."""
    found = {int(hit.lastgroup.removeprefix("k")) for hit in SECRET_BYTES.finditer(data) if hit.lastgroup}
    return [KINDS[number][0] for number in sorted(found)]


def without_secrets(text: str) -> str:
    """Return the text with "(secret)" in place of each."""
    return SECRET.sub("(secret)", text)
