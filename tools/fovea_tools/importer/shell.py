"""Words of a shell script, as far as settings are written in them: quotes, line breaks, variables and arithmetic.

No command of the script is run, and only a few harmless environment variables are read. A setting whose value only a
run of the script would give (`$(...)`, a variable that is never set or set to different values) becomes `Unread`.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from fovea_gym.errors import ConfigError
from fovea_tools.importer.interpolation import SHOWN_VARIABLES, Unread

MOST_FILLED = 1_000_000
"""Largest number of characters that all expanded variables of a script have together; each may double another's."""
_MOST_NESTED = 30
"""Largest depth of defaults within defaults: `${A:-${B:-...}}`."""
_SHOWN = 60
"""Number of characters of a sum or a default that an error shows."""
_WORD_END = " \t\n;&|()"
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
_PARAMETER = re.compile(r"(?P<name>\w+|[@*#?])(?::?(?P<sign>[-=])(?P<default>.*))?", re.DOTALL)
_NAME = re.compile(r"\w+|[@*#?]")
_SUMS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A word of a script after its variables are expanded."""

    text: str
    line: int
    unread: str = ""
    """Reason why a part of the text is unknown; empty if all of it is known."""


def words_of(script: str) -> list[Word]:
    """The words of all commands of a script in order; an assignment takes effect for the words after it.

    Raises ConfigError for variables that expand to too many characters, and for defaults that are nested too deeply.
    """
    return list(_Reader(script).words())


@dataclass(slots=True)
class _Reader:
    script: str
    at: int = 0
    variables: dict[str, str | Unread] = field(default_factory=dict)
    depth: int = 0
    num_filled: int = 0

    def words(self) -> Iterator[Word]:
        while self.at < len(self.script):
            if self.script.startswith("\\\n", self.at):
                self.at += 2
            elif self.script[self.at] in _WORD_END:
                self.at += 1
            elif self.script[self.at] == "#":
                self.at = self._find("\n", self.at)
            else:
                word = self._word()
                self._assign(word)
                yield word

    def _word(self) -> Word:
        line, pieces = self.script.count("\n", 0, self.at) + 1, list[str | Unread]()
        while self.at < len(self.script) and self.script[self.at] not in _WORD_END:
            if self.script.startswith("\\\n", self.at):
                break
            pieces.extend(self._piece())
        unread = next((piece.reason for piece in pieces if isinstance(piece, Unread)), "")
        text = "".join(piece.text if isinstance(piece, Unread) else piece for piece in pieces)
        return Word(text=text, line=line, unread=unread)

    def _piece(self) -> Iterator[str | Unread]:
        """Read the piece that begins at the current character: a quoted text, an expansion, or one character."""
        first = self.script[self.at]
        if first == "'":
            end = self._find("'", self.at + 1)
            yield self.script[self.at + 1 : end]
            self.at = end + 1
        elif first == '"':
            self.at += 1
            while self.at < len(self.script) and self.script[self.at] != '"':
                yield from self._plain(escapes='"\\$`\n')
            self.at += 1
        else:
            yield from self._plain(escapes=None)

    def _plain(self, escapes: str | None) -> Iterator[str | Unread]:
        first, second = self.script[self.at], self.script[self.at + 1 : self.at + 2]
        if first == "\\" and (escapes is None or second in escapes):
            self.at += 2
            yield "" if second == "\n" else second
        elif first == "$" and (second in ("(", "{") or _NAME.match(second)):
            self.at += 1
            yield self._expansion()
        elif first == "`":
            yield self._command("`", "`")
        else:
            self.at += 1
            yield first

    def _expansion(self) -> str | Unread:
        if self.script.startswith("((", self.at):
            end = self._find("))", self.at)
            inner, self.at = self.script[self.at + 2 : end], end + 2
            return self._sum(inner)
        if self.script[self.at] == "(":
            return self._command("(", ")")
        if self.script[self.at] == "{":
            end = self._closing_brace()
            inner, self.at = self.script[self.at + 1 : end], end + 1
            return self._parameter(inner)
        name = _NAME.match(self.script, self.at)
        assert name is not None
        self.at = name.end()
        return self._parameter(name[0])

    def _parameter(self, inner: str) -> str | Unread:
        """The value of `NAME`, `NAME:-default` or `1`; `@` and `*`, the script's arguments, are empty."""
        found = _PARAMETER.fullmatch(inner)
        if found is None:
            if inner.endswith(("[@]", "[*]")):  # an array; its words were read at its definition
                return ""
            return Unread(text=f"${{{inner}}}", reason=f"${{{inner}}} is not a supported expansion")
        if found["name"] in {"@", "*"}:
            return ""
        known = self.variables.get(found["name"])
        if known is None and found["name"] in SHOWN_VARIABLES:
            known = os.environ.get(found["name"])
        if known is not None:
            return self._counted(known, found["name"])
        if found["sign"]:
            return self._filled(found["default"])
        in_environment = found["name"] in os.environ
        seen = "only in the environment, and a recipe must not show it" if in_environment else "nowhere"
        return Unread(text=f"${inner}", reason=f"${inner} is set {seen}")

    def _counted(self, value: str | Unread, name: str) -> str | Unread:
        """The value of a variable; ConfigError if all expanded values together are too long."""
        self.num_filled += len(value.text if isinstance(value, Unread) else value)
        if self.num_filled > MOST_FILLED:
            raise ConfigError(f"${name}: variables expand to more than {MOST_FILLED:,} characters; write their values")
        return value

    def _filled(self, text: str) -> str | Unread:
        """The value of a default, with its quotes and variables expanded."""
        if self.depth == _MOST_NESTED:
            raise ConfigError(
                f"{text[:_SHOWN]}: more than {_MOST_NESTED} defaults are nested in each other; write the value"
            )
        reader = _Reader(text, variables=self.variables, depth=self.depth + 1, num_filled=self.num_filled)
        words = list(reader.words())
        self.num_filled = reader.num_filled
        unread = next((word for word in words if word.unread), None)
        return " ".join(word.text for word in words) if unread is None else Unread(text=text, reason=unread.unread)

    def _sum(self, inner: str) -> str | Unread:
        filled = _NAME.sub(lambda name: self._number(name[0]), inner.replace("$", ""))
        try:
            return str(_value(ast.parse(filled.strip().replace("/", "//"), mode="eval").body))
        # the last two errors come from too many brackets
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            shown = f"$(({inner if len(inner) <= _SHOWN else inner[:_SHOWN] + '...'}))"
            return Unread(text=shown, reason=f"{shown} is not arithmetic of known integers")

    def _number(self, name: str) -> str:
        value = self._counted(name if name.isdigit() else self.variables.get(name, name), name)
        return value if isinstance(value, str) else name

    def _command(self, opens: str, closes: str) -> Unread:
        end = self._find(closes, self.at + 1)
        inner, self.at = self.script[self.at : end + 1], end + 1
        text = f"${inner}" if opens == "(" else inner
        return Unread(text=text, reason=f"{text} is a command, and commands are not run")

    def _assign(self, word: Word) -> None:
        found = _ASSIGNMENT.fullmatch(word.text)
        if found is None:
            return
        name = found["name"]
        value: str | Unread = Unread(text=f"${name}", reason=word.unread) if word.unread else found["value"]
        if self.variables.get(name, value) != value:
            value = Unread(text=f"${name}", reason=f"${name} is set to different values")
        self.variables[name] = value

    def _find(self, text: str, start: int) -> int:
        found = self.script.find(text, start)
        return found if found >= 0 else len(self.script)

    def _closing_brace(self) -> int:
        depth = 0
        for at in range(self.at, len(self.script)):
            depth += {"{": 1, "}": -1}.get(self.script[at], 0)
            if depth == 0:
                return at
        return len(self.script)


def _value(node: ast.expr) -> int:
    """The value of an arithmetic expression of integers; ValueError for any other expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _SUMS:
        return _SUMS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not arithmetic of integers")
