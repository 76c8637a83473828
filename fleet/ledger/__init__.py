"""The ledger: where every rank-second of a run went, as a fold of its journal, and what follows from that."""
