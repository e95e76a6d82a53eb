"""A browser for the tests of pages."""

import shutil
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")


def browser_command(profile: Path, *options: str) -> list[str]:
    """Return the command that opens a page without a window and without connections of the browser's own."""
    assert CHROMIUM is not None
    base = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    return [CHROMIUM, *base, f"--user-data-dir={profile}", *options]
