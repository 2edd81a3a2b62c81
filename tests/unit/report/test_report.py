"""`hvdtrain report`: what it reads of runs, and the page that it writes."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from hvdtrain.cli import main
from hvdtrain.errors import UsageError
from hvdtrain.report.charts import PALETTE
from hvdtrain.report.page import compare_options, compare_runs, notes_of
from hvdtrain.report.plots import draw_plots
from hvdtrain.report.runs import read_runs
from tests.unit.reported import epoch_record, lines_of, make_run, plots_of, step_record, write_lines

SCRIPT = "<script>alert(1)<script>"


def report(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["hvdtrain", "report", *map(str, arguments)])
    return main()


def cells_of(*folders: Path) -> list[dict[str, str]]:
    table = compare_runs(read_runs(folders))
    return [{name: cells[i] for name, cells in table.rows} for i in range(len(table.columns))]


class Elements(HTMLParser):
    """Every start tag of a page with its attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_single_run(tmp_path: Path, monkeypatch, capsys) -> None:
    """Fails when the page is not in the run's report folder, its path is not printed, or a plot is
    missing, blank, no PNG, or not the one on the page."""
    run = make_run(tmp_path / "runs" / "one")
    assert report(monkeypatch, run) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (f"{run / 'report' / 'index.html'}\n", "")
    names = ["loss", "accuracy", "throughput", "phases", "learning-rate", "audit", "confusion"]
    files = {path.name for path in (run / "report").iterdir()}
    assert files == {f"{name}.png" for name in names} | {"index.html"}
    page = Elements((run / "report" / "index.html").read_text())
    shown = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert len(shown) == len(names)
    for name, source in zip(names, shown, strict=True):
        png = (run / "report" / f"{name}.png").read_bytes()
        assert source == "data:image/png;base64," + base64.b64encode(png).decode()
        image = Image.open(io.BytesIO(png)).convert("L")
        assert 800 <= image.width <= 1400 and 500 <= image.height <= 1400, name
        assert image.getextrema()[0] < 100 < 250 < image.getextrema()[1], name
    assert "details" in {tag for tag, _ in page.tags} and "Not shown" not in page.text
    for text in ("finished", "gloo", "0.8125", "1,234", "0123456789ab", "global_batch_size"):
        assert text in page.text
    assert "0123456789abc" not in page.text


def test_the_figures_of_a_run_stand_in_the_table(tmp_path: Path) -> None:
    """Fails when a cell shows another figure, or a null is shown as anything but a dash."""
    (cells,) = cells_of(make_run(tmp_path / "one"))
    assert cells == {
        "status": "finished",
        "world size": "2",
        "controller": "gloo",
        "global batch size": "8",
        "epochs": "2",
        "steps": "20",
        "ended early": "–",
        "samples seen": "160",
        "train loss": "0.1",
        "valid loss": "0.2",
        "valid accuracy": "0.8125",
        "best": "valid accuracy 0.875 at step 10",
        "samples/s": "1,234",
        "audits": "3",
        "audits failed": "1",
        "worst error/bound": "7.5",
        "params sha256": "0123456789ab",
        "resumed from": "–",
    }


def test_two_runs_with_different_metrics(tmp_path: Path, monkeypatch, capsys) -> None:
    """Fails when a run's metric is not drawn or not in the table, options that are equal are shown
    or one that differs is not, or the report does not go to ./report."""
    one = make_run(tmp_path / "one", lr=0.5)
    two = make_run(tmp_path / "two", metric="mean_error", dropout=None)
    monkeypatch.chdir(tmp_path)
    assert report(monkeypatch, one, two) == 0
    assert capsys.readouterr().out == "report/index.html\n"
    assert {"accuracy.png", "mean_error.png", "confusion-1.png", "confusion-2.png"} <= {
        path.name for path in (tmp_path / "report").iterdir()
    }
    plots = plots_of(one, two)
    assert {colour for colour, _, _ in lines_of(plots["accuracy"])} == {PALETTE[0]}
    assert {colour for colour, _, _ in lines_of(plots["mean_error"])} == {PALETTE[1]}
    first, second = cells_of(one, two)
    assert (first["valid accuracy"], first["valid mean error"]) == ("0.8125", "–")
    assert (second["valid accuracy"], second["valid mean error"]) == ("–", "0.8125")
    table = compare_options(read_runs([one, two]))
    assert table.columns == ["one", "two"]
    assert dict(table.rows) == {
        "lr": ["0.5", "0.1"],
        "experiment": ["one", "two"],
        "dropout": ["–", "null"],
    }


