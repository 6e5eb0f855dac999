"""`sevenleague train`: from the pipeline's own output to an adapter, on a real Ray cluster; refusals; progress."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console

from jobs.cli import main
from jobs.exit_codes import ExitCode
from jobs.train import _explained, chosen_arms, run_training
from jobs.train_progress import TrainDisplay, train_display
from pipeline.errors import ConfigError, PermanentError
from pipeline.train_config import arms_of, parse_train

from .conftest import write_prompts

MakeJob = Callable[..., Any]


def train_data(model: Path, **sections: Any) -> dict[str, Any]:
    """Two arms that train in a second or so."""
    return {
        "base": {"model": {"id": str(model), "dtype": "float32", "device": "cpu"}},
        "data": {"exact": {"vocabulary": 320}},
        "window": {"slots": 3, "windows_per_sequence": 4, "sequence_length": 32},
        "training": {"steps": 6, "batch_size": 4, "eval_every": 3, "eval_sequences": 2, "checkpoint_every": 2},
        "arms": [{"name": "o"}, {"name": "c", "adapter": {"head": "c", "variant": "full"}}],
        **sections,
    }


def write(path: Path, data: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(data))
    return path


def column(output: Path, name: str) -> list[Any]:
    """A column of an output, in order of ids."""
    table = pq.read_table(output / "data", columns=["id", name])
    return [value for _, value in sorted(zip(*(table[key].to_pylist() for key in ("id", name)), strict=True))]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The sentence of a command that ends as a user error."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == ExitCode.USER_ERROR
    return capsys.readouterr().err.removeprefix("sevenleague: ").strip()


@pytest.mark.ray
def test_the_pipelines_output_trains_adapters_of_its_model(
    make_job: MakeJob, run_here: Any, run_cli: Any, tmp_path: Path, tiny_model_dir: Callable[[str], Path]
) -> None:
    """Two processes make what one makes of the same batches; a finished arm is not trained again."""
    import torch
    from safetensors.torch import load_file

    from pipeline.config import ModelConfig
    from workers.model_loading import load_model
    from workers.ptp.adapter import load_adapter
    from workers.ptp.arms import Place, train_arm

    model = tiny_model_dir("llama")
    job = make_job(
        [f"add {i} to {i}" for i in range(12)],
        output={"extras": ["token_ids", "cdf"]},
        sampling={"coupling": "inverse_cdf", "top_p": 1.0, "max_tokens": 16, "ignore_eos": True},
    )
    run_here(job)
    data = train_data(model, data={"outputs": str(job.output), "held_out": 0.3})
    file = write(tmp_path / "train.yaml", data)
    command = ("train", file, "--output", tmp_path / "two", "--json", tmp_path / "two.json")

    done = run_cli(*command, "--set", "cluster.workers=2")
    assert done.returncode == 0, done.stderr
    arms = json.loads((tmp_path / "two.json").read_text())["arms"]
    assert [(arm["name"], arm["steps"], arm["seed"]) for arm in arms] == [("o", 6, 0), ("c", 6, 0)]
    fixed = {"name", "loss", "correct", "accepted", "perplexity", "reference_perplexity", "steps", "seconds", "seed"}
    assert all(fixed <= arm.keys() for arm in arms)
    progress = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert (progress[-1]["arm"], progress[-1]["step"]) == ("c", 6)

    loaded = load_model(ModelConfig(id=str(model), dtype="float32", device="cpu"))
    for arm, result in zip(arms_of(parse_train(data)), arms, strict=True):
        alone = train_arm(arm, Place(str(tmp_path / "one"), torch.device("cpu")))
        assert alone["loss"] == pytest.approx(result["loss"], rel=1e-4)
        files = [load_file(tmp_path / name / arm.name / "adapter" / "adapter.safetensors") for name in ("one", "two")]
        assert files[0].keys() == files[1].keys()
        for name, tensor in files[0].items():
            torch.testing.assert_close(tensor, files[1][name], rtol=1e-3, atol=1e-5)
        adapter = load_adapter(str(tmp_path / "two" / arm.name / "adapter"), loaded)
        assert adapter.config.adapt.temperature == 0.8  # the job's
        assert adapter.config.metrics["correct"] == result["correct"]
        assert any((tmp_path / "two" / arm.name / "tensorboard").iterdir())

    # A further training goes on from an adapter, whose steps it counts.
    further = parse_train(data, [f"adapter.start={tmp_path / 'two' / 'o' / 'adapter'}", "training.lr=1e-12"])
    (arm, _) = arms_of(further)
    assert train_arm(arm, Place(str(tmp_path / "on"), torch.device("cpu")))["steps"] == 6
    on = load_adapter(str(tmp_path / "on" / "o" / "adapter"), loaded)
    assert on.config.steps == 12
    begun = load_file(tmp_path / "two" / "o" / "adapter" / "adapter.safetensors")
    assert all(torch.allclose(tensor, begun[name], atol=1e-6) for name, tensor in on.state().items())

    # Finished arms are told again without a process; another training is refused.
    config = parse_train(data)
    assert run_training(config, arms_of(config), str(tmp_path / "two")) == arms
    other = parse_train(data, ["training.lr=0.5"])
    with pytest.raises(ConfigError, match="--output must be empty or hold the same training"):
        run_training(other, arms_of(other), str(tmp_path / "two"))


def test_a_new_base_and_interrupted_arms_end_as_undisturbed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arms are cut off at a checkpoint and go on: every bit of the adapters is the same."""
    import torch
    from safetensors.torch import load_file

    from workers.ptp import arms as arms_module
    from workers.ptp.arms import Place, needs_base, train_arm, train_base
    from workers.ptp.trainer import TrainProgress

    shape = {"hidden": 32, "layers": 2, "heads": 2, "intermediate": 48, "context": 64}
    pretrain = {"shape": shape, "sequence_length": 32, "training": {"steps": 4, "eval_every": 4}}
    data = train_data(tmp_path, base={"pretrain": pretrain}, data={"exact": {"vocabulary": 12}})
    data["arms"] = [
        {"name": "inverse", "adapter": {"head": "c"}, "training": {"objective": "inverse"}},
        {"name": "ar", "training": {"objective": "autoregressive"}},
    ]
    config = parse_train(data)

    class Interrupted(Exception):
        pass

    def interrupt(progress: TrainProgress) -> None:
        if progress.step == 5:
            raise Interrupted

    for name, is_cut in (("whole", False), ("cut", True)):
        place = Place(str(tmp_path / name), torch.device("cpu"))
        assert needs_base(config, place.output)
        train_base(config, place)
        assert not needs_base(config, place.output)
        assert run_training(config, [], place.output)[0]["steps"] == 4  # the base alone, which is there
        for arm in arms_of(config):
            if is_cut:
                with pytest.raises(Interrupted):
                    train_arm(arm, place, interrupt)
            steps: list[int] = []
            result = train_arm(arm, place, lambda progress, steps=steps: steps.append(progress.step))  # type: ignore[misc]
            assert steps[0] == (5 if is_cut else 1)  # from the checkpoint at 4
            assert result == arms_module.finished(arm, place.output)
    for arm in arms_of(config):
        kind = "model/model.safetensors" if arm.name == "ar" else "adapter/adapter.safetensors"
        whole, cut = (load_file(tmp_path / name / arm.name / kind) for name in ("whole", "cut"))
        assert all(torch.equal(tensor, cut[key]) for key, tensor in whole.items())


