"""What each engine is told by the recipe. The engines themselves are tested against real vLLM elsewhere."""

from pathlib import Path
from types import SimpleNamespace

import fakes
import pytest
import test_run
import tiny
import torch
from transformers import AutoConfig

from rloo_cli.errors import EngineError
from rloo_cli.recipe.distribution import Distribution
from rloo_cli.rollout.transformers_engine import TransformersEngine
from rloo_cli.serving.identity import config_hash
from rloo_cli.training.engines import longest_sequence, prepare_engine

CPU = torch.device("cpu")


@pytest.fixture
def told(monkeypatch):
    """The keyword arguments that the vLLM engines were made with."""
    found = {}

    class Taken:
        def __init__(self, **options):
            found.update(options)
            self.calls = []

        def connect(self):
            self.calls.append("connect")
            if found.get("base_url") == "http://gone:1":
                raise EngineError("gone")

        def close(self):
            self.calls.append("close")

    monkeypatch.setattr("rloo_cli.rollout.vllm_colocate.VllmColocateEngine", Taken)
    monkeypatch.setattr("rloo_cli.rollout.vllm_server.VllmServerEngine", Taken)
    return found


def inputs_of(tmp_path, strategy="ddp", **changes):
    model = tmp_path / "model"
    tiny.qwen2().save_pretrained(model)
    return SimpleNamespace(
        recipe=test_run.make_recipe(model__model_name_or_path=str(model), **changes),
        tokenizer=tiny.byte_tokenizer(),
        prompts=fakes.make_prompts(),
        eval_prompts=fakes.make_prompts(3, seed=1),
        folder=SimpleNamespace(path=tmp_path / "run"),
        trust_remote_code=False,
        distribution=Distribution(strategy=strategy),
        progress=SimpleNamespace(note=print),
        stop=SimpleNamespace(check=lambda: None),
    )


def test_transformers_is_the_engine_unless_the_recipe_says_otherwise(tmp_path):
    maker = prepare_engine(inputs_of(tmp_path), None, CPU)
    engine = maker.make(tiny.qwen2())
    assert isinstance(engine, TransformersEngine)
    assert maker.make(tiny.qwen2()) is engine
    maker.close()
    with pytest.raises(EngineError, match="closed"):
        engine.model


def test_a_colocated_engine_is_told_what_the_recipe_says(tmp_path, told):
    options = {
        "generation__use_vllm": True,
        "generation__vllm_gpu_memory_utilization": 0.45,
        "generation__vllm_enable_sleep_mode": True,
        "generation__vllm_model_impl": "transformers",
    }
    inputs = inputs_of(tmp_path, **options)
    maker = prepare_engine(inputs, None, CPU)
    assert told == {}, "the trainer's model comes first"
    engine = maker.make(tiny.qwen2())
    assert told["dtype"] == "float32"
    assert (
        told["max_model_length"] == longest_sequence(inputs) == max(len(p.token_ids) for p in [*inputs.prompts, *inputs.eval_prompts]) + 12
    )
    assert (told["gpu_memory_utilization"], told["enable_sleep_mode"], told["model_impl"]) == (0.45, True, "transformers")
    assert tiny.EOS in told["eos_ids"]
    maker.close()
    assert engine.calls == ["close"]

    prepare_engine(inputs_of(tmp_path, generation__use_vllm=True, generation__vllm_max_model_length=77), torch.bfloat16, CPU).make(
        tiny.qwen2()
    )
    assert (told["dtype"], told["max_model_length"]) == ("bfloat16", 77)


SERVER = {"generation__use_vllm": True, "generation__vllm_mode": "server"}


def test_a_server_is_connected_to_before_any_model_is_there(tmp_path, told, monkeypatch):
    monkeypatch.setenv("RLOO_VLLM_KEY", "k" * 20)
    inputs = inputs_of(tmp_path, **SERVER, generation__vllm_server_port=8123, generation__max_completion_length=None)
    maker = prepare_engine(inputs, torch.bfloat16, CPU)
    assert told["base_url"] == "http://127.0.0.1:8123"
    assert told["key"] == "k" * 20
    assert told["model_identity"].dtype == "bfloat16"
    config = AutoConfig.from_pretrained(inputs.recipe.model.model_name_or_path)
    assert told["model_identity"].config_hash == config_hash(config.to_dict())
    assert told["max_model_length"] is None
    assert told["owner"].endswith(f":{tmp_path / 'run'}")
    assert (told["transfer"], told["transfer_dir"], told["group_port"]) == ("auto", tmp_path / "run" / "weights", 51216)
    assert (told["start_timeout"], told["retry_seconds"]) == (240.0, 120.0)
    assert (told["keep_weights"], told["lent_weights"], told["peers"].world_size) == (False, False, 1)
    engine = maker.make(tiny.qwen2())
    maker.close()
    assert engine.calls == ["connect", "close"]


def test_a_server_is_told_what_the_recipe_says(tmp_path, told):
    key = tmp_path / "key"
    key.write_text("q" * 24 + "\n")
    key.chmod(0o600)
    options = {
        "generation__vllm_server_base_url": "https://node7:9000",
        "generation__vllm_server_host": "unread",
        "generation__vllm_server_key_file": str(key),
        "generation__vllm_server_timeout": 5.0,
        "generation__vllm_server_retry_seconds": 6.0,
        "generation__vllm_weight_transfer": "file",
        "generation__vllm_weight_transfer_dir": "/weights",
        "generation__vllm_group_port": 5000,
        "training__async_steps": 1,
    }
    prepare_engine(inputs_of(tmp_path, **SERVER, **options), None, CPU)
    assert (told["base_url"], told["key"]) == ("https://node7:9000", "q" * 24)
    assert (told["start_timeout"], told["retry_seconds"]) == (5.0, 6.0)
    assert (told["transfer"], told["transfer_dir"], told["group_port"]) == ("file", Path("/weights"), 5000)
    assert told["keep_weights"], "the weights change while the server samples, and one that comes back needs those it had"


def test_weights_that_are_gathered_one_by_one_are_copied(tmp_path, told):
    prepare_engine(inputs_of(tmp_path, "fsdp2", **SERVER), None, CPU)
    assert told["lent_weights"]


def test_a_server_that_is_away_ends_the_run(tmp_path, told):
    with pytest.raises(EngineError, match="gone"):
        prepare_engine(inputs_of(tmp_path, **SERVER, generation__vllm_server_base_url="http://gone:1"), None, CPU)
