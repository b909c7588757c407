"""`rloo export` on checkpoints of every layout: what comes out is a transformers folder with the weights that went in."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, Qwen2Config

from rloo_cli.cli.app import exit_code_of
from rloo_cli.errors import StorageError
from rloo_cli.run.atomic import AtomicFolder
from rloo_cli.run.checkpoint import CHECKPOINT_FORMAT, DESCRIPTION, find_checkpoint
from rloo_cli.run.shards import Shard, rank_file, shards_stream
from rloo_cli.training.model_files import as_published, plan_weights, save_description, write_weights
from rloo_cli.training.parts import unique_names
from rloo_cli.training.state import load_position

WHOLE, ROWS, ELEMENTS = "whole", "rows", "elements"
PROMPT = torch.tensor([[72, 101, 108, 108, 111]])


def shard(tensor, layout, rank, world_size):
    total = tensor.numel()
    row = total // len(tensor) if layout == ROWS else 1
    start, stop = (total // row * r // world_size * row for r in (rank, rank + 1))
    return Shard(values=tensor.detach().reshape(-1)[start:stop], start=start, shape=tuple(tensor.shape))


def write_checkpoint(path, model, layout=WHOLE, ranks=3, best=None):
    step, tensors = int(path.name), dict(unique_names(model))
    with AtomicFolder(path, info={"kind": "checkpoint", "format": CHECKPOINT_FORMAT, "step": step}) as files:
        for rank in range(1 if layout == WHOLE else ranks):
            parts = {name: shard(tensor, layout, rank, 1 if layout == WHOLE else ranks) for name, tensor in tensors.items()}
            files.write("model.safetensors" if layout == WHOLE else rank_file("model", rank, ranks), shards_stream(parts)[1])
        files.write_json("position.json", {"step": step, "best": best})
        save_description(files.path / DESCRIPTION, model, tiny.byte_tokenizer())
    return path


def greedy(model):
    return model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=12, do_sample=False).tolist()


@pytest.mark.parametrize("layout", [WHOLE, ROWS, ELEMENTS])
def test_what_is_exported_answers_as_the_model_did(tmp_path, layout):
    model = tiny.qwen2(seed=3)
    path = write_checkpoint(tmp_path / "000004", model, layout)
    assert exit_code_of(["export", str(path), str(tmp_path / "out")]) == 0
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert greedy(loaded) == greedy(model)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tiny.CHAT_TEMPLATE


def test_a_folder_has_the_bytes_that_transformers_itself_would_have_written(tmp_path):
    model = tiny.qwen2()
    write_checkpoint(tmp_path / "000004", model, ELEMENTS)
    model.save_pretrained(tmp_path / "theirs")
    tiny.byte_tokenizer().save_pretrained(tmp_path / "theirs")
    assert exit_code_of(["export", str(tmp_path / "000004"), str(tmp_path / "out")]) == 0
    ours, theirs = ({file.name: file.read_bytes() for file in (tmp_path / place).iterdir()} for place in ("out", "theirs"))
    assert json.loads(ours.pop("manifest.json"))["info"]["step"] == 4
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] in ([], ["model.safetensors"])  # the order of tensors in it is ours


def test_weights_are_rounded_where_that_is_asked_for(tmp_path):
    model = tiny.qwen2()
    path = write_checkpoint(tmp_path / "000004", model, ROWS)
    assert exit_code_of(["export", str(path), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, model.state_dict()[name].to(torch.bfloat16))


def test_experts_are_cut_up_as_their_kind_is_published(tmp_path):
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = AutoModelForCausalLM.from_config(MixtralConfig(vocab_size=260, num_local_experts=4, **small))
    model.save_pretrained(tmp_path / "theirs")
    path = write_checkpoint(tmp_path / "000004", model, ELEMENTS)
    assert exit_code_of(["export", str(path), str(tmp_path / "out")]) == 0
    ours, theirs = (tensors_of(tmp_path / place) for place in ("out", "theirs"))
    assert ours.keys() == theirs.keys()
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in ours
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def tensors_of(folder):
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_large_weights_go_into_several_files_and_other_types_into_one_of_their_own(tmp_path):
    model = tiny.qwen2(dtype=torch.bfloat16)
    model.model.norm.weight.data = model.model.norm.weight.data.float()
    tensors = list(as_published(model, model.state_dict().items()))
    plan = plan_weights(tensors, limit=60_000)
    assert plan.dtype == torch.bfloat16
    with AtomicFolder(tmp_path / "out") as files:
        write_weights(files, plan, tensors)
        save_description(files.path, model, tiny.byte_tokenizer())
    names = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(names) == len(plan.files) + 1 > 3
    assert all(sum(t.nbytes for t in file.values()) <= 60_000 for file in plan.files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["model.norm.weight"] == names[-1]
    assert sorted(set(index["weight_map"].values())) == names
    loaded = tensors_of(tmp_path / "out")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").get_input_embeddings().weight.dtype == torch.bfloat16


@pytest.fixture
def run(tmp_path):
    """A run folder with checkpoints of steps 2, 4 and 6, of which 4 is the best."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "recipe.yaml").write_text("{}")
    for step in (2, 4, 6):
        best = {"step": 4, "metric": "eval/reward", "value": 0.5} if step >= 4 else None
        write_checkpoint(folder / "checkpoints" / f"{step:06d}", tiny.qwen2(seed=step), best=best)
    return folder


