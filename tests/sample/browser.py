"""A headless Chromium, driven by selenium (Debian: chromium chromium-driver; PyPI: selenium)."""

import shutil

NO_BROWSER = "no browser: the trajectory's page was not opened"


def what_is_missing() -> str:
    """Programs that are not installed, empty if all are."""
    return " ".join(name for name in ("chromium", "chromedriver") if shutil.which(name) is None)


def start_browser():
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    # without a sandbox, which root cannot have, and without the /dev/shm that containers lack
    for switch in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1180,900"):
        options.add_argument(f"--{switch}")
    options.binary_location = shutil.which("chromium")
    return webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
