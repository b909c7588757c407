import doctest
import json

import pytest

from rloo_cli.recipe import secrets
from rloo_cli.recipe.secrets import masked, masked_command, secret_values


def test_the_examples_hold():
    assert doctest.testmod(secrets).failed == 0


@pytest.mark.parametrize("quote", [str, repr, ascii, json.dumps, lambda text: json.dumps(repr(text)), lambda text: repr(repr(text))])
@pytest.mark.parametrize("around", ["", " 'and \""])
def test_a_value_is_masked_however_it_is_quoted(quote, around):
    key = "-----BEGIN KEY-----\nMIIcanary\\1'canary\ncanaryé\t\"canary\n-----END KEY-----\n"
    shown = masked(quote(f"got {key} back{around}"), secret_values({"SIGNING_KEY": key}))
    assert "canary" not in shown
    assert "got" in shown
    assert "back" in shown


def test_a_single_line_of_a_value_is_masked():
    values = secret_values({"SIGNING_KEY": "-----BEGIN KEY-----\r\nMIIcanary\r\nend\r\n"})
    assert masked("wrong at 'MIIcanary', the end", values) == "wrong at '***', the end"


def test_values_of_secret_variables_longest_first():
    environment = {
        "OPENAI_API_KEY": "sk-abcdefgh",
        "HF_TOKEN": "hf_12345678x",
        "PGPASSWD": "hunter2222",
        "KEYBOARD": "qwertz-layout",
        "A_KEY": "short",
    }
    assert secret_values(environment) == ("hf_12345678x", "sk-abcdefgh", "hunter2222")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgres://u:canary@host:5432/db", "postgres://***@host:5432/db"),
        ("https://canary@hub/x", "https://***@hub/x"),
        ("s3://b/x?X-Amz-Signature=canary&X-Amz-Date=1", "s3://b/x?X-Amz-Signature=***&X-Amz-Date=1"),
        ("http://h/x?api_key=canary#top", "http://h/x?api_key=***#top"),
        ("'https://h/x?a=1&access_token=canary', 3", "'https://h/x?a=1&access_token=***', 3"),
        ("{'Authorization': 'Bearer canary', 'x': 1}", "{'Authorization': 'Bearer ***', 'x': 1}"),
        ("authorization: Basic canary", "authorization: Basic ***"),
        ("Proxy-Authorization: canary", "Proxy-Authorization: ***"),
        ("-H 'authorization=Bearer canary'", "-H 'authorization=Bearer ***'"),
        ("sent bearer canary.canary_x", "sent bearer ***"),
        ("got canary-of-the-environment back", "got *** back"),
    ],
)
def test_what_stands_where_credentials_stand_is_masked(text, shown):
    assert masked(text, ["canary-of-the-environment"]) == shown


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:8000/v1",
        "me@example.org",
        "pad_token=<pad>, sort(key=len)",
        "https://hub/x?rows=3",
        "recipes/my.yaml:3:4: a: b",
        "the bearer of news",
    ],
)
def test_what_looks_alike_is_left(text):
    assert masked(text) == text


def test_a_command_line_is_kept_without_its_secrets():
    words = [
        "rloo",
        "train",
        "r.yaml",
        "--set",
        "hub_token=canary",
        "--set=run.hub_token=canary",
        "--set",
        "dataset_name=http://u:canary@h/x",
        "--set",
        "beta=0",
    ]
    kept = [
        "rloo",
        "train",
        "r.yaml",
        "--set",
        "hub_token=***",
        "--set=run.hub_token=***",
        "--set",
        "dataset_name=http://***@h/x",
        "--set",
        "beta=0",
    ]
    assert masked_command(words) == kept
