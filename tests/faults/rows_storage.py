"""Group A: crash and storage. Once a checkpoint was saved, a complete one exists at every later instant."""

from __future__ import annotations

import errno

from card import fault


@fault("A3", "ENOSPC in a checkpoint", quick=True)
def enospc_in_a_checkpoint(bench):
    outcome = bench.train(inject=lambda: fail_in_save(step=4, code=errno.ENOSPC))
    bench.check(outcome, code=6, says=["000004", "needed", "free", "--resume"])
    bench.expect("nothing lost", outcome.steps == [2], f"checkpoints {outcome.steps} instead of [2]")
    bench.expect("nothing left behind", not outcome.temporary, f"{outcome.temporary}")
    bench.resume_is_gold(outcome)


def fail_in_save(*, step, code):
    """Let the third write of the checkpoint of a step, and every one after it, fail."""
    from failpoints import FailingFileSystem

    from rloo_cli.run import atomic
    from rloo_cli.training import training_run

    save = training_run.save_checkpoint

    def failing(folder, number, **options):
        if number == step:
            atomic.fs = FailingFileSystem(3, code, only=("write",), once=False)
        return save(folder, number, **options)

    training_run.save_checkpoint = failing
