"""`rloo import-trl`: what is read of a script, what is said of the rest, and that nothing of it runs."""

import importlib.util
import os
import textwrap
from pathlib import Path

import pytest
import yaml

from rloo_cli.cli.app import exit_code_of
from rloo_cli.recipe.load import load_recipe
from rloo_cli.trl_import.write import import_script

EXAMPLES = Path(__file__).resolve().parent / "examples"
HEAD = "from trl import RLOOConfig, RLOOTrainer\nfrom datasets import load_dataset\n"
TRAINER = 'RLOOTrainer(model="a/b", reward_funcs="c/d", args=config, train_dataset=load_dataset("e/f", split="train"))\n'


def imported(tmp_path, text, *, name="train.py"):
    """(what the import gave, the recipe's document)."""
    script = tmp_path / name
    script.write_text(textwrap.dedent(text))
    done = import_script(script, None)
    return done, yaml.safe_load(done.recipe.read_text())


def config(tmp_path, arguments, before=""):
    """The document of a script whose config has these arguments, and the lines about what was not carried over."""
    done, document = imported(tmp_path, f"{HEAD}{before}config = RLOOConfig({arguments})\n{TRAINER}")
    return document, [line.partition("train.py:")[2] for line in done.unread]


VALUES = {
    "a number": ("learning_rate=1e-5", "training", "learning_rate", 1e-5),
    "a product": ("max_steps=4 * 25", "training", "max_steps", 100),
    "a name": ("beta=BETA", "algorithm", "beta", 0.5),
    "a name of a name": ("beta=SAME", "algorithm", "beta", 0.5),
    "a text with a name in it": ('run_name=f"run-{BETA}"', "run", "run_name", "run-0.5"),
    "a path": ('output_dir=os.path.join("runs", "x")', "run", "output_dir", "runs/x"),
    "the first positional": ('"runs/first"', "run", "output_dir", "runs/first"),
    "a spread dictionary": ("**OPTIONS", "generation", "num_generations", 8),
    "a spread call": ("**dict(num_generations=4)", "generation", "num_generations", 4),
    "negative": ("reward_clip_range=(-1, 1)", "algorithm", "reward_clip_range", [-1, 1]),
    "an older name": ("warmup_ratio=0.1", "training", "warmup_steps", 0.1),
    "a dtype": ("model_init_kwargs={'torch_dtype': torch.bfloat16}", "model", "dtype", "bfloat16"),
}
BEFORE = "import os, torch\nBETA = 0.5\nSAME = BETA\nOPTIONS = {'num_generations': 8}\n"


@pytest.mark.parametrize(("arguments", "section", "name", "value"), VALUES.values(), ids=VALUES)
def test_values_that_the_text_tells_are_read(tmp_path, arguments, section, name, value):
    document, unread = config(tmp_path, arguments, BEFORE)
    assert document[section][name] == value
    assert unread == []


UNREAD = {
    "a call": ("beta=choose()", "3: beta: `choose()` shows its value only when the script runs"),
    "a branch": ("beta=BETA", "5: beta: what `BETA` is on line 4 shows only when the script runs"),
    "the environment": ("beta=float(os.environ.get('B', 1))", "3: beta: `os.environ.get('B', 1)` comes from the environment"),
    "an unknown name": ("beta=nothing", "3: beta: `nothing` is not assigned above"),
    "a division by zero": ("beta=1 / 0", "3: beta: `1 / 0`: division by zero"),
    "a huge number": ("max_steps=10 * 10**50", "3: max_steps: `10 ** 50` shows its value only when the script runs"),
    "an unknown spread": ("**choose()", "3: args: `**choose()` shows its names only when the script runs"),
    "a key without effect": ("log_completions=True", None),
    "a default": ("sync_ref_model=False, hub_token=None", None),
    "a refused key": ("neftune_noise_alpha=5.0", "3: neftune_noise_alpha: 5.0 is left out: noise in the embeddings"),
    "a secret": ("hub_token='hf_secret'", "3: hub_token: its value is left out: a recipe is copied"),
    "of no class": ("nonsense=1", "3: nonsense: no key of TRL's RLOOConfig that is known here; left out"),
    "code of the model": ("trust_remote_code=True", "3: trust_remote_code: a recipe cannot set it"),
    "a model option": ("model_init_kwargs={'load_in_4bit': True}", "3: model_init_kwargs: `load_in_4bit` is no field of a recipe"),
}


