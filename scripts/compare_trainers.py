"""Record what verl and TRL compute on fixed tensors, for the test that compares them with our losses.

Run it in an environment that has the trainer (each in one of its own, see docs/algorithms.md):

    python scripts/compare_trainers.py verl tests/golden/trainers.json
    python scripts/compare_trainers.py trl tests/golden/trainers.json

The file keeps the tensors, and for each trainer its version and results; the other trainer's part stays.
Nothing of this project is imported, so the trainer's environment needs no more than the trainer.
"""

import argparse
import importlib.metadata
import json
import os
from pathlib import Path

from other_trainers.tensors import SETTINGS, fixed_tensors
from other_trainers.with_trl import trl_results
from other_trainers.with_verl import verl_results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=["verl", "trl"])
    parser.add_argument("path", type=Path)
    arguments = parser.parse_args()
    tensors = fixed_tensors()
    results = {"verl": verl_results, "trl": trl_results}[arguments.trainer](tensors)
    record = json.loads(arguments.path.read_text()) if arguments.path.exists() else {}
    record["settings"] = SETTINGS
    record["tensors"] = {name: tensor.tolist() for name, tensor in tensors.items()}
    record[arguments.trainer] = {"version": importlib.metadata.version(arguments.trainer), "results": results}
    temporary = arguments.path.with_suffix(".partial")
    temporary.write_text(json.dumps(record, sort_keys=True))
    os.replace(temporary, arguments.path)
    print(f"{arguments.trainer}: {len(results)} results written to {arguments.path}")


if __name__ == "__main__":
    main()
