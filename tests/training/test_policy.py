"""Loading models, and what a damaged or foreign folder gets."""

import pytest
import tiny

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