@pytest.mark.parametrize(("arguments", "line"), UNREAD.values(), ids=UNREAD)
def test_what_is_not_carried_over_is_said_with_its_line(tmp_path, arguments, line):
    document, unread = config(tmp_path, arguments, "if __debug__:\n    BETA = 1\n" if line and line.startswith("5:") else "")
    assert [told.startswith(line) for told in unread] == [True] if line else unread == []
    assert "hf_secret" not in str(document) + str(unread)
    assert load_recipe(tmp_path / "train.yaml").recipe.algorithm.beta == 0.05


DATA = {
    "a split": ('load_dataset("a/b", split="train")', {"dataset_name": "a/b", "dataset_train_split": "train"}),
    "a subscript": ('load_dataset("a/b")["test"]', {"dataset_name": "a/b", "dataset_train_split": "test"}),
    "a configuration": ('load_dataset("a/b", "main", split="train")', {"dataset_config": "main"}),
    "a slice": ('load_dataset("a/b", split="train[:50]")', {"max_train_samples": 50}),
    "a file": ('load_dataset("json", data_files="x.jsonl", split="train")', {"dataset_name": "x.jsonl"}),
    "select": ('load_dataset("a/b", split="train[:20]").select(range(9))', {"max_train_samples": 9}),
    "rename": ('load_dataset("a/b", split="train").rename_column("question", "prompt")', {"prompt_column": "question"}),
}


@pytest.mark.parametrize(("expression", "fields"), DATA.values(), ids=DATA)
def test_a_data_set_is_followed_to_its_name(tmp_path, expression, fields):
    text = f'{HEAD}rows = {expression}\nrows = rows.remove_columns(["x"])\nRLOOTrainer("m/n", "c/d", RLOOConfig(), rows)\n'
    done, document = imported(tmp_path, text)
    assert document["data"].items() >= fields.items()
    assert done.unread == ()


def test_rows_that_a_script_makes_have_to_be_saved(tmp_path):
    text = f'{HEAD}rows = load_dataset("a/b", split="train").map(lambda x: x)\nRLOOTrainer("m/n", "c/d", RLOOConfig(), rows)\n'
    done, document = imported(tmp_path, text)
    assert document["data"]["dataset_name"] == "a/b"
    assert 'train.py:3: `.map(…)` cannot be carried over: save what it gives (`dataset.to_json("train.jsonl")`)' in done.unread[0]
    done, document = imported(
        tmp_path, f"{HEAD}from datasets import Dataset\nRLOOTrainer('m', 'c/d', train_dataset=Dataset.from_list([]))\n", name="b.py"
    )
    assert "makes its rows when the script runs" in done.unread[0]
    assert any("data.dataset_name: required" in line for line in done.missing)


def test_functions_are_copied_with_what_they_need_and_nothing_else(tmp_path):
    done, document = imported(tmp_path, (EXAMPLES / "async_judge.py").read_text())
    source = done.module.read_text()
    assert "RLOOTrainer" not in source
    assert "load_dataset" not in source
    spec = importlib.util.spec_from_file_location("copied", done.module)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.only_some_rows(["4", "5"], ["4", ""]) == [1.0, None]
    assert [entry["function"] for entry in document["rewards"]] == ["train_rewards.judge_reward", "train_rewards.only_some_rows"]


NOT_COPIED = {
    "inside a function": (
        "def main():\n    def f(completions, **kwargs):\n        return [0.0]\n    RLOOTrainer('m/n', f, RLOOConfig(), 'x')\nmain()\n",
        "train.py:4: reward f: `f` is defined inside another function: move it to the top level",
    ),
    "a variable of a function": (
        "def main():\n    word = 'x'\n    RLOOTrainer('m/n', lambda completions: [word in c for c in completions], RLOOConfig(), 'x')\nmain()\n",
        "it reads `word`, which line 4 binds inside a function: move that to the top level",
    ),
    "data": (
        "rows = load_dataset('a/b')\ndef f(completions, **kwargs):\n    return [len(rows)]\nRLOOTrainer('m/n', [f], RLOOConfig(), 'x')\n",
        "train.py:3: reward f: it reads `rows`, whose statement calls `load_dataset`",
    ),
    "of another library": (
        "from trl.rewards import brand_new\nRLOOTrainer('m/n', brand_new, RLOOConfig(), 'x')\n",
        "reward brand_new: `trl.rewards.brand_new` has no counterpart here",
    ),
    "relative": (
        "from .words import WORDS\ndef f(completions, **kwargs):\n    return [float(c in WORDS) for c in completions]\nRLOOTrainer('m/n', f, RLOOConfig(), 'x')\n",
        "it reads `WORDS`, which a relative import brings",
    ),
}


