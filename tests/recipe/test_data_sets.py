"""Streams and mixtures in a recipe: what TRL's files write is read, and what does not fit together is refused in one line."""

from pathlib import Path

import pytest
from recipe_texts import VALID, faults_of, load

REST = VALID.partition("data:")[0] + VALID[VALID.index("rewards:") :]
LINE = REST.count("\n") + 1
ENTRY_FIELDS = ("path", "name", "split", "test_split", "prompt_column", "columns", "fraction", "weight")


@pytest.fixture(autouse=True)
def files():
    for name in ("a.jsonl", "b.jsonl"):
        Path(name).write_text('{"prompt": "x"}\n')


def data_of(text, *overrides):
    return load(REST + text, *overrides).recipe.data


def test_a_mixture_as_trl_writes_it_is_read_and_its_paths_are_the_recipes():
    data = data_of(
        "datasets:\n  - path: a.jsonl\n    name: null\n    split: train\n    columns: [prompt]\n    fraction: 1\n  - {path: owner/set, name: main, fraction: 0.5}\n"
    )
    first, second = data.datasets
    assert (first.path, first.columns, first.fraction) == (str(Path("a.jsonl").absolute()), ["prompt"], 1.0)
    assert (second.path, second.name, second.split, second.fraction) == ("owner/set", "main", "train", 0.5)
    assert data.dataset_name is None


def test_every_field_of_an_entry_is_read():
    entry = "{path: a.jsonl, name: n, split: s, test_split: t, prompt_column: p, columns: [p], weight: 2}"
    (found,) = data_of(f"data: {{datasets: [{entry}]}}\n").datasets
    assert [getattr(found, name) for name in ENTRY_FIELDS[1:]] == ["n", "s", "t", "p", ["p"], None, 2.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "dataset_name: a.jsonl\nmax_steps: 5\ndataset_streaming: true": True,
        "datasets: [{path: a.jsonl}]\nmax_steps: 5\nstreaming: true": True,
        "dataset_name: a.jsonl\nmax_steps: 5\ndataset_streaming: true\nstreaming: false": True,
        "dataset_name: a.jsonl\ndataset_streaming: false\nstreaming: false\ndatasets: []\ntest_split_size: null": False,
    }.items(),
)
def test_both_of_trls_switches_mean_streaming(text, expected):
    assert data_of(text + "\n").dataset_streaming is expected


FAULTS = {
    "datasets: [{path: a.jsonl}]\ndataset_name: b.jsonl": "data.datasets: `dataset_name` is given as well; write it as an entry `- path:`, or leave one of them out.",
    "datasets: [{split: train}]": "data.datasets: `path`: required.",
    "datasets: [{path: a.jsonl, wieght: 2}]": "data.datasets: `wieght`: unknown field. Did you mean `weight`?",
    "datasets: [{path: a.jsonl, data_files: x}]": "data.datasets: `data_files`: unknown field: name the folder or the file itself as `path`.",
    "datasets: [{path: a.jsonl, weight: 0}]": "data.datasets: `weight`: must be above 0, got 0.",
    "datasets: [{path: a.jsonl, weight: fast}]": "data.datasets: `weight`: expected a number or null, got 'fast'.",
    "datasets: [a.jsonl]": "data.datasets: expected a mapping, got 'a.jsonl'.",
    "datasets: [{path: ./none.jsonl}]": "data.datasets[0].path: './none.jsonl': no such file or folder in `.`; a hub id is NAME or OWNER/NAME.",
    "datasets: [{path: a.jsonl, weight: 1}, {path: b.jsonl}]": "data.datasets[1]: has no `weight`, and another set has one; give it to all sets or to none.",
    "datasets: [{path: a.jsonl, weight: 1, fraction: 1}]": "data.datasets: `weight` and `fraction` are two ways to mix; keep one of them.",
    "datasets: [{path: a.jsonl, columns: [answer]}]": "data.datasets[0].columns: the prompts' column `prompt` is not among them.",
    "datasets: [{path: a.jsonl}]\ndataset_train_split: test": "data.dataset_train_split: not of a mixture: each entry of `datasets` has its own `name` and `split`.",
    "datasets: []": "data.dataset_name: required: write `dataset_name: …` below `data:`.",
    "dataset_name: a.jsonl\ndataset_streaming: true": "training.max_steps: a stream's prompts are not counted beforehand: write how many steps, such as `max_steps: 1000`.",
    "dataset_name: a.jsonl\ndataset_streaming: true\nmax_steps: 5\nsave_strategy: epoch": "run.save_strategy: a stream's prompts are not counted beforehand, so nobody knows when an epoch ends: write `steps`.",
    "datasets: [{path: a.jsonl, fraction: 1}]\nstreaming: true\nmax_steps: 5": "data.datasets: a `fraction` needs the number of rows, which a stream does not know: write `weight`.",
    "dataset_name: a.jsonl\ntest_split_size: 0.1": "test_split_size: `0.1` is refused: what is held out is a split of its own: `dataset_test_split`, or `test_split` of a set of `datasets`.",
}


@pytest.mark.parametrize(("text", "fault"), FAULTS.items(), ids=FAULTS)
def test_what_does_not_fit_is_refused_with_its_place(text, fault):
    (line,) = faults_of(REST + text + "\n")
    place, _, message = line.partition(": ")
    assert message == fault
    assert place.partition(":")[0] in (str(LINE), str(LINE + 1), str(LINE + 2), str(LINE + 3), "1", "r.yaml")


def test_a_window_that_is_not_read_is_told():
    (notice,) = load(REST + "dataset_name: a.jsonl\nshuffle_buffer_size: 5\n").notices
    assert notice.endswith("data.shuffle_buffer_size: not read: dataset_streaming is false, and all prompts are shuffled together.")


def test_evaluation_takes_a_test_split_of_any_set():
    text = "datasets: [{path: a.jsonl, test_split: train}, {path: b.jsonl}]\neval_strategy: steps\n"
    assert data_of(text).has_test_split
    assert faults_of(REST + text.replace(", test_split: train", ""))[0].split(": ")[1] == "evaluation.eval_strategy"
