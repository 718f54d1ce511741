"""Bounded templates render the same text as transformers, and every bomb is refused."""

import json
import subprocess
import sys

import pytest
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from data.families import random_row
from fledge.core.errors import BadInput
from fledge.data.bounded_jinja import BoundedTemplate, OutOfBounds
from fledge.data.conversation import parse_conversation
from fledge.data.template import ChatTemplate

pytestmark = pytest.mark.slow

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)


def outcome(render):
    try:
        return render()
    except ERRORS as error:
        return type(error).__name__, str(error)


def test_text_and_tags_equal_those_of_transformers(trl_templates):
    """For every template in the trl wheel, with tools, reasoning, system prompts and odd texts."""
    compared = refused = 0
    for path in sorted(trl_templates.glob("*.jinja")):
        source = path.read_text()
        bounded = BoundedTemplate(source)
        for seed in range(12):
            conversation = parse_conversation(random_row(seed))
            tools = list(conversation.tools) if conversation.tools else None
            context = {**SPECIAL, "add_generation_prompt": seed % 2 == 0}
            messages = list(conversation.messages)

            def reference(source=source, messages=messages, tools=tools, context=context):
                texts, tags = render_jinja_template(
                    [messages], tools, chat_template=source, return_assistant_tokens_mask=True,
                    **context,
                )  # fmt: skip
                return texts[0], tags[0]

            variables = {"messages": messages, "tools": tools, "documents": None, **context}
            expected = outcome(reference)
            assert outcome(lambda b=bounded, v=variables: b.render(v)) == expected, path
            compared, refused = compared + 1, refused + isinstance(expected[1], str)
    assert compared > 300
    assert refused < compared / 3


SETS = "{% set x = 'a' %}"
DOUBLED = "".join("{% set x = x ~ x %}" for _ in range(40))
PAIRS = "{% set x = ['a'] %}" + "".join("{% set x = [x, x] %}" for _ in range(40))
DICTS = "{% set x = {} %}" + "".join("{% set x = {'a': x, 'b': x} %}" for _ in range(40))
DEEP = "{% set n = namespace(x='a') %}{% for i in range(900) %}{% set n.x = [n.x] %}{% endfor %}"
LOOP = "{% for i in range(100000) %}"
BIG = "{% set s = 'ab' * 9000000 %}"
BOMBS = {
    "range": "{% for i in range(10**12) %}{{ i }}{% endfor %}",
    "nested loops": LOOP * 4 + "{% endfor %}" * 4,
    "nested loops that filter": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}"
    "{% endfor %}{% endfor %}",
    "loops over filters": LOOP + "{% set y = range(100000)|map('string')|list %}{% endfor %}",
    "slow steps": BIG + "{% set t = s ~ '' %}" + LOOP + "{% if s[1:] == t[1:] %}{% endif %}"
    "{% endfor %}",
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macro twice": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "block twice": "{% set n = namespace(d=0) %}{% block a %}{% if loop is undefined %}"
    "{{ self.a() }}{{ self.a() }}{% endif %}{% endblock %}",
    "times": "{{ 'a' * 10**10 }}",
    "times a list": "{{ [0] * 10**10 }}",
    "times left": "{{ 10**10 * 'a' }}",
    "times of texts": BIG + "{{ [s] * 100000 }}",
    "doubling": SETS + DOUBLED,
    "doubling by sum": SETS + DOUBLED.replace("~", "+"),
    "doubling by output": SETS + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40,
    "doubling by join": SETS + "{% set x = [x, x]|join %}" * 40,
    "doubling by replace": SETS + "{% set x = x|replace('a', 'aa') %}" * 40,
    "doubling by method": SETS + "{% set x = x.replace('a', 'aa') %}" * 40,
    "many sums": BIG + "{% set y = " + "+".join(["s"] * 90) + " %}",
    "many slices": BIG + "".join(f"{{% set s{i} = s[{i}:] %}}" for i in range(1000)),
    "constant text": "{% set y %}" + LOOP * 2 + "a" * 9999 + "{% endfor %}" * 2 + "{% endset %}",
    "center": "{{ 'a'|center(10**10) }}",
    "center, counted": "{{ 'a'.center(10**10) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ 'a'.zfill(width=10**10) }}{{ 'a'.zfill(10**10) }}",
    "tabs": "{{ ('\\t' * 1000).expandtabs(10**8) }}",
    "format": "{{ '%10000000000d' % 1 }}",
    "format by star": "{{ '%*d' % (10**10, 1) }}",
    "format filter": "{{ '%10000000000d'|format(1) }}",
    "format method": "{{ '{:>10000000000}'.format(1) }}",
    "format by argument": "{{ '{:>{w}}'.format(1, w=10**10) }}",
    "format in many places": "{{ ('{0:99999}' * 100000).format(1) }}",
    "replace": "{{ ('a' * 10**6).replace('a', 'a' * 10**6) }}",
    "replace nothing": "{{ ('a' * 10**6)|replace('', 'a' * 10**6) }}",
    "join": "{{ ('a' * 10**6).join('a' * 10**6) }}",
    "join a generator": "{{ ('a' * 10**6).join(range(99999)|map('string')) }}",
    "join filter": "{{ range(99999)|map('string')|join('a' * 10**6) }}",
    "indent": "{{ 'a\\nb'|indent(10**10) }}",
    "indent by text": "{{ ('a\\n' * 10**6)|indent('a' * 10**6) }}",
    "wordwrap": "{{ ('a ' * 10**6)|wordwrap(1, wrapstring='a' * 10**6) }}",
    "list": "{{ range(10**9)|list }}",
    "batch": "{{ [1]|batch(10**10, 0)|list }}",
    "slice": "{{ [1]|slice(10**10)|list }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "sum of lists": "{{ ([[1] * 4000] * 4000)|sum(start=[]) }}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "power tower": "{% set x = 9 %}" + "{% set x = x ** 99 %}" * 9,
    "product": "{% set x = 7 %}" + "{% set x = x * x %}" * 40,
    "round": "{{ 5|round(-10**9) }}{{ 5|round(10**9, 'ceil') }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "translate": "{{ ('a' * 10**6).translate({97: 'b' * 10**6}) }}",
    "encode": "{{ ('é' * 10**6).encode('punycode') }}",
    "date": "{{ strftime_now('%1000000000Y') }}",
    "pairs shown": PAIRS + "{{ x }}",
    "pairs joined": PAIRS + "{{ x ~ '' }}",
    "pairs as JSON": PAIRS + "{{ x|tojson }}",
    "pairs compared": PAIRS + PAIRS.replace("x", "y") + "{{ x == y }}",
    "dictionaries": DICTS + "{{ x|string }}",
    "varargs": "{% set n = namespace(x='a') %}{% macro f() %}{% set n.x = varargs %}{% endmacro %}"
    + "{{ f(n.x, n.x) }}" * 40 + "{{ n.x }}",
    "kwargs": "{% set n = namespace(x='a') %}{% macro f() %}{% set n.x = kwargs %}{% endmacro %}"
    + "{{ f(a=n.x, b=n.x) }}" * 40 + "{{ n.x }}",
    "dict()": "{% set x = 'a' %}" + "{% set x = dict(a=x, b=x) %}" * 40 + "{{ x }}",
    "JSON with wide margins": DEEP + "{{ ([n.x] * 9999)|tojson(indent=99) }}",
    "sort of one text": BIG + "{{ (range(99999)|map('replace', '', s))|sort }}",
    "sort of a default": BIG + "{{ [none]|map('default', s)|list }}"
    "{{ (range(99999)|map(attribute='z', default=s))|sort|length }}",
    "a circle of lists": DEEP * 9 + "{{ n.x }}",
}  # fmt: skip

