import pytest
from recipe_texts import VALID, faults_of, lines_of, load

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.load import load_recipe

ERRORS = {
    "reward_clip_range: [2, -2]": "7:20: algorithm.reward_clip_range: inverted: write [-2, 2].",
    "reward_clip_range: [2, 2.0]": "7:20: algorithm.reward_clip_range: low and high are both 2: every reward would be the same.",
    "eval_strategy: steps": "7:16: evaluation.eval_strategy: `eval_strategy: steps` needs a split to evaluate on: write `dataset_test_split: test` (or its name) below `data:`.",
    "eval_on_start: yes": "7:16: evaluation.eval_on_start: `eval_on_start: true` needs a split to evaluate on: write `dataset_test_split: test` (or its name) below `data:`.",
    "num_generations_eval: 4": "7:23: evaluation.num_generations_eval: 4 greedy completions of a prompt are the same one: write `eval_temperature: 1.0` as well.",
    "max_steps: 0": "7:12: training.max_steps: 0 steps train nothing; -1 = as many as num_train_epochs needs.",
    "warmup_steps: 2.5": "7:15: training.warmup_steps: 2.5: a whole number of steps, or a share of all steps below 1.",
    "stop: [a, '']": "7:11: generation.stop[1]: an empty stop string would end every completion at once.",
    "lr_scheduler_kwargs: {min_lr: 0}": "7:31: training.lr_scheduler_kwargs.min_lr: no argument of the schedule `linear`; it takes none.",
    "lr_scheduler_type: cosine\nlr_scheduler_kwargs: {cycles: 2}": "8:31: training.lr_scheduler_kwargs.cycles: no argument of the schedule `cosine`; it takes num_cycles.",
    "lr_scheduler_type: cosine_with_min_lr": "7:20: training.lr_scheduler_type: `cosine_with_min_lr` needs lr_scheduler_kwargs: {min_lr_rate: …} (or min_lr).",
    "metric_for_best_model: reward": "7:24: run.metric_for_best_model: the best is told by evaluations: write `eval_strategy: steps` and a `dataset_test_split`.",
    "metric_for_best_model: reward\neval_strategy: steps\ndataset_test_split: t\nsave_strategy: no": "7:24: run.metric_for_best_model: there are no checkpoints to choose among: save_strategy is no.",
    "metric_for_best_model: reward\neval_strategy: epoch\ndataset_test_split: t": "7:24: run.metric_for_best_model: a checkpoint is judged by the evaluation of its own step: write save_strategy steps and eval_strategy epoch alike.",
    "metric_for_best_model: reward\neval_strategy: steps\neval_steps: 30\nsave_steps: 100\ndataset_test_split: t": "7:24: run.metric_for_best_model: a checkpoint is judged by the evaluation of its own step, and save_steps 100 is no multiple of the 30 steps between evaluations: write `eval_steps: 100`, or another that divides it.",
    "lr_scheduler_type: warmup_stable_decay": "7:20: training.lr_scheduler_type: `warmup_stable_decay` needs lr_scheduler_kwargs: {num_decay_steps: …}.",
}

