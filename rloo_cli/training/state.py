"""What a run is between two optimizer steps, and how it goes into a checkpoint and comes back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from rloo_cli.data.images import IMAGE_COLUMNS
from rloo_cli.data.mixture import Mixture
from rloo_cli.data.prompt_set import PromptSet
from rloo_cli.data.prompt_source import PromptSource
from rloo_cli.data.streamed_prompts import StreamedPrompts
from rloo_cli.errors import StorageError
from rloo_cli.run.checkpoint import Checkpoint
from rloo_cli.training.best import Best, best_of_document
from rloo_cli.training.experience import NAN_FIELDS, Experience, build_experience, empty_experience
from rloo_cli.types import Completion, FinishReason, Group, GroupRewards, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPosition:
    """Where the run stands after `step` optimizer steps; replaced as a whole when a step is complete."""

    step: int = 0
    next_prompt: int = 0
    """Position in the endless order of prompts."""
    prompts_before: int = 0
    """The same before the last step: whether an epoch ended with it follows."""
    num_tokens: int = 0
    """Prompt and completion tokens generated so far."""
    evaluated_step: int = -1
    """The last step after which the model was evaluated."""
    evaluated_value: float | None = None
    """What `metric_for_best_model` came to there."""
    best: Best | None = None
    """The best checkpoint so far."""
    experience: Experience | None = None
    """The generation batch in use; None when the next step needs a new one."""
    uses: int = 0
    """Optimizer steps that the batch has served."""

    def document(self) -> dict[str, Any]:
        """The position without the generation batch, as JSON."""
        names = ("step", "next_prompt", "prompts_before", "num_tokens", "evaluated_step", "evaluated_value", "uses")
        return {name: getattr(self, name) for name in names} | {"best": asdict(self.best) if self.best else None}


def save_experience(experience: Experience) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(JSON document, tensors) from which `load_experience` makes the same experience."""
    document = {
        "step": experience.step,
        "groups": [_group_document(group) for group in experience.groups],
        "rewards": [{"values": scores.values, "extras": dict(scores.extras)} for scores in experience.rewards],
    }
    return document, {name: getattr(experience, name) for name in NAN_FIELDS}


def load_experience(checkpoint: Checkpoint, weights: Sequence[float]) -> Experience:
    """The generation batch that was in use when the checkpoint was saved; StorageError where it is none."""
    document, tensors = checkpoint.load_document("experience"), checkpoint.load_tensors("experience")
    with checkpoint.understood("experience"):
        groups = [_group(entry) for entry in document["groups"]]
        if not groups:
            return empty_experience(document["step"], tensors["kl_PG"].shape[1])
        rewards = [
            GroupRewards(values=tuple(tuple(row) for row in entry["values"]), extras=entry["extras"]) for entry in document["rewards"]
        ]
        experience = build_experience(document["step"], groups, rewards, weights)
        return replace(experience, **{name: tensors[name] for name in NAN_FIELDS})


def load_position(checkpoint: Checkpoint, weights: Sequence[float]) -> RunPosition:
    """The position that the checkpoint holds; StorageError where it is none."""
    try:
        position = _position(checkpoint.load_document("position"))
    except ValueError as error:
        raise StorageError(f"checkpoint {checkpoint.path} cannot be used: position.json: {error}.") from error
    return replace(position, experience=load_experience(checkpoint, weights)) if checkpoint.has("experience") else position


def _position(document: Any) -> RunPosition:
    if not isinstance(document, dict):
        raise ValueError("it is no mapping")
    values = {name: value for name, value in document.items() if name != "best"}
    for name, value in values.items():
        if name not in _POSITION_KINDS or not isinstance(value, _POSITION_KINDS[name]):
            raise ValueError(f"`{name[:40]}` is not what a position has")
    return RunPosition(**values, best=best_of_document(document.get("best")))


_POSITION_KINDS: Mapping[str, tuple[type, ...]] = {
    "step": (int,),
    "next_prompt": (int,),
    "prompts_before": (int,),
    "num_tokens": (int,),
    "evaluated_step": (int,),
    "evaluated_value": (float, int, type(None)),
    "uses": (int,),
}


def _group_document(group: Group) -> dict[str, Any]:
    prompt = group.prompt
    return {
        "prompt": {
            "row": prompt.row,
            "content": prompt.content,
            "text": prompt.text,
            "token_ids": prompt.token_ids,
            "columns": json.loads(json.dumps(_saved_columns(prompt), default=str)),
        },
        "completions": [
            {"token_ids": c.token_ids, "logprobs": c.logprobs, "finish_reason": c.finish_reason.value, "weights_version": c.weights_version}
            for c in group.completions
        ],
        "texts": group.texts,
    }


def _saved_columns(prompt: Prompt) -> Mapping[str, Any]:
    """The columns without images, which are read from the data again."""
    if prompt.visual is None:
        return prompt.columns
    return {name: value for name, value in prompt.columns.items() if name not in IMAGE_COLUMNS}


def with_images(position: RunPosition, prompts: PromptSource) -> RunPosition:
    """The position with the images of its generation batch, read again from the data, whose fingerprint a resumed run has compared."""
    experience = position.experience
    if experience is None or isinstance(prompts, StreamedPrompts) or not any(part.head.has_images for part in prompts.parts()):
        return position
    assert isinstance(prompts, PromptSet | Mixture)
    groups = tuple(replace(group, prompt=prompts[group.prompt.row]) for group in experience.groups)
    return replace(position, experience=replace(experience, groups=groups))


def _group(entry: dict[str, Any]) -> Group:
    prompt = entry["prompt"]
    return Group(
        prompt=Prompt(**{**prompt, "token_ids": tuple(prompt["token_ids"])}),
        completions=tuple(
            Completion(
                token_ids=tuple(c["token_ids"]),
                logprobs=tuple(c["logprobs"]),
                finish_reason=FinishReason(c["finish_reason"]),
                weights_version=c["weights_version"],
            )
            for c in entry["completions"]
        ),
        texts=tuple(entry["texts"]),
    )
