"""Group B: signals and determinism. A run that is stopped anywhere and resumed ends as one that never stopped."""

from __future__ import annotations

import os
import signal
import time

from bench import signal_in_phase
from card import fault

DEADLINE = 10.0
"""Seconds from a signal to the end of the program."""
REUSED = ("num_iterations=2", "steps_per_generation=2")
EVALUATED = ("eval_strategy=steps", "eval_steps=2")
TOLERANCE = 1e-5
"""What float32 rounding may make of another cut into micro-batches, relative."""
SLEEPY = """\
import pathlib, time
def sleepy(completions, **kwargs):
    if pathlib.Path(__file__).with_name("sleep").exists():
        time.sleep(40)
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]
"""


@fault("B1", "SIGTERM in rollout, reward, backward, save, evaluation; also while loading and gathering; SIGUSR1, Ctrl-C")
def signals_in_every_phase(bench):
    bench.write("sleepy.py", SLEEPY)
    sleepy = ("rewards=[{function: sleepy.sleepy}]",)
    bench.gold(*sleepy)
    seconds = [
        stopped(bench, "rollout", signal_between_tokens, saved=2),
        stopped(bench, "reward", signal_while_scoring, settings=sleepy, saved=0),
        stopped(bench, "backward", signal_in_backward, saved=2),
        stopped(bench, "save", signal_in_save, saved=4),
        stopped(bench, "evaluation", during("evaluate"), settings=EVALUATED, saved=2),
        stopped(bench, "rewards' import and data", signal_before_the_data, saved=0),
        stopped(bench, "model", during("load model"), saved=0),
        stopped(bench, "gathering", signal_while_gathering, settings=("prompts_per_step=128", "max_steps=1"), saved=0),
        stopped(bench, "SIGUSR1", during("train", entry=4), number=signal.SIGUSR1, saved=3),
        stopped(bench, "Ctrl-C", during("generate", entry=6), number=signal.SIGINT, saved=5),
    ]
    bench.note(f"from the signal to the end: {max(seconds):.1f} s at most, over {len(seconds)} places")


def stopped(bench, where, inject, *, saved, number=signal.SIGTERM, settings=()):
    """Stop a run in one place, look at how it ended and what it saved, and resume it; the seconds from the signal to the end."""
    stamp = bench.root / "signalled"
    outcome = bench.train(inject=lambda: inject(lambda: send(number, stamp)), settings=settings)
    seconds = time.time() - float(stamp.read_text()) if stamp.exists() else float("inf")
    (bench.root / "sleep").unlink(missing_ok=True)
    stamp.unlink(missing_ok=True)
    says = [
        f"stopped by {signal.Signals(number).name}",
        f"--output-dir {outcome.folder} --resume",
        f"step {saved} is saved" if saved else "",
    ]
    bench.check(outcome, code=75, says=says, where=f"{where}: ")
    bench.expect("bounded time", seconds <= DEADLINE, f"{where}: it took {seconds:.1f} s from the signal to the end")
    bench.expect("nothing lost", max(outcome.steps, default=0) == saved, f"{where}: checkpoints {outcome.steps}, not up to {saved}")
    bench.expect("nothing left behind", not outcome.temporary, f"{where}: {outcome.temporary}")
    bench.resume_is_gold(outcome, where=f"{where}: ")
    return seconds


def send(number, stamp):
    if not stamp.exists():
        stamp.write_text(str(time.time()))
        os.kill(os.getpid(), number)


def during(phase, entry=1):
    """A signal at the n-th entry of a phase."""

    def inject(fire):
        import contextlib

        from rloo_cli.run.progress import Progress

        original, entered = Progress.phase, 0

        @contextlib.contextmanager
        def phase_with_signal(self, name):
            nonlocal entered
            with original(self, name):
                entered += name == phase
                if name == phase and entered == entry:
                    fire()
                yield

        Progress.phase = phase_with_signal

    return inject


def signal_between_tokens(fire):
    """While step 3 decodes its fifth token."""
    from rloo_cli.rollout.sampling import Sampler

    draw = Sampler.draw

    def draw_and_fire(self, logits, position):
        if self.key.step == 3 and position == 4:
            fire()
        return draw(self, logits, position)

    Sampler.draw = draw_and_fire


def signal_while_scoring(fire):
    """While a reward worker sleeps for 40 s."""
    from pathlib import Path

    from rloo_cli.rewards.runner import RewardRunner

    Path("sleep").touch()
    wait = RewardRunner._wait

    def wait_and_fire(self, check_stop):
        fire()
        return wait(self, check_stop)

    RewardRunner._wait = wait_and_fire


def signal_in_backward(fire):
    """Once the gradients of step 3 are there and the optimizer has not stepped."""
    from accelerate import Accelerator

    backward, calls = Accelerator.backward, 0

    def backward_and_fire(self, loss, **options):
        nonlocal calls
        calls += 1
        backward(self, loss, **options)
        if calls == 3:
            fire()

    Accelerator.backward = backward_and_fire


def signal_in_save(fire):
    """Between two writes of the checkpoint of step 4."""
    in_save_of(4, writes=3, fire=fire)


def in_save_of(step, writes, fire):
    from rloo_cli.run import atomic
    from rloo_cli.training import training_run

    save = training_run.save_checkpoint

    class Files(atomic.FileSystem):
        count = 0

        def write(self, descriptor, data):
            self.count += 1
            if self.count == writes:
                fire()
            return os.write(descriptor, data)

    def save_and_fire(folder, number, **options):
        if number == step:
            atomic.fs = Files()
        try:
            return save(folder, number, **options)
        finally:
            atomic.fs = atomic.FileSystem()

    training_run.save_checkpoint = save_and_fire


