from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from retrieval_index import read_corpus
from retrieval_index.pubmed import Citation, Counts, convert, in_order, parts_of, read_file

HEAD = """<?xml version="1.0" encoding="utf-8"?>
<!DOCTYPE PubmedArticleSet PUBLIC "-//NLM//DTD PubMedArticle, 1st January 2025//EN" "https://dtd.nlm.nih.gov/x.dtd">
<PubmedArticleSet>"""
TAIL = "</PubmedArticleSet>"


def article(pmid: int | str, title: str = "A title.", abstract: str = "") -> str:
    body = f"<Abstract>{abstract}</Abstract>" if abstract else ""
    return (
        f'<PubmedArticle><MedlineCitation Status="MEDLINE"><PMID Version="1">{pmid}</PMID>'
        f"<Article><ArticleTitle>{title}</ArticleTitle>{body}"
        "<AuthorList><Author><LastName>Doe</LastName></Author></AuthorList></Article>"
        "<CommentsCorrectionsList><CommentsCorrections><PMID>999</PMID></CommentsCorrections></CommentsCorrectionsList>"
        "</MedlineCitation><PubmedData><ReferenceList><Reference><Citation>Old work.</Citation><ArticleIdList>"
        '<ArticleId IdType="pubmed">888</ArticleId></ArticleIdList></Reference></ReferenceList></PubmedData>'
        "</PubmedArticle>"
    )


def text(*paragraphs: str) -> str:
    return "".join(f"<AbstractText>{paragraph}</AbstractText>" for paragraph in paragraphs)


def deleted(*pmids: int) -> str:
    listed = "".join(f'<PMID Version="1">{pmid}</PMID>' for pmid in pmids)
    return f"<DeleteCitation>{listed}</DeleteCitation>"


@pytest.fixture
def write(tmp_path: Path):
    def write(number: int, *content: str, year: int = 26) -> Path:
        path = tmp_path / f"pubmed{year}n{number:04d}.xml.gz"
        path.write_bytes(gzip.compress((HEAD + "".join(content) + TAIL).encode(), mtime=0))
        return path

    return write


def found(parts: list[Path]) -> dict[str, tuple[str, str]]:
    return {passage.id: (passage.title, passage.text) for passage in read_corpus(parts)}


# --- One file --------------------------------------------------------------------------------------


def test_title_and_structured_abstract(write) -> None:
    abstract = (
        '<AbstractText Label="BACKGROUND" NlmCategory="BACKGROUND">Kites\n  are red.</AbstractText>'
        '<AbstractText Label="RESULTS">We saw CO<sub>2</sub> &lt; 5 &amp; <i>more</i>.</AbstractText>'
        '<AbstractText Label="UNLABELLED">Done.</AbstractText><AbstractText/>'
        "<CopyrightInformation>(c) someone</CopyrightInformation>"
    )
    path = write(1, article(7, "On <i>Milvus milvus</i>.", abstract))
    assert list(read_file(path)) == [
        Citation(7, "On Milvus milvus.", "BACKGROUND: Kites are red. RESULTS: We saw CO2 < 5 & more. Done.")
    ]


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("[A translated title].", "A translated title"),
        ("[Brackets] within.", "[Brackets] within."),
        ("Plain.", "Plain."),
    ],
)
def test_the_brackets_of_a_translated_title_go(write, title: str, expected: str) -> None:
    [citation] = read_file(write(1, article(7, title)))
    assert citation.title == expected


def test_an_article_without_a_title_has_the_one_of_its_language(write) -> None:
    own = article(7, "").replace("</Article>", "<VernacularTitle>Der Milan.</VernacularTitle></Article>", 1)
    [citation] = read_file(write(1, own))
    assert citation.title == "Der Milan."


def test_an_abstract_in_another_language_is_left_out(write) -> None:
    other = '<OtherAbstract Type="Publisher" Language="fre">' + text("Le milan.") + "</OtherAbstract>"
    own = article(7, abstract=text("The kite.")).replace("</MedlineCitation>", other + "</MedlineCitation>")
    [citation] = read_file(write(1, own))
    assert citation.abstract == "The kite."


def test_pmids_of_other_citations_and_of_books_are_not_taken(write) -> None:
    book = "<PubmedBookArticle><BookDocument><PMID>55</PMID></BookDocument></PubmedBookArticle>"
    assert [citation.pmid for citation in read_file(write(1, article(7), book, article(8)))] == [7, 8]


def test_deletions_come_as_lists(write) -> None:
    assert list(read_file(write(1, article(7), deleted(3, 4)))) == [Citation(7, "A title.", ""), [3, 4]]


@pytest.mark.parametrize(
    "doctype",
    [
        '<!DOCTYPE PubmedArticleSet [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]>',
        '<!DOCTYPE PubmedArticleSet [<!ENTITY a SYSTEM "file:///etc/hostname">]>',
        '<!DOCTYPE PubmedArticleSet [<!ENTITY % a SYSTEM "http://localhost/x.dtd"> %a;]>',
    ],
)
def test_entity_declarations_are_refused(tmp_path: Path, doctype: str) -> None:
    path = tmp_path / "pubmed26n0001.xml"
    path.write_text(f"<?xml version='1.0'?>{doctype}<PubmedArticleSet>{article(7, '&a;')}</PubmedArticleSet>")
    with pytest.raises(ValueError, match=r"pubmed26n0001\.xml, line 1: declares the entity a; refused"):
        list(read_file(path))


def test_an_external_dtd_is_not_fetched(write) -> None:
    # The DTD of HEAD is nowhere, so entities that it would declare are not either: none may glue two words together.
    [citation] = read_file(write(1, article(7, "a&nbsp;b &beta;-blockers &unknown; c")))
    assert citation.title == "a b β-blockers &unknown; c"


