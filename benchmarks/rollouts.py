"""Rollouts a second: the engines, beside vLLM's own offline generate on the same prompts and sampling settings.

    OMP_NUM_THREADS=1 python benchmarks/rollouts.py                          # a random model of 17 M parameters, float32
    OMP_NUM_THREADS=1 python benchmarks/rollouts.py --dtype bfloat16 --model FOLDER
    rloo vllm-serve --model build/rollouts --dtype float32 --port 8000       # in another shell, then:
    OMP_NUM_THREADS=1 python benchmarks/rollouts.py --server-url http://127.0.0.1:8000

Each side lives in a process of its own; they generate in turn, round after round, so that other load meets all alike. Medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

MODEL = Path("build/rollouts")
SIDES = ("offline", "colocate", "transformers", "server")
CONTEXT = 256
EOS = 1


def main() -> None:
    """Print a table, or be one side of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="model folder; the default is made where it is missing")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--completion-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server-url", help="also measure the vLLM server that runs there")
    parser.add_argument("--sides", default="offline,colocate,transformers", help="of offline, colocate, transformers")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        serve_rounds(MAKERS[arguments.side](arguments))
    else:
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """Run all sides in turn and print what each did."""
    if arguments.model == MODEL and not (MODEL / "config.json").exists():
        make_model(MODEL)
    names = [*arguments.sides.split(","), *(["server"] if arguments.server_url else [])]
    command = [sys.executable, __file__, *sys.argv[1:], "--side"]
    sides = {name: subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for name in names}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    try:
        for number in range(arguments.rounds + 1):
            for name, side in sides.items():
                answer = one_round(name, side, number)
                if number:  # the first is for warm-up
                    rounds[name].append(answer)
    finally:
        for side in sides.values():
            side.stdin.close()
            side.wait()
    report(rounds, arguments.prompts * arguments.generations)


def one_round(name: str, side: subprocess.Popen[str], number: int) -> dict[str, float]:
    """What the side measured; it ends the benchmark if the side died."""
    side.stdin.write(f"{number}\n")
    side.stdin.flush()
    for line in side.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise SystemExit(f"{name} ended with code {side.wait()}; its output is above")


def report(rounds: dict[str, list[dict[str, float]]], rows: int) -> None:
    """The table; `of offline` is the ratio of medians, by wall time and by processor time of the process."""
    medians = {name: {key: statistics.median(r[key] for r in done) for key in done[0]} for name, done in rounds.items()}
    base = medians.get("offline")
    print(f"{'side':14}{'rollouts/s':>12}{'tokens/s':>12}{'of offline':>12}{'by CPU time':>13}")
    for name, m in medians.items():
        wall = f"{base['seconds'] / m['seconds']:.2f}" if base else "-"
        cpu = f"{base['cpu'] / m['cpu']:.2f}" if base and name != "server" else "-"
        print(f"{name:14}{rows / m['seconds']:12.1f}{m['tokens'] / m['seconds']:12.0f}{wall:>12}{cpu:>13}")


def serve_rounds(generate: Callable[[int], int]) -> None:
    """Generate once for each line of standard input; answer with seconds and tokens."""
    for line in sys.stdin:
        start, cpu = time.perf_counter(), time.process_time()
        tokens = generate(int(line))
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        print(json.dumps({"seconds": seconds, "cpu": cpu, "tokens": tokens}), flush=True)


def make_model(folder: Path) -> None:
    """A random model of 384 × 8 (17 M parameters) and a tokenizer of 8,192 words."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    torch.manual_seed(0)
    shape = {"hidden_size": 384, "num_hidden_layers": 8, "intermediate_size": 1024, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = Qwen2Config(
        **shape, vocab_size=8192, max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=EOS, bos_token_id=None
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(8192)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{EOS}", unk_token="w0").save_pretrained(folder)


def requests_of(arguments: argparse.Namespace) -> list:
    """The same random prompts for every side."""
    import random

    from rloo_cli.rollout.engine import GenerationRequest

    draw = random.Random(0)
    ids = [tuple(draw.randrange(2, 8192) for _ in range(arguments.prompt_tokens)) for _ in range(arguments.prompts)]
    g = arguments.generations
    return [GenerationRequest(token_ids=prompt, num_generations=g, first_row=i * g) for i, prompt in enumerate(ids)]


def by_engine(engine, arguments: argparse.Namespace) -> Callable[[int], int]:
    """A round with one of our engines."""
    from rloo_cli.rollout.engine import RandomKey, SamplingParams

    requests, params = requests_of(arguments), SamplingParams(max_new_tokens=arguments.completion_tokens)

    def generate(number: int) -> int:
        groups = engine.generate(requests, params, RandomKey(seed=0, step=number))
        return sum(len(c.token_ids) for group in groups for c in group)

    return generate


def load(arguments: argparse.Namespace):
    """The model in float32, as a trainer holds it, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32), AutoTokenizer.from_pretrained(arguments.model)


