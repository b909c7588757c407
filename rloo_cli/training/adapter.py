"""LoRA: a small trained adapter inside a model that stays as it is. The one module that imports peft.

The model remains a transformers model; peft's layers stand where the adapted ones were, each with the frozen layer in it:

    h = W x + s · B A x        s = lora_alpha / r, or lora_alpha / √r with use_rslora

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685, section 4.1; Kalajdzievski 2023, arXiv
2312.03732, for the other scale. B begins as zero, so that a new adapter changes nothing, to the bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.func import functional_call
from transformers import PreTrainedConfig, PreTrainedModel

from rloo_cli.data.adapter_folder import ADAPTER_WEIGHTS, adapter_folder, base_of
from rloo_cli.data.model_folder import reason_of
from rloo_cli.data.model_kind import model_class
from rloo_cli.errors import RecipeError
from rloo_cli.recipe.schema import ModelSection
from rloo_cli.training.microbatches import ScoringBatch
from rloo_cli.training.parts import aliased
from rloo_cli.training.skeleton import without_weights

if TYPE_CHECKING:
    from peft import LoraConfig

    from rloo_cli.training.policy import Policy

NAME = "default"
"""peft's name of the only adapter."""
ALL_LINEAR = "all-linear"
"""peft's word for every linear layer but the LM head."""
# fmt: off
UNDERSTOOD = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "modules_to_save", "peft_type", "peft_version",
    "r", "rank_pattern", "revision", "target_modules", "task_type", "use_rslora",
})
# fmt: on
"""Fields of an adapter's configuration that may differ from peft's defaults: with others it computes something else than B A x."""


def is_adapted(model: torch.nn.Module) -> bool:
    """Whether an adapter is trained in it."""
    return hasattr(model, "peft_config")


def add_adapter(model: PreTrainedModel, section: ModelSection, *, seed: int) -> PreTrainedModel:
    """The same model with the recipe's adapter in it, or with the one whose folder the recipe names; nothing else of it is trained any more.

    The adapter is float32 whatever the model is held in.

    Raises:
        RecipeError: the model has no such modules, or they cannot be adapted; the adapter's files do not fit.
    """
    folder, base = adapter_folder(section), base_of(section)
    config = _new_config(section) if folder is None else read_config(folder)
    path = Path(base.model_name_or_path).expanduser()
    inject(model, config, seed=seed)
    config.base_model_name_or_path = str(path.resolve()) if path.is_dir() else base.model_name_or_path
    config.revision = base.model_revision
    if folder is None:
        _refuse_unknown(model, section)
    else:
        _load(model, folder)
    return model


def _new_config(section: ModelSection) -> LoraConfig:
    from peft import LoraConfig

    targets = section.lora_target_modules
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=section.lora_r,
        lora_alpha=section.lora_alpha,
        lora_dropout=section.lora_dropout,
        target_modules=ALL_LINEAR if targets == [ALL_LINEAR] else targets or None,
        modules_to_save=section.lora_modules_to_save or None,
        use_rslora=section.use_rslora,
    )


def read_config(folder: Path) -> LoraConfig:
    """The configuration of an adapter that exists already; RecipeError for one of a kind that is not trained here."""
    from peft import LoraConfig

    try:
        config = LoraConfig.from_pretrained(str(folder))
    except (TypeError, ValueError, KeyError) as error:
        raise RecipeError(f"model.model_name_or_path: {folder}: its adapter_config.json cannot be read: {reason_of(error)}") from error
    usual = LoraConfig().to_dict()
    odd = [name for name, value in config.to_dict().items() if name not in UNDERSTOOD and value != usual.get(name)]
    if odd:
        raise RecipeError(f"model.model_name_or_path: {folder}: an adapter with `{odd[0]}`, a kind that is not trained here.")
    config.inference_mode = False
    return config


def inject(model: PreTrainedModel, config: LoraConfig, *, seed: int) -> None:
    """Put an adapter that changes nothing into the model; RecipeError where it does not go there."""
    from peft import get_peft_model

    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is model.get_input_embeddings().weight
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of settings that peft corrects itself
            torch.manual_seed(seed)
            get_peft_model(model, config)
    except ValueError as error:
        raise RecipeError(f"model.lora_target_modules: {reason_of(error).removeprefix('[PEFT:PeftType.LORA] ')}") from error
    _refuse_unfit(model, is_tied=is_tied)


