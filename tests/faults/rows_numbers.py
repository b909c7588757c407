"""Group C: numbers. Nothing is updated from a number that is not finite, and the batch that held it is kept."""

from __future__ import annotations

import hashlib
import json
import math
import os

from card import fault

STEP = 3
"""The step in which a number goes wrong; the checkpoint before is that of step 2."""


@fault("C1", "NaN or infinity in logits, log-prob, reference, loss, one gradient, the norm")
def numbers_that_are_not_finite(bench):
    stops_before_the_update(bench, "logits", logits, says=["logits", "completion 1 of prompt", "token 3"])
    stops_before_the_update(bench, "log-prob", policy, says=["log-prob of the policy is -inf", "of prompt", "token"])
    stops_before_the_update(bench, "reference", reference, says=["log-prob of the reference model is nan", "of prompt"])
    stops_before_the_update(bench, "loss", loss, says=["the loss is inf", "row"])
    stops_before_the_update(bench, "one gradient", one_gradient, says=["gradient norm is nan", "layers.1.mlp.up_proj.weight"])
    stops_before_the_update(bench, "norm", norm, says=["gradient norm is inf"])
    outcome = bench.train(inject=lambda: (norm(), disk_refuses_the_batch()))
    bench.check(outcome, code=7, says=["gradient norm is inf", "could not be kept", "No space left"], where="no room for the batch: ")
    reward_is_no_number_of_ours(bench)


def stops_before_the_update(bench, where, inject, *, says):
    """Exit code 7 with step and place, weights as they were in memory and on disk, and the batch in failed/."""
    outcome = bench.train(inject=lambda: (inject(), remember_the_weights(bench.root / "memory")))
    kept = outcome.folder / "failed" / f"step-{STEP:06d}.parquet"
    bench.check(outcome, code=7, says=[f"step {STEP}", *says, "nothing was updated", f"rloo rollouts show {kept}"], where=f"{where}: ")
    bench.expect("nothing lost", outcome.steps == [2], f"{where}: checkpoints {outcome.steps}")
    bench.expect("nothing lost", len(outcome.rows) == STEP - 1, f"{where}: {len(outcome.rows)} rows of metrics")
    bench.expect("nothing left behind", not outcome.temporary, f"{where}: {outcome.temporary}")
    weights_are_those_of_step_2(bench, where, outcome)
    batch_is_kept(bench, where, outcome, kept)
    bench.resume_is_gold(outcome, where=f"{where}: ")


def weights_are_those_of_step_2(bench, where, outcome):
    from rloo_cli.run.checkpoint import find_checkpoint
    from rloo_cli.run.manifest import digest_file

    checkpoint = find_checkpoint(outcome.folder / "checkpoints", 2)  # raises where a byte is not as it was written
    bench.expect("nothing lost", digest_file(checkpoint.path / "model.safetensors").size > 0, f"{where}: no weights")
    from safetensors.numpy import load_file

    saved = digest_of({name: array.tobytes() for name, array in load_file(checkpoint.path / "model.safetensors").items()})
    in_memory = (bench.root / "memory").read_text()
    bench.expect("nothing lost", in_memory == saved, f"{where}: the weights in memory are not those of step 2")


def batch_is_kept(bench, where, outcome, kept):
    if not bench.expect("nothing lost", kept.is_file(), f"{where}: no {kept.name}"):
        return
    import pyarrow.parquet as pq

    table, usual = pq.read_table(kept), pq.read_table(outcome.folder / "rollouts" / "000002.parquet")
    bench.expect("nothing lost", table.column_names == usual.column_names, f"{where}: columns {table.column_names}")
    bench.expect("nothing lost", table.num_rows == 8, f"{where}: {table.num_rows} rows kept")
    facts = json.loads(kept.with_suffix(".json").read_text())
    sound = facts["step"] == STEP and facts["place"] and facts["value"] in ("nan", "inf", "-inf") and facts["weights_version"] == STEP - 1
    bench.expect("message", sound, f"{where}: facts {facts}")
    shown = bench.run(["rollouts", "show", str(kept)])
    bench.expect(
        "message", shown.code == 0 and "prompt" in shown.output, f"{where}: the command to look at it: {shown.code}: {shown.tail()}"
    )


