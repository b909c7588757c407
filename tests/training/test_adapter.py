"""An adapter in a model: what it leaves alone, what it is merged to, its reference, and what cannot be adapted."""

import copy
import json

import pytest
import rig
import tiny
import torch
from safetensors.torch import load_file, save_file

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.schema import ModelSection
from rloo_cli.rollout.decode_copy import DecodeCopy
from rloo_cli.training.adapter import (
    AdapterOff,
    InitialAdapter,
    adapter_document,
    adapter_names,
    adapter_size,
    add_adapter,
    changes_nothing,
    new_adapter_names,
    plain_structure,
    plain_tensors,
    published,
    reference_of,
)
from rloo_cli.training.fingerprint import fingerprint
from rloo_cli.training.microbatches import GroupRows, build_scoring_batch
from rloo_cli.training.policy import Policy

ALL = {"lora_target_modules": ["all-linear"]}
WITH_COPIES = {"lora_target_modules": ["all-linear"], "lora_modules_to_save": ["norm"], "use_rslora": True}
IDS = torch.tensor([[5, 17, 99, 3, 3, 200], [1, 2, 3, 4, 5, 6]])
MODELS = {name: tiny.MODELS[name] for name in ("qwen2", "llama", "gpt2", "gemma")}


def section(name="base", **fields):
    return ModelSection(model_name_or_path=str(name), use_peft=True, **fields)


def adapted(model=None, seed=1, **fields):
    return add_adapter(model or tiny.qwen2(), section(**(fields or ALL)), seed=seed)


