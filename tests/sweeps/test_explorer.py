"""The page of heads.py explore in a headless Chromium, as a reader uses it."""

import json
import re
import sys

import pytest
from sweep_cases import ROOT, finish
from test_browser import browser, contrast  # noqa: F401  a fixture

TRAIN = {
    "data.vocab_size": 60,
    "data.batch_tokens": 256,
    "data.max_decode_length": 16,
    "model.width": 16,
    "model.mlp_dim": 16,
    "model.num_encoder_layers": 1,
    "model.num_decoder_layers": 2,
    "model.attention.num_heads": 2,
    "train.num_steps": 20,
    "train.eval_every_steps": 20,
    "train.checkpoint_every_steps": 20,
    "seeds": 2,
}
EXPLORE = ("--split=test", "--sentences=6")


def trained(folder, corpus, **changes):
    settings = TRAIN | {"data.name": "text", "data.directory": corpus} | changes
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    config = f"--config={ROOT}/configs/base.py"
    finish([sys.executable, "train.py", config, f"--workdir={folder}", *flags])
    return folder


@pytest.fixture(scope="module")
def explorer(tmp_path_factory, corpus):
    """A page of two runs of a translator, of two trials each."""
    folder = tmp_path_factory.mktemp("explorer")
    one = trained(folder / "one", corpus)
    two = trained(folder / "two", corpus, **{"model.attention.merge": "mean"})
    path = folder / "explorer.html"
    command = [sys.executable, "heads.py", "explore", f"--workdir={one}"]
    finish([*command, f"--compare={two}", f"--output={path}", *EXPLORE])
    return path


@pytest.fixture
def page(browser, explorer):  # noqa: F811
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    open_page(page, explorer)
    yield page
    assert page.errors == [] and page.fetched == [explorer.as_uri()]
    page.close()


def open_page(page, path):
    page.errors, page.fetched = [], []
    page.on("request", lambda request: page.fetched.append(request.url))
    page.on("console", lambda message: page.errors.append(message.text))
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_selector("body[data-ready]")


def test_every_head_has_a_thumbnail_and_sorting_orders_them(page):
    labels = page.eval_on_selector_all(".thumb", "all => all.map(b => b.ariaLabel)")
    assert len(labels) == 2 + 4 + 4
    assert labels[0].startswith("encoder layer 0, head 0")
    for key in ("added_loss", "entropy", "distance", "sink"):
        page.select_option("#sort", key)
        sites = page.eval_on_selector_all(".thumb", "all => all.map(b => b.ariaLabel)")
        name = key.replace("_", " ")
        for site in ("encoder", "decoder", "cross"):
            own = [x for x in sites if x.startswith(site)]
            values = [float(re.search(rf"{name} (-?[\d.]+)", x)[1]) for x in own]
            assert values == sorted(values, reverse=True)


def test_hover_tells_where_a_token_looks_with_the_weights_of_the_model(page):
    page.click(".thumb[data-head='cross.1.1']")
    page.hover(".queries .token[data-index='1']")
    text = page.inner_text(".readout")
    shown = [float(weight) for weight in re.findall(r"” ([\d.]+)", text)]
    page.click("text=by norm")
    page.hover(".queries .token[data-index='0']")
    page.hover(".queries .token[data-index='1']")
    by_norm = page.inner_text(".readout")
    assert shown and text != by_norm
    weights = page.evaluate(
        "(() => { state.byNorm = 0; const {S, w} = weights(state.first, "
        "headOf(state.first, 'cross.1.1')); return [...w.slice(S, 2 * S)]; })()"
    )
    assert sum(weights) == pytest.approx(1, abs=0.02)
    assert max(shown) == pytest.approx(max(weights), abs=0.006)


def test_hiding_sinks_leaves_them_without_weight_and_rescales(page):
    page.click(".thumb[data-head='cross.0.0']")
    page.check("#sink")
    rows = page.evaluate(
        "(() => { const {T, S, w, hidden} = weights(state.first, "
        "headOf(state.first, 'cross.0.0')); return [hidden, [...Array(T).keys()].map("
        "q => [...w.slice(q * S, q * S + S)])]; })()"
    )
    hidden, rows = rows
    assert hidden == [len(rows[0]) - 1]  # EOS of the source
    for row in rows:
        assert row[hidden[0]] == 0 and sum(row) == pytest.approx(1, abs=1e-5)


