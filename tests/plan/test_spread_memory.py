from __future__ import annotations

from dataclasses import replace

import laid_out
import processes
import pytest
from test_memory import SHAPE, WORK

from rloo_cli.errors import RefusedError
from rloo_cli.plan.comparison import advice, compare, sampling_fault
from rloo_cli.plan.devices import DeviceMemory, check_gpu, find_device, machines_of_gpus
from rloo_cli.plan.memory import estimate_disk, estimate_memory, loading_bytes, offloaded_bytes, vllm_lacks
from rloo_cli.plan.remedies import Case, remedy
from rloo_cli.plan.shape import model_shape
from rloo_cli.plan.spread import Spread, check_machines, spread_of
from rloo_cli.recipe.distribution import Distribution

GIB = 1 << 30
ELSEWHERE = replace(WORK, sampler="elsewhere", has_reference=False, low_precision=False)


def spread(strategy, processes=4, **options):
    return Spread(strategy=strategy, processes=processes, **options)


@pytest.mark.parametrize(
    ("strategy", "weights", "master", "gradients", "optimizer"),
    [("ddp", 400, 0, 400, 800), ("zero2", 400, 100, 100, 200), ("fsdp2", 100, 0, 100, 200), ("zero3", 100, 100, 100, 200)],
)
def test_what_lies_whole_and_what_in_parts(strategy, weights, master, gradients, optimizer):
    terms = estimate_memory(SHAPE, ELSEWHERE, spread(strategy))
    assert [terms[name] / 1e6 for name in ("weights", "master", "gradients", "optimizer")] == [weights, master, gradients, optimizer]


@pytest.mark.parametrize(
    ("strategy", "weights", "reference"), [("ddp", 400, 232.768), ("zero2", 200, 200), ("fsdp2", 100, 50), ("zero3", 50, 50)]
)
def test_bfloat16_is_held_where_the_strategy_computes_in_it(strategy, weights, reference):
    terms = estimate_memory(SHAPE, replace(WORK, sampler="elsewhere"), spread(strategy))
    assert (terms["weights"] / 1e6, terms["reference"] / 1e6) == (weights, reference)


def test_whole_weights_come_to_the_device_as_they_are_held():
    small = replace(ELSEWHERE, low_precision=True, optim="sgd", micro_batch_tokens=8, micro_batch_completion_tokens=5)
    wide = replace(SHAPE, vocab=100, hidden=64, largest_tensor=10_000)
    terms = estimate_memory(wide, small, spread("zero2", 1024))
    assert terms["weights"] == 200e6
    assert terms["peak"] - terms["allocator"] - terms["runtime"] == 400e6


def test_adafactor_cannot_factor_flat_buffers():
    work = replace(ELSEWHERE, optim="adafactor")
    assert [estimate_memory(SHAPE, work, spread(name))["optimizer"] for name in ("fsdp2", "zero3")] == [0, 100e6]


@pytest.mark.parametrize(("strategy", "copy"), [("ddp", 200), ("zero2", 0), ("fsdp2", 200), ("zero3", 200)])
def test_parts_cannot_sample(strategy, copy):
    assert estimate_memory(SHAPE, WORK, spread(strategy))["decode copy"] == copy * 1e6
    assert estimate_memory(SHAPE, replace(WORK, sampler="elsewhere"), spread(strategy))["decode copy"] == 0


