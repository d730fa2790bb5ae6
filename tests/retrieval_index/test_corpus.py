from __future__ import annotations

import datetime
import gzip
import json
import tracemalloc
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval_index import Passage, read_corpus
from retrieval_index.corpus import _SeenIds, count_rows, fetch_dataset, parse_row


def test_a_passage_needs_an_id() -> None:
    with pytest.raises(ValueError, match="id"):
        Passage("", "title", "text")


def test_contents_are_the_quoted_title_and_the_text() -> None:
    assert Passage("1", "Lima", "is a city").contents == '"Lima"\nis a city'


@pytest.mark.parametrize(
    ("row", "passage"),
    [
        ({"id": "a", "contents": '"Lima"\nis a city'}, Passage("a", "Lima", "is a city")),
        ({"id": "a", "contents": "Lima\nis a city"}, Passage("a", "Lima", "is a city")),
        ({"id": "a", "contents": "no title here"}, Passage("a", "", "no title here")),
        ({"id": "a", "contents": '"T"\nline 1\nline 2'}, Passage("a", "T", "line 1\nline 2")),
        ({"id": "a", "contents": '"\nx'}, Passage("a", '"', "x")),
        ({"id": "a", "title": "Lima", "text": "is a city"}, Passage("a", "Lima", "is a city")),
        ({"id": "a", "title": "", "text": ""}, Passage("a", "", "")),
        # A MedRAG chunk: `contents` glues title and content together without a newline.
        (
            {"id": "a", "title": "Anatomy", "content": "Bones.", "contents": "Anatomy. Bones."},
            Passage("a", "Anatomy", "Bones."),
        ),
        ({"id": "a", "title": "T", "text": "x", "contents": "other", "src": 3}, Passage("a", "T", "x")),
        ({"id": 7, "contents": "x"}, Passage("7", "", "x")),
        ({"id": "007", "contents": "x"}, Passage("007", "", "x")),
    ],
)
def test_every_form_of_row(row: dict[str, object], passage: Passage) -> None:
    assert parse_row(json.dumps(row).encode()) == passage


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('{"id": "d2", "text": "no title"}', "contents"),
        ('{"id": "d2", "title": "T"}', "contents"),
        ('{"id": "d2"}', "contents"),
        ('{"id": "d2", "title": "T", "text": null}', "`text` is null"),
        ('{"id": "d2", "contents": ["a"]}', "`contents` is "),
        ('{"contents": "x"}', "`id` is missing"),
        ('{"id": "", "contents": "x"}', "`id` is"),
        ('{"id": null, "contents": "x"}', "`id` is null"),
        ('{"id": true, "contents": "x"}', "`id` is true"),
        ('{"id": 1.5, "contents": "x"}', "`id` is 1.5"),
        ('{"id": "\\ud800", "contents": "x"}', "surrogate"),
        ('{"id": "d2", "contents": "x"', "invalid JSON"),
        ('["d2", "x"]', "object is wanted, got list"),
        ("[" * 100_000, "invalid JSON"),
        ('{"id": ' + "1" * 5000 + "}", "invalid JSON"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(write_text, row: str, says: str) -> None:
    path = write_text('{"id": "d1", "contents": "fine"}\n' + row + "\n")
    with pytest.raises(ValueError) as caught:
        list(read_corpus(path))
    assert f"{path}, line 2" in str(caught.value)
    assert says in str(caught.value)


def test_bytes_that_are_not_utf8_are_named(write_text) -> None:
    path = write_text(b'{"id": "d1", "contents": "caf\xe9"}\n')
    with pytest.raises(ValueError, match="line 1: not UTF-8"):
        list(read_corpus(path))


def test_bom_crlf_and_blank_lines_are_not_data(write_text) -> None:
    path = write_text('\ufeff{"id": "d1", "contents": "Alpha\\nFirst"}\r\n\r\n{"id": "d2", "contents": "Beta"}\r\n')
    assert list(read_corpus(path)) == [Passage("d1", "Alpha", "First"), Passage("d2", "", "Beta")]
    assert count_rows(path) == 2


def test_unicode_line_separators_do_not_end_a_line(write_text) -> None:
    path = write_text('{"id": "d1", "contents": "a\u2028b\u0085c"}\n')
    assert [passage.text for passage in read_corpus(path)] == ["a\u2028b\u0085c"]


def test_half_a_surrogate_pair_in_a_text_is_replaced(write_text) -> None:
    path = write_text('{"id": "1", "contents": "x\\ud83dy"}\n{"id": "2", "contents": "\\ud83d\\ude00"}\n')
    assert [passage.text for passage in read_corpus(path)] == ["x\ufffdy", "\U0001f600"]


def test_a_duplicate_id_is_named_with_both_lines(write_text) -> None:
    path = write_text('{"id": "d7", "contents": "a"}\n{"id": "d8", "contents": "b"}\n\n{"id": "d7", "contents": "c"}\n')
    with pytest.raises(ValueError, match=r"line 4: id d7 .* line 1;"):
        list(read_corpus(path))


def test_a_number_and_its_text_are_the_same_id(write_text) -> None:
    path = write_text('{"id": 7, "contents": "a"}\n{"id": "007", "contents": "b"}\n{"id": "7", "contents": "c"}\n')
    with pytest.raises(ValueError, match=r"line 3: id 7 .* line 1;"):
        list(read_corpus(path))


def test_a_duplicate_in_another_file_names_both_files(write_corpus) -> None:
    first, second = write_corpus(["a"], "one.jsonl"), write_corpus(["b"], "two.jsonl")
    with pytest.raises(ValueError) as caught:
        list(read_corpus([first, second]))
    assert f"{second}, line 1" in str(caught.value)
    assert f"{first}, line 1" in str(caught.value)


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 7))
def test_ids_are_found_again_after_they_were_folded_away(ids: list[int], limit: int) -> None:
    seen, first = _SeenIds(recent_limit=limit), {}
    for line, number in enumerate(ids, start=1):
        suspects = seen.add(str(number), 3, line)
        assert ((3, first[number]) in suspects) if number in first else suspects == []
        first.setdefault(number, line)


