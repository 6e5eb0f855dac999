"""Training files: arms, seeds, overrides, and what is refused in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config import ModelConfig
from pipeline.errors import ConfigError
from pipeline.train_config import arms_of, load_train, parse_train

PLAIN: dict[str, Any] = {"base": "some/model", "data": {"exact": {}}}


def test_a_name_is_short_for_a_base_and_overrides_find_its_keys() -> None:
    config = parse_train(PLAIN, ["base.model.dtype=float32", "training.lr=1e-2", "training.steps=7"])
    assert config.base.model == ModelConfig(id="some/model", dtype="float32")
    assert config.training.steps == 7
    data = parse_train({"base": {"model": "m"}, "data": {"input": "x.parquet"}}, ["data.input.limit=3"]).data
    assert data.input is not None
    assert (data.input.path, data.input.limit) == (("x.parquet",), 3)


def test_arms_change_the_file_key_by_key_and_repeat_with_seeds() -> None:
    arms = [{"name": "o"}, {"name": "c", "adapter": {"head": "c"}, "training": {"loss": "ce+kl", "steps": 5}}]
    config = parse_train({**PLAIN, "adapter": {"variant": "full"}, "arms": arms, "seeds": [3, 4]})
    names = {arm.name: arm.config for arm in arms_of(config)}
    assert list(names) == ["o-3", "o-4", "c-3", "c-4"]
    assert (names["c-4"].adapter.head, names["c-4"].adapter.variant) == ("c", "full")
    assert (names["c-4"].training.steps, names["c-4"].training.seed) == (5, 4)
    assert names["o-3"].training.steps == 1000
    assert all(not one.arms and not one.seeds for one in names.values())


def test_a_file_without_arms_is_one_arm_named_by_its_head() -> None:
    (arm,) = arms_of(parse_train({**PLAIN, "adapter": {"head": "c"}}))
    assert arm.name == "c"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data": {}}, "data must hold exactly one of outputs, input and exact"),
        ({"data": {"exact": {}, "outputs": "x"}}, "data must hold exactly one of outputs, input and exact"),
        ({"data": {"exact": {}, "teacher": "any"}}, "data.teacher must be base unless outputs is given, got any"),
        (
            {"data": {"outputs": "x", "teacher": "any"}, "adapter": {"head": "c"}, "training": {"loss": "kl"}},
            "data.teacher must be base for training.loss kl, got any",
        ),
        ({"base": {}}, "base must hold exactly one of model and pretrain"),
        ({"data": {"exact": {"kinds": 1}}}, "data.exact.kinds must be a known key (did you mean 'data.exact.kind'?)"),
        ({"adapter": {"head": "z"}}, "adapter.head must be one of o, c, got 'z'"),
        ({"training": {"lr": 0}}, "training.lr must be greater than 0, got 0"),
        ({"training": {"batch_size": 3, "accumulation": 2}}, "training.accumulation must divide batch_size (3), got 2"),
        ({"training": {"objective": "inverse"}}, "adapter.head must be c for training.objective inverse, got o"),
        ({"training": {"loss": "kl"}}, "adapter.head must be c for training.loss kl, got o"),
        ({"adapt": {"temperature": 0}}, "adapt.temperature must be greater than 0, where noise picks the token, got 0"),
        (
            {"cluster": {"workers": 3}},
            "training.batch_size must be a multiple of training.accumulation x cluster.workers (1 x 3), got 8",
        ),
        (
            {"window": {"slots": 8, "sequence_length": 8}},
            "window.slots must be below window.sequence_length (8), got 8",
        ),
        (
            {"base": {"pretrain": {"shape": {"hidden": 30, "heads": 4}}}},
            "base.pretrain.shape.hidden must be a multiple of twice heads (8), got 30",
        ),
    ],
)
def test_mistakes(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_train({**PLAIN, **changes})
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    ("arms", "sentence"),
    [
        ([{"name": "a/b"}], "arms.name must be letters, digits, '.', '_' and '-', and not base, got 'a/b'"),
        ([{"name": "base"}], "arms.name must be letters, digits, '.', '_' and '-', and not base, got 'base'"),
        ([{"name": "a"}, {"name": "a"}], "arms.name must differ from arm to arm, got 'a' twice"),
        ([{"name": "a", "base": "y"}], "arms.base must be left out, since all arms share it, got it in arm 'a'"),
        ([{"name": "a", "adapter": {"head": "q"}}], "adapter.head must be one of o, c, got 'q' (in arm 'a')"),
    ],
)
def test_mistakes_in_arms(arms: list[dict[str, Any]], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        arms_of(parse_train({**PLAIN, "arms": arms}))
    assert str(raised.value) == sentence


def test_a_file_is_read_and_its_mistakes_name_it(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(PLAIN))
    assert load_train(str(path), ["window.slots=4"]).window.slots == 4
    with pytest.raises(ConfigError, match="the training file must be a readable text file"):
        load_train(str(tmp_path / "none.yaml"))
