"""The report in Chromium, without a window: its tests skip where that is not installed, or fail if ``CI`` is set."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def _missing() -> str:
    """Say what lacks for the tests in a browser."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed: pip install selenium"
    lacks = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(lacks)} not found: apt-get install chromium chromium-driver" if lacks else ""


@contextmanager
def started() -> Iterator[Any]:
    if missing := _missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})  # seconds that it computes
    yield driver
    driver.quit()


class Page:
    """A report that is open; elements are named by CSS selectors."""

    def __init__(self, driver: Any, path: Path, *, width: int, scheme: str) -> None:
        self.driver, self.path, self.js = driver, path, driver.execute_script
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get(path.as_uri())

    def all(self, css: str) -> list[Any]:
        return self.driver.find_elements("css selector", css)

    def one(self, css: str) -> Any:
        (found,) = self.all(css)
        return found

    def text(self, css: str) -> str:
        return self.one(css).text

    def texts(self, css: str) -> list[str]:
        return [element.text for element in self.all(css)]

    def column(self, table: str, c: int) -> list[str]:
        rows = "[...document.querySelectorAll(arguments[0])]"
        return self.js(f"return {rows}.map((row) => row.children[arguments[1]].textContent)", f"#{table} tbody tr", c)

    @property
    def focused(self) -> Any:
        return self.driver.switch_to.active_element

    def press(self, css: str, *keys: str) -> None:
        """Focus an element, and press keys, by their names or as they are."""
        from selenium.webdriver.common.keys import Keys

        self.js("document.querySelector(arguments[0])?.focus()", css)
        for key in keys:
            self.focused.send_keys(getattr(Keys, key, key))

    @property
    def mouse(self) -> Any:
        from selenium.webdriver import ActionChains

        return ActionChains(self.driver, duration=0)

    def in_sight(self, css: str) -> Any:
        """Scroll the element to the middle of the window."""
        element = self.one(css)
        self.js("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
        return element

    def point(self, element: Any, x: float, y: float = 0) -> None:
        """Move the pointer to so many pixels from the middle of the element."""
        self.mouse.move_to_element_with_offset(element, round(x), round(y)).perform()

    @property
    def shown(self) -> int:
        """Index of the moment that the picture of the memory shows."""
        return int(self.one("#memory-area").get_attribute("aria-valuenow")) - 1

    @property
    def op_shown(self) -> str:
        return self.text("#memory-readout h3").removesuffix(" (the peak)")

    def scale(self, along: str) -> None:
        """Draw the memory along "time" or "ops"."""
        script = "const s = document.getElementById('memory-scale'); s.value = arguments[0];"
        self.js(f"{script} s.dispatchEvent(new Event('change'))", along)