@pytest.mark.parametrize(
    ("options", "step", "words"),
    [
        ([], 4, "step 4 of {run}, its best by eval/reward (0.5)"),
        (["--step", "6"], 6, "step 6 of {run}"),
        (["--step", "2"], 2, "step 2 of {run}"),
    ],
)
def test_the_best_checkpoint_of_a_run_or_that_of_a_step_is_said_and_taken(run, tmp_path, capsys, options, step, words):
    assert exit_code_of(["export", str(run), str(tmp_path / "out"), *options]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "exporting " + words.format(run=run)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.model.norm.weight, tiny.qwen2(seed=step).model.norm.weight)


def test_without_a_best_the_last_that_is_whole_is_taken(run, tmp_path, capsys):
    shutil.rmtree(run / "checkpoints" / "000004")
    write_checkpoint(run / "checkpoints" / "000008", tiny.qwen2())
    (run / "checkpoints" / "000008" / "model.safetensors").write_bytes(b"")
    for step in (6, 2):
        shutil.rmtree(run / "checkpoints" / f"{step:06d}")
        write_checkpoint(run / "checkpoints" / f"{step:06d}", tiny.qwen2(seed=step))
    assert exit_code_of(["export", str(run), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith(f"exporting step 6 of {run}, its last\n")


@pytest.mark.parametrize("position", ["[]", "{", '{"best": {"x": 1}}', '{"best": [1]}', "[" * 20_000])
def test_a_position_that_is_none_says_no_best(run, tmp_path, capsys, position):
    with AtomicFolder(run / "checkpoints" / "000008", info={"kind": "checkpoint", "format": CHECKPOINT_FORMAT, "step": 8}) as files:
        files.write("position.json", position)
    assert exit_code_of(["export", str(run), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith(f"exporting step 4 of {run}, its best")
    with pytest.raises(StorageError, match="000008"):
        load_position(find_checkpoint(run / "checkpoints", 8), [])


def occupied(run, out):
    out.mkdir()
    (out / "mine").write_text("mine")


def a_file(run, out):
    out.write_text("mine")


def damaged(run, out):
    file = run / "checkpoints" / "000004" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def a_circle(run, out):
    out.symlink_to(out)


def nothing(run, out):
    pass


def no_checkpoints(run, out):
    shutil.rmtree(run / "checkpoints")
    (run / "final").mkdir()


def older(run, out):
    shutil.rmtree(run / "checkpoints" / "000004")
    with AtomicFolder(run / "checkpoints" / "000004", info={"kind": "checkpoint", "format": 1, "step": 4}):
        pass


@pytest.mark.parametrize(
    ("before", "words", "code", "says"),
    [
        (occupied, ["{run}", "{out}"], 2, "{out} exists already and is not empty: name a new folder."),
        (a_file, ["{run}", "{out}"], 2, "{out} exists already: name a new folder."),
        (damaged, ["{run}", "{out}"], 6, "000004/model.safetensors: damaged: its sha256"),
        (damaged, ["{run}/checkpoints/000004", "{out}"], 6, "000004/model.safetensors: damaged: its sha256"),
        (nothing, ["{run}", "{out}", "--step", "3"], 2, "there is no checkpoint {run}/checkpoints/000003. Steps saved"),
        (nothing, ["{run}/checkpoints/000004", "{out}", "--step", "4"], 2, "is no run folder"),
        (nothing, ["{run}/checkpoints", "{out}"], 2, "is neither a run folder (it has no recipe.yaml) nor a checkpoint"),
        (nothing, ["{run}/absent", "{out}"], 2, "is neither a run folder"),
        (
            no_checkpoints,
            ["{run}", "{out}"],
            2,
            "holds no checkpoint; its final model is a plain transformers folder already: {run}/final.",
        ),
        (older, ["{run}", "{out}"], 2, "000004 has format 1; this version of rloo reads format 2: use the version that wrote it."),
        (nothing, ["{run}", "{out}", "--dtype", "int3"], 2, "bfloat16"),
        (nothing, ["{run}", "{out}", "--step", "-1"], 2, "--step"),
        (nothing, ["{run}", "{out}" + "x" * 300], 6, "x: File name too long."),
        (nothing, ["{run}", "{out}" + "x" * 250], 6, "x: File name too long."),
        (nothing, ["{run}/" + "x" * 300, "{out}"], 6, "x: File name too long."),
        (nothing, ["{run}", "{run}/mine"], 2, "{run}/mine lies in a run's folder, {run}: name a folder outside."),
        (nothing, ["{run}", "{run}/checkpoints/000002/mine"], 2, "mine lies in a checkpoint, {run}/checkpoints/000002: name a folder"),
        (damaged, ["{run}", "{out}"], 6, "Export that of another step."),
        (a_circle, ["{run}", "{out}"], 2, "{out} exists already: name a new folder."),
        (a_circle, ["{run}", "{out}/mine"], 6, "Not a directory. A file stands where a folder should be"),
        (a_file, ["{run}", "{out}/mine"], 6, "A file stands where a folder should be: move it away, or name another folder."),
    ],
)
def test_what_cannot_be_exported_is_told_in_one_line_and_leaves_nothing(run, tmp_path, capsys, before, words, code, says):
    places = {"run": run, "out": tmp_path / "out"}
    before(run, tmp_path / "out")
    there = sorted(tmp_path.rglob("*"))
    assert exit_code_of(["export", *(word.format(**places) for word in words)]) == code
    errors = capsys.readouterr().err
    assert says.format(**places) in errors
    assert errors.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == there


MEASURED = """
import resource, sys
from pathlib import Path
from rloo_cli.launch.export import _skeleton, choose_checkpoint, export
from rloo_cli.training import model_files

checkpoint, _ = choose_checkpoint(sys.argv[1], None)
_skeleton(checkpoint)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export(checkpoint, Path(sys.argv[2]), dtype=sys.argv[3] if len(sys.argv) > 3 else None)
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tensors"), [([], 1), (["bfloat16"], 1.5)])
def test_memory_is_bounded_by_the_largest_tensor(tmp_path, dtype, tensors):
    config = Qwen2Config(
        vocab_size=20_000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config)
    path = write_checkpoint(tmp_path / "000004", model, ELEMENTS)
    largest, total = max(p.nbytes for p in model.parameters()), sum(p.nbytes for p in model.parameters())
    assert total > 6 * largest
    del model
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(path), str(tmp_path / "out"), *dtype], capture_output=True, text=True, check=True, timeout=250
    )
    assert int(done.stdout) < tensors * largest + (16 << 20)


def test_a_final_model_is_one_already(run, tmp_path, capsys):
    with AtomicFolder(run / "final", info={"kind": "final", "step": 6}):
        pass
    assert exit_code_of(["export", str(run / "final"), str(tmp_path / "out")]) == 2
    assert "which is a plain transformers folder already: copy it" in capsys.readouterr().err