def _refuse_unfit(model: PreTrainedModel, *, is_tied: bool) -> None:
    """Raise RecipeError for an adapter in, or a copy of, what cannot have one."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    head = model.get_output_embeddings()
    if isinstance(head, BaseTunerLayer):
        raise RecipeError(
            "model.lora_target_modules: the LM head cannot be adapted; train a copy of it: `lora_modules_to_save: [lm_head]`."
        )
    ends = (model.get_input_embeddings(), head)
    for kind, field in ((BaseTunerLayer, "lora_target_modules"), (AuxiliaryTrainingWrapper, "lora_modules_to_save")):
        if is_tied and any(isinstance(end, kind) for end in ends):
            raise RecipeError(
                f"model.{field}: this model's embeddings and LM head are one matrix (tie_word_embeddings); neither can be trained apart from "
                "the other. Leave both out."
            )


def _refuse_unknown(model: PreTrainedModel, section: ModelSection) -> None:
    """Raise RecipeError for a name that no module has; peft passes over it where another has one."""
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    asked = {
        "lora_target_modules": (LoraLayer, section.lora_target_modules),
        "lora_modules_to_save": (ModulesToSaveWrapper, section.lora_modules_to_save),
    }
    for field, (kind, wanted) in asked.items():
        there = [name for name, module in model.named_modules() if isinstance(module, kind)]
        for name in wanted:
            if name != ALL_LINEAR and not any(f".{own}".endswith(f".{name}") for own in there):
                raise RecipeError(f"model.{field}: this model has no module `{name[:60]}`{_hint(there)}.")


def _hint(there: list[str]) -> str:
    kinds = sorted({name.rpartition(".")[2] for name in there})
    return f"; of those named it has {', '.join(kinds)}" if kinds else ""


def _load(model: PreTrainedModel, folder: Path) -> None:
    """Give the model's adapter the weights of a folder, all of them and no others."""
    path = folder / ADAPTER_WEIGHTS
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise RecipeError(f"model.model_name_or_path: {path}: damaged or cut off ({reason_of(error)}); fetch it again.") from error
    own = published(model)
    if odd := sorted(own.keys() ^ found.keys()):
        where = "has no" if odd[0] in own else "has, and the model has no,"
        raise RecipeError(f"model.model_name_or_path: {path}: the file {where} {odd[0]}: it is another model's adapter.")
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor.shape != found[name].shape:
                raise RecipeError(
                    f"model.model_name_or_path: {path}: {name} has another shape than the model's: it is another model's adapter."
                )
            tensor.copy_(found[name])


def adapter_size(config: PreTrainedConfig, section: ModelSection) -> int:
    """How many numbers the recipe's adapter has, counted on the meta device.

    Raises:
        RecipeError: as `add_adapter`.
    """
    with torch.device("meta"):
        model = model_class(config).from_config(config)
        add_adapter(model, section, seed=0)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def adapter_names(model: torch.nn.Module) -> frozenset[str]:
    """Names, in the model's own state dict, of what is trained."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def new_adapter_names(model: torch.nn.Module) -> frozenset[str]:
    """Names of the adapter's tensors where it is new: random numbers that say nothing of where the training began."""
    return adapter_names(model) if is_adapted(model) and changes_nothing(model) else frozenset()


