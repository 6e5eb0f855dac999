"""Which prompts a benchmark takes, and what its outputs must be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.bench.workload import Workload, load_workload, user_chars
from pipeline.config import ModelConfig, SamplingConfig
from pipeline.config_io import parse_job
from pipeline.prompts import Prompt
from workers.model_loading import LoadedModel, load_model

from .conftest import job_data, write_prompts


@pytest.fixture(scope="module")
def llama(tiny_model_dir: Callable[[str], Path]) -> LoadedModel:
    return load_model(ModelConfig(id=str(tiny_model_dir("llama")), dtype="float32"))


def loaded_from(
    prompts: list[str], llama: LoadedModel, folder: Path, *, limit: int, spread: bool = False, chars: int | None = None
) -> Workload:
    path = write_prompts(folder / "prompts.parquet", prompts)
    job = parse_job(job_data(Path(llama.name), path, folder))
    return load_workload(job, llama, limit=limit, spread=spread, max_prompt_chars=chars)


def texts(workload: Workload, llama: LoadedModel) -> list[str]:
    return [llama.tokenizer.decode(ids) for ids in workload.prompts]


def test_the_first_prompts_or_some_of_all(llama: LoadedModel, tmp_path: Path) -> None:
    prompts = [f"prompt {letter}" for letter in "abcdefgh"]
    first = loaded_from(prompts, llama, tmp_path, limit=2)
    assert texts(first, llama) == ["prompt a", "prompt b"]
    assert [uid.partition(":")[2] for uid in first.uids] == ["0", "1"]
    assert texts(loaded_from(prompts, llama, tmp_path, limit=2, spread=True), llama) == ["prompt c", "prompt g"]
    assert texts(loaded_from(prompts, llama, tmp_path, limit=99, spread=True), llama) == prompts


def test_prompts_that_do_not_fit_are_left_out_before_the_limit(llama: LoadedModel, tmp_path: Path) -> None:
    # 12 new tokens and a context of 512: the second prompt has no room
    prompts = ["x" * 40, "y z " * 200, "short", "", "also short"]
    assert texts(loaded_from(prompts, llama, tmp_path, limit=2, chars=39), llama) == ["short", "also short"]
    assert texts(loaded_from(prompts, llama, tmp_path, limit=3), llama) == ["x" * 40, "short", "also short"]


def test_warm_up_never_shows_a_prompt_of_the_workload(llama: LoadedModel, tmp_path: Path) -> None:
    spared = loaded_from(["one", "two", "three", "four"], llama, tmp_path, limit=2)
    assert [llama.tokenizer.decode(ids) for ids in spared.warm_up(3)] == ["three", "four", "three"]
    all_used = loaded_from(["one two", "three four"], llama, tmp_path, limit=2)
    assert all_used.warm_up(2) == [ids[::-1] for ids in all_used.prompts]


def test_user_chars_leave_out_the_other_roles() -> None:
    messages = (
        {"role": "system", "content": "abc"},
        {"role": "user", "content": "de"},
        {"role": "user", "content": "f"},
    )
    assert user_chars(Prompt(0, "row", None, messages, {}, None)) == 3
    assert user_chars(Prompt(0, "row", "abcd", None, {}, None)) == 4


def workload(*, ignore_eos: bool) -> Workload:
    return Workload(("a", "b"), ((1,), (2, 3)), ((4,),), SamplingConfig(n=2, max_tokens=3, ignore_eos=ignore_eos))


def test_samples_of_a_prompt_follow_one_another() -> None:
    assert workload(ignore_eos=True).sequences == [[1], [1], [2, 3], [2, 3]]
    assert workload(ignore_eos=True).max_length == 5


def test_outputs_must_be_as_agreed() -> None:
    full = [[7, 7, 7]] * 4
    workload(ignore_eos=True).check(full)
    with pytest.raises(ValueError, match="gave 3 outputs, not 4"):
        workload(ignore_eos=True).check(full[:3])
    with pytest.raises(ValueError, match="gave 2 tokens in output 3, not 3"):
        workload(ignore_eos=True).check([*full[:3], [7, 7]])
    workload(ignore_eos=False).check([*full[:3], [7, 7]])
    with pytest.raises(ValueError, match="gave 0 tokens in output 3"):
        workload(ignore_eos=False).check([*full[:3], []])
