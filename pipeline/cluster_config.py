"""The section `cluster` of a job file: how many workers, what each needs, and what is done when one fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.section import Section


@dataclass(frozen=True, slots=True)
class WorkerRange:
    """Workers that come and go with the machines of a cluster. Checked by `ClusterConfig`."""

    min: int
    max: int


class ClusterConfig(Section):
    """Where it runs."""

    workers: int | WorkerRange = Field(1, description="model replicas, one Ray actor each; {min: .., max: ..}: elastic")
    cpus_per_worker: float = Field(1.0, ge=0.0, description="CPUs that Ray sets aside for a worker")
    gpus_per_worker: float = Field(0.0, ge=0.0, description="GPUs that Ray sets aside for a worker")
    tensor_parallel: int = Field(
        1, ge=1, description="processes of one replica, each with a part of every layer, cpus and gpus_per_worker"
    )
    address: str | None = Field(None, description="a running Ray cluster (auto or host:port); default: start one here")
    log_format: Literal["text", "json"] = Field(
        "text", description="what driver and workers write to stderr: warnings as text, or all as lines of JSON"
    )
    dashboard: bool = Field(False, description="Ray's dashboard, on 127.0.0.1 alone, for a Ray that starts here")
    max_attempts: int = Field(3, ge=1, description="attempts at a shard before its rows are given up")
    hang_timeout_s: float = Field(600.0, gt=0, description="a worker that does nothing for so long is replaced")
    grace_s: float = Field(30.0, ge=0, description="what driver and workers take to finish after a SIGTERM")
    duplicate_stragglers: bool = Field(True, description="idle workers also decode shards that take too long elsewhere")

    @field_validator("workers", mode="before")
    @classmethod
    def _number_or_range(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            if value < 1:
                raise ValueError(f"must be at least 1, got {value}")
            return value
        if isinstance(value, WorkerRange):
            value = {"min": value.min, "max": value.max}
        if not (isinstance(value, dict) and set(value) == {"min", "max"} and {*map(type, value.values())} == {int}):
            raise ValueError(f"must be a whole number or {{min: .., max: ..}}, got {value!r}")
        if not 1 <= value["min"] <= value["max"]:
            raise ValueError(f"must have 1 <= min <= max, got {value!r}")
        return WorkerRange(**value)

    @model_validator(mode="after")
    def _one_device_for_each_process(self) -> ClusterConfig:
        if self.tensor_parallel > 1:
            if self.gpus_per_worker not in (0, 1):
                raise ValueError(
                    f"gpus_per_worker must be 0 or 1, for each process, where tensor_parallel is above 1, got "
                    f"{self.gpus_per_worker:g}"
                )
            if self.cpus_per_worker + self.gpus_per_worker == 0:
                raise ValueError("cpus_per_worker must be above 0 where tensor_parallel is above 1, got 0")
        return self

    @property
    def cpus_per_replica(self) -> float:
        """Of all processes of a worker; so for `gpus_per_replica`."""
        return self.cpus_per_worker * self.tensor_parallel

    @property
    def gpus_per_replica(self) -> float:
        return self.gpus_per_worker * self.tensor_parallel

    @property
    def min_workers(self) -> int:
        return self.workers if isinstance(self.workers, int) else self.workers.min

    @property
    def max_workers(self) -> int:
        return self.workers if isinstance(self.workers, int) else self.workers.max