def learnt(model, scale=0.05, seed=7):
    """The model, its adapter moved away from where it began."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def policy_of(model, layout="packed"):
    return Policy(model, layout=layout, temperature=0.8, head_chunk=None)


def batch(layout="packed"):
    group = GroupRows(group=0, prompt_ids=(5, 17, 99), rows=(0, 1), completion_ids=((3, 3, 200), (7, 8)))
    return build_scoring_batch([group], layout, torch.device("cpu"))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_adapter_changes_nothing_to_the_bit(name, dtype):
    base, model = MODELS[name](dtype=dtype), adapted(MODELS[name](dtype=dtype))
    assert torch.equal(base(IDS).logits, model(IDS).logits)
    assert changes_nothing(model)
    assert dict(plain_tensors(model)).keys() == base.state_dict().keys()
    for key, tensor in plain_tensors(model):
        assert torch.equal(tensor, base.state_dict()[key].to(tensor.dtype)), key
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fields", [ALL, {"lora_r": 3, "lora_alpha": 7}, WITH_COPIES])
def test_weights_with_the_adapter_in_them_compute_what_the_adapter_does(name, fields):
    if name == "gpt2" and "lora_modules_to_save" in fields:
        fields = {**fields, "lora_modules_to_save": ["ln_f"]}
    base, model = MODELS[name](), learnt(adapted(MODELS[name](), **fields))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    decode = DecodeCopy(plain_structure(model), torch.float32, torch.device("cpu"))
    decode.load(plain_tensors(model))
    expected = model(IDS).logits
    assert (expected - base(IDS).logits).abs().max() > 0.1
    assert torch.allclose(decode.model(IDS).logits, expected, atol=1e-4)
    again = dict(plain_tensors(model))
    assert all(torch.equal(again[key], tensor) for key, tensor in plain_tensors(model))
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items()), "merging touched what is trained"


def test_tied_weights_come_under_each_name_as_one_tensor():
    found = dict(plain_tensors(adapted()))
    assert found["lm_head.weight"] is found["model.embed_tokens.weight"]


@pytest.mark.parametrize("layout", ["packed", "plain"])
def test_the_reference_of_a_new_adapter_is_the_model_itself_whatever_is_learnt(layout):
    model = adapted(**WITH_COPIES)
    policy = policy_of(model, layout)
    reference = reference_of(policy)
    assert isinstance(reference, AdapterOff)
    with torch.no_grad():
        first = policy(batch(layout))[0]
        assert torch.equal(first, reference(batch(layout))[0])
        learnt(model)
        assert not torch.allclose(policy(batch(layout))[0], first)
        assert torch.equal(reference(batch(layout))[0], first)
        assert torch.equal(first, policy_of(tiny.qwen2(), layout)(batch(layout))[0])


def test_the_reference_of_an_adapter_that_is_trained_on_is_its_start():
    model = learnt(adapted(**WITH_COPIES))
    policy = policy_of(model)
    reference = reference_of(policy)
    assert isinstance(reference, InitialAdapter)
    with torch.no_grad():
        first = policy(batch())[0]
        learnt(model, seed=8)
        assert torch.equal(reference(batch())[0], first)
        assert not torch.allclose(policy(batch())[0], first)


@pytest.mark.parametrize("is_new", [True, False])
def test_the_reference_leaves_the_pass_that_is_differentiated_alone(is_new):
    def gradients(asks):
        model = adapted(lora_dropout=0.2, **ALL) if is_new else learnt(adapted(lora_dropout=0.2, **ALL))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        policy = policy_of(model).train()
        reference = reference_of(policy)
        torch.manual_seed(3)
        with policy.attention():
            logp = policy(batch())[0]
            if asks:
                with torch.no_grad():
                    reference(batch())
            logp.sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    plain, asked = gradients(asks=False), gradients(asks=True)
    assert {name for name, grad in plain.items() if grad is not None} == {name for name in plain if ".lora_" in name}
    assert all(grad is None or torch.equal(grad, asked[name]) for name, grad in plain.items())


def test_the_gradient_of_an_update_is_that_of_the_naive_computation():
    model = learnt(adapted(tiny.llama(), lora_target_modules=["all-linear"], lora_modules_to_save=["lm_head"]))
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    experience = rig.make_experience()
    rig.naive_gradient(model, None, experience)
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    updater = rig.make_updater(model, max_tokens=64)
    updater.update(experience, 0, step=1)
    moved = torch.cat([(start[name] - p.detach()).flatten() for name, p in model.named_parameters() if p.requires_grad])
    assert rig.relative(moved, expected) < 1e-4


def test_a_frozen_head_gets_no_gradient_and_the_rest_the_same():
    model = adapted()
    for chunk in (None, 2):
        policy = Policy(model, layout="plain", temperature=0.8, head_chunk=chunk)
        policy(batch("plain"))[0].sum().backward()
    assert model.lm_head.weight.grad is None


def test_what_is_published_is_what_peft_reads(tmp_path):
    from peft import PeftModel

    model = learnt(adapted(tiny.llama(), lora_target_modules=["q_proj", "down_proj"], lora_modules_to_save=["lm_head"]))
    save_file({name: tensor.clone() for name, tensor in published(model).items()}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_document(model)))
    loaded = PeftModel.from_pretrained(tiny.llama(), tmp_path)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.fixture
def folder(tmp_path):
    """An adapter's folder, its model's beside it."""
    tiny.qwen2().save_pretrained(tmp_path / "base")
    model = learnt(add_adapter(tiny.qwen2(), section(tmp_path / "base", **ALL), seed=1))
    (tmp_path / "adapter").mkdir()
    save_file({name: tensor.clone() for name, tensor in published(model).items()}, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter_document(model)))
    return tmp_path / "adapter"


def test_an_adapter_goes_on_as_it_was_whatever_the_recipe_says_of_new_ones(folder):
    model = add_adapter(tiny.qwen2(), section(folder, lora_r=2, lora_target_modules=["q_proj"]), seed=9)
    assert torch.equal(model(IDS).logits, learnt(adapted())(IDS).logits)
    assert len(adapter_names(model)) == 28
    assert adapter_document(model)["base_model_name_or_path"] == str(folder.parent / "base")


def edit(**changes):
    def change(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def truncate(folder):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def drop_one(folder):
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, folder / "adapter_model.safetensors")


def pickled(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


DAMAGE = {
    "dora": (edit(use_dora=True), "an adapter with `use_dora`, a kind that is not trained here"),
    "biases": (edit(bias="all"), "an adapter with `bias`"),
    "another kind": (edit(peft_type="IA3"), "`peft_type` is 'IA3'; only LORA can be trained on"),
    "base moved": (edit(base_model_name_or_path="/no/where"), "belongs to /no/where, which is no folder here"),
    "no base": (edit(base_model_name_or_path=None), "names no `base_model_name_or_path`"),
    "another rank": (edit(r=4), "has another shape than the model's"),
    "cut off": (truncate, "damaged or cut off"),
    "a tensor less": (drop_one, "the file has no base_model.model.model.layers.0"),
    "pickle": (pickled, "holds no adapter_model.safetensors; weights are read from safetensors files only"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_an_adapter_that_cannot_be_trained_on_is_told_in_one_line(folder, case):
    change, message = DAMAGE[case]
    change(folder)
    with pytest.raises(RecipeError) as told:
        add_adapter(tiny.qwen2(), section(folder), seed=1)
    assert told.value.message.startswith("model.model_name_or_path: ")
    assert message in told.value.message
    assert "\n" not in told.value.message


UNFIT = {
    "no such layer": (tiny.qwen2, {"lora_target_modules": ["query"]}, "model.lora_target_modules: Target modules {'query'} not found"),
    "one of two": (tiny.qwen2, {"lora_target_modules": ["q_proj", "query"]}, "no module `query`; of those named it has q_proj"),
    "no such copy": (tiny.qwen2, {"lora_modules_to_save": ["crown"]}, "model.lora_modules_to_save: this model has no module `crown`"),
    "tied head": (
        tiny.qwen2,
        {"lora_modules_to_save": ["lm_head"]},
        "model.lora_modules_to_save: this model's embeddings and LM head are one",
    ),
    "tied embeddings": (tiny.qwen2, {"lora_target_modules": ["embed_tokens"]}, "model.lora_target_modules: this model's embeddings and LM"),
    "head": (tiny.llama, {"lora_target_modules": ["lm_head"]}, "the LM head cannot be adapted; train a copy of it"),
    "no default": (tiny.falcon_h1, {"lora_r": 4}, "model.lora_target_modules: Please specify `target_modules`"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_cannot_be_adapted_is_told_in_one_line(case):
    build, fields, message = UNFIT[case]
    with pytest.raises(RecipeError) as told:
        adapted(build(), **fields)
    assert message in told.value.message
    assert "\n" not in told.value.message


def test_a_fingerprint_does_not_depend_on_the_numbers_that_a_new_adapter_begins_with():
    one, other = adapted(seed=1), adapted(seed=2)
    assert published(one).keys() == published(other).keys()
    assert not all(torch.equal(tensor, published(other)[name]) for name, tensor in published(one).items())
    digests = [fingerprint(model, leave_out=new_adapter_names(model)) for model in (one, other, learnt(copy.deepcopy(one)))]
    assert digests[0] == digests[1] != digests[2]


def test_the_size_of_an_adapter_is_known_before_the_model_is_loaded():
    fields = section(**WITH_COPIES)
    expected = sum(p.numel() for p in adapted(**WITH_COPIES).parameters() if p.requires_grad)
    assert adapter_size(tiny.qwen2().config, fields) == expected
