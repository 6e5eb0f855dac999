"""What the formats know beside the rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Context:
    """`created` is when the job was made (Unix seconds), `conversational` whether its prompts are messages."""

    model: str
    created: int
    conversational: bool
    trailing_tokens: int = 0
    sequence_length: int | None = None
