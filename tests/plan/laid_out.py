"""Bytes of tensors that a process has under a strategy, counted one by one."""

from __future__ import annotations

import gc

import torch
import torch._dynamo  # the optimizer would, in the middle of a count: some hundred thousand objects
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from rloo_cli.recipe.distribution import Distribution
from rloo_cli.run.ranks import join_ranks
from rloo_cli.training.microbatches import GroupRows, build_scoring_batch
from rloo_cli.training.optimizer import OptimizerAndSchedule
from rloo_cli.training.policy import Policy
from rloo_cli.training.strategy import make_strategy

CONFIG = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
"""About 21 M parameters, layers of 3.1 M."""


def config():
    return LlamaConfig(**CONFIG)


def live_bytes():
    """Bytes of all storages that some tensor object reads; a view counts what it views, once."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor) and not found.is_meta:
            local = found.to_local() if isinstance(found, DTensor) else found
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def adamw(policy):
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, fused=True)  # weights stay what bfloat16 holds exactly
    return OptimizerAndSchedule(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0))


class Watch:
    """The most bytes seen at the layers, going forward and going backward."""

    def __init__(self, model):
        self.most = {"forward": 0, "backward": 0}
        for layer in model.base_model.layers[1::2]:
            layer.register_forward_hook(lambda *_: self.look("forward"))
            layer.register_full_backward_hook(lambda *_: self.look("backward"))

    def look(self, way):
        self.most[way] = max(self.most[way], live_bytes())


def on_rank(rank, names, low):
    """By strategy. One of DeepSpeed's has a process to itself: it leaves tensors behind."""
    return {name: states(name, low) for name in names}


def states(name, low):
    """Bytes of this rank's tensors: laid out, in a pass, with gradients, after a step, without gradients, with a reference."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if low else "no")
    ranks = join_ranks()
    found = {}
    strategy = make_strategy(Distribution(strategy=name), accelerator, ranks)
    gc.collect()
    gc.freeze()  # nothing of what there is now is looked through again, and counted
    before = live_bytes()
    torch.manual_seed(0)
    strategy.distribute(Policy(in_bf16(LlamaForCausalLM(config())), layout="packed", temperature=1.0, head_chunk=None), adamw)
    found["laid out"] = live_bytes() - before
    watch = Watch(strategy.policy.model)
    group = GroupRows(group=0, prompt_ids=(1, 2, 3), rows=(0, 1), completion_ids=((4, 5, 6), (7, 8)))
    batch = build_scoring_batch([group], "packed", torch.device("cpu"))
    for is_last in (False, True):
        with strategy.autocast():
            logp_N, _ = strategy.forward(batch)
        strategy.backward(logp_N.sum(), is_last=is_last)
        del logp_N
    found |= {way: most - before for way, most in watch.most.items()}
    norm, _ = strategy.gradient_norm()
    gradients = [p.grad for p in strategy.policy.parameters()]
    found["gradients"] = live_bytes() - before
    strategy.step(norm=norm, max_norm=1.0)
    found["step"] = live_bytes() - before
    del gradients
    strategy.zero_grad()
    found["between"] = live_bytes() - before
    reference = strategy.make_reference(low_precision=torch.bfloat16 if low else None)
    found["reference"] = live_bytes() - before
    with torch.no_grad(), strategy.autocast():
        reference(batch)
    found["scored"] = live_bytes() - before
    return found


def in_bf16(model):
    """Weights that bfloat16 holds exactly, as those of most models on the hub are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model
