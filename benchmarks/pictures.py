"""`make pictures`: the page as it is now, in docs/: Plan, Runs, Compare and Run, in a browser, from our own commands.

True colour, twice compressed: a palette of 256 would make two hues one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

DOCS = Path(__file__).parents[1] / "docs"
MEASURED = "benchmarks/results/mpt_h200/results.csv"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--force-color-profile=srgb"]
SMALL = "benchmarks/data/mpt-1m.toml"
COMMANDS = (
    "plan llama-3-8b --on h200 --seq 8k --device-mem 40GiB --host-mem 110GiB -o html",
    f"report {MEASURED} --price 3.5 -o html -w runs.html",
    f"train {SMALL} --steps 60 --evaluate-every 20 --profile --batch 4 --seq 256 --store runs",
    f"train {SMALL} --steps 60 --evaluate-every 20 --profile --batch 8 --seq 256 --store runs",
    "compare 0001 0002 --store runs -o html",
    "report --store runs -o html -w run.html",
)


@dataclass(frozen=True)
class Picture:
    """What a browser shows of a file."""

    name: str
    file: str
    address: str
    width: int
    height: int
    above: str = ""
    """What stands at the top of the picture; nothing: the page."""


PICTURES = (
    Picture("page-plan.png", "plan.html", "#price=h200:3.5", 1280, 1120),
    Picture("page-runs.png", "runs.html", "", 1280, 1300),
    Picture("page-compare.png", "compared.html", "", 1280, 1300),
    Picture("page-run.png", "run.html", "#run=0002", 1280, 1290, "run"),
)


def main() -> None:
    """Run the commands, open what they wrote, keep what is seen."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if chromium is None:
        sys.exit("there is no Chromium here; hint: make test as root installs it on Debian")
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            _run(command, Path(folder))
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
            for picture in PICTURES:
                _take(browser, picture, Path(folder))
            browser.close()


def _run(command: str, folder: Path) -> None:
    print(f"$ flopwise {command}", flush=True)
    root = DOCS.parent
    words = [str(root / word) if (root / word).is_file() else word for word in command.split()]
    done = subprocess.run([sys.executable, "-P", "-m", "flopwise", *words], cwd=folder, check=False)
    # A slower cell is exit code 1 of `compare`, and a picture all the same.
    if done.returncode > (1 if words[0] == "compare" else 0):
        sys.exit(done.returncode)


def _take(browser: Any, picture: Picture, folder: Path) -> None:  # noqa: ANN401 - Playwright's
    page = browser.new_page(viewport={"width": picture.width, "height": picture.height}, color_scheme="light")
    page.goto(f"{(folder / picture.file).as_uri()}{picture.address}")
    if picture.above:
        page.evaluate(
            "id => { document.getElementById(id).scrollIntoView(); document.activeElement.blur(); }", picture.above
        )
    page.wait_for_timeout(500)
    page.screenshot(path=folder / picture.name)
    page.close()
    target = DOCS / picture.name
    Image.open(folder / picture.name).convert("RGB").save(target, optimize=True)
    print(f"{target.relative_to(DOCS.parent)}  {target.stat().st_size / 1024:.0f} kB")


if __name__ == "__main__":
    main()
