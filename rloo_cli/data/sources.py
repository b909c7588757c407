"""From a data set's name to the rows of one of its splits: files, folders of files, saved `datasets` folders, hub ids."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from rloo_cli.data.hub import dataset_table, load_hub_table
from rloo_cli.data.problems import Problems, show_path
from rloo_cli.data.rows import ListRows, Rows, TableRows
from rloo_cli.data.text_files import READERS, TextFile
from rloo_cli.errors import DataError, RecipeError
from rloo_cli.recipe.schema import DataSection

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

SUFFIXES = (*READERS, ".parquet")
SHARD = re.compile(r"[-_.]\d+(-of-\d+)?$")
"""What a shard's file name adds to its split: `train-00000-of-00002`, `train_1`."""
GIB = 1 << 30
PIECE_ROWS = 1024
MEMORY_SHARE = 0.5
"""Of the free memory, what a split may take."""
TOO_LARGE = "Read fewer rows (data.max_train_samples), or save it by `datasets`' save_to_disk, which is read where it lies."
SINGLE_SPLIT = "train"
"""The only split of a file or of a saved `Dataset`, by the convention of `datasets`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlace:
    """Where a split lies."""

    kind: Literal["files", "saved", "hub"]
    name: str
    """The split in messages."""
    paths: tuple[Path, ...] = ()
    """Its files in order, or the saved folder."""


def locate_split(data: DataSection, split: str) -> SplitPlace:
    """Where a split lies; whether the hub has it is not asked.

    Raises:
        RecipeError: the data set, its configuration or the split does not exist.
    """
    assert data.dataset_name is not None
    path = Path(data.dataset_name).expanduser()
    if path.is_dir():
        return _locate_in_folder(_with_config(path, data.dataset_config), split)
    if path.is_file():
        if data.dataset_config is not None:
            raise RecipeError(f"data.dataset_config: {show_path(path)} is a file and has no configurations; remove the field.")
        _check_split(split, [SINGLE_SPLIT], show_path(path))
        return SplitPlace(kind="files", name=show_path(path), paths=(path,))
    if path.exists():
        raise RecipeError(f"data.dataset_name: {show_path(path)} is a pipe or a device; rows are read from files.")
    if _looks_like_path(data.dataset_name):
        raise RecipeError(f"data.dataset_name: no such file or folder: {data.dataset_name}")
    return SplitPlace(kind="hub", name=f"{data.dataset_name}:{split}")


def read_split(data: DataSection, split: str, problems: Problems, *, limit: int | None) -> Rows:
    """The first `limit` rows of a split; text lines that hold no row are noted in `problems`.

    Raises:
        RecipeError: the data set, its configuration or the split does not exist.
        DataError: a file cannot be read.
    """
    place = locate_split(data, split)
    if place.kind == "files":
        return _read_files(place.paths, data, problems, limit)
    if place.kind == "saved":
        return TableRows(load_saved_table(place.paths[0], place.name).slice(0, limit), place.name)
    assert data.dataset_name is not None
    table = load_hub_table(data.dataset_name, config=data.dataset_config, split=split)
    return TableRows(table.slice(0, limit), place.name)


def source_name(data: DataSection, split: str) -> str:
    """The split as messages name it: the file, or `folder:split`, or `hub-id:split`."""
    assert data.dataset_name is not None
    path = Path(data.dataset_name).expanduser()
    if path.is_file():
        return show_path(path)
    config = f"/{data.dataset_config}" if data.dataset_config else ""
    return f"{show_path(path) if path.is_dir() else data.dataset_name}{config}:{split}"


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.endswith(SUFFIXES) or name.count("/") != min(name.count("/"), 1) or "\\" in name


def _with_config(folder: Path, config: str | None) -> Path:
    """The folder of a configuration, as clones of hub data sets have them (`main/`, `socratic/`)."""
    if config is None:
        return folder
    if not (folder / config).is_dir():
        raise RecipeError(f"data.dataset_config: {show_path(folder)} has no folder `{config}`.")
    return folder / config


def _locate_in_folder(folder: Path, split: str) -> SplitPlace:
    if (folder / "dataset_dict.json").is_file():
        names = _read_json_object(folder / "dataset_dict.json").get("splits")
        _check_split(split, names if isinstance(names, list) else [], show_path(folder))
        return SplitPlace(kind="saved", name=f"{show_path(folder)}:{split}", paths=(folder / split,))
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        _check_split(split, [SINGLE_SPLIT], show_path(folder))
        return SplitPlace(kind="saved", name=show_path(folder), paths=(folder,))
    files = _files_by_split(folder)
    if not files:
        raise RecipeError(
            f"data.dataset_name: {show_path(folder)} holds no data: expected files such as train.jsonl ({', '.join(SUFFIXES)})."
        )
    _check_split(split, list(files), show_path(folder))
    name = show_path(files[split][0]) if len(files[split]) == 1 else f"{show_path(folder)}:{split}"
    return SplitPlace(kind="files", name=name, paths=tuple(files[split]))


def _files_by_split(folder: Path) -> dict[str, list[Path]]:
    """Split → its files in order, from the folder itself and its `data/`; the split is the file's name without a shard number."""
    found: dict[str, list[Path]] = {}
    for place in (folder, folder / "data"):
        for path in sorted(place.glob("*")):
            if path.suffix in SUFFIXES and path.is_file() and not path.name.startswith((".", "_")) and path.name != "dataset_infos.json":
                found.setdefault(SHARD.sub("", path.stem), []).append(path)
    return found