def test_a_killed_run_shows_what_it_logged(tmp_path: Path) -> None:
    """Fails when a cut last line is an error, hides the others or goes unsaid, or the table does
    not show what was logged."""
    run = make_run(tmp_path / "one")
    (run / "summary.json").unlink()
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "step", "step": 22, "train_lo')
    (cells,) = cells_of(run)
    assert cells["status"] == "unknown: no summary" and cells["samples/s"] == "–"
    assert (cells["steps"], cells["epochs"], cells["samples seen"]) == ("20", "2", "160")
    assert (cells["train loss"], cells["valid accuracy"]) == ("0.1", "0.8")
    assert (cells["audits"], cells["audits failed"]) == ("3", "2")
    assert lines_of(plots_of(run)["loss"])[0][1] == list(range(2, 21, 2))
    missing, cut = notes_of(read_runs([run])[0])
    assert missing.startswith("summary.json is missing: the run was killed")
    assert cut == "metrics.jsonl:13: the last line was cut short, and was left out"


def test_slow_workers_have_a_note(tmp_path: Path) -> None:
    """Fails if the page does not name who was slow, or a damaged record breaks it."""
    run = make_run(tmp_path / "one")
    summary = json.loads((run / "summary.json").read_text())
    slow = {"rank": 2, "host": "b", "phase": "data", "ratio": 2.14, "steps": 1200}
    (run / "summary.json").write_text(json.dumps(summary | {"stragglers": [{"rank": 1}, slow]}))
    assert notes_of(read_runs([run])[0]) == [
        "rank 2 on b was slow: data 2.1 times the median of the other workers, for 1,200 steps"
    ]


def test_a_run_shorter_than_its_log_interval_has_a_note(tmp_path: Path, monkeypatch) -> None:
    """Fails when plots are missing without a reason, or the reason is given for other runs too."""
    run = make_run(tmp_path / "one", log_interval=50)
    assert not [note for note in notes_of(read_runs([run])[0]) if "--log-interval" in note]
    write_lines(run / "metrics.jsonl", [epoch_record(10), epoch_record(20)])
    assert report(monkeypatch, run) == 0
    text = " ".join(Elements((run / "report" / "index.html").read_text()).text.split())
    assert "no step was logged, as the run reached step 20, and --log-interval was 50." in text


def test_the_summary_of_an_earlier_end_is_not_taken_for_the_runs(tmp_path: Path) -> None:
    """Fails when a run that was resumed, and then killed, shows its first end as its last."""
    run = make_run(tmp_path / "one")
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps(step_record(24)) + "\n")
    (cells,) = cells_of(run)
    assert cells["status"] == "resumed after step 20; unknown"
    assert (cells["steps"], cells["params sha256"]) == ("24", "–")


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    """Fails when one file's absence or damage hides the others, or is not mentioned."""
    for name in ("config.yaml", "summary.json", "metrics.jsonl", "audit.jsonl", "evaluation.json"):
        for text in (None, "", '{"cut": [', "[1, 2]", "a: *b", "\xff\x00", "[" * 10_000):
            run = make_run(tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}")
            (run / name).unlink() if text is None else (run / name).write_text(text, "latin-1")
            (read,) = read_runs([run])
            plots, absent = draw_plots([read])
            assert len(plots) + len(absent) == 7, (name, text)
            if text or name in ("config.yaml", "summary.json"):
                assert [note for note in notes_of(read) if note.startswith(name)], (name, text)


def test_without_audits_the_page_has_a_note(tmp_path: Path, monkeypatch, capsys) -> None:
    """Fails when an empty plot is drawn, or the page does not say what is not there."""
    run = make_run(tmp_path / "one")
    (run / "audit.jsonl").unlink()
    steps = [{"kind": "step", "step": 1, "train_loss": None, "train_accuracy": None}]
    write_lines(run / "metrics.jsonl", steps)
    assert report(monkeypatch, run, "--output", tmp_path / "out") == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"confusion.png", "index.html"}
    text = " ".join(Elements((tmp_path / "out" / "index.html").read_text()).text.split())
    assert (
        "Not shown, as the run has no data for it: loss; accuracy or another metric; throughput; "
        "time per phase of a step; learning rate; audits."
    ) in text


