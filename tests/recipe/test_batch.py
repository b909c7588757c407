import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_texts import VALID, faults_of, lines_of, load

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.batch import BatchPlan, plan_batches, total_steps
from rloo_cli.recipe.schema import Recipe


def recipe_with(*, num_generations=2, num_iterations=1, **training):
    return Recipe.model_validate(
        {
            "model": {"model_name_or_path": "m"},
            "data": {"dataset_name": "d"},
            "rewards": [{"function": "a.b"}],
            "generation": {"num_generations": num_generations},
            "algorithm": {"num_iterations": num_iterations},
            "training": training,
        }
    )


def test_prompts_per_step_says_everything_on_any_number_of_processes():
    recipe = recipe_with(num_generations=8, prompts_per_step=16)
    expected = BatchPlan(
        num_generations=8,
        prompts_per_step=16,
        completions_per_step=128,
        prompts_per_generation=16,
        steps_per_generation_batch=1,
        num_iterations=1,
        off_policy=False,
        max_micro_batch_rows=None,
    )
    assert [plan_batches(recipe, processes) for processes in (1, 3, 8)] == [expected] * 3


def test_names_of_training_arguments():
    plan = plan_batches(
        recipe_with(num_generations=4, per_device_train_batch_size=8, gradient_accumulation_steps=3, steps_per_generation=6), 2
    )
    assert (plan.completions_per_step, plan.prompts_per_step) == (48, 12)
    assert (plan.steps_per_generation_batch, plan.prompts_per_generation, plan.off_policy) == (2, 24, True)
    assert plan.max_micro_batch_rows == 8


def test_the_default_batch_is_that_of_training_arguments():
    assert plan_batches(recipe_with(), 1).completions_per_step == 8
    assert plan_batches(recipe_with(), 4).prompts_per_step == 16


def test_generation_batch_size_is_the_other_way_to_say_steps_per_generation():
    one = plan_batches(recipe_with(prompts_per_step=4, generation_batch_size=24), 2)
    assert one.steps_per_generation_batch == 3
    assert one == plan_batches(recipe_with(prompts_per_step=4, steps_per_generation=3), 2)


def test_iterations_alone_make_it_off_policy():
    assert plan_batches(recipe_with(num_iterations=2), 1).off_policy


FAULTS = [
    (
        "num_generations: 6",
        1,
        "7:18: generation.num_generations: 8 (the default) × 1 process × gradient_accumulation_steps 1 = 8 completions a step, which "
        "num_generations 6 does not divide. Nearest that work: per_device_train_batch_size 6 or 12, or gradient_accumulation_steps 3, "
        "or `prompts_per_step: 1` in place of both.",
    ),
    (
        "num_generations: 16\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 3",
        2,
        "8:30: training.per_device_train_batch_size: 4 × 2 processes × gradient_accumulation_steps 3 = 24 completions a step, which "
        "num_generations 16 does not divide. Nearest that work: per_device_train_batch_size 8, or gradient_accumulation_steps 2 or 4, "
        "or `prompts_per_step: 2` in place of both.",
    ),
    (
        "num_generations: 8\nprompts_per_step: 16\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 8",
        1,
        "8:19: training.prompts_per_step: 16 prompts × num_generations 8 = 128 completions a step, but per_device_train_batch_size 4 × "
        "1 process × gradient_accumulation_steps 8 = 32. Keep one way of saying it. `prompts_per_step: 4` would say the same.",
    ),
    (
        "num_generations: 8\nprompts_per_step: 3\ngradient_accumulation_steps: 5",
        1,
        "9:30: training.gradient_accumulation_steps: 3 prompts × num_generations 8 = 24 completions a step, which 1 process × "
        "gradient_accumulation_steps 5 do not divide. Remove gradient_accumulation_steps: prompts_per_step says it all.",
    ),
    (
        "steps_per_generation: 5\ngradient_accumulation_steps: 2",
        1,
        "7:23: training.steps_per_generation: 5 is no multiple of gradient_accumulation_steps 2: a generation batch serves whole "
        "optimizer steps. Nearest that work: 4 or 6.",
    ),
    (
        "steps_per_generation: 1\ngradient_accumulation_steps: 2",
        1,
        "7:23: training.steps_per_generation: 1 is no multiple of gradient_accumulation_steps 2: a generation batch serves whole "
        "optimizer steps. Nearest that work: 2.",
    ),
    (
        "generation_batch_size: 20",
        1,
        "7:24: training.generation_batch_size: 20 is no multiple of the 8 completions of an optimizer step (on 1 process). "
        "Nearest that work: 16 or 24.",
    ),
    (
        "generation_batch_size: 16\nsteps_per_generation: 2",
        1,
        "7:24: training.generation_batch_size: steps_per_generation and generation_batch_size say the same thing; keep one of them.",
    ),
]


