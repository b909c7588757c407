"""What the recipe's rules say of LoRA."""

import pytest
from recipe_texts import VALID, lines_of, load

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.load import load_recipe

REFUSED = {
    "use_peft: true\nrandom_weights: true": "model.use_peft: an adapter belongs to weights that can be loaded again",
    "use_peft: true\nlora_r: 0": "model.lora_r: must be at least 1, got 0",
    "use_peft: true\nlora_dropout: 1": "model.lora_dropout: must be at least 0 and below 1, got 1",
    "use_peft: true\nvllm_lora_sync: adapter": "vllm_lora_sync: `adapter` is refused: vLLM gets the weights with the adapter in them",
    "use_peft: maybe": "model.use_peft: expected true or false",
    "use_peft: true\nlora_target_modules: {a: 1}": "model.lora_target_modules: expected a list",
}


@pytest.mark.parametrize(("text", "message"), REFUSED.items(), ids=REFUSED)
def test_what_does_not_go_together_is_refused_in_its_place(text, message):
    lines = [line for line in lines_of(VALID + text + "\n") if message in line]
    assert len(lines) == 1
    assert lines[0].split(":")[1].isdecimal()


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "zero3"])
def test_an_adapter_is_trained_on_whole_models_alone(strategy, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(VALID + f"use_peft: true\naccelerate_config: {strategy}\n")
    with pytest.raises(
        RecipeError, match=rf"r\.yaml:7:11: model\.use_peft: an adapter is trained beside the whole model, and under {strategy} a"
    ):
        load_recipe(recipe, num_processes=2, is_training=True)
    assert load_recipe(recipe, num_processes=1).recipe.model.use_peft  # looking at it, as an evaluation does


def test_fields_of_an_adapter_that_nobody_reads_are_told():
    text = "lora_alpha: 64\nlora_dropout: 0.1\nlora_target_modules: [q_proj]\nlora_modules_to_save: [norm]\nuse_rslora: true\n"
    notices = load(VALID + text).notices
    assert [notice.split(": ")[1] for notice in notices] == [
        f"model.{name}" for name in ("lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save", "use_rslora")
    ]
    assert all("not read: use_peft is false." in notice for notice in notices)


def test_dropout_costs_a_pass_and_that_is_told_where_there_is_a_reference():
    text = VALID + "use_peft: true\nlora_dropout: 0.05\n"
    (notice,) = load(text).notices
    assert "model.lora_dropout: with dropout the KL comes from a scoring pass of its own" in notice
    assert load(text + "beta: 0\n").notices == ()


def test_bfloat16_weights_lose_no_small_update_of_an_adapter_and_may_lose_those_of_copies():
    text = VALID + "use_peft: true\ndtype: bfloat16\nlearning_rate: 1e-6\n"
    assert load(text).notices == ()
    assert "model.dtype: bfloat16 weights have no master copy" in load(text + "lora_modules_to_save: [norm]\n").notices[0]


@pytest.mark.parametrize(
    ("written", "expected"), [("all-linear", ["all-linear"]), ("[q_proj, v_proj]", ["q_proj", "v_proj"]), ("null", []), ("[]", [])]
)
def test_layers_may_be_written_as_trl_takes_them(written, expected):
    assert load(VALID + f"use_peft: true\nlora_target_modules: {written}\n").recipe.model.lora_target_modules == expected


def test_a_config_file_of_trl_with_an_adapter_is_a_recipe():
    loaded = load(
        VALID
        + "use_peft: true\nlora_r: 8\nlora_alpha: 16\nlora_dropout: 0.05\nlora_target_modules: [q_proj, v_proj]\nlora_task_type: CAUSAL_LM\n"
        "use_rslora: true\nuse_dora: false\nload_in_4bit: false\nload_in_8bit: false\nbnb_4bit_quant_type: nf4\nuse_bnb_nested_quant: false\n"
        "lora_target_parameters: null\nlora_modules_to_save: null\n"
    )
    model = loaded.recipe.model
    assert (model.lora_r, model.lora_alpha, model.lora_dropout, model.use_rslora) == (8, 16, 0.05, True)
