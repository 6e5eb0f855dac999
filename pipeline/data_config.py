"""The sections `input` and `output` of a job file: which prompts, and where what they give is kept."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.section import Section

BODY_COLUMN = "body"
"""The column of an OpenAI batch file that holds the sampling parameters of the request (see `openai_requests`)."""


class InputConfig(Section):
    """Which prompts. Formats are told by name (`.parquet`, `.jsonl`) unless `format` says otherwise.

    All column names are those that `columns` gives.
    """

    path: tuple[str, ...] = Field(description="file, glob, folder, fsspec URL or datasets name, or a list of these")
    format: Literal["auto", "parquet", "jsonl", "csv", "tsv", "openai_batch", "datasets"] = Field(
        "auto", description="auto: by name and content of each file; a datasets name needs datasets"
    )
    split: str = Field("train", description="split of a datasets name or saved-to-disk folder")
    subset: str | None = Field(None, description="configuration name of a datasets name")
    columns: dict[str, str] = Field({}, description="new names of columns: {name in the input: name in the job}")
    prompt_column: str | None = Field(
        None, description="a string column or a messages column; default: the first of messages, prompt, text"
    )
    prompt_template: str | None = Field(None, description="Jinja template over the row's columns that makes the prompt")
    system_prompt: str | None = Field(None, description="put before messages that have no system message")
    chat_template: bool | None = Field(
        None, description="render through the model's chat template; default: messages yes, a plain string no"
    )
    id_column: str | None = Field(None, description="unique row ids; default: file and row number")
    sampling_column: str | None = Field(
        None,
        description="a struct column, or JSON text, whose keys override those of sampling for the row; with format "
        "openai_batch its default is body, the parameters of the request",
    )
    seed_column: str | None = Field(None, description="each row's own seed, unless its sampling_column has one")
    tools_column: str | None = Field(None, description="tools that the chat template describes: JSON text, or a list")
    limit: int | None = Field(None, ge=1, description="use only the first rows")
    on_too_long: Literal["error", "truncate_left"] = Field(
        "error", description="a prompt that leaves no room for one token: error row, or drop its oldest tokens"
    )
    allow_append: bool = Field(False, description="the same job again may bring new files, which are added to it")

    @model_validator(mode="before")
    @classmethod
    def _requests_are_obeyed(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("format") == "openai_batch" and not values.get("sampling_column"):
            return {**values, "sampling_column": BODY_COLUMN}
        return values

    @field_validator("path", mode="before")
    @classmethod
    def _one_path_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("path")
    @classmethod
    def _some_path(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or any(not path.strip() for path in value):
            raise ValueError("must name at least one file, got nothing")
        return value

    @field_validator("columns")
    @classmethod
    def _one_column_each(cls, value: dict[str, str]) -> dict[str, str]:
        twice = next((name for name in value.values() if [*value.values()].count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"must give each column a name of its own, got {twice!r} twice")
        return value

    @model_validator(mode="after")
    def _all_rows_where_files_are_appended(self) -> InputConfig:
        if self.allow_append and self.limit is not None:
            raise ValueError(f"limit must be null where allow_append is true, got {self.limit}")
        return self

    def source_of(self, name: str) -> str | None:
        """What the input calls a column of the job; None where it was given another name."""
        renamed = {new: old for old, new in self.columns.items()}
        return renamed.get(name, None if name in self.columns else name)

    def identity(self) -> dict[str, Any]:
        """What decides the output, without keys that, left at their defaults, were not there when older jobs began."""
        newer: dict[str, Any] = {"columns": {}, "sampling_column": None, "seed_column": None, "tools_column": None}
        absent = {key for key, default in newer.items() if getattr(self, key) == default}
        return self.model_dump(mode="json", exclude={"path", "allow_append"} | absent)


REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


class PushConfig(Section):
    """Where on the Hugging Face hub a finished output goes. The token is `HF_TOKEN` of the environment."""

    repo: str = Field(description="user/name of a dataset repository; made where absent")
    private: bool = Field(True, description="a repository that is made is private")
    revision: str = Field("main", min_length=1, description="branch that gets the commit")

    @field_validator("repo")
    @classmethod
    def _user_and_name(cls, value: str) -> str:
        if REPOSITORY.fullmatch(value) is None:
            raise ValueError(f"must be USER/NAME, got {value!r}")
        return value


OutputExtra = Literal["prompt_ids", "token_ids", "logprobs", "topk", "cdf"]


class OutputConfig(Section):
    """Where outputs go and what they hold."""

    path: str = Field(min_length=1, description="folder or fsspec URL; one folder holds one job")
    columns: tuple[str, ...] = Field((), description="input columns that are copied to the output")
    extras: tuple[OutputExtra, ...] = Field(
        ("token_ids",),
        description="prompt_ids: prompt_token_ids; token_ids: completion_token_ids; logprobs: token_logprobs; topk: "
        "topk_token_ids and topk_logprobs (k is sampling.logprobs); cdf: cdf_low and cdf_high (needs inverse_cdf)",
    )
    rows_per_shard: int = Field(256, ge=1, description="input rows of one shard, the unit of commit and of retry")
    trace: bool = Field(False, description="also draft_spans: which tokens of a sample were drafted, and by whom")
    topk_dtype: Literal["float32", "float16"] = Field("float32", description="precision of topk_logprobs")
    push_to_hub: PushConfig | None = Field(None, description="a dataset repository that gets the finished output")

    @property
    def recorded(self) -> frozenset[str]:
        """What the engine keeps of each token."""
        return frozenset([*self.extras, *(["trace"] if self.trace else [])])
