"""One job under its faults: the driver is started, things are broken as planned, and it is started again until done."""

from __future__ import annotations

import random
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil  # type: ignore[import-untyped]

from infra.chaos import processes
from infra.chaos.driver_process import DONE, FAILED_ROWS, INTERRUPTED, DriverProcess
from infra.chaos.proxy import Kind
from infra.chaos.schedule import Fault
from infra.chaos.site import Site
from infra.chaos.targets import Target
from pipeline import storage
from pipeline.commits import JobStore

_POLL_S = 0.1
_RESTART_S = 2.0
"""Between an end of the driver that was not asked for and the next start."""
_HEAD_LOSS_S = 45.0
"""What the driver has to notice that its cluster is gone; then it is killed."""
_DRAIN_S = 90.0
_ROUND_S, _FAULT_S = 180.0, 60.0
"""A round may take the first, and the second for each of its faults."""
_MOST_EXITS = 12
_BURST_S = (3.0, 6.0)
_PAUSE_S = (2.0, 5.0)
_REQUESTS_OF_A_BURST, _LONGEST_BURST_S = 3, 20.0

BURSTS: dict[str, dict[Kind, float]] = {
    "storage_errors": {"internal_error": 0.15, "unavailable": 0.15, "slow_down": 0.15, "late_error": 0.15},
    "storage_resets": {"reset": 0.5},
    "storage_lost_answers": {"lost_answer": 0.5},
    "storage_slow": {"delay": 0.4, "slow_body": 0.3, "hang": 0.1},
    "storage_cut": {"truncated": 0.5},
    "storage_outage": {"unavailable": 0.5, "reset": 0.5},
}


@dataclass(slots=True)
class Struck:
    """A fault that has happened. `recovery_s`: until the next commit; of driver and cluster, of the next run's."""

    kind: str
    at: float
    what: str
    recovery_s: float | None = None
    redone: int = 0
    sent_again: int = 0


@dataclass(slots=True)
class Outcome:
    """`exits`: ends of the driver that no fault asked for."""

    struck: list[Struck] = field(default_factory=list)
    missed: list[Fault] = field(default_factory=list)
    exits: list[str] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)
    redone_without_fault: int = 0
    problem: str | None = None
    seconds: float = 0.0


class _NotNow(Exception):
    """There is nothing yet that this fault could hit."""


