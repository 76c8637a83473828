"""Files in S3 or a store with its protocol. Several threads send large files in parts, and fetch them in ranges.

It uses botocore's own client. Through s3fs, the same ranges came at about half the rate (one event loop for all). A second layer would also
multiply time-outs and retries. Time-outs and retries are botocore's, set here, so that every call ends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

from storage.backends.blocks import Segments, SharedReader, Sink
from storage.backends.files import AlreadyThere, StoreError

ENDPOINT = "FLEET_S3_ENDPOINT"
WORKERS = 4
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")

THERE = ("PreconditionFailed", "412", "ConditionalRequestConflict")
"""Codes of a refused conditional write."""
BUSY_TRIES = 5
CAUSES = {
    "NoSuchBucket": "bucket", "AccessDenied": "credentials", "InvalidAccessKeyId": "credentials", "SignatureDoesNotMatch": "credentials",
    "ExpiredToken": "credentials", "ExpiredTokenException": "credentials", "TokenRefreshRequired": "credentials", "403": "credentials",
    "RequestTimeTooSkewed": "credentials", "InvalidToken": "credentials",
}  # fmt: skip


class S3Files:
    """Files under ``s3://[KEY:SECRET@]BUCKET/PREFIX``; see :class:`storage.backends.files.Files`.

    Credentials, region and endpoint come from the sources of every AWS tool (``AWS_*`` variables, profiles, instance roles);
    ``FLEET_S3_ENDPOINT`` names another endpoint than AWS.

    Args:
        connect_timeout_s, read_timeout_s: bounds of one try.
        attempts: tries of one request, the first included; botocore waits longer before each.
    """

    def __init__(self, url: str, *, connect_timeout_s: float = 5.0, read_timeout_s: float = 20.0, attempts: int = 3) -> None:
        self._url, self._bucket, self._root, user = url, *_parsed(url)
        endpoint = os.environ.get(ENDPOINT) or None
        environment = tuple(os.environ.get(name) for name in CREDENTIALS)
        with self._errors():
            self._client = _client(environment, endpoint, *user, connect_timeout_s, read_timeout_s, attempts)

    @property
    def address(self) -> str:
        """``host:port`` of the endpoint; the host may be a name."""
        parts = urlsplit(self._client.meta.endpoint_url)
        return f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"

    # ---- writing -------------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, name: str) -> Iterator[Sink]:
        sink = _S3Sink(self, {"Bucket": self._bucket, "Key": self._key(name)})
        try:
            yield sink
            sink.complete()
        except Exception:
            sink.abort()
            raise

    def create(self, name: str, data: bytes) -> bool:
        for _ in range(BUSY_TRIES):
            try:
                with self._errors(name):
                    self._client.put_object(Bucket=self._bucket, Key=self._key(name), Body=data, IfNoneMatch="*")
            except AlreadyThere:
                if (there := self._there(name)) is not None:
                    return there == data  # the store may have taken the first try of this request, and its answer was lost
            else:
                return True
        raise StoreError(self._url, "server", f"{name} was written by others at the same moment, {BUSY_TRIES} times")

    def _there(self, name: str) -> bytes | None:
        try:
            return self.read(name)
        except FileNotFoundError:
            return None

    def note(self, name: str, data: bytes) -> None:
        with self._errors(name):
            self._client.put_object(Bucket=self._bucket, Key=self._key(name), Body=data)

    # ---- reading -------------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def reading(self, name: str) -> Iterator[SharedReader]:
        yield _S3Reader(self, {"Bucket": self._bucket, "Key": self._key(name)})

    def read(self, name: str) -> bytes:
        with self._errors(name):
            return bytes(self._client.get_object(Bucket=self._bucket, Key=self._key(name))["Body"].read())

    def size(self, name: str) -> int | None:
        try:
            with self._errors(name):
                return int(self._client.head_object(Bucket=self._bucket, Key=self._key(name))["ContentLength"])
        except FileNotFoundError:
            return None

    def sizes(self, directory: str) -> dict[str, int]:
        prefix = f"{self._key(directory)}/"
        found = {entry["Key"][len(prefix) :]: entry["Size"] for page in self._pages(prefix) for entry in page.get("Contents", ())}
        found.pop("", None)  # some stores show a directory as an object of its own
        return found

    def directories(self) -> list[str]:
        prefix = f"{self._root}/" if self._root else ""
        found = [entry["Prefix"] for page in self._pages(prefix) for entry in page.get("CommonPrefixes", ())]
        return [name[len(prefix) :].rstrip("/") for name in found]

    def _pages(self, prefix: str) -> Iterator[dict[str, Any]]:
        with self._errors():
            yield from self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix, Delimiter="/")

    # ---- removing ------------------------------------------------------------------------------------------------------------------------

    def remove(self, name: str) -> None:
        whole = self._key(name)
        for key in [whole, *(f"{whole}/{file}" for file in self.sizes(name)), f"{whole}/"]:
            with self._errors(name):
                self._client.delete_object(Bucket=self._bucket, Key=key)

    def unfinished(self) -> list[tuple[str, Callable[[], None]]]:
        prefix = f"{self._root}/" if self._root else ""
        with self._errors():
            pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=prefix)
            found = [(upload["Key"], upload["UploadId"]) for page in pages for upload in page.get("Uploads", ())]
        return [
            (key[len(prefix) :].split("/")[0], functools.partial(self.give_up, key, upload))
            for key, upload in found
            if key.startswith(prefix)
        ]

    def give_up(self, key: str, upload: str) -> None:
        """End an upload that will not be completed."""
        with self._errors():
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload)

    # ---- inside --------------------------------------------------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}".lstrip("/")

    @contextmanager
    def _errors(self, name: str = "") -> Iterator[None]:
        """Botocore's errors as OSErrors with a cause."""
        from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
        from botocore.exceptions import ConnectionError as Unconnected

        try:
            yield
        except ClientError as error:
            raise self._named(error, name) from error
        except (HTTPClientError, Unconnected) as error:
            cause = "timeout" if "Timeout" in type(error).__name__ else "unreachable"
            raise StoreError(self._url, cause, f"{type(error).__name__}: {error}") from error
        except BotoCoreError as error:
            cause = "credentials" if "Credential" in type(error).__name__ or "Token" in type(error).__name__ else "other"
            raise StoreError(self._url, cause, f"{type(error).__name__}: {error}") from error

    def _named(self, error: Any, name: str) -> OSError:
        said, status = error.response.get("Error", {}), error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = str(said.get("Code", ""))
        if code in ("NoSuchKey", "404"):
            return FileNotFoundError(f"{StoreError(self._url, 'missing', name)}")
        cause = CAUSES.get(code) or ("server" if status >= 500 else "refused")
        kind = AlreadyThere if code in THERE else StoreError
        return kind(self._url, cause, f"{code} {said.get('Message', '')} (HTTP {status}, {error.operation_name})".strip())


