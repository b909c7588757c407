from pathlib import Path

import pytest
from recipe_texts import VALID, faults_of, lines_of, load

from rloo_cli.errors import RecipeError


def write(name, text):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# --- --set


SETS = {
    "beta=0.1": ("algorithm.beta", 0.1),
    "algorithm.beta=1e-3": ("algorithm.beta", 1e-3),
    " beta = 0.1": ("algorithm.beta", 0.1),
    "eval_temperature=1": ("evaluation.eval_temperature", 1.0),
    "stop=[a, b=c]": ("generation.stop", ["a", "b=c"]),
    "run_name='a: b'": ("run.run_name", "a: b"),
    "run_name=": ("run.run_name", None),
    "save_strategy=no": ("run.save_strategy", "no"),
    "generation={top_p: 0.5, top_k: 3}": ("generation.top_k", 3),
    "chat_template_kwargs.enable_thinking=no": ("data.chat_template_kwargs", {"enable_thinking": False}),
    "data.chat_template_kwargs.a.b=[1]": ("data.chat_template_kwargs", {"a": {"b": [1]}}),
    "warmup_ratio=0.25": ("training.warmup_steps", 0.25),
}


@pytest.mark.parametrize(("override", "expected"), SETS.items(), ids=SETS)
def test_set_changes_one_field(override, expected):
    section, name = expected[0].split(".")
    assert getattr(getattr(load(VALID, override).recipe, section), name) == expected[1]


SET_FAULTS = {
    "run_name=a: b": "--set run_name=a: b: run.run_name: expected a text or null, got a mapping.",
    "beta=fast": "--set beta=fast: algorithm.beta: expected a number, got 'fast'.",
    "betta=1": "--set betta=1: betta: unknown field. Did you mean `beta`?",
    "algorithm.betta=1": "--set algorithm.betta=1: algorithm.betta: unknown field. Did you mean `beta`?",
    "generation.beta=1": "--set generation.beta=1: generation.beta: stands in the wrong section; it is a field of `algorithm`.",
    "beta": "--set beta: expected NAME=VALUE, such as `--set beta=0.1` or `--set generation.temperature=0.8`.",
    "=1": "--set =1: expected NAME=VALUE, such as `--set beta=0.1` or `--set generation.temperature=0.8`.",
    "a..b=1": "--set a..b=1: expected NAME=VALUE, such as `--set beta=0.1` or `--set generation.temperature=0.8`.",
    "beta.x=1": "--set beta.x=1: beta.x: there is nothing below `beta`; a path is `section.field`.",
    "algorithm.beta.x=1": "--set algorithm.beta.x=1: algorithm.beta.x: there is nothing below `beta`; a path is `section.field`.",
    "beta=&a 1": "--set beta=&a 1: anchors (&a) are refused; write the value out where it is needed.",
    "beta=[": "--set beta=[: not YAML: did not find expected node content (while parsing a flow node).",
    "extends=x.yaml": "--set extends=x.yaml: extends: stands in a recipe's file, not on the command line.",
    "rewards[1].weight=2": "--set rewards[1].weight=2: rewards: `1` is no position in a list of 1; the first is [0].",
    "rewards[x].weight=2": "--set rewards[x].weight=2: expected NAME=VALUE, such as `--set beta=0.1` or `--set generation.temperature=0.8`.",
    "rewards.0.wieght=2": "--set rewards.0.wieght=2: rewards[0].wieght: unknown field. Did you mean `weight`?",
    "rewards[0].function.x=2": "--set rewards[0].function.x=2: rewards: there is nothing below 'accuracy_reward' to set `x` in.",
    "num_generations=1": "--set num_generations=1: generation.num_generations: must be at least 2, got 1: a lone completion has nothing to be compared with (leave-one-out).",
    "per_device_train_batch_size=3": "--set per_device_train_batch_size=3: training.per_device_train_batch_size: 3 × 1 process × gradient_accumulation_steps 1 = 3 completions a step, which num_generations 2 does not divide. Nearest that work: per_device_train_batch_size 2 or 4, or gradient_accumulation_steps 2, or `prompts_per_step: 2` in place of both.",
    "use_dora=true": "--set use_dora=true: use_dora: `true` is not in this version: write `use_rslora`, or plain LoRA. Remove the key, or write TRL's default, false.",
    "run_name=\udcff": "--set run_name=\\udcff: is not UTF-8.",
}


@pytest.mark.parametrize(("override", "line"), SET_FAULTS.items(), ids=lambda value: ascii(value)[:40])
def test_faults_of_set_name_the_option(override, line):
    assert faults_of(VALID, override) == [line]


