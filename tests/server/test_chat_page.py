"""Chat page in a browser."""

import re
from collections.abc import Iterator

import pytest
from browser import CHROMIUM, Browser
from server_process import eventually

ANSWER = "document.querySelector('article.assistant:last-of-type .body')"
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def page(server, tmp_path_factory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        browser.open(server.url)
        browser.until("document.querySelectorAll('#model option').length == 2")
        yield browser


def ask(page, text):
    page.js("document.getElementById('input').focus()")
    page.type(text)
    page.press("Enter", 13, "\r")


def setting(page, name, value):
    page.js(
        f"{{ const field = document.getElementById('{name}'); field.value = '{value}';"
        "field.dispatchEvent(new Event('change')); }"
    )


def test_files(server):
    page = server.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for link in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        assert link.startswith(("/page/", "data:")), link  # nothing from elsewhere
        if link.startswith("/page/"):
            assert server.http.get(link).status_code == 200
    assert server.http.get("/page/%2e%2e%2fconfig.py").status_code == 404


@in_a_browser
def test_conversation(page, client):
    setting(page, "temperature", "0")
    setting(page, "max_tokens", "12")
    ask(page, "def f(x):")
    page.until("!document.getElementById('send').hidden && document.querySelector('.assistant')")
    messages = [{"role": "user", "content": "def f(x):"}]
    expected = client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=12
    )
    text = expected.choices[0].message.content
    page.until(f"{ANSWER}.textContent.length > 0")
    # headings and backticks are shown, not spelt; this answer has none
    assert page.js(f"{ANSWER}.textContent") == text
    assert "tokens" in page.js("document.getElementById('rate').textContent")
    ask(page, "more")
    page.until("document.querySelectorAll('article').length == 4")
    page.until("!document.getElementById('send').hidden")
    page.press("o", 79)  # without Ctrl and Shift it is a letter
    assert page.js("document.querySelectorAll('article').length") == 4
    page.js("document.getElementById('new').click()")
    assert page.js("document.querySelectorAll('article').length") == 0


@in_a_browser
def test_stop_and_failure(page, server):
    setting(page, "max_tokens", "")
    setting(page, "temperature", "1")
    page.js("document.getElementById('new').click()")
    setting(page, "max_tokens", "400")
    ask(page, "import")
    page.until(f"{ANSWER} && {ANSWER}.textContent.length > 0")
    page.press("Escape", 27)
    page.until("!document.getElementById('send').hidden")
    eventually(server.idle)
    page.js("document.getElementById('input').value = ''")
    setting(page, "temperature", "-1")
    ask(page, "again")
    page.until("document.querySelector('article.failed')")
    assert "temperature" in page.js("document.querySelector('article.failed .body').textContent")
    assert page.js("document.getElementById('input').value") == "again"  # to be sent again
    setting(page, "temperature", "")


@in_a_browser
def test_markup_runs_nothing(page):
    page.js(
        "import('/page/markup.js').then(({ show }) => { const div = document.createElement('div');"
        "show(div, '# T\\n`a<b>` <img src=x onerror=alert(1)>\\n```py\\nx = 1\\n```\\nend **b**');"
        "window.shown = div.innerHTML; })"
    )
    page.until("window.shown !== undefined")
    shown = page.js("window.shown")
    assert "<img" not in shown
    assert shown.startswith("<h2>T</h2><code>a&lt;b&gt;</code> &lt;img")
    assert "<pre><code>x = 1</code></pre>" in shown
    assert shown.endswith("end <strong>b</strong>")
