"""The stability lab: many small runs that differ in algorithm, off-policyness and seed, and what they show."""
