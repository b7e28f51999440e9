"""Runs with and without loggers, in one process: the same losses, what the libraries keep, and what training calls.

`logged_runs.py FOLDER` prints JSON. The libraries are the real ones, offline.
"""

from __future__ import annotations

import json
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from wandb_file import content

from nemo_fp8_debug import FP8DebugCallback, Monitor
from nemo_fp8_debug.record.loggers import recorder

FOLDER = Path(sys.argv[1])
STEPS, INTERVAL = 21, 5
LIBRARIES = ("wandb", "mlflow", "comet_ml")


def train(name: str, loggers: list[Any], each_step: Any = None, **options: Any) -> list[float]:
    """Losses of a small model; `each_step` is told each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).bfloat16()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    options |= {"interval": INTERVAL, "table_rows": 0, "verify_rows": 2, "loggers": loggers}
    monitor = Monitor(model, str(FOLDER / name), **options)
    for step in range(STEPS):
        with monitor.step(step) as report:
            loss = model(torch.randn(8, 16).bfloat16()).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report(loss=loss, lr=0.1)
        losses.append(loss.item())
        if each_step:
            each_step(step, losses[-1])
    monitor.close()
    return losses


class CalledHere:
    """Which files of the libraries, and of what calls them, run in this thread."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def __enter__(self) -> CalledHere:
        sys.setprofile(self._see)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: Any, event: str, argument: Any) -> None:
        self.files.add(frame.f_code.co_filename)

    @property
    def of_libraries(self) -> list[str]:
        return sorted(file for file in self.files if any(f"site-packages/{name}/" in file for name in LIBRARIES))


