"""The page in a real browser: what a person does with a mouse, with the keyboard alone, on a phone, in the dark."""

import re
import shutil

import pytest
from conftest import PROMPT, Running, with_pages
from playwright.sync_api import expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine (Debian: apt-get install chromium)")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)


@pytest.fixture(scope="module")
def server(tiny):
    with Running(with_pages(tiny), note="gpt2 could not be had; the sample model tiny stands in.") as running:
        yield running


@pytest.fixture
def open_page(browser, server):
    """A function that opens the page; at the end, no page may have written an error to its console.

    refused: the server will refuse something, which the browser itself reports there.
    """
    contexts, problems = [], []

    def open_it(refused=False, **options):
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda message: problems.append(message.text)
                if not (refused and message.text.startswith("Failed to load resource")) else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"http://127.0.0.1:{server.port}/")
        expect(page.locator("#pool-label")).not_to_be_empty()
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert not problems


def done(page, timeout=15_000):
    expect(page.locator("#status")).to_contain_text(re.compile("^(Done|Stopped), "), timeout=timeout)


def numbers(page):
    return {place.get_attribute("data-f"): place.inner_text() for place in page.locator("[data-f]").all()}


def test_generate_shows_text_and_figures(open_page, server):
    page = open_page()
    assert "tiny on cpu, float32" in page.inner_text("#model")
    assert "stands in" in page.inner_text("#note")
    page.fill("[name=seed]", "5")
    page.fill("[name=max_tokens]", "20")
    page.fill("#prompt", PROMPT)
    page.click("#generate")
    done(page)
    params = dict(temperature=0.8, top_p=0.95, repetition_penalty=1.15, seed=5, max_tokens=20)
    expected = server.complete(prompt=PROMPT, **params)
    assert page.locator("#text .prompt").text_content() == PROMPT
    assert page.locator("#text .new").text_content() == expected["choices"][0]["text"]
    shown = numbers(page)
    assert shown["reason"] == expected["choices"][0]["finish_reason"] and shown["seed"] == "5"
    assert shown["tokens"].startswith(f"{expected['usage']['completion_tokens']} of 20")
    assert re.fullmatch(r"[\d.]+ m?s", shown["first"]) and re.fullmatch(r"\d+ tokens/s", shown["rate"])
    assert re.search("median [0-9.]+ ms", page.locator("#itl").get_attribute("aria-label"))


def test_numbers_move_while_it_streams_and_escape_stops(open_page, server):
    page = open_page()
    page.fill("[name=max_tokens]", "900")
    page.fill("[name=temperature]", "5")                             # so hot that it finds no end
    page.press("#prompt", "Enter")
    expect(page.locator("#status")).to_have_text("Generating …")
    expect(page.locator("[data-f=rate]")).to_contain_text("tokens/s")
    expect(page.locator("#slots li").first).to_contain_text("Your text")
    early = page.locator("#text .new").text_content()
    expect(page.locator("#text .new")).not_to_have_text(early)
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_contain_text("Stopped, ")
    assert server.idle(2)
    text = page.locator("#text .new").text_content()
    assert text.startswith(early) and len(text) > len(early) > 0
    assert numbers(page)["reason"] == "stopped"
    page.fill("[name=max_tokens]", "5")
    page.click("#generate")
    expect(page.locator("#status")).to_have_text("Done, 5 tokens.")
    expect(page.locator("#slots li").first).to_contain_text("free")
    page.click("#again")
    expect(page.locator("#status")).to_have_text("Done, 5 tokens.")


def test_eight_at_once_fill_the_slots_and_the_pages(open_page, server):
    page = open_page()
    label = page.locator("#pool").get_attribute("aria-label")
    assert re.match("256 pages of 16 tokens: 0 in use", label)
    pixels = page.evaluate("document.getElementById('pool').toDataURL()")
    page.click("text=Run statically")
    expect(page.locator("#compare")).to_contain_text("static", timeout=30_000)
    texts = page.locator("#eight p").all_text_contents()
    assert len(texts) == 8 and min(map(len, texts)) > 60
    page.click("text=Run 8 at once")
    expect(page.locator("#engine-state")).to_have_text("4 of 4 slots busy")
    expect(page.locator("#queue")).to_contain_text("queued")
    expect(page.locator("#pool")).to_have_attribute("aria-label", re.compile(r"[1-9]\d* in use \(2 shared\)"))
    assert page.evaluate("document.getElementById('pool').toDataURL()") != pixels
    expect(page.locator("#slots")).to_contain_text("Stream 8")       # it waited until a slot was free
    expect(page.locator("#compare")).to_contain_text("continuous", timeout=30_000)
    assert page.locator("#eight p").all_text_contents() == texts
    assert page.locator("#compare tbody tr").count() == 2
    expect(page.locator("#engine-state")).to_have_text("idle")
    expect(page.locator("#pool")).to_have_attribute("aria-label", re.compile(r"\b0 in use"))    # drawn a frame later
    assert server.idle()


