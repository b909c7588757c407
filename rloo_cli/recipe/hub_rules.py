"""Rules of the fields that bring the final model to the hub; see `rules`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rloo_cli.recipe.rules import Context, Finding, Rule

REPO_NAME = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9_]([\w.-]{0,94}[A-Za-z0-9_])?", re.ASCII)
"""What the hub takes for a repository's name, and for an owner's."""
BRANCH = re.compile(r"(?!.*(//|\.\.|/\.|\.lock(/|$)))[A-Za-z0-9_][\w./-]{0,198}(?<![./])", re.ASCII)
HUB_FIELDS: tuple[str, ...] = ("run.hub_model_id", "run.hub_private_repo", "run.hub_revision")


def _not_read(context: Context) -> Iterator[Finding]:
    if context.recipe.run.push_to_hub:
        return
    for name in HUB_FIELDS:
        if context.is_changed(name):
            yield Finding(name, "not read: push_to_hub is false.", is_notice=True)


def _repository(context: Context) -> Iterator[Finding]:
    name = context.recipe.run.hub_model_id
    if name is not None and (name.count("/") > 1 or name.endswith(".git") or not all(map(REPO_NAME.fullmatch, name.split("/")))):
        yield Finding(
            "run.hub_model_id",
            f"'{name[:80]}' is no repository's name: write `owner/name`, or `name`, of letters, digits, `-`, `_` and `.`, without `--` and `..`.",
        )


def _branch(context: Context) -> Iterator[Finding]:
    name = context.recipe.run.hub_revision
    if name is not None and not BRANCH.fullmatch(name):
        yield Finding("run.hub_revision", f"'{name[:80]}' is no branch's name.")


HUB_RULES: tuple[Rule, ...] = (
    Rule(frozenset({"run.push_to_hub", *HUB_FIELDS}), _not_read),
    Rule(frozenset({"run.hub_model_id"}), _repository),
    Rule(frozenset({"run.hub_revision"}), _branch),
)
