import subprocess
import sys
import time

import pytest
from recipe_texts import VALID, faults_of, lines_of, load

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.load import load_recipe


def test_valid_recipe_has_every_default():
    loaded = load(VALID)
    assert loaded.recipe.algorithm.beta == 0.05
    assert loaded.recipe.generation.num_generations == 2
    assert loaded.recipe.rewards[0].function == "rloo_cli.rewards.accuracy_reward"
    assert loaded.notices == ()
    assert loaded.source_text == VALID
    assert str(loaded.path) == "r.yaml"


def test_five_faults_give_five_lines_and_a_count():
    text = """\
model:
  model_name_or_path: Qwen/Qwen2-0.5B-Instruct
data:
  dataset_name: trl-lib/DeepMath-103K
rewards:
  - function: accuracy_reward
    wieght: 2
generation:
  num_generations: 1
algorithm:
  betta: 0.05
  reward_clip_range: [1, -1]
training:
  learning_rate: fast
"""
    assert lines_of(text) == [
        "7:5: rewards[0].wieght: unknown field. Did you mean `weight`?",
        "9:20: generation.num_generations: must be at least 2, got 1: a lone completion has nothing to be compared with (leave-one-out).",
        "11:3: algorithm.betta: unknown field. Did you mean `beta`?",
        "12:22: algorithm.reward_clip_range: inverted: write [-1, 1].",
        "14:18: training.learning_rate: expected a number, got 'fast'.",
        "5 errors. `rloo schema --show algorithm` lists that section's fields.",
    ]