def _check_split(split: str, available: Sequence[str], where: str) -> None:
    if split in available:
        return
    near = get_close_matches(split, available, n=1)
    hint = f" Did you mean `{near[0]}`?" if near else ""
    raise RecipeError(f"data: {where} has no split `{split}`; it has: {', '.join(sorted(available)) or 'none'}.{hint}")


def _read_files(paths: Sequence[Path], data: DataSection, problems: Problems, limit: int | None) -> Rows:
    suffixes = sorted({path.suffix for path in paths})
    if len(suffixes) > 1:
        raise RecipeError(
            f"data.dataset_name: {show_path(paths[0])} and its {', '.join(suffixes)} siblings are the same split; keep one format."
        )
    if suffixes == [".parquet"]:
        return _read_parquet(paths, limit)
    if suffixes[0] not in READERS:
        raise RecipeError(
            f"data.dataset_name: {show_path(paths[0])}: cannot read {suffixes[0] or 'a file without extension'}; {', '.join(SUFFIXES)} can be read."
        )
    if limit is None:
        _refuse_beyond_memory(paths)
    rows = ListRows()
    for path in paths:
        TextFile(path=path, name=show_path(path), rows=rows, problems=problems, prompt_column=data.prompt_column, limit=limit).read()
    return rows


def _refuse_beyond_memory(paths: Sequence[Path]) -> None:
    """Raise DataError for text files whose rows would not fit: they take at least as much as their text."""
    size, memory = sum(path.stat().st_size for path in paths), psutil.virtual_memory().available
    if size > memory * MEMORY_SHARE:
        raise DataError(f"{show_path(paths[0])}: {size / GIB:.1f} GiB of text; {memory / GIB:.1f} GiB of memory are free. {TOO_LARGE}")


def _read_parquet(paths: Sequence[Path], limit: int | None) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    name = show_path(paths[0]) if len(paths) == 1 else f"{show_path(paths[0].parent)}:{SHARD.sub('', paths[0].stem)}"
    tables: list[pa.Table] = []
    for path in paths:
        left = None if limit is None else limit - sum(table.num_rows for table in tables)
        try:
            tables.append(_parquet_table(pq.ParquetFile(path), show_path(path), left))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{show_path(path)}: not a readable Parquet file: {str(error).splitlines()[0]}") from error
    try:
        table = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise DataError(f"{name}: its files have columns of different types: {str(error).splitlines()[0]}") from error
    return TableRows(table.slice(0, limit), name)


def _parquet_table(file: pq.ParquetFile, name: str, limit: int | None) -> pa.Table:
    """The first `limit` rows, read a piece at a time: a kilobyte of Parquet can hold a terabyte of zeros, and its footer need not say so.

    Raises:
        DataError: they do not fit into memory.
    """
    import pyarrow as pa

    memory = psutil.virtual_memory().available
    pieces, rows, size = [], 0, 0
    for piece in file.iter_batches(batch_size=PIECE_ROWS):
        piece.validate(full=True)
        pieces.append(piece)
        rows, size = rows + piece.num_rows, size + piece.nbytes
        if size > memory * MEMORY_SHARE:
            raise DataError(f"{name}: holds more than {size / GIB:.1f} GiB; {memory / GIB:.1f} GiB of memory are free. {TOO_LARGE}")
        if limit is not None and rows >= limit:
            break
    return pa.Table.from_batches(pieces, file.schema_arrow)


def load_saved_table(folder: Path, name: str) -> pa.Table:
    """The table of a saved `datasets` folder, memory-mapped. Raises DataError where it cannot be read."""
    import datasets
    import pyarrow as pa

    try:
        table = dataset_table(datasets.load_from_disk(str(folder)))
        table.validate(full=True)  # offsets that point outside the mapped file would end the process without a word
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise DataError(
            f"{name}: this saved data set cannot be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error
    return table


def _read_json_object(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{show_path(path)}: not JSON: {error}") from error
    return value if isinstance(value, dict) else {}
