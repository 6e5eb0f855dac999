"""The section `decoding` of a job file: one model for each strategy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pipeline.section import Section


class Windowed(Section):
    """Parameters of every strategy that drafts: draft rows of one sequence in one step.

    The window of a sequence grows while its drafts are accepted whole and shrinks when they break early; with
    min_window = max_window it is fixed.
    """

    min_window: int = Field(1, ge=0, le=256, description="fewest draft rows of a sequence")
    max_window: int = Field(16, ge=1, le=256, description="most draft rows of a sequence")
    max_draft_rows: int = Field(64, ge=1, description="most draft rows of a step, over all sequences")

    @property
    def extra_rows(self) -> int:
        """Rows of one sequence beside its drafts."""
        return 0

    @model_validator(mode="after")
    def _ordered(self) -> Windowed:
        if self.min_window > self.max_window:
            raise ValueError(f"min_window must be at most max_window ({self.max_window}), got {self.min_window}")
        return self


class AutoregressiveConfig(Section):
    """Plain decoding: one token per step. The reference that every other strategy must equal."""

    strategy: Literal["autoregressive"] = "autoregressive"


class JacobiConfig(Windowed):
    """Jacobi iteration: the guesses beyond the first mismatch, re-predicted in the same pass, are the next guesses."""

    strategy: Literal["jacobi"] = "jacobi"
    init: Literal["copy", "random", "suffix"] = Field("copy", description="what fills the empty end of the window")


class LookaheadConfig(Windowed):
    """Lookahead decoding (Fu et al. 2024): a two-dimensional window feeds an n-gram pool that is verified."""

    strategy: Literal["lookahead"] = "lookahead"
    width: int = Field(5, ge=1, le=64, description="W: columns of the two-dimensional window")
    ngram: int = Field(4, ge=2, le=16, description="N: tokens of an n-gram")
    candidates: int = Field(5, ge=1, le=64, description="G: n-grams verified per step")
    max_window: int = Field(64, ge=1, le=256, description="most draft rows of a sequence")

    @property
    def extra_rows(self) -> int:
        """Cells of the two-dimensional window without the pending token."""
        return (self.ngram - 1) * self.width - 1


class FixedWindow(Windowed):
    """Strategies that draft the same number of tokens in every step; they serve for comparison."""

    window: int = Field(4, ge=1, le=256, description="k: draft tokens of a sequence in each step")
    max_draft_rows: int = Field(4096, ge=1, description="most draft rows of a step, over all sequences")

    @model_validator(mode="before")
    @classmethod
    def _fixed(cls, data: dict[str, Any]) -> dict[str, Any]:
        """`min_window` and `max_window` are `window`."""
        window = data.get("window", cls.model_fields["window"].default)
        if not isinstance(window, int) or not 1 <= window <= 256:
            return data  # refused below
        for key in ("min_window", "max_window"):
            if data.get(key, window) != window:
                raise ValueError(f"{key} must be left out where window ({window}) fixes it, got {data[key]}")
        return {**data, "min_window": window, "max_window": window}


class PromptLookupConfig(FixedWindow):
    """Prompt lookup (Saxena 2023): one chain, copied from the latest longest match in prompt and own output."""

    strategy: Literal["prompt_lookup"] = "prompt_lookup"
    max_match: int = Field(3, ge=1, le=64, description="longest context that is matched, in tokens")


class DraftModelConfig(FixedWindow):
    """Speculative decoding (Leviathan et al. 2023): a small model with the same vocabulary drafts a chain."""

    strategy: Literal["draft_model"] = "draft_model"
    model: str = Field(min_length=1, description="hub id or folder of the draft model")


BRANCHES = 3
"""Of a sequence, where a job does not say: of the four outcomes of a chain of three drafts, three are most."""


class PTPConfig(Windowed):
    """Parallel token prediction (arXiv 2512.21323): a trained adapter drafts a chain from the noise of its tokens."""

    strategy: Literal["ptp"] = "ptp"
    adapter: str = Field(min_length=1, description="folder or fsspec URL that `sevenleague train` wrote")
    model: str | None = Field(None, description="the adapter's base, where that is a smaller model than model.id")
    mode: Literal["auto", "serial", "one_pass"] = Field(
        "auto",
        description="serial: a pass that drafts, then one that verifies; one_pass: both at once, with a branch for "
        "each likely number of accepted drafts; auto: serial where model names the adapter's base, else one_pass",
    )
    branches: int | None = Field(
        None,
        ge=1,
        le=64,
        description="branches of a sequence in one_pass mode; default: up to 3 while rows are idle, at least 1",
    )
    max_window: int = Field(8, ge=1, le=256, description="most draft rows of a sequence")

    @property
    def extra_rows(self) -> int:
        """Auxiliary rows of a sequence. A window has one row more than drafts where its first target is emitted anyway,
        or where the pending token runs in the drafting pass too."""
        branches = self.branches or BRANCHES if self.is_one_pass else 1
        return branches * (self.max_window + 1)

    @property
    def is_one_pass(self) -> bool:
        """Whether drafting and verifying are one pass. A model of its own cannot run in the target's."""
        return self.mode == "one_pass" or (self.mode == "auto" and self.model is None)

    @model_validator(mode="after")
    def _own_model(self) -> PTPConfig:
        if self.model is not None and self.mode == "one_pass":
            raise ValueError("mode must be auto or serial where model names the adapter's base, got one_pass")
        return self


class SuffixConfig(Windowed):
    """Suffix drafts: what followed the longest earlier match in the prompt, the own output, or finished outputs."""

    strategy: Literal["suffix"] = "suffix"
    max_match: int = Field(16, ge=1, le=64, description="longest context that is matched, in tokens")
    use_finished: bool = Field(True, description="also match the finished outputs of this worker; false: prompt lookup")


class RecyclingConfig(Windowed):
    """Recycled continuations: a tree from the top candidates that earlier passes computed anyway."""

    strategy: Literal["recycling"] = "recycling"
    top_k: int = Field(8, ge=1, le=64, description="candidates kept per context")
    context: int = Field(2, ge=1, le=4, description="longest key in tokens, with back-off to shorter ones")


class AutoConfig(Windowed):
    """The model-free drafters, and an adapter if there is one, merged into one tree, of which rows run as far as they
    pay for their time."""

    strategy: Literal["auto"] = "auto"
    adapter: str | None = Field(None, description="an adapter of parallel token prediction that drafts too")
    lookahead_width: int = Field(
        0,
        ge=0,
        le=64,
        description="W: a two-dimensional window (N = 4) of 3 W - 1 more rows, run where it pays",
    )

    @property
    def extra_rows(self) -> int:
        """Cells of the two-dimensional window without the pending token, and rows of the adapter's windows."""
        auxiliary = 0 if self.adapter is None else PTPConfig(adapter=self.adapter).extra_rows
        return max(0, 3 * self.lookahead_width - 1) + auxiliary


DecodingConfig = Annotated[
    AutoregressiveConfig
    | JacobiConfig
    | LookaheadConfig
    | SuffixConfig
    | RecyclingConfig
    | AutoConfig
    | PromptLookupConfig
    | DraftModelConfig
    | PTPConfig,
    Field(discriminator="strategy"),
]
