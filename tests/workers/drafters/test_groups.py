from __future__ import annotations

import pytest

from workers.drafters.groups import PerGroup


def test_a_value_lives_as_long_as_its_group() -> None:
    values: PerGroup[list[int]] = PerGroup(list)
    assert values.enter("g")
    values["g"].append(1)
    assert not values.enter("g")
    assert values.enter("h")
    assert (values["g"], values["h"]) == ([1], [])
    values.leave("g")
    assert values["g"] == [1]
    values.leave("g")
    assert len(values) == 1
    with pytest.raises(KeyError):
        values["g"]
    assert values.enter("g")
    assert values["g"] == []
