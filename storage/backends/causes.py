"""The cause of a store's failure in one word, and the user's remedy. Light: it imports neither a client nor torch."""

from __future__ import annotations

import errno

CAUSES = {
    errno.EROFS: "read-only", errno.ENOSPC: "no space", errno.EDQUOT: "no space", errno.EACCES: "permission", errno.EPERM: "permission",
    errno.ENOENT: "folder", errno.ENOTDIR: "folder", errno.EEXIST: "folder", errno.EISDIR: "folder",
}  # fmt: skip
"""Errors of a file system, and their causes."""

WAYS_OUT = {
    "unreachable": "Check the endpoint (AWS_ENDPOINT_URL or FLEET_S3_ENDPOINT) and that the store is up.",
    "timeout": "The store does not answer: try again when it does.",
    "credentials": "Check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, and their permissions.",
    "bucket": "Create the bucket, or correct its name.",
    "read-only": "Choose a place that is not mounted read-only.",
    "no space": "Free some space there, or choose another place.",
    "permission": "Choose a folder that you may write to, or have its permissions changed.",
    "not shared": "Give a URL such as s3://bucket/runs, or a folder that all nodes have under this path.",
    "folder": "Choose a folder that exists or can be made: a file lies in its place, or its parent takes no folders.",
}


def cause_of(error: BaseException) -> str:
    """One of the keys of ``WAYS_OUT``, or the error's own name for its cause; ``other`` without one."""
    named = getattr(error, "cause", None)
    return str(named) if named else CAUSES.get(getattr(error, "errno", None) or 0, "other")
