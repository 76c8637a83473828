"""Logs of faults in the shapes that were published, made by hand from their documentation; the rows are drawn, and no site's own."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta

LANL_HEADER = (
    "System,machine type,nodes,procstot,procsinnode,nodenum,nodenumz,node install,node prod,node decom,fru type,mem,cputype,memtype,"
    "num intercon,purpose,Prob Started,Prob Fixed,Down Time,Facilities,Hardware,Human Error,Network,Undetermined,Software,Same Event"
)
LANL_COLUMNS = ("Facilities", "Hardware", "Human Error", "Network", "Undetermined", "Software")
LANL_WORDS = {
    "Facilities": ("Power Outage", "UPS", "Environment"),
    "Hardware": ("Memory Dimm", "CPU", "Node Board", "Graphics Accel Hdwr", "Interconnect Cable", "SCSI Drive"),
    "Human Error": ("Human Error",), "Network": ("Network Switch",), "Undetermined": ("Unresolvable", "Undetermined"),
    "Software": ("DST", "Scheduler Software", "OS", "Parallel File System"),
}  # fmt: skip
LANL_WEIGHTS = (2, 62, 1, 2, 12, 21)
"""About as often each column says the cause, in percent."""
LANL_SYSTEMS = {2: 49, 8: 164, 16: 16, 18: 1024, 19: 1024, 20: 512, 7: 1}
BEGAN = datetime(1996, 6, 1, tzinfo=UTC)
YEARS_S = 9.4 * 365 * 86_400


def lanl_row(system: int, node: int, at_s: float, repair_s: float, column: str, word: str) -> str:
    """One row as the published file has them."""
    start = BEGAN + timedelta(seconds=at_s)
    end = start + timedelta(seconds=repair_s)
    shown = [f"{each.month}/{each.day}/{each.year} {each.hour}:{each.minute:02}" for each in (start, end)]
    causes = ",".join(word if name == column else "" for name in LANL_COLUMNS)
    head = f"{system},cluster,{LANL_SYSTEMS[system]},6152,80,{node},{node},5-Apr,5-Jun,current,part,80,1,1,0,compute"
    return f"{head},{shown[0]},{shown[1]},{round((end - start).total_seconds() / 60)},{causes},No"


def lanl(rows: int, seed: int = 0, shape: float = 1.0) -> str:
    """A log of that form with so many rows, by system and node as the published one is. Times between faults of a node are Weibull's."""
    rng = random.Random(seed)
    nodes = [(system, node) for system, count in LANL_SYSTEMS.items() for node in range(count)]
    mean_s = YEARS_S * len(nodes) / (rows * (1.05 + 8 / rows**0.5))  # some more, of which any may be left out
    scale_s, found = mean_s / math.gamma(1 + 1 / shape), list[str]()
    for system, node in nodes:
        at_s = rng.random() * scale_s * rng.gammavariate(1 + 1 / shape, 1) ** (1 / shape)  # nodes of all ages
        while at_s < YEARS_S:
            column = rng.choices(LANL_COLUMNS, LANL_WEIGHTS)[0]
            minute = 60 * round(at_s / 60)
            found.append(
                lanl_row(system, node, minute, 60 * max(1, round(rng.lognormvariate(5, 1))), column, rng.choice(LANL_WORDS[column]))
            )
            at_s += 60 + rng.weibullvariate(scale_s, shape)
    kept = sorted(rng.sample(range(len(found)), rows))
    return "\n".join([LANL_HEADER, *(found[number] for number in kept)]) + "\n"


SACCT_HEADER = "JobID|JobName|State|Start|End|NNodes|NodeList|FailedNode|ExitCode"
SACCT = f"""{SACCT_HEADER}
101|train|COMPLETED|2024-03-01T00:00:00|2024-03-02T00:00:00|4|gpu[001-004]||0:0
101.batch|batch|COMPLETED|2024-03-01T00:00:00|2024-03-02T00:00:00|1|gpu001||0:0
102|train|NODE_FAIL|2024-03-02T01:00:00|2024-03-02T13:00:00|4|gpu[001-004]|gpu003|0:1
103|train|FAILED|2024-03-03T00:00:00|2024-03-03T06:00:00|1|gpu002||1:0
104|train|CANCELLED by 1000|2024-03-03T00:00:00|2024-03-03T01:00:00|2|gpu[001-002]||0:15
105|train|OUT_OF_MEMORY|2024-03-04T00:00:00|2024-03-04T12:00:00|2|gpu[003-004]||0:125
106|train|TIMEOUT|2024-03-05T00:00:00|2024-03-06T00:00:00|2|gpu[001-002]||0:0
107|train|RUNNING|2024-03-07T00:00:00|Unknown|4|gpu[001-004]||0:0
108|train|PENDING|Unknown|Unknown|4|None assigned||0:0
"""

ACME_HEADER = (
    "job_id,user,node_num,gpu_num,cpu_num,mem_per_pod_GB,shared_mem_per_pod,type,state,submit_time,start_time,end_time,fail_time,stop_time,"
    "duration,queue,gpu_time"
)


def _acme_row(job: str, nodes: int, state: str, day: int, hours: float) -> str:
    begin = datetime(2023, 5, day, 0, 0, 10, tzinfo=UTC)
    end = begin + timedelta(hours=hours)
    failed, stopped = (f"{end}" if state in states else "" for states in (("FAILED", "NODE_FAIL"), ("CANCELLED",)))
    times = f"{begin - timedelta(seconds=10)},{begin},{end},{failed},{stopped}"
    return f"{job},u1,{nodes},{8 * nodes},960,1000,100.0,Other,{state},{times},{3600 * hours:.0f},10.0,0"


ACME = "\n".join([
    ACME_HEADER,
    _acme_row("dlc1", 8, "FAILED", 17, 12), _acme_row("dlc2", 8, "COMPLETED", 18, 48), _acme_row("dlc3", 1, "CANCELLED", 19, 10),
    _acme_row("dlc4", 16, "NODE_FAIL", 20, 6),
]) + "\n"  # fmt: skip
