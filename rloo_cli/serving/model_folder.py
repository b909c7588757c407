"""What a model's folder tells before vLLM spends half a minute on finding it out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rloo_cli.errors import RefusedError

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What the attention of vLLM 0.32 for CPUs can do."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")
LONGEST_CONFIG = 1 << 20


def check_model(model: str, *, cpu: bool, passed_on: Sequence[str] = ()) -> None:
    """Raise RefusedError where the folder cannot be served. A name that is no path goes to the hub, and vLLM looks at it there."""
    folder = Path(model).expanduser()
    if not folder.exists():
        if model.startswith(("/", ".", "~")) or model.count("/") > 1:
            raise RefusedError(f"--model {model}: no such folder.")
        return
    if not folder.is_dir():
        raise RefusedError(f"--model {model}: a file; give the folder that holds config.json.")
    config = _read_config(folder)
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise RefusedError(f"--model {model}: no tokenizer in this folder (tokenizer.json); save one there, as `save_pretrained` does.")
    says_how_to_load = any(word.replace("_", "-").startswith("--load-format") for word in passed_on)
    if not says_how_to_load and not any(path.suffix == ".safetensors" for path in folder.iterdir()):
        raise RefusedError(f"--model {model}: no weights in this folder (*.safetensors).")
    size = _head_size(config)
    if cpu and size is not None and size not in CPU_HEAD_SIZES:
        raise RefusedError(
            f"--model {model}: attention heads of size {size}, which vLLM's CPU build cannot compute "
            f"(it has {', '.join(map(str, CPU_HEAD_SIZES))}). Use another model, a GPU, or training without vLLM."
        )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        runs = " (a run folder? Its model is in final/)" if (folder / "recipe.yaml").exists() else ""
        runs = " (an adapter: serve the model that it belongs to)" if (folder / "adapter_config.json").exists() else runs
        raise RefusedError(f"--model {folder}: no config.json in this folder{runs}.")
    try:
        with path.open(encoding="utf-8") as file:
            config = json.loads(file.read(LONGEST_CONFIG))
    except (OSError, ValueError, RecursionError) as error:
        raise RefusedError(f"--model {folder}: config.json cannot be read ({error}).") from error
    if not isinstance(config, dict):
        raise RefusedError(f"--model {folder}: config.json is not a JSON object.")
    return config


def _head_size(config: dict[str, Any]) -> int | None:
    """`head_dim`, else what hidden size and heads come to; None where the config says neither."""
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else config
    if "kv_lora_rank" in inner:  # latent attention, which has kernels of its own
        return None
    given = inner.get("head_dim")
    width = inner.get("hidden_size", inner.get("n_embd"))
    heads = inner.get("num_attention_heads", inner.get("n_head"))
    if isinstance(given, int):
        return given
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else None