def test_heads_are_added_by_shift_and_shown_in_colours(page):
    page.click(".thumb[data-head='cross.0.0']")
    page.click(".thumb[data-head='cross.0.1']", modifiers=["Shift"])
    assert page.locator(".chip").count() == 2
    colours = page.eval_on_selector_all(
        ".chip i", "all => all.map(i => getComputedStyle(i).backgroundColor)"
    )
    assert len(set(colours)) == 2
    page.click(".thumb[data-head='encoder.0.1']", modifiers=["Shift"])  # another site
    assert page.locator(".chip").count() == 1


def test_two_runs_stand_side_by_side_with_heads_matched(page):
    page.set_viewport_size({"width": 1800, "height": 900})
    page.select_option("#second", label="two, trial 1")
    assert page.locator(".panels > section").count() == 2
    boxes = [page.locator(".panels > section").nth(i).bounding_box() for i in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]
    assert "Matched: " in page.inner_text(".panels > section >> nth=1")


def test_what_changes_without_a_head_is_kept_by_place(page):
    data = json.loads(page.text_content("#data"))
    for trial in data["runs"][0]["trials"]:
        heads = {f"{h['site']}.{h['layer']}.{h['head']}" for h in trial["heads"]}
        for sentence in trial["predictions"]:
            assert set(sentence["without"]) <= heads
            for changed in sentence["without"].values():
                assert all(sentence["tokens"][int(i)] != x for i, x in changed.items())


def test_the_keyboard_reaches_heads_tokens_and_cells(page):
    page.focus(".thumb[data-head='decoder.0.0']")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.get_attribute("[data-head='decoder.0.1']", "aria-pressed") == "true"
    page.focus(".queries .token[data-index='0']")
    page.keyboard.press("ArrowDown")
    assert "looks at" in page.inner_text(".readout")
    page.keyboard.press("ArrowRight")
    assert "is looked at by" in page.inner_text(".readout")
    page.click("text=matrix")
    page.focus(".matrix canvas")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert "→" in page.inner_text(".readout")


@pytest.mark.parametrize("width", [360, 768, 1440, 2560])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_and_can_be_read(browser, explorer, width, scheme):  # noqa: F811
    page = browser.new_page(
        viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    open_page(page, explorer)
    page.click("text=matrix")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.click("text=lines")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for selector in ("h1", ".soft", ".token", ".thumb .name"):
        assert contrast(page, selector) >= 4.5, (selector, scheme)
    assert page.errors == []
    page.close()


def test_the_page_prints_in_light(browser, explorer):  # noqa: F811
    page = browser.new_page(viewport={"width": 680, "height": 960}, color_scheme="dark")
    open_page(page, explorer)
    page.emulate_media(media="print")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(255, 255, 255)"
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.close()


def test_a_hover_at_128_tokens_takes_less_than_50_ms(browser, explorer, tmp_path):  # noqa: F811
    """Of eight heads at once; the data is made up, the template is the real one."""
    import base64
    import zlib

    import numpy as np

    from headcount.analysis.explorer import page as made

    T, N = 128, 8
    rng = np.random.default_rng(0)
    weights = np.tril(rng.exponential(size=(N, 2, T, T)))
    weights = np.rint(255 * weights / weights.sum(-1, keepdims=True)).astype(np.uint8)
    heads = [
        {"site": "decoder", "layer": 0, "head": n, "roles": []}
        | dict.fromkeys(
            ("entropy", "distance", "sink", "confidence", "added_loss"), 0.1
        )
        for n in range(N)
    ]
    sentence = {"read": ["word"] * T, "read_sinks": [0], "text": "word"}
    packed = base64.b64encode(zlib.compress(weights.tobytes())).decode()
    said = {"tokens": ["word"] * T, "without": {}}
    trial = {"name": "trial 0", "heads": heads, "maps": packed, "predictions": [said]}
    site = {
        "name": "decoder",
        "layers": 1,
        "heads": N,
        "queries": "read",
        "keys": "read",
    }
    run = {"name": "x", "sites": [site], "sentences": [sentence], "trials": [trial]}
    path = tmp_path / "large.html"
    path.write_text(made({"title": "x", "about": "", "runs": [run]}))
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    open_page(page, path)
    for n in range(1, N):
        page.click(f".thumb[data-head='decoder.0.{n}']", modifiers=["Shift"])
    times = page.evaluate(
        """() => [...Array(20).keys()].map(i => {
          const start = performance.now();
          hover({side: i % 2 ? "queries" : "keys", index: 3 * i});
          document.body.getBoundingClientRect();
          return performance.now() - start;
        })"""
    )
    assert sorted(times)[len(times) // 2] < 50, times
    assert page.errors == []
    page.close()
