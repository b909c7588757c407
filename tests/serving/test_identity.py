from __future__ import annotations

import json

import tiny

from rloo_cli.serving.identity import config_hash


def document(**changes):
    return tiny.qwen2().config.to_dict() | changes


def test_what_vllm_rewrites_does_not_count():
    changed = document(architectures=["X"], dtype="bfloat16", max_position_embeddings=9, transformers_version="0", rope_parameters={"a": 1})
    assert config_hash(changed | {"_name_or_path": "elsewhere", "eos_token_id": 5}) == config_hash(document())


def test_what_decides_about_weights_counts():
    hashes = {
        config_hash(document(**change)) for change in ({}, {"hidden_size": 65}, {"num_hidden_layers": 3}, {"tie_word_embeddings": False})
    }
    assert len(hashes) == 4
    assert config_hash(tiny.llama().config.to_dict()) not in hashes


def test_a_text_model_within_another_counts_too():
    one, other = ({"model_type": "m", "text_config": {"hidden_size": size, "dtype": "float32"}} for size in (64, 128))
    assert config_hash(one) != config_hash(other)


def test_it_survives_the_way_through_json():
    assert config_hash(json.loads(json.dumps(document()))) == config_hash(document())