def test_eight_can_be_stopped(open_page, server):
    page = open_page()
    page.click("text=Run 8 at once")
    expect(page.locator("#engine-state")).to_have_text("4 of 4 slots busy")
    page.click("#stop")
    expect(page.locator("#eight-status")).to_have_text("Stopped.")
    assert server.idle(2)
    expect(page.locator("text=Run 8 at once")).to_be_enabled()


def test_tokens_are_chips_with_their_alternatives(open_page):
    page = open_page()
    page.fill("[name=max_tokens]", "12")
    page.fill("[name=temperature]", "0")
    page.click("#generate")
    done(page)
    page.check("[value=tokens]", force=True)
    chips = page.locator(".chip")
    expect(chips).to_have_count(12)
    assert page.locator("#chips").inner_text() == page.locator("#text").text_content()
    shades = [float(chip.evaluate("e => e.style.getPropertyValue('--p')")) for chip in chips.all()]
    assert all(0 < p <= 1 for p in shades) and len(set(shades)) > 5
    chips.nth(3).hover()
    rows = page.locator("#tip div")
    expect(rows).to_have_count(5)
    assert "chosen" in rows.first.get_attribute("class")             # at temperature 0
    found = [float(row.split()[-2]) for row in rows.all_inner_texts()]
    assert found == sorted(found, reverse=True) and abs(found[0] / 100 - shades[3]) < 0.01
    page.mouse.move(0, 0)
    expect(page.locator("#tip")).to_be_hidden()
    chips.first.focus()
    expect(page.locator("#tip")).to_be_visible()
    page.keyboard.press("ArrowRight")
    expect(chips.nth(1)).to_be_focused()
    page.keyboard.press("End")
    expect(chips.last).to_be_focused()


def test_text_is_text(open_page):
    page = open_page()
    evil = "<img src=x onerror=\"document.title='owned'\"><b>bold</b> &amp;"
    page.fill("#prompt", evil)
    page.fill("[name=max_tokens]", "3")
    page.click("#generate")
    done(page)
    page.check("[value=tokens]", force=True)
    assert page.locator("#text .prompt").text_content() == page.locator("#chips .prompt").text_content() == evil
    assert page.locator("#output img, #output b").count() == 0 and page.title() != "owned"


def test_what_the_server_refuses_is_an_alert(open_page):
    page = open_page(refused=True)
    page.evaluate("document.getElementById('form').noValidate = true")
    page.fill("[name=top_p]", "7")
    page.click("#generate")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("top_p must be a finite number above 0 to 1, not 7")
    page.fill("[name=top_p]", "1")
    page.fill("[name=max_tokens]", "2")
    page.click("#generate")
    done(page)
    expect(alert).to_be_hidden()


def test_keyboard_alone_reaches_everything(open_page):
    page = open_page()
    page.fill("[name=max_tokens]", "4")
    page.press("#prompt", "Enter")
    done(page)
    page.focus("#prompt")
    page.evaluate("document.activeElement.blur()")
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        name, outline = page.evaluate("""() => {
            const e = document.activeElement, shown = e.name === "view" ? e.nextElementSibling : e;
            return [e.id || e.name || e.dataset.eight || e.className, getComputedStyle(shown).outlineStyle]; }""")
        assert not name or outline == "solid", name
        seen.add(name)
    assert seen >= {"prompt", "example", "max_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed",
                    "generate", "again", "copy", "view", "continuous", "static"}


def test_focus_stays_where_it_was_and_nothing_covers_a_button(open_page):
    page = open_page()
    page.fill("[name=max_tokens]", "400")
    page.fill("[name=temperature]", "5")
    page.focus("#generate")
    page.keyboard.press("Enter")
    expect(page.locator("#stop")).to_be_enabled()
    assert page.evaluate("document.activeElement.id") == "generate"
    page.focus("#stop")
    page.keyboard.press("Enter")
    expect(page.locator("#stop")).to_be_disabled()
    assert page.evaluate("document.activeElement.id") == "stop"
    for where in ("0", "1e9"):
        page.evaluate(f"scrollTo(0, {where})")
        covered = page.evaluate("""[...document.querySelectorAll("button, input, textarea")].filter(e => {
            const {x, y, width, height} = e.getBoundingClientRect(), cx = x + width / 2, cy = y + height / 2;
            return height && cy > 0 && cy < innerHeight && !e.contains(document.elementFromPoint(cx, cy)); })
            .map(e => e.outerHTML)""")
        assert covered == []


