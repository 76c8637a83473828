"""A record as a line of the journal, and back; :mod:`fleet.host.journal` reads and writes the file."""

from __future__ import annotations

import json
import re
from typing import Any

from fleet.errors import ProtocolError
from fleet.protocol.codec import rebuilt
from fleet.protocol.records import COMMIT, RECORDS, VERSION, Record, Spans
from fleet.protocol.types import Member

_MANY = COMMIT * 4
"""At least so many commits in a row, as folded steps have them, are written as one commit with a number."""
_MOST = 1 << 24
_RUNS = re.compile(f"{COMMIT}+|[^{COMMIT}]+")
_COUNTED = re.compile(r"(\D)(\d*)")
_dumps = json.JSONEncoder(separators=(",", ":")).encode


def encode_line(record: Record) -> bytes:
    """The line that holds ``record``, with its newline. ``Spans``, most of a journal, take a shorter way to the same text."""
    if type(record) is not Spans:
        return RECORDS.encode(record) + b"\n"
    slot, incarnation, coordinate = record.member.slot, record.member.incarnation, record.member.coordinate
    member = [slot, incarnation, coordinate] if coordinate else [slot, incarnation]
    where = (record.generation, record.history, record.step, record.start_us)
    codes, durations_us = (record.codes, record.durations_us) if _MANY not in record.codes else _shortened(record)
    return (_dumps(["Spans", member, *where, durations_us, codes]) + "\n").encode()


def _shortened(record: Spans) -> tuple[str, list[int]]:
    """Codes and durations, with each run of commits as one commit and its number: ``K5000``."""
    durations_us: list[int] = []
    codes: list[str] = []
    for run in _RUNS.finditer(record.codes):
        many = run.group().startswith(_MANY) and not any(record.durations_us[run.start() : run.end()])
        durations_us += record.durations_us[run.start() : run.start() + 1 if many else run.end()]
        codes.append(f"{COMMIT}{len(run.group())}" if many else run.group())
    return "".join(codes), durations_us


def decode_line(line: bytes) -> Record:
    """Inverse of :func:`encode_line`. Raises ProtocolError or ValueError when the line is no record of this version."""
    try:
        value = json.loads(line)
    except RecursionError as error:
        raise ProtocolError("a record is nested without end") from error
    if not isinstance(value, list) or not value:
        raise ProtocolError("a record is a JSON list that starts with the record's name")
    if value[0] != "Spans":
        return _checked(value)
    return _spans(value)


def _spans(value: list[Any]) -> Spans:
    _, named, generation, history, step, start_us, durations_us, codes = value
    if not codes.isalpha() and codes:
        codes, durations_us = _spelled_out(codes, durations_us)
    member = Member(*named) if len(named) == 2 else rebuilt(Member, named)
    return Spans(member, generation, history, step, start_us, tuple(durations_us), codes)


def _spelled_out(codes: str, durations_us: list[int]) -> tuple[str, list[int]]:
    """Inverse of :func:`_shortened`. Raises ProtocolError when a run is longer than the writer allows."""
    letters: list[str] = []
    lengths: list[int] = []
    for at, (code, count) in enumerate(_COUNTED.findall(codes)):
        many = int(count or 1)
        if many > _MOST:
            raise ProtocolError(f"a run of {many} commits, of {_MOST} at most")
        letters.append(code * many)
        lengths += [*durations_us[at : at + 1], *[0] * (many - 1)]
    return "".join(letters), lengths


def _checked(value: list[Any]) -> Record:
    """The record of ``value``. The version is checked before the fields: records of another version may have other fields."""
    if value[0] == "RunStarted" and value[1:2] != [VERSION]:
        message = f"the journal is of version {value[1:2]}, this Fleet reads version {VERSION}"
        raise ProtocolError(f"{message}: read it with the Fleet that wrote it")
    record: Record = RECORDS.from_json(value)
    return record
