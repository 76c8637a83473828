"""Whether a refactoring changed a decision: see ``__main__.py``."""
