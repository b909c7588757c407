"""What must not be read in a log: values of secret environment variables, credentials in addresses, headers that carry a key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

MASK = "***"
SECRET_ENDINGS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "AUTH", "COOKIE")
SHORTEST_SECRET = 8
"""Values below this length are left: masking `1` would make a log unreadable."""

_PATTERNS = (
    re.compile(r"(?P<kept>://)[^\s/@'\"]+(?=@)"),
    re.compile(r"(?P<kept>[?&;][\w.-]*(?:token|key|secret|passw(?:or)?d|signature|sig|credential|auth)=)[^\s&#'\"]+", re.IGNORECASE),
    re.compile(r"(?P<kept>authorization['\"]?\s*[:=]\s*['\"]?(?:(?:bearer|basic|token)\s+)?)[^\s'\",]+", re.IGNORECASE),
    re.compile(r"(?P<kept>\bbearer\s+)[\w.~+/=-]{8,}", re.IGNORECASE),
)


def looks_secret(name: str) -> bool:
    """Whether a part of an environment variable's name ends like the name of a secret.

    >>> [looks_secret(name) for name in ("OPENAI_API_KEY", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "TOKENIZERS_PARALLELISM", "PATH")]
    [True, True, True, False, False]
    """
    return any(part.removesuffix("S").endswith(SECRET_ENDINGS) for part in name.upper().split("_"))


def secret_values(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The values of variables whose names look like secrets, and the forms in which they may be quoted, longest first."""
    values = {form for name, value in environment.items() if looks_secret(name) for form in _forms(value)}
    return tuple(sorted(values, key=lambda value: (-len(value), value)))


def _forms(value: str) -> set[str]:
    """The value and each of its lines, as they are and as Python and JSON quote them, also where a message is quoted in its turn."""
    plain = {value, *(line.strip() for line in value.splitlines())}
    plain = {text for text in plain if len(text) >= SHORTEST_SECRET}
    quoted = {form for text in plain for form in _quoted(text)}
    return plain | quoted | {form for text in quoted for form in _quoted(text)}


def _quoted(text: str) -> set[str]:
    as_python, as_json = repr(text)[1:-1], (json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
    with_both_quotes = as_python.replace("\\'", "'").replace("'", "\\'")  # in a longer text that holds a double quote too
    return {as_python, ascii(text)[1:-1], with_both_quotes, as_python.replace("\\'", "'"), *as_json}


def masked(text: str, values: Iterable[str] = ()) -> str:
    """The text without these values, and without what stands where credentials stand.

    >>> masked("GET https://me:hunter22@hub/x?rows=3&token=abc with Authorization: Bearer hf_1")
    'GET https://***@hub/x?rows=3&token=*** with Authorization: Bearer ***'
    """
    for value in values:
        text = text.replace(value, MASK)
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\g<kept>{MASK}", text)
    return text


def masked_command(words: Sequence[str], values: Iterable[str] = ()) -> list[str]:
    """A command line, word by word, as it may be kept; the value of `--set hub_token=…` is left out too."""
    from rloo_cli.recipe.trl_keys import known_key  # the whole schema, which `rloo --help` need not wait for

    shown = []
    for word in words:
        name, equals, _ = word.removeprefix("--set=").partition("=")
        key = known_key(name.strip().rpartition(".")[2])
        shown.append(
            f"{word[: word.index(name) + len(name)]}={MASK}" if equals and key is not None and key.is_secret else masked(word, values)
        )
    return shown
