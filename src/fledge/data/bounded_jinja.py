"""Chat templates rendered within bounds: no endless loop, no text of gigabytes.

A template comes with a model and a row with a data set: neither is a program that we trust. Jinja's
sandbox keeps templates away from Python's insides, but lets them run forever and fill the memory.
Here every value costs its size when it is made, and every turn of a loop a step, out of an
allowance that grows with the conversation. Values are made, and code runs again, only at

    * % **                  `call_binop`: what can multiply is judged before it is made
    methods, functions      `call`: of strings, lists and numbers those in `_METHODS`
    filters                 `_metered`: all but those in `_NO_FILTERS`
    + ~ [a, b] {a: b} x[1:] `_Meter` puts the filter `fledge_made` around them, or their parts
    {{ output }}            `finalize`; constant text is paid for by the step of the loop around it
    for, macro, call, block `_Meter` begins their bodies with the filter `fledge_step`

so that a new kind of bomb has to come through one of these doors. The clock is looked at between
steps only: what happens within one is bounded by the sizes of values.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from fledge.data.bounded_values import METHODS, ROOM_OF_FILTERS, product_size, weight

LONGEST_TEMPLATE = 1 << 18  # characters; those of today's models have up to 30,000
_ALLOWANCE = 1 << 26  # characters that any conversation may make on the way to its text,
_PER_CHARACTER = 64  # and so many more for each of its own
_MOST_WEIGHED = 1 << 30
_STEP = 128  # what a turn of a loop costs: half a million of them for a short conversation
_SECONDS = 20.0  # of CPU time for one rendering: thousands of times what any needs
_LONGEST_NUMBER = 4096  # bits
_NO_FILTERS = ("pprint", "urlize")  # made for debugging and web pages; quadratic
_PLAIN = (str, bytes, int, float, list, tuple, dict)

Span = tuple[int, int]  # characters [start, end)


class OutOfBounds(TemplateError):  # noqa: N818  (a verdict)
    """The template takes too long, or makes too much."""


class BoundedTemplate:
    """A chat template with what transformers gives it: `tojson`, `raise_exception`, `strftime_now`,
    loop controls, `{% generation %}`; blocks are trimmed. Raises `TemplateError` and whatever else
    a template may stumble over."""

    def __init__(self, source: str) -> None:
        if len(source) > LONGEST_TEMPLATE:
            raise OutOfBounds(f"it is longer than {LONGEST_TEMPLATE:,} characters")
        self._environment = _Environment()
        self._template = self._environment.from_string(source)
        self._alone = threading.Lock()  # the environment counts for one rendering at a time

    def render(self, variables: dict[str, Any]) -> str:
        with self._alone:
            self._environment.begin(variables)
            return self._template.render(variables)

    def render_tagged(self, variables: dict[str, Any]) -> tuple[str, list[Span]]:
        """The text, and the spans inside `{% generation %}` tags."""
        with self._alone:
            environment, blocks = self._environment, []
            environment.begin(variables)
            for block in self._template.generate(variables):
                blocks.append(block)
                environment.written += len(block)
            return "".join(blocks), environment.said


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "%", "**"))

    def __init__(self) -> None:
        self.begin({})
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _Generation],
            finalize=self.made,
        )
        self.filters["tojson"] = _tojson
        self.filters = {
            name: self._metered(name, function)
            for name, function in self.filters.items()
            if name not in _NO_FILTERS
        }
        self.filters["fledge_made"] = self.made
        # One that asks for the context is not computed once and for all when it is compiled.
        self.filters["fledge_step"] = jinja2.pass_context(lambda _, cost: self.step(cost))
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = _strftime_now

    def begin(self, variables: dict[str, Any]) -> None:
        """A new rendering: nothing is spent."""
        self._variables: dict[str, Any] | None = variables
        self._left, self._steps = _ALLOWANCE, 0
        self._deadline = 0.0
        self.written, self.said = 0, list[Span]()

    def room(self, size: int) -> None:
        """There must be room for a value of this size, which does not exist yet."""
        if size > self._left:
            self._grow()
        if size > self._left:
            raise OutOfBounds("it makes too much text, or loops too long")

    def _grow(self) -> None:
        """The share of the conversation, which is weighed only where it matters, and once."""
        if self._variables is not None:
            self._left += weight(self._variables, _MOST_WEIGHED) * _PER_CHARACTER
            self._variables = None

    def step(self, cost: int) -> bool:
        """A turn of a loop, a macro or a block, with the constant text that it writes."""
        self.room(cost + _STEP)
        self._left -= cost + _STEP
        self._steps += 1
        if not self._steps & 15:
            self._look_at_the_clock()
        return True

    def _look_at_the_clock(self) -> None:
        now = time.thread_time()
        self._deadline = self._deadline or now + _SECONDS
        if now > self._deadline:
            raise OutOfBounds(f"it takes longer than {_SECONDS:.0f} s")

    def made(self, value: Any) -> Any:
        """Pay for a value. What comes out of an iterator is paid for when it does."""
        if isinstance(value, str):
            size = len(value)
        elif isinstance(value, int):
            if value.bit_length() > _LONGEST_NUMBER:
                raise OutOfBounds("it makes a number of too many digits")
            return value
        elif isinstance(value, Iterator):
            return self._drawn(value)
        else:
            size = weight(value, self._left)
            if size > self._left:
                self._grow()
                size = weight(value, self._left)
        self.room(size)
        self._left -= size
        return value

    def _drawn(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.step(0)
            yield self.made(item)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.room(product_size(operator, left, right))
        return self.made(super().call_binop(context, operator, left, right))

    # N805: Jinja's own odd names, because keyword arguments of a template may have any name
    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, _PLAIN):
            judge = METHODS.get(name := __obj.__name__)
            if judge is None:
                raise OutOfBounds(f".{name}() is not for chat templates")
            if name == "join" and args and isinstance(args[0], Iterator):
                args = (list(args[0]), *args[1:])
            __self.room(judge(owner, *args, **kwargs))
        elif isinstance(__obj, Macro) and (__obj.catch_varargs or __obj.catch_kwargs):
            __self.made((args, kwargs))
        return __self.made(super().call(__context, __obj, *args, **kwargs))

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        judge = ROOM_OF_FILTERS.get(name)
        first = 1 if hasattr(function, "jinja_pass_arg") else 0  # behind the context

        @wraps(function)  # with what Jinja has noted on it
        def metered(*args: Any, **kwargs: Any) -> Any:
            if judge is not None:
                if name == "join" and isinstance(args[first], Iterator):
                    args = (*args[:first], list(args[first]), *args[first + 1 :])
                self.room(judge(*args[first:], **kwargs))
            return self.made(function(*args, **kwargs))

        return metered

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Meter().visit(source), *args, **kwargs)


class _Meter(NodeTransformer):
    """Puts the meters into a syntax tree."""

    def _literal(self, node: Any) -> Any:
        if getattr(node, "ctx", "load") != "load":  # what a loop or `set` assigns to
            return node
        if all(isinstance(child, nodes.Const) for child in node.iter_child_nodes()):
            return node
        return _paid(self.generic_visit(node))

    visit_List = visit_Tuple = visit_Dict = _literal

    # N802: Jinja finds a visitor by the name of the node's class

    def visit_Getitem(self, node: nodes.Getitem) -> Any:  # noqa: N802
        self.generic_visit(node)
        return _paid(node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Add(self, node: nodes.Add) -> Any:  # noqa: N802
        """A sum is no larger than its parts, which pay before it is made."""
        self.generic_visit(node)
        node.left = node.left if isinstance(node.left, nodes.Add) else _paid(node.left)
        node.right = _paid(node.right)
        return node

    def visit_Concat(self, node: nodes.Concat) -> Any:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_paid(part) for part in node.nodes]
        return node

    def _body(self, node: Any) -> Any:
        constant = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        step = _step_node(constant, node.lineno)
        node.body = [nodes.ExprStmt(step).set_lineno(node.lineno), *node.body]
        if getattr(node, "test", None) is not None:  # `for x in y if test`
            also = _step_node(0, node.lineno)
            node.test = nodes.And(also, node.test).set_lineno(node.lineno)
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _body


def _paid(node: Any) -> Any:
    if isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, "fledge_made", [], [], None, None).set_lineno(node.lineno)


def _step_node(cost: int, line: int) -> Any:
    return nodes.Filter(nodes.Const(cost), "fledge_step", [], [], None, None).set_lineno(line)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: what the assistant says, by the template's own word."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        environment = self.environment
        assert isinstance(environment, _Environment)
        text, start = caller(), environment.written
        environment.said.append((start, start + len(text)))
        return text


class _Namespace(Namespace):
    """One that is not shown with all it holds: namespaces may hold each other in circles."""

    def __repr__(self) -> str:
        return "<namespace>"


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes what HTML would read as tags."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if any(sign.isdigit() for sign in pattern):  # %9999999Y: a year of ten million digits
        raise OutOfBounds("widths in dates are not for chat templates")
    return datetime.now().strftime(pattern)