NOTICES = {
    "dtype: bfloat16": "7:8: model.dtype: bfloat16 weights have no master copy: at learning_rate 1e-06 most updates round to nothing. float32 keeps them.",
    "epsilon_high: 0.1\nnum_iterations: 2": "7:15: algorithm.epsilon_high: the ratio is clipped to [0.8, 1.1]: less room above than below.",
    "epsilon: 0.1": "7:10: algorithm.epsilon: not read: every generation batch serves one optimizer step, so nothing is clipped.",
    "importance_sampling_cap: 3": "7:26: algorithm.importance_sampling_cap: not read: importance_sampling_correction is none.",
    "eval_steps: 3": "7:13: evaluation.eval_steps: not read: eval_strategy is no.",
    "save_strategy: epoch\nsave_steps: 3": "8:13: run.save_steps: not read: save_strategy is epoch.",
    "save_strategy: no\nsave_total_limit: 3": "8:19: run.save_total_limit: not read: save_strategy is no.",
    "max_steps: 10\nsave_steps: 20": "8:13: run.save_steps: 20 is beyond max_steps 10: no checkpoint before the end.",
    "max_steps: 10\nnum_train_epochs: 1": "8:19: training.num_train_epochs: not read: max_steps 10 decides.",
    "max_steps: 10\nwarmup_steps: 20": "8:15: training.warmup_steps: 20 is beyond max_steps 10: learning_rate is never reached.",
    "lr_scheduler_type: constant\nwarmup_steps: 2": "8:15: training.warmup_steps: not read: `constant` has no warm-up; `constant_with_warmup` has one.",
    "num_generations: 8\nprompts_per_step: 2\nper_device_train_batch_size: 3": "9:30: training.per_device_train_batch_size: 3 rows a micro-batch cut each group of 8; with beta above 0 that costs one more scoring pass a step.",
    "greater_is_better: true": "7:20: run.greater_is_better: not read: metric_for_best_model is not given.",
    "max_prompt_length: 100": "7:20: data.max_prompt_length: older trainers cut longer prompts; here they are an error, or with `overlong_prompts: drop` left out and counted.",
}

SILENT = [
    "eval_strategy: steps\ndataset_test_split: test",
    "dtype: bfloat16\nlearning_rate: 1e-5",
    "epsilon: 0.1\nnum_iterations: 2",
    "epsilon_high: null",
    "num_generations_eval: 4\neval_temperature: 1.0",
    "max_prompt_length: 100\noverlong_prompts: drop",
    "data: {max_prompt_length: 100, dataset_name: a/b}",
    "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}",
    "warmup_steps: 0.1\nmax_steps: 3",
    "max_steps: 100",
    "optim: adafactor",
    "metric_for_best_model: eval_reward\ngreater_is_better: false\neval_strategy: steps\ndataset_test_split: t\nsave_steps: 20",
]


@pytest.mark.parametrize(("text", "line"), ERRORS.items(), ids=ERRORS)
def test_contradictions_between_fields(text, line):
    assert lines_of(VALID + text + "\n") == [line]


@pytest.mark.parametrize(("text", "line"), NOTICES.items(), ids=NOTICES)
def test_what_works_and_may_surprise_is_a_notice(text, line):
    assert load(VALID + text + "\n").notices == (f"r.yaml:{line}",)


@pytest.mark.parametrize("text", SILENT)
def test_what_is_well_said_is_silent(text):
    base = VALID.replace("data:\n  dataset_name: trl-lib/DeepMath-103K\n", "") if text.startswith("data:") else VALID
    assert load(base + text + "\n").notices == ()


def test_a_rule_says_nothing_about_a_field_that_is_wrong_already():
    assert lines_of(VALID + "eval_strategy: steps\ndataset_test_split: [a]\n") == [
        "8:21: data.dataset_test_split: expected a text or null, got a list."
    ]


def test_rules_and_types_are_told_at_once():
    lines = faults_of(VALID + "beta: x\nreward_clip_range: [1, 0]\nnum_generations: 3\n")
    assert [line.split(": ")[1] for line in lines] == ["algorithm.beta", "algorithm.reward_clip_range", "generation.num_generations"]


def test_no_deadline_in_the_trainer_is_a_notice():
    assert load(VALID + "    run_in: trainer\n    timeout: 3\n").notices == (
        "r.yaml:8:14: rewards[0].timeout: not read: in the trainer there is no deadline.",
    )


def test_a_reward_has_one_name():
    text = VALID + "  - function: my.accuracy_reward\n    name: mine\n"
    assert [entry.name for entry in load(text).recipe.rewards] == [None, "mine"]


def test_an_optimizer_that_needs_whole_matrices_is_no_optimizer_of_shards(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(VALID + "optim: adafactor\naccelerate_config: fsdp2\n")
    with pytest.raises(RecipeError, match=r"r\.yaml:7:8: training\.optim: adafactor looks at whole matrices, .* under fsdp2: write `optim"):
        load_recipe(recipe, num_processes=2, environ={}, is_training=True)
    recipe.write_text(VALID + "optim: adafactor\n")
    load_recipe(recipe, num_processes=2, environ={}, is_training=True)