@pytest.mark.parametrize("strategy", ["zero2", "fsdp2", "zero3"])
def test_more_processes_need_less_each(strategy):
    peaks = [estimate_memory(SHAPE, ELSEWHERE, spread(strategy, processes))["peak"] for processes in (2, 8, 32)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > 1.1 * peaks[2]
    assert len({estimate_memory(SHAPE, ELSEWHERE, spread("ddp", processes))["peak"] for processes in (2, 8, 32)}) == 1


@pytest.mark.parametrize(("strategy", "reshard"), [("fsdp2", False)])
def test_layers_that_stay_gathered_cost_memory(strategy, reshard):
    kept = estimate_memory(SHAPE, ELSEWHERE, spread(strategy, reshard_after_forward=reshard))
    assert kept["gathered"] > estimate_memory(SHAPE, ELSEWHERE, spread(strategy))["gathered"]


def test_what_is_offloaded_is_in_the_machines_memory():
    there = spread("fsdp2", processes=8, machines=2, is_offloaded=True)
    terms = estimate_memory(SHAPE, ELSEWHERE, there)
    assert terms["weights"] == terms["gradients"] == terms["optimizer"] == 0
    assert offloaded_bytes(SHAPE, ELSEWHERE, there) == 4 * (400 + 400 + 800) * 1e6 / 8
    assert offloaded_bytes(SHAPE, ELSEWHERE, spread("zero2")) == 0


def test_loading_takes_a_copy_for_each_process_that_has_all_of_it():
    machines = {"processes": 16, "machines": 2}
    assert [loading_bytes(SHAPE, WORK, Spread(strategy=name, **machines)) for name in ("ddp", "zero2")] == [3200e6, 3200e6]
    assert [loading_bytes(SHAPE, WORK, Spread(strategy=name, **machines)) for name in ("fsdp2", "zero3")] == [400e6, 400e6]


def test_a_checkpoint_is_as_large_and_written_in_parts():
    sizes = [
        estimate_disk(SHAPE, ELSEWHERE, checkpoints=1, rows=1, files=1, spread=spread(name)) for name in ("ddp", "zero2", "fsdp2", "zero3")
    ]
    assert {size["checkpoint"] for size in sizes} == {1200e6}
    assert [size["process"] for size in sizes] == [1200e6, 300e6, 300e6, 300e6]


def test_the_file_says_what_is_offloaded_and_how_large_buckets_are():
    zero = {"reduce_bucket_size": 1000, "stage3_max_live_parameters": 7}
    found = spread_of(Distribution(strategy="zero3", zero=zero), processes=2, machines=1)
    assert (found.is_offloaded, found.bucket, found.live_parameters) == (False, 1000, 7)
    assert spread_of(Distribution(strategy="fsdp2", cpu_offload=True), processes=2, machines=1).is_offloaded


def test_a_launch_in_words():
    assert Spread(strategy="zero3", processes=32, machines=4).words() == "32 processes on 4 machines of 8, zero3"
    assert Spread(strategy="ddp", processes=2).words() == "2 processes on 1 machine, ddp"
    assert (Spread().words(), Spread(strategy="fsdp2").words()) == ("1 process", "1 process, fsdp2")


def test_machines_have_equally_many_processes():
    check_machines(12, 3)
    with pytest.raises(RefusedError, match=r"Nearest that do: 10 or 15"):
        check_machines(12, 5)
    assert [machines_of_gpus(count) for count in (1, 8, 12, 32)] == [1, 1, 2, 4]


def test_gpus_by_name():
    assert find_device("H100-80").room(8) == round(79.2 * GIB)
    with pytest.raises(RefusedError, match=r"--gpu h100: not known. There are .*h100-80"):
        check_gpu("h100")


def test_processes_of_a_machine_share_its_memory():
    assert DeviceMemory(name="this machine", kind="cpu", total=8 * GIB, free=8 * GIB).room(4) == 2 * GIB


def gpu(size):
    return DeviceMemory(name="gpu", kind="cuda", total=round(size * GIB), free=round(size * GIB), is_named=True)


def test_the_strategies_are_compared():
    verdicts = compare(SHAPE, ELSEWHERE, spread("ddp"), gpu(1.5))
    assert {verdict.strategy: verdict.fits for verdict in verdicts} == {"ddp": False, "zero2": False, "fsdp2": True, "zero3": False}
    ddp = verdicts[0]
    assert "of 1.50 GiB, most of it optimizer state (762.9 MiB)" in ddp.why
    assert advice(verdicts, spread("ddp")) == "`run.accelerate_config: fsdp2`"
    assert advice(verdicts, spread("fsdp2")) is None


BIG = replace(SHAPE, parameters=7_000_000_000, layer_parameters=200_000_000, root_parameters=600_000_000, largest_tensor=300_000_000)


@pytest.mark.parametrize(
    ("strategy", "work", "room", "expected"),
    [
        ("fsdp2", replace(ELSEWHERE, checkpointing=False, micro_batch_tokens=40_000), 5, "`training.gradient_checkpointing: true`"),
        ("fsdp2", replace(WORK, has_reference=False), 1.1, "`generation.use_vllm: true` with `vllm_mode: server`"),
        ("fsdp2", replace(ELSEWHERE, micro_batch_tokens=40_000, head_chunk=128), 1.6, "`training.max_tokens_per_micro_batch: "),
    ],
)
def test_the_change_that_makes_it_fit_is_named(strategy, work, room, expected):
    case = Case(shape=SHAPE, work=work, spread=spread(strategy), room=round(room * GIB))
    assert not case.fits
    found = remedy(case)
    assert found is not None
    assert expected in found, found


def test_how_many_processes_it_takes():
    case = Case(shape=BIG, work=ELSEWHERE, spread=spread("fsdp2", 2), room=60 * GIB)
    found = remedy(case)
    assert found is not None
    assert found.startswith("`--num-processes 4`"), found
    assert "`fsdp_offload_params: true`" in found
    assert remedy(replace(case, spread=spread("ddp", 2))) is None


def test_a_model_that_no_device_holds_cannot_sample_without_vllm():
    fault = sampling_fault(BIG, WORK, gpu(8))
    assert fault is not None
    assert "generation.use_vllm" in fault
    assert "13.04 GiB, and gpu has 8.00 GiB" in fault
    assert "tensor parallelism" in fault
    assert sampling_fault(BIG, WORK, gpu(24)) is None
    assert sampling_fault(BIG, replace(WORK, sampler="elsewhere"), gpu(8)) is None


NUMBERS = {
    "laid out": ("weights", "master"),
    "between": ("weights", "master", "optimizer"),
    "gradients": ("weights", "master", "gradients"),
}


@pytest.mark.slow
@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("strategies", [("ddp", "fsdp2"), ("zero2",), ("zero3",)], ids="-".join)
def test_the_terms_are_the_bytes_of_the_tensors(tmp_path, monkeypatch, strategies, low):
    monkeypatch.setattr(processes, "SECONDS", 280)
    shape = model_shape(laid_out.config())
    for by_strategy in processes.run_ranks(laid_out.on_rank, 2, tmp_path, strategies, low):
        for strategy in strategies:
            compare_with_count(by_strategy[strategy], shape, strategy, low)


def compare_with_count(counted, shape, strategy, low):
    work = replace(WORK, low_precision=low, micro_batch_tokens=8, micro_batch_completion_tokens=5, sampler="elsewhere")
    terms = estimate_memory(shape, work, spread(strategy, 2))
    # DeepSpeed's third stage has its gradients' buffer and a bucket from the start.
    standing = terms["gradients"] + 4 * spread(strategy).bucket if strategy == "zero3" else 0
    for when, names in NUMBERS.items():
        expected = sum(terms[name] for name in names if name != "gradients" or not standing) + standing
        assert counted[when] == pytest.approx(expected, rel=0.01), (strategy, low, when)
    assert counted["reference"] - counted["between"] == pytest.approx(terms["reference"], rel=0.01), (strategy, low)
    assert counted["scored"] == pytest.approx(counted["reference"], rel=0.01), (strategy, low)
    passing = sum(terms[name] for name in ("weights", "master", "gradients", "gathered", "activations", "logits"))
    assert max(counted["forward"], counted["backward"]) <= passing * 1.01, (strategy, low)


def test_vllms_share_has_to_hold_its_weights():
    colocated = replace(ELSEWHERE, sampler="vllm", low_precision=True, on_gpu=True, vllm_share=round(0.3 * 24 * GIB))
    own = next(verdict for verdict in compare(BIG, colocated, spread("fsdp2", 16), gpu(24)) if verdict.strategy == "fsdp2")
    assert not own.fits
    assert "vLLM lacks" in own.why
    assert "in its share of 7.20 GiB" in own.why
    assert own.change == "`generation.vllm_tensor_parallel_size: 2`"
    assert vllm_lacks(BIG, replace(colocated, vllm_parts=2)) == 0
    assert vllm_lacks(BIG, ELSEWHERE) == 0
