"""Rules between the fields of LoRA; see `rules`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rloo_cli.recipe.rules import Context, Finding, Rule

ADAPTER_FIELDS: tuple[str, ...] = (
    "model.lora_r",
    "model.lora_alpha",
    "model.lora_dropout",
    "model.lora_target_modules",
    "model.lora_modules_to_save",
    "model.use_rslora",
)
"""What a new adapter is made of."""


def _not_read(context: Context) -> Iterator[Finding]:
    if context.recipe.model.use_peft:
        return
    for name in ADAPTER_FIELDS:
        if context.is_changed(name):
            yield Finding(name, "not read: use_peft is false.", is_notice=True)


def _whole_on_each(context: Context) -> Iterator[Finding]:
    if context.recipe.model.use_peft and context.strategy != "ddp":
        yield Finding(
            "model.use_peft",
            f"an adapter is trained beside the whole model, and under {context.strategy} a process has a part of it: write "
            "`accelerate_config: ddp`; gradients and optimizer state are the adapter's alone there.",
        )


def _can_be_found_again(context: Context) -> Iterator[Finding]:
    if context.recipe.model.use_peft and context.recipe.model.random_weights:
        yield Finding("model.use_peft", "an adapter belongs to weights that can be loaded again: random_weights has none.")


def _dropout(context: Context) -> Iterator[Finding]:
    if context.recipe.model.use_peft and context.recipe.model.lora_dropout and context.recipe.algorithm.beta:
        yield Finding(
            "model.lora_dropout",
            "with dropout the KL comes from a scoring pass of its own, one more a step; 0 spares it.",
            is_notice=True,
        )


def _rule(check: Callable[[Context], Iterator[Finding]], *reads: str) -> Rule:
    return Rule(frozenset(reads), check)


LORA_RULES: tuple[Rule, ...] = (
    _rule(_not_read, "model.use_peft", *ADAPTER_FIELDS),
    _rule(_whole_on_each, "model.use_peft", "run.accelerate_config"),
    _rule(_can_be_found_again, "model.use_peft", "model.random_weights"),
    _rule(_dropout, "model.use_peft", "model.lora_dropout", "algorithm.beta"),
)
