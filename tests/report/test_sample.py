from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import group, write_rollout_steps, write_run, write_step

from rloo_cli.report.run_view import view_runs
from rloo_cli.report.sample import MOST_FILES, MOST_GROUPS, sample_rollouts, shown_text
from rloo_cli.run.folder import RunFolder

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart" / "model"


def sample(folder, **arguments):
    return sample_rollouts(view_runs([folder])[0], **arguments)


def test_a_group_keeps_what_the_page_shows(tmp_path):
    folder = write_run(tmp_path / "run")
    write_step(folder, 3, [*group(7, [1.0, 0.0, None, 0.0]), *group(9, [1.0, 1.0, 1.0, 1.0])])
    (step,) = sample(folder).steps
    assert (step["label"], step["kind"], step["of"]) == ("3", "train", 2)
    first = step["groups"][0]
    assert (first["i"], first["row"], first["size"]) == (0, 7, 4)
    assert first["p"].startswith("<|im_start|>user\nWhat is 7+7?")
    assert first["c"][0] == {"t": "It is 0.", "n": 4, "r": 1.0, "a": 1.0, "f": "stopped", "rs": {"correct": 1.0, "style": 0.5}}
    assert first["c"][2]["r"] is first["c"][2]["a"] is first["c"][2]["rs"]["correct"] is None


def test_many_steps_and_groups_are_sampled_from_end_to_end(tmp_path):
    folder = write_run(tmp_path / "run")
    write_rollout_steps(folder, 26)
    write_step(folder, 0, group(1, [0.0]), kind="eval")
    write_step(folder, 27, group(1, [0.0]), kind="failed")
    steps = sample(folder).steps
    labels = [step["label"] for step in steps]
    assert len(steps) == MOST_FILES["train"] + 2
    assert (labels[0], labels[1], labels[-2], labels[-1]) == ("eval-0", "1", "26", "failed-27")
    assert {len(step["groups"]) for step in steps if step["kind"] == "train"} == {MOST_GROUPS}
    means = [[sum(row["r"] for row in each["c"]) / 8 for each in step["groups"]] for step in steps[1:-1]]
    assert any(min(mean) < max(mean) for mean in means)


def test_a_budget_leaves_the_worst_and_the_best_group(tmp_path):
    folder = write_run(tmp_path / "run")
    groups = [group(row, [row / 10] * 4, text="x" * 400) for row in range(10)]
    write_step(folder, 1, [row for rows in groups for row in rows])
    (step,) = sample(folder, budget=4 * 400 * 2 + 400).steps
    assert [each["row"] for each in step["groups"]] == [0, 9]


def test_special_tokens_are_in_the_text(tmp_path):
    folder = write_run(tmp_path / "run")
    final = RunFolder(folder).final
    final.mkdir()
    (final / "tokenizer.json").write_bytes((QUICKSTART / "tokenizer.json").read_bytes())
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(final / "tokenizer.json"))
    ids = [*tokenizer.encode("12", add_special_tokens=False).ids, tokenizer.token_to_id("<|im_end|>")]
    write_step(folder, 1, group(1, [1.0, 0.0], completion="12", completion_ids=ids))
    found = sample(folder)
    assert found.steps[0]["groups"][0]["c"][0]["t"] == "12<|im_end|>"
    assert "<|im_end|>" in found.special_tokens


def test_a_damaged_file_is_a_gap_and_the_others_are_there(tmp_path):
    folder = write_run(tmp_path / "run")
    for step in (1, 2):
        write_step(folder, step, group(1, [1.0, 0.0]))
    path = RunFolder(folder).rollout_file(2)
    path.write_bytes(path.read_bytes()[:100])
    found = sample(folder)
    assert [step["label"] for step in found.steps] == ["1"]
    assert len(found.gaps) == 1
    assert str(path) in found.gaps[0]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2J\u202eb\x00", "a\\x1b[2J\\u202eb\\x00"),
        ("x" * 30 + "y" * 30, "x" * 10 + "\n[… 40 characters left out …]\n" + "y" * 10),
        (None, None),
    ],
)
def test_texts_are_harmless_and_short(text, shown):
    assert shown_text(text, 20) == shown