# What is appended to the valid recipe (so line 7 is its first) → the one line about it.
ONE_FAULT = {
    # unknown, doubled, misplaced
    "generation:\n  temprature: 1.0": "8:3: generation.temprature: unknown field. Did you mean `temperature`?",
    "temprature: 1.0": "7:1: temprature: unknown field. Did you mean `temperature`?",
    "zzz: 1": "7:1: zzz: unknown field.",
    "algoritm:\n  beta: 0.1": "7:1: algoritm: unknown section. Did you mean `algorithm`?",
    "algorithm:\n  temprature: 1": "8:3: algorithm.temprature: unknown field. Did you mean `temperature` (section `generation`)?",
    "generation:\n  beta: 0.1": "8:3: generation.beta: stands in the wrong section; it is a field of `algorithm`.",
    "beta: 0.1\nbeta: 0.2": "8:1: the key `beta` stands twice (first on line 7).",
    "beta: 0.1\nalgorithm:\n  beta: 0.2": "9:3: algorithm.beta: given twice: here and on line 7. Keep one.",
    "warmup_ratio: 0.1\nwarmup_steps: 3": "8:1: training.warmup_steps: given twice: here and on line 7. Keep one.",
    "training: 3": "7:11: training: expected this section's fields, indented below it, got 3.",
    '"a\\nb": 1': "7:1: a\\nb: unknown field.",
    # kinds
    "beta: true": "7:7: algorithm.beta: expected a number, got true.",
    "beta: yes": "7:7: algorithm.beta: expected a number, got yes.",
    "beta: null": "7:7: algorithm.beta: expected a number, got null.",
    "beta: '0.1'": "7:7: algorithm.beta: expected a number, got '0.1': remove the quotes.",
    "beta: [0.1]": "7:7: algorithm.beta: expected a number, got a list.",
    "beta: {a: 1}": "7:7: algorithm.beta: expected a number, got a mapping.",
    "beta: .nan": "7:7: algorithm.beta: expected a number: NaN and infinities are refused.",
    "beta: -.inf": "7:7: algorithm.beta: expected a number: NaN and infinities are refused.",
    "beta: nan": "7:7: algorithm.beta: expected a number: NaN and infinities are refused.",
    "beta: 1e999": "7:7: algorithm.beta: expected a number: infinities are refused.",
    "max_steps: 1.5": "7:12: training.max_steps: expected a whole number, got 1.5.",
    "max_steps: true": "7:12: training.max_steps: expected a whole number, got true.",
    "max_steps: 010": "7:12: training.max_steps: expected a whole number: `010` is ambiguous (octal to some readers); write it without the leading zero.",
    "max_steps: 99999999999999999999": "7:12: training.max_steps: expected a whole number: too large for a whole number (64 bits).",
    "max_steps: 1:30": "7:12: training.max_steps: expected a whole number, got '1:30'.",
    "logging_steps: 0.1": "7:16: run.logging_steps: expected a whole number, got 0.1: a share of all steps is not offered.",
    "bf16: 1": "7:7: training.bf16: expected true or false, got 1.",
    "bf16: 'true'": "7:7: training.bf16: expected true or false, got 'true'.",
    "run_name: true": "7:11: run.run_name: expected a text or null, got true.",
    "stop: END": "7:7: generation.stop: expected a list, got 'END': write [END].",
    "stop: [a, [b]]": "7:11: generation.stop: expected a text, got a list.",
    "max_tokens_per_micro_batch: lots": "7:29: training.max_tokens_per_micro_batch: expected a whole number or `auto`, got 'lots'.",
    "max_prompt_length: long\noverlong_prompts: drop": "7:20: data.max_prompt_length: expected a whole number or null, got 'long'.",
    "reward_clip_range: [1]": "7:20: algorithm.reward_clip_range: expected two numbers [low, high] or null, got a list: it has 1.",
    "chat_template_kwargs: hello": "7:23: data.chat_template_kwargs: expected a mapping, got 'hello'.",
    "chat_template_kwargs: {a: .inf}": "7:27: data.chat_template_kwargs: NaN and infinities are refused.",
    "eval_strategy: stepps": "7:16: evaluation.eval_strategy: expected one of `no`, `steps`, `epoch`, got 'stepps'. Did you mean `steps`?",
    "eval_strategy: true": "7:16: evaluation.eval_strategy: expected one of `no`, `steps`, `epoch`, got true.",
    "dtype: auto": "7:8: model.dtype: expected one of `float32`, `bfloat16`, got 'auto': `auto` and float16 are not offered; float32 is the default and keeps master weights.",
    "report_to: all": "7:12: run.report_to: expected one of `tensorboard`, `wandb`, `trackio`, got 'all': name each tracker, or none.",
    # bounds
    "temperature: 0": "7:14: generation.temperature: must be above 0, got 0: training samples; for greedy evaluation there is `eval_temperature: 0`.",
    "num_generations: 1": "7:18: generation.num_generations: must be at least 2, got 1: a lone completion has nothing to be compared with (leave-one-out).",
    "beta: -0.1": "7:7: algorithm.beta: must be at least 0, got -0.1.",
    "epsilon: -1": "7:10: algorithm.epsilon: must be at least 0, got -1.",
    "top_p: 1.5": "7:8: generation.top_p: must be above 0 and at most 1, got 1.5: 1 turns it off.",
    "top_k: -1": "7:8: generation.top_k: must be at least 0, got -1: 0 turns it off.",
    "head_chunk: 0": "7:13: training.head_chunk: must be at least 1, got 0.",
    "save_total_limit: 0": "7:19: run.save_total_limit: must be at least 1, got 0.",
    # YAML that a recipe may not hold
    "stop: &a [x]": "7:7: anchors (&a) are refused; write the value out where it is needed.",
    "run_name: !!str x": "7:11: YAML tags (tag:yaml.org,2002:str) are refused; a recipe is plain data.",
    'run_name: !!python/object/apply:os.system ["true"]': "7:11: YAML tags (tag:yaml.org,2002:python/object/apply:os.system) are refused; a recipe is plain data.",
    "run_name: *x": "7:11: aliases (*x) are refused; write the value out.",
    "training:\n  <<: {beta: 1}": "8:3: merge keys (<<) are refused; `extends: other.yaml` takes a whole recipe over.",
    "? [a]\n: 1": "7:3: a key is one plain word.",
    # paths
    "chat_template_path: none.jinja": "7:21: model.chat_template_path: 'none.jinja': no such file or folder in `.`.",
    "output_dir: ${NOT_SET}/x": "7:13: run.output_dir: the environment variable NOT_SET is not set.",
    "output_dir: ${x": "7:13: run.output_dir: '${x': `${` has no closing brace, or stands in a variable's value.",
    'output_dir: "a\\0b"': "7:13: run.output_dir: 'a\\x00b': a path holds no NUL characters.",
}


@pytest.mark.parametrize(("fault", "line"), ONE_FAULT.items(), ids=lambda value: value[:40])
def test_one_fault_is_one_line_at_its_place(fault, line):
    assert lines_of(VALID + fault + "\n") == [line]


