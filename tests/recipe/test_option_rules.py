"""Which recipes may have a reference model that follows, and what is told of those that may not."""

import pytest

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.load import load_recipe

BASE = "model: {model_name_or_path: m}\ndata: {dataset_name: d}\nrewards: [{function: accuracy_reward}]\n"


def load(tmp_path, text):
    path = tmp_path / "r.yaml"
    path.write_text(BASE + text)
    return load_recipe(path, num_processes=1, is_training=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("beta: 0\nsync_ref_model: true\n", r"r.yaml:5:17: algorithm.sync_ref_model: with beta 0 there is no reference model"),
        ("sync_ref_model: true\naccelerate_config: fsdp2\n", "sync_ref_model: only a reference that each process has whole .* and fsdp2"),
        ("sync_ref_model: true\nuse_peft: true\n", "sync_ref_model: with use_peft the reference is the model without its adapter"),
        ("sync_ref_model: true\nref_model_mixup_alpha: 1.5\n", "ref_model_mixup_alpha: must be above 0 and at most 1, got 1.5"),
        ("sync_ref_model: true\nref_model_sync_steps: 0\n", "ref_model_sync_steps: must be at least 1, got 0"),
    ],
)
def test_what_cannot_follow_is_refused_at_its_place(text, message, tmp_path):
    with pytest.raises(RecipeError, match=message):
        load(tmp_path, text)


def test_options_of_a_reference_that_stays_are_told(tmp_path):
    notices = load(tmp_path, "ref_model_mixup_alpha: 0.5\nref_model_sync_steps: 10\n").notices
    assert [notice.split(": ", 1)[1] for notice in notices] == [
        "algorithm.ref_model_mixup_alpha: not read: sync_ref_model is false.",
        "algorithm.ref_model_sync_steps: not read: sync_ref_model is false.",
    ]


def test_the_keys_of_trl_are_honoured(tmp_path):
    loaded = load(tmp_path, "sync_ref_model: true\nref_model_mixup_alpha: 0.9\nref_model_sync_steps: 64\n")
    algorithm = loaded.recipe.algorithm
    assert (algorithm.sync_ref_model, algorithm.ref_model_mixup_alpha, algorithm.ref_model_sync_steps) == (True, 0.9, 64)
    assert loaded.notices == ()


def test_options_of_dynamic_sampling_are_told_where_they_are_not_read(tmp_path):
    (notice,) = load(tmp_path, "dynamic_sampling: filter\ndynamic_sampling_max_batches: 3\n").notices
    assert notice.endswith("algorithm.dynamic_sampling_max_batches: not read: dynamic_sampling is filter.")
    assert load(tmp_path, "dynamic_sampling: off\n").recipe.algorithm.dynamic_sampling == "off"  # which YAML 1.1 reads as false
    with pytest.raises(RecipeError, match="must be at least 2 and at most 64, got 1: with 1 nothing would be drawn again"):
        load(tmp_path, "dynamic_sampling: resample\ndynamic_sampling_max_batches: 1\n")
