"""Reward models: each row's score is that of a plain forward of the row alone, and what is no reward model is told so in one line."""

import json
import logging

import pytest
import tiny
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
)

from rloo_cli.errors import RecipeError, RewardError
from rloo_cli.recipe.schema import RewardEntry
from rloo_cli.rewards.runner import RewardRunner
from rloo_cli.training.reward_models import open_reward_model, weight_bytes
from rloo_cli.types import Completion, FinishReason, Group, Prompt, TrainerState

SIZES = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": tiny.EOS,
    "num_labels": 1,
}
CONFIGS = {
    "qwen2 with a pad token": lambda: Qwen2Config(**SIZES, pad_token_id=tiny.PAD),
    "llama without a pad token": lambda: LlamaConfig(**SIZES, pad_token_id=None),
    "gpt2, positions that are learnt": lambda: GPT2Config(
        vocab_size=tiny.VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=256, num_labels=1, bos_token_id=None, eos_token_id=tiny.EOS
    ),
    "bert, an encoder": lambda: BertConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=tiny.PAD,
    ),
}


def save_model(folder, config, *, with_pad=True, template=tiny.CHAT_TEMPLATE, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8.0)
    model.save_pretrained(folder)
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = template
    if not with_pad:
        tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("rm"), CONFIGS["qwen2 with a pad token"]())


def opened(folder, **fields):
    entry = RewardEntry(model=str(folder), **fields)
    scorer = open_reward_model(entry, "rm", "rewards[0].model", template_kwargs={}, trust_remote_code=False)
    scorer.load()
    return scorer


