"""Take secrets out of text that came from a log, an environment, a command line or a traceback.

It knows secrets by their shape (a URL's user and password, the tokens of well-known services, a
bearer header) and by the name in front of them (`API_KEY=`, `--password `, `"secret": `). It would
rather hide too much than too little, and it cannot promise to find a secret that looks like a word.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"

_SECRET = (
    r"(?:(?:api|access|private|secret)[_-]?key|secret|passw(?:or)?d|passphrase"
    r"|credentials?|authorization|auth)"
)
_QUOTE = r"""\\?["']"""  # or one within a quoted text
_TOKEN = r"(?=[\w.+/=~-]*[a-z])(?=[\w.+/=~-]*\d)[\w.+/=~-]{8,}"
"""Of "token", a word of every training log, the value looks like neither a word nor a number."""


_SCHEME = r"(?:(?:basic|bearer|token)\s+)?"
_TO_THE_QUOTE = r"(?:(?!(?P=quote)).)+"
_BARE = r"""(?:[^\s"',;&)}\]\\]|\\(?!["']))+"""


def _before(word: str) -> str:
    """`name=`, `name: `, `"name": ` and `--name `, whatever the name begins with."""
    assigned = rf"{word}(?:{_QUOTE})?\s*[=:]\s*"
    option = rf"(?<![\w-])--?[\w-]{{0,40}}?{word}\s+"
    return rf"(?:{assigned}|{option}){_SCHEME}"


_NAMED = [
    re.compile(rf"(?i)(?P<kept>{kept}){hidden}")
    for kept, hidden in (
        (rf"(?P<quote>{_QUOTE})[\w-]{{0,40}}?{_SECRET}\s*[=:]\s*{_SCHEME}", _TO_THE_QUOTE),
        (rf"{_before(_SECRET)}(?P<quote>{_QUOTE})", _TO_THE_QUOTE),
        (_before(_SECRET), _BARE),
        (rf"{_before('token')}(?:{_QUOTE})?", _TOKEN),
    )
]
_SHAPES = re.compile(
    r"(?<=://)[^\s/@]+(?=@)"  # user:password of a URL
    r"|(?<=Bearer )\S+"
    r"|\bhf_[A-Za-z0-9]{16,}|\bgh[oprsu]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w-]{16,}"
    r"|\bsk-[\w-]{16,}|\bxox[abprs]-[\w-]{8,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # a JSON web token
)
_OPTION = re.compile(r"--?[A-Za-z][\w-]*")
_SCRIPT = re.compile(r"(?:\s|;|&&)\s*(?:exec |nohup )?[\w./-]*(?:python|torchrun|bash|sh)\b")
_SECRET_NAME = re.compile(rf"(?i)(?:{_SECRET}|token)$")


def redact(text: str) -> str:
    """The text, with `***` in place of what looks like a secret."""
    text = _SHAPES.sub(HIDDEN, text)
    for named in _NAMED:
        text = named.sub(rf"\g<kept>{HIDDEN}", text)
    return text


def redact_command(words: Sequence[str]) -> str:
    """A command line for people: what its name says is secret is hidden whole, also with spaces."""
    shown = []
    for before, word in zip(("", *words), words, strict=False):
        name, is_assigned, value = word.partition("=")
        if is_assigned and _hides(name, value):
            shown.append(f"{name}={HIDDEN}")
        elif _OPTION.fullmatch(before) and not _OPTION.match(word) and _hides(before, word):
            shown.append(HIDDEN)
        else:
            shown.append(redact(word))
    return shlex.join(shown).replace(f"'{HIDDEN}'", HIDDEN)


def _hides(name: str, value: str) -> bool:
    """Whether all of a value is secret for its name; a script that begins so is not."""
    if not re.fullmatch(r"[\w.-]+", name) or _SCRIPT.search(value):
        return False
    found = _SECRET_NAME.search(name)
    if found and found[0].lower() == "token":
        return re.fullmatch(f"(?i){_TOKEN}", value) is not None
    return found is not None


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
