"""YAML text in, a tree with the line and column of every key and value out. Nothing is interpreted here.

Scalars keep their text, because what a text means depends on the field: `no` is a word where a field takes words and a truth
value where it takes those; `1e-6` is a number. The tree is built from libyaml's events, so that aliases are never followed.

Refused, each with its place: aliases, anchors, tags, merge keys, duplicate keys, several documents, more than 20 levels.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from typing import Any

import yaml

from rloo_cli.recipe.nodes import Broken, Fields, Items, Node, Pair, Place, Problems, Scalar, printable

MAX_BYTES = 1 << 20
MAX_LEVELS = 20

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKind:
    """What a file is called in messages about its text."""

    name: str
    form: str = "YAML"


RECIPE = FileKind(name="a recipe")


# --- files -----------------------------------------------------------------------------------------------------------------------


class _Unreadable(Exception):
    """A file that is no recipe text: the reason, and where in the file."""

    def __init__(self, message: str, line: int = 0, column: int = 0) -> None:
        super().__init__(message)
        self.line, self.column = line, column


def read_text(path: str, problems: Problems, kind: FileKind = RECIPE) -> str | None:
    """The text of a recipe file, or of one of another kind, without a byte-order mark; None after a problem was noted."""
    try:
        return _decode(_read_bytes(path, kind), kind)
    except _Unreadable as error:
        problems.add(Place(printable(path, 300), error.line, error.column), "", str(error))
        return None


def _read_bytes(path: str, kind: FileKind) -> bytes:
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - Path(path) would normalise the name that the message shows
        if stat.S_ISDIR(mode):
            raise _Unreadable(f"is a folder; {kind.name} is one {kind.form} file.")
        if not stat.S_ISREG(mode):
            raise _Unreadable(f"is not a regular file; {kind.name} is one {kind.form} file.")
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise _Unreadable("no such file.") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise _Unreadable(f"cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def _decode(data: bytes, kind: FileKind) -> str:
    if len(data) > MAX_BYTES:
        raise _Unreadable(f"is larger than 1 MiB; {kind.name} is a short {kind.form} file.")
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise _Unreadable("is UTF-16; save it as UTF-8.")
    if b"\0" in data:
        raise _Unreadable(f"is not a text file (it holds NUL bytes); {kind.name} is {kind.form} in UTF-8.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise _Unreadable(f"byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8.", line, column) from None


# --- text to tree ----------------------------------------------------------------------------------------------------------------


def parse(text: str, origin: str, problems: Problems, *, positions: bool = True, kind: FileKind = RECIPE) -> Node | None:
    """The tree of the one document in `text`; None where it is empty or cannot be read (a problem is noted then).

    Without `positions` every place is the origin itself: for values from the command line.
    """
    reader = _TreeReader(origin, problems, positions, kind)
    try:
        text.encode("utf-8")
        for event in yaml.parse(text, Loader=_LOADER):
            if not reader.take(event):
                return None
    except yaml.YAMLError as error:
        problems.add(*_syntax_problem(error, text, origin, positions))
        return None
    except UnicodeEncodeError:
        problems.add(Place(origin), "", "is not UTF-8.")
        return None
    return reader.root


def _syntax_problem(error: yaml.YAMLError, text: str, origin: str, positions: bool) -> tuple[Place, str, str]:
    if isinstance(error, yaml.reader.ReaderError):
        before = text.encode("utf-8")[: max(error.position, 0)].decode("utf-8", "ignore")
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
        message = "a control character stands here; YAML allows none."
    else:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        message = _syntax_words(getattr(error, "problem", None) or "cannot be read", getattr(error, "context", None))
    return Place(origin, line, column) if positions else Place(origin), "", message


def _syntax_words(problem: str, context: str | None) -> str:
    if "cannot start any token" in problem:
        return r"a tab or a reserved character (` @ %) cannot begin a YAML value: indent with spaces, put other text in quotes."
    if "maximum nesting depth" in problem:  # libyaml looks ahead and has a limit of its own
        return f"more than {MAX_LEVELS} levels of nesting."
    if "mapping values are not allowed" in problem:
        return "not YAML: a second `: ` on one line, or a wrong indent. Put a text that holds a colon in quotes."
    return f"not YAML: {problem}{f' ({context})' if context else ''}."


@dataclass(slots=True)
class _Frame:
    """A collection that is still open."""

    place: Place
    is_map: bool
    broken: bool
    items: list[Node] = field(default_factory=list)
    pairs: dict[str, Pair] = field(default_factory=dict)
    key: tuple[str, Place] | None = None
    """Of a mapping: the key whose value comes next; its text is None-like ("\0") where the key was refused."""

    def close(self) -> Node:
        if self.broken:
            return Broken(self.place)
        return Fields(self.place, self.pairs) if self.is_map else Items(self.place, tuple(self.items))


_REFUSED_KEY = "\0"


@dataclass(slots=True)
class _TreeReader:
    """Builds the tree from events, without recursion."""

    origin: str
    problems: Problems
    positions: bool
    kind: FileKind
    root: Node | None = None
    stack: list[_Frame] = field(default_factory=list)
    documents: int = 0

    def take(self, event: yaml.Event) -> bool:
        """Take one event; False = stop, the rest cannot be read in bounded time or sense."""
        if isinstance(event, yaml.DocumentStartEvent):
            self.documents += 1
            if self.documents > 1:
                self.problems.add(self._place(event), "", f"a second YAML document begins here; {self.kind.name} is one.")
                return False
        elif isinstance(event, yaml.AliasEvent):
            self.problems.add(self._place(event), "", f"aliases (*{printable(str(event.anchor))}) are refused; write the value out.")
            self._put(Broken(self._place(event)), None)
        elif isinstance(event, yaml.ScalarEvent):
            self._take_scalar(event)
        elif isinstance(event, yaml.CollectionStartEvent):
            return self._open(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._put(self.stack.pop().close(), None)
        return True

    def _place(self, event: yaml.Event) -> Place:
        if not self.positions:
            return Place(self.origin)
        mark: Any = event.start_mark
        return Place(self.origin, mark.line + 1, mark.column + 1)

    def _is_plain_node(self, event: Any, place: Place) -> bool:
        """Whether the node has neither tag nor anchor; else the problem is noted."""
        if event.tag is not None:
            self.problems.add(place, "", f"YAML tags ({printable(event.tag)}) are refused; {self.kind.name} is plain data.")
        if event.anchor is not None:
            self.problems.add(place, "", f"anchors (&{printable(event.anchor)}) are refused; write the value out where it is needed.")
        return event.tag is None and event.anchor is None

    def _take_scalar(self, event: yaml.ScalarEvent) -> None:
        place = self._place(event)
        is_plain = event.style in (None, "")
        if self._is_plain_node(event, place):
            self._put(Scalar(place, event.value, is_plain), event.value)
        else:
            self._put(Broken(place), None)

    def _open(self, event: yaml.CollectionStartEvent) -> bool:
        place = self._place(event)
        if len(self.stack) == MAX_LEVELS:
            self.problems.add(place, "", f"more than {MAX_LEVELS} levels of nesting.")
            return False
        broken = not self._is_plain_node(event, place)
        self.stack.append(_Frame(place, isinstance(event, yaml.MappingStartEvent), broken))
        return True

    def _put(self, node: Node, text: str | None) -> None:
        """Hand a finished node to the collection around it; `text` is that of a scalar, which may be a key."""
        if not self.stack:
            self.root = node
            return
        frame = self.stack[-1]
        if not frame.is_map:
            frame.items.append(node)
        elif frame.key is None:
            frame.key = (self._key(frame, node, text), node.place)
        else:
            key, key_place = frame.key
            frame.key = None
            if key != _REFUSED_KEY:
                frame.pairs[key] = Pair(key_place, node)

    def _key(self, frame: _Frame, node: Node, text: str | None) -> str:
        if text is None or text == _REFUSED_KEY:
            if not isinstance(node, Broken):
                self.problems.add(node.place, "", "a key is one plain word.")
            return _REFUSED_KEY
        if text == "<<":
            instead = "`extends: other.yaml` takes a whole recipe over" if self.kind is RECIPE else "write the values out"
            self.problems.add(node.place, "", f"merge keys (<<) are refused; {instead}.")
            return _REFUSED_KEY
        if text in frame.pairs:
            first = frame.pairs[text].key_place
            where = f" (first on line {first.line})" if first.line else ""
            self.problems.add(node.place, "", f"the key `{printable(text)}` stands twice{where}.")
            return _REFUSED_KEY
        return text
