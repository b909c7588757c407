"""Looks data sets up on the hub, and notices quickly when there is no hub to look at."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rloo_cli.errors import DataError, RecipeError

if TYPE_CHECKING:
    import pyarrow as pa

PROBE_SECONDS = 5.0
"""How long the hub may take to answer at all. Without this question the libraries retry each file for 23 seconds on a machine without network."""


@functools.cache
def hub_answers() -> bool:
    """Whether the hub sends any HTTP response within `PROBE_SECONDS`; asked once a process, at the first name that is not local.

    When it does not, the process goes offline as `HF_HUB_OFFLINE=1` would have it: everything is then taken from the local
    cache, at once, or not at all.
    """
    from huggingface_hub import constants, get_session, is_offline_mode
    from huggingface_hub.errors import HTTPError

    if is_offline_mode():
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS)
    except HTTPError:
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
        return False
    return True


def hub_state() -> str:
    """Half a sentence for messages: what was looked at."""
    return (
        "the hub has none that this account may read"
        if hub_answers()
        else "the hub does not answer (or is switched off) and the local cache has none"
    )


def load_hub_table(name: str, *, config: str | None, split: str) -> pa.Table:
    """The split of a hub data set, memory-mapped from the local cache, downloaded before if need be.

    Raises:
        RecipeError: no such data set, configuration or split, or the hub cannot be reached and the cache has no copy.
        DataError: its files cannot be read.
    """
    return dataset_table(_load(name, config=config, split=split, streaming=False))


def stream_hub_tables(name: str, *, config: str | None, split: str, rows: int) -> Iterator[pa.Table]:
    """The split of a hub data set, `rows` rows at a time as they arrive; nothing of it is kept on disk. Raises as `load_hub_table`."""
    from huggingface_hub.errors import HTTPError

    dataset = _load(name, config=config, split=split, streaming=True)
    try:
        yield from dataset.with_format("arrow").iter(batch_size=rows)
    except (OSError, HTTPError, ValueError) as error:
        raise DataError(f"{name}: cannot be downloaded or read: {_first_line(error)}") from error


def _load(name: str, *, config: str | None, split: str, streaming: bool) -> Any:
    answers = hub_answers()
    import datasets
    from datasets.exceptions import DatasetNotFoundError, DatasetsError
    from huggingface_hub.errors import HTTPError

    datasets.config.HF_HUB_OFFLINE = not answers  # read from the environment when `datasets` was imported, maybe before the probe
    try:
        return datasets.load_dataset(name, config, split=split, streaming=streaming)
    except (DatasetNotFoundError, ConnectionError, FileNotFoundError) as error:
        raise RecipeError(f"data.dataset_name: no data set `{name}`: no such file or folder, and {hub_state()}.") from error
    except DatasetsError as error:
        raise DataError(f"{name}: {_first_line(error)}") from error
    except (ValueError, RuntimeError) as error:  # unknown configuration or split; the message lists those that exist
        raise RecipeError(f"data.dataset_name: `{name}`, split `{split}`: {_first_line(error)}") from error
    except (OSError, HTTPError) as error:
        raise DataError(f"{name}: cannot be downloaded or read: {_first_line(error)}") from error


def dataset_table(dataset: object) -> pa.Table:
    """The Arrow table of a `datasets.Dataset`, selected rows applied, images and audio left undecoded."""
    import pyarrow as pa

    table = dataset.with_format("arrow")[:]  # type: ignore[attr-defined]
    assert isinstance(table, pa.Table)
    return table


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
