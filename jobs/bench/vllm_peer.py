"""The other end of `vllm_client`: runs in an interpreter that has vLLM, and speaks JSON lines until stdin ends.

    {"do": "load", "engine": {..}}
        -> {"version": "0.32.0"}
    {"do": "generate", "batch": 8, "prompts": [[1, 2], ..], "sampling": {..}}
        -> {"seconds": 1.5, "tokens": [[3, 4], ..], "steps": 9}

`engine` are arguments of `vllm.LLM`, `sampling` of `vllm.SamplingParams`. A failure answers {"error": "in words"}. This
file imports nothing of sevenleague, since that interpreter does not have it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM also logs to stdout, which belongs to the answers
    llm: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "load":
                llm, answer = load(request["engine"])
            else:
                answer = generate(llm, request["batch"], request["prompts"], request["sampling"])
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def load(engine: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    import vllm

    return vllm.LLM(**engine), {"version": vllm.__version__}


def generate(llm: Any, batch: int, prompts: list[list[int]], sampling: dict[str, Any]) -> dict[str, Any]:
    """Continuous batching with at most `batch` requests in flight: a new one enters as soon as one has finished.

    `steps` counts the outputs of all requests over all steps; each is a step in which a request gained tokens.
    """
    from vllm import SamplingParams

    llm.reset_prefix_cache()  # else a second pass over the same prompts would skip their prefill
    engine = llm.llm_engine
    params = SamplingParams(detokenize=False, **sampling)
    tokens: list[list[int]] = [[] for _ in prompts]
    waiting = list(enumerate(prompts))[::-1]
    running = steps = 0
    began = time.perf_counter()
    while waiting or running:
        while waiting and running < batch:
            number, prompt = waiting.pop()
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
            running += 1
        for output in engine.step():
            gained = list(output.outputs[0].token_ids)
            steps += len(gained) > len(tokens[int(output.request_id)])
            tokens[int(output.request_id)] = gained
            running -= output.finished
    return {"seconds": time.perf_counter() - began, "tokens": tokens, "steps": steps}


if __name__ == "__main__":
    serve()