def test_escape_closes_the_alternatives_before_it_stops(open_page, server):
    page = open_page()
    page.fill("[name=temperature]", "5")
    page.fill("[name=max_tokens]", "900")
    page.check("[value=tokens]", force=True)
    page.click("#generate")
    page.locator(".chip").nth(2).hover()
    expect(page.locator("#tip")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()
    expect(page.locator("#status")).to_have_text("Generating …")
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_contain_text("Stopped, ")
    assert server.idle(2)


def test_what_goes_wrong_with_the_eight_is_said_there(open_page, server, monkeypatch):
    page = open_page(refused=True)
    monkeypatch.setattr(server.scheduler, "max_waiting", 7)
    page.click("text=Run 8 at once")
    expect(page.locator("#eight-error")).to_contain_text("8 requests at once; the queue holds 7")
    assert page.locator("#eight h3 span").all_inner_texts() == ["not run"] * 8


def test_screen_readers_hear_of_the_end_only(open_page):
    page = open_page()
    live = page.locator("[aria-live], [role=status], [role=alert], [role=log]")
    assert {e.get_attribute("id") for e in live.all()} == {"status", "error", "eight-status", "eight-error"}
    for name in ("Prompt", "Tokens", "Temperature", "Top-k", "Top-p", "Repetition penalty", "Seed"):
        assert page.get_by_label(name, exact=True).count() >= 1, name
    assert page.locator("canvas:not([role=img][aria-label])").count() == 0


CONTRAST = """() => {
  const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const over = (layers) => {
    pen.clearRect(0, 0, 1, 1);
    for (const c of layers) { pen.fillStyle = c; pen.fillRect(0, 0, 1, 1); }
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => rgb.map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
                            .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !e.checkVisibility() || e.closest("script, style, :disabled")) continue;
    const layers = [];
    for (let at = e; at; at = at.parentElement) layers.unshift(getComputedStyle(at).backgroundColor);
    const back = over(layers), front = over([...layers, getComputedStyle(e).color]);
    const [a, b] = [light(back), light(front)].sort((x, y) => y - x);
    found.push([(a + .05) / (b + .05), walker.currentNode.data.trim().slice(0, 30)]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(open_page, scheme):
    page = open_page(color_scheme=scheme)
    page.fill("[name=max_tokens]", "30")
    page.click("#generate")
    done(page)
    page.check("[value=tokens]", force=True)
    page.locator(".chip").nth(2).hover()
    found = page.evaluate(CONTRAST)
    assert len(found) > 60
    assert [entry for entry in found if entry[0] < 4.5] == []


def test_phone(open_page):
    page = open_page(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    page.fill("[name=max_tokens]", "15")
    page.tap("#generate")
    done(page)
    page.check("[value=tokens]", force=True)
    page.locator(".chip").last.tap()
    expect(page.locator("#tip")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    small = page.evaluate("""[...document.querySelectorAll("button:not(.chip), input:not([type=radio]), textarea")]
        .filter(e => e.checkVisibility() && e.getBoundingClientRect().height < 30).map(e => e.outerHTML)""")
    assert not small


def test_reduced_motion(open_page):
    moving = "getComputedStyle(document.getElementById('text'), '::after').animationName"
    start = "document.getElementById('text').classList.add('running')"
    page = open_page()
    page.evaluate(start)
    assert page.evaluate(moving) == "blink"
    page = open_page(reduced_motion="reduce")
    page.evaluate(start)
    assert page.evaluate(moving) == "none"


def test_the_page_needs_nothing_from_elsewhere(open_page, server, browser):
    asked = []
    context = browser.new_context()
    page = context.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"http://127.0.0.1:{server.port}/")
    expect(page.locator("#engine-state")).to_have_text("idle")
    context.close()
    assert all(url.startswith((f"http://127.0.0.1:{server.port}/", "data:")) for url in asked)


def test_api_key_is_asked_for(browser, tiny):
    with Running(with_pages(tiny), api_key="secret") as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{server.port}/")
        page.fill("#key-input", "secret")
        page.click("#key button")
        expect(page.locator("#model")).to_contain_text("tiny")
        page.fill("[name=max_tokens]", "3")
        page.click("#generate")
        done(page)
        context.close()


def test_copy(open_page):
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    page.fill("[name=max_tokens]", "5")
    page.click("#generate")
    done(page)
    page.click("#copy")
    expect(page.locator("#copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == page.locator("#text").text_content()