def signal_before_the_data(fire):
    """When the reward workers stand and the data is about to be read."""
    from rloo_cli.rewards.runner import RewardRunner

    start = RewardRunner.start

    def start_and_fire(self, *arguments):
        start(self, *arguments)
        fire()
        time.sleep(30)

    RewardRunner.start = start_and_fire


def signal_while_gathering(fire):
    """While the prompts of a step are looked up, of which each takes a quarter of a second."""
    from rloo_cli.data.prompt_set import PromptSet
    from rloo_cli.training.training_run import TrainingRun

    gather, get = TrainingRun._prompts, PromptSet.__getitem__

    def slow(self, index):
        time.sleep(0.25)
        return get(self, index)

    def gather_and_fire(self, *arguments):
        PromptSet.__getitem__ = slow
        fire()
        return gather(self, *arguments)

    TrainingRun._prompts = gather_and_fire


@fault("B3", "Ctrl-C once, twice, twice during a save", quick=True)
def interrupts(bench):
    stopped(bench, "once", during("train", entry=2), number=signal.SIGINT, saved=1)
    left_at_once(bench, "twice while the model loads", signal_in_phase("load model", signal.SIGINT, signal.SIGINT), steps=[])
    left_at_once(bench, "twice", signal_in_phase("train", signal.SIGINT, signal.SIGINT, entry=4))
    left_at_once(bench, "twice in a save", lambda: in_save_of(4, writes=3, fire=interrupt_twice))


def left_at_once(bench, where, inject, steps=(2,)):
    outcome = bench.train(inject=inject)
    bench.check(outcome, code=130, says=["interrupted twice", f"--output-dir {outcome.folder} --resume"], lines=2, where=f"{where}: ")
    bench.expect("nothing lost", outcome.steps == list(steps), f"{where}: checkpoints {outcome.steps}")
    for step in steps:
        bench.expect("nothing lost", verifies(outcome, step), f"{where}: checkpoint {step} is damaged")
    bench.expect("nothing left behind", not outcome.temporary, f"{where}: {outcome.temporary}")
    bench.resume_is_gold(outcome, where=f"{where}: ")


def interrupt_twice():
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)


def verifies(outcome, step):
    """Whether the checkpoint of a step is what its manifest says."""
    from rloo_cli.errors import StorageError
    from rloo_cli.run.checkpoint import find_checkpoint

    try:
        return find_checkpoint(outcome.folder / "checkpoints", step) is not None
    except StorageError:
        return False


@fault("B4", "stop and resume at every step, also in a reused generation batch")
def stopped_at_every_step(bench):
    for settings in ((), REUSED):
        for step in range(1, 7):
            where = f"step {step}{', batch in reuse' if settings else ''}"
            stopped(bench, where, during("train", entry=step), settings=settings, saved=step - 1)
        stopped_again_and_again(bench, settings)


def stopped_again_and_again(bench, settings):
    """One run of many attempts, each of which makes one step and is stopped in its second."""
    outcome = bench.train(inject=signal_in_phase("train", signal.SIGTERM, entry=2), settings=settings)
    for step in range(1, 6):
        bench.check(outcome, code=75, says=[f"step {step} is saved"], where=f"attempt {step}: ")
        outcome = bench.train("--resume", inject=signal_in_phase("train", signal.SIGTERM, entry=2), settings=settings, folder=outcome)
    bench.check(outcome, code=0, where="last attempt: ")
    bench.resume_is_gold(outcome, where="six attempts: ")


@fault("B5", "same recipe twice; 1 and 4 reward workers; another cut into micro-batches")
def same_numbers(bench):
    for where, settings in (("twice", ()), ("4 reward workers", ("reward_workers=4",))):
        outcome = bench.train(settings=settings)
        bench.check(outcome, code=0, says=["done"], where=f"{where}: ")
        bench.is_gold(outcome.folder, where=f"{where}: ")
        bench.expect("nothing left behind", not outcome.temporary, f"{where}: {outcome.temporary}")
    whole = bench.train()
    for where, tokens in (("a group a micro-batch", 64), ("groups cut", 24)):
        outcome = bench.train(settings=(f"max_tokens_per_micro_batch={tokens}",))
        bench.check(outcome, code=0, says=["done"], where=f"{where}: ")
        gradients, weights = gradient_difference(whole, outcome), weight_difference(whole, outcome)
        bench.note(f"{where}: first gradient's norm differs by {gradients:.1e}, the weights after 6 steps by {weights:.1e} (relative)")
        bench.expect("nothing lost", max(gradients, weights) <= TOLERANCE, f"{where}: {gradients:.2e} and {weights:.2e}")


def gradient_difference(ours, theirs):
    first, second = (outcome.rows[0]["grad_norm"] for outcome in (ours, theirs))
    return abs(first - second) / first


def weight_difference(ours, theirs):
    """‖Δw‖ / ‖w‖ over all final weights."""
    import numpy as np
    from safetensors.numpy import load_file

    first, second = (load_file(outcome.folder / "final" / "model.safetensors") for outcome in (ours, theirs))
    change = sum(float(np.square(first[name] - second[name]).sum()) for name in first)
    return (change / sum(float(np.square(first[name]).sum()) for name in first)) ** 0.5