def test_ids_take_bounded_memory() -> None:
    # 50,000 ids as text in a dict take over 6 MB; folded they take 16 bytes each, 0.8 MB.
    seen = _SeenIds(recent_limit=1_000)
    tracemalloc.start()
    for number in range(50_000):
        seen.add(f"passage-{number}", 0, number + 1)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size < 2_000_000


def test_gzip_of_several_members_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl.gz"
    members = [gzip.compress(json.dumps({"id": i, "contents": "x"}).encode() + b"\n") for i in range(3)]
    path.write_bytes(b"".join(members))
    assert [passage.id for passage in read_corpus(path)] == ["0", "1", "2"]


@pytest.mark.parametrize("damage", ["cut", "noise", "not gzip"])
def test_a_damaged_gzip_is_named(tmp_path: Path, damage: str) -> None:
    rows = b"".join(json.dumps({"id": i, "contents": f"text {i * 7919}"}).encode() + b"\n" for i in range(2000))
    whole = gzip.compress(rows)
    middle = len(whole) // 2
    path = tmp_path / "corpus.jsonl.gz"
    noise = whole[:middle] + bytes(255 - byte for byte in whole[middle : middle + 50]) + whole[middle + 50 :]
    path.write_bytes({"cut": whole[:middle], "noise": noise, "not gzip": rows}[damage])
    with pytest.raises(ValueError) as caught:
        list(read_corpus(path))
    assert str(path) in str(caught.value)


def test_zstandard_is_read_or_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl.zst"
    if not find_spec("zstandard"):
        path.write_bytes(b"anything")
        with pytest.raises(RuntimeError, match="pip install zstandard"):
            list(read_corpus(path))
        return
    import zstandard

    frame = zstandard.compress(b'{"id": "a", "contents": "x"}\n')
    path.write_bytes(frame + zstandard.compress(b'{"id": "b", "contents": "y"}\n'))
    assert [passage.id for passage in read_corpus(path)] == ["a", "b"]
    for broken in (frame[:-4], frame + frame[:9], b"this is not zstd"):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="damaged or cut short"):
            list(read_corpus(path))


def test_a_missing_file_is_reported_at_once(tmp_path: Path, write_corpus) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_corpus([write_corpus(["a"]), tmp_path / "nowhere.jsonl"])
    with pytest.raises(ValueError, match="no corpus file"):
        read_corpus([])
    path = write_corpus(["a"])
    with pytest.raises(ValueError, match="named twice"):
        read_corpus([path, path])


def test_bytes_read_add_up_to_the_file(write_corpus) -> None:
    path, read = write_corpus(["some text"] * 500), []
    list(read_corpus(path, on_bytes=read.append))
    assert sum(read) == path.stat().st_size


def test_reading_streams(write_corpus) -> None:
    path = write_corpus(["x" * 1000] * 20_000)  # 20 MB
    tracemalloc.start()
    assert sum(1 for _ in read_corpus(path)) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6_000_000  # 20,000 ids with their places, and one line


