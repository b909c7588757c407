"""Rules of the rarer options: what is read, what is refused at its place, and what `plan` says of them."""

import pytest

from rloo_cli.errors import RecipeError
from rloo_cli.plan.report import notes
from rloo_cli.recipe.load import load_recipe

BASE = "model: {model_name_or_path: m}\ndata: {dataset_name: d}\nrewards: [{function: accuracy_reward}]\n"


def load(tmp_path, text):
    path = tmp_path / "r.yaml"
    path.write_text(BASE + text)
    return load_recipe(path, num_processes=1, is_training=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("beta: 0\nsync_ref_model: true\n", r"r.yaml:5:17: algorithm.sync_ref_model: with beta 0 there is no reference model"),
        ("sync_ref_model: true\naccelerate_config: fsdp2\n", "sync_ref_model: only a reference that each process has whole .* and fsdp2"),
        ("sync_ref_model: true\nuse_peft: true\n", "sync_ref_model: with use_peft the reference is the model without its adapter"),
        ("sync_ref_model: true\nref_model_mixup_alpha: 1.5\n", "ref_model_mixup_alpha: must be above 0 and at most 1, got 1.5"),
        ("sync_ref_model: true\nref_model_sync_steps: 0\n", "ref_model_sync_steps: must be at least 1, got 0"),
    ],
)
def test_what_cannot_follow_is_refused_at_its_place(text, message, tmp_path):
    with pytest.raises(RecipeError, match=message):
        load(tmp_path, text)


def test_options_of_a_reference_that_stays_are_told(tmp_path):
    notices = load(tmp_path, "ref_model_mixup_alpha: 0.5\nref_model_sync_steps: 10\n").notices
    assert [notice.split(": ", 1)[1] for notice in notices] == [
        "algorithm.ref_model_mixup_alpha: not read: sync_ref_model is false.",
        "algorithm.ref_model_sync_steps: not read: sync_ref_model is false.",
    ]


def test_the_keys_of_trl_are_honoured(tmp_path):
    loaded = load(tmp_path, "sync_ref_model: true\nref_model_mixup_alpha: 0.9\nref_model_sync_steps: 64\n")
    algorithm = loaded.recipe.algorithm
    assert (algorithm.sync_ref_model, algorithm.ref_model_mixup_alpha, algorithm.ref_model_sync_steps) == (True, 0.9, 64)
    assert loaded.notices == ()


def test_options_of_dynamic_sampling_are_told_where_they_are_not_read(tmp_path):
    (notice,) = load(tmp_path, "dynamic_sampling: filter\ndynamic_sampling_max_batches: 3\n").notices
    assert notice.endswith("algorithm.dynamic_sampling_max_batches: not read: dynamic_sampling is filter.")
    assert load(tmp_path, "dynamic_sampling: off\n").recipe.algorithm.dynamic_sampling == "off"  # which YAML 1.1 reads as false
    with pytest.raises(RecipeError, match="must be at least 2 and at most 64, got 1: with 1 nothing would be drawn again"):
        load(tmp_path, "dynamic_sampling: resample\ndynamic_sampling_max_batches: 1\n")


# --- options of sampling in TRL's words ------------------------------------------------------------------------------------------


