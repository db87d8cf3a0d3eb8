"""The report in a real browser: figures are drawn, images appear, tables sort, and nothing leaves the page."""

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tico_ssl import evaluate, pretrain
from tico_ssl.report import report
from tico_ssl.report.image_sections import confusion_chart
from tico_ssl.report.page import Section, figure
from tico_ssl.report.page import page as page_of

playwright = pytest.importorskip("playwright.sync_api")
BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser here")

EVIL = "<img src=x onerror=alert(1)>"
ALSO_EVIL = "<script>alert(1)<"  # a folder's name cannot hold a slash
COLOURS = {EVIL: (220, 40, 40), ALSO_EVIL: (40, 40, 220), "plain": (40, 200, 40)}


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """Reports of one run on images whose classes have evil names, and of two runs."""
    root = tmp_path_factory.mktemp("browser")
    for name, colour in COLOURS.items():
        (root / "images" / name).mkdir(parents=True)
        for number in range(20):
            Image.new("RGB", (24, 24), colour).save(root / "images" / name / f"{number} {EVIL[:4]}.png")
    settings = {
        "data.image_size": 16,
        "backbone.name": "tico/resnet10-w4",
        "method.hidden": 16,
        "method.dim": 8,
        "training.batch_size": 20,
        "training.epochs": 3,
        "training.log_every_steps": 1,
        "training.knn_every_epochs": 1,
        "description": EVIL,
    }
    runs = []
    for rho in (8.0, 2.0):
        run = pretrain("demo", root / "images", root / f"rho{rho:g} {EVIL[:4]}", settings | {"method.rho": rho})
        evaluate(run.folder, "knn")
        runs.append(run.folder)
    return {"one": report(runs[0]), "two": report(runs, root / "both")}


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as running:
        launched = running.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--enable-unsafe-swiftshader", "--disable-gpu"]
        )
        yield launched
        launched.close()


class Opened:
    """A page, and all that went wrong on it."""

    def __init__(self, browser, path, **context) -> None:
        self.trouble: list[str] = []
        self.requests: list[str] = []
        self.context = browser.new_context(**({"viewport": {"width": 1280, "height": 800}} | context))
        self.page = self.context.new_page()
        self.page.on("console", lambda said: self.trouble.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.trouble.append("an alert was run"), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url.partition(":")[0]))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("body[data-ready]", timeout=60_000)


@pytest.fixture
def opened(browser):
    made = []

    def make(path, **context) -> Opened:
        made.append(Opened(browser, path, **context))
        return made[-1]

    yield make
    for one in made:
        one.context.close()
        assert one.trouble == []
        assert set(one.requests) <= {"file", "data", "blob"}
        assert one.requests.count("file") == 1


POINT = """place => {
    const plot = document.getElementById("map"), {xaxis, yaxis, _size} = plot._fullLayout;
    const trace = plot.data.find(trace => trace.customdata.includes(place)), at = trace.customdata.indexOf(place);
    const frame = plot.getBoundingClientRect();
    return [frame.left + _size.l + xaxis.d2p(trace.x[at]), frame.top + _size.t + yaxis.d2p(trace.y[at])];
}"""
PIXEL = "() => [...document.querySelector('.card canvas').getContext('2d').getImageData(48, 48, 1, 1).data].slice(0, 3)"


def about(card_text: str) -> tuple[int, int, int]:
    """The colour of the images of the class that a card names."""
    return next(colour for name, colour in COLOURS.items() if card_text.startswith(name))


@pytest.mark.parametrize("which", ["one", "two"])
def test_every_figure_is_drawn(pages, opened, which):
    page = opened(pages[which]).page
    drawn = page.evaluate(
        "[...document.querySelectorAll('.plot')]"
        ".map(plot => [plot.id, plot.dataset.drawn, plot.querySelectorAll('.main-svg').length])"
    )
    assert len(drawn) >= (12 if which == "one" else 4)
    assert all(state == "yes" and layers > 0 for _, state, layers in drawn)


