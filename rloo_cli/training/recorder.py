"""What a step leaves behind: its row of metrics, its rollouts, its line on the terminal."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence

import torch

from rloo_cli.run.folder import RunFolder
from rloo_cli.run.live_view import Sample
from rloo_cli.run.metrics import MetricsWriter
from rloo_cli.run.progress import Progress
from rloo_cli.run.rollouts import RolloutRow, write_rollouts
from rloo_cli.run.trackers import Trackers
from rloo_cli.training.experience import Experience


class Recorder:
    """Writes to metrics.jsonl and rollouts/, and tells progress and trackers."""

    def __init__(
        self, *, folder: RunFolder, metrics: MetricsWriter, progress: Progress, trackers: Trackers, names: Sequence[str], logging_steps: int
    ) -> None:
        self.folder = folder
        self.metrics = metrics
        self.progress = progress
        self.trackers = trackers
        self.names = tuple(names)
        self.logging_steps = logging_steps

    def step(self, row: Mapping[str, float], experience: Experience | None, *, last: bool) -> None:
        """Record an optimizer step; `experience` where the step generated one."""
        if experience is not None:
            write_rollouts(self.folder.rollout_file(int(row["step"])), rollout_rows(experience, self.names))
        self.metrics.write(row)
        self.progress.step(row, _sample(experience) if experience is not None else None)
        if int(row["step"]) % self.logging_steps == 0 or last:
            self.trackers.log(row)

    def evaluation(self, row: Mapping[str, float], experience: Experience) -> None:
        """Record an evaluation."""
        write_rollouts(self.folder.eval_rollout_file(int(row["step"])), rollout_rows(experience, self.names))
        self.metrics.write(row)
        self.progress.evaluation(row)
        self.trackers.log(row)


def rollout_rows(experience: Experience, names: Sequence[str]) -> list[RolloutRow]:
    """A row for each completion."""
    rows = []
    for p, (group, scores) in enumerate(zip(experience.groups, experience.rewards, strict=True)):
        for g, completion in enumerate(group.completions):
            scored = bool(experience.is_scored_PG[p, g])
            rows.append(
                RolloutRow(
                    step=experience.step,
                    prompt_row=group.prompt.row,
                    prompt=group.prompt.content,
                    prompt_text=group.prompt.text,
                    images=group.prompt.visual.images if group.prompt.visual is not None and g == 0 else (),
                    completion=group.texts[g],
                    completion_ids=completion.token_ids,
                    logprobs=completion.logprobs,
                    finish_reason=completion.finish_reason,
                    weights_version=completion.weights_version,
                    reward=experience.reward_PG[p, g].item() if scored else None,
                    kl=_known(experience.kl_PG[p, g]),
                    advantage=_known(experience.advantage_PG[p, g]),
                    rewards={name: scores.values[k][g] for k, name in enumerate(names)},
                    extras={name: values[g] for name, values in scores.extras.items()},
                )
            )
    return rows


def _sample(experience: Experience) -> Sample:
    """The last completion of the batch."""
    group = experience.groups[-1]
    reward = experience.reward_PG[-1, -1].item() if experience.is_scored_PG[-1, -1] else None
    return Sample(step=experience.step, prompt=group.prompt.text, completion=group.texts[-1], reward=reward)


def _known(value: torch.Tensor) -> float | None:
    return None if value.isnan() else value.item()


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory so far: of the device, or of the process on a CPU, in MB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
