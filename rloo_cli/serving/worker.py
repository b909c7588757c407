"""Imported in each of vLLM's worker processes (`--worker-extension-cls`) before the model loads: that is when these switches work.

- The CPU build packs linear layers with oneDNN and drops their weights, so that no new ones can be loaded; it is told that there is no oneDNN.
- The backend for weight transfers is registered.
- Shared memory of the CPU build loses its name once its workers have it.
- A trainer that died in an update leaves it open, and vLLM would refuse to begin another. An error would do for one worker; with several,
  vLLM reads their answers in the wrong order after one.
"""

from __future__ import annotations

from typing import Any

from rloo_cli.rollout.vllm_build import unname_shared_memory
from rloo_cli.serving.transfer import register


class WorkerExtension:
    """What vLLM mixes into its workers: nothing, its import is what counts."""


def keep_weights_loadable() -> None:
    """Let the CPU build keep `weight` of linear layers; other builds are left as they are."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm import _custom_ops

        _custom_ops._supports_onednn = False
        unname_shared_memory()


def let_updates_begin_anew() -> None:
    """Let a new weight update end one that was left open."""
    from vllm.v1.worker.gpu_worker import Worker

    begin = Worker._start_weight_update

    def start(worker: Any, is_draft: bool = False) -> None:
        if worker._weight_update_active:
            worker.weight_transfer_engine.reset_weight_update_target()
            worker._weight_update_active = False
        begin(worker, is_draft)

    Worker._start_weight_update = start


keep_weights_loadable()
let_updates_begin_anew()
register()
