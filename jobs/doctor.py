"""`sevenleague doctor`: whether jobs can run here, and what to do where they cannot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.table import Table

from jobs.checkup.findings import Finding, guarded
from jobs.exit_codes import ExitCode

COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


def command(output: str | None, model: str | None, address: str | None, as_json: bool) -> ExitCode:
    """The CLI command. `--json` prints a list of objects with area, name, state, found and advice."""
    findings = list(examine(output, model, address))
    if as_json:
        print(json.dumps([finding.to_json() for finding in findings]))
    else:
        _show(findings)
    return ExitCode.FAILED if any(finding.state == "fail" for finding in findings) else ExitCode.DONE


def examine(output: str | None, model: str | None, address: str | None) -> Iterator[Finding]:
    """All findings. Modules are imported inside the checks: what one needs may be what is broken."""

    def installed() -> Iterable[Finding]:
        from jobs.checkup import installed

        return installed.findings()

    def machine() -> Iterable[Finding]:
        from jobs.checkup import machine

        return machine.findings()

    def reachable() -> Iterable[Finding]:
        from jobs.checkup import reachable

        return reachable.findings(output, model, address)

    parts: dict[str, Callable[[], Iterable[Finding]]] = {
        "version": installed,
        "machine": machine,
        "reach": reachable,
    }
    for area, part in parts.items():
        yield from guarded(area, "check", "install again: make install", part)


def _show(findings: list[Finding]) -> None:
    table = Table(title="sevenleague doctor", title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for finding in findings:
        state = f"[{COLORS[finding.state]}]{finding.state}[/]"
        table.add_row(state, finding.name, _plain(finding.found), _plain(finding.advice))
    console = Console(highlight=False)
    console.print(table)
    counts = [sum(finding.state == state for finding in findings) for state in ("fail", "warn")]
    console.print(f"{counts[0]} failed, {counts[1]} to look at.")


def _plain(text: str) -> str:
    """Square brackets are text here, not markup."""
    return text.replace("[", r"\[")