def test_pointing_at_the_map_shows_the_image(pages, opened):
    page = opened(pages["one"]).page
    page.locator("#map").scroll_into_view_if_needed()
    x, y = page.evaluate(POINT, 0)
    page.mouse.move(x - 3, y)
    page.mouse.move(x, y)
    page.wait_for_selector(".card:not([hidden])")
    assert max(abs(a - b) for a, b in zip(page.evaluate(PIXEL), about(page.inner_text(".card")))) <= 12
    page.mouse.move(5, 5)
    page.wait_for_selector(".card", state="hidden")


def test_arrow_keys_walk_through_the_map(pages, opened):
    page = opened(pages["one"]).page
    page.focus("#map")
    seen = set()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
        page.wait_for_selector(".card:not([hidden])")
        page.wait_for_timeout(100)
        seen.add(page.get_attribute(".card", "data-place"))
        assert max(abs(a - b) for a, b in zip(page.evaluate(PIXEL), about(page.inner_text(".card")))) <= 12
    assert len(seen) == 3
    page.keyboard.press("Escape")
    assert page.is_hidden(".card")


def test_a_finger_on_the_map_shows_the_image_and_may_scroll(pages, opened):
    page = opened(pages["one"], viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True).page
    page.locator("#map").scroll_into_view_if_needed()
    page.touchscreen.tap(*page.evaluate(POINT, 7))
    page.wait_for_selector(".card:not([hidden])")
    assert page.evaluate("document.getElementById('map')._fullLayout.dragmode") is False


def test_names_that_look_like_markup_are_seen_as_text(pages, opened):
    page = opened(pages["one"]).page
    legend = page.locator(".legend button").all_inner_texts()
    assert sorted(legend) == sorted(f"● {name} 20" for name in COLOURS)
    ticks = page.locator("#confusion .yaxislayer-above text").all_text_contents()
    assert sorted(ticks) == sorted(name if len(name) <= 22 else name[:21] + "…" for name in COLOURS)
    assert EVIL[:4] in page.inner_text("header")
    assert page.locator("img[src='x']").count() == 0


