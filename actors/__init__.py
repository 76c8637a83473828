"""All that lives in a Ray process."""
