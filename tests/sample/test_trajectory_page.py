"""The trajectory's page in a real browser: what it shows at each step is what the sampler revealed."""

import dataclasses
import re
import time

import pytest
import torch

from lomdm_dist.sample import Samples, sample
from lomdm_dist.sample.trajectory import page, trajectory
from lomdm_dist.train.checkpoint import Checkpoint
from tests.sample.browser import NO_BROWSER, start_browser, what_is_missing

STEPS, FEWER = 12, 5  # of the two models
CLASSES = ["noun", "verb", "article", "preposition", "other"]


@pytest.fixture(scope="module")
def browser():
    if missing := what_is_missing():
        pytest.skip(f"{NO_BROWSER}: {missing}")
    browser = start_browser()
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def drawn(trained_run) -> list[Samples]:
    """Two models' samples, 3 each; the second has a prompt, markup in it, and exponents."""
    checkpoint = Checkpoint(trained_run.run)
    model, tokenizer = checkpoint.build_model(), checkpoint.tokenizer()
    first = dataclasses.replace(sample(model, 3, 16, STEPS, seed=1), exponents=None)
    ids = tokenizer("</script><i>“x”\n\n")["input_ids"][:10]
    given = torch.full((16,), model.mask_id)
    given[: len(ids)] = torch.tensor(ids)
    second = sample(model, 3, 16, FEWER, seed=2, given=given)
    exponents = (0.4 + 0.05 * torch.arange(16.0)).repeat(3, 1).masked_fill(second.revealed_at == 0, torch.nan)
    return [first, dataclasses.replace(second, exponents=exponents)]


@pytest.fixture(scope="module")
def tokenizer(trained_run):
    return Checkpoint(trained_run.run).tokenizer()


@pytest.fixture(scope="module")
def address(drawn, tokenizer, tmp_path_factory) -> str:
    classes = [[CLASSES[i % 5] for i in range(16)]] * 3
    models = [
        trajectory(drawn[0], tokenizer, "first", no_classes="no tagger is installed"),
        trajectory(drawn[1], tokenizer, "second", classes=classes),
    ]
    path = tmp_path_factory.mktemp("page") / "out.html"
    path.write_text(page(models, "two models"))
    return f"file://{path}"


@pytest.fixture
def opened(browser, address):
    browser.get(address)
    yield browser
    assert not browser.get_log("browser")  # no error, nothing refused, nothing asked of the network
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def press(browser, *keys: str) -> None:
    from selenium.webdriver.common.by import By

    browser.find_element(By.TAG_NAME, "body").send_keys(*keys)


def counts(browser, of: str) -> list[int]:
    """How many tokens of each model's text match."""
    script = (
        "return [...document.querySelectorAll('.text')].map(t => t.querySelectorAll(arguments[0]).length)"
    )
    return browser.execute_script(script, of)


def value(browser, name: str) -> str:
    return browser.execute_script("return document.getElementById(arguments[0]).value", name)


def texts(browser) -> list[str]:
    """What each panel reads; a byte that is no character, which the page spells ⟨E2⟩, as decoders have it."""
    found = browser.execute_script("return [...document.querySelectorAll('.text')].map(t => t.textContent)")
    return [re.sub("⟨..⟩", "\N{REPLACEMENT CHARACTER}", text) for text in found]


def tip(browser) -> list[str]:
    """What is said of the token that has the focus."""
    return browser.execute_script("return document.getElementById('tip').textContent").split("\n")


