"""Losses of slots that count. Logits are those of `student.slot_logits` at these slots alone, so no mask is needed.

- Head "o": cross entropy against the token; the noise it was shown leaves one answer.
- Head "c": cross entropy, or KL(teacher || student).

What logits of head "c" mean: those of temperature 1, without top-k, top-p or min-p, as the base's own logits, so that
serving can `adapt` them to any parameters. KL compares both at temperature 1. Cross entropy on data that was drawn at
another temperature divides the student's logits by it first, or they would learn the data's temperature and get it
twice when served. (Truncation by top-k or top-p cannot be undone that way: there use KL.)

Shape legend: N slots that count, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits_NV: Tensor, token_N: Tensor, temperature: float = 1.0) -> Tensor:
    """Mean -log p(token) in nats. `temperature` is that of the data for head "c"; greedy data (0) counts as 1."""
    return F.cross_entropy(_wide(logits_NV) / (temperature or 1.0), token_N)


def distillation(logits_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    """Mean KL(teacher || student) in nats, both at temperature 1. The teacher gets no gradient."""
    log_teacher_NV = _wide(teacher_NV.detach()).log_softmax(-1)
    return F.kl_div(_wide(logits_NV).log_softmax(-1), log_teacher_NV, reduction="batchmean", log_target=True)


def _wide(logits_NV: Tensor) -> Tensor:
    return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
