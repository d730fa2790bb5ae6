"""Known faults of software of this kind, as cases with right values, run against our code."""
