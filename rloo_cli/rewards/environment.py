"""What of the environment a worker gets to see."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rloo_cli.recipe.secrets import looks_secret

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
