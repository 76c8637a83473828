"""The systems that `recovery` and `storm` compare, each behind the same small adapter (`common.System`)."""