def test_each_step_shows_what_the_sampler_revealed(opened, drawn):
    from selenium.webdriver.common.keys import Keys

    press(opened, Keys.HOME)
    for step in range(STEPS + 1):
        own = [step, step * FEWER // STEPS]
        assert value(opened, "slider") == str(step)
        seen = [samples.revealed_at[0] <= k for samples, k in zip(drawn, own, strict=True)]
        assert counts(opened, ".token:not(.hidden)") == [int(s.sum()) for s in seen]
        new = [int((s.revealed_at[0] == k).sum()) if k else 0 for s, k in zip(drawn, own, strict=True)]
        assert counts(opened, ".token.new") == new
        assert counts(opened, ".token.given") == [int((s.revealed_at[0] == 0).sum()) for s in drawn]
        press(opened, Keys.ARROW_RIGHT)
    assert value(opened, "slider") == str(STEPS) and counts(opened, ".hidden") == [0, 0]


def test_the_slider_moves_the_texts(opened, drawn):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    slider = opened.find_element(By.ID, "slider")
    ActionChains(opened).click(slider).perform()  # in its middle
    assert value(opened, "slider") == str(STEPS // 2)
    assert counts(opened, ".token:not(.hidden)")[0] == int((drawn[0].revealed_at[0] <= STEPS // 2).sum())
    assert slider.get_attribute("aria-valuetext") == f"step {STEPS // 2} of {STEPS}"
    for button, step in (("previous", STEPS // 2 - 1), ("next", STEPS // 2)):
        opened.find_element(By.ID, button).click()
        assert value(opened, "slider") == str(step)


@pytest.mark.parametrize("by", ["key", "button"])
def test_play_advances_to_the_end_and_pauses(opened, by):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    def toggle():
        if by == "key":
            press(opened, Keys.SPACE)
        else:
            opened.find_element(By.ID, "play").click()

    def label():
        return opened.find_element(By.ID, "play").get_attribute("aria-label")

    opened.execute_script("document.getElementById('speed').value = 5")
    toggle()  # from the end: begins anew
    assert label() == "Pause"
    steps = {int(value(opened, "slider"))}
    deadline = time.monotonic() + 20
    while label() == "Pause":
        steps.add(int(value(opened, "slider")))
        assert time.monotonic() < deadline
    assert len(steps) > 2 and value(opened, "slider") == str(STEPS)
    opened.execute_script("document.getElementById('speed').value = 1")
    toggle()
    toggle()
    assert label() == "Play" and int(value(opened, "slider")) < STEPS


def test_the_keyboard_reaches_all(opened, drawn, tokenizer):
    from selenium.webdriver.common.keys import Keys

    for key, shown in ((Keys.ARROW_DOWN, 1), (Keys.ARROW_DOWN, 2), (Keys.ARROW_DOWN, 0), (Keys.ARROW_UP, 2)):
        press(opened, key)
        assert value(opened, "sample") == str(shown)
        assert texts(opened) == [tokenizer.decode(samples.token_ids[shown]) for samples in drawn]
    for colour in ("class", "exponent", "step"):
        press(opened, "c")
        assert value(opened, "colour") == colour
    press(opened, Keys.HOME, "]", "]")
    assert tip(opened) == ["position 2 of 16", "not revealed yet"]
    press(opened, "[")  # before the first is the last of the model beside
    assert tip(opened) == ["position 16 of 16", "not revealed yet"]
    press(opened, "[", Keys.END)
    about = tip(opened)
    step, exponent = int(drawn[1].revealed_at[2, 15]), float(drawn[1].exponents[2, 15])
    assert about[0] == "position 16 of 16" and about[2] == f"revealed in step {step} of {FEWER}"
    assert about[3] == f"exponent {exponent:.4g}" and about[4] == "noun"


def test_what_has_no_data_is_disabled_with_its_reason(browser, drawn, tokenizer, tmp_path):
    script = "return [...document.getElementById('colour').options].map(o => [o.disabled, o.text])"
    equal = dataclasses.replace(drawn[1], exponents=torch.ones(3, 16))
    for samples, reason in ((drawn[0], "the schedule has no exponents"), (equal, "all are equal")):
        models = [trajectory(samples, tokenizer, "first", no_classes="no tagger is installed")]
        (tmp_path / "one.html").write_text(page(models, "one model"))
        browser.get(f"file://{tmp_path / 'one.html'}")
        assert browser.execute_script(script) == [
            [False, "by step"],
            [True, "by part of speech: no tagger is installed"],
            [True, f"by exponent: {reason}"],
        ]
        press(browser, "c")
        assert value(browser, "colour") == "step"


CONTRAST = """
const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
function luminance(colour, under) {
  pixel.fillStyle = under; pixel.fillRect(0, 0, 1, 1);
  pixel.fillStyle = colour; pixel.fillRect(0, 0, 1, 1);
  const [r, g, b] = [...pixel.getImageData(0, 0, 1, 1).data].map((v) => {
    v /= 255; return v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; });
  return .2126 * r + .7152 * g + .0722 * b;
}
const card = getComputedStyle(document.querySelector(".panel")).backgroundColor;
const nodes = document.querySelectorAll(".token:not(.hidden), .soft, h1, h2, label, .edges, kbd, button");
return Math.min(...[...nodes].filter((node) => node.offsetWidth).map((node) => {
  const style = getComputedStyle(node);
  const [a, b] = [luminance(style.color, card), luminance(style.backgroundColor, card)].sort();
  return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
}));
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_are_readable_in_all_colours(opened, scheme):
    """The least contrast of a text with what is under it, by WCAG 2: 4.5 is its level AA."""
    from selenium.webdriver.common.by import By

    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    opened.refresh()

    def is_dark() -> bool:
        script = "return getComputedStyle(document.body).backgroundColor"
        return sum(map(float, opened.execute_script(script).strip("rgba()").split(", "))) < 300

    for dark in (scheme == "dark", scheme != "dark"):
        assert is_dark() == dark
        for _ in range(3):
            assert opened.execute_script(CONTRAST) >= 4.5, (dark, value(opened, "colour"))
            press(opened, "c")
        opened.find_element(By.ID, "theme").click()


def test_models_stand_below_one_another_where_it_is_narrow(opened):
    script = "return [...document.querySelectorAll('.panel')].map(p => p.getBoundingClientRect().x)"
    metrics = {"width": 1180, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    for width, columns in ((1180, 2), (420, 1)):
        opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics | {"width": width})
        assert len(set(opened.execute_script(script))) == columns
        assert opened.execute_script("return document.documentElement.scrollWidth") <= width
    opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