@pytest.mark.parametrize(("text", "processes", "line"), FAULTS, ids=[text.replace("\n", " ") for text, _, _ in FAULTS])
def test_what_does_not_come_out_even_shows_the_arithmetic(text, processes, line):
    assert faults_of(VALID + text + "\n", processes=processes) == [line]


def test_the_same_said_twice_is_no_error():
    text = "num_generations: 8\nprompts_per_step: 4\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 8\n"
    assert load(VALID + text + "beta: 0\n").batch.prompts_per_step == 4


def test_the_number_of_processes_decides():
    text = VALID + "num_generations: 16\n"
    assert load(text, processes=2).batch.prompts_per_step == 1
    assert len(lines_of(text, processes=1)) == 1


@given(
    group=st.integers(2, 20),
    device=st.integers(1, 40),
    accumulation=st.integers(1, 9),
    processes=st.integers(1, 9),
)
@settings(max_examples=300, deadline=None)
def test_every_number_that_a_message_offers_works(group, device, accumulation, processes):
    recipe = recipe_with(num_generations=group, per_device_train_batch_size=device, gradient_accumulation_steps=accumulation)
    try:
        assert plan_batches(recipe, processes).completions_per_step == device * processes * accumulation
    except RecipeError as error:
        assert device * processes * accumulation % group
        devices, rest = error.message.split("per_device_train_batch_size ")[1].split(", or gradient_accumulation_steps ")
        accumulations, rest = rest.split(", or `prompts_per_step: ")
        for offer in devices.split(" or "):
            assert int(offer) * processes * accumulation % group == 0
        for offer in accumulations.split(" or "):
            assert device * processes * int(offer) % group == 0
        plan_batches(recipe_with(num_generations=group, prompts_per_step=int(rest.split("`")[0])), processes)


@pytest.mark.parametrize(
    ("training", "iterations", "prompts", "steps"),
    [
        ({"max_steps": 7, "prompts_per_step": 4}, 1, 100, 7),
        ({"num_train_epochs": 1.0, "prompts_per_step": 4}, 1, 100, 25),
        ({"num_train_epochs": 1.0, "prompts_per_step": 4}, 1, 101, 26),
        ({"prompts_per_step": 4}, 1, 100, 75),
        ({"num_train_epochs": 0.1, "prompts_per_step": 1}, 1, 30, 3),
        ({"num_train_epochs": 0.001, "prompts_per_step": 4}, 1, 10, 1),
        ({"num_train_epochs": 1.0, "prompts_per_step": 4}, 2, 100, 50),
        ({"num_train_epochs": 1.0, "prompts_per_step": 4, "steps_per_generation": 5}, 1, 100, 25),
    ],
)
def test_steps_of_a_run(training, iterations, prompts, steps):
    recipe = recipe_with(num_iterations=iterations, **training)
    assert total_steps(recipe, plan_batches(recipe, 1), prompts) == steps


@pytest.mark.parametrize("training", [{"prompts_per_step": 10**14}, {"prompts_per_step": 2, "steps_per_generation": 10**9}])
def test_a_batch_that_no_memory_holds_is_refused(training):
    with pytest.raises(RecipeError, match="a generation batch would be .* completions"):
        plan_batches(recipe_with(**training), 1)