def test_a_click_on_a_heading_sorts_the_table(pages, opened):
    page = opened(pages["two"]).page
    column = page.locator("table.sortable th").all_text_contents().index("seconds")
    head = page.locator("table.sortable th").nth(column)
    cells = page.locator(f"table.sortable tbody tr td:nth-child({column + 1})")

    def values() -> list[float]:
        return [float(cell.get_attribute("data-value")) for cell in cells.all()]

    head.locator("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert values() == sorted(values(), reverse=True)
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert values() == sorted(values())


def test_the_gallery_shows_what_is_asked_for(pages, opened):
    page = opened(pages["one"]).page
    assert page.locator(".gallery .row").count() > 0
    page.select_option("#gallery-class", label="plain")
    shown = page.locator(".gallery .row:visible figcaption").all_text_contents()
    assert set(shown) == {"plain"}
    assert all(
        page.evaluate("[...document.querySelectorAll('.gallery img')].map(i => i.complete && i.naturalWidth > 0)")
    )
    page.select_option("#gallery-class", value="")
    page.check("#gallery-wrong")
    assert page.locator(".gallery .row:visible:not([data-wrong])").count() == 0


def test_figures_follow_the_page_into_the_dark_and_onto_paper(pages, opened):
    page = opened(pages["one"], color_scheme="dark").page
    ink = "document.getElementById('loss')._fullLayout.font.color"
    dark = page.evaluate(ink)
    page.emulate_media(color_scheme="light")
    page.wait_for_timeout(300)
    light = page.evaluate(ink)
    assert dark != light
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(300)
    width = "document.getElementById('spectrum')._fullLayout.width"
    wide, folded = page.evaluate(width), page.locator("section > details:not([open])").count()
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.wait_for_timeout(300)
    assert page.evaluate(ink) == light
    assert page.evaluate(width) == 660  # what a sheet of paper holds
    assert folded > 0
    assert page.locator("section > details:not([open])").count() == 0
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    page.wait_for_timeout(300)
    assert (page.evaluate(ink), page.evaluate(width)) == (dark, wide)
    assert page.locator("section > details:not([open])").count() == folded
    page.emulate_media(media="print")
    assert page.is_hidden("nav")


@pytest.mark.parametrize("which", ["one", "two"])
def test_a_phone_never_scrolls_sideways(pages, opened, which):
    page = opened(pages[which], viewport={"width": 390, "height": 844}).page
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_everything_has_a_name_for_those_who_do_not_see_it(pages, opened):
    page = opened(pages["one"]).page
    assert page.locator("img:not([alt]), img[alt='']").count() == 0
    assert page.evaluate("[...document.querySelectorAll('.plot')].every(p => p.getAttribute('aria-label').length > 10)")
    links = page.evaluate("[...document.querySelectorAll('nav a')].map(a => !!document.querySelector(a.hash))")
    assert all(links)


def test_the_number_and_four_rows_of_neighbours_are_above_the_fold(pages, opened):
    page = opened(pages["one"]).page
    bottom = "element => element.getBoundingClientRect().bottom"
    assert page.locator(".headline .big").evaluate(bottom) < 800
    assert page.locator(".glimpse .row").count() == 4
    assert page.locator(".glimpse .row").last.evaluate(bottom) < 800
    assert page.locator(".headline .big").evaluate("element => parseFloat(getComputedStyle(element).fontSize)") >= 40


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_names_of_classes_above_the_fold_are_whole(pages, opened, size):
    page = opened(pages["one"], viewport={"width": size[0], "height": size[1]}).page
    captions = page.locator(".glimpse figcaption")
    assert captions.count() == 4
    assert captions.evaluate_all("all => all.every(one => one.scrollWidth <= one.clientWidth)")
    lines = "all => all.map(one => one.clientHeight / parseFloat(getComputedStyle(one).lineHeight))"
    assert max(captions.evaluate_all(lines)) < 1.5


def test_pointing_at_a_name_dims_the_other_groups_and_a_click_keeps_it_so(pages, opened):
    page = opened(pages["one"]).page
    opacity = "document.getElementById('map').data.map(trace => trace.marker.opacity)"
    buttons, usual = page.locator(".legend button"), page.evaluate(opacity)
    buttons.nth(1).hover()
    page.wait_for_function("document.getElementById('map').dataset.shown === '1'")
    dimmed = page.evaluate(opacity)
    assert dimmed[1] == 1
    assert max(dimmed[0], dimmed[2]) < 0.1
    buttons.nth(1).click()
    page.mouse.move(5, 5)
    page.wait_for_timeout(200)
    assert page.evaluate(opacity) == dimmed
    assert buttons.nth(1).get_attribute("aria-pressed") == "true"
    buttons.nth(1).click()
    page.mouse.move(5, 5)
    buttons.nth(1).blur()
    page.wait_for_function("document.getElementById('map').dataset.shown === '-1'")
    assert page.evaluate(opacity) == usual


def test_a_phone_shows_untrained_beside_trained_and_whole_views(pages, opened):
    page = opened(pages["one"], viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True).page
    right = "elements => elements.map(element => element.getBoundingClientRect().right)"
    heads = page.locator("#evaluations th")
    assert {"trained", "untrained", "difference"} <= set(heads.all_inner_texts())
    assert max(heads.evaluate_all(right)) <= 390
    assert max(page.locator(".sheet img").evaluate_all(right)) <= 390
    assert page.evaluate("[...document.querySelectorAll('.scroll')].every(s => s.scrollWidth <= s.clientWidth + 1)")


def test_names_along_a_confusion_matrix_do_not_overlap(tmp_path, opened):
    chart = confusion_chart([f"a name of class {i}" for i in range(50)], 100 * np.eye(50))
    (tmp_path / "page.html").write_text(page_of("t", [], [Section("c", "C", [figure(chart)], [chart])]))
    for width in (1280, 390):
        page = opened(tmp_path / "page.html", viewport={"width": width, "height": 844}).page
        for axis, ends in (("x", ("left", "right")), ("y", ("top", "bottom"))):
            names = page.locator(f"#confusion .{axis}axislayer-above text")
            boxes = names.evaluate_all(
                "(found, ends) => found.map(one => ends.map(end => one.getBoundingClientRect()[end]))", ends
            )
            assert len(boxes) > 5
            assert all(after[0] >= before[1] - 2 for before, after in itertools.pairwise(sorted(boxes)))
