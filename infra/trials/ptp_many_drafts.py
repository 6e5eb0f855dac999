"""Correct tokens over the number of drafts M, on an exact teacher: ptp_many_drafts.py CONFIG OUTPUT ARM JSON

Of M sets of noise the one is used whose places in the teacher's intervals are nearest the middle (algorithms.md
section 8). OUTPUT is what `sevenleague train CONFIG --output OUTPUT` wrote.

Shape legend: B sequences, W windows, N = B * W, L slots.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from pipeline.errors import ConfigError
from pipeline.train_config import arms_of, load_train
from workers.model_loading import load_model
from workers.ptp.adapter import load_adapter
from workers.ptp.arms import adapt_of, base_model
from workers.ptp.documents import is_held_out
from workers.ptp.evaluation import draft_tokens
from workers.ptp.exact_source import ExactSource
from workers.ptp.exact_teachers import make_teacher
from workers.ptp.many_drafts import scores_over_sets
from workers.ptp.sequences import PackedStream
from workers.ptp.student import capture, slot_logits
from workers.ptp.windows import choose_starts, make_windows

SETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SEQUENCES = 32
SEED = 2**33


@torch.no_grad()
def main(config_file: str, output: str, arm_name: str, json_file: str) -> None:
    arm = next((arm for arm in arms_of(load_train(config_file)) if arm.name == arm_name), None)
    if arm is None or arm.config.data.exact is None:
        raise ConfigError(f"ARM must be an arm with an exact teacher of {config_file}, got {arm_name!r}")
    config, exact = arm.config, arm.config.data.exact
    loaded = load_model(base_model(config, output), torch.device("cpu"))
    adapter = load_adapter(str(Path(output, arm_name, "adapter")), loaded)
    params = adapt_of(config)
    source = ExactSource(make_teacher(exact), config.window.sequence_length, params.sampling(), exact.seed)
    wanted = lambda row_id: is_held_out(row_id, config.data.held_out)  # noqa: E731
    batch = PackedStream(source, config.window.sequence_length, SEED, wanted).take(SEQUENCES)
    assert batch.low_BS is not None, "an exact teacher knows its edges"
    assert batch.high_BS is not None
    generator = torch.Generator().manual_seed(SEED)
    start_BW = choose_starts(batch.tokens, config.window.windows_per_sequence, generator)
    windows = make_windows(batch.tokens, start_BW, config.window.slots)
    captured = capture(adapter.gated, batch.tokens)
    context_BW = windows.before(batch.tokens.ids_BS)

    def draft(u_NL: Tensor) -> Tensor:
        inputs_BWLE = adapter.slot_inputs(u_NL.view(*start_BW.shape, -1), context_BW)
        logits_NV = slot_logits(adapter, inputs_BWLE, windows, captured)
        return draft_tokens(logits_NV, u_NL.flatten(), adapter.config.head, params).view_as(u_NL)

    low_NL, high_NL, token_NL = (
        windows.of(x).flatten(0, 1) for x in (batch.low_BS, batch.high_BS, batch.tokens.ids_BS)
    )
    scores = scores_over_sets(draft, low_NL, high_NL, token_NL, windows.counts_BWL.flatten(0, 1), SETS, generator)
    for count, score in scores.items():
        print(f"M {count:5}  correct {score.correct:.3f}  accepted {score.accepted:.3f}")
    figures = {str(count): asdict(score) for count, score in scores.items()}
    Path(json_file).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ConfigError as error:
        sys.exit(str(error))