def transformers_side(arguments: argparse.Namespace) -> Callable[[int], int]:
    import torch

    from rloo_cli.rollout.transformers_engine import TransformersEngine

    model, tokenizer = load(arguments)
    copy = torch.bfloat16 if arguments.dtype == "bfloat16" else None
    return by_engine(TransformersEngine(model, tokenizer=tokenizer, copy_dtype=copy), arguments)


def colocate_side(arguments: argparse.Namespace) -> Callable[[int], int]:
    from rloo_cli.rollout.vllm_colocate import VllmColocateEngine

    model, tokenizer = load(arguments)
    engine = VllmColocateEngine(
        model_path=str(arguments.model),
        revision=None,
        tokenizer=tokenizer,
        eos_ids={EOS},
        dtype=arguments.dtype,
        max_model_length=CONTEXT,
        gpu_memory_utilization=0.3,
        enable_sleep_mode=False,
        model_impl="auto",
        trust_remote_code=False,
        seed=0,
    )
    engine.load_weights(model.state_dict().items(), 0)
    return by_engine(engine, arguments)


def server_side(arguments: argparse.Namespace) -> Callable[[int], int]:
    from transformers import AutoConfig

    from rloo_cli.rollout.vllm_server import ModelIdentity, VllmServerEngine
    from rloo_cli.serving.identity import config_hash

    model, tokenizer = load(arguments)
    config = AutoConfig.from_pretrained(arguments.model)
    engine = VllmServerEngine(
        base_url=arguments.server_url,
        key=os.environ.get("RLOO_VLLM_KEY"),
        tokenizer=tokenizer,
        eos_ids={EOS},
        model_identity=ModelIdentity(config_hash=config_hash(config.to_dict()), vocab_size=config.vocab_size, dtype=arguments.dtype),
        max_model_length=CONTEXT,
        owner=f"benchmark:{os.getpid()}",
        say=lambda line: print(line, file=sys.stderr),
    )
    engine.connect()
    engine.load_weights(model.state_dict().items(), 0)
    return by_engine(engine, arguments)


def offline_side(arguments: argparse.Namespace) -> Callable[[int], int]:
    """vLLM by itself: one process, eager, as it sets itself up otherwise; chunked prefill off, since it fails with seeds on a CPU."""
    # A part of its sampler would be compiled in the first round, which needs a C++ compiler.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    from vllm import LLM, SamplingParams

    from rloo_cli.rollout.engine import RandomKey
    from rloo_cli.rollout.engine import SamplingParams as OurParams
    from rloo_cli.rollout.vllm_sampling import sampling_fields

    llm = LLM(
        str(arguments.model),
        dtype=arguments.dtype,
        enforce_eager=True,
        max_model_len=CONTEXT,
        kv_cache_memory_bytes=1 << 28,
        logprobs_mode="processed_logprobs",
        enable_chunked_prefill=False,
    )
    requests = requests_of(arguments)
    prompts = [{"prompt_token_ids": list(r.token_ids)} for r in requests for _ in range(r.num_generations)]
    params = OurParams(max_new_tokens=arguments.completion_tokens)

    def generate(number: int) -> int:
        key = RandomKey(seed=0, step=number)
        each = [
            SamplingParams(**sampling_fields(params, key, row, eos_ids={EOS}, max_tokens=arguments.completion_tokens))
            for row in range(len(prompts))
        ]
        return sum(len(output.outputs[0].token_ids) for output in llm.generate(prompts, each, use_tqdm=False))

    return generate


MAKERS = {"offline": offline_side, "colocate": colocate_side, "transformers": transformers_side, "server": server_side}

if __name__ == "__main__":
    main()
