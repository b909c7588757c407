import pytest
from recipe_texts import VALID, lines_of, load

from rloo_cli.recipe.load import load_recipe

SERVER = "use_vllm: true\nvllm_mode: server\n"

NOTICES = {
    "vllm_server_port: 9000": "generation.vllm_server_port: not read: use_vllm is false.",
    "use_vllm: true\nvllm_server_port: 9000": "generation.vllm_server_port: not read: vllm_mode is colocate.",
    SERVER + "vllm_max_model_length: 512": (
        "generation.vllm_max_model_length: not read: it is an option of `rloo vllm-serve`, where vllm_mode is server."
    ),
    SERVER + "vllm_server_base_url: http://node7:8000\nvllm_server_host: node8": (
        "generation.vllm_server_host: not read: vllm_server_base_url says where the server is."
    ),
    SERVER + "vllm_weight_transfer_dir: /weights": "generation.vllm_weight_transfer_dir: not read: vllm_weight_transfer is auto.",
    SERVER + "vllm_weight_transfer: file\nvllm_group_port: 5000": "generation.vllm_group_port: not read: vllm_weight_transfer is file.",
    SERVER + "async_steps: 1\nepsilon: 0.1": (
        "algorithm.epsilon: not read: with async_steps rows carry a capped ratio to the sampler (importance_sampling_cap)."
    ),
}


@pytest.mark.parametrize(("text", "notice"), NOTICES.items(), ids=range(len(NOTICES)))
def test_a_field_that_the_engine_does_not_read_is_told(text, notice):
    assert [line.split(": ", 1)[1] for line in load(VALID + text + "\n").notices] == [notice]


@pytest.mark.parametrize(
    "text",
    [
        "use_vllm: true\nvllm_gpu_memory_utilization: 0.5\nvllm_enable_sleep_mode: true\nvllm_model_impl: transformers\n",
        SERVER + "vllm_server_base_url: https://node7/\nvllm_server_key_file: key\nvllm_server_timeout: 60\nvllm_server_retry_seconds: 9\n",
        SERVER + "vllm_weight_transfer: file\nvllm_weight_transfer_dir: /weights\n",
        SERVER + "async_steps: 1\nimportance_sampling_cap: 3\n",
    ],
)
def test_what_goes_together_is_taken_without_a_word(text):
    assert load(VALID + text).notices == ()


ADDRESSES = {
    "node7:8000": "no address of a web server",
    "ftp://node7": "no address of a web server",
    "http://": "no address of a web server",
    "http://node7:80000": "no address (Port out of range 0-65535)",
    "http://node7/?key=1": "an address with more than host, port and path",
    "http://me:canary@node7": "a recipe is copied into the run's folder and is no place for secrets",
}


@pytest.mark.parametrize(("url", "fault"), ADDRESSES.items(), ids=ADDRESSES)
def test_a_wrong_address_is_an_error_at_its_place(url, fault):
    line = lines_of(VALID + SERVER + f"vllm_server_base_url: {url}\n")[0]
    assert line.startswith(f"9:23: generation.vllm_server_base_url: {fault}")
    assert line.endswith("write it as http://HOST:PORT.")
    assert "canary" not in line


def test_overlap_needs_a_server():
    for text in ("async_steps: 1\n", "async_steps: 1\nuse_vllm: true\n"):
        assert "`use_vllm: true` and `vllm_mode: server`" in lines_of(VALID + text)[0]
    assert "training.async_steps" in lines_of(VALID + SERVER + "async_steps: 2\n")[0]


def test_paths_of_the_server_take_variables():
    generation = load(VALID + SERVER + "vllm_server_key_file: ${WHERE}/k\n", environ={"WHERE": "/keys"}).recipe.generation
    assert generation.vllm_server_key_file == "/keys/k"


def test_processes_that_share_an_engine_come_out_even():
    text = VALID + "use_vllm: true\nvllm_tensor_parallel_size: 4\n"
    assert (
        "4 processes share an engine, and 6 train (run.num_processes), which cannot be grouped so: 1, 2, 3, 6"
        in lines_of(text, processes=6)[0]
    )
    assert load(text, processes=8).recipe.generation.vllm_tensor_parallel_size == 4


def test_a_key_file_beside_the_recipe_is_found(tmp_path):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "server.key").write_text("x")
    recipe = tmp_path / "task" / "r.yaml"
    recipe.write_text(VALID + SERVER + "vllm_server_key_file: server.key\n")
    assert load_recipe(recipe).recipe.generation.vllm_server_key_file == str(tmp_path / "task" / "server.key")
