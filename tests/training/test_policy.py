"""Loading models, and what a damaged or foreign folder gets."""

import json

import pytest
import tiny
from safetensors.torch import load_file, save_file

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.schema import ModelSection
from rloo_cli.training.policy import load_model


@pytest.fixture
def folder(tmp_path):
    tiny.qwen2().save_pretrained(tmp_path)
    return tmp_path


def load(folder):
    return load_model(ModelSection(model_name_or_path=str(folder)), seed=0, trust_remote_code=False)


def test_a_folder_loads_in_the_recipes_dtype(folder):
    assert str(load(folder).dtype) == "torch.float32"


def test_weights_that_are_cut_off_are_named(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:3000])
    with pytest.raises(RecipeError, match="damaged or cut off"):
        load(folder)


def test_pickled_weights_are_not_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(RecipeError, match="safetensors files only"):
        load(folder)


def test_random_weights_are_the_seeds_own(folder):
    section = ModelSection(model_name_or_path=str(folder), random_weights=True)
    one, same, other = (load_model(section, seed=seed, trust_remote_code=False) for seed in (1, 1, 2))
    key = "model.layers.0.mlp.up_proj.weight"
    assert one.state_dict()[key].equal(same.state_dict()[key])
    assert not one.state_dict()[key].equal(other.state_dict()[key])


def test_a_file_that_lacks_weights_is_refused(tmp_path):
    tiny.qwen2().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RecipeError, match=r"lack 1 of the model's weights, such as model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


def test_a_model_beyond_the_memory_is_refused_from_its_shapes(tmp_path):
    tiny.qwen2().config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"vocab_size": 10**9, "hidden_size": 10**6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    section = ModelSection(model_name_or_path=str(tmp_path), random_weights=True)
    with pytest.raises(RecipeError, match=r"GiB of weights; this machine has"):
        load_model(section, seed=0, trust_remote_code=False)
