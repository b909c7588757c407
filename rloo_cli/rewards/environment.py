"""What of the environment a worker gets to see."""

from __future__ import annotations

from collections.abc import Collection, Mapping

SECRET_ENDINGS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "AUTH", "COOKIE")
FIXED = {
    # The trainer has the cores; a pool of threads in each worker would only fight for them.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # The order of a set of strings must not differ from run to run.
    "PYTHONHASHSEED": "0",
}


def worker_environment(environment: Mapping[str, str], allowed: Collection[str]) -> dict[str, str]:
    """The environment without names that look like secrets, but for `allowed`; one thread, fixed hash seed.

    >>> sorted(worker_environment({"HF_TOKEN": "x", "AWS_ACCESS_KEY_ID": "x", "LANG": "C"}, [])) == sorted({"LANG": "C", **FIXED})
    True
    """
    return {name: value for name, value in environment.items() if name in allowed or not looks_secret(name)} | FIXED


def looks_secret(name: str) -> bool:
    """Whether a part of the name ends like the name of a secret.

    >>> [looks_secret(name) for name in ("OPENAI_API_KEY", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "TOKENIZERS_PARALLELISM", "PATH")]
    [True, True, True, False, False]
    """
    return any(part.removesuffix("S").endswith(SECRET_ENDINGS) for part in name.upper().split("_"))