def digest_of(tensors):
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name])
    return digest.hexdigest()


def remember_the_weights(file):
    """Leave the hash of the weights in memory in a file, however the loop ends."""
    from rloo_cli.training import train

    loop = train.run_loop

    def loop_and_look(run):
        try:
            loop(run)
        finally:
            state = run.updater.strategy.local_state().model
            file.write_text(digest_of({name: shard.values.numpy().tobytes() for name, shard in state.items()}))

    train.run_loop = loop_and_look


def logits():
    """NaN in one logit of the second row, before its third token of step 3."""
    from rloo_cli.rollout.sampling import Sampler

    draw = Sampler.draw

    def poisoned(self, logits_nV, position):
        if self.key.step == STEP and self.key.stream == "train" and position == 3:
            slot = self.rows.tolist().index(1)
            logits_nV = logits_nV.clone()
            logits_nV[slot, 7] = math.nan
        return draw(self, logits_nV, position)

    Sampler.draw = poisoned


def policy():
    """A log-prob of −∞ in the pass of step 3."""
    poison_forward(is_reference=False, value=-math.inf)


def reference():
    """NaN from the reference model in step 3."""
    poison_forward(is_reference=True, value=math.nan)


def poison_forward(*, is_reference, value):
    from rloo_cli.training.policy import Policy

    forward, calls = Policy.forward, 0

    def poisoned(self, batch):
        nonlocal calls
        logp, entropy = forward(self, batch)
        frozen = not any(parameter.requires_grad for parameter in self.parameters())
        calls += frozen == is_reference
        if frozen == is_reference and calls == STEP:
            logp = logp.clone()
            logp.data[len(logp) // 2] = value
        return logp, entropy

    Policy.forward = poisoned


def loss():
    """An infinite loss in step 3."""
    from rloo_cli.training import update

    count_calls(update, "reinforce_loss", lambda value: value * math.inf)


def one_gradient():
    """NaN in one element of one gradient of step 3."""
    from rloo_cli.training.update import Updater

    step = Updater._step_optimizer

    def poisoned(self, number):
        if number == STEP:
            dict(self.policy.named_parameters())["model.model.layers.1.mlp.up_proj.weight"].grad[3, 5] = math.nan
        return step(self, number)

    Updater._step_optimizer = poisoned


def norm():
    """A norm that overflows in step 3."""
    import torch

    count_calls(torch.nn.utils, "get_total_norm", lambda value: value * math.inf)


def count_calls(module, name, change):
    original, calls = getattr(module, name), 0

    def third(*arguments, **options):
        nonlocal calls
        calls += 1
        value = original(*arguments, **options)
        return change(value) if calls == STEP else value

    setattr(module, name, third)


def disk_refuses_the_batch():
    import errno

    from rloo_cli.run import atomic

    class Full(atomic.FileSystem):
        def mkdir(self, path, *arguments):
            if os.fspath(path).endswith("failed"):
                raise OSError(errno.ENOSPC, "No space left on device")
            super().mkdir(path, *arguments)

    atomic.fs = Full()


def reward_is_no_number_of_ours(bench):
    """An infinite reward is the function's fault: exit code 4, and nothing in failed/."""
    bench.write("infinite.py", "def infinite(completions, **kwargs):\n    return [float('inf')] * len(completions)\n")
    outcome = bench.train(settings=["rewards=[{function: infinite.infinite}]"])
    bench.check(outcome, code=4, says=["infinite", "inf", "prompt"], where="a reward of infinity: ")
    bench.expect("nothing left behind", not (outcome.folder / "failed").exists(), "a reward of infinity: a batch in failed/")


@fault("C2", "sampled log-prob null, NaN, missing, one too many")
def sampled_logprobs(bench):
    for where, code, spoil, says in (
        ("null", 5, lambda values: (None, *values[1:]), "token 0"),
        ("NaN", 7, lambda values: (*values[:-1], math.nan), "token"),
        ("-inf", 7, lambda values: (*values[:-1], -math.inf), "token"),
        ("text", 5, lambda values: ("-1.5", *values[1:]), "token 0"),
        ("one missing", 5, lambda values: values[:-1], "token"),
        ("all missing", 5, lambda values: None, "token 0"),
        ("one too many", 5, lambda values: (*values, -1.0), "token"),
    ):
        outcome = bench.train(inject=lambda spoil=spoil: spoil_logprobs(spoil))
        bench.check(outcome, code=code, says=[f"step {STEP}", "completion 2 of prompt", says, "engine"], where=f"{where}: ")
        bench.expect("nothing lost", outcome.steps == [2], f"{where}: checkpoints {outcome.steps}")
        bench.expect("nothing left behind", not outcome.temporary, f"{where}: {outcome.temporary}")
        if code == 7:
            batch_is_kept(bench, where, outcome, outcome.folder / "failed" / f"step-{STEP:06d}.parquet")
        bench.resume_is_gold(outcome, where=f"{where}: ")


def spoil_logprobs(spoil):
    """Give the third completion of the second prompt of step 3 other log-probs."""
    from dataclasses import replace

    from rloo_cli.rollout.transformers_engine import TransformersEngine

    generate = TransformersEngine.generate

    def spoiled(self, requests, params, key, *, on_group=None, check_stop=None):
        def hand_on(index, group):
            if index == 1 and key.step == STEP:
                group = (*group[:2], replace(group[2], logprobs=spoil(group[2].logprobs)), *group[3:])
            on_group(index, group)

        return generate(self, requests, params, key, on_group=hand_on, check_stop=check_stop)

    TransformersEngine.generate = spoiled


SILENT = """\
def silent(completions, trainer_state, **kwargs):
    same = trainer_state.step <= 3
    return [1.0 if same else sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]
"""


@fault("C3", "all rewards equal for three steps", quick=True)
def rewards_that_say_nothing(bench):
    bench.write("silent.py", SILENT)
    settings = ("rewards=[{function: silent.silent}]", "beta=0", "save_steps=1")
    outcome = bench.train(settings=settings)
    bench.check(outcome, code=0, says=["same reward", "step 3"], lines=0)
    warnings = [line for line in outcome.output.splitlines() if "same reward" in line]
    bench.expect("message", len(warnings) == 1, f"{len(warnings)} warnings instead of one")
    for row in outcome.rows[:3]:
        counted = row["groups/zero_std"] == 1 and row["rows/skipped"] == 8 and row["grad_norm"] == 0 and row["loss"] == 0
        bench.expect("nothing lost", counted, f"step {row['step']}: {row}")
    weights = [(outcome.folder / "checkpoints" / f"{step:06d}" / "model.safetensors").read_bytes() for step in (1, 2, 3, 4)]
    bench.expect("nothing lost", weights[0] == weights[1] == weights[2], "weights moved without a difference in reward")
    bench.expect("nothing lost", weights[3] != weights[2], "weights did not move once rewards differed")
    bench.expect("nothing left behind", not outcome.temporary, f"{outcome.temporary}")
    bench.is_gold(outcome.folder, *settings)


@fault("C4", 'learning rate inf, -1, "fast", true; G 1; temperature 0', quick=True)
def settings_that_are_no_numbers(bench):
    text = bench.recipe.read_text()
    for value in (".inf", "-1", "fast", "true", ".nan"):
        wrong = text.replace("learning_rate: 1.0e-3", f"learning_rate: {value}").replace("num_generations: 4", "num_generations: 1")
        wrong = wrong.replace("max_completion_length: 8", "max_completion_length: 8\n  temperature: 0")
        recipe = bench.write("wrong.yaml", wrong)
        places = [place(recipe, wrong, key) for key in ("learning_rate", "num_generations", "temperature")]
        outcome = bench.train(recipe=recipe)
        bench.check(outcome, code=2, says=[*places, "3 errors"], lines=4, within=30.0, where=f"learning rate {value}: ")
        bench.expect("nothing lost", recipe.read_text() == wrong, f"learning rate {value}: the recipe was changed")
        bench.expect("nothing left behind", not outcome.folder.exists(), f"learning rate {value}: {outcome.folder} was made")


def place(recipe, text, key):
    """`file:line:` of a key."""
    number = next(i for i, line in enumerate(text.splitlines(), start=1) if line.strip().startswith(f"{key}:"))
    return f"{recipe.name}:{number}:"
