import time, numpy as np
from fleet.simulation.fleet_model import *
from fleet.simulation.fleet_arrivals import draw_arrivals
from fleet.simulation.fleet_run import FleetRun
from fleet.laws.checkpointing import goodput, breakdown
from policies.interval import CheckpointInterval
from policies.recovery import ReformPromoteRegrow
from fleet.config import Budgets

rec = ReformPromoteRegrow(Budgets(), 600.0)
w, C, M, D, R = 600.0, 60.0, 1080.0, 300.0, 300.0
m = FleetModel(
    nodes=10,
    duration_s=3e6 * 5,
    faults=(FaultClass(name="x", rate_per_s=1 / M, need=0, detect_s=D),),
    tiers=(Tier(name="store", blocked_s=C, latency_s=C, restore_s=100.0),),
    restart_s=200.0,
)
for seed in range(3):
    t = time.perf_counter()
    o = FleetRun(m, draw_arrivals(m, seed), rec, [CheckpointInterval(law="fixed", interval_s=w + C)]).run()
    print(o.shares, sum(o.shares.values()), o.events, time.perf_counter() - t)
print(goodput(w, C, M, D, R), breakdown(w, C, M, D, R))
