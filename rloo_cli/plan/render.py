"""The plan document as text for people: sections under a heading, 100 columns or fewer where the content allows it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rloo_cli.plan.render_measured import measured_lines
from rloo_cli.plan.render_memory import disk_lines, launch_lines, memory_lines, strategy_lines
from rloo_cli.plan.render_signal import signal_lines


def render_plan(document: Mapping[str, Any]) -> str:
    """The whole text of a plan."""
    sections = (
        _recipe,
        _batch,
        signal_lines,
        _steps,
        _lengths,
        _rewards,
        launch_lines,
        memory_lines,
        strategy_lines,
        disk_lines,
        measured_lines,
        _engine,
        _first_prompt,
        _notes,
        _command,
    )
    blocks = ["\n".join(section(document)) for section in sections]
    return "\n\n".join(block for block in blocks if block)


def _recipe(document: Mapping[str, Any]) -> Iterator[str]:
    yield f"Recipe {document['recipe']}, where it differs from the defaults"
    width = max((len(entry["field"]) for entry in document["differences"]), default=0)
    for entry in document["differences"]:
        default = "" if entry["default"] is None else f"   (default {_value(entry['default'])})"
        yield f"  {entry['field']:<{width}}  {_value(entry['value'])}{default}"


def _batch(document: Mapping[str, Any]) -> Iterator[str]:
    batch = document["batch"]
    yield "Batch"
    yield (
        f"  {batch['prompts_per_step']} prompts × {batch['num_generations']} completions = {batch['completions_per_step']} completions "
        "an optimizer step"
    )
    uses = batch["steps_per_generation_batch"] * batch["num_iterations"]
    if uses > 1:
        yield (
            f"  {batch['prompts_per_generation']} prompts are sampled at once; they serve {batch['steps_per_generation_batch']} optimizer steps, "
            f"gone through {batch['num_iterations']} times"
        )
    if batch["max_micro_batch_rows"] is not None:
        yield f"  at most {batch['max_micro_batch_rows']} completions in a micro-batch"


def _steps(document: Mapping[str, Any]) -> Iterator[str]:
    steps = document.get("steps")
    if steps is None:
        return
    tokens = document["tokens_per_step"]
    yield "Steps"
    dropped = f" ({steps['dropped']} too long, left out)" if steps["dropped"] else ""
    if steps["prompts"] is None:
        yield f"  {steps['total']} optimizer steps; prompts are read as they are needed, lengths and columns are those of the first rows"
    else:
        yield f"  {steps['prompts']} prompts{dropped}; {steps['total']} optimizer steps, {steps['epochs']:.2f} passes over them"
    for part in steps["sets"]:
        yield f"  from {part['source']}: {'a stream' if part['prompts'] is None else str(part['prompts']) + ' prompts'}"
    if steps["evaluation_prompts"] is not None:
        yield f"  {steps['evaluation_prompts']} prompts to evaluate on"
    yield f"  a step: about {tokens['prompt']:,} tokens of distinct prompts, at most {tokens['completion_max']:,} of completions"


def _lengths(document: Mapping[str, Any]) -> Iterator[str]:
    lengths = document.get("lengths")
    if lengths is None:
        return
    yield "Lengths in tokens"
    yield (
        f"  prompts {lengths['prompt_min']} to {lengths['prompt_max']}, median {lengths['prompt_median']}; limit {_or(lengths['prompt_limit'], 'none')}"
    )
    yield f"  completions up to {_or(lengths['completion_max'], 'the context')}; the model's context is {_or(lengths['context'], 'not stated')}"


def _rewards(document: Mapping[str, Any]) -> Iterator[str]:
    yield "Rewards"
    columns = document.get("columns")
    for reward in document["rewards"]:
        yield f"  {reward['weight']:g} × {reward['name']}   {reward['function']}"
        if reward["is_model"]:
            yield "      a reward model: its score of prompt and completion"
            continue
        got = [name for name in reward["parameters"] if columns is None or name not in columns]
        from_data = [name for name in columns or [] if name in reward["parameters"] or reward["takes_any_keyword"]]
        yield f"      takes {', '.join(got) or 'nothing'}" + (f"; columns {', '.join(from_data)}" if from_data else "")
    if columns is not None:
        yield f"  columns of the data: {', '.join(columns) or 'none beside the prompt'}"


def _engine(document: Mapping[str, Any]) -> Iterator[str]:
    engine = document.get("engine")
    if engine is None:
        return
    yield f"Engine: {engine['name']}, against the trainer's own log-probs, before any update"
    yield (
        f"  {engine['completions']} completions, {engine['tokens']:,} tokens: {engine['tokens_per_second']:,.0f} tokens/s; "
        f"weights handed over in {engine['sync_seconds']:.2f} s"
    )
    yield (
        f"  difference of a token's log-prob: mean {engine['logp_diff_mean']:.1e}, largest {engine['logp_diff_max']:.1e} nats; "
        f"effective sample size {engine['ess']:.4f}"
    )


def _first_prompt(document: Mapping[str, Any]) -> Iterator[str]:
    text = document.get("first_prompt")
    if text is not None:
        yield "The first prompt as the model sees it"
        yield from (f"  | {line}" for line in text.split("\n"))


def _notes(document: Mapping[str, Any]) -> Iterator[str]:
    if document["notes"]:
        yield "Notes"
        yield from (f"  - {note}" for note in document["notes"])


def _command(document: Mapping[str, Any]) -> Iterator[str]:
    yield "To train"
    yield f"  {document['command']}"


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _or(value: Any, words: str) -> str:
    return words if value is None else str(value)
