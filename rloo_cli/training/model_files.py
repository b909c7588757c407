"""A plain transformers folder: what goes beside the weights, and the weights, written as they come, one tensor in memory at a time."""

from __future__ import annotations

import copy
import json
import weakref
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightTransform, revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from rloo_cli.data.adapter_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rloo_cli.run.atomic import AtomicFolder, write_json
from rloo_cli.run.manifest import Bytes
from rloo_cli.run.tensors import safetensors_head, safetensors_stream, tensor_bytes
from rloo_cli.training.adapter import adapter_document, is_adapted

FILE_BYTES = 5_000_000_000
"""Of a file of weights at most, but for a single larger tensor; what hubs and copying programs are used to."""
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
METADATA = {"format": "pt"}
"""Which library's tensors they are; transformers wants to be told."""

Named = tuple[str, torch.Tensor]


def save_description(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: torch.dtype | None = None,
    beside: Sequence[Path] = (),
) -> None:
    """Write all of a transformers folder but the weights: configuration, generation configuration, tokenizer, code of the model's own; with
    an adapter in the model its configuration too.

    `dtype`: of the weights that go with it; None: the model's. `beside`: files that are copied (a processor's).
    """
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype or model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # fully_shard gives the class another name
    folder.mkdir(exist_ok=True)
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    copy_files(beside, folder)
    if is_adapted(model):
        write_json(folder / ADAPTER_CONFIG, adapter_document(model))


def copy_files(files: Sequence[Path], folder: Path) -> None:
    """Copy files into a folder, under their names."""
    for path in files:
        (folder / path.name).write_bytes(path.read_bytes())


def write_adapter(files: AtomicFolder, document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> int:
    """Write an adapter as peft has it, the document its configuration; bytes of its weights.

    Raises:
        StorageError: it could not be written.
    """
    files.write_json(ADAPTER_CONFIG, document)
    size, stream = safetensors_stream(tensors, METADATA)
    files.write(ADAPTER_WEIGHTS, stream, size=size)
    return size


def as_published(model: PreTrainedModel | None, tensors: Iterable[Named]) -> Iterator[Named]:
    """A model's tensors under the names, and cut up as, its kind is published with; tied ones once, under their first name.

    transformers keeps some models otherwise than their files are, such as the experts of a layer in one tensor. A kind for which it would
    have to join several of its tensors stays as it has it, which it reads as well; so does one that is not known (None).
    """
    is_cut_up = model is not None and all(
        len(each.target_patterns) == 1 for each in _conversions(model) if isinstance(each, WeightConverter)
    )
    last: weakref.ref[torch.Tensor] | None = None  # a large tensor goes before the next comes
    for name, tensor in tensors:
        if last is None or last() is not tensor:
            last = weakref.ref(tensor)
            yield from sorted(revert_weight_conversion(model, {name: tensor}).items()) if is_cut_up else [(name, tensor)]
        del tensor


def _conversions(model: PreTrainedModel) -> list[WeightTransform]:
    """How the tensors of files become the model's."""
    return getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is written where; its tensors have no data."""

    files: list[dict[str, torch.Tensor]]
    """Tensors of the type that most of the weights have, in the order in which they come."""
    others: dict[str, torch.Tensor]
    """Those of other types, few and small, for a file of their own, since they would begin at odd places."""
    dtype: torch.dtype
    """Of `files`."""

    @property
    def size(self) -> int:
        """In bytes, without headers."""
        return sum(tensor.nbytes for tensors in (*self.files, self.others) for tensor in tensors.values())


def plan_weights(tensors: Iterable[Named], limit: int = FILE_BYTES) -> Plan:
    """How tensors go into files of at most `limit` bytes; it looks at shapes and types alone."""
    planned = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors}
    bytes_of = Counter[torch.dtype]()
    for tensor in planned.values():
        bytes_of[tensor.dtype] += tensor.nbytes
    dtype = bytes_of.most_common(1)[0][0]
    files: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in planned.items():
        if tensor.dtype != dtype:
            continue
        if files[-1] and size + tensor.nbytes > limit:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
    return Plan(files=files, others={name: tensor for name, tensor in planned.items() if tensor.dtype != dtype}, dtype=dtype)


def write_weights(files: AtomicFolder, plan: Plan, tensors: Iterable[Named]) -> None:
    """Write weights as they were planned, from tensors that come in the order in which they did then.

    Raises:
        StorageError: it could not be written; the tensors were then not taken to their end.
    """
    others: dict[str, torch.Tensor] = {}
    coming = _set_aside(tensors, plan.others, others)
    contents = [*plan.files, *([plan.others] if plan.others else [])]
    names = [f"model-{n:05d}-of-{len(contents):05d}.safetensors" for n in range(1, len(contents) + 1)] if len(contents) > 1 else [ONE_FILE]
    for name, planned in zip(names, plan.files, strict=False):
        head, size = safetensors_head(planned, METADATA)
        files.write(name, _content(head, planned, coming), size=len(head) + size)
    for late, _ in coming:
        raise RuntimeError(f"{late} was not planned")
    if others:
        size, stream = safetensors_stream(others, METADATA)
        files.write(names[-1], stream, size=size)
    if len(contents) > 1:
        weight_map = {tensor: name for name, planned in zip(names, contents, strict=True) for tensor in planned}
        files.write(INDEX, json.dumps({"metadata": {"total_size": plan.size}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n")


def _set_aside(tensors: Iterable[Named], wanted: Container[str], kept: dict[str, torch.Tensor]) -> Iterator[Named]:
    """The tensors but those wanted, which are copied into `kept`."""
    for name, tensor in tensors:
        if name in wanted:
            kept[name] = tensor.detach().to("cpu", copy=True)
        else:
            yield name, tensor
        del tensor


def _content(head: bytes, planned: dict[str, torch.Tensor], coming: Iterator[Named]) -> Iterator[Bytes]:
    yield head
    for name, meta in planned.items():
        found, tensor = next(coming, ("nothing", meta))
        if (found, tensor.shape, tensor.dtype) != (name, meta.shape, meta.dtype):
            raise RuntimeError(f"{found} came where {name} was planned")
        yield tensor_bytes(tensor)
        del tensor
