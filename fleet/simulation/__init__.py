"""The live decision core on a simulated world: one seed, simulated time, no threads.

``FleetMachine`` and ``MemberProtocol`` are the objects that run live; here a seeded world of nodes, ranks, process groups, a lossy network,
a store and a simulated Ray Train surrounds them, and ``invariants`` watches. Policies are handed in.

Beside it stands the simulation of whole fleets of any size, which runs the policies and not the protocol: ``fleet_model`` (what it is),
``fleet_arrivals`` (what strikes it), ``fleet_run`` (one run, from fault to fault), ``monte_carlo`` (many side by side), ``compare``.
"""
