from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rloo_cli.cli.app import exit_code_of
from rloo_cli.plan.memory import estimate_disk, estimate_memory
from rloo_cli.plan.shape import ModelShape, model_shape
from rloo_cli.plan.work import Workload

ROOT = Path(__file__).resolve().parent.parent.parent
SHAPE = ModelShape(
    parameters=100_000_000,
    layers=12,
    hidden=512,
    intermediate=2048,
    heads=8,
    kv_heads=2,
    head_dim=64,
    vocab=32_000,
    embedding_parameters=16_384_000,
    layer_parameters=6_968_000,
    root_parameters=16_384_000,
    largest_tensor=16_384_000,
)
WORK = Workload(
    weight_bytes=4,
    low_precision=True,
    has_reference=True,
    checkpointing=True,
    optim="adamw_torch",
    micro_batch_tokens=2048,
    micro_batch_completion_tokens=1536,
    head_chunk=None,
    decode_rows=32,
    decode_prompts=4,
    prompt_tokens=100,
    completion_tokens=256,
)


def test_what_a_parameter_costs():
    terms = estimate_memory(SHAPE, WORK)
    assert (terms["weights"], terms["gradients"], terms["optimizer"], terms["decode copy"]) == (400e6, 400e6, 800e6, 200e6)
    assert terms["reference"] == 2 * (SHAPE.parameters - SHAPE.embedding_parameters) + 4 * SHAPE.embedding_parameters
    assert terms["kv cache"] == (4 * 100 + 32 * 256) * 12 * 2 * 2 * 64 * 2


def test_vllm_samples_with_memory_of_its_own():
    terms = estimate_memory(SHAPE, replace(WORK, sampler="vllm"))
    assert (terms["decode copy"], terms["kv cache"]) == (0, 0)
    assert terms["vllm"] == 2 * (2 * 100e6 + 64 * (100 + 256) * 12 * 2 * 2 * 64)
    assert estimate_memory(SHAPE, replace(WORK, sampler="vllm", low_precision=False))["vllm"] == 2 * terms["vllm"]
    assert estimate_memory(SHAPE, replace(WORK, sampler="vllm", vllm_share=10**10))["vllm"] == 10**10
    elsewhere = estimate_memory(SHAPE, replace(WORK, sampler="elsewhere"))
    assert (elsewhere["decode copy"], elsewhere["kv cache"], elsewhere["vllm"]) == (0, 0, 0)


def test_plan_tells_what_vllm_takes(capsys):
    def memory(*settings):
        assert exit_code_of(["plan", str(ROOT / "recipes/quickstart.yaml"), "--json", *settings]) == 0
        return json.loads(capsys.readouterr().out)["memory"]["bytes"]

    monolith, server = memory(), memory("--set", "use_vllm=true", "--set", "vllm_mode=server")
    assert monolith["vllm"] == server["vllm"] == server["kv cache"] == 0 < monolith["kv cache"]


@pytest.mark.parametrize(
    ("change", "term", "smaller"),
    [
        ({"has_reference": False}, "reference", True),
        ({"optim": "sgd"}, "optimizer", True),
        ({"checkpointing": False}, "activations", False),
        ({"head_chunk": 128}, "logits", True),
        ({"weight_bytes": 2}, "weights", True),
        ({"low_precision": False}, "decode copy", True),
        ({"micro_batch_tokens": 4096}, "activations", False),
        ({"completion_tokens": 512}, "kv cache", False),
    ],
)
def test_each_field_moves_its_term(change, term, smaller):
    before, after = estimate_memory(SHAPE, WORK), estimate_memory(SHAPE, replace(WORK, **change))
    assert after[term] < before[term] if smaller else after[term] > before[term]


def test_the_peak_is_what_stands_and_the_larger_half_of_a_step():
    terms = estimate_memory(SHAPE, replace(WORK, completion_tokens=100_000))
    standing = terms["weights"] + terms["optimizer"] + terms["decode copy"] + terms["reference"]
    assert terms["peak"] == standing + terms["kv cache"] + terms["allocator"] + terms["runtime"]


def test_disk():
    disk = estimate_disk(SHAPE, WORK, checkpoints=3, rows=10, files=2)
    assert disk["checkpoint"] == 1200e6
    assert disk["checkpoints"] == 3600e6
    assert disk["final"] == 400e6
    assert disk["rollouts"] == 10 * 256 * 12 + 2 * 5120


def test_a_models_shape_is_counted_without_weights():
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    untied, tied = model_shape(config), None
    config.tie_word_embeddings = True
    tied = model_shape(config)
    assert (untied.layers, untied.hidden, untied.kv_heads, untied.head_dim, untied.vocab) == (2, 64, 2, 16, 100)
    assert untied.parameters - tied.parameters == 64 * 100
    assert (untied.embedding_parameters, tied.embedding_parameters) == (2 * 6400, 6400)


CHILD = """
import contextlib, io, json, resource, sys
import psutil
from rloo_cli.cli.app import exit_code_of

recipe, run, *sets = sys.argv[1:]
arguments = [recipe, *(word for change in sets for word in ("--set", change))]
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    assert exit_code_of(["plan", *arguments, "--json"]) == 0
import rloo_cli.training.train

baseline = psutil.Process().memory_info().rss
assert exit_code_of(["train", *arguments, "--output-dir", run, "-q"]) == 0
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"estimate": json.loads(printed.getvalue())["memory"], "measured": peak - baseline}))
"""


def write_model(folder: Path, kind: str) -> None:
    """Configuration and tokenizer of a model of at least 50 M parameters; random weights are made from it."""
    from transformers import LlamaConfig, Qwen2Config

    if kind == "llama":
        config = LlamaConfig(
            vocab_size=49_152,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            tie_word_embeddings=True,
        )
    else:
        config = Qwen2Config(
            vocab_size=151_936,
            hidden_size=384,
            intermediate_size=1536,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((ROOT / "recipes" / "smoke" / "model" / name).read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", ["beta=0", "bf16=false", "gradient_checkpointing=false"]),
        ("qwen2", ["beta=0.05", "bf16=true", "gradient_checkpointing=true"]),
    ],
)
def test_the_estimate_is_within_30_percent_of_the_measured_peak(tmp_path, kind, changes):
    write_model(tmp_path / "model", kind)
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": "Name a colour, please. " * n}) + "\n" for n in range(1, 9)), encoding="utf-8"
    )
    (tmp_path / "reward.py").write_text("def score(completions, **kwargs):\n    return [float(i % 2) for i in range(len(completions))]\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {model_name_or_path: model, random_weights: true}\n"
        "data: {dataset_name: prompts.jsonl}\n"
        "rewards: [{function: reward.score}]\n"
        "generation: {num_generations: 4, max_completion_length: 16}\n"
        "training: {prompts_per_step: 2, max_steps: 2, threads: 2}\n"
        "run: {save_strategy: 'no'}\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", CHILD, str(recipe), str(tmp_path / "run"), *changes],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["estimate"]["parameters"] >= 50_000_000
    assert found["estimate"]["bytes"]["peak"] == pytest.approx(found["measured"], rel=0.3)
