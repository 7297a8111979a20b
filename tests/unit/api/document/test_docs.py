"""The page for people: complete, escaped, and without other files."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from typing import Any

from front_end import FrontEnd, says
from penstock.api.app import ROUTES
from penstock.api.document.docs import ApiDocument, render_page
from penstock.api.document.openapi import make_document
from penstock.api.document.route import Route

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks that tags are closed in order; keeps the text, the ids and the links."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.links: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.links |= {value for name, value in attrs if name in ("href", "src") and value}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_it_lists_every_route_with_its_fields_limits_and_an_example() -> None:
    page = Page(ApiDocument(ROUTES).page.body.decode())
    for route in ROUTES:
        assert f"{route.method} {route.documented_path}" in page.text
        assert route.name in page.ids
        assert f"#{route.name}" in page.links
    for words in ("max_completion_tokens", "at most 128", "required", "repetition_penalty", "at least 0.01", "text/event-stream"):
        assert words in page.text, words
    assert page.text.count("curl http://localhost:8000/") == len(ROUTES)


def test_links_have_targets_and_nothing_is_loaded() -> None:
    page = Page(ApiDocument(ROUTES).page.body.decode())
    assert len(set(page.ids)) == len(page.ids)
    assert {link for link in page.links if not link.startswith("#")} == {"/openapi.json"}
    assert {link.removeprefix("#") for link in page.links if link.startswith("#")} <= set(page.ids)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "form"}
    assert not {name for name in page.attributes if name.startswith("on") or name == "style"}


def test_all_text_is_escaped() -> None:
    evil = "</p><script>alert('`x`\"&')</script>"
    route = Route("POST", "/<b>", evil, evil, description=f"`{evil}` `odd", example={"a": evil}, body=dict[str, Any])
    document = make_document([route])
    document["info"]["title"] = evil
    document["components"]["schemas"] = {
        f'"><{name}': {**schema, "description": evil} for name, schema in document["components"]["schemas"].items()
    }
    content = render_page(document)
    assert "<script" not in content
    page = Page(content)
    assert "script" not in page.tags
    assert page.tags <= {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "h3",
        "p",
        "a",
        "ul",
        "li",
        "code",
        "span",
        "pre",
    } | {*("section", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "br")}
    assert page.text.count("alert(") >= 4


async def test_the_policy_allows_only_the_style() -> None:
    front_end = FrontEnd(says("x"))
    await front_end.send("GET", "/docs")
    headers = {name.decode(): value.decode() for name, value in front_end.sent[0]["headers"]}
    assert front_end.status == 200
    assert headers["content-type"] == "text/html; charset=utf-8"
    (style,) = re.findall(r"<style>(.*?)</style>", front_end.body.decode(), re.DOTALL)
    hashed = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert f"style-src 'sha256-{hashed}'" in policy
    assert "unsafe" not in policy
    await front_end.send("POST", "/docs")
    assert front_end.status == 405
