"""OpenTelemetry: stretches of a run as spans of one trace, by the standard's own exporter over HTTP and its own variables.

Trace and spans get their numbers from the run's key, not by chance: what is sent again after a time-out is the same span.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests

from dashboards.trackers import spans
from dashboards.trackers.port import Begun, Ended, Span, TrackedMark, TrackerAway, TrackerPlace, short

MOST = 500
"""A request has so many spans."""
SERVICE = "fleet"
"""``service.name``, where OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say nothing."""


EXPORTER = "opentelemetry.exporter.otlp"
"""The logger of the exporter: it writes a line at each of its own tries, and a run has many."""


class OtlpSession(requests.Session):
    """Keeps why the newest request came to nothing, in ``why``. A page is no answer, as of a server that wants a login first."""

    def __init__(self) -> None:
        super().__init__()
        self.why = ""

    def request(self, *arguments: Any, **named: Any) -> requests.Response:
        self.why = ""
        try:
            answer = super().request(*arguments, **named | {"allow_redirects": False})
        except requests.RequestException as error:
            self.why = short(error)
            raise
        page = answer.headers.get("Content-Type", "").startswith("text/html")
        if answer.is_redirect or (answer.ok and page):
            self.why = "it answers with a page, or sends elsewhere: is that an OTLP receiver?"
            raise requests.exceptions.InvalidSchema(self.why)
        if not answer.ok:
            self.why = f"it answers {answer.status_code} {answer.reason}"
        return answer


class OtelSpans:
    """One run as one trace. ``place.url`` is where traces go; empty: where OTEL_EXPORTER_OTLP_ENDPOINT and its like say."""

    anew = False

    def __init__(self, place: TrackerPlace) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self.refused, self.why, self.where = 0, "", place.url
        logging.getLogger(EXPORTER).setLevel(logging.CRITICAL)
        self._session = OtlpSession()
        self._exporter = OTLPSpanExporter(endpoint=place.url or None, session=self._session)
        resource = Resource.create()  # it reads the variables
        named = str(resource.attributes.get(SERVICE_NAME, ""))
        self._resource = resource if not named.startswith("unknown_service") else resource.merge(Resource({SERVICE_NAME: SERVICE}))
        self._scope = InstrumentationScope("fleet")
        self._key, self._trace, self._closed = "", 0, False
        self._waiting: list[Any] = []

    def begin(self, run: Begun) -> None:
        self._key, self._trace = run.key, _number(run.key, "", 16)

    def figures(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        """Figures are for other trackers; see ``/metrics``."""

    def facts(self, facts: Mapping[str, str]) -> None:
        """Facts are for other trackers."""

    def mark(self, mark: TrackedMark) -> None:
        """What happened is a span itself, where it took time."""

    def span(self, span: Span) -> None:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import Status, StatusCode

        own, root = self._context(span), self._context_of(spans.RUN)
        attributes = {f"fleet.{name}": value for name, value in span.attributes.items()}
        status = Status(StatusCode.ERROR, span.failed) if span.failed else Status(StatusCode.UNSET)
        readable = ReadableSpan(
            span.name, context=own, parent=root if span.name != spans.RUN else None, resource=self._resource, attributes=attributes,
            status=status, start_time=round(span.start_s * 1e9), end_time=round(span.end_s * 1e9), instrumentation_scope=self._scope,
        )  # fmt: skip
        self._waiting.append(readable)

    def artefact(self, path: Path) -> None:
        """A trace has no files."""

    def end(self, ended: Ended) -> None:
        """The run's own span says it."""

    def flush(self) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        while batch := self._waiting[:MOST]:
            if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
                raise TrackerAway(f"the OTLP receiver takes no spans: {self._session.why or 'the exporter gave up'}")
            del self._waiting[: len(batch)]

    def close(self) -> None:
        if not self._closed:
            self._exporter.shutdown()
        self._closed = True

    def _context(self, span: Span) -> Any:
        return self._context_of(span.id if span.name == spans.RUN else f"{span.id} {span.start_s:.6f}")

    def _context_of(self, name: str) -> Any:
        from opentelemetry.trace import SpanContext, TraceFlags

        return SpanContext(self._trace, _number(self._key, name, 8), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _number(key: str, name: str, length_bytes: int) -> int:
    """Never 0, which stands for none."""
    return int.from_bytes(hashlib.sha256(f"{key}\0{name}".encode()).digest()[:length_bytes], "big") or 1
