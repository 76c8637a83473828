"""The live decision core on a simulated world: one seed, simulated time, no threads.

``FleetMachine`` and ``MemberProtocol`` are the same objects as in a live run. A seeded world surrounds them: nodes, ranks, process groups,
a lossy network, a store and a simulated Ray Train. ``invariants`` checks every run. The caller gives the policies.

A second simulator is for whole fleets of any size, and runs the policies without the protocol. Its modules are ``fleet_model`` (the fleet),
``fleet_arrivals`` (its faults), ``fleet_run`` (one run, from fault to fault), ``monte_carlo`` (many runs side by side), and ``compare``.
"""