REWARD_FAULTS = {
    "rewards: []": ["5:10: rewards: at least one reward function is needed: `rewards:` with an entry `- function: accuracy_reward`."],
    "rewards:": ["5:1: rewards: at least one reward function is needed: `rewards:` with an entry `- function: accuracy_reward`."],
    "rewards: accuracy_reward": ["5:10: rewards: expected a list of entries that begin with `- function:`, got 'accuracy_reward'."],
    "rewards: {function: a.b}": ["5:10: rewards: expected a list of entries that begin with `- function:`, got a mapping."],
    "rewards: [accuracy_reward]": ["5:11: rewards[0]: expected an entry such as `- function: accuracy_reward`, got 'accuracy_reward'."],
    "rewards:\n  - weight: 1": ["6:5: rewards[0].function: required: the dotted import path of the function, or a `model:`."],
    "rewards:\n  - model: ./x": ["6:12: rewards[0].model: './x': no such file or folder in `.`; a hub id is NAME or OWNER/NAME."],
    "rewards:\n  - functoin: a.b": ["6:5: rewards[0].functoin: unknown field. Did you mean `function`?"],
    "rewards:\n  - function: a-b.c": [
        "6:15: rewards[0].function: 'a-b.c' is no dotted import path such as my_rewards.exact, function `exact` of my_rewards.py."
    ],
    "rewards:\n  - {function: a.b, timeout: 0}": ["6:30: rewards[0].timeout: must be above 0, got 0."],
    "rewards:\n  - {function: a.b, on_error: skip}": ["6:31: rewards[0].on_error: expected one of `stop`, `unscored`, got 'skip'."],
    "rewards:\n  - {function: a.b, env: [A-B]}": ["6:26: rewards[0].env: 'A-B' is no name of an environment variable."],
    "rewards:\n  - {function: a.b, name: x y}": ["6:27: rewards[0].name: a name in metrics: one word, no spaces and no slashes."],
    "rewards:\n  - {function: a.b, weight: 0}": ["6:29: rewards[0].weight: every weight is 0: there is nothing to learn from."],
    "rewards:\n  - {function: a.b, kwargs: {prompts: 1}}": [
        "6:39: rewards[0].kwargs.prompts: the trainer passes `prompts` itself; take another name."
    ],
    "rewards:\n  - function: a.b\n  - function: c.b": ["7:5: rewards[1]: its name `b` is that of rewards[0]; give one of them a `name:`."],
    "reward_funcs: [a.b, c.d]\nreward_weights: [1]": ["6:17: reward_weights: 1 weight for 2 reward functions."],
    "reward_funcs: [a.b]\nreward_weights: [x]": ["6:18: rewards[0].weight: expected a number, got 'x'."],
    "reward_funcs: [{function: a.b}]": [
        "5:16: reward_funcs: expected the name of a function, got a mapping; entries with more belong to `rewards`."
    ],
    "rewards: [{function: a.b}]\nreward_funcs: [a.b]": [
        "6:1: reward_funcs: `rewards` is given as well; list the functions in one of them."
    ],
    "rewards: [{function: a.b}]\nreward_weights: [1]": [
        "6:1: reward_weights: `rewards` is given as well; write `weight:` in each entry of `rewards`."
    ],
}


@pytest.mark.parametrize(("rewards", "expected"), REWARD_FAULTS.items(), ids=lambda value: str(value)[:40])
def test_faults_of_rewards(rewards, expected):
    lines = lines_of(VALID.partition("rewards:")[0] + rewards + "\n")
    assert lines[: len(expected)] == expected
    assert [line.split(".")[0] for line in lines[len(expected) :]] == ([f"{len(expected)} errors"] if len(expected) > 1 else [])


def test_control_characters_reach_no_terminal():
    text = VALID.replace("accuracy_reward", '"\\e[31m\\0"') + 'lr_scheduler_kwargs: {"\\a": 1}\n'
    assert faults_of(text) == [
        "6:15: rewards[0].function: '\\x1b[31m\\x00' is no dotted import path such as my_rewards.exact, function `exact` of my_rewards.py.",
        "7:29: training.lr_scheduler_kwargs.\\x07: no argument of the schedule `linear`; it takes none.",
    ]


def test_missing_fields_are_told_at_their_section():
    assert lines_of("model:\n  dtype: float32\nbeta: 0.1\n") == [
        "1:1: model.model_name_or_path: required: write `model_name_or_path: …` below `model:`.",
        "1:1: data.dataset_name: required: write `dataset_name: …` below `data:`.",
        "1:1: rewards: at least one reward function is needed: `rewards:` with an entry `- function: accuracy_reward`.",
        "3 errors. `rloo schema --show rewards` lists that section's fields.",
    ]


