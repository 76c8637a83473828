"""The live decision core on a simulated world: one seed, simulated time, no threads.

``FleetMachine`` and ``MemberProtocol`` are the objects that run live; here a seeded world of nodes, ranks, process groups, a lossy network,
a store and a simulated Ray Train surrounds them, and ``invariants`` watches. Policies are handed in.
"""
