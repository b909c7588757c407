"""Prompts with images through sampling and scoring: every path gives what a plain forward pass of the row gives."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from rloo_cli.data.chat import load_tokenizer
from rloo_cli.data.images import read_images
from rloo_cli.data.processor import visual_processor
from rloo_cli.errors import RecipeError
from rloo_cli.launch.talk import Speaker, choose_subject
from rloo_cli.recipe.schema import ModelSection, TrainingSection
from rloo_cli.rollout.engine import GenerationRequest, RandomKey, SamplingParams
from rloo_cli.rollout.transformers_engine import TransformersEngine
from rloo_cli.rollout.visual import has_own_positions
from rloo_cli.training.auto import decide_layout
from rloo_cli.training.microbatches import GroupRows, build_scoring_batch
from rloo_cli.training.policy import Policy, load_model, make_reference
from tests.tiny_vision import FAMILIES, png

CPU = torch.device("cpu")
TOLERANCE = 5e-5  # nats, float32
PLACES = {"qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>"}


class Family:
    """A model, and prompts with two images, one, none, and one of another size."""

    def __init__(self, name: str, folder: Path) -> None:
        FAMILIES[name](folder)
        section = ModelSection(model_name_or_path=str(folder))
        self.name, self.folder = name, folder
        self.tokenizer = load_tokenizer(section)
        self.model = load_model(section, seed=0, trust_remote_code=False).eval()
        self.image_token = self.model.config.image_token_id
        make = visual_processor(section, AutoConfig.from_pretrained(folder), self.tokenizer, trust_remote_code=False)
        place = PLACES.get(name, "<image>")
        two = make(f"ab{place}{place}cd", read_images([png(1, (20, 12)), png(2)], []))
        one = make(f"See {place}: what?", read_images([png(3, (9, 30))], []))
        other = make(f"See {place}: what?", read_images([png(4, (9, 30))], []))
        self.prompts = [two, one, ([65, 66, 67], None), other]

    def policy(self, layout):
        return Policy(self.model, layout=layout, temperature=1.0, head_chunk=None)

    @property
    def layouts(self):
        return ["plain"] if has_own_positions(self.model) else ["plain", "packed"]

    def groups(self):
        """Three completions a prompt, among their tokens the id of an image's placeholder."""
        draw = random.Random(5)
        groups = []
        for p, (ids, visual) in enumerate(self.prompts):
            completions = [tuple(draw.choices(range(250), k=length)) for length in (1, 4, 7)]
            completions[1] = (*completions[1], self.image_token, 9)
            groups.append(
                GroupRows(
                    group=p, prompt_ids=tuple(ids), rows=(3 * p, 3 * p + 1, 3 * p + 2), completion_ids=tuple(completions), visual=visual
                )
            )
        return groups

    def requests(self, count=3):
        return [
            GenerationRequest(token_ids=tuple(ids), num_generations=count, first_row=count * i, visual=visual)
            for i, (ids, visual) in enumerate(self.prompts)
        ]


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request, tmp_path_factory):
    return Family(request.param, tmp_path_factory.mktemp(request.param))


def plainly(family, prompt_ids, completion, visual):
    """Log-probs by the model's own forward pass over one row, one token after another where a placeholder is among the completion's."""
    arguments = {} if visual is None else dict(visual.tensors)
    ids = torch.tensor([[*prompt_ids, *completion]])
    for name, types in ({} if visual is None else visual.token_types).items():
        arguments[name] = torch.tensor([[*types, *[0] * len(completion)]])
    with torch.no_grad():
        logp = family.model(input_ids=ids, **arguments).logits[0].log_softmax(-1)
    return torch.stack([logp[len(prompt_ids) - 1 + t, token] for t, token in enumerate(completion)])


@torch.no_grad()
def scored(policy, groups):
    return policy.eval()(build_scoring_batch(groups, policy.layout, CPU))[0]