def test_a_misspelt_required_field_is_one_error():
    assert lines_of(VALID.replace("model_name_or_path", "model_name")) == [
        "2:3: model.model_name: unknown field. Did you mean `model_name_or_path`?"
    ]


def test_a_misspelt_section_is_one_error():
    assert lines_of(VALID.replace("model:", "modle:")) == ["1:1: modle: unknown section. Did you mean `model`?"]


WHOLE_FILE = {
    "empty": (b"", "r.yaml: the recipe is empty; it needs at least model, data and rewards."),
    "only a comment": (b"# nothing\n", "r.yaml: the recipe is empty; it needs at least model, data and rewards."),
    "null": (b"---\nnull\n", "r.yaml: the recipe is empty; it needs at least model, data and rewards."),
    "BOM alone": (b"\xef\xbb\xbf", "r.yaml: the recipe is empty; it needs at least model, data and rewards."),
    "top-level list": (b"- a\n- b\n", "1:1: expected a mapping of sections (`model:`, `data:`, …), got a list."),
    "top-level text": (b"hello\n", "1:1: expected a mapping of sections (`model:`, `data:`, …), got 'hello'."),
    "binary": (b"\x00\x01\x02", "r.yaml: is not a text file (it holds NUL bytes); a recipe is YAML in UTF-8."),
    "latin-1": (b"a: 1\nb: caf\xe9\n", "2:7: byte 0xe9 is not UTF-8; save the file as UTF-8."),
    "UTF-16": ("a: 1".encode("utf-16"), "r.yaml: is UTF-16; save it as UTF-8."),
    "too large": (b"# " + b"x" * (1 << 20), "r.yaml: is larger than 1 MiB; a recipe is a short YAML file."),
    "two documents": (VALID.encode() + b"---\na: 1\n", "7:1: a second YAML document begins here; a recipe is one."),
    "control character": (b"a: 1\nbb: x\x07y\n", "2:6: a control character stands here; YAML allows none."),
    "tab indent": (
        b"model:\n\tmodel_name_or_path: x\n",
        "2:1: a tab or a reserved character (` @ %) cannot begin a YAML value: indent with spaces, put other text in quotes.",
    ),
    "colon in a text": (
        b"run_name: a: b\n",
        "1:12: not YAML: a second `: ` on one line, or a wrong indent. Put a text that holds a colon in quotes.",
    ),
    "open bracket": (b"stop: [a\n", "2:1: not YAML: did not find expected ',' or ']' (while parsing a flow sequence)."),
    "21 levels": (b"a: " + b"[" * 20 + b"]" * 20, "1:23: more than 20 levels of nesting."),
    "deep bomb": (b"[" * 500_000, "1:1001: more than 20 levels of nesting."),
    "tagged root": (b"!!map {a: 1}", "1:1: YAML tags (tag:yaml.org,2002:map) are refused; a recipe is plain data."),
}


@pytest.mark.parametrize(("data", "line"), WHOLE_FILE.values(), ids=WHOLE_FILE)
def test_a_file_that_is_no_recipe_is_one_clear_line(data, line):
    assert lines_of(data) == [line]


def test_twenty_levels_are_read():
    value = "[" * 18 + "]" * 18
    assert load(VALID + f"chat_template_kwargs: {{a: {value}}}\n").recipe.data.chat_template_kwargs


def test_alias_bomb_ends_at_once():
    bomb = 'a: &a ["x","x","x","x","x","x","x","x","x"]\n'
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        bomb += f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    started = time.monotonic()
    lines = lines_of(bomb)
    assert time.monotonic() - started < 2
    assert "1:4: anchors (&a) are refused; write the value out where it is needed." in lines
    assert "2:8: aliases (*a) are refused; write the value out." in lines


def test_a_flood_of_errors_is_cut_and_counted():
    started = time.monotonic()
    lines = lines_of(VALID + "".join(f"unknown_{i}: 1\n" for i in range(20_000)))
    assert time.monotonic() - started < 20
    assert len(lines) == 52
    assert lines[-2] == "… and 19950 more."
    assert lines[-1].startswith("20000 errors. ")


