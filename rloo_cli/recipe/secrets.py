"""What must not be read in a log: values of secret environment variables, credentials in addresses, headers that carry a key."""

from __future__ import annotations

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
    """The values of variables whose names look like secrets, longest first."""
    values = {value for name, value in environment.items() if looks_secret(name) and len(value) >= SHORTEST_SECRET}
    return tuple(sorted(values, key=len, reverse=True))


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
