"""How the page looks: contrast in both schemes, and a real browser at a phone's width."""

import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from diagnostics.report import command
from diagnostics.report.command import html

STYLE = (Path(command.__file__).parent / "page.css").read_text(encoding="utf-8")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
AA = 4.5
# Text on what it stands on.
PAIRS = (
    *(("text", "paper"), ("muted", "paper"), ("text", "shade"), ("text", "lane")),
    *(("bad", "paper"), ("bad", "bad-paper"), ("unsure", "unsure-paper"), ("good", "good-paper")),
)


def schemes():
    """The colours of the light scheme, and those that the dark one changes."""
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in split(STYLE))
    return {"light": light, "dark": {**light, **dark}}


def split(style):
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    return light, dark.partition("\n}\n")[0]


def luminance(colour):
    """As WCAG 2.2 defines it."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    darker, lighter = sorted(map(luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_the_measure_of_contrast():
    """The control."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_what_it_stands_on(scheme):
    colours = schemes()[scheme]
    found = {pair: contrast(*(colours[name] for name in pair)) for pair in PAIRS}
    assert min(found.values()) >= AA, found


def test_the_dark_scheme_changes_every_colour_and_there_is_no_other():
    light, dark = (re.findall(r"--([\w-]+): #", part) for part in split(STYLE))
    assert light == dark
    assert {name for pair in PAIRS for name in pair} | {"line"} == set(light)
    assert len(re.findall(r"#[0-9a-f]{3,8}\b", STYLE)) == len(light) + len(dark)


POLICY = re.compile(r"<meta http-equiv=.Content-Security-Policy.*?>")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


def browse(path, profile):
    """The page as the browser has it once all is loaded."""
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
            *("--no-first-run", "--disable-background-networking", "--disable-sync"),
            *(f"--user-data-dir={profile}", "--window-size=500,900", "--dump-dom"),
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=90,
    )
    return done.stdout


@needs_chromium
@pytest.mark.parametrize("closed", [True, False])
def test_a_real_browser_draws_it_and_nothing_overflows(make, tmp_path, closed):
    """At a phone's width: the page itself must not scroll sideways, whatever is unfolded."""
    path = tmp_path / "report.html"
    text = POLICY.sub("", html(make()))
    text = text if closed else text.replace("<details", "<details open")
    probe = "<script>document.title = document.documentElement.scrollWidth</script></body>"
    path.write_text(text.replace("</body>", probe))
    drawn = browse(path, tmp_path / "browser")
    assert int(re.search(r"<title>(\d+)</title>", drawn)[1]) <= 500


class Asked(BaseHTTPRequestHandler):
    """Notes what is asked for; there is nothing."""

    def do_GET(self):
        self.server.asked.append(self.path)
        self.send_error(404)

    def log_message(self, *_):
        pass


@needs_chromium
def test_a_real_browser_fetches_and_runs_nothing_even_if_markup_got_in(make, tmp_path):
    """The control is the page without its policy."""
    path, asked = tmp_path / "report.html", {}
    with HTTPServer(("127.0.0.1", 0), Asked) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/picture"
        bad = f'<img src="{url}"><script>document.title = "ran"</script></body>'
        page = html(make()).replace("</body>", bad)
        for policy, text in {"with": page, "without": POLICY.sub("", page)}.items():
            server.asked = asked[policy] = []
            path.write_text(text)
            drawn = browse(path, tmp_path / policy)
            assert ("<title>ran</title>" in drawn) == (policy == "without")
        server.shutdown()
    assert asked == {"with": [], "without": ["/picture"]}
