from __future__ import annotations

import json
from pathlib import Path

import pytest

from rloo_cli.cli.app import exit_code_of

ROOT = Path(__file__).resolve().parent.parent.parent


def recipe_of_a_large_model(folder: Path, *, layers: int = 80) -> Path:
    """A recipe for a model of 70 B parameters, of which only the configuration and a tokenizer are there."""
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
    ).save_pretrained(folder / "model")
    for path in (ROOT / "recipes" / "quickstart" / "model").iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            (folder / "model" / path.name).write_bytes(path.read_bytes())
    (folder / "prompts.jsonl").write_text('{"prompt": "Name a colour."}\n' * 4)
    (folder / "reward.py").write_text("def score(completions, **kwargs):\n    return [0.0 for _ in completions]\n")
    recipe = folder / "large.yaml"
    recipe.write_text(
        "model: {model_name_or_path: model}\ndata: {dataset_name: prompts.jsonl}\nrewards: [{function: reward.score}]\n"
        "generation: {num_generations: 8, max_completion_length: 1024}\ntraining: {prompts_per_step: 4, max_steps: 2}\n"
    )
    return recipe


def plan(capsys, *arguments):
    code = exit_code_of(["plan", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_model_without_weights_is_planned_for_gpus_that_are_not_here(tmp_path, capsys):
    recipe = recipe_of_a_large_model(tmp_path)
    options = ("--num-processes", 32, "--accelerate-config", "fsdp2", "--gpu", "h100-80")
    code, out, err = plan(capsys, recipe, "--json", *options)
    document = json.loads(out)
    assert code == 2
    assert "generation.use_vllm: without vLLM each process samples with the whole model, 131.42 GiB, and h100-80 has 79.20 GiB" in err
    assert document["launch"]["words"] == "32 processes on 4 machines of 8, fsdp2"
    assert document["memory"]["change"] == "`generation.use_vllm: true` with `vllm_mode: server`"
    assert document["command"] == f"rloo train {recipe} --num-processes 32 --accelerate-config fsdp2"
    assert [verdict["strategy"] for verdict in document["strategies"]] == ["ddp", "zero2", "fsdp2", "zero3"]
    assert document["host"] == {"loading": document["memory"]["parameters"] * 4, "offloaded": 0, "free": None}
    assert any("holds no weights" in note for note in document["notes"])

    code, out, err = plan(capsys, recipe, *options, "--set", "use_vllm=true", "--set", "vllm_mode=server")
    assert (code, err) == (0, "")
    assert "Launch\n  32 processes on 4 machines of 8, fsdp2" in out
    rows = [line for line in out.splitlines() if "fits: " in line or "does not fit: " in line]
    assert [row[:12].strip() for row in rows] == ["ddp", "zero2", "→ fsdp2", "zero3"]
    assert ["  fits: " in row for row in rows] == [False, False, True, True]


def test_a_cpu_is_warned_that_each_process_samples_with_all_of_it(capsys):
    code, out, _ = plan(capsys, ROOT / "recipes" / "quickstart.yaml", "--num-processes", 2, "--accelerate-config", "fsdp2")
    assert code == 0
    assert "fsdp2 cuts the trained model, and without vLLM each process samples with a whole copy of it, 1.7 MiB" in out
    assert " for each process" in out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--gpu", "h100"), "--gpu h100: not known. There are rtx4090-24, "),
        (("--num-processes", "4", "--num-machines", "3"), "4 processes do not come out even on 3 machines"),
        (("--accelerate-config", "zero4"), "zero4"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(capsys, options, told):
    code, out, err = plan(capsys, ROOT / "recipes" / "quickstart.yaml", *options)
    assert (code, out) == (2, "")
    assert told in err
