"""Chat templates rendered within bounds: no endless loops, no gigabytes of text.

A template comes with a model and a row with a data set: neither is trusted. Jinja's sandbox keeps
templates away from Python internals, but lets them run forever and fill the memory. Here every
new value costs its size and every iteration a step, out of an allowance that grows with the
conversation. Operations whose result may be far larger than their operands are checked before they
run (`_growth`). The time limit is checked between steps, whose length the sizes of values bound.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

LONGEST_TEMPLATE = 1 << 18  # characters; templates of current models have up to 30,000
_ALLOWANCE = 1 << 26  # characters that rendering any conversation may create,
_PER_CHARACTER = 64  # plus this many per character of the conversation
_PART = 64  # cost of any item besides its characters: visiting it takes about as long
_STEP = 128  # cost of a loop iteration: a short conversation can have half a million
_SECONDS = 20.0  # of CPU time per rendering: thousands of times what any template needs
_MOST = 1 << 30  # what is larger is not measured exactly
_ENDLESS = 1 << 62  # a size that no allowance covers
_LONGEST_NUMBER = 4096  # bits
_NO_FILTERS = ("pprint", "urlize")  # for debugging and web pages; quadratic
_NO_METHODS = ("encode", "translate", "maketrans", "to_bytes", "from_bytes", "fromkeys")
# Operations, filters and methods whose results may be far larger than their operands.
_GROWING = {"*", "%", "**", "batch", "center", "expandtabs", "format", "format_map", "indent"}
_GROWING |= {"join", "ljust", "replace", "rjust", "round", "slice", "sum", "tojson", "wordwrap"}
_GROWING |= {"zfill"}

Span = tuple[int, int]  # characters [start, end)


class OutOfBounds(TemplateError):  # noqa: N818  (a verdict)
    """The template takes too long or creates too much."""


class BoundedTemplate:
    """A chat template with what transformers provides: `tojson`, `raise_exception`, `strftime_now`,
    loop controls, `{% generation %}`, trimmed blocks. Rendering raises `TemplateError`, and any
    exception that the template's own operations raise."""

    def __init__(self, source: str) -> None:
        if len(source) > LONGEST_TEMPLATE:
            raise OutOfBounds(f"it is longer than {LONGEST_TEMPLATE:,} characters")
        self._environment = _Environment()
        self._template = self._environment.from_string(source)
        self._lock = threading.Lock()  # the environment meters one rendering at a time

    def render(self, variables: dict[str, Any]) -> tuple[str, list[Span]]:
        """The text, and the spans inside `{% generation %}` tags."""
        with self._lock:
            environment, blocks = self._environment, []
            environment.begin(variables)
            for block in self._template.generate(variables):
                blocks.append(block)
                environment.written += len(block)
            return "".join(blocks), environment.said


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "%", "**"))

    def __init__(self) -> None:
        self.begin({})
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _Generation],
            finalize=self.made,
        )
        filters = {**self.filters, "tojson": _tojson}
        self.filters = {k: self._metered(k, filters[k]) for k in filters if k not in _NO_FILTERS}
        self.filters["fledge_made"] = self.made
        # With `pass_context` Jinja does not evaluate it at compile time as a constant.
        self.filters["fledge_step"] = jinja2.pass_context(lambda _, cost: self.step(cost))
        del self.globals["lipsum"]
        self.globals |= {"namespace": _Namespace, "raise_exception": _refuse}
        self.globals["strftime_now"] = _strftime_now

    def begin(self, variables: dict[str, Any]) -> None:
        """Start a new rendering with the full allowance."""
        self._variables: dict[str, Any] | None = variables
        self._remaining, self._steps = _ALLOWANCE, 0
        self._deadline = time.thread_time() + _SECONDS
        self.written, self.said = 0, list[Span]()  # spans inside generation tags

    def _check(self, size: int) -> None:
        """Check that the allowance covers `size`; the conversation is measured at most once."""
        if size > self._remaining and self._variables is not None:
            self._remaining += weight(self._variables, _MOST) * _PER_CHARACTER
            self._variables = None
        if size > self._remaining:
            raise OutOfBounds("it makes too much text, or loops too long")

    def step(self, cost: int) -> bool:
        """Charge one run of a loop body, macro or block, and the constant text that it writes."""
        if cost + _STEP > self._remaining:
            self._check(cost + _STEP)
        self._remaining -= cost + _STEP
        self._steps += 1
        if self._steps % 16 == 0 and time.thread_time() > self._deadline:
            raise OutOfBounds(f"it takes longer than {_SECONDS:.0f} s")
        return True

    def made(self, value: Any) -> Any:
        """Charge for a value that was created; items of an iterator are charged one by one."""
        if isinstance(value, str):
            size = len(value)
        elif isinstance(value, int):
            if value.bit_length() > _LONGEST_NUMBER:
                raise OutOfBounds("it makes a number of too many digits")
            return value
        elif isinstance(value, Iterator):
            return (self.made(item) for item in value if self.step(0))
        else:
            size = weight(value, _MOST)
        if size > self._remaining:
            self._check(size)
        self._remaining -= size
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator != "+":  # a sum is no larger than its parts
            self._check(_growth(operator, left, right))
        return self.made(super().call_binop(context, operator, left, right))

    # N805: Jinja's own names, since keyword arguments of a template may have any name
    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str | bytes | int | float | list | tuple | dict):
            if (name := __obj.__name__) in _NO_METHODS:
                raise OutOfBounds(f".{name}() is not for chat templates")
            if name in _GROWING:
                args = _listed(name, args)
                __self._check(_growth(name, owner, *args, **kwargs))
        elif isinstance(__obj, Macro) and (__obj.catch_varargs or __obj.catch_kwargs):
            __self.made((args, kwargs))
        return __self.made(super().call(__context, __obj, *args, **kwargs))

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0  # after the context argument

        @wraps(function)  # with the attributes that Jinja sets
        def metered(*args: Any, **kwargs: Any) -> Any:
            if name in _GROWING:
                args = args[:first] + _listed(name, args[first:])
                self._check(_growth(name, *args[first:], **kwargs))
            return self.made(function(*args, **kwargs))

        return metered

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Meter().visit(source), *args, **kwargs)


