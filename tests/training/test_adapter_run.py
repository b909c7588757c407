"""Whole runs that train an adapter: resumed to the bit, on two processes as on one, and what they leave."""

import json

import pytest
import test_run
import tiny
import torch
from processes import run_ranks
from safetensors.torch import load_file
from test_ranks_run import Forever, close
from transformers import AutoModelForCausalLM

from rloo_cli.cli.app import exit_code_of
from rloo_cli.errors import RefusedError, StoppedError
from rloo_cli.launch.talk import Speaker, choose_subject
from rloo_cli.run.checkpoint import find_checkpoint
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.metrics import read_metrics
from rloo_cli.training.adapter import adapter_names, is_adapted

LORA = {"model__use_peft": True, "model__lora_target_modules": ["all-linear"], "training__learning_rate": 1e-2}
VARIANTS = {
    "new": {},
    "copies and another scale": {"model__lora_modules_to_save": ["norm"], "model__use_rslora": True, "algorithm__num_iterations": 2},
    "dropout": {"model__lora_dropout": 0.2, "training__steps_per_generation": 2},
    "no reference": {"algorithm__beta": 0.0, "training__gradient_checkpointing": False},
}
IDS = torch.tensor([[5, 17, 99, 3]])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of the model that `test_run.start` trains."""
    folder = tmp_path_factory.mktemp("base")
    tiny.qwen2().save_pretrained(folder)
    tiny.byte_tokenizer().save_pretrained(folder)
    return folder


def start(path, monkeypatch, base, **options):
    """A run of the model in the folder `base`, or of the adapter there."""
    return test_run.start(path, monkeypatch, model__model_name_or_path=str(base), **{"model": lambda: loaded(base), **LORA, **options})


def loaded(folder):
    config = folder / "adapter_config.json"
    if config.exists():
        folder = json.loads(config.read_text())["base_model_name_or_path"]
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def one_value_changed(folder):
    model = loaded(folder)
    with torch.no_grad():
        model.model.embed_tokens.weight[17, 5] += 1e-3
    return model


def left(folder):
    """(metrics without perf/, the adapter's bytes)."""
    rows = [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in read_metrics(folder.metrics)]
    return rows, (folder.final / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_stopped_at_any_step_and_resumed_ends_as_one_never_stopped(variant, tmp_path, monkeypatch, base):
    options = VARIANTS[variant]
    expected = left(start(tmp_path / "whole", monkeypatch, base, **options))
    if "algorithm__beta" not in options:
        assert expected[0][0]["kl"] == 0
        assert expected[0][-1].get("kl", 1.0) != 0
    for k in range(1, test_run.STEPS):
        path = tmp_path / f"stopped-{k}"
        with pytest.raises(StoppedError, match=f"SIGTERM: step {k} is saved"):
            start(path, monkeypatch, base, stop_at=k, **options)
        start(path, monkeypatch, base, resume=find_checkpoint(path / "checkpoints"), **options)
        assert left(RunFolder(path)) == expected


def test_an_adapter_is_trained_on_against_its_start_and_resumed_to_the_bit(tmp_path, monkeypatch, base):
    first = start(tmp_path / "first", monkeypatch, base).final
    expected = left(start(tmp_path / "whole", monkeypatch, first))
    assert expected[0][0]["kl"] == 0
    assert expected[0][1]["kl"] != 0
    with pytest.raises(StoppedError):
        start(tmp_path / "stopped", monkeypatch, first, stop_at=3)
    found = find_checkpoint(tmp_path / "stopped" / "checkpoints")
    start(tmp_path / "stopped", monkeypatch, first, resume=found)
    assert left(RunFolder(tmp_path / "stopped")) == expected
    assert json.loads((tmp_path / "whole/final/adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    with pytest.raises(RefusedError, match="is not the model that"):
        start(tmp_path / "stopped", monkeypatch, start(tmp_path / "other", monkeypatch, base, training__seed=7).final, resume=found)


def test_another_base_model_is_refused_on_resume(tmp_path, monkeypatch, base):
    with pytest.raises(StoppedError):
        start(tmp_path / "run", monkeypatch, base, stop_at=2)
    found = find_checkpoint(tmp_path / "run" / "checkpoints")
    with pytest.raises(RefusedError, match="is not the model that"):
        start(tmp_path / "run", monkeypatch, base, resume=found, model=lambda: one_value_changed(base))


def test_a_checkpoint_holds_the_adapter_and_nothing_of_the_model(tmp_path, monkeypatch, base):
    checkpoint = find_checkpoint(start(tmp_path / "run", monkeypatch, base).checkpoints)
    names = set(load_file(checkpoint.path / "model.safetensors"))
    assert len(names) == 28
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    assert set(load_file(checkpoint.path / "optimizer.safetensors")) == {
        f"{kind}/{name}" for kind in ("exp_avg", "exp_avg_sq") for name in names
    }


def test_final_loads_in_peft_with_the_model_and_by_itself(tmp_path, monkeypatch, base):
    from peft import AutoPeftModelForCausalLM, PeftModel

    final = start(tmp_path / "run", monkeypatch, base).final
    alone = AutoPeftModelForCausalLM.from_pretrained(final)
    beside = PeftModel.from_pretrained(tiny.qwen2(), final)
    assert torch.equal(alone(IDS).logits, beside(IDS).logits)
    assert not torch.allclose(alone(IDS).logits, tiny.qwen2()(IDS).logits)
    assert not any(parameter.requires_grad for parameter in beside.parameters())
    names = {file.name for file in final.iterdir()}
    assert names >= {"adapter_config.json", "adapter_model.safetensors", "manifest.json", "tokenizer.json", "tokenizer_config.json"}
    assert not names & {"config.json", "model.safetensors"}


def greedy(folder):
    """Token by token what `rloo generate` says to a few prompts, with the log-prob of each answer."""
    from rloo_cli.rollout.engine import SamplingParams

    speaker = Speaker(choose_subject(str(folder), checkpoint=None), seed=0, trust_remote_code=False)
    answers = speaker.answer(["Hello", "What is 12?", "xyz"], SamplingParams(max_new_tokens=24, temperature=0), 1)
    return [(written.text_with_special, round(written.logprob, 3)) for answer in answers for written in answer.completions]


def test_the_run_its_checkpoint_its_export_and_its_merged_model_answer_alike(tmp_path, monkeypatch, base):
    folder = start(tmp_path / "run", monkeypatch, base)
    (folder.path / "recipe.yaml").write_text((folder.path / "recipe.yaml").read_text().replace("function: even", "function: stand.in"))
    run, checkpoint = str(folder.path), str(folder.checkpoints / f"{test_run.STEPS:06d}")
    assert exit_code_of(["export", run, str(tmp_path / "adapter")]) == 0
    for source, target in ((run, "one"), (str(folder.final), "two"), (str(tmp_path / "adapter"), "three")):
        assert exit_code_of(["export", "--merge", source, str(tmp_path / target)]) == 0
    bytes_of = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two", "three")]
    assert bytes_of[0] == bytes_of[1] == bytes_of[2]
    expected = greedy(folder.path)
    assert expected == greedy(folder.final) == greedy(checkpoint) == greedy(tmp_path / "adapter") == greedy(tmp_path / "one")
    assert expected != greedy(base)


def test_a_merged_model_needs_no_peft_and_can_be_rounded(tmp_path, monkeypatch, base):
    folder = start(tmp_path / "run", monkeypatch, base)
    assert exit_code_of(["export", "--merge", str(folder.path), str(tmp_path / "merged"), "--dtype", "bfloat16"]) == 0
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    assert not is_adapted(model)
    assert model.dtype == torch.bfloat16
    assert not (tmp_path / "merged" / "adapter_config.json").exists()


REFUSED = {
    "a whole model": (lambda run, base: [str(base), "--merge"], "neither a run folder"),
    "final without --merge": (
        lambda run, base: [f"{run}/final"],
        "adapter, which is as peft reads it already (--merge makes a model of it)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_is_told_in_one_line(case, tmp_path, monkeypatch, base, capsys):
    words, message = REFUSED[case]
    run = start(tmp_path / "run", monkeypatch, base).path
    assert exit_code_of(["export", *words(run, base), str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_of_a_whole_model_has_nothing_to_merge(tmp_path, monkeypatch, base, capsys):
    run = test_run.start(tmp_path / "run", monkeypatch, model__model_name_or_path=str(base)).path
    assert exit_code_of(["export", "--merge", str(run), str(tmp_path / "out")]) == 2
    assert "there is nothing to merge, leave --merge out" in capsys.readouterr().err


def test_a_base_model_that_has_changed_is_not_merged_with(tmp_path, monkeypatch, base, capsys):
    changed = tmp_path / "base"
    tiny.qwen2().save_pretrained(changed)
    tiny.byte_tokenizer().save_pretrained(changed)
    run = start(tmp_path / "run", monkeypatch, changed).path
    one_value_changed(changed).save_pretrained(changed)
    assert exit_code_of(["export", "--merge", str(run), str(tmp_path / "out")]) == 2
    assert "its weights have changed" in capsys.readouterr().err


def start_on_rank(rank, path, base):
    start(path, Forever, base)
    return "done"


def test_a_run_on_two_processes_has_the_numbers_of_one(tmp_path, monkeypatch, base):
    assert run_ranks(start_on_rank, 2, tmp_path, tmp_path / "two", base) == ["done"] * 2
    one, two = start(tmp_path / "one", monkeypatch, base), RunFolder(tmp_path / "two")
    close(read_metrics(two.metrics), read_metrics(one.metrics))
    ours, theirs = (load_file(folder.final / "adapter_model.safetensors") for folder in (one, two))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(theirs[name], tensor, atol=2e-3) for name, tensor in ours.items())


def test_kl_is_zero_at_the_first_step_in_bf16_too(tmp_path, monkeypatch, base):
    from rloo_cli.training import auto

    monkeypatch.setattr(auto, "decide_bf16", lambda training, device: True)
    for name, model in {"masters": tiny.qwen2, "held in bf16": lambda: tiny.qwen2(dtype=torch.bfloat16)}.items():
        rows = read_metrics(start(tmp_path / name, monkeypatch, base, model=model, training__bf16=True).metrics)
        assert rows[0]["kl"] == 0, name
        assert rows[1]["kl"] != 0, name


def test_only_the_adapter_is_what_training_moves(tmp_path, monkeypatch, base):
    seen = {}

    def model():
        seen["model"] = loaded(base)
        return seen["model"]

    start(tmp_path / "run", monkeypatch, base, model=model)
    trained, before = seen["model"], loaded(base).state_dict()
    for name, tensor in trained.state_dict().items():
        if name not in adapter_names(trained):
            assert torch.equal(tensor, before[name.replace(".base_layer", "")]), name
