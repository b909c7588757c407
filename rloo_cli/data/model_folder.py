"""A model's folder looked at before any library reads it: sizes, shapes and names that no honest model has are refused here.

What transformers makes of a configuration may take any time and memory (a list with an entry a layer, a dict with an entry a
label), and what it makes of a folder without safetensors is an unpickled file. Nothing here allocates what a file claims.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rloo_cli.data.problems import quote, show_path
from rloo_cli.errors import RecipeError
from rloo_cli.recipe.schema import ModelSection

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
CODE_FILES = (CONFIG, "tokenizer_config.json")
"""Files whose `auto_map` names Python code of the folder's own."""
JSON_FILES = (*CODE_FILES, "generation_config.json", "special_tokens_map.json", "added_tokens.json", INDEX)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

MIB = 1 << 20
LARGEST_FILE = {
    "chat_template.jinja": MIB,
    "tokenizer.json": 256 * MIB,
    "vocab.json": 256 * MIB,
    "merges.txt": 256 * MIB,
    "tokenizer.model": 256 * MIB,
}
"""Bytes; the tokenizers of today's models take 35 MiB at most."""
LARGEST_JSON = 64 * MIB
MOST_LAYERS = 2_000
MOST_OF_ANYTHING = 1_000_000
"""For what a model has a number of (`num_experts`, `n_head`, `num_labels`)."""
LARGEST_NUMBER = 1 << 40
LARGEST_TOKEN = (1 << 31) - 1
COUNTS_OF_TOKENS = ("n_positions", "n_ctx", "num_embeddings")
"""Begin like counts of modules and may be larger."""


def check_files(folder: Path, *, trust_remote_code: bool) -> None:
    """Refuse a local folder with files that cannot be what they are called, and code of its own that nobody allowed to run.

    Raises:
        RecipeError: the file and what is wrong with it.
    """
    for name, limit in LARGEST_FILE.items():
        _check_size(folder / name, limit)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        _check_size(path, LARGEST_FILE["chat_template.jinja"])
    for name in JSON_FILES:
        document = read_object(folder / name)
        if name in CODE_FILES and document.get("auto_map") and not trust_remote_code:
            raise refusal(
                folder / name,
                "names Python code of its own (auto_map). If you trust it, pass --trust-remote-code; "
                "if transformers knows this architecture anyway, remove the auto_map entry.",
            )
        if name == CONFIG:
            check_numbers(document, folder / name)
        _check_end(document, folder / name)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model; an empty one where there is no such file.

    Raises:
        RecipeError: it is too large, no file, or no JSON object.
    """
    if not _check_size(path, LARGEST_JSON):
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise refusal(path, "is nested too deeply.") from None
    except (OSError, ValueError) as error:
        raise refusal(path, f"is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise refusal(path, f"expected an object, got {quote(document)}.")
    return document


def _check_size(path: Path, limit: int) -> bool:
    """Whether the file exists; it is then a regular one (behind links, as the hub's cache has them) and not too large."""
    try:
        status = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise refusal(path, "is a link to nowhere.") from None
        return False
    except (OSError, ValueError) as error:
        raise refusal(path, f"cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    if not stat.S_ISREG(status.st_mode):
        raise refusal(path, "is not a regular file.")
    if status.st_size > limit:
        raise refusal(path, f"has {status.st_size:,} bytes; more than {limit:,} cannot be right.")
    return True


def check_numbers(config: dict[str, Any], path: Path) -> None:
    """Refuse a configuration whose numbers would take libraries any time and memory.

    Raises:
        RecipeError: the field and its value.
    """
    for name, value in _whole_numbers(config):
        key = name.rpartition(".")[2]
        if "layer" in key and (key.startswith(("n_", "num_")) or key.endswith("layers")):
            limit = MOST_LAYERS
        elif key.startswith(("n_", "num_")) and key not in COUNTS_OF_TOKENS:
            limit = MOST_OF_ANYTHING
        else:
            limit = LARGEST_NUMBER
        if abs(value) > limit:
            raise refusal(path, f"`{name}` is {quote(value)}; more than {limit:,} cannot be right.")


def _check_end(document: dict[str, Any], path: Path) -> None:
    """Refuse an `eos_token_id` that is no token id: generation would never end, or fail at its first token."""
    given = document.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(isinstance(token, int) and not isinstance(token, bool) and -1 <= token <= LARGEST_TOKEN for token in ids):
        raise refusal(path, f"`eos_token_id` is {quote(given)}; expected a token id or a list of them.")


def _whole_numbers(document: Any, name: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(document, dict):
        for key, value in document.items():
            yield from _whole_numbers(value, f"{name}.{key}" if name else key)
    elif isinstance(document, list):
        for value in document:
            yield from _whole_numbers(value, name)
    elif isinstance(document, int):
        yield name, document


def check_weights(model: ModelSection) -> None:
    """Refuse a local model without a complete set of readable safetensors files. Headers are read, weights are not.

    Raises:
        RecipeError: the file and what is wrong with it.
    """
    folder = Path(model.model_name_or_path).expanduser()
    if model.random_weights or not folder.is_dir():
        return
    names = [WEIGHTS] if (folder / WEIGHTS).exists() else []
    if (folder / INDEX).exists():
        names += _shards(folder)
    if not names:
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        raise refusal(folder, _no_weights(pickles))
    for name in dict.fromkeys(names):
        _check_shard(folder / name)


def _no_weights(pickles: list[str]) -> str:
    if not pickles:
        return f"holds no weights ({WEIGHTS}). To start from random ones, set model.random_weights."
    return (
        f"holds no .safetensors file, only {pickles[0]}, which is a pickle: reading it runs whatever code it holds. Weights are read from "
        "safetensors files only; if you trust this one, load it where it may run code, and write it anew by `save_pretrained`."
    )


def _shards(folder: Path) -> list[str]:
    """The files that the index names."""
    weights = read_object(folder / INDEX).get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(name, str) for name in weights.values()):
        raise refusal(folder / INDEX, "has no `weight_map` from weights to files.")
    names = sorted(set(weights.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise refusal(folder / INDEX, f"names {quote(name)}; a shard is a .safetensors file of the same folder.")
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise refusal(
            folder / INDEX, f"names {len(names)} files, of which {len(missing)} are missing, such as {missing[0]}; fetch it again."
        )
    return names


def _check_shard(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise refusal(path, "is not a regular file.")
    try:
        with safe_open(path, framework="numpy"):  # reads the header, and holds it against the file's size
            pass
    except (SafetensorError, OSError) as error:
        raise refusal(path, f"is damaged or cut off ({' '.join(str(error).split())[:200]}); fetch it again.") from error


def model_errors() -> tuple[type[Exception], ...]:
    """What libraries raise over a model whose files are damaged or hold values of the wrong kind, found by changing every value in turn."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    return (
        OSError,
        ValueError,
        LookupError,
        ImportError,
        TypeError,
        AttributeError,
        ArithmeticError,
        AssertionError,
        MemoryError,
        RuntimeError,
        SafetensorError,
        StrictDataclassError,
    )


def reason_of(error: BaseException) -> str:
    """The first line of an exception's message, or its name where it has none or only a value."""
    line = (str(error).strip().splitlines() or [""])[0][:300]
    return line if " " in line else f"{type(error).__name__} {line}".strip()


def refusal(path: Path, what: str) -> RecipeError:
    """The error of a file or folder that `model.model_name_or_path` names."""
    return RecipeError(f"model.model_name_or_path: {show_path(path)}: {what}")
