"""What other trainers compute on fixed tensors; see scripts/compare_trainers.py."""