class _Meter(NodeTransformer):
    """Adds to a syntax tree the charges for what runs without a call: loops, literals, `~`, x[1:].

    Operators are intercepted in `call_binop`.
    """

    def visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        node, line = self.generic_visit(node), node.lineno
        if isinstance(node, nodes.Concat):
            node.nodes = [_filter("fledge_made", part) for part in node.nodes]
        elif isinstance(node, nodes.List | nodes.Tuple | nodes.Dict):
            if getattr(node, "ctx", "load") == "load":  # else the target of a loop or `set`
                return _filter("fledge_made", node)
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return _filter("fledge_made", node)
        elif isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block):
            constant = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
            step = _filter("fledge_step", nodes.Const(constant, lineno=line))
            node.body.insert(0, nodes.ExprStmt(step, lineno=line))
            if isinstance(node, nodes.For) and node.test is not None:  # `for x in y if test`
                test_step = _filter("fledge_step", nodes.Const(0, lineno=line))
                node.test = nodes.And(test_step, node.test, lineno=line)
        return node


def _filter(name: str, value: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: the template's own marking of what the assistant generates."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_record_span"), [], [], body).set_lineno(line)

    def _record_span(self, caller: Callable[[], str]) -> str:
        environment = self.environment
        assert isinstance(environment, _Environment)
        text, start = caller(), environment.written
        environment.said.append((start, start + len(text)))
        return text


# --- what transformers adds to Jinja --------------------------------------------------------------


class _Namespace(Namespace):
    """A namespace whose repr omits its contents: namespaces may contain each other in cycles."""

    def __repr__(self) -> str:
        return "<namespace>"


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if any(character.isdigit() for character in pattern):  # %9999999Y: a year of ten million digits
        raise OutOfBounds("widths in dates are not for chat templates")
    return datetime.now().strftime(pattern)


# --- sizes ----------------------------------------------------------------------------------------


def weight(value: Any, most: int) -> int:
    """The size of a value with everything in it, or any number above `most`. A part counts as often
    as it occurs: `x = [x, x]` thirty times is a small object, but gigabytes of text."""
    total, pending = 0, [value]
    while pending and total <= most:
        item = pending.pop()
        total += _PART
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, Mapping):
            pending += item.keys()
            pending += item.values()
        elif isinstance(item, list | tuple):
            pending += item
        elif hasattr(item, "__len__"):  # a range or a dictionary view
            total += len(item)
    return total


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str) else weight(value, _MOST)


def _listed(name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands of `join` with iterators as lists, whose lengths are known."""
    if name != "join":
        return values
    return tuple(list(value) if isinstance(value, Iterator) else value for value in values)


def _growth(name: str, first: Any, *more: Any, **options: Any) -> int:
    """A bound for the result of an operation in `_GROWING`, computed before it runs."""
    more += tuple(options[key] for key in sorted(options, reverse=True))  # `old` before `new`
    if name in ("%", "format", "format_map") and isinstance(first, str | bytes):
        return _formatted(str(first), more)
    if name == "replace" and len(more) > 1:
        return str(first).count(str(more[0])) * len(str(more[1]))
    if name == "join":
        return _length(first) * max(map(_length, more), default=0)
    if name == "**":
        return _ENDLESS if _widest(more[0]) > 512 else 0
    if name == "sum":  # of lists: quadratic
        return _ENDLESS if any(isinstance(value, list | tuple) for value in more) else 0
    if name == "*" and isinstance(first, int):
        first, more = more[0], (first,)
    if isinstance(first, int | float) and name in ("*", "%"):
        return 0
    wide = max(_widest(more), *map(_length, more)) if more else 0
    # Each line of JSON is indented by its depth; a depth of a thousand is a recursion error.
    return (1 + _size(first)) * (1 + wide * 16) if name == "tojson" else (1 + _size(first)) * wide


def _formatted(text: str, values: Sequence[Any]) -> int:
    """Each field may be as wide as the largest number given plus all values."""
    widths = [int(digits) for digits in re.findall(r"\d+", text)]
    fields = max(text.count("%"), text.count("{"))
    return fields * (_PART + max([0, *widths]) + _widest(values) + weight(values, _MOST))


def _widest(value: Any) -> int:
    """The largest number in some arguments, any of which may be a width."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return max(map(_widest, value), default=0)
    return abs(value) if isinstance(value, int) else 0


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0
