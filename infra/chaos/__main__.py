"""python -m infra.chaos --rounds 4 --faults 6 --seed 1: jobs under faults, compared with undisturbed ones.

Exits 0 only if every job's data equals the undisturbed run's. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import click

from infra.chaos import processes
from infra.chaos.compare import Comparison, compare, inconsistencies, read_rows
from infra.chaos.disturbed import Disturbed
from infra.chaos.report import Result, blame, summary, table
from infra.chaos.schedule import KINDS, Round, schedule
from infra.chaos.site import ROOT, Site, site
from infra.chaos.targets import Target, make_target


@click.command()
@click.option("--rounds", type=click.IntRange(min=1), default=4, show_default=True, help="Jobs.")
@click.option("--faults", type=click.IntRange(min=1), default=6, show_default=True, help="Faults of each job.")
@click.option("--seed", type=int, default=None, help="Decides jobs and faults; default: drawn from the clock.")
@click.option("--kinds", default="", metavar="A,B", help=f"Only these of {', '.join(KINDS)}.")
@click.option("--only", type=int, default=None, metavar="ROUND", help="Run only this one of the rounds (from 0).")
@click.option("--folder", default=None, help="For jobs and logs; default: a new one that goes when all is well.")
def main(rounds: int, faults: int, seed: int | None, kinds: str, only: int | None, folder: str | None) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # all that was started is ended then
    seed = int(time.time()) % 10**6 if seed is None else seed
    wanted = [kind for kind in kinds.split(",") if kind] or KINDS
    unknown = set(wanted) - set(KINDS)
    if unknown:
        raise click.UsageError(f"--kinds must be of {', '.join(KINDS)}, got {', '.join(sorted(unknown))}")
    planned = schedule(rounds, faults, seed, wanted)
    planned = planned if only is None else [planned[only]]
    with site(seed, folder) as here:
        say(f"seed {seed}, {len(planned)} rounds of {faults} faults, in {here.folder}")
        results = run_all(here, planned)
    for line in table(results):
        say(line)
    is_good = all(result.is_good for result in results)
    if is_good and folder is None:
        shutil.rmtree(here.folder, ignore_errors=True)
    print(json.dumps(summary(results)), flush=True)
    sys.exit(0 if is_good else 1)


def run_all(here: Site, planned: list[Round]) -> list[Result]:
    targets = [make_target(here, round) for round in planned]
    began = time.monotonic()
    run_undisturbed(here, targets)
    say(f"undisturbed: {len(targets)} jobs in {time.monotonic() - began:.0f} s")
    results = []
    for target in targets:
        say(f"{target.round.name}: {describe(target.round)}")
        outcome = Disturbed(here, target, say).run()
        result = Result(target, outcome, judge(target, outcome.problem))
        blame(target, outcome)
        tell(result)
        results.append(result)
    return results


def run_undisturbed(here: Site, targets: list[Target]) -> None:
    """All jobs in one process and one Ray, without hook and proxy."""
    files = [str(target.calm_file) for target in targets if not target.is_calm_done]
    if not files:
        return
    log = here.folder / "undisturbed.log"
    environment = {
        **os.environ,
        "RAY_TMPDIR": here.environment["RAY_TMPDIR"],
        processes.MARK: f"{here.mark}-calm",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "infra.chaos.undisturbed", *files]
    with log.open("wb") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, check=False)
    if done.returncode:
        raise click.ClickException(f"the undisturbed jobs failed, see {log}")


def judge(target: Target, problem: str | None) -> Comparison:
    if problem is not None:
        return Comparison(problems=[problem])
    problems = inconsistencies(target.output, target.round.shards)
    if problems:
        return Comparison(problems=problems)
    return compare(read_rows(target.calm_output), read_rows(target.output), target.poisoned)


def describe(round: Round) -> str:
    poisons = f", {' and '.join(round.poisons)}" if round.poisons else ""
    return (
        f"{round.strategy}, n={round.n}, temperature {round.temperature:g}, {round.shards} shards of "
        f"{round.rows_per_shard} rows, {round.workers} workers, Ray: {round.cluster}, store: {round.store}{poisons}"
    )


def tell(result: Result) -> None:
    outcome = result.outcome
    for fault in outcome.struck:
        if fault.redone or fault.sent_again:
            say(f"  {fault.kind} ({fault.what}): {fault.redone} shards redone, {fault.sent_again} sent again")
    if outcome.redone_without_fault:
        say(f"  {outcome.redone_without_fault} shards were redone before there was any fault")
    for fault_missed in outcome.missed:
        say(f"  {fault_missed.kind} was missed: the job had ended")
    for name in outcome.left_behind:
        say(f"  left behind: {name}")
    for problem in result.comparison.problems:
        say(f"  WRONG: {problem}")
    verdict = "equal to the undisturbed run" if result.is_good else f"NOT GOOD, see {result.target.folder}"
    say(f"  {result.target.round.name}: {verdict}, {len(outcome.struck)} faults in {outcome.seconds:.0f} s")


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