def test_logprobs_are_those_of_a_plain_forward_pass_of_each_row(family):
    groups = [replace(group, rows=group.rows[::2], completion_ids=group.completion_ids[::2]) for group in family.groups()]
    expected = torch.cat([plainly(family, group.prompt_ids, ids, group.visual) for group in groups for ids in group.completion_ids])
    for layout in family.layouts:
        assert (scored(family.policy(layout), groups) - expected).abs().max() < TOLERANCE


def test_logprobs_do_not_depend_on_the_cut_into_micro_batches(family):
    groups = family.groups()
    for layout in family.layouts:
        policy = family.policy(layout)
        alone = torch.cat([scored(policy, [group]) for group in groups])
        assert (scored(policy, groups) - alone).abs().max() < TOLERANCE


def test_the_image_matters(family):
    """Otherwise the other tests would show nothing."""
    groups = family.groups()
    swapped = [replace(groups[1], visual=groups[3].visual)]
    for layout in family.layouts:
        policy = family.policy(layout)
        assert (scored(policy, [groups[1]]) - scored(policy, swapped)).abs().max() > 0.01


def test_sampled_logprobs_are_the_trainers(family):
    engine = TransformersEngine(family.model, tokenizer=family.tokenizer)
    requests = family.requests()
    sampled = engine.generate(requests, SamplingParams(max_new_tokens=16), RandomKey(seed=3, step=1))
    assert engine._visual_layout == ("plain" if has_own_positions(family.model) else "packed")
    policy = family.policy("plain")
    for request, completions in zip(requests, sampled, strict=True):
        ids = tuple(completion.token_ids for completion in completions)
        logp = scored(policy, [GroupRows(group=0, prompt_ids=request.token_ids, rows=(0, 1, 2), completion_ids=ids, visual=request.visual)])
        assert (logp - torch.tensor([value for completion in completions for value in completion.logprobs])).abs().max() < TOLERANCE


def test_plain_and_packed_decoding_sample_the_same(family):
    params, key = SamplingParams(max_new_tokens=16), RandomKey(seed=3, step=1)
    found = []
    for layout in ("plain", "auto"):
        engine = TransformersEngine(family.model, tokenizer=family.tokenizer, layout=layout)
        found.append([[completion.token_ids for completion in group] for group in engine.generate(family.requests(), params, key)])
    assert found[0] == found[1]


def test_rows_do_not_depend_on_the_rest_of_the_batch(family):
    engine = TransformersEngine(family.model, tokenizer=family.tokenizer, layout="plain")
    params, key = SamplingParams(max_new_tokens=12), RandomKey(seed=4, step=1)
    together = engine.generate(family.requests(), params, key)
    for request, group in zip(family.requests(), together, strict=True):
        (alone,) = engine.generate([request], params, key)
        assert [c.token_ids for c in alone] == [c.token_ids for c in group]


def test_prompts_of_equal_tokens_and_different_images_stay_apart(family):
    first, second = family.requests()[1], replace(family.requests()[3], first_row=family.requests()[1].first_row)
    assert first.token_ids == second.token_ids
    engine = TransformersEngine(family.model, tokenizer=family.tokenizer)
    groups = engine.generate([first, second], SamplingParams(max_new_tokens=12), RandomKey(seed=0, step=1))
    assert [c.logprobs for c in groups[0]] != [c.logprobs for c in groups[1]]


def test_the_generate_of_transformers_gives_the_greedy_tokens(family):
    ids, visual = family.prompts[1]
    engine = TransformersEngine(family.model, tokenizer=family.tokenizer)
    request = GenerationRequest(token_ids=tuple(ids), num_generations=1, first_row=0, visual=visual)
    ((ours,),) = engine.generate([request], SamplingParams(max_new_tokens=8, temperature=0.0), RandomKey(seed=0, step=1))
    arguments = {**visual.tensors, **{name: torch.tensor([types]) for name, types in visual.token_types.items()}}
    prompt = torch.tensor([ids])
    theirs = family.model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8, **arguments)
    assert tuple(theirs[0, len(ids) :].tolist()) == ours.token_ids


