"""Chat templates: rendered as transformers renders them, refused with a reason where they cannot be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from services.contract.errors import InvalidRequest, SetupError
from services.decoder.front.text.chat import ChatTemplate
from services.decoder.front.text.prompt import chat_prompt
from services.decoder.front.text.tokenizer import TextTokenizer
from tests.front.text.families import write_family

# Written in the manner of published templates; each uses other things that Jinja must be set up with.
TEMPLATES = {
    "plain": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "block layout": """
        {%- for message in messages %}
            {%- if message.role not in ("user", "assistant", "system") %}
                {{- raise_exception("unknown role " ~ message.role) }}
            {%- endif %}
            {% if loop.first %}
    {{ bos_token }}
            {% endif %}
    {{ "[" + message.role | upper + "] " + message.content | trim }}
            {% if message.role == "assistant" %}{{ eos_token }}{% endif %}
        {% endfor %}
        {% if add_generation_prompt %}
    [ASSISTANT]
        {% endif %}
    """,
    "loop controls, json, namespace": """
        {%- set ns = namespace(system="") -%}
        {%- for m in messages -%}
            {%- if m.role == "system" -%}{%- set ns.system = m.content -%}{%- continue -%}{%- endif -%}
            {{- m | tojson }}{{ m.content | tojson(indent=2) }}{{ "<&'é>" | tojson -}}
            {%- if loop.index > 2 -%}{%- break -%}{%- endif -%}
        {%- endfor -%}
        {{- ns.system -}}{%- if tools is not none -%}TOOLS{%- endif -%}
    """,
    "generation marks": "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ bos_token + m.content }}{% endif %}{% endfor %}",
    "text or parts": """
        {%- macro show(content) -%}
            {%- if content is string -%}{{ content }}
            {%- else -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}{%- endif -%}
        {%- endmacro -%}
        {%- for m in messages %}<{{ m.role }}>{{ show(m.content) }}</{{ m.role }}>{% endfor -%}
    """,
    "parts only": "{% for m in messages %}{{ m.role }}:{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}",
    "date": "{{ strftime_now('%Y')[:2] }}{{ messages[0].content }}",
    "variables": "{% if enable_thinking is defined and not enable_thinking %}no thoughts {% endif %}"
    "{{ messages[-1]['content'] }}",
}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  What's <b>&  \n"}],
    [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2", "name": "é日"},
        {"role": "user", "content": ""},
        {"role": "user", "content": "{{ bos_token }} {% raw %}"},
    ],
]


def with_template(directory: Path, template: object) -> Path:
    write_family("llama2", directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return directory


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "parts only"])
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers(tmp_path: Path, name: str, chat: list[dict[str, Any]], prompt: bool) -> None:
    directory = with_template(tmp_path, TEMPLATES[name])
    theirs: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
    assert ChatTemplate.from_directory(directory).render(chat, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("chat", CHATS)
def test_default_model(default_model: Path, chat: list[dict[str, Any]]) -> None:
    theirs: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(default_model)
    template = ChatTemplate.from_directory(default_model)
    expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert template.render(chat) == expected
    ids = theirs.encode(str(expected), add_special_tokens=False)
    assert chat_prompt(TextTokenizer.from_directory(default_model), template, chat) == ids


def test_no_second_begin_token(tmp_path: Path) -> None:
    directory = with_template(tmp_path, "{{ bos_token }}{{ messages[0].content }}")
    tokenizer = TextTokenizer.from_directory(directory)
    ids = chat_prompt(tokenizer, ChatTemplate.from_directory(directory), CHATS[0])
    assert ids.count(1) == 1


def test_variables(tmp_path: Path) -> None:
    template = ChatTemplate.from_directory(with_template(tmp_path, TEMPLATES["variables"]))
    assert template.render(CHATS[0]) == "Hi"
    assert template.render(CHATS[0], variables={"enable_thinking": False}) == "no thoughts Hi"
    assert template.render(CHATS[0], variables={"messages": [], "bos_token": "x"}) == "Hi"


@pytest.mark.parametrize(
    ("name", "content", "shown"),
    [
        ("plain", parts("a", "b"), "user: a\nb\nassistant:"),  # a template that takes only text
        ("text or parts", parts("a", "b"), "<user>ab</user>"),  # the template joins them
        ("text or parts", "a", "<user>a</user>"),
        ("parts only", "a", "user:a"),
        ("parts only", parts("a", "b"), "user:ab"),
    ],
)
def test_text_and_parts(name: str, content: object, shown: str) -> None:
    template = ChatTemplate(TEMPLATES[name], {})
    assert template.render([{"role": "user", "content": content}]) == shown


def test_parts_as_transformers_renders_them(tmp_path: Path) -> None:
    for name in ("text or parts", "parts only"):
        directory = with_template(tmp_path, TEMPLATES[name])
        chat: list[dict[str, Any]] = [{"role": "user", "content": parts("a", "b")}]
        expected = AutoTokenizer.from_pretrained(directory).apply_chat_template(chat, tokenize=False)
        assert ChatTemplate.from_directory(directory).render(chat) == expected


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, r"messages\[1\]\.content must be text"),
        ([], r"messages\[1\]\.content must be text"),
        (7, r"messages\[1\]\.content must be text"),
        (["x"], r"messages\[1\]\.content\[0\] must be an object with a type"),
        ([{"text": "x"}], r"content\[0\] must be an object with a type"),
        ([*parts("x"), {"type": "image_url", "image_url": {}}], r"content\[1\] is of type 'image_url'"),
        ([{"type": "text", "text": None}], r"content\[0\]\.text must be text"),
    ],
)
def test_content_that_is_not_text(content: object, reason: str) -> None:
    template = ChatTemplate(TEMPLATES["text or parts"], {})
    with pytest.raises(InvalidRequest, match=reason):
        template.render([{"role": "user", "content": "x"}, {"role": "user", "content": content}])


def test_no_messages() -> None:
    with pytest.raises(InvalidRequest, match="at least one message"):
        ChatTemplate(TEMPLATES["plain"], {}).render([])


def test_no_template(tmp_path: Path) -> None:
    template = ChatTemplate.from_directory(write_family("llama2", tmp_path))
    with pytest.raises(InvalidRequest, match=r"no chat template.*/v1/completions"):
        template.render(CHATS[0])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[5].content }}", "refuses these messages: .*no element 5"),
        ("{{ messages[0].content + 1 }}", "refuses these messages: TypeError"),
        ("{{ 1 // 0 }}", "refuses these messages: ZeroDivisionError"),
        ("{{ undefined_function() }}", "refuses these messages: 'undefined_function' is undefined"),
        ("{{ messages.append(1) }}", "refuses these messages"),  # the sandbox: nothing is changed
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses these messages"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses these messages: RecursionError"),
    ],
)
def test_templates_that_fail(source: str, reason: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(InvalidRequest, match=reason):
        template.render(CHATS[0])


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert ChatTemplate.from_directory(with_template(tmp_path, named)).render(CHATS[0]) == "D"
    assert ChatTemplate.from_directory(with_template(tmp_path, named[:1])).render(CHATS[0]) == "T"
    with pytest.raises(SetupError, match=re.escape("['rag', 'tool_use'] and none called default")):
        ChatTemplate.from_directory(with_template(tmp_path, [*named[:1], {"name": "rag", "template": "R"}]))
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.from_directory(tmp_path).render(CHATS[0]) == "file"


@pytest.mark.parametrize("template", [7, [1], [{"name": "default"}], {"a": "b"}])
def test_a_template_of_another_shape(tmp_path: Path, template: object) -> None:
    with pytest.raises(SetupError, match="chat_template must be text or a list"):
        ChatTemplate.from_directory(with_template(tmp_path, template))


def test_a_template_that_is_not_jinja(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"not valid Jinja, line 2: .*chat_template"):
        ChatTemplate.from_directory(with_template(tmp_path, "\n{% for %}"))
