"""What each rank of a test does with real vLLM: single engines, and whole runs of a tiny model."""

from __future__ import annotations

import accelerate
import colocated
import fakes
import test_run
import tiny
import torch
from rich.console import Console

from rloo_cli.errors import EngineError, RlooError, StoppedError
from rloo_cli.recipe.batch import plan_batches
from rloo_cli.recipe.distribution import Distribution
from rloo_cli.rollout.engine import SamplingParams
from rloo_cli.run.checkpoint import find_checkpoint
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.progress import Progress
from rloo_cli.run.ranks import join_neighbours, join_ranks
from rloo_cli.run.signals import StopRequested, StopSignal
from rloo_cli.training.inputs import TrainingInputs
from rloo_cli.training.train import train

STEPS = 5
UPDATES = 3


def write_model(folder):
    """A model with a head that is not tied, whose heads two ranks can share, as a folder."""
    colocated.build("llama").save_pretrained(folder)
    tiny.byte_tokenizer().save_pretrained(folder)
    return folder


def run(path, model, *, strategy="ddp", stop_at=None, **changes):
    """Train here, from the latest checkpoint where there is one; what was said of a stop, or `done`."""
    options = {"model__model_name_or_path": str(model), "generation__use_vllm": True, "training__max_steps": STEPS}
    recipe, folder, stop = test_run.make_recipe(**options, **changes), RunFolder(path), StopSignal()
    folder.prepare()
    with Progress(STEPS, console=Console(quiet=True)) as progress:
        progress.step = lambda row, sample=None: stop.request("SIGUSR1") if row["step"] == stop_at else None
        inputs = TrainingInputs(
            recipe=recipe,
            batch=plan_batches(recipe, 1),
            total_steps=STEPS,
            tokenizer=tiny.byte_tokenizer(),
            prompts=fakes.make_prompts(),
            eval_prompts=None,
            rewards=fakes.FakeRewards(),
            folder=folder,
            resume_from=find_checkpoint(folder.checkpoints),
            trust_remote_code=False,
            progress=progress,
            distribution=Distribution(strategy=strategy),
            stop=stop,
        )
        try:
            train(inputs)
        except StoppedError as error:
            return str(error)
    return "done"


def alone(rank, path, model):
    """`run`, in a process of its own."""
    return run(path, model)


def greedy_of(model, prompts, count):
    """By transformers' own generate."""
    return [model.generate(torch.tensor([p]), max_new_tokens=count, do_sample=False)[0, len(p) :].tolist() for p in prompts]


def colocate(rank, path, model, size):
    """Each rank's engine, or one for `size` of them: under three weights, after a stop and a failure on one rank, and in a run."""
    accelerate.PartialState(cpu=True)
    peers = join_neighbours(join_ranks(), size)
    engine = colocated.engine_for(path / f"engine-{rank}", colocated.build("llama"), peers=peers)
    mine, length = colocated.PROMPTS[rank : 2 * rank + 1], 10 + 10 * rank  # nor do they ask for equally many or long ones
    length = length if size == 1 else 16
    params = SamplingParams(max_new_tokens=length, temperature=0.0)
    for seed in range(UPDATES):
        theirs = colocated.build("llama", seed)
        engine.load_weights(iter(theirs.state_dict().items()), seed)
        groups = engine.generate(colocated.requests(mine, 1), params, colocated.KEY)
        assert [list(group[0].token_ids) for group in groups] == greedy_of(theirs, mine, length)
    told = [] if size == 1 else [_broken_off(engine, rank, params, error) for error in (EngineError("enough"), StopRequested("SIGUSR1"))]
    assert [list(group[0].token_ids) for group in engine.generate(colocated.requests(mine, 1), params, colocated.KEY)] == greedy_of(
        theirs, mine, length
    )
    engine.close()
    tensor_parallel = {"generation__vllm_tensor_parallel_size": size}
    ends = {name: run(path / name, model, strategy=name, **tensor_parallel) for name in (("ddp", "fsdp2") if size == 1 else ("ddp",))}
    return {"told": told, "ends": ends}


def _broken_off(engine, rank, params, error):
    """What this rank hears when rank 1 fails so at the third look, in the middle of a batch."""
    looks = []

    def look():
        looks.append(1)
        if rank == 1 and len(looks) == 3:
            raise error

    try:
        engine.generate(colocated.requests(colocated.PROMPTS[:2], 2), params, colocated.KEY, check_stop=look)
    except (RlooError, StopRequested) as heard:
        return [type(heard).__name__, str(heard), getattr(heard, "kind", ""), len(looks)]
    return ["nothing", "", "", len(looks)]


SERVED = {"sync": {}, "ahead": {"training__async_steps": 1}}


def served(rank, path, model, url):
    """Runs at a server; of several ranks also under FSDP2, and one that is stopped and gone on with."""
    accelerate.PartialState(cpu=True)
    ranks = join_ranks()
    options = {"generation__vllm_mode": "server", "generation__vllm_server_base_url": url, "generation__vllm_weight_transfer": "gloo"}
    ends = {name: run(path / name, model, **options, **changes) for name, changes in SERVED.items()}
    if ranks.world_size > 1:
        ends["fsdp2"] = run(path / "fsdp2", model, strategy="fsdp2", **options)
        ends["stopped"] = run(path / "stopped", model, stop_at=2, **options)
        ranks.barrier()
        ends["resumed"] = run(path / "stopped", model, **options)
    return ends