class _S3Sink:
    """A multipart upload, which begins with the second block; a file of one block goes up at once."""

    workers = WORKERS

    def __init__(self, files: S3Files, target: dict[str, str]) -> None:
        self._files, self._target = files, target
        self._upload: str | None = None
        self._beginning = threading.Lock()
        self._etags: dict[int, str] = {}
        self._whole = False

    def _begun(self) -> str:
        with self._beginning:
            if self._upload is None:
                with self._files._errors():
                    self._upload = str(self._files._client.create_multipart_upload(**self._target)["UploadId"])
            return self._upload

    def block(self, number: int, data: Segments) -> None:
        upload = self._begun()
        with self._files._errors():
            sent = self._files._client.upload_part(**self._target, UploadId=upload, PartNumber=number + 1, Body=b"".join(data))
        self._etags[number + 1] = sent["ETag"]

    def whole(self, data: Segments) -> None:
        with self._files._errors():
            self._files._client.put_object(**self._target, Body=b"".join(data))
        self._whole = True

    def complete(self) -> None:
        if self._whole:
            return
        parts = [{"PartNumber": number, "ETag": self._etags[number]} for number in sorted(self._etags)]
        with self._files._errors():
            self._files._client.complete_multipart_upload(**self._target, UploadId=self._upload, MultipartUpload={"Parts": parts})

    def abort(self) -> None:
        """As far as the store allows it; :meth:`S3Files.unfinished` finds the rest."""
        if self._upload is not None:
            with contextlib.suppress(OSError):
                self._files.give_up(self._target["Key"], self._upload)


class _S3Reader:
    def __init__(self, files: S3Files, target: dict[str, str]) -> None:
        self._files, self._target = files, target

    def into(self, offset: int, views: Sequence[memoryview]) -> None:
        size = sum(len(view) for view in views)
        if size == 0:
            return
        with self._files._errors():
            body = self._files._client.get_object(**self._target, Range=f"bytes={offset}-{offset + size - 1}")["Body"]
            with body:
                for view in views:
                    self._fill(body, view, offset)

    @staticmethod
    def _fill(body: Any, view: memoryview, offset: int) -> None:
        while view:
            count = body.readinto(view)
            if not count:
                raise EOFError(f"the object ends in the range from byte {offset} on")
            view = view[count:]


def _parsed(url: str) -> tuple[str, str, tuple[str | None, str | None]]:
    """(bucket, prefix, (key, secret)) of an S3 URL. A secret may have characters that a URL may not, so it may be percent-encoded."""
    parts = urlsplit(url)
    user, _, bucket = parts.netloc.rpartition("@")
    key, _, secret = user.partition(":")
    if not bucket:
        raise StoreError(url, "bucket", "the URL names no bucket; it must be s3://BUCKET/PREFIX")
    return bucket, parts.path.strip("/"), (unquote(key) or None, unquote(secret) or None)


@functools.lru_cache(maxsize=16)
def _client(
    environment: tuple[str | None, ...], endpoint: str | None, key: str | None, secret: str | None,
    connect_timeout_s: float, read_timeout_s: float, attempts: int,
) -> Any:  # fmt: skip
    """One client for all callers with the same arguments. It takes a third of a second to make, and many threads may use it."""
    from botocore.config import Config
    from botocore.session import get_session

    config = Config(
        connect_timeout=connect_timeout_s, read_timeout=read_timeout_s, max_pool_connections=4 * WORKERS,
        retries={"mode": "standard", "total_max_attempts": attempts},
    )  # fmt: skip
    session = get_session()
    region = None if session.get_config_variable("region") else "us-east-1"
    return session.create_client(
        "s3", endpoint_url=endpoint, aws_access_key_id=key, aws_secret_access_key=secret, region_name=region, config=config
    )