def test_a_reference_that_nothing_has_moved_gives_kl_zero_to_the_bit(family):
    for layout in family.layouts:
        policy = family.policy(layout)
        assert torch.equal(scored(policy, family.groups()), scored(make_reference(policy, low_precision=None), family.groups()))


def test_gradients_reach_the_vision_part_and_are_the_same_in_both_layouts(family):
    found = []
    for layout in family.layouts:
        family.model.zero_grad()
        policy = family.policy(layout)
        logp, _ = policy.eval()(build_scoring_batch(family.groups(), layout, CPU))
        logp.sum().backward()
        found.append({name: p.grad.clone() for name, p in family.model.named_parameters() if p.grad is not None})
    assert any("vis" in name and gradient.abs().max() > 0 for name, gradient in found[0].items())
    for name in found[0]:
        assert torch.allclose(found[0][name], found[-1][name], rtol=1e-3, atol=1e-4 * found[0][name].abs().max().item() + 1e-6)


def test_auto_decides_and_packed_is_refused_where_positions_depend_on_images(family):
    ids, visual = family.prompts[0]
    arguments = {"prompt_ids": tuple(ids), "completion_length": 8, "visual": visual}
    policy = family.policy("plain")
    expected = "plain" if has_own_positions(family.model) else "packed"
    assert decide_layout(TrainingSection(), policy, **arguments) == expected
    if expected == "plain":
        with pytest.raises(RecipeError, match=r"training.layout: packed sequences do not bear prompts with images"):
            decide_layout(TrainingSection(layout="packed"), policy, **arguments)
        assert decide_layout(TrainingSection(layout="packed"), policy, prompt_ids=(65, 66), completion_length=8) == "packed"


def test_text_alone_is_scored_as_ever_by_a_model_that_reads_images(family):
    group = family.groups()[2]
    expected = torch.cat([plainly(family, group.prompt_ids, ids, None) for ids in group.completion_ids])
    for layout in ("plain", "packed"):
        assert (scored(family.policy(layout), [group]) - expected).abs().max() < TOLERANCE


def test_the_class_is_chosen_by_the_configuration(family):
    assert type(family.model) is type(AutoModelForImageTextToText.from_pretrained(family.folder))
    if family.name != "qwen2_vl":  # whose AutoProcessor wants torchvision
        assert AutoProcessor.from_pretrained(family.folder).image_processor is not None


@torch.no_grad()
def token_by_token(family, prompt_ids, completion, visual):
    """Log-probs by the model's own cache: the prompt with its images, then one token after another."""
    arguments = {**visual.tensors, **{name: torch.tensor([types]) for name, types in visual.token_types.items()}}
    output = family.model(input_ids=torch.tensor([prompt_ids]), use_cache=True, **arguments)
    position = len(prompt_ids) + (int(family.model.base_model.rope_deltas) if has_own_positions(family.model) else 0)
    found = []
    for t, token in enumerate(completion):
        found.append(output.logits[0, -1].log_softmax(-1)[token])
        output = family.model(
            input_ids=torch.tensor([[token]]),
            position_ids=torch.tensor([[position + t]]),
            past_key_values=output.past_key_values,
            use_cache=True,
        )
    return torch.stack(found)


def test_a_placeholder_among_sampled_tokens_is_a_token_like_any_other(family):
    groups = [group for group in family.groups() if group.visual is not None]
    assert all(family.image_token in group.completion_ids[1] for group in groups)
    expected = torch.cat([token_by_token(family, group.prompt_ids, ids, group.visual) for group in groups for ids in group.completion_ids])
    for layout in family.layouts:
        assert (scored(family.policy(layout), groups) - expected).abs().max() < TOLERANCE


def test_talking_writes_the_prompt_as_training_does(family):
    speaker = Speaker(choose_subject(str(family.folder), checkpoint=None), seed=0, trust_remote_code=False)
    (answer,) = speaker.answer([[{"role": "user", "content": "hello"}]], SamplingParams(max_new_tokens=3), 1)
    assert answer.prompt_text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
