"""Weights & Biases and MLflow. Each library is imported when a recipe names it."""

import os
import re
import time
from pathlib import Path
from typing import Any

from tico_ssl.results.run_folder import flattened
from tico_ssl.training.logger import Ending, Tracker

MOST_PARAMETERS = 100  # at a time
LONGEST_VALUE = 500  # characters of a parameter that every MLflow server takes


class WandbTracker(Tracker):
    """A run of Weights & Biases; its variables, WANDB_PROJECT, WANDB_NAME, WANDB_DIR and others, take precedence."""

    title, library = "the records of Weights & Biases", "wandb"

    def _begin(self, identity: str | None) -> str:
        import wandb

        folder = self.run.folder
        defaults: dict[str, Any] = {
            "project": re.sub(r"[/\\#?%:]", "-", self.place),
            "name": folder.resolve().name,
            "dir": str(folder),
        }
        chosen = {key: value for key, value in defaults.items() if f"WANDB_{key.upper()}" not in os.environ}
        self._wandb = wandb
        self._run = wandb.init(
            id=identity,
            resume="allow" if identity else None,
            config=self.run.recipe().model_dump(mode="json"),
            settings=wandb.Settings(console="off"),  # which would read along what this process prints
            reinit="create_new",  # a run that the caller has open stays open
            **chosen,
        )
        found: str = self._run.id
        return found

    def _send(self, step: int, values: dict[str, Any]) -> None:
        self._run.log(values, step=step)

    def _show(self, name: str, picture: Path) -> None:
        self._run.log({name: self._wandb.Image(str(picture))}, step=self.start)

    def _close(self, ending: Ending) -> None:
        self._run.finish(exit_code=0 if ending == "finished" else 1)


STATUS: dict[Ending, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker(Tracker):
    """A run of MLflow; its variables MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME or _ID take precedence."""

    title, library = "the records of MLflow", "mlflow"

    def _begin(self, identity: str | None) -> str:
        from mlflow import MlflowClient

        self._client = MlflowClient()
        if identity is not None:
            self._client.update_run(identity, status="RUNNING")
            return identity
        created = self._client.create_run(self._experiment(), run_name=self.run.folder.resolve().name)
        settings = flattened(self.run.recipe().model_dump(mode="json"))
        found: str = created.info.run_id
        for some in _batched([_parameter(key, value) for key, value in settings.items()], MOST_PARAMETERS):
            self._client.log_batch(found, params=some)
        return found

    def _experiment(self) -> str:
        if given := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return given
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or self.place
        known = self._client.get_experiment_by_name(name)
        found: str = self._client.create_experiment(name) if known is None else known.experiment_id
        return found

    def _send(self, step: int, values: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._identity, metrics=metrics)

    def _show(self, name: str, picture: Path) -> None:
        self._client.log_artifact(self._identity, str(picture))

    def _close(self, ending: Ending) -> None:
        self._client.set_terminated(self._identity, STATUS[ending])


def _batched(items: list[Any], size: int) -> list[list[Any]]:
    return [items[begin : begin + size] for begin in range(0, len(items), size)]


def _parameter(key: str, value: Any) -> Any:
    from mlflow.entities import Param

    return Param(key, str(value)[:LONGEST_VALUE])