RUN = """
import json, resource, sys, time
from fledge.data.drops import BadRow
from fledge.data.template import ChatTemplate
plain = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name, bomb in json.load(sys.stdin).items():
    source = "{% if 'bomb' in messages[0].content %}" + bomb + "{% endif %}" + plain
    template = ChatTemplate(source, token_names={}, special_tokens=["</s>"])
    begin, said = time.process_time(), "rendered"
    try:
        template.render([{"role": "user", "content": "a bomb"}])
    except BadRow as bad:
        said = f"{bad.reason}: {bad.detail}"
    assert template.render([{"role": "user", "content": "x"}]) == "<|user|>x</s>"
    spent = time.process_time() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps([name, said, spent, peak - base]))
"""


@pytest.fixture(scope="module")
def exploded():
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps(BOMBS), capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (lines[-1:], done.stderr)
    return {name: rest for name, *rest in lines}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_drops_its_row_within_bounded_time_and_memory(exploded, name):
    reason, seconds, kilobytes = exploded[name]
    assert reason.startswith("template "), reason
    assert name != "times" or reason.startswith("template goes beyond all bounds: ")
    assert seconds < 22
    assert kilobytes < 400_000  # growth since the start, earlier bombs included


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (BOMBS["nested loops"], "does not render a plain user / assistant exchange"),
        (BOMBS["times"], "does not render a plain user / assistant exchange"),
        ("{{ 1 / 0 }}", "does not render a plain user / assistant exchange"),
        ("{% for %}", "cannot be read"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "cannot be read"),
        ("{% for i in x %}" * 30 + "{% endfor %}" * 30, "cannot be read"),
        ("a" * (1 << 18) + "b", "longer than 262,144 characters"),
        ("{{ 'a'|pprint }}", "cannot be read"),
    ],
)
def test_a_template_that_renders_nothing_is_refused_in_one_line(source, message):
    with pytest.raises(BadInput, match=message) as caught:
        ChatTemplate(source, token_names={}, special_tokens=[])
    assert "\n" not in str(caught.value)


def test_the_bounds_grow_with_the_conversation():
    """Output that is out of bounds for a short conversation is allowed for a long one."""
    bounded = BoundedTemplate("{% for i in range(99) %}{% set y = messages ~ '' %}{% endfor %}")
    for size in (1_000_000, 10):
        bounded.render({"messages": "a" * size})
    bounded = BoundedTemplate("{{ messages }}{{ 'a' * 70000000 }}")
    with pytest.raises(OutOfBounds):
        bounded.render({"messages": "a"})
    assert len(bounded.render({"messages": "a" * 10_000_000})[0]) == 10_000_000 + 70_000_000
    endless = BoundedTemplate("{{ 9 ** 600 }}")
    with pytest.raises(OutOfBounds):  # at any length
        endless.render({"messages": "a" * 20_000_000})
