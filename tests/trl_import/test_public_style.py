"""Configs and scripts in the style of public ones: each trains as it is, or a line says what to change."""

import json
import shutil
from pathlib import Path

import pytest

from rloo_cli.cli.app import exit_code_of

EXAMPLES = Path(__file__).resolve().parent / "examples"
MODEL = Path(__file__).resolve().parents[2] / "recipes" / "quickstart" / "model"
SMALL = [
    f"model_name_or_path={MODEL}",
    "dtype=float32",
    "dataset_config=null",
    "prompt_column=prompt",
    "max_steps=2",
    "max_completion_length=6",
    "save_strategy=no",
    "bf16=false",
    "threads=1",
    "num_processes=1",
    "use_vllm=false",
    "gradient_accumulation_steps=1",
    "steps_per_generation=null",
    "report_to=none",
]
"""What a machine without network and GPU changes of any of them: model, data, size."""

AS_IT_IS = {
    "gsm8k_format.py": ["`.map(…)` cannot be carried over: save what it gives"],
    "deepmath.py": [],
    "deepmath.yaml": [],
    "think_format.yaml": [],
    "length_penalty.py": [
        "`.push_to_hub(…)` after training is not carried over",
        "the first 1000 rows are taken, not 1000 of a shuffled order",
    ],
    "async_judge.py": [],
    "lora.py": [],
    "vllm_server.yaml": [],
    "vlm.py": [],
    "trl_parser.py": [
        "train_dataset: `script_args.dataset_name` comes from the command line",
        "model: `model_args.model_name_or_path` comes from the command line",
        "args: `training_args` comes from the command line: put its options into the recipe",
        "peft_config: it comes from the command line: the options `use_peft`, `lora_r`, … are fields of the recipe",
    ],
    "with_argparse.py": [
        "reward in_vocabulary: it reads `vocabulary`, whose statement calls `load_dataset`",
        "`args.lr` is read as the default of that option, 2e-06",
        "hub_token: its value is left out",
        "max_steps: `args.steps` comes from the command line",
        "use_liger_kernel: True is left out",
        "`args.model` is read as the default of that option, 'Qwen/Qwen2-0.5B-Instruct'",
        "`args.dataset_name` is read as the default of that option, 'trl-lib/tldr'",
    ],
}
"""Trains, model and data replaced → what the import says of it."""

CHANGED = {
    "deepspeed.yaml": ["deepspeed.yaml:4:12: ", "zero3"],
    "grpo_config.yaml": [
        "loss_type: `dapo` is refused: it is an option of GRPO, not of RLOO.",
        "scale_rewards: `group` is refused: it is an option of GRPO, not of RLOO; `normalize_advantages` is RLOO's.",
    ],
}
"""Does not train → the lines that say what to change."""


@pytest.fixture
def data(tmp_path):
    """Rows that suit all of them: chat messages, a gold answer under each usual name."""
    rows = [{"prompt": [{"role": "user", "content": f"{i}+{i}?"}], "answer": str(2 * i), "solution": f"${2 * i}$"} for i in range(6)]
    (tmp_path / "rows").mkdir()
    for split in ("train", "test"):
        (tmp_path / "rows" / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path / "rows"


def run(recipe, data, folder, *more):
    changes = [*SMALL, f"dataset_name={data}", *more]
    return exit_code_of(["train", str(recipe), "-o", str(folder), "-q", *(word for change in changes for word in ("--set", change))])


@pytest.mark.parametrize("name", AS_IT_IS)
def test_it_trains_as_it_is(name, tmp_path, data, capsys):
    recipe = EXAMPLES / name
    if name.endswith(".py"):
        shutil.copy(recipe, tmp_path / name)
        assert exit_code_of(["import-trl", str(tmp_path / name)]) == 0
        said = [
            line.partition(".py:")[2].partition(": ")[2] for line in capsys.readouterr().err.splitlines() if line.startswith("not carried")
        ]
        assert len(said) == len(AS_IT_IS[name]), said
        assert all(any(line.startswith(wanted) for line in said) for wanted in AS_IT_IS[name]), said
        recipe = tmp_path / f"{Path(name).stem}.yaml"
    assert run(recipe, data, tmp_path / "run") == 0, capsys.readouterr().err
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 2


@pytest.mark.parametrize("name", CHANGED)
def test_a_line_says_what_to_change(name, tmp_path, data, capsys):
    assert run(EXAMPLES / name, data, tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert all(line in error for line in CHANGED[name]), error
    assert not (tmp_path / "run").exists()
