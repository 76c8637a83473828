"""What is done with runs: they are planned, started, followed, compared, rehearsed and reported."""