def test_crlf_and_bom_are_read():
    text = b"\xef\xbb\xbf" + VALID.replace("\n", "\r\n").encode()
    assert load(text).recipe == load(VALID).recipe
    assert lines_of(text + b"betta: 1\r\n")[0] == "7:1: betta: unknown field. Did you mean `beta`?"


def test_columns_count_characters_not_bytes():
    assert lines_of(VALID + "training: {lr_scheduler_kwargs: {äöü: 1}, learning_rate: fast}\n")[-2].startswith(
        "7:58: training.learning_rate"
    )


def test_a_missing_file_a_folder_and_a_pipe(tmp_path):
    import os

    os.mkfifo("pipe.yaml")
    for name, message in {
        "none.yaml": "none.yaml: no such file.",
        ".": ".: is a folder; a recipe is one YAML file.",
        "pipe.yaml": "pipe.yaml: is not a regular file; a recipe is one YAML file.",
        "a\0b": "a\\x00b: cannot be read: embedded null byte.",
        "x" * 5000: None,
    }.items():
        with pytest.raises(RecipeError) as caught:
            load_recipe(name)
        assert "\n" not in caught.value.message
        assert message is None or caught.value.message == message


def test_an_unreadable_file(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(RecipeError) as caught:
        load_recipe(__file__)
    assert caught.value.message == f"{__file__}: cannot be read: Permission denied."


TRAPS = {
    "eval_strategy: no": ("evaluation", "eval_strategy", "no"),
    "save_strategy: no": ("run", "save_strategy", "no"),
    "learning_rate: 1e-6": ("training", "learning_rate", 1e-6),
    "learning_rate: 1_0e-3": ("training", "learning_rate", 0.01),
    "max_steps: 1e3": ("training", "max_steps", 1000),
    "max_steps: 1_000": ("training", "max_steps", 1000),
    "max_steps: 12.0": ("training", "max_steps", 12),
    "bf16: off": ("training", "bf16", False),
    "bf16: No": ("training", "bf16", False),
    "run_name: no": ("run", "run_name", "no"),
    "run_name: 2024-01-01": ("run", "run_name", "2024-01-01"),
    "model_revision: 1234567": ("model", "model_revision", "1234567"),
    "model_revision: 12e5": ("model", "model_revision", "12e5"),
    "model_revision: ~": ("model", "model_revision", None),
    "stop: [no, 'null', 1]": ("generation", "stop", ["no", "null", "1"]),
    "top_k: null": None,
    "reward_clip_range: [-1, 1e0]": ("algorithm", "reward_clip_range", (-1.0, 1.0)),
    "chat_template_kwargs: {enable_thinking: no, x: 1e-6, day: 2024-01-01}": (
        "data",
        "chat_template_kwargs",
        {"enable_thinking": False, "x": 1e-6, "day": "2024-01-01"},
    ),
    "stop:": ("generation", "stop", []),
    "run:": ("run", "logging_steps", 10),
}


@pytest.mark.parametrize(("text", "expected"), TRAPS.items(), ids=TRAPS)
def test_yaml_traps_mean_what_the_author_meant(text, expected):
    if expected is None:
        assert "top_k" in lines_of(VALID + text)[0]
        return
    section, name, value = expected
    read = getattr(getattr(load(VALID + text + "\n").recipe, section), name)
    assert read == value
    assert type(read) is type(value)


def test_locate_finds_the_nearest_written_place():
    loaded = load(VALID + "generation:\n  top_p: 0.9\nchat_template_kwargs: {a: {b: 1}}\n", "beta=0.1")
    assert loaded.locate("rewards[0].function") == "r.yaml:6:15"
    assert loaded.locate("rewards[0].weight") == "r.yaml:6:5"
    assert loaded.locate("generation.top_p") == "r.yaml:8:10"
    assert loaded.locate("top_p") == "r.yaml:8:10"
    assert loaded.locate("generation.top_k") == "r.yaml:7:1"
    assert loaded.locate("training.seed") == "r.yaml:1:1"
    assert loaded.locate("data.chat_template_kwargs.a.b") == "r.yaml:9:31"
    assert loaded.locate("algorithm.beta") == "--set beta=0.1"


def test_loading_imports_no_torch_and_is_quick():
    code = (
        "import sys, time; from rloo_cli.recipe.load import load_recipe; s = time.perf_counter(); load_recipe('r.yaml');"
        "print(time.perf_counter() - s, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    load(VALID)
    seconds, *heavy = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert heavy == ["False", "False"]
    assert float(seconds) < 0.1
