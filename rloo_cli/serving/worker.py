"""Imported in each of vLLM's worker processes (`--worker-extension-cls`) before the model loads: that is when these switches work.

- The CPU build packs linear layers with oneDNN and drops their weights, so that no new ones can be loaded; it is told that there is no oneDNN.
- The backend for weight transfers is registered.
"""

from __future__ import annotations

from rloo_cli.serving.transfer import register


class WorkerExtension:
    """What vLLM mixes into its workers: nothing, its import is what counts."""


def keep_weights_loadable() -> None:
    """Let the CPU build keep `weight` of linear layers; other builds are left as they are."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm import _custom_ops

        _custom_ops._supports_onednn = False


keep_weights_loadable()
register()