def test_a_base_that_did_not_make_the_data_is_refused(
    make_job: MakeJob, run_here: Any, tmp_path: Path, tiny_model_dir: Callable[[str], Path]
) -> None:
    import torch
    from transformers import AutoTokenizer

    from workers.ptp.arms import Place, train_arm

    job = make_job(
        ["one", "two", "three", "four", "five", "six"],
        output={"extras": ["token_ids", "cdf"]},
        sampling={"coupling": "inverse_cdf", "max_tokens": 4},
    )
    run_here(job)
    data = train_data(tiny_model_dir("qwen3"), data={"outputs": str(job.output)})
    (arm, _) = arms_of(parse_train(data))
    with pytest.raises(ConfigError, match=r"base.model must be the model that made data.outputs"):
        train_arm(arm, Place(str(tmp_path / "out"), torch.device("cpu")))

    # It is another model's adapter that is wanted, say a smaller one's: the vocabulary decides.
    wanted = {**data, "data": {"outputs": str(job.output), "teacher": "any", "held_out": 0.5}}
    (arm, _) = arms_of(parse_train(wanted))
    assert train_arm(arm, Place(str(tmp_path / "any"), torch.device("cpu")))["steps"] == 6
    other = shutil.copytree(tiny_model_dir("qwen3"), tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(other)
    (arm, _) = arms_of(parse_train({**wanted, "base": str(other)}))
    with pytest.raises(ConfigError, match=r"base.model must have the vocabulary of the model that made data.outputs"):
        train_arm(arm, Place(str(tmp_path / "out"), torch.device("cpu")))
    (arm, _) = arms_of(parse_train({**data, "adapt": {"temperature": 0.5}}))
    with pytest.raises(ConfigError, match=r"adapt must be left out or as data.outputs were sampled \(temperature 0.8"):
        train_arm(arm, Place(str(tmp_path / "out"), torch.device("cpu")))


def test_outputs_make_a_draft_model_and_its_adapter(
    make_job: MakeJob, run_here: Any, tmp_path: Path, tiny_model_dir: Callable[[str], Path]
) -> None:
    """Generate, train a smaller model and its adapter on that, draft with both: all in the tokens of the first."""
    import torch
    from transformers import AutoTokenizer

    from workers.ptp.arms import Place, train_arm, train_base

    coupled = {"coupling": "inverse_cdf", "max_tokens": 6}
    prompts = write_prompts(tmp_path / "prompts.parquet", ["one", "two", "three", "four", "five", "six"])
    job = make_job(prompts, output={"extras": ["token_ids", "cdf"]}, sampling=coupled)
    run_here(job)
    shape = {"hidden": 32, "layers": 1, "heads": 2, "intermediate": 48, "context": 64}
    pretrain = {"shape": shape, "sequence_length": 32, "training": {"steps": 30, "eval_every": 30, "lr": 1e-2}}
    outputs = {"outputs": str(job.output), "teacher": "any", "held_out": 0.5}
    data = train_data(tmp_path, base={"pretrain": pretrain}, data=outputs)
    (arm, _) = arms_of(parse_train(data))
    place = Place(str(tmp_path / "draft"), torch.device("cpu"))
    train_base(arm.config, place)
    (figures,) = run_training(parse_train(data), [], place.output)
    assert figures["steps"] == 30
    made, teachers = (AutoTokenizer.from_pretrained(path) for path in (place.path("base"), tiny_model_dir("llama")))
    assert made.get_vocab() == teachers.get_vocab()
    assert train_arm(arm, place)["steps"] == 6
    ptp = {"strategy": "ptp", "adapter": place.path("o", "adapter"), "model": place.path("base")}
    for decoding in (ptp, {"strategy": "draft_model", "model": place.path("base")}):
        again = make_job(prompts, decoding["strategy"], sampling=coupled, decoding=decoding)
        run_here(again)
        assert column(again.output, "completion_token_ids") == column(job.output, "completion_token_ids")
        assert sum(column(again.output, "num_draft_tokens")) > 0

    with pytest.raises(ConfigError, match=r"data.teacher must be any where base.pretrain learns from data.outputs"):
        parse_train({**data, "data": {"outputs": str(job.output)}})


def test_mistakes_that_show_before_ray(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model_dir: Callable[[str], Path]
) -> None:
    file = write(tmp_path / "train.yaml", train_data(tiny_model_dir("llama")))
    out = ("--output", tmp_path / "out")
    assert refusal(capsys, "train", file) == "Missing option '--output'."
    assert "the training file must be a readable text file" in refusal(capsys, "train", tmp_path / "no.yaml", *out)
    assert refusal(capsys, "train", file, *out, "--arms", "o,d") == "--arms must name arms of the file (o, c), got 'd'"
    sentence = refusal(capsys, "train", file, *out, "--set", "training.stps=3")
    assert sentence == "training.stps must be a known key (did you mean 'training.steps'?)"
    bad = write(tmp_path / "bad.yaml", train_data(tiny_model_dir("llama"), data={"outputs": str(tmp_path)}))
    assert "must be the output of a job" in refusal(capsys, "train", bad, *out)


def test_arms_are_chosen_with_or_without_their_seed(tmp_path: Path) -> None:
    arms = arms_of(parse_train(train_data(tmp_path, seeds=[0, 1])))
    assert [arm.name for arm in chosen_arms(arms, [])] == ["o-0", "o-1", "c-0", "c-1"]
    assert [arm.name for arm in chosen_arms(arms, ["c", "o-1"])] == ["o-1", "c-0", "c-1"]


@pytest.mark.ray
def test_a_mistake_that_a_process_meets_is_the_users() -> None:
    from ray.train.v2._internal.exceptions import UserExceptionWithTraceback
    from ray.train.v2.api.exceptions import WorkerGroupError

    mistake = UserExceptionWithTraceback(ConfigError("a.b must be c, got d"), "Traceback ..")
    explained = _explained(WorkerGroupError("one failed", {1: mistake}))
    assert isinstance(explained, ConfigError)
    assert str(explained) == "a.b must be c, got d"
    other = _explained(
        WorkerGroupError("one failed", {0: UserExceptionWithTraceback(ValueError("x"), "T\nValueError: x")})
    )
    assert isinstance(other, PermanentError)
    assert str(other) == "the training failed: ValueError: x"


def test_progress_without_and_with_a_terminal() -> None:
    from workers.ptp.process import Status
    from workers.ptp.trainer import TrainProgress

    def status(step: int, *, ended: bool = False) -> Status:
        progress = TrainProgress(step, 10, 2.0 * step, 1.5, 1e-3, {"loss": 2.0, "correct": 1.25})
        return Status("o", 1, 3, progress, ended)

    lines = io.StringIO()
    display = TrainDisplay(Console(file=lines), None)
    for step in (1, 2, 2, 8):
        display.show(status(step))
    display.show(status(8, ended=True))  # it stopped early
    shown = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [(line["arm"], line["step"]) for line in shown] == [("o", 1), ("o", 8)]
    assert shown[1]["metrics"] == {"loss": 2.0, "correct": 1.25}

    screen = io.StringIO()
    with train_display(Console(file=screen, force_terminal=True, width=120)) as live:
        live.show(status(4))
        live.show(status(6))
        assert live.live is not None
        live.live.refresh()
    assert "o (2 of 3)" in screen.getvalue()
    assert "6 of 10 steps" in screen.getvalue()
    assert "ETA 8.0 s" in screen.getvalue()
    assert "correct 1.250" in screen.getvalue()