@pytest.mark.parametrize("pmid", ["", "x7", "-7", "0", "٣", "99999999999999"])
def test_a_citation_without_a_number_is_named(write, pmid: str) -> None:
    with pytest.raises(ValueError, match=r"pubmed26n0001\.xml\.gz, line 3: a citation has the PMID"):
        list(read_file(write(1, article(pmid))))


def test_damaged_files_are_named(write, tmp_path: Path) -> None:
    path = write(1, *(article(number, abstract=text("word " * 50)) for number in range(1, 500)))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"pubmed26n0001\.xml\.gz: the compressed file is damaged or cut short"):
        list(read_file(path))
    path.write_bytes(gzip.compress((HEAD + article(7)).encode()))
    with pytest.raises(ValueError, match=r"line 3: not well-formed XML"):
        list(read_file(path))


def test_text_across_reads_is_kept_whole(write) -> None:
    long = "Word and word. " * 60_000  # 900 kB; the file is read in pieces of 256 kB
    [citation] = read_file(write(1, article(7, abstract=text(long))))
    assert citation.abstract == long.strip()


# --- All files -------------------------------------------------------------------------------------


def test_the_newest_of_several_counts_and_deletions_reach_back(write, tmp_path: Path) -> None:
    paths = [
        write(1, article(1, "Old."), article(2, "Stays."), article(3, "Deleted later."), article(4, "Old.")),
        write(2, article(4, "Newer."), article(5, "Twice."), article(5, "Twice, revised.")),
        write(3, article(1, "New."), article(6, ""), article(7, "Own."), article(8, "Gone at once."), deleted(3, 8)),
        write(4, article(3, "Came again.")),
    ]
    parts, counts = convert(reversed(paths), tmp_path / "parts")
    assert {pmid: title for pmid, (title, _) in found(parts).items()} == {
        "1": "New.",
        "2": "Stays.",
        "3": "Came again.",
        "4": "Newer.",
        "5": "Twice, revised.",
        "7": "Own.",
    }
    # Of 12 citations: 1 and 4 in the first file, the first 5 and the old 3 were revised; 6 is empty, 8 deleted.
    assert counts == Counts(kept=6, revised=4, deleted=1, empty=1)


def test_the_highest_version_in_a_file_counts_wherever_it_stands(write, tmp_path: Path) -> None:
    second = article(1, "Second.").replace('PMID Version="1">1<', 'PMID Version="2">1<')
    parts, counts = convert([write(1, second, article(1, "First."), article(2))], tmp_path / "parts")
    assert found(parts)["1"] == ("Second.", "")
    assert counts == Counts(kept=2, revised=1)


def test_a_deleted_citation_that_never_came_back_is_gone(write, tmp_path: Path) -> None:
    parts, _ = convert([write(1, article(1), article(2)), write(2, deleted(2))], tmp_path / "parts")
    assert set(found(parts)) == {"1"}
    assert len(parts) == 1  # the second file has no passage


def test_parts_are_the_same_each_time_and_kept(write, tmp_path: Path) -> None:
    paths = [write(1, article(1), article(2)), write(2, article(2, "New."))]
    parts, counts = convert(paths, tmp_path / "one")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in parts}
    again, counts_again = convert(paths, tmp_path / "one")
    assert (again, counts_again) == (parts, counts)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in again} == before
    other, _ = convert(paths, tmp_path / "two")
    assert [path.read_bytes() for path in other] == [path.read_bytes() for path in parts]


def test_an_interrupted_run_goes_on_with_what_the_newer_files_said(write, tmp_path: Path) -> None:
    paths = [write(1, article(1, "Old."), article(2)), write(2, article(1, "New."))]

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(paths, tmp_path / "parts", on_file=stop)
    parts, counts = convert(paths, tmp_path / "parts")
    assert found(parts)["1"][0] == "New."
    assert counts.kept == 2


def test_a_new_update_file_makes_the_older_parts_anew(write, tmp_path: Path) -> None:
    first = write(1, article(1, "Old."))
    convert([first], tmp_path / "parts")
    (tmp_path / "parts" / "notes.txt").write_text("mine")
    parts, _ = convert([first, write(2, article(1, "New."))], tmp_path / "parts")
    assert found(parts) == {"1": ("New.", "")}
    names = sorted(path.name for path in (tmp_path / "parts").iterdir())
    assert len([name for name in names if name.endswith(".npz")]) == 2  # the stale pair is gone
    assert "notes.txt" in names


def test_large_pmids_and_far_ones(write, tmp_path: Path) -> None:
    far = 90_000_011
    parts, counts = convert(
        [write(1, article(far, "Old."), article(3)), write(2, article(far, "New."))], tmp_path / "parts"
    )
    assert found(parts)[str(far)][0] == "New."
    assert counts == Counts(kept=2, revised=1)


def test_files_are_put_in_nlms_order_whatever_the_names_sort_like(write) -> None:
    paths = [write(10), write(9), write(1500)]
    assert [path.name[9:13] for path in in_order(paths)] == ["0009", "0010", "1500"]
    assert set(parts_of([paths[0].parent])) == set(paths)


def test_what_cannot_be_ordered_is_refused(write, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"just one release .* pubmed25n, pubmed26n"):
        in_order([write(1), write(2, year=25)])
    with pytest.raises(ValueError, match="got no file"):
        in_order([])
    other = tmp_path / "articles.xml"
    other.write_text("x")
    with pytest.raises(ValueError, match="not named as NLM names"):
        in_order([other])
    with pytest.raises(FileNotFoundError, match="pubmed26n0007"):
        in_order([tmp_path / "pubmed26n0007.xml.gz"])