def alone(folder, texts):
    """The score of each text by a plain forward pass of transformers over it alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = tiny.byte_tokenizer()
    with torch.no_grad():
        return [model(torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])).logits[0, 0].item() for text in texts]


PROMPTS = ["What is 1+1?", "Hi", "Tell me a long story about a very small dog.", "a", "b", "What?", "Why is it so?"]
ANSWERS = ["2", "", "Once upon a time" * 5, "<|eos|>", "x<|pad|>", "no<|eos|><|eos|>", "because"]


@pytest.mark.parametrize("batch_size", [1, 3, 32])
@pytest.mark.parametrize("kind", CONFIGS)
def test_scores_equal_a_plain_forward_of_each_row_alone(kind, batch_size, tmp_path):
    folder = save_model(tmp_path / "rm", CONFIGS[kind](), with_pad="without" not in kind)
    found = opened(folder, batch_size=batch_size)(PROMPTS, ANSWERS, lambda name, value: None)
    expected = alone(folder, [prompt + answer for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)])
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-5
    assert max(expected) - min(expected) > 0.01  # the rows differ by more than what is allowed


def test_conversations_are_written_by_the_models_own_template(tmp_path):
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}[ASK]{% endif %}"
    folder = save_model(tmp_path / "rm", CONFIGS["qwen2 with a pad token"](), template=template)
    prompts = [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": "One, "}]]
    completions = [[{"role": "assistant", "content": "Hello"}], [{"role": "assistant", "content": "two"}]]
    found = opened(folder)(prompts, completions, lambda name, value: None)
    assert found == pytest.approx(alone(folder, ["[user] Hi [assistant] Hello ", "[user] Go on [assistant] One, two "]), abs=1e-5)


@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_beyond_max_length_are_cut_counted_and_told_once(side, tmp_path, caplog):
    folder = save_model(tmp_path / "rm", CONFIGS["qwen2 with a pad token"]())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"truncation_side": side}))
    scorer, logged = opened(folder, max_length=20), []
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = scorer(PROMPTS, ANSWERS, lambda name, value: logged.append((name, value)))
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    kept = [text if "<" in text else text[:20] if side == "right" else text[-20:] for text in texts]
    assert found == pytest.approx(alone(folder, kept), abs=1e-5)
    assert logged == [("rm/truncated", pytest.approx(1 / 7))] * 2
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("reward `rm`: 1 of 7 rows are longer than the 20 tokens that the model reads, the longest has 124; their")


def test_a_frozen_copy_in_its_own_dtype_draws_no_random_number(folder):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    scorer = opened(folder, dtype="bfloat16", device="cpu")
    assert torch.equal(torch.random.get_rng_state(), before)
    model = scorer._model
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert weight_bytes(scorer.entry, trust_remote_code=False) == sum(parameter.nbytes for parameter in model.parameters())


# --- in the runner ---------------------------------------------------------------------------------------------------------------


def groups_of(chat):
    def content(text):
        return [{"role": "user", "content": text}] if chat else text

    return [
        Group(
            prompt=Prompt(row=p, content=content(prompt), text=prompt, token_ids=(1,), columns={"answer": "yes"}),
            completions=(Completion(token_ids=(1,), logprobs=(0.0,), finish_reason=FinishReason.STOPPED, weights_version=0),) * 2,
            texts=(ANSWERS[p], "yes"),
        )
        for p, prompt in enumerate(PROMPTS)
    ]


def collected(entries, chat, tmp_path):
    def open_model(entry, name, field):
        return open_reward_model(entry, name, field, template_kwargs={}, trust_remote_code=False)

    with RewardRunner(entries, code_dir=tmp_path, num_workers=1, log_dir=None) as runner:
        runner.start(open_model=open_model)
        runner.load_models()
        for key, group in enumerate(groups_of(chat)):
            runner.submit(key, group, TrainerState(step=1, max_steps=1))
        return runner.names, runner.collect()


@pytest.mark.parametrize("chat", [False, True])
def test_several_models_and_functions_score_side_by_side(chat, folder, tmp_path):
    other = save_model(tmp_path / "other", CONFIGS["llama without a pad token"](), with_pad=False, seed=1)
    entries = [
        RewardEntry(model=str(folder)),
        RewardEntry(function="exact_match_reward"),
        RewardEntry(model=str(other), name="second", batch_size=2),
    ]
    names, found = collected(entries, chat, tmp_path)
    assert names == (folder.name, "exact_match_reward", "second")
    for key, group in enumerate(groups_of(chat)):
        text = (
            (lambda answer: f"<|im_start|>user\n{group.prompt.text}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n")
            if chat
            else (lambda answer: group.prompt.text + answer)
        )
        texts = [text(answer) for answer in group.texts]
        first, exact, second = found[key].values
        assert list(first) == pytest.approx(alone(folder, texts), abs=1e-5)
        assert exact == (0.0, 1.0)
        assert list(second) == pytest.approx(alone(other, texts), abs=1e-5)
        assert found[key].metrics == {f"{folder.name}/truncated": 0.0, "second/truncated": 0.0}


def test_a_score_that_is_nan_is_the_error_of_any_reward(tmp_path):
    folder = save_model(tmp_path / "rm", CONFIGS["qwen2 with a pad token"]())
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        model.score.weight[0, 0] = float("nan")
    model.save_pretrained(folder)
    with pytest.raises(RewardError, match=r"reward `rm`: step 1, prompt row 0, completion 0: returned nan, not a finite float or None"):
        collected([RewardEntry(model=str(folder))], False, tmp_path)


# --- what is no reward model -----------------------------------------------------------------------------------------------------


def test_two_labels_are_refused(tmp_path):
    three = save_model(tmp_path / "three", Qwen2Config(**{**SIZES, "num_labels": 3}, pad_token_id=tiny.PAD))
    with pytest.raises(RecipeError, match=r"^rewards\[0\]\.model: .*three has 3 labels; a reward model has one"):
        opened(three)
    two = save_model(
        tmp_path / "two", Qwen2Config(**{**SIZES, "num_labels": 2}, pad_token_id=tiny.PAD)
    )  # which transformers does not write
    with pytest.raises(RecipeError, match=r"^rewards\[0\]\.model: .*two has score\.weight of shape \[2, 32\], .*\[1, 32\]"):
        opened(two)


def test_a_causal_language_model_is_refused(tmp_path):
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES, pad_token_id=tiny.PAD))
    model.save_pretrained(tmp_path)
    tiny.byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"^rewards\[0\]\.model: the files of .* lack 1 of the weights .* such as score\.weight"):
        opened(tmp_path)


def test_an_empty_folder_and_a_length_beyond_the_models_are_refused(folder, tmp_path):
    with pytest.raises(RecipeError, match=r"^rewards\[0\]\.model: "):
        opened(tmp_path)
    with pytest.raises(RecipeError, match=r"^rewards\[0\]\.max_length: 300 is beyond the 256 tokens"):
        opened(folder, max_length=300)


def test_prompts_with_images_are_no_text(folder):
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
    with pytest.raises(ValueError, match="has images, or content in parts"):
        opened(folder)([prompt], [[{"role": "assistant", "content": "x"}]], lambda name, value: None)
