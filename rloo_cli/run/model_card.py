"""README.md of a final model: a card for the hub with what was trained, how, and what the run's own numbers say.

What comes from a recipe or a data set is written so that it stays data: YAML by a YAML writer, text in code spans.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_cli.recipe.dump import dump_document
from rloo_cli.recipe.fields import LEAVES, REWARD_LEAVES
from rloo_cli.recipe.flat import flat_values
from rloo_cli.recipe.schema import Recipe
from rloo_cli.recipe.secrets import masked
from rloo_cli.run.visible import on_one_line

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
LONGEST = 200
"""Characters of a value."""
NOT_TOLD = ("run.", "generation.vllm_server", "generation.vllm_weight_transfer", "generation.vllm_group_port")
"""Fields of the place where it ran, which change no number."""
PAPER = "https://arxiv.org/abs/2402.14740"
CITATION = """```bibtex
@inproceedings{ahmadian2024back,
  title     = {Back to Basics: Revisiting {REINFORCE}-Style Optimization for Learning from Human Feedback in {LLM}s},
  author    = {Ahmadian, Arash and Cremer, Chris and Gall{\\'e}, Matthias and Fadaee, Marzieh and Kreutzer, Julia and Pietquin, Olivier and {\\"U}st{\\"u}n, Ahmet and Hooker, Sara},
  booktitle = {Proceedings of the 62nd Annual Meeting of the Association for Computational Linguistics},
  year      = {2024},
  url       = {https://arxiv.org/abs/2402.14740}
}
```"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What a card tells."""

    name: str
    """Of the run."""
    recipe: Recipe
    step: int
    """Optimizer steps done."""
    rows: Sequence[Mapping[str, float]]
    """metrics.jsonl."""
    versions: Mapping[str, str]
    """Package → version."""
    sees_images: bool = False


def model_card(facts: CardFacts, *, secrets: Sequence[str] = ()) -> str:
    """The card as markdown with YAML in front; values of `secrets` are masked."""
    parts = [
        f"---\n{dump_document(_front_matter(facts))}---",
        f"# {_code(facts.name)}",
        _what(facts),
        f"## Evaluation\n\n{_evaluation(facts)}",
        f"## Training\n\n{_training(facts)}",
        f"## Recipe\n\nFields that differ from their defaults:\n\n{_recipe(facts.recipe)}",
        "## Versions\n\n" + ", ".join(f"{name} {_code(version)}" for name, version in facts.versions.items()),
        f"## Citation\n\n{CITATION}",
    ]
    return masked("\n\n".join(parts), secrets) + "\n"


def _front_matter(facts: CardFacts) -> dict[str, Any]:
    model = facts.recipe.model
    document: dict[str, Any] = {
        "library_name": "peft" if model.use_peft else "transformers",
        "pipeline_tag": "image-text-to-text" if facts.sees_images else "text-generation",
        "tags": ["rloo", "reinforcement-learning", *(["lora"] if model.use_peft else [])],
    }
    if _is_on_the_hub(model.model_name_or_path) and not model.random_weights:
        document |= {"base_model": model.model_name_or_path, "base_model_relation": "adapter" if model.use_peft else "finetune"}
    if datasets := [name for name in _datasets(facts.recipe) if _is_on_the_hub(name)]:
        document["datasets"] = datasets
    return document


def _what(facts: CardFacts) -> str:
    recipe = facts.recipe
    base = "random weights in the shape of " * recipe.model.random_weights + _code(_public(recipe.model.model_name_or_path))
    rewards = ", ".join(_code(entry.name or entry.function or entry.model or "") for entry in recipe.rewards)
    return (
        f"{'A LoRA adapter for' if recipe.model.use_peft else 'Trained from'} {base}: {facts.step} optimizer steps of "
        f"[RLOO]({PAPER}) (REINFORCE with the mean of a prompt's other completions as each one's baseline), on prompts of "
        f"{', '.join(_code(_public(name)) for name in _datasets(recipe))}, for the rewards {rewards}.\n\n"
        "The program that trained it wrote this card; the numbers are the run's own, and tell nothing beyond the splits and rewards that they "
        "name. A reward may be gained in ways that its author did not mean: look at completions before you rely on the model."
    )


def _evaluation(facts: CardFacts) -> str:
    """A table of the first and the last evaluation."""
    found = [row for row in facts.rows if any(key.startswith("eval/") for key in row)]
    if not found:
        return "The run made none."
    first, last = found[0], found[-1]
    steps = [int(first["step"])] if first is last else [int(first["step"]), int(last["step"])]
    keys = [key for key in last if key.startswith("eval/") and not key.endswith("/std")]
    heads = [f"after {step} steps" if step else "before training" for step in steps]
    columns = [first] if first is last else [first, last]
    table = [f"| metric | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    table += [f"| {_code(key.removeprefix('eval/'), in_table=True)} | {' | '.join(_number(row, key) for row in columns)} |" for key in keys]
    evaluation, data = facts.recipe.evaluation, facts.recipe.data
    how = f"Split {_code(data.dataset_test_split)}, " if data.dataset_test_split else ""
    count = evaluation.num_generations_eval
    return f"{how}{count} completion{'s' * (count != 1)} a prompt.\n\n" + "\n".join(table)


TOLD = ("reward", "completions/mean_length", "completions/clipped_ratio", "kl", "entropy")
EDGE = 10
"""Steps at either end of the training whose mean is told."""


def _training(facts: CardFacts) -> str:
    rows = [row for row in facts.rows if not any(key.startswith("eval/") for key in row)]
    edge = min(EDGE, max(1, len(rows) // 2))
    table = [f"| metric, mean of {edge} steps | first | last |", "|---|---|---|"]
    for key in TOLD:
        means = [_mean([row[key] for row in part if key in row]) for part in (rows[:edge], rows[-edge:])]
        if all(means):
            table.append(f"| {_code(key)} | {means[0]} | {means[1]} |")
    return "\n".join(table) if len(table) > 2 else "No step was recorded."


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.4g}" if values else ""


def _recipe(recipe: Recipe) -> str:
    lines = [f"- {_code(field)}: {_code(str(value))}" for field, value in _changed(recipe)]
    return "\n".join(lines)


def _changed(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """(field, value) of what is not its default, but for what only says where it ran; a local path by its last name."""
    for field, value in flat_values(recipe).items():
        name = field.rpartition(".")[2]
        leaf = (REWARD_LEAVES if field.startswith("rewards[") else LEAVES)[name]
        if value != leaf.info.get_default(call_default_factory=True) and not field.startswith(NOT_TOLD) and name != "env":
            yield field, _public(value) if isinstance(value, str) else value


def _datasets(recipe: Recipe) -> list[str]:
    data = recipe.data
    return [data.dataset_name] if data.dataset_name is not None else [entry.path for entry in data.datasets]


def _is_on_the_hub(name: str) -> bool:
    return HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def _public(name: str) -> str:
    """A path without the folders that lead to it."""
    return Path(name).name if name.startswith(("/", "~", "./", "../")) else name


def _number(row: Mapping[str, float], key: str) -> str:
    return f"{row[key]:.4g}" if key in row else "–"


def _code(text: str, *, in_table: bool = False) -> str:
    """As code, on one line, whatever is in it."""
    shown = on_one_line(text, LONGEST).replace("|", "\\|") if in_table else on_one_line(text, LONGEST)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    edge = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{edge}{shown or ' '}{edge}{fence}"
