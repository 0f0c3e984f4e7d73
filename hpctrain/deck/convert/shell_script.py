"""Reader of command-line arguments in a shell script, or in a file that holds nothing but arguments.

Nothing is executed. The reader follows what launch scripts do with arguments: variables with defaults, arrays
and strings of arguments, appending to them, arithmetic, and quotes. It does not decide conditions: arguments
of all branches count, and a variable that branches set differently has no value.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

_FLAG = re.compile(r"--[A-Za-z][\w-]*")
_FLAG_INSIDE = re.compile(r"(?:^|[\s'\"])--[A-Za-z]")
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=")
_PARAMETER = re.compile(r"(#?)(\w+)(?:\[([@*]|\d+)\])?(?::?[-=](.*))?", re.DOTALL)
_VARIABLE = re.compile(r"\w+|[@*#?$!]")
_NOT_A_VALUE = re.compile(r"\$.*(?:ARGS|@)|\.py$")
"""Words that end the values of an argument: unknown variables that hold arguments, and the program."""

_BLANKS = " \t\r"
_OPERATORS = "\n;&|<>"
_GAP = re.compile(r"[ \t\r]+(?:#[^\n]*)?|#[^\n]*")
_GAP_IN_LIST = re.compile(r"[ \t\r\n;&|<>]+(?:#[^\n]*)?|#[^\n]*")
"""Blanks and then one comment, where a word could begin: "#" counts as a comment with or without a blank."""

_PIECE = re.compile(
    r"""
    \\(?P<escaped>.?) | '(?P<literal>[^']*)' | "(?P<quoted>(?:[^"\\]|\\.)*)" | `(?P<command>(?:[^`\\]|\\.)*)`
    | (?P<dollar>\$) | ['"`] | (?P<plain>.)
    """,
    re.DOTALL | re.VERBOSE,
)
"""Piece of a word. A quote that nothing closes is left out."""

_QUOTED_PIECE = re.compile(r"\\([\"\\$`])|.", re.DOTALL)
_OPENING = frozenset({"if", "case", "for", "while", "until"})
_CLOSING = frozenset({"fi", "esac", "done"})
MAX_EXPRESSIONS = 100
"""Largest number of nested expressions."""

_LARGEST = 1 << 63
"""Bound of the absolute value of numbers in shell arithmetic."""


def parse_arguments(script: str) -> dict[str, object]:
    """Return the arguments that a text contains. Nothing is executed, and wrong syntax raises no error.

    Args:
        script: Text of a shell script, or of a file of arguments.

    Returns:
        The value of each argument as text, or True for a flag without a value, by a name with hyphens:
        "--num_layers" becomes "--num-layers". "--name=value" is split at the first "=". Several values are
        joined by blanks. The last one counts where an argument occurs more than once. Variables that the
        script sets are expanded; others stay ("$NODES"). It is empty if the text has no arguments.

    Raises:
        ValueError: More than MAX_EXPRESSIONS expressions are nested, as in `${A:-${B:-1}}`.
    """
    reader = _ScriptReader()
    reader.read(script)
    return reader.arguments


class _ScriptReader:
    """State while a script is read: its variables, and the arguments so far."""

    def __init__(self) -> None:
        self.arguments: dict[str, object] = {}
        self._variables: dict[str, list[str] | None] = {}
        """The words of each variable; None if branches set it differently or its value is unknown."""
        self._name = ""
        """The argument to which a value would belong."""
        self._quoted: list[str] = []
        """Quoted words with arguments that are being read, from outside to inside."""
        self._depth = 0
        """Number of conditions and loops around the current command."""
        self._expressions = 0
        """Number of expressions around the current one."""

    def read(self, script: str) -> None:
        """Read the text of a script: update the variables and `arguments`.

        Earlier ones are kept, and the last occurrence of an argument counts. Calls may be nested.
        """
        text = _ScriptText(script.replace("\\\r\n", " ").replace("\\\n", " "), self._expand)
        while text.current:
            if text.match(_GAP):
                continue
            if text.current in _OPERATORS:
                text.position += 1
                self._name = ""
            elif (assignment := text.match(_ASSIGNMENT)) and not self._name:
                self._assign(text, assignment[1], appends=bool(assignment[2]))
            else:
                self._record(text.word())

    def _assign(self, text: _ScriptText, name: str, appends: bool) -> None:
        """Read the value of a variable, which may be a list in parentheses."""
        if text.current == "(":
            text.position += 1
            words = list(text.words_until_parenthesis())
        else:  # the empty text at the end counts as an operator
            words = [] if text.current in _BLANKS + _OPERATORS else [text.word()]
        arguments = any("--" in word for word in words)
        if arguments:
            for word in words:
                self._record(word)
            words = []  # they are recorded here, not where the variable is used
        self._name = ""
        before = self._variables.get(name, [])
        if appends:
            words = [*(before or []), *words]
        differs = self._depth > 0 and name in self._variables and before != words
        unknown = differs or any("$" in word for word in words)
        self._variables[name] = None if unknown and not arguments else words

    def _record(self, word: str) -> None:
        """Record a word as an argument, as a value of the argument before it, or as neither."""
        flag, equals, value = word.partition("=")
        if _FLAG.fullmatch(flag):
            self._name = flag.replace("_", "-")
            self.arguments[self._name] = value if equals else True
        elif word not in self._quoted and not word.startswith("$(") and _FLAG_INSIDE.search(word):
            self._name = ""
            self._quoted.append(word)
            self.read(word)
            self._quoted.pop()
            self._name = ""
        elif _NOT_A_VALUE.search(word):
            self._name = ""
        elif self._name and word:
            before = self.arguments[self._name]
            self.arguments[self._name] = word if before is True else f"{before} {word}"
        else:
            self._depth += (word in _OPENING) - (word in _CLOSING and self._depth > 0)

    def _expand(self, expression: str) -> str:
        """Return the value of an expression as `_value` does, and count how deeply it is nested."""
        self._expressions += 1
        if self._expressions > MAX_EXPRESSIONS:
            raise ValueError(f"has more than {MAX_EXPRESSIONS} nested expressions, such as ${{A:-${{B:-1}}}}")
        value = self._value(expression)
        self._expressions -= 1
        return value

    def _value(self, expression: str) -> str:
        """Return the value of what follows a dollar sign: a name, `name[@]`, `name:-default` or `((...))`.

        What the script does not set stays as it is, with its dollar sign.
        """
        if expression.startswith("(("):
            return self._calculated(expression)
        parameter = _PARAMETER.fullmatch(expression)
        if parameter is None:
            return f"${{{expression}}}" if _VARIABLE.fullmatch(expression) is None else f"${expression}"
        counts, name, index, default = parameter.groups()
        words = self._variables.get(name)
        if counts and words is not None:
            return str(len(words))
        if words is None or (default and not words):
            unset = f"${{{name}[{index}]}}" if index else f"${name}"
            return unset if default is None else _expanded(default.strip("\"'"), self._expand)
        if index and index.isdecimal():
            return words[int(index)] if int(index) < len(words) else ""
        return " ".join(words)

    def _calculated(self, expression: str) -> str:
        """Return the value of `((...))`, or the expression itself if it cannot be calculated."""
        known = _expanded(expression[2:-2], self._expand)
        numbers = {name: words[0] for name, words in self._variables.items() if words and len(words) == 1}
        try:
            return str(_integer(ast.parse(known.strip(), mode="eval").body, numbers))
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
            return f"${expression}"


class _ScriptText:
    """A text that is taken apart from left to right.

    Args:
        text: The text, whose continued lines are joined.
        expand: Function that returns the value of an expression behind a dollar sign.
    """

    def __init__(self, text: str, expand: Callable[[str], str]) -> None:
        self.text = text
        self.position = 0
        self._expand = expand

    @property
    def current(self) -> str:
        """The next character; "" at the end."""
        return self.text[self.position : self.position + 1]

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Return the match of `pattern` at the current position, and go behind it; None if there is none."""
        match = pattern.match(self.text, self.position)
        if match:
            self.position = match.end()
        return match

    def words_until_parenthesis(self) -> Iterator[str]:
        """Yield the words of a list, and go behind its closing parenthesis, or to the end of the text.

        The opening parenthesis must have been read. Words are read one by one, as the caller takes them.
        """
        while self.current:
            if self.match(_GAP_IN_LIST):
                continue
            if self.current == ")":
                self.position += 1
                return
            yield self.word()

    def word(self) -> str:
        """Return the word at the position, without quotes and with its variables expanded, and go behind it.

        The word ends at a blank, a newline, one of `;&|<>`, the end of the text, or the parenthesis that
        closes a list. Parentheses that it opens itself are part of it, as in `([0]*1+[1]*23)`. Variables that
        the script does not set stay ("$NODES"). The result is "" if no word begins here; blanks are not
        skipped.
        """
        parts: list[str] = []
        open_parentheses = 0
        while self.current and self.current not in _BLANKS + _OPERATORS:
            if self.current == ")" and not open_parentheses and parts:
                break
            piece = self.match(_PIECE)
            assert piece is not None
            open_parentheses += (piece[0] == "(") - (piece[0] == ")" and open_parentheses > 0)
            match piece.lastgroup:
                case "quoted":
                    parts.append(_expanded(piece["quoted"], self._expand))
                case "command":
                    parts.append(f"$({piece['command']})")
                case "dollar":
                    parts.append(self.expression())
                case str(name):
                    parts.append(piece[name])
        return "".join(parts)

    def expression(self) -> str:
        """Return the value of the expression behind a dollar sign, and go behind it.

        Commands, `$(...)`, and variables that the script does not set stay as they are, with their dollar
        sign.
        """
        if self.current == "(":
            inner = self._nested("(", ")")
            return self._expand(f"({inner})") if inner.startswith("(") else f"$({inner})"
        if self.current == "{":
            return self._expand(self._nested("{", "}"))
        name = self.match(_VARIABLE)
        return self._expand(name[0]) if name else "$"

    def _nested(self, opening: str, closing: str) -> str:
        """Return the text in brackets, of which the first comes next, and go behind them."""
        start, depth = self.position + 1, 0
        while self.current:
            depth += (self.current == opening) - (self.current == closing)
            self.position += 1
            if not depth:
                return self.text[start : self.position - 1]
        return self.text[start:]


def _expanded(text: str, expand: Callable[[str], str]) -> str:
    """Return a text in double quotes with its variables expanded."""
    source = _ScriptText(text, expand)
    parts: list[str] = []
    while piece := source.match(_QUOTED_PIECE):
        parts.append(piece[1] or (source.expression() if piece[0] == "$" else piece[0]))
    return "".join(parts)


_ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: lambda first, second: abs(first) // abs(second) * (1 if first * second >= 0 else -1),
        ast.Mod: lambda first, second: abs(first) % abs(second) * (1 if first >= 0 else -1),
    }
)


def _integer(node: ast.expr, variables: Mapping[str, str]) -> int:
    """Return the value of an arithmetic expression as a shell calculates it.

    Raises:
        ValueError: The expression is not one of whole numbers, or its value is too large.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.Name) and node.id in variables:
        value = int(variables[node.id])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_integer(node.operand, variables)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        value = _ARITHMETIC[type(node.op)](_integer(node.left, variables), _integer(node.right, variables))
    else:
        raise ValueError(f"{ast.unparse(node)} is not arithmetic with whole numbers")
    if abs(value) >= _LARGEST:
        raise ValueError(f"{ast.unparse(node)} is too large")
    return value