def test_the_later_set_wins():
    assert load(VALID, "beta=0.1", "algorithm.beta=0.2").recipe.algorithm.beta == 0.2


def test_a_right_set_mends_a_wrong_file():
    assert load(VALID + "beta: fast\n", "beta=0.2").recipe.algorithm.beta == 0.2


def test_set_reaches_rewards_in_every_form():
    recipe = load(VALID, "rewards[0].weight=2", "rewards.0.kwargs.column=gold").recipe
    assert (recipe.rewards[0].weight, recipe.rewards[0].kwargs) == (2.0, {"column": "gold"})
    trl = VALID.partition("rewards:")[0] + "reward_funcs: [accuracy_reward, my.other]\nreward_weights: [1, 0.5]\n"
    assert [entry.weight for entry in load(trl).recipe.rewards] == [1.0, 0.5]
    assert [entry.weight for entry in load(trl, "reward_weights=[2, 3]").recipe.rewards] == [2.0, 3.0]
    assert [entry.weight for entry in load(trl, "rewards[1].weight=9").recipe.rewards] == [1.0, 9.0]
    assert [entry.weight for entry in load(trl, "reward_funcs=[a.b]").recipe.rewards] == [1.0]
    assert [entry.function for entry in load(trl, "rewards=[{function: x.y}]").recipe.rewards] == ["x.y"]


def test_rewards_can_come_from_the_command_line_alone():
    assert load(VALID.partition("rewards:")[0], "reward_funcs=[a.b]").recipe.rewards[0].function == "a.b"


# --- extends


def test_later_values_win_and_lists_and_mappings_replace():
    write("base.yaml", VALID + "beta: 0.3\nstop: [a, b]\nchat_template_kwargs: {a: 1, b: 2}\nmax_steps: 7\nreport_to: [wandb]\n")
    text = "extends: base.yaml\nalgorithm:\n  beta: 0.4\ngeneration: {stop: [c]}\ndata:\n  chat_template_kwargs: {c: 3}\n"
    recipe = load(text).recipe
    assert recipe.algorithm.beta == 0.4
    assert recipe.generation.stop == ["c"]
    assert recipe.data.chat_template_kwargs == {"c": 3}
    assert recipe.training.max_steps == 7
    assert recipe.run.report_to == ["wandb"]


def test_a_chain_over_folders_is_relative_to_each_file():
    write("lib/deep/base.yaml", VALID + "max_steps: 1\nbeta: 0.1\nseed: 1\n")
    write("lib/middle.yaml", "extends: deep/base.yaml\nbeta: 0.2\nseed: 2\n")
    recipe = load("extends: lib/middle.yaml\nseed: 3\n").recipe
    assert (recipe.training.max_steps, recipe.algorithm.beta, recipe.training.seed) == (1, 0.2, 3)


def test_errors_name_the_file_that_they_stand_in():
    write("lib/base.yaml", VALID + "beta: fast\n")
    assert faults_of("extends: lib/base.yaml\nsede: 3\n") == [
        "1:1: sede: unknown field. Did you mean `seed`?".replace("1:1", "2:1"),
        "lib/base.yaml:7:7: algorithm.beta: expected a number, got 'fast'.",
    ]


def test_a_mistake_in_the_base_that_is_replaced_is_no_error():
    write("base.yaml", VALID + "beta: fast\n")
    assert load("extends: base.yaml\nbeta: 0.5\n").recipe.algorithm.beta == 0.5


EXTENDS_FAULTS = {
    "extends: none.yaml": "1:10: extends: none.yaml: no such file.",
    "extends: lib": "1:10: extends: lib: is a folder; a recipe is one YAML file.",
    "extends: [a.yaml]": "1:10: extends: expected the path of one recipe, got a list.",
    "extends:": "1:9: extends: expected the path of one recipe, got null.",
    "extends: r.yaml": "1:10: extends: goes round in a circle: r.yaml → r.yaml.",
    "extends: ./lib/../r.yaml": "1:10: extends: goes round in a circle: r.yaml → r.yaml.",
    "extends: lib/a.yaml": "lib/b.yaml:1:10: extends: goes round in a circle: r.yaml → lib/a.yaml → lib/b.yaml → lib/a.yaml.",
    "extends: lib/list.yaml": "lib/list.yaml:1:1: expected a mapping of fields, got a list.",
    "extends: ${NOWHERE}/x.yaml": "1:10: extends: the environment variable NOWHERE is not set.",
}