def published(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The adapter's own tensors, by the names that peft gives them in files."""
    own = model.state_dict()
    return {name: own[ours] for ours, name in published_names(model).items()}


def published_names(model: PreTrainedModel) -> dict[str, str]:
    """Own name → name in peft's files, of each of the adapter's tensors."""
    from peft import get_peft_model_state_dict

    own = model.state_dict()
    ours = {id(tensor): name for name, tensor in own.items()}  # peft renames, and hands the tensors on
    named = get_peft_model_state_dict(model, state_dict=own, save_embedding_layers=False)
    return {ours[id(tensor)]: f"base_model.model.{name}" for name, tensor in named.items()}


def adapter_document(model: PreTrainedModel) -> dict[str, Any]:
    """The content of its adapter_config.json."""
    config = model.peft_config[NAME].to_dict()
    return {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()} | {"inference_mode": True}


def changes_nothing(model: torch.nn.Module) -> bool:
    """Whether the adapter, as it is now, leaves the model's function alone, as a new one does."""
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    for module in model.modules():
        if isinstance(module, LoraLayer):
            pairs = ((module.lora_A, module.lora_B), (module.lora_embedding_A, module.lora_embedding_B))
            if any(_any(first) and _any(second) for first, second in pairs):
                return False
        elif isinstance(module, ModulesToSaveWrapper):
            own = module.original_module.state_dict()
            if not all(torch.equal(own[name], tensor) for name, tensor in module.modules_to_save[NAME].state_dict().items()):
                return False
    return True


def _any(tensors: torch.nn.Module) -> bool:
    return any(bool(tensor.any()) for tensor in tensors.parameters())


# --- the model without its adapter, and with the adapter in its weights -----------------------------------------------------------


def plain_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a model without an adapter needs to compute the same, by the state-dict names of its kind; a tied one at each name.

    A model without an adapter gives its own. Else W + s · B A is formed of one layer at a time, in float32 at least, and never put into the model: what is trained is not touched by it.
    """
    places = _plain_places(model) if is_adapted(model) else {}
    layers = dict(model.named_modules())
    for names, tensor in aliased(model):
        kept = [places[name] for name in names if name in places] if places else [(name, None) for name in names]
        if kept:
            layer = kept[0][1]
            whole = tensor.detach() if layer is None else _merged(layers[layer], tensor)
            yield from ((plain, whole) for plain, _ in kept)
            del whole  # a large one goes before the next is made


@torch.no_grad()
def _merged(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    delta = layer.get_delta_weight(NAME)
    return delta + weight.to(torch.promote_types(weight.dtype, delta.dtype))


def _plain_places(model: torch.nn.Module) -> dict[str, tuple[str, str | None]]:
    """Own name → (name without an adapter, name of the layer whose adapted weight it is), of all that is not the adapter's own."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    kinds = {name: type(module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper)}
    places: dict[str, tuple[str, str | None]] = {}
    for name in model.state_dict():
        owner = next((parent for parent in _parents(name) if parent in kinds), None)
        if owner is None:
            places[name] = (name, None)
            continue
        copied = f"{owner}.modules_to_save.{NAME}."
        if name.startswith(f"{owner}.base_layer."):
            own = name.removeprefix(f"{owner}.base_layer.")
            places[name] = (f"{owner}.{own}", owner if own == "weight" else None)
        elif name.startswith(copied):
            places[name] = (f"{owner}.{name.removeprefix(copied)}", None)
    return places


def _parents(name: str) -> Iterator[str]:
    """`a.b.c` → `a`, `a.b`."""
    parts = name.split(".")
    return (".".join(parts[:i]) for i in range(1, len(parts)))


def plain_structure(model: PreTrainedModel) -> PreTrainedModel:
    """The model's kind without adapter and without weights, on the meta device, for whoever computes with a copy of its own."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    plain = without_weights(model)
    for name, module in list(plain.named_modules()):
        if isinstance(module, BaseTunerLayer):
            plain.set_submodule(name, module.get_base_layer())
        elif isinstance(module, ModulesToSaveWrapper):
            plain.set_submodule(name, module.original_module)
    del plain.peft_config
    return plain


# --- the reference ------------------------------------------------------------------------------------------------------------


def reference_of(policy: Policy) -> AdapterOff | InitialAdapter:
    """What scores as the policy does now, whatever is learnt: without a copy of the model."""
    return AdapterOff(policy) if changes_nothing(policy.model) else InitialAdapter(policy)


class AdapterOff:
    """Scores by the policy with its adapter switched off: the model as it was before an adapter that began by changing nothing."""

    def __init__(self, policy: Policy) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        self._policy = policy
        self._switches = [m for m in policy.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)]

    def __call__(self, batch: ScoringBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-prob, entropy) of every completion token, as the policy's own call gives them."""
        # peft's own switch would also turn requires_grad off and on, between the policy's forward and backward pass.
        with _evaluating(self._policy):
            try:
                for module in self._switches:
                    module._disable_adapters = True
                return self._policy(batch)
            finally:
                for module in self._switches:
                    module._disable_adapters = False


class InitialAdapter:
    """Scores by the policy with a copy of the adapter as it was when this was made: the start of an adapter that is trained on."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._initial: Mapping[str, torch.Tensor] = {
            name: parameter.detach().clone() for name, parameter in policy.named_parameters() if parameter.requires_grad
        }

    def __call__(self, batch: ScoringBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-prob, entropy) of every completion token, as the policy's own call gives them."""
        with _evaluating(self._policy):
            return functional_call(self._policy, dict(self._initial), (batch,))


@contextmanager
def _evaluating(policy: Policy) -> Iterator[None]:
    """Eval mode for the block: the reference draws no dropout."""
    was_training = policy.training
    policy.eval()
    try:
        yield
    finally:
        policy.train(was_training)
