"""URLs without secrets: one function for every text that leaves the store."""

from __future__ import annotations

import re

HIDDEN = "***"

_USER = re.compile(r"(?<=://)[^/\s'\"]*@")
_SIGNED = re.compile(r"(?i)([?&](?:X-Amz-(?:Signature|Credential|Security-Token)|AWSAccessKeyId|Signature|sig|key|secret)=)[^&\s'\"]+")


def redact(text: object) -> str:
    """``str(text)`` with the user part and the signing parameters of every URL in it hidden: ``s3://***@bucket/prefix``."""
    return _SIGNED.sub(rf"\1{HIDDEN}", _USER.sub(f"{HIDDEN}@", str(text)))


def without_credentials(url: str) -> str:
    """The URL without its user part, so that its next user must bring own credentials."""
    return _USER.sub("", url)
