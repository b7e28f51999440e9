"""`compare` on the command line: what it prints, its JSON, and mistakes in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from compared_runs import CULPRIT, EXACT, NO_ERROR, broken, falling, rising, row, write
from typer.testing import CliRunner, Result

from nemo_fp8_debug.analysis.comparison.compare import compare
from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.story.story import story
from nemo_fp8_debug.analysis.story.summary import serialize_comparison, summarize, tell_conclusion, tell_drifted_tensors
from nemo_fp8_debug.cli import app


def run_cli(baseline: object, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, arguments), "--baseline", str(baseline)])


def tables_of(result: Result) -> list[list[list[str]]]:
    """Return the cells of lines that name layers: of the ranking, and of the order in which tensors left the band."""
    parts = result.stdout.partition("Tensors by harm")[2].partition("Order in which")
    cells = (
        [re.split(r"\s{2,}", line.strip()) for line in part.splitlines()[1:] if "decoder.layers" in line]
        for part in parts[::2]
    )
    return list(cells)


def strict_json(text: str) -> Any:
    """Parse as other languages do: NaN and Infinity are not valid JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


class TestCommandLine:
    def test_prints_its_conclusion_first_then_losses_and_rankings(self, baseline: Path, bad: Path) -> None:
        result = run_cli(baseline, bad)
        assert result.exit_code == 0
        found = compare(bad, baseline)
        assert result.stdout.startswith(tell_conclusion(found))
        assert all(sentence in summarize(found) for sentence in tell_conclusion(found).split(". "))
        ranked, left = tables_of(result)
        assert ranked[0][1] == CULPRIT[0] and any(cell.startswith("0.1 ->") for cell in ranked[0])
        assert len(ranked) == 3
        assert len(left) == len(found.out_of_band)
        assert left[0][0] == str(found.out_of_band["onset"][0]) and left[0][2] == CULPRIT[0]
        assert " ".join(tell_drifted_tensors(found)) in run_cli(baseline, bad, "--all").stdout
        assert result.stdout.splitlines()[-1] == f"Next: nemo-fp8-debug diagnose {bad} --baseline {baseline}"

    def test_ranks_tensors_by_harm_as_diagnose_does_and_not_by_drift(self, tmp_path: Path, baseline: Path) -> None:
        def spread(step: int) -> list[dict[str, Any]]:
            """The scale of one tensor is wrong first; behind it another tensor drifts farther."""
            vanishing, steady, culprit = broken(step)
            far = {"mse": 10.0, "underflow_pct": 30.0} if step >= 140 else {}
            return [vanishing, steady | far, culprit | ({"scale_ratio_log2": 4.0} if step >= 60 else {})]

        bad = write(tmp_path / "spread", spread, rising())
        by_harm = [(row["layer"], row["tensor"]) for row in story(diagnose(bad, baseline))["tensors"]]
        listed = [(layer, tensor) for tensor, layer, *_ in tables_of(run_cli(baseline, bad))[0]]
        assert listed == by_harm
        found = strict_json(run_cli(baseline, bad, "--json").stdout)["tensors"]
        assert [(row["layer"], row["tensor"]) for row in found] == by_harm
        assert by_harm != [tuple(row) for row in compare(bad, baseline).tensors.select("layer", "tensor").rows()]

    def test_lists_no_more_tensors_than_asked(self, baseline: Path, bad: Path) -> None:
        result = run_cli(baseline, bad, "--top", 1)
        assert [len(table) for table in tables_of(result)] == [1, 1]

    def test_json_holds_everything(self, tmp_path: Path, baseline: Path, bad: Path) -> None:
        reference = write(tmp_path / "reference", None, falling())
        result = run_cli(baseline, bad, "--reference", reference, "--json", "--top", 1)
        assert result.exit_code == 0
        found = strict_json(result.stdout)
        expected = json.loads(json.dumps(serialize_comparison(compare(bad, baseline, reference))))
        assert {name: told for name, told in found.items() if name != "tensors"} == {
            name: told for name, told in expected.items() if name != "tensors"
        }
        assert [row.pop("harm_rank") for row in found["tensors"]] == [1, 2, 3]
        assert all(row in expected["tensors"] for row in found["tensors"])
        assert set(found["runs"]) == {"baseline", "run", "reference"}
        assert found["tensors"][0]["layer"] == CULPRIT[0]

    def test_json_of_a_loss_that_is_no_longer_a_number(self, tmp_path: Path, baseline: Path) -> None:
        losses = {i: loss if i < 100 else float("nan") for i, loss in falling().items()}
        bad = write(tmp_path / "bad", broken, losses)
        assert strict_json(run_cli(baseline, bad, "--json").stdout)["runs"]["run"]["diverged_at"] == 100

    def test_a_loss_that_never_was_a_number(self, tmp_path: Path, baseline: Path) -> None:
        lost = write(tmp_path / "lost", broken, dict.fromkeys(range(200), float("nan")))
        for runs in ((lost, baseline), (baseline, lost), (lost, lost)):
            result = run_cli(*runs)
            assert result.exit_code == 0, result.exception
            assert strict_json(run_cli(*runs, "--json").stdout)

    @pytest.mark.parametrize("in_bad", [NO_ERROR, {}], ids=["in both runs", "in the baseline"])
    def test_json_of_a_tensor_that_fp8_holds_exactly(self, tmp_path: Path, in_bad: dict[str, Any]) -> None:
        baseline = write(tmp_path / "baseline", lambda step: [row(EXACT, **NO_ERROR)], falling())
        bad = write(tmp_path / "bad", lambda step: [row(EXACT, **in_bad)], falling())
        assert len(strict_json(run_cli(baseline, bad, "--json").stdout)["tensors"]) == 1

    @pytest.mark.parametrize("name", ["missing", "runs [bf16]", "runs [/a]"])
    def test_a_missing_run_is_an_error_in_one_line(self, tmp_path: Path, baseline: Path, name: str) -> None:
        result = run_cli(baseline, tmp_path / name)
        assert isinstance(result.exception, SystemExit)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert result.stderr == f"error: {tmp_path / name} holds no run record (a folder with attempt-0.json)\n"

    def test_a_damaged_part_is_a_warning_in_one_line_and_the_rest_is_compared(self, baseline: Path, bad: Path) -> None:
        part = next((bad / "metrics").iterdir())
        part.write_bytes(part.read_bytes()[:-50])
        result = run_cli(baseline, bad)
        assert result.exit_code == 0
        assert result.stderr.startswith(f"warning: {part} is left out, because it cannot be read")
        assert result.stderr.count("\n") == 1
        assert "Tensors by harm" in result.stdout


