"""Whole runs with images: what stops and resumes ends as what never stopped; rollouts, checkpoint and final/ are whole."""

import json

import fakes
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, List
from datasets import Image as ImageFeature
from rich.console import Console
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from rloo_cli.data.chat import load_tokenizer
from rloo_cli.data.dataset import load_prompts
from rloo_cli.data.processor import visual_processor
from rloo_cli.errors import RecipeError, StoppedError
from rloo_cli.plan.vision import check_engine_of_images, check_vision
from rloo_cli.recipe.batch import plan_batches
from rloo_cli.recipe.schema import Recipe
from rloo_cli.run.checkpoint import find_checkpoint
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.metrics import read_metrics
from rloo_cli.run.progress import Progress
from rloo_cli.run.signals import StopSignal
from rloo_cli.training.inputs import TrainingInputs
from rloo_cli.training.train import train
from tests.tiny_vision import FAMILIES, png, write_rows

STEPS = 4


def recipe_of(folder, **changes):
    document = {
        "model": {"model_name_or_path": str(folder / "model")},
        "data": {"dataset_name": str(folder / "data")},
        "rewards": [{"function": "even"}],
        "generation": {"num_generations": 3, "max_completion_length": 6},
        "algorithm": {"beta": 0.1},
        "training": {"prompts_per_step": 2, "max_steps": STEPS, "learning_rate": 1e-3, "bf16": False, "threads": 1},
        "run": {"save_steps": 100},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        document[section][name] = value
    return Recipe.model_validate(document)


def write_data(folder):
    folder.mkdir(parents=True)
    rows = []
    for i in range(6):
        (folder / f"{i}.png").write_bytes(png(i, (10 + i, 9)))
        images = [[f"{i}.png"], [f"{i}.png", "0.png"], []][i % 3]
        rows.append({"prompt": [{"role": "user", "content": f"What, {i}?"}], "images": images})
    return write_rows(folder / "train.jsonl", rows)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[] if name == "llava" else pytest.mark.slow) for name in FAMILIES])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param](path / "model")
    write_data(path / "data")
    return path


def read(folder, recipe):
    """Tokenizer, processor and prompts."""
    tokenizer = load_tokenizer(recipe.model)
    visual = visual_processor(recipe.model, AutoConfig.from_pretrained(folder / "model"), tokenizer, trust_remote_code=False)
    prompts = load_prompts(recipe.data, split="train", tokenizer=tokenizer, max_prompt_tokens=400, max_samples=None, visual=visual)
    return tokenizer, visual, prompts


def start(folder, path, monkeypatch, *, stop_at=None, resume=None, **changes):
    recipe, signal, run = recipe_of(folder, **changes), StopSignal(), RunFolder(path)
    run.prepare()
    tokenizer, visual, prompts = read(folder, recipe)
    with Progress(STEPS, console=Console(quiet=True)) as progress:
        monkeypatch.setattr(progress, "step", lambda row, *_: signal.request("SIGTERM") if row["step"] == stop_at else None)
        train(
            TrainingInputs(
                recipe=recipe,
                batch=plan_batches(recipe, 1),
                total_steps=STEPS,
                tokenizer=tokenizer,
                processor_files=visual.files(),
                prompts=prompts,
                eval_prompts=None,
                rewards=fakes.FakeRewards(),
                folder=run,
                resume_from=resume,
                trust_remote_code=False,
                progress=progress,
                stop=signal,
            )
        )
    return run


@pytest.fixture(scope="module")
def finished(folder):
    """A run to the end."""
    with pytest.MonkeyPatch.context() as patch:
        return start(folder, folder / "run", patch)


def gold(run):
    """(metrics without perf/, bytes of the final weights)."""
    rows = [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in read_metrics(run.metrics)]
    return rows, (run.final / "model.safetensors").read_bytes()


REUSED = {"training__steps_per_generation": 2, "algorithm__num_iterations": 2}


def test_a_run_stopped_at_any_step_and_resumed_ends_as_one_never_stopped(folder, tmp_path, monkeypatch):
    expected = gold(start(folder, tmp_path / "whole", monkeypatch, **REUSED))
    for k in (1, 3):  # in the middle of a batch, and at the start of its second use
        path = tmp_path / f"stopped-{k}"
        with pytest.raises(StoppedError, match=f"SIGTERM: step {k} is saved"):
            start(folder, path, monkeypatch, stop_at=k, **REUSED)
        saved = find_checkpoint(path / "checkpoints").load_document("experience")
        assert "data:image" not in json.dumps(saved)  # images are read again from the data
        start(folder, path, monkeypatch, resume=find_checkpoint(path / "checkpoints"), **REUSED)
        assert gold(RunFolder(path)) == expected


def test_the_first_kl_is_zero_and_the_sampler_is_the_trainer(finished):
    rows = list(read_metrics(finished.metrics))
    assert rows[0]["kl"] == 0.0
    assert all(row["sampling/logp_diff_max"] < 5e-5 for row in rows)
    assert rows[-1]["kl"] != 0.0


def test_images_are_in_the_rollouts_once_a_prompt(folder, finished, tmp_path):
    table = pq.read_table(finished.rollouts / "000001.parquet").to_pylist()
    lines = (folder / "data" / "train.jsonl").read_text().splitlines()
    data = {json.dumps(row["prompt"]): row["images"] for row in map(json.loads, lines)}
    for number, row in enumerate(table):
        names = data[row["prompt"]]
        if number % 3 or not names:
            assert row["images"] is None
        else:
            assert [image["path"] for image in row["images"]] == names
            assert [image["bytes"] for image in row["images"]] == [(folder / "data" / name).read_bytes() for name in names]
    dataset = Dataset.from_parquet(str(finished.rollouts / "000001.parquet"), cache_dir=str(tmp_path / "cache"))
    shown = next(row["images"] for row in dataset.cast_column("images", List(ImageFeature())) if row["images"])
    assert shown[0].size[1] == 9


def test_the_final_folder_loads_with_its_processor(folder, finished):
    model = AutoModelForImageTextToText.from_pretrained(finished.final)
    assert type(model).__name__ == json.loads((folder / "model" / "config.json").read_text())["architectures"][0]
    section = recipe_of(folder, model__model_name_or_path=str(finished.final)).model
    visual = visual_processor(section, model.config, load_tokenizer(section), trust_remote_code=False)
    assert {path.name: path.read_bytes() for path in visual.files()} == {
        path.name: path.read_bytes() for path in (folder / "model").glob("*processor*.json")
    }
    if folder.name.startswith("llava"):
        assert AutoProcessor.from_pretrained(finished.final).image_processor is not None
    before = AutoModelForImageTextToText.from_pretrained(folder / "model").state_dict()
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert any("vis" in name for name in moved)
    assert any("language_model" in name or "text_model" in name for name in moved)


def test_what_images_cannot_be_combined_with(folder):
    recipe = recipe_of(folder, generation__use_vllm=True)
    with pytest.raises(RecipeError, match=r"^generation.use_vllm: .*data:train has images, with which vLLM is not used"):
        check_engine_of_images(recipe, read(folder, recipe)[2])
    for strategy in ("fsdp2", "zero2", "zero3"):
        with pytest.raises(RecipeError, match=rf"^run.accelerate_config: {strategy} is not for vision-language models"):
            check_vision(recipe, strategy)
    with pytest.raises(RecipeError, match=r"^model.use_peft: adapters are not for vision-language models"):
        check_vision(recipe_of(folder, model__use_peft=True), "ddp")