@pytest.mark.parametrize(("line", "message"), EXTENDS_FAULTS.items(), ids=EXTENDS_FAULTS)
def test_faults_of_extends(line, message):
    write("lib/a.yaml", "extends: b.yaml\n")
    write("lib/b.yaml", "extends: a.yaml\n")
    write("lib/list.yaml", "- a\n")
    text = line + "\n" + VALID
    assert faults_of(text) == [message]


def test_a_long_chain_is_cut():
    for i in range(60):
        write(f"{i}.yaml", f"extends: {i + 1}.yaml\n")
    assert lines_of("extends: 0.yaml\n" + VALID)[0] == "19.yaml:1:10: extends: a chain of more than 20 recipes."


# --- paths


def test_a_local_path_is_looked_for_below_the_recipe_then_below_the_working_directory(tmp_path, monkeypatch):
    from rloo_cli.recipe.load import load_recipe

    write("recipes/my.yaml", VALID.replace("trl-lib/DeepMath-103K", "data.jsonl").replace("Qwen/Qwen2-0.5B-Instruct", "model"))
    write("data.jsonl", "")
    Path("model").mkdir()
    loaded = load_recipe("recipes/my.yaml")
    assert loaded.recipe.data.dataset_name == str(tmp_path / "data.jsonl")
    write("recipes/data.jsonl", "")
    assert load_recipe("recipes/my.yaml").recipe.data.dataset_name == str(tmp_path / "recipes/data.jsonl")
    assert loaded.recipe.model.model_name_or_path == str(tmp_path / "model")


def test_a_path_in_a_base_is_relative_to_the_base(tmp_path):
    write("lib/base.yaml", VALID.replace("trl-lib/DeepMath-103K", "../lib/data.jsonl"))
    write("lib/data.jsonl", "")
    assert load("extends: lib/base.yaml").recipe.data.dataset_name == str(tmp_path / "lib/data.jsonl")


def test_variables_and_home_stand_in_paths_alone(tmp_path):
    write("store/data.jsonl", "")
    environ = {"STORE": "store", "HOME": str(tmp_path)}
    assert load(VALID, "dataset_name=${STORE}/data.jsonl", environ=environ).recipe.data.dataset_name == str(tmp_path / "store/data.jsonl")
    assert load(VALID, "dataset_name=~/store/data.jsonl", environ=environ).recipe.data.dataset_name == str(tmp_path / "store/data.jsonl")
    recipe = load(VALID, "output_dir=${STORE}/x", "run_name=${STORE}", environ=environ).recipe
    assert (recipe.run.output_dir, recipe.run.run_name) == ("store/x", "${STORE}")


PATH_FAULTS = {
    "dataset_name=data.jsonl": "data.dataset_name: 'data.jsonl': no such file or folder in `.`; a hub id is NAME or OWNER/NAME.",
    "dataset_name=a/b/c": "data.dataset_name: 'a/b/c': no such file or folder in `.`; a hub id is NAME or OWNER/NAME.",
    "dataset_name=./data": "data.dataset_name: './data': no such file or folder in `.`; a hub id is NAME or OWNER/NAME.",
    "dataset_name=/no/data": "data.dataset_name: '/no/data': no such file or folder.",
    "dataset_name=my data": "data.dataset_name: 'my data': no such file or folder in `.`; a hub id is NAME or OWNER/NAME.",
    "dataset_name=''": "data.dataset_name: '': an empty path.",
    "output_dir=''": "run.output_dir: '': an empty path.",
}


@pytest.mark.parametrize(("override", "message"), PATH_FAULTS.items(), ids=PATH_FAULTS)
def test_faults_of_paths(override, message):
    assert faults_of(VALID, override) == [f"--set {override}: {message}"]


def test_a_path_may_be_as_long_as_it_likes():
    assert "no such file or folder" in lines_of(VALID + f"chat_template_path: {'x' * 5000}\n")[0]


def test_a_file_is_no_model(tmp_path):
    write("model.bin", "")
    assert lines_of(VALID, "model_name_or_path=model.bin")[0].endswith(f"{tmp_path}/model.bin is a file, where a folder is needed.")


def test_a_recipe_is_found_by_an_absolute_path(tmp_path):
    from rloo_cli.recipe.load import load_recipe

    write("recipes/my.yaml", VALID + "betta: 1\n")
    with pytest.raises(RecipeError, match=f"^{tmp_path}/recipes/my.yaml:7:1: betta: "):
        load_recipe(tmp_path / "recipes/my.yaml")
