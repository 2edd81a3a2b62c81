"""A real Prometheus reads the metrics of a job, and Chromium shows its status page.

    python -m tests.campaigns.metrics [--pictures FOLDER]

Needs the programs of Debian's packages prometheus and chromium. Two workers train, with audits; the
slower one is killed, and the job starts again. Prometheus asks with the token, and once without.
Prints what each of them saw, and exits with 1 if a figure is missing, a counter fell, the page did
not refresh itself, or looks the same in light and dark.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import numpy as np
from PIL import Image
from tornado.websocket import WebSocketClientConnection, websocket_connect

from tests.parallel.launching import hvdtrain
from tests.parallel.test_launch import WITH_SLOW_RANK, started

SCRAPE_S = 1
LIMIT_S = 90.0
TEXT = """[document.title, document.querySelector("main").innerText,
  getComputedStyle(document.body).backgroundColor].join("\\n")"""
CONFIGURATION = """
global: {{scrape_interval: {every}s}}
scrape_configs:
  - job_name: hvdtrain
    authorization: {{credentials_file: {token}}}
    static_configs: [{{targets: ["{target}"]}}]
  - job_name: stranger
    static_configs: [{{targets: ["{target}"]}}]
"""
QUERIES = {  # and what the value of each sample must be
    'up{job="hvdtrain"}': lambda value: value == 1,
    'up{job="stranger"}': lambda value: value == 0,
    "hvdtrain_loss": lambda value: value > 0,
    "rate(hvdtrain_steps_total[20s])": lambda value: value > 0,
    "resets(hvdtrain_steps_total[10m])": lambda value: value == 0,
    "hvdtrain_samples_per_second": lambda value: value > 0,
    'hvdtrain_audits_total{kind="exchange"}': lambda value: value > 0,
    'hvdtrain_failed_audits_total{kind="exchange"}': lambda value: value == 0,
    "hvdtrain_restarts_total": lambda value: value == 1,
    "sum(hvdtrain_rank_up)": lambda value: value == 2,
    "sum(hvdtrain_rank_phase)": lambda value: value == 2,
    "max(hvdtrain_rank_last_sign_seconds)": lambda value: value < 20,
    'hvdtrain_straggler_ratio{rank="1",phase="compute"}': lambda value: value > 1.4,
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@contextmanager
def running(*command: str) -> Iterator[None]:
    """A program that is gone afterwards."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def read(url: str) -> Any:
    """Return JSON as soon as it is served."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            with urlopen(url, timeout=10) as answer:
                return json.load(answer)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def ask_prometheus(port: int) -> bool:
    """Print the answers to QUERIES; return whether all are right, within LIMIT_S."""
    deadline, right = time.monotonic() + LIMIT_S, False
    lines: list[str] = []
    while not right and time.monotonic() < deadline:
        time.sleep(SCRAPE_S)
        lines, right = [], True
        for query, is_right in QUERIES.items():
            url = f"http://127.0.0.1:{port}/api/v1/query?{urlencode({'query': query})}"
            values = [float(sample["value"][1]) for sample in read(url)["data"]["result"]]
            well = bool(values) and all(map(is_right, values))
            lines.append(f"{'right' if well else 'WRONG'}  {query} = {values}")
            right = right and well
    targets = read(f"http://127.0.0.1:{port}/api/v1/targets")["data"]["activeTargets"]
    lines += [f"       {target['scrapePool']}: {target['lastError'] or 'ok'}" for target in targets]
    print("\n".join(lines), flush=True)
    return right


async def call(page: WebSocketClientConnection, method: str, **parameters: Any) -> dict[str, Any]:
    """Call a method of Chromium's DevTools protocol."""
    await page.write_message(json.dumps({"id": 1, "method": method, "params": parameters}))
    while (answer := json.loads(await page.read_message() or "{}")).get("id") != 1:
        pass
    result: dict[str, Any] = answer["result"]
    return result


async def look_at(port: int, pictures: Path) -> bool:
    """Print what the page shows in light and dark; return whether that is right."""
    (tab,) = (tab for tab in read(f"http://127.0.0.1:{port}/json") if tab["type"] == "page")
    page = await websocket_connect(tab["webSocketDebuggerUrl"], max_message_size=1 << 26)
    texts, brightness = [], []
    for look in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": look}
        await call(page, "Emulation.setEmulatedMedia", features=[feature])
        await asyncio.sleep(6)
        result = await call(page, "Runtime.evaluate", expression=TEXT)
        texts.append(str(result["result"]["value"]))
        shot = base64.b64decode((await call(page, "Page.captureScreenshot"))["data"])
        (pictures / f"status-{look}.png").write_bytes(shot)
        brightness.append(float(np.asarray(Image.open(io.BytesIO(shot)).convert("L")).mean()))
        print(f"{look}: brightness {brightness[-1]:.0f}\n{texts[-1]}\n", flush=True)
    steps = [int(match[1]) for text in texts if (match := re.search(r"step (\d+)/100000", text))]
    right = len(steps) == 2 and steps[0] < steps[1] and brightness[0] > 180 > 90 > brightness[1]
    expected = ("2 of 2 running", "rank 1 on localhost is slow: compute ")
    right = right and all(words in text for text in texts for words in expected)
    print(f"{'right' if right else 'WRONG'}  the page, at steps {steps}", flush=True)
    return right


def watch(folder: Path, pictures: Path) -> bool:
    token, host = folder / "token", socket.gethostname()
    token.write_text(secrets.token_urlsafe())
    metrics = ["--metrics-port=0", "--metrics-host=0.0.0.0", f"--metrics-token-file={token}"]
    command = hvdtrain("launch", "-np", "2", "--controller=gloo", "--restarts=1", *metrics)
    with started([*command, "--", *WITH_SLOW_RANK, "--lr=0.01"], folder) as job:
        job.wait_for(r"^step 7/")
        (target,) = re.findall(r"status page: http://(\S+)/,", job.text)
        assert target.startswith(host), target
        (folder / "prometheus.yml").write_text(
            CONFIGURATION.format(every=SCRAPE_S, token=token, target=target)
        )
        port, debugging = free_port(), free_port()
        prometheus = ["prometheus", f"--config.file={folder / 'prometheus.yml'}"]
        prometheus += [f"--storage.tsdb.path={folder / 'tsdb'}"]
        prometheus += [f"--web.listen-address=127.0.0.1:{port}"]
        chromium = ["chromium", "--headless", "--no-sandbox", "--disable-gpu"]
        chromium += [
            f"--remote-debugging-port={debugging}",
            f"--user-data-dir={folder / 'profile'}",
        ]
        chromium += ["--window-size=1100,1000", f"http://{target}/?token={token.read_text()}"]
        with running(*prometheus):
            time.sleep(5 * SCRAPE_S)
            job.worker(1).kill()
            job.wait_for(r"restart 1 of 1(.|\n)*^step \d+/")
            right = ask_prometheus(port)
        with running(*chromium):
            return asyncio.run(look_at(debugging, pictures)) and right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="keep the screenshots")
    pictures = parser.parse_args().pictures
    with tempfile.TemporaryDirectory(prefix="hvdtrain-metrics-") as name:
        (pictures or Path(name)).mkdir(parents=True, exist_ok=True)
        return 0 if watch(Path(name), pictures or Path(name)) else 1


if __name__ == "__main__":
    sys.exit(main())
