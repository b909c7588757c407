from dataclasses import dataclass, field

from datasets import load_dataset
from trl import ModelConfig, RLOOConfig, RLOOTrainer, ScriptArguments, TrlParser, get_peft_config


@dataclass
class Extra:
    target: str = field(default="yes", metadata={"help": "The word to say."})


def says_it(completions, **kwargs):
    return [float("yes" in str(c)) for c in completions]


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, RLOOConfig, ModelConfig, Extra))
    script_args, training_args, model_args, extra = parser.parse_args_and_config()
    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    trainer = RLOOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=says_it,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
