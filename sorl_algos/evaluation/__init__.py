"""Evaluation that others can repeat: plays of whole sets, result files, their statistics, their comparison."""
