from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import datasets
import pytest
from tiny import byte_tokenizer

from rloo_cli.data import hub
from rloo_cli.data.dataset import load_prompts
from rloo_cli.errors import RecipeError
from rloo_cli.recipe.schema import DataSection

ASK = """
import sys
from rloo_cli.data import hub
from rloo_cli.data.chat import load_tokenizer
from rloo_cli.errors import RlooError
from rloo_cli.recipe.schema import ModelSection
hub.PROBE_SECONDS = 1.0
asks = {
    "data": lambda: hub.load_hub_table("nobody/nothing", config=None, split="train"),
    "model": lambda: load_tokenizer(ModelSection(model_name_or_path="nobody/nothing")),
}
for ask in (asks[name] for name in sys.argv[1:]):
    try:
        ask()
    except RlooError as error:
        print(error.exit_code, error)
"""


LINES = {
    "data": "2 data.dataset_name: no data set `nobody/nothing`",
    "model": "2 model.model_name_or_path: nobody/nothing: no such model",
}


def check_refusal(endpoint, tmp_path, phrase, *asks):
    """A process that looks names up at this hub tells one line each, and soon (the bound holds its imports on a busy machine)."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    begin = time.monotonic()
    result = subprocess.run([sys.executable, "-c", ASK, *asks], env=environment, capture_output=True, text=True, timeout=120)
    lines = result.stdout.splitlines()
    assert len(lines) == len(asks), (lines, result.stderr)
    for name, line in zip(asks, lines, strict=True):
        assert line.startswith(LINES[name])
        assert phrase in line
    assert "Traceback" not in result.stderr
    assert "Retrying" not in result.stderr
    assert time.monotonic() - begin < 60


def test_a_hub_that_refuses_connections(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, never listening
        check_refusal(f"http://127.0.0.1:{unused.getsockname()[1]}", tmp_path, "the hub does not answer", "data", "model")


def test_a_hub_that_never_answers(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        check_refusal(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path, "the hub does not answer", "data")


class NothingHere(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(401)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *arguments):
        pass


def test_a_hub_that_has_no_such_name(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), NothingHere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            check_refusal(
                f"http://127.0.0.1:{server.server_port}", tmp_path, "the hub has none that this account may read", "data", "model"
            )
        finally:
            server.shutdown()


@pytest.fixture
def pretend_hub(tmp_path, monkeypatch):
    """`some/set` on the hub is a local folder that the datasets library itself reads."""
    (tmp_path / "repo").mkdir()
    for split, prompts in {"train": ["a", "b", "c"], "test": ["d"]}.items():
        datasets.Dataset.from_dict({"prompt": prompts, "answer": prompts}).to_parquet(tmp_path / "repo" / f"{split}.parquet")
    real = datasets.load_dataset

    def load_dataset(name, config, *, split, streaming):
        assert name == "some/set"
        return real(str(tmp_path / "repo"), config, split=split, streaming=streaming, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)


def load(**fields):
    data = DataSection(**{"dataset_name": "some/set", **fields})
    return load_prompts(
        data, split=data.dataset_train_split, tokenizer=byte_tokenizer(), max_prompt_tokens=99, max_samples=data.max_train_samples
    )


def test_a_hub_data_set(pretend_hub):
    prompts = load(max_train_samples=2)
    assert [prompt.columns for prompt in prompts] == [{"answer": "a"}, {"answer": "b"}]
    assert prompts.source == "some/set:train"
    assert prompts.place(1) == "some/set:train row 1"
    assert len(load(dataset_train_split="train[1:]")) == 2


def test_splits_and_configurations_that_a_hub_data_set_lacks(pretend_hub):
    for fields, listed in (({"dataset_train_split": "dev"}, "train.*test|test.*train"), ({"dataset_config": "main"}, "default")):
        with pytest.raises(RecipeError, match=f"data.dataset_name: `some/set`, split `.*`: .*({listed})") as error:
            load(**fields)
        assert "\n" not in error.value.message