class Disturbed:
    """`run` does it all. The job's own processes bear `mark`; those of a cluster bear the cluster's."""

    def __init__(self, site: Site, target: Target, say: Callable[[str], None]) -> None:
        self._site = site
        self._target = target
        self._say = say
        self._rng = random.Random(target.round.seed + 1)
        self._mark = f"{site.mark}-{target.round.name}."
        self._on_nodes = target.round.cluster == "nodes"
        self._store = JobStore(target.output)
        self._seen: set[str] = set()
        self._committed = 0
        self._open: list[Struck] = []
        self._paused: list[tuple[float, psutil.Process]] = []
        self._burst: tuple[float, int] | None = None
        self._outcome = Outcome()

    def run(self) -> Outcome:
        began = time.monotonic()
        self._target.write_hook(self._site.hook_file)
        self._target.events_file.write_text("")
        self._target.write(self._site.nodes.ensure() if self._on_nodes else None)
        self._driver = DriverProcess(self._target.file, self._site.environment_of(self._mark))
        try:
            self._loop(deque(self._target.round.faults))
        except TimeoutError as error:
            self._outcome.problem = f"{error}; the driver's last words are in {self._driver.log}"
        except BaseException:
            self._outcome.problem = "it was interrupted"
            raise
        finally:
            self._end()
        self._outcome.seconds = time.monotonic() - began
        return self._outcome

    def _loop(self, planned: deque[Fault]) -> None:
        limit_s = _ROUND_S + _FAULT_S * (len(planned) + len(self._target.round.poisons))
        deadline = time.monotonic() + limit_s
        while not self._has_ended():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the job was not done after {limit_s:.0f} s")
            self._undo()
            if self._new_commits():
                self._recovered()
            if planned and self._is_due(planned[0]):
                try:
                    self._strike(planned[0].kind)
                    planned.popleft()
                except _NotNow:
                    pass
            time.sleep(_POLL_S)
        self._recovered()
        self._outcome.missed = list(planned)

    def _is_due(self, fault: Fault) -> bool:
        return self._committed >= fault.after_commits and (fault.overlaps or not self._open)

    def _new_commits(self) -> bool:
        """Commits that have no object of their own any more, since the log was compacted, are counted from the log."""
        names = set(storage.list_names(storage.join(self._target.output, "_commits")))
        if names == self._seen:
            return False
        before = self._committed
        self._committed = before + len(names - self._seen) if names > self._seen else len(self._store.committed())
        self._seen = names
        return self._committed > before

    def _recovered(self) -> None:
        for struck in self._open:
            struck.recovery_s = time.time() - struck.at
            self._say(
                f"  {struck.kind} at {_clock(struck.at)}: {struck.what}; next commit {struck.recovery_s:.1f} s later"
            )
        self._open.clear()

    def _has_ended(self) -> bool:
        """Whether the driver is done. Where it ended otherwise it is started again, as a user would."""
        code = self._driver.poll()
        if code is None:
            return False
        if code in (DONE, FAILED_ROWS):
            return True
        self._outcome.exits.append(f"exit code {code}: {self._driver.last_line()}")
        self._say(f"  the driver ended by itself, {self._outcome.exits[-1]}")
        if len(self._outcome.exits) > _MOST_EXITS:
            raise TimeoutError("the driver ended by itself time and again")
        time.sleep(_RESTART_S)
        self._driver.start()
        return False

    def _start_again(self) -> None:
        """What was committed until now does not count as recovery."""
        self._new_commits()
        self._driver.start()

    def _strike(self, kind: str) -> None:
        at = time.time()
        if kind in BURSTS:
            what = self._start_burst(kind)
        else:
            what = getattr(self, f"_{kind}")()
        self._open.append(Struck(kind, at, what))
        self._outcome.struck.append(self._open[-1])

    def _worker(self) -> psutil.Process:
        mark = f"{self._site.mark}-nodes" if self._on_nodes else self._mark
        found = processes.workers(mark)
        if not found:
            raise _NotNow
        return self._rng.choice(sorted(found, key=lambda process: int(process.pid)))

    def _strike_worker(self, number: signal.Signals) -> psutil.Process:
        worker = self._worker()
        processes.send(worker, number)
        return worker

    def _kill_worker(self) -> str:
        return f"SIGKILL to worker {self._strike_worker(signal.SIGKILL).pid}"

    def _terminate_worker(self) -> str:
        return f"SIGTERM to worker {self._strike_worker(signal.SIGTERM).pid}"

    def _stop_worker(self) -> str:
        return f"SIGSTOP to worker {self._strike_worker(signal.SIGSTOP).pid}, for good"

    def _pause_worker(self) -> str:
        worker = self._strike_worker(signal.SIGSTOP)
        seconds = self._rng.uniform(*_PAUSE_S)
        self._paused.append((time.monotonic() + seconds, worker))
        return f"SIGSTOP to worker {worker.pid}, SIGCONT {seconds:.1f} s later"

    def _kill_driver(self) -> str:
        self._driver.kill()
        self._start_again()
        return "SIGKILL to the driver, started again"

    def _drain_driver(self) -> str:
        began = time.monotonic()
        self._driver.terminate()
        code = self._driver.wait(_DRAIN_S)
        if code is None:
            raise TimeoutError(f"the driver had not drained after {_DRAIN_S:.0f} s")
        if code in (DONE, FAILED_ROWS):
            return "SIGTERM to the driver, which had just finished"
        what = f"SIGTERM to the driver, which ended {time.monotonic() - began:.1f} s later with exit code {code}"
        if code != INTERRUPTED:
            self._outcome.exits.append(f"exit code {code} after SIGTERM: {self._driver.last_line()}")
        self._start_again()
        return f"{what}, started again"

    def _kill_machine(self) -> str:
        """Driver, workers and Ray at once."""
        killed = processes.marked(self._mark)
        processes.kill(killed)
        self._driver.kill()
        self._start_again()
        return f"SIGKILL to driver, workers and Ray, {len(killed)} processes, started again"

    def _kill_node(self) -> str:
        return f"SIGKILL to {self._site.nodes.kill_node(self._rng)}"

    def _kill_head(self) -> str:
        """The whole cluster, for every second time with the driver, which runs on the head after a `submit`."""
        self._site.nodes.kill_all()
        with_driver = self._rng.random() < 0.5
        code = None if with_driver else self._driver.wait(_HEAD_LOSS_S)
        end = f"the driver ended with exit code {code}"
        if code is None:
            self._driver.kill()
            end = "and to the driver" if with_driver else f"the driver went on for {_HEAD_LOSS_S:.0f} s and was killed"
        self._target.write(self._site.nodes.ensure())
        self._start_again()
        return f"SIGKILL to head and nodes; {end}; started again on a new cluster"

    def _start_burst(self, kind: str) -> str:
        seconds = self._rng.uniform(*_BURST_S)
        rates = BURSTS[kind]
        self._burst = (time.monotonic() + seconds, len(self._site.proxy.injected))
        self._site.proxy.set_rates(rates)
        return f"{' '.join(f'{name} {rate:g}' for name, rate in rates.items())} of the requests for {seconds:.1f} s"

    def _undo(self, *, now: bool = False) -> None:
        """End what was to last for some seconds."""
        time_now = time.monotonic()
        for due in [pause for pause in self._paused if now or pause[0] <= time_now]:
            processes.send(due[1], signal.SIGCONT)
            self._paused.remove(due)
        if self._burst is not None:
            ends, before = self._burst
            has_hit = len(self._site.proxy.injected) - before >= _REQUESTS_OF_A_BURST
            if now or (time_now >= ends and (has_hit or time_now > ends + _LONGEST_BURST_S)):
                self._site.proxy.set_rates({})
                self._burst = None

    def _end(self) -> None:
        """Nothing of the job is left, so nothing can write to its output any more."""
        self._undo(now=True)
        deadline = time.monotonic() + 20
        while (left := self._leftovers()) and self._outcome.problem is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._outcome.left_behind = [_name(process) for process in left]
        processes.kill(processes.marked(self._mark))
        if self._on_nodes and (left or self._outcome.problem):
            self._site.nodes.kill_all()

    def _leftovers(self) -> list[psutil.Process]:
        left = processes.marked(self._mark)
        return left + (processes.workers(f"{self._site.mark}-nodes", also_stopped=True) if self._on_nodes else [])


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:80]}"
    except psutil.Error:
        return f"{process.pid}"