def test_the_page_needs_and_runs_nothing_from_outside(tmp_path: Path, monkeypatch) -> None:
    """Fails when anything that a file holds becomes HTML, or the page would load from anywhere."""
    run = make_run(tmp_path / SCRIPT, note="<img src=x>", experiment=SCRIPT)
    other = make_run(tmp_path / "_$other$", note="&amp;")
    summary = json.loads((run / "summary.json").read_text()) | {"error": SCRIPT, "status": SCRIPT}
    summary["valid_<b>"] = 1.0
    (run / "summary.json").write_text(json.dumps(summary))
    evaluation = {"confusion": [[1, 2], [3, 4]], "classes": [SCRIPT, "$"]}
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    for runs in ([run], [run, other]):
        assert report(monkeypatch, *runs, "--output", tmp_path / "out") == 0
        source = (tmp_path / "out" / "index.html").read_text()
        page = Elements(source)
        assert not {"script", "b", "iframe", "object"} & {tag for tag, _ in page.tags}
        assert page.text.count(SCRIPT) >= 5 and "valid <b>" in page.text
        addresses = [
            value or ""
            for _, attributes in page.tags
            for name, value in attributes.items()
            if name in ("src", "href", "srcset", "action", "data")
        ]
        assert addresses and all(address.startswith("data:") for address in addresses)
        assert not re.search(r"https?://|url\(|@import", source)
        assert "&amp;amp;" in source if other in runs else True


def test_equal_names_are_distinguished(tmp_path: Path) -> None:
    """Fails when two runs of the same name cannot be distinguished, or a name grows needlessly."""
    places = ("x/a/run", "y/a/run", "y/b/run", "other")
    runs = read_runs([make_run(tmp_path / place) for place in places])
    assert [run.name for run in runs] == ["x/a/run", "y/a/run", "b/run", "other"]


def test_every_bad_folder_is_reported_before_anything_is_written(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    """Fails when the exit code is not 2, a problem waits for the next try, or a byte is written."""
    good = make_run(tmp_path / "good")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("precious")
    damaged = make_run(tmp_path / "damaged")
    (damaged / "summary.json").unlink()
    (damaged / "summary.json").mkdir()
    before = sorted(tmp_path.rglob("*"))
    paths = [good, *(tmp_path / name for name in ("none", "empty", "file", "damaged", "good"))]
    assert report(monkeypatch, *paths, "--output", tmp_path / "file") == 2
    lines = capsys.readouterr().err.splitlines()
    reported = ("does not exist", "not a run", "not a folder", "not a regular file", "twice")
    assert len(lines) == 6
    for line, path, problem in zip(lines, paths[1:], reported, strict=False):
        assert f"RUN={path}: " in line and problem in line and "; " in line
    assert lines[5].startswith(f"--output={tmp_path / 'file'}: is not a folder")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_cannot_be_written_is_bad_usage(tmp_path: Path, monkeypatch, capsys) -> None:
    """Fails when it ends in a traceback, or with another exit code."""
    (tmp_path / "file").write_text("precious")
    run = make_run(tmp_path / "one")
    assert report(monkeypatch, run, "--output", tmp_path / "file" / "below") == 2
    assert f"--output={tmp_path / 'file' / 'below'}: cannot be written: " in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [(), ("--colour", "red"), ("one", "--outputs=x")])
def test_bad_flags_are_bad_usage(tmp_path: Path, monkeypatch, capsys, arguments) -> None:
    """Fails when a wrong flag is passed over, or no run at all is a report."""
    make_run(tmp_path / "one")
    monkeypatch.chdir(tmp_path)
    assert report(monkeypatch, *arguments) == 2
    assert capsys.readouterr().err.startswith("hvdtrain: error: ")
    assert not (tmp_path / "one" / "report").exists()


def test_problems_are_held_apart(tmp_path: Path) -> None:
    """Fails when problems of several runs come as one text."""
    with pytest.raises(UsageError) as caught:
        read_runs([tmp_path / "none", tmp_path])
    assert len(caught.value.problems) == 2


def test_long_records_are_thinned_and_keep_their_extremes(tmp_path: Path) -> None:
    """Fails when a peak of the loss or a failed audit of a long run is left out, the counts are
    those of what is left, or the last step is missing.
    """
    steps = 30_007
    with (
        (tmp_path / "metrics.jsonl").open("w") as metrics,
        (tmp_path / "audit.jsonl").open("w") as audits,
    ):
        for step in range(1, steps + 1):
            loss = 99.0 if step == 12_345 else -1.0 if step == 23_456 else 1 + step % 7
            metrics.write(json.dumps({"kind": "step", "step": step, "train_loss": loss}) + "\n")
            record = {"step": step, "ok": step != 17_171, "worst_error_over_bound": step % 5 / 10}
            audits.write(json.dumps(record) + "\n")
    (run,) = read_runs([tmp_path])
    found = [record["step"] for record in run.steps]
    assert len(found) < 12_000 and found == sorted(set(found))
    assert {12_345, 23_456, steps} <= set(found)
    assert [it["step"] for it in run.audits if not it["ok"]] == [17_171]
    assert run.audited == {"checked": steps, "failed": 1, "worst_error_over_bound": 0.4}
    assert any(note.startswith("metrics.jsonl: of 30,007 records") for note in run.notes)