@pytest.mark.parametrize(("text", "line"), NOT_COPIED.values(), ids=NOT_COPIED)
def test_a_function_that_would_train_or_cannot_be_found_is_refused_with_its_line(tmp_path, text, line):
    done, document = imported(tmp_path, HEAD + text)
    assert document["rewards"] == []
    assert done.module is None
    assert any(line in told for told in done.unread), done.unread


def test_a_lora_config_is_read_with_its_own_defaults(tmp_path):
    text = f"{HEAD}from peft import LoraConfig\nRLOOTrainer('m/n', 'c/d', RLOOConfig(), 'x', peft_config=LoraConfig(r=4, init_lora_weights='pissa'))\n"
    done, document = imported(tmp_path, text)
    assert document["model"].items() >= {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0}.items()
    assert any("`init_lora_weights` of LoraConfig is no field of a recipe. Left out." in line for line in done.unread)


def test_defaults_that_make_other_numbers_are_written_and_the_others_told(tmp_path):
    done, document = imported(tmp_path, f"{HEAD}config = RLOOConfig(eval_strategy='steps', mask_truncated_completions=True)\n{TRAINER}")
    assert document["generation"]["max_completion_length"] == 512
    assert document["training"]["disable_dropout"] is False
    told = "\n".join(done.different)
    assert "num_generations_eval: left out, which is null in TRL and 1 here" in told
    assert "rows cut off at `max_completion_length`" in told
    assert "vllm_server_host" not in told
    text = done.recipe.read_text()
    assert "max_completion_length: 512   # TRL's default" in text
    assert "# Not as in TRL:" in text


def test_nothing_of_a_script_runs_and_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "train.py").write_text(
        f"raise SystemExit('ran')\n{HEAD}def f(completions, **kwargs):\n    return [0.0]\nRLOOTrainer('m/n', f, RLOOConfig(), 'x')\n"
    )
    assert exit_code_of(["import-trl", str(tmp_path / "train.py"), "-o", str(tmp_path / "out" / "my recipe.yaml")]) == 0
    told = capsys.readouterr()
    assert "not as in TRL: calls of reward functions" in told.err
    assert told.out == f"recipe: {tmp_path}/out/my recipe.yaml, its reward functions: {tmp_path}/out/my_recipe_rewards.py\n"
    before = (tmp_path / "out" / "my recipe.yaml").read_text()
    assert exit_code_of(["import-trl", str(tmp_path / "train.py"), "-o", str(tmp_path / "out" / "my recipe.yaml")]) == 2
    assert "exists already, and nothing is ever overwritten" in capsys.readouterr().err
    assert (tmp_path / "out" / "my recipe.yaml").read_text() == before


REFUSED = {
    "no trainer": ("print(1)\n", "makes no RLOOTrainer; its config"),
    "another trainer": (
        "from trl import GRPOTrainer\nGRPOTrainer()\n",
        "makes no RLOOTrainer but a GRPOTrainer, which is another algorithm",
    ),
    "two trainers": (f"{HEAD}RLOOTrainer()\nRLOOTrainer()\n", "makes 2 RLOOTrainers (lines 3, 4)"),
    "no Python": ("def\n", "train.py:1: invalid syntax"),
    "not text": ("\0", "train.py"),
    "too deep": (f"{HEAD}x = {'+'.join('1' * 5000)}\n", "its expressions are nested too deeply"),
    "long chains": (f"{HEAD}RLOOTrainer(model=m{'.b' * 700})\n", "its expressions are nested too deeply"),
    "too large": ("x = 1\n" * 200_000, "larger than 1 MiB"),
    "no encoding": ("# coding: nosuch\n", "train.py:1: unknown encoding: nosuch"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_a_script_that_is_no_training_is_refused_in_a_line(tmp_path, capsys, text, message):
    (tmp_path / "train.py").write_text(text)
    assert exit_code_of(["import-trl", str(tmp_path / "train.py")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "train.yaml").exists()


@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_what_never_ends_is_not_read(tmp_path, capsys, kind):
    script = tmp_path / "train.py"
    if kind == "pipe":
        os.mkfifo(script)
    else:
        script.symlink_to("/dev/zero")
    assert exit_code_of(["import-trl", str(script)]) == 2
    assert "train.py: is not a regular file" in capsys.readouterr().err


def test_a_script_is_read_in_the_encoding_that_it_declares(tmp_path):
    (tmp_path / "train.py").write_text(
        f"# -*- coding: latin-1 -*-\n{HEAD}config = RLOOConfig(run_name='caf\xe9')\n{TRAINER}", encoding="latin-1"
    )
    done = import_script(tmp_path / "train.py", None)
    assert yaml.safe_load(done.recipe.read_text(encoding="utf-8"))["run"]["run_name"] == "caf\xe9"