def test_generation_kwargs_are_the_fields_that_mean_the_same(tmp_path):
    text = "generation_kwargs: {top_p: 0.9, top_k: 20, min_p: 0.1, repetition_penalty: 1.1, temperature: 0.7, max_new_tokens: 64, stop_strings: ['###'], do_sample: true, num_beams: 1}\n"
    loaded = load(tmp_path, text)
    generation = loaded.recipe.generation
    assert (generation.top_p, generation.top_k, generation.min_p, generation.repetition_penalty) == (0.9, 20, 0.1, 1.1)
    assert (generation.temperature, generation.max_completion_length, generation.stop) == (0.7, 64, ["###"])
    assert loaded.notices == ()
    assert load(tmp_path, 'generation:\n  generation_kwargs: \'{"max_tokens": 32, "stop": "END"}\'\n').recipe.generation.stop == ["END"]
    assert load(tmp_path, "generation_kwargs: null\n").recipe.generation.top_p == 1.0
    regex = "use_vllm: true\ngeneration_kwargs: {structured_outputs: {regex: '[a-z]+'}}\n"
    assert load(tmp_path, regex).recipe.generation.vllm_structured_outputs_regex == "[a-z]+"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("generation_kwargs: {num_beams: 4}\n", r"r.yaml:4:21: generation_kwargs.num_beams: refused: only 1 is offered"),
        ("generation_kwargs: {do_sample: false}\n", "generation_kwargs.do_sample: refused: only true is offered"),
        (
            "generation_kwargs: {suppress_tokens: [3]}\n",
            "generation_kwargs.suppress_tokens: refused: no field samples so; those that do are",
        ),
        ("generation_kwargs: {top_p: 2}\n", "r.yaml:4:28: generation.top_p: must be above 0 and at most 1, got 2"),
        ("top_p: 0.5\ngeneration_kwargs: {top_p: 0.9}\n", "generation_kwargs.top_p: given twice: here and as `generation.top_p` on line 4"),
        ("generation_kwargs: 3\n", "generation_kwargs: expected a mapping of options, got 3"),
        ("generation_kwargs: {structured_outputs: {json: '{}'}}\n", "generation_kwargs.structured_outputs: refused"),
    ],
)
def test_generation_kwargs_that_no_field_means_are_refused_at_their_place(text, message, tmp_path):
    with pytest.raises(RecipeError, match=message):
        load(tmp_path, text)


# --- completions that have to match ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.yaml:5:32: generation.vllm_structured_outputs_regex: only vLLM draws completions that match an expression"),
        ("use_vllm: true\nstop: [x]\n", "vllm_structured_outputs_regex: with it completions end where the expression does"),
    ],
)
def test_an_expression_takes_vllm_and_no_stop_strings(text, message, tmp_path):
    with pytest.raises(RecipeError, match=message):
        load(tmp_path, "seed: 1\nvllm_structured_outputs_regex: '[a-z]+'\n" + text)


def test_what_older_files_called_it_is_read(tmp_path):
    loaded = load(tmp_path, "use_vllm: true\nvllm_guided_decoding_regex: '[a-z]+'\n")
    assert loaded.recipe.generation.vllm_structured_outputs_regex == "[a-z]+"
    assert "older name of `generation.vllm_structured_outputs_regex`" in loaded.notices[0]
    with pytest.raises(RecipeError, match="an empty expression matches the empty completion alone"):
        load(tmp_path, "use_vllm: true\nvllm_structured_outputs_regex: ''\n")


def notes_of(tmp_path, text):
    loaded = load(tmp_path, text)
    return notes(loaded.recipe, loaded.batch)


def test_the_plan_says_that_a_constrained_sampler_is_not_the_policy(tmp_path):
    (found,) = notes_of(tmp_path, "use_vllm: true\nvllm_structured_outputs_regex: '[a-z]+'\n")
    assert found.startswith("With vllm_structured_outputs_regex the sampler is not the policy whose gradient is taken")


def test_the_plan_says_what_dynamic_sampling_makes_of_the_objective(tmp_path):
    kept, drawn, lost = notes_of(tmp_path, "prompts_per_step: 4\ndynamic_sampling: resample\ndynamic_sampling_max_batches: 3\n")
    assert "the gradient is the mean over the groups whose rewards differ" in kept
    assert "draws 4 to 12 prompts until 4 groups" in drawn
    assert "still has the KL penalty's gradient (beta above 0); left out, it has none" in lost
    assert len(notes_of(tmp_path, "dynamic_sampling: filter\nbeta: 0\n")) == 1


def test_routers_are_not_balanced_over_parts_of_layers(tmp_path):
    with pytest.raises(RecipeError, match="router_aux_loss_coef: .* as zero3 would need: write `accelerate_config: ddp`, or 0"):
        load(tmp_path, "router_aux_loss_coef: 0.01\naccelerate_config: zero3\n")
    assert load(tmp_path, "router_aux_loss_coef: 0.01\n").recipe.algorithm.router_aux_loss_coef == 0.01