def of_mlflow(run_id: str) -> dict[str, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(f"file://{FOLDER}/mlruns")
    run = client.get_run(run_id)
    return {
        "status": run.info.status,
        "metrics": {name: [(m.step, m.value) for m in client.get_metric_history(run_id, name)] for name in run.data.metrics},
        "tags": {name: value for name, value in run.data.tags.items() if name.startswith("fp8")},
        "artifacts": [f.path for f in client.list_artifacts(run_id, "fp8")],
    }


def of_comet(key: str) -> dict[str, Any]:
    with zipfile.ZipFile(FOLDER / "comet" / f"{key}.zip") as archive:
        lines = archive.read("messages.json").decode().splitlines()
        messages = [json.loads(line) for line in lines if line]
    metrics = [m["payload"]["metric"] for m in messages if m["type"] == "metric_msg"]
    others = {m["payload"]["key"]: m["payload"]["value"] for m in messages if m["type"] == "log_other"}
    files = [m["payload"].get("additional_params", {}).get("fileName") for m in messages if m["type"] == "file_upload"]
    return {"metrics": [(m["metricName"], m["step"], m["metricValue"]) for m in metrics], "others": others, "files": files}


def file_of(pattern: str) -> Path:
    (found,) = FOLDER.glob(pattern)
    return found


def own(found: dict[str, Any]) -> None:
    """Runs that the monitor starts and ends."""
    loggers = [
        {"wandb": {"project": "fp8", "id": "own"}},
        {"mlflow": {"tracking_uri": f"file://{FOLDER}/mlruns", "run_name": "own"}},
        {"comet": {"online": False, "project_name": "fp8"}},
    ]
    with CalledHere() as called:
        found["losses"] = {"with": train("own", loggers, report_baseline=str(FOLDER / "plain"))}
    found["called"] = called.of_libraries
    from mlflow import MlflowClient

    client = MlflowClient(f"file://{FOLDER}/mlruns")
    (run,) = client.search_runs([client.get_experiment_by_name("fp8_debug").experiment_id])
    (archive,) = (FOLDER / "comet").glob("*.zip")
    found["own"] = {
        "mlflow": of_mlflow(run.info.run_id),
        "comet": of_comet(archive.stem),
    }


def joined(found: dict[str, Any]) -> None:
    """Runs that the user made; by name, and as objects."""
    import comet_ml
    import mlflow
    import wandb

    mlflow.set_tracking_uri(f"file://{FOLDER}/mlruns")
    run = wandb.init(project="fp8", id="joined", settings={"console": "off"})
    experiment = comet_ml.OfflineExperiment(project_name="fp8", log_code=False, auto_output_logging=False)
    experiment.set_step(7)

    def log(step: int, loss: float) -> None:
        if step <= 10:
            run.log({"loss": loss}, step=step)
        mlflow.log_metric("loss", loss, step=step)
        experiment.log_metric("loss", loss)

    with mlflow.start_run() as active:
        found["losses"]["joined"] = train("joined", ["wandb", "mlflow", experiment], log)
        found["open"] = [wandb.run is run, mlflow.active_run() is not None, experiment.alive, experiment.curr_step]
        found["joined_status"] = of_mlflow(active.info.run_id)["status"]
    run.log({"final": 1.0}, step=10)
    run.finish()
    experiment.end()
    found["joined"] = {
        "without_a_row": without_a_row("wandb/offline-run-*-joined"),
        "mlflow": of_mlflow(active.info.run_id),
        "comet": of_comet(experiment.id),
    }


def without_a_row(run: str) -> list[dict[str, Any]]:
    """Samples that came when the user's run had no row left."""
    files = FOLDER.glob(f"{run}/files/media/table/fp8/samples_without_a_row*")
    tables = [json.loads(file.read_text()) for file in files]
    return [dict(zip(table["columns"], row, strict=True)) for table in tables for row in table["data"]]


def of_lightning(found: dict[str, Any]) -> None:
    """Loggers of a trainer, one of them named too."""
    import wandb
    from lightning.pytorch.loggers import CometLogger, MLFlowLogger, WandbLogger
    from small_models.lightning import fit

    (FOLDER / "trainer").mkdir()
    tracked = MLFlowLogger("trainer", tracking_uri=f"file://{FOLDER}/mlruns")
    comet = CometLogger(save_dir=str(FOLDER / "comet"), offline=True, log_code=False, auto_output_logging=False)
    experiment = comet.experiment  # which Lightning ends
    loggers = [WandbLogger(project="fp8", id="trainer", save_dir=FOLDER / "trainer", offline=True), tracked, comet]
    callback = FP8DebugCallback(interval=2, output=str(FOLDER / "trainer" / "record"), loggers=["wandb"], table_rows=0)
    fit(FOLDER / "trainer", [callback], logger=loggers)
    open_still = wandb.run is not None
    wandb.finish()
    found["trainer"] = {
        "open": open_still,
        "mlflow": of_mlflow(tracked.run_id),
        "comet": of_comet(experiment.id),
        "without_a_row": without_a_row("trainer/wandb/offline-run-*-trainer"),
    }


def of_wandb(found: dict[str, Any]) -> None:
    """Its files are complete when its service has ended."""
    import wandb

    wandb.teardown()
    for name, folder in (("own", "wandb"), ("joined", "wandb"), ("trainer", "trainer/wandb")):
        found[name]["wandb"] = content(file_of(f"{folder}/offline-run-*-{name}/*.wandb"))


class Hangs:
    """A logger that never returns."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.threads.append(threading.current_thread().name)
        threading.Event().wait()


if __name__ == "__main__":
    answer: dict[str, Any] = {}
    plain = train("plain", [])
    own(answer)
    joined(answer)
    of_lightning(answer)
    of_wandb(answer)
    recorder.CLOSING, recorder.WAITING = 0.5, 3
    hangs = Hangs()
    answer["losses"] |= {"without": plain, "hanging": train("hanging", [hangs])}
    answer["threads"] = hangs.threads
    (FOLDER / "answer.json").write_text(json.dumps(answer))
    # The logger still hangs, and the process ends.
