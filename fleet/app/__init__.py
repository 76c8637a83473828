"""The roof, which composes: runs are planned, started, followed, compared, rehearsed and reported. It may import all."""
