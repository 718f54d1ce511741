"""Chat templates rendered within bounds: no endless loops, no gigabytes of text.

A template comes with a model and a row with a data set: neither is trusted. Jinja's sandbox keeps
templates away from Python internals, but lets them run forever and fill the memory. Here every
value costs its size when it is created, and every loop iteration costs a step, out of an allowance
that grows with the conversation. Values are created, and code is repeated, only at

    * % **                  `call_binop`: the size of a product is checked before it is created
    methods, functions      `call`: of strings, lists and numbers only those in `METHODS`
    filters                 `_metered`: all but those in `_NO_FILTERS`
    + ~ [a, b] {a: b} x[1:] `_Meter` wraps them, or their parts, in the filter `fledge_made`
    {{ output }}            `finalize`; constant text is charged to the step of the loop around it
    for, macro, call, block `_Meter` starts their bodies with the filter `fledge_step`

so any attack has to go through one of these. The time limit is checked only between steps: what
happens within one is bounded by the sizes of values.
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

LONGEST_TEMPLATE = 1 << 18  # characters; templates of current models have up to 30,000
_ALLOWANCE = 1 << 26  # characters that rendering any conversation may create,
_PER_CHARACTER = 64  # plus this many per character of the conversation
_MOST_WEIGHED = 1 << 30
_STEP = 128  # cost of a loop iteration: a short conversation can have half a million
_SECONDS = 20.0  # of CPU time per rendering: thousands of times what any template needs
_LONGEST_NUMBER = 4096  # bits
_NO_FILTERS = ("pprint", "urlize")  # for debugging and web pages; quadratic
_PLAIN = (str, bytes, int, float, list, tuple, dict)

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

    def render(self, variables: dict[str, Any]) -> str:
        with self._lock:
            self._environment.begin(variables)
            return self._template.render(variables)

    def render_tagged(self, variables: dict[str, Any]) -> tuple[str, list[Span]]:
        """The text, and the spans inside `{% generation %}` tags."""
        with self._lock:
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
        # With `pass_context` Jinja does not evaluate it at compile time as a constant.
        self.filters["fledge_step"] = jinja2.pass_context(lambda _, cost: self.step(cost))
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = _strftime_now

    def begin(self, variables: dict[str, Any]) -> None:
        """Start a new rendering with the full allowance."""
        self._variables: dict[str, Any] | None = variables
        self._remaining, self._steps = _ALLOWANCE, 0
        self._deadline = 0.0
        self.written, self.said = 0, list[Span]()  # spans inside generation tags

    def room(self, size: int) -> None:
        """Check that the allowance covers a value of this size, which is not created yet."""
        if size > self._remaining:
            self._grow()
        if size > self._remaining:
            raise OutOfBounds("it makes too much text, or loops too long")

    def _grow(self) -> None:
        """Add the conversation's share to the allowance; it is measured at most once."""
        if self._variables is not None:
            self._remaining += weight(self._variables, _MOST_WEIGHED) * _PER_CHARACTER
            self._variables = None

    def step(self, cost: int) -> bool:
        """Charge one run of a loop body, macro or block, and the constant text that it writes."""
        self.room(cost + _STEP)
        self._remaining -= cost + _STEP
        self._steps += 1
        if not self._steps & 15:
            self._check_deadline()
        return True

    def _check_deadline(self) -> None:
        now = time.thread_time()
        self._deadline = self._deadline or now + _SECONDS
        if now > self._deadline:
            raise OutOfBounds(f"it takes longer than {_SECONDS:.0f} s")

    def made(self, value: Any) -> Any:
        """Charge for a value that was created; items of an iterator are charged one by one."""
        if isinstance(value, str):
            size = len(value)
        elif isinstance(value, int):
            if value.bit_length() > _LONGEST_NUMBER:
                raise OutOfBounds("it makes a number of too many digits")
            return value
        elif isinstance(value, Iterator):
            return self._charge_items(value)
        else:
            size = weight(value, self._remaining)
            if size > self._remaining:
                self._grow()
                size = weight(value, self._remaining)
        self.room(size)
        self._remaining -= size
        return value

    def _charge_items(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.step(0)
            yield self.made(item)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.room(product_size(operator, left, right))
        return self.made(super().call_binop(context, operator, left, right))

    # N805: Jinja's own names, since keyword arguments of a template may have any name
    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, _PLAIN):
            result_size = METHODS.get(name := __obj.__name__)
            if result_size is None:
                raise OutOfBounds(f".{name}() is not for chat templates")
            if name == "join" and args and isinstance(args[0], Iterator):
                args = (list(args[0]), *args[1:])
            __self.room(result_size(owner, *args, **kwargs))
        elif isinstance(__obj, Macro) and (__obj.catch_varargs or __obj.catch_kwargs):
            __self.made((args, kwargs))
        return __self.made(super().call(__context, __obj, *args, **kwargs))

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        result_size = ROOM_OF_FILTERS.get(name)
        first = 1 if hasattr(function, "jinja_pass_arg") else 0  # after the context argument

        @wraps(function)  # with the attributes that Jinja sets
        def metered(*args: Any, **kwargs: Any) -> Any:
            if result_size is not None:
                if name == "join" and isinstance(args[first], Iterator):
                    args = (*args[:first], list(args[first]), *args[first + 1 :])
                self.room(result_size(*args[first:], **kwargs))
            return self.made(function(*args, **kwargs))

        return metered

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Meter().visit(source), *args, **kwargs)


class _Meter(NodeTransformer):
    """Inserts the metering filters into a syntax tree."""

    def _literal(self, node: Any) -> Any:
        if getattr(node, "ctx", "load") != "load":  # the target of a loop or `set`
            return node
        if all(isinstance(child, nodes.Const) for child in node.iter_child_nodes()):
            return node
        return _charged(self.generic_visit(node))

    visit_List = visit_Tuple = visit_Dict = _literal

    # N802: Jinja finds a visitor by the name of the node's class

    def visit_Getitem(self, node: nodes.Getitem) -> Any:  # noqa: N802
        self.generic_visit(node)
        return _charged(node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Add(self, node: nodes.Add) -> Any:  # noqa: N802
        """A sum is no larger than its parts, which are charged before it is created."""
        self.generic_visit(node)
        node.left = node.left if isinstance(node.left, nodes.Add) else _charged(node.left)
        node.right = _charged(node.right)
        return node

    def visit_Concat(self, node: nodes.Concat) -> Any:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_charged(part) for part in node.nodes]
        return node

    def _body(self, node: Any) -> Any:
        constant = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        step = _step_node(constant, node.lineno)
        node.body = [nodes.ExprStmt(step).set_lineno(node.lineno), *node.body]
        if getattr(node, "test", None) is not None:  # `for x in y if test`
            test_step = _step_node(0, node.lineno)
            node.test = nodes.And(test_step, node.test).set_lineno(node.lineno)
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _body


def _charged(node: Any) -> Any:
    if isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, "fledge_made", [], [], None, None).set_lineno(node.lineno)


def _step_node(cost: int, line: int) -> Any:
    return nodes.Filter(nodes.Const(cost), "fledge_step", [], [], None, None).set_lineno(line)


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