@given(st.lists(st.tuples(st.text(), st.text()), max_size=8))
def test_what_is_written_is_read_back(tmp_path_factory, rows: list[tuple[str, str]]) -> None:
    # st.text() makes no surrogates, so nothing is replaced.
    path = tmp_path_factory.mktemp("corpus") / "c.jsonl"
    lines = [json.dumps({"id": i, "title": title, "text": text}) for i, (title, text) in enumerate(rows)]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert [(passage.title, passage.text) for passage in read_corpus(path)] == rows


@given(st.binary(max_size=200))
def test_noise_raises_nothing_but_value_errors(tmp_path_factory, noise: bytes) -> None:
    path = tmp_path_factory.mktemp("corpus") / "c.jsonl"
    path.write_bytes(noise)
    try:
        list(read_corpus(path))
    except ValueError as error:
        assert str(path) in str(error)


def _write_parquet(path: Path, rows: list[dict]) -> Path:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=700)
    return path


def test_parquet_is_read(tmp_path: Path) -> None:
    rows = [{"id": number, "title": "T", "text": f"x{number}", "vector": [0.5] * 8} for number in range(2000)]
    path, read = _write_parquet(tmp_path / "c.parquet", rows), []
    passages = list(read_corpus(path, on_bytes=read.append))
    assert passages == [Passage(str(number), "T", f"x{number}") for number in range(2000)]
    assert count_rows(path) == 2000
    assert sum(read) == path.stat().st_size


def test_a_bad_row_of_parquet_is_named(tmp_path: Path) -> None:
    rows = [{"id": "a", "contents": "x"}, {"id": "b", "contents": None}]
    with pytest.raises(ValueError, match=r"c\.parquet, row 2: `contents` is null"):
        list(read_corpus(_write_parquet(tmp_path / "c.parquet", rows)))
    rows = [{"id": "a", "contents": "x"}, {"id": "b", "contents": "y"}, {"id": "a", "contents": "z"}]
    with pytest.raises(ValueError, match=r"c\.parquet, row 3: id a was used before, at row 1"):
        list(read_corpus(_write_parquet(tmp_path / "c.parquet", rows)))
    with pytest.raises(ValueError, match=r"row 1: `id` is .*x"):
        list(read_corpus(_write_parquet(tmp_path / "b.parquet", [{"id": b"x", "contents": "y"}])))
    with pytest.raises(ValueError, match=r"row 1: `text` is .*2020"):
        rows = [{"id": "a", "title": "", "text": datetime.date(2020, 1, 1)}]
        list(read_corpus(_write_parquet(tmp_path / "b.parquet", rows)))
    (tmp_path / "d.parquet").write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(ValueError, match=r"d\.parquet is not a parquet file"):
        list(read_corpus(tmp_path / "d.parquet"))


def test_damaged_parquet_is_named(tmp_path: Path) -> None:
    path = _write_parquet(tmp_path / "c.parquet", [{"id": i, "contents": f"text {i * 7919}"} for i in range(5000)])
    whole = bytearray(path.read_bytes())
    middle = len(whole) // 2
    whole[middle : middle + 200] = bytes(255 - byte for byte in whole[middle : middle + 200])
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"c\.parquet"):
        list(read_corpus(path))


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
def test_a_data_set_becomes_a_corpus_file(tmp_path: Path, name: str) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text(
        '{"id": "a", "contents": "\\"T\\"\\nx", "n": 1}\n{"id": "b", "contents": "y", "n": 2}\n'
    )
    first = fetch_dataset(str(folder), tmp_path / name)
    assert list(read_corpus(first)) == [Passage("a", "T", "x"), Passage("b", "", "y")]
    second = fetch_dataset(str(folder), tmp_path / ("again" + name))
    assert first.read_bytes() == second.read_bytes()
    (folder / "train.jsonl").write_text('{"id": "a", "contents": "x"}\n{"id": "b", "contents": null}\n')
    with pytest.raises(ValueError, match="row 2: `contents` is null"):
        fetch_dataset(str(folder), tmp_path / ("third" + name))
    assert not list(tmp_path.glob("third*"))


def test_a_data_set_that_cannot_be_had_is_told_with_a_remedy(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed")
    with pytest.raises(OSError, match=r"the data set .*nowhere cannot be had .*; check its name"):
        fetch_dataset(str(tmp_path / "nowhere"), tmp_path / "c.jsonl")
    assert not list(tmp_path.glob("c.jsonl*"))
