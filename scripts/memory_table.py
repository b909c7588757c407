"""The memory table of docs/scaling-out.md: three sizes of model, four strategies, GPUs of 80 GB; by the formula that `rloo plan` uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from rloo_cli.plan.comparison import Verdict, compare
from rloo_cli.plan.devices import DeviceMemory, find_device, machines_of_gpus
from rloo_cli.plan.numbers import GIB
from rloo_cli.plan.shape import ModelShape, model_shape
from rloo_cli.plan.spread import Spread
from rloo_cli.plan.workload import Lengths, workload
from rloo_cli.recipe.batch import plan_batches
from rloo_cli.recipe.schema import Recipe

GPU = "h100-80"
COUNTS = (1, 8, 32)
LENGTHS = Lengths(prompt=512, longest_prompt=1024, completion=1024)
MODELS = {
    "0.5 B (Qwen2.5-0.5B)": Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "7 B (Qwen2.5-7B)": Qwen2Config(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    ),
    "70 B (Llama-3.1-70B)": LlamaConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
}
SAMPLERS = {"vLLM server": {"use_vllm": True, "vllm_mode": "server"}, "transformers": {}}


def recipe_of(generation: dict[str, object]) -> Recipe:
    """The recipe of every row: defaults, 256 completions a step."""
    return Recipe.model_validate(
        {
            "model": {"model_name_or_path": "model"},
            "data": {"dataset_name": "data"},
            "rewards": [{"function": "accuracy_reward"}],
            "generation": {"num_generations": 8, "max_completion_length": LENGTHS.completion, **generation},
            "training": {"prompts_per_step": 32},
        }
    )


def memory_rows() -> Iterator[Sequence[str]]:
    """Model, GPUs, what samples, and GiB of each GPU by strategy; those that do not fit are struck out."""
    device = find_device(GPU)
    for name, config in MODELS.items():
        shape = model_shape(config)
        for sampler, generation in SAMPLERS.items():
            for count in COUNTS:
                cells = [_cell(verdict) for verdict in _verdicts(config, shape, recipe_of(generation), device, count)]
                yield (name, str(count), sampler, *cells)


def _verdicts(config: PreTrainedConfig, shape: ModelShape, recipe: Recipe, device: DeviceMemory, count: int) -> tuple[Verdict, ...]:
    spread = Spread(processes=count, machines=machines_of_gpus(count))
    work = workload(recipe, plan_batches(recipe, count), LENGTHS, config, shape, device, spread)
    return compare(shape, work, spread, device)


def _cell(verdict: Verdict) -> str:
    size = f"{verdict.bytes['peak'] / GIB:,.0f}"
    return f"**{size}**" if verdict.fits else size
