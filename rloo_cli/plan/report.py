"""The plan of a run as one document: what `rloo plan --json` prints and `render.py` puts into words."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rloo_cli.plan.prepare import UNLIMITED
from rloo_cli.plan.signal import signal_document
from rloo_cli.recipe.schema import Recipe
from rloo_cli.rewards.resolve import RewardSource

if TYPE_CHECKING:
    from rloo_cli.data.prompt_source import PromptSource
    from rloo_cli.plan.prepare import CheckedRecipe, Prepared
    from rloo_cli.recipe.batch import BatchPlan
    from rloo_cli.training.engine_check import EngineCheck


def recipe_document(checked: CheckedRecipe) -> dict[str, Any]:
    """What the recipe alone tells."""
    recipe, batch = checked.loaded.recipe, checked.loaded.batch
    return {
        "recipe": str(checked.loaded.path),
        "resolved": recipe.model_dump(mode="json"),
        "differences": differences(recipe),
        "batch": batch_document(batch),
        "signal": signal_document(recipe, batch),
        "rewards": [_reward_document(entry, source) for entry, source in zip(recipe.rewards, checked.sources, strict=True)],
        "notes": [*checked.loaded.notices, *notes(recipe, batch)],
    }


def differences(recipe: Recipe) -> list[dict[str, Any]]:
    """Every field whose value is not its default, rewards apart: `{field, value, default}`; required fields have no default."""
    found = []
    for section_name in Recipe.model_fields:
        if section_name == "rewards":
            continue
        section = getattr(recipe, section_name)
        plain = section.model_dump(mode="json")
        for name, field in type(section).model_fields.items():
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            value = getattr(section, name)
            if field.is_required() or value != default:
                found.append({"field": f"{section_name}.{name}", "value": plain[name], "default": default})
    return found


def batch_document(batch: BatchPlan) -> dict[str, Any]:
    """The numbers of an optimizer step and of a generation batch."""
    return {
        "num_generations": batch.num_generations,
        "prompts_per_step": batch.prompts_per_step,
        "completions_per_step": batch.completions_per_step,
        "prompts_per_generation": batch.prompts_per_generation,
        "steps_per_generation_batch": batch.steps_per_generation_batch,
        "num_iterations": batch.num_iterations,
        "off_policy": batch.off_policy,
        "max_micro_batch_rows": batch.max_micro_batch_rows,
    }


def _reward_document(entry: Any, source: RewardSource) -> dict[str, Any]:
    return {
        "name": entry.name or source.name,
        "function": source.function,
        "is_model": entry.model is not None,
        "file": source.file,
        "weight": entry.weight,
        "parameters": list(source.parameters),
        "takes_any_keyword": source.takes_any_keyword,
        "is_async": source.is_async,
        "timeout": entry.timeout,
        "on_error": entry.on_error,
        "run_in": entry.run_in,
    }


def notes(recipe: Recipe, batch: BatchPlan) -> list[str]:
    """What the recipe means and does not say, a sentence each; beside the notices of its loading."""
    generation, algorithm = recipe.generation, recipe.algorithm
    found = []
    reshaping = [
        f"{name} {value}"
        for name, value, off in (
            ("top_p", generation.top_p, 1.0),
            ("top_k", generation.top_k, 0),
            ("min_p", generation.min_p, 0.0),
            ("repetition_penalty", generation.repetition_penalty, 1.0),
        )
        if value != off
    ]
    if generation.vllm_structured_outputs_regex is not None:
        reshaping.append("vllm_structured_outputs_regex")
    if reshaping:
        found.append(
            f"With {', '.join(reshaping)} the sampler is not the policy whose gradient is taken; sampling/logp_diff_mean shows the distance, "
            "algorithm.importance_sampling_correction corrects for it."
        )
    if batch.off_policy and not recipe.training.async_steps:
        found.append(
            f"Each generation batch serves {batch.steps_per_generation_batch * batch.num_iterations} optimizer steps: from the second on the "
            f"samples are off-policy and the clipped ratio (epsilon {algorithm.epsilon}) is used."
        )
    if recipe.training.async_steps:
        found.append(
            "async_steps: each batch is sampled by the weights of one step before; a row's term carries its ratio to the sampler, capped at "
            f"{algorithm.importance_sampling_cap:g}, and nothing is clipped. With vLLM a resumed run has the same prompts and seeds, not the same bits."
        )
    if recipe.run.push_to_hub:
        where = recipe.run.hub_model_id or "a repository named like the run's folder"
        found.append(f"push_to_hub: after the last step final/ is uploaded to {where}; `rloo train` looks at the token before it begins.")
    found += _dynamic_sampling(recipe, batch)
    if algorithm.beta > 0 and algorithm.normalize_advantages:
        found.append(
            "normalize_advantages with beta above 0 needs every row's KL before the first backward pass: one more scoring pass a step."
        )
    return found


def _dynamic_sampling(recipe: Recipe, batch: BatchPlan) -> Iterator[str]:
    """What dynamic sampling makes of prompts, steps and the KL penalty."""
    algorithm = recipe.algorithm
    if algorithm.dynamic_sampling == "off":
        return
    yield (
        "dynamic_sampling: the gradient is the mean over the groups whose rewards differ, so prompts that are always or never solved do not count; "
        "groups/dropped says how many."
    )
    if algorithm.dynamic_sampling == "resample":
        drawn = batch.prompts_per_generation
        yield (
            f"A generation batch draws {drawn} to {drawn * algorithm.dynamic_sampling_max_batches} prompts until {drawn} groups have differing "
            "rewards: the number of steps stays, and an epoch passes sooner."
        )
    if algorithm.beta > 0:
        yield "A group whose rewards are equal still has the KL penalty's gradient (beta above 0); left out, it has none."


def add_data(document: dict[str, Any], prepared: Prepared) -> None:
    """Add what prompts and tokenizer tell: steps, lengths, columns, the first prompt."""
    batch, prompts = prepared.checked.loaded.batch, prepared.prompts
    lengths = sorted(int(length) for part in prompts.parts() for length in part.head.lengths)
    size = prompts.size
    completion = longest_completion(prepared)
    document["steps"] = {
        "total": prepared.total_steps,
        "prompts": size,
        "sets": [_set_document(part) for part in prompts.parts()] if len(prompts.parts()) > 1 else [],
        "dropped": sum(part.head.dropped for part in prompts.parts()),
        "epochs": None if size is None else prepared.total_steps * batch.prompts_per_step / (size * batch.num_iterations),
        "evaluation_prompts": len(prepared.eval_prompts) if prepared.eval_prompts is not None else None,
    }
    document["lengths"] = {
        "prompt_min": lengths[0],
        "prompt_median": lengths[len(lengths) // 2],
        "prompt_max": lengths[-1],
        "prompt_limit": None if prepared.max_prompt_tokens >= UNLIMITED else prepared.max_prompt_tokens,
        "completion_max": completion,
        "context": prepared.context,
    }
    document["tokens_per_step"] = {
        "prompt": round(batch.prompts_per_step * sum(lengths) / len(lengths)),
        "completion_max": None if completion is None else batch.completions_per_step * completion,
    }
    document["columns"] = list(prompts.columns)
    document["first_prompt"] = prompts.head[0].text
    document["notes"] += prepared.notices


def _set_document(part: PromptSource) -> dict[str, Any]:
    return {"source": part.source, "prompts": part.size, "columns": list(part.columns)}


def engine_document(recipe: Recipe, check: EngineCheck) -> dict[str, Any]:
    """What the engine was seen to do."""
    return {"name": engine_name(recipe), **asdict(check), "tokens_per_second": check.tokens / check.generate_seconds}


def engine_name(recipe: Recipe) -> str:
    """What makes the completions, in words."""
    if not recipe.generation.use_vllm:
        return "transformers"
    return "vLLM in this process" if recipe.generation.vllm_mode == "colocate" else "vLLM server"


def longest_completion(prepared: Prepared) -> int | None:
    """Tokens of the longest completion that the recipe allows; None where nothing bounds it."""
    asked = prepared.checked.loaded.recipe.generation.max_completion_length
    if asked is not None or prepared.context is None:
        return asked
    return prepared.context - min(int(part.head.lengths.min()) for part in prepared.prompts.parts())


def launch_command(
    path: str,
    overrides: Sequence[str],
    *,
    code_dir: str | None,
    trust_remote_code: bool,
    resume_in: str | None = None,
    launch: Mapping[str, object] | None = None,
) -> str:
    """The command that trains what was planned, or goes on with it in a run folder.

    `launch`: options that say how it is launched, such as `--num-processes`; None = not given.
    """
    words = ["rloo", "train", path]
    for option, value in (launch or {}).items():
        words += [option, str(value)] if value is not None else []
    for override in overrides:
        words += ["--set", override]
    if code_dir is not None:
        words += ["--code-dir", code_dir]
    if trust_remote_code:
        words.append("--trust-remote-code")
    if resume_in is not None:
        words += ["--output-dir", resume_in, "--resume"]
    return shlex.join(words)
