"""Take secrets out of text that came from a log, an environment, a command line or a traceback.

It knows secrets by their shape (a URL's user and password, the tokens of well-known services, a
bearer header) and by the name in front of them (`API_KEY=`, `--password `, `"secret": `). It would
rather hide too much than too little, and it cannot promise to find a secret that looks like a word.
"""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

_SECRET = (
    r"(?:(?:api|access|private|secret)[_-]?key|secret|passw(?:or)?d|passphrase"
    r"|credentials?|authorization|auth)"
)


def _named(word: str, value: str) -> re.Pattern[str]:
    """`name=value`, `name: value`, `"name": "value"` and `--name value`, whatever comes first."""
    assigned = rf"""\b(?:[\w-]{{0,40}}[_-])?{word}["']?\s*[=:]\s*["']?"""
    option = rf"--(?:[\w-]{{0,40}}-)?{word}\s+"
    scheme = r"(?:(?:basic|bearer|token)\s+)?"
    return re.compile(rf"(?i)(?P<kept>(?:{assigned}|{option}){scheme}){value}")


_NAMED = (
    _named(_SECRET, r"""[^\s"',;&)}\]]+"""),
    # "token" is a word of every training log: its value must look like neither a word nor a number.
    _named("token", r"(?=[\w.+/=~-]*[a-z])(?=[\w.+/=~-]*\d)[\w.+/=~-]{8,}"),
)
_SHAPES = re.compile(
    r"(?<=://)[^\s/@]+(?=@)"  # user:password of a URL
    r"|(?<=Bearer )\S+"
    r"|\bhf_[A-Za-z0-9]{16,}|\bgh[oprsu]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w-]{16,}"
    r"|\bsk-[\w-]{16,}|\bxox[abprs]-[\w-]{8,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # a JSON web token
)
_SECRET_NAME = re.compile(rf"(?i)(?:^|[_-])(?:{_SECRET}|token)$")


def redact(text: str) -> str:
    """The text, with `***` in place of what looks like a secret."""
    text = _SHAPES.sub(HIDDEN, text)
    for named in _NAMED:
        text = named.sub(rf"\g<kept>{HIDDEN}", text)
    return text


def redact_mapping(values: Mapping[str, str]) -> dict[str, str]:
    """Environment variables or locals: hidden as a whole where the name says secret."""
    return {k: HIDDEN if _SECRET_NAME.search(k) else redact(v) for k, v in values.items()}


def redact_all(value: Any) -> Any:
    """What JSON can hold, with every text in it redacted, names too."""
    match value:
        case str():
            return redact(value)
        case Mapping():
            return {
                redact(k): HIDDEN
                if isinstance(v, str) and _SECRET_NAME.search(k)
                else redact_all(v)
                for k, v in value.items()
            }
        case list() | tuple():
            return [redact_all(item) for item in value]
        case _:
            return value