class TestMistakes:
    def test_a_report_is_written_whoever_reads_what_is_printed(self, tmp_path: Path, baseline: Path, bad: Path) -> None:
        """As `compare ... --html FILE | head` ends: nobody reads any longer."""
        file, command = tmp_path / "report.html", "from nemo_fp8_debug.cli import app; app()"
        reader, writer = os.pipe()
        os.close(reader)
        arguments = ["compare", str(bad), "--baseline", str(baseline), "--html", str(file)]
        done = subprocess.run([sys.executable, "-c", command, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True)
        os.close(writer)
        assert done.returncode != 0 and "Traceback" not in done.stderr
        assert "</html>" in file.read_text()[-100:]

    def test_a_baseline_that_is_no_option_is_refused(self, baseline: Path, bad: Path) -> None:
        result = CliRunner().invoke(app, ["compare", str(baseline), str(bad)])
        assert result.exit_code == 1
        assert "error: --baseline is missing; name a good run: compare RUN --baseline BASELINE" in result.stderr

    def test_runs_that_were_swapped_are_asked_about(self, baseline: Path, bad: Path) -> None:
        assert compare(baseline, bad).notes[0].endswith("were the two swapped?")
        assert not any("swapped" in note for note in compare(bad, baseline).notes)

    def test_the_same_run_twice_is_said(self, baseline: Path) -> None:
        assert compare(baseline, baseline).notes[0] == "Both runs are the same record."

    def test_what_would_steer_a_terminal_is_shown_and_no_name_becomes_an_emoji(self, tmp_path: Path) -> None:
        def odd(step: int) -> list[dict[str, Any]]:
            return [row(("a\x1b]0;pwned\x07[bold]:dog:", "input"))]

        paths = [write(tmp_path / name, odd, falling()) for name in ("a", "b")]
        result = run_cli(*paths)
        assert "\x1b" not in result.output and "\x07" not in result.output
        assert r"a\x1b]0;pwned\x07[bold]:dog:" in result.output

    def test_a_record_of_another_schema_is_refused_in_one_line(self, baseline: Path, bad: Path) -> None:
        for part in (bad / "metrics").iterdir():
            pl.DataFrame({"a": [1]}).write_parquet(part)
        fingerprint = json.loads((bad / "attempt-0.json").read_text())
        (bad / "attempt-0.json").write_text(json.dumps(fingerprint | {"schema_version": 99}))
        result = run_cli(baseline, bad)
        assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
        assert "schema version 99" in result.stderr
