"""Ops on files, processes and whole runs: retrieval, checkpoints, the command line."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import re
import signal
import socket
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from retrieval_index import BM25Parameters, Passage, RetrievalError, RetrieverClient, build_bm25, open_index
from retrieval_index.bm25 import BM25Index
from retrieval_index.corpus import read_corpus
from retrieval_index.dense_plan import DenseParameters, largest_nlist, pq_trainable, settle
from retrieval_index.encoder import encoder_spec
from retrieval_index.types import Hit
from retrieval_index.wire import render_answer
from sorl_algos.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from sorl_algos.config import TrainConfig
from sorl_algos.config_file import read_settings
from sorl_algos.learner import Learner, make_learner
from sorl_algos.models import Policy
from sorl_algos.rollout.engine import Sampling
from sorl_algos.rollout.hf import HFEngine
from sorl_algos.rollout.renderer import Renderer
from sorl_algos.rollout.source import SyncSource
from sorl_algos.tiny import tiny_language_model
from sorl_algos.trainer import train
from sorl_env.questions import Question, QuestionSet
from tests.cases.judge import Raised
from tests.cases.toys import vocabulary_tokenizer
from tests.retrieval_index.encoders import HashingEncoder
from tests.sorl_algos.small_game import QUESTIONS, ReplaySource, made_up, make_env
from tests.sorl_algos.small_game import small_config as config_in

Given = Mapping[str, Any]
FAMILIES = {"e5": "intfloat/e5-small-v2", "bge": "BAAI/bge-small-en-v1.5"}
_RUNS = tempfile.TemporaryDirectory(prefix="sorl-cases-")  # gone when the process ends
PLAIN = BM25Parameters(stop_words="none", tokens="whitespace")


# --- Retrieval ----------------------------------------------------------------------------------------------


def search(given: Given) -> Any:
    """All backends that the case names must give as many hits; None where one is not installed."""
    found = []
    for backend in given.get("backends", [given.get("backend")]):
        index = _index(backend, _passages(given["corpus"]))
        if index is None:
            return None
        [hits] = index.search([given["query"]], given["top_k"])
        found.append([hit.passage.id for hit in hits])
    ids = found[0]
    assert all(len(own) == len(ids) for own in found), found
    return {
        "hits": ids,
        "n_results": len(ids),
        "unique_ids": all(len(set(own)) == len(own) for own in found),
        "no_exception": True,
    }


def _index(backend: str, passages: list[Passage]) -> Any:
    if backend == "bm25":
        return BM25Index.from_passages(passages, PLAIN)
    if backend != "dense-flat" or find_spec("faiss") is None:
        return None
    from retrieval_index.dense import DenseIndex

    return DenseIndex.from_passages(passages, HashingEncoder(), DenseParameters("flat"))


def build_ivf(given: Given) -> Any:
    """The plan of an index, made before a passage is encoded."""
    try:
        plan = settle(DenseParameters(nlist=given["nlist"]), given["n_vectors"], 64)
    except ValueError as error:
        named = all(re.search(rf"\b{given[name]}\b", str(error)) for name in ("n_vectors", "nlist"))
        return Raised(error).facts() | {"raises": named}
    return {"index": plan.index_type, "nlist": plan.nlist}


def ivf_limits(given: Given) -> Any:
    answers: list[Any] = []
    for case in given["cases"]:
        if case["ask"] == "trainable":
            answers.append(pq_trainable(case["n_vectors"], case["pq_nbits"]))
        else:
            answers.append(largest_nlist(case["n_vectors"], case["points_per_list"]))
    return {"answers": answers}


def encoder_inputs(given: Given) -> Any:
    """What an encoder of this family is given, by the specification of its smallest published model."""
    spec = encoder_spec(FAMILIES[given["model_family"]])
    return {
        "query_text": spec.query_text(given["query"]),
        "passage_text": spec.passage_text(Passage("p", "", given["passage"])),
    }


def bm25(given: Given) -> Any:
    index = BM25Index.from_passages(
        _passages(given["corpus"]), BM25Parameters(given["k1"], given["b"], stop_words="none", tokens="whitespace")
    )
    [hits] = index.search([given["query"]], given["top_k"])
    scores = {int(hit.passage.id): hit.score for hit in hits}
    return {
        "scores_by_doc": [scores.get(number, 0.0) for number in range(len(given["corpus"]))],
        "returned_docs_in_order": list(scores),
    }


def open_out_of_step(given: Given) -> Any:
    with _folder() as folder:
        corpus = _write_corpus(folder, given["index_rows"])
        build_bm25(corpus, folder / "index")
        _write_corpus(folder, given["corpus_rows"])
        try:
            open_index(folder / "index", corpus=corpus)
        except RetrievalError as error:
            message = str(error).replace(str(folder), "")
            return {"opens": False, "error": message, "message": message}
        return {"opens": True, "error": ""}


def kill_build(given: Given) -> Any:
    with _folder() as folder:
        # long rows, so that the build tells of its progress between them
        corpus, output = _write_corpus(folder, given["corpus_rows"], "x" * 300_000), folder / "index"
        child = multiprocessing.get_context("fork").Process(
            target=_build_until, args=(corpus, output, given["killed_after_rows"])
        )
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL, "the build was not killed"
        results = []
        for then in given["then"]:
            if then.startswith("build"):
                build_bm25(corpus, output)
                results.append("ok")
                continue
            try:
                results.append(f"{len(open_index(output))} rows")  # type: ignore[arg-type]
            except RetrievalError as error:
                results.append("refused" if "did not finish" in str(error) else f"refused: {error}")
        return {"results": results}


def _build_until(corpus: Path, output: Path, rows: int) -> None:
    def progress(stage: str, done: int, total: int) -> None:
        if len(list(output.parent.glob("index.partial/*/*.json"))) >= rows:  # shards of one row each
            os.kill(os.getpid(), signal.SIGKILL)

    build_bm25(corpus, output, shard_rows=1, progress=progress)


def read_rows(given: Given) -> Any:
    with _folder() as folder:
        path = folder / "corpus.jsonl"
        path.write_bytes(given["utf8_text"].encode("utf-8"))
        try:
            passages = list(read_corpus(path))
        except ValueError as error:
            message = str(error).replace(str(folder), "")
            lines = sorted(set(map(int, re.findall(r"line (\d+)", message))))
            refused = re.search(r"id '?([^' ]+)'?", message)
            name = refused.group(1) if refused else ""
            rows = [json.loads(line) for line in given["utf8_text"].splitlines() if line.strip()]
            others = [str(row["id"]) for row in rows if "id" in row]
            named = all(f"line {line}" in message for line in lines)
            return Raised(error).facts() | {
                "message": message,
                "raises": named,  # a refusal in the words of the case: the kind, the id and the lines
                "duplicate_pair": [f"{name} (line {line})" for line in lines],
                "distinct": list(dict.fromkeys(others)),
            }
    return {
        "ids": [passage.id for passage in passages],
        "contents": ["\n".join(filter(None, (passage.title, passage.text))) for passage in passages],
    }


def client_search(given: Given) -> Any:
    """A client against a server on this machine that refuses, resets or answers, as the case says."""
    replies = list(given["server_replies"])
    with _fickle_server(replies) as (url, attempts):
        client = RetrieverClient(url, retries=given["retries"], timeout_s=5, sleep=attempts.wait, seed=0)
        try:
            [hits] = client.search(["query"], 3)
        except RetrievalError as error:
            return Raised(error).facts() | {"attempts": attempts.count}
        finally:
            client.close()
    return {"attempts": attempts.count, "hits": len(hits), "raises": None}


class _Attempts:
    """Plays the server's part: one reply for each attempt of the client, the next one after each wait."""

    def __init__(self, replies: list[str]) -> None:
        self.replies, self.count = replies, 1
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        self.prepare()

    def wait(self, seconds: float) -> None:
        self.count += 1
        self.prepare()

    def prepare(self) -> None:
        reply = self.replies[min(self.count, len(self.replies)) - 1]
        if "refused" not in reply:
            self.listener.listen()
            threading.Thread(target=self._serve, args=(reply,), daemon=True).start()

    def _serve(self, reply: str) -> None:
        connection, _ = self.listener.accept()
        with connection:
            if "reset" in reply:
                linger = (1).to_bytes(4, "little") + bytes(4)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                return
            connection.recv(65536)
            found = re.search(r"(\d+) hit", reply)
            hits = [Hit(Passage(str(n), "", "text"), 1.0) for n in range(int(found.group(1)) if found else 0)]
            body = render_answer([hits], True)
            status = reply.split()[0] if reply[0].isdigit() else "200"
            head = f"HTTP/1.1 {status} x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)


@contextmanager
def _fickle_server(replies: list[str]) -> Iterator[tuple[str, _Attempts]]:
    attempts = _Attempts(replies)
    try:
        yield f"http://127.0.0.1:{attempts.listener.getsockname()[1]}", attempts
    finally:
        attempts.listener.close()


# --- Checkpoints and runs -----------------------------------------------------------------------------------


def small_config(**changes: Any) -> TrainConfig:
    return config_in(Path(tempfile.mkdtemp(dir=_RUNS.name)), **changes)


def learner_of(config: TrainConfig, seed: int = 0) -> Learner:
    torch.set_num_threads(1)
    model = tiny_language_model(300, hidden_size=16, layers=1, heads=2, intermediate_size=32, seed=seed)
    torch.manual_seed(seed)  # the value head draws its first layer
    reference = Policy(tiny_language_model(300, hidden_size=16, layers=1, heads=2, intermediate_size=32, seed=9))
    needs = config.kl_loss_coef or config.kl_reward_coef
    shared = config.algorithm_row().needs_critic and config.critic == "shared"
    return make_learner(config, Policy(model, shared_critic=shared), reference=reference if needs else None)


def played(seed: int) -> list[Any]:
    return made_up(8, seed=seed, vocabulary=290)


def resume_plan(given: Given) -> Any:
    if "order" in given:
        return _position_in_the_data(given)
    per_epoch, total, saved = given["steps_per_epoch"], given["total_steps"], given["saved_at_step"]
    questions = QuestionSet(Question(str(n), "?", ("a",)) for n in range(per_epoch))
    with _folder() as folder:
        save_checkpoint(folder, saved, modules={}, optimizers={}, state={}, keep=1)
        checkpoint = latest_checkpoint(folder)
        assert checkpoint is not None
        done = load_checkpoint(checkpoint, modules={}, optimizers={})["updates_done"]
    seen = [question.id for question in questions.batch(0, 0, done)]
    following = [question.id for question in questions.batch(0, done, total - done)]
    epoch, batch = divmod(len(seen), len(set(seen)))
    assert len(following) == total - done
    assert len(set(following[: per_epoch - batch])) == per_epoch - batch
    return {
        "next_step": done + 1,
        "steps_left": len(following),
        "first_batch": f"epoch {epoch}, batch {batch}",
    }


def _position_in_the_data(given: Given) -> Any:
    size = given["batch_size"]
    questions = QuestionSet(Question(str(n), "?", ("a",)) for n in range(len(given["order"])))
    # this set has an order of its own: its n-th question stands for the n-th of the case
    own = [question.id for question in questions.batch(0, 0, len(questions))]
    stands_for = dict(zip(own, given["order"], strict=True))
    drawn = questions.batch(0, given["saved_after_step"] * size, size)
    return {"next_batch": [stands_for[question.id] for question in drawn]}


def find_latest(given: Given) -> Any:
    with _folder() as folder, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for name, status in given["directories"].items():
            number = int(re.findall(r"\d+", name)[0])
            if status == "complete":
                whole = folder / f"made_{number}"
                save_checkpoint(whole, number, modules={}, optimizers={}, state={}, keep=9).rename(folder / name)
                whole.rmdir()
            else:
                (folder / name).mkdir()
                (folder / name / "policy.safetensors").write_bytes(b"cut short")
        chosen = latest_checkpoint(folder)
        return {"chosen": chosen.name if chosen else None, "warnings": len(seen)}


def resume_equivalence(given: Given) -> Any:
    whole_run, first_part, second_part = (int(re.findall(r"\d+", part)[0]) for part in _parts(given))
    facts = {"critic": "shared", "kl_loss_coef": 0.01, "lr_warmup_updates": 3, "algorithm": "so_ppo"}
    straight = _Played(small_config(updates=whole_run, **facts))
    straight.go()
    resumed = _Played(small_config(updates=first_part, **facts))
    resumed.go()
    config = small_config(updates=first_part + second_part, **facts)
    (resumed.config.run_dir / "checkpoints").rename(config.run_dir / "checkpoints")
    again = _Played(config, seed=5)  # other weights, to be overwritten
    torch.manual_seed(99)
    again.go()
    equal = {
        "learning rate after step 4": straight.rate() == again.rate(),
        "KL coefficient": straight.config.kl_loss_coef == again.config.kl_loss_coef,  # constant, of the config
        "sampled questions": (resumed.questions + again.questions) == straight.questions,
        "critic and reference weights": _same(straight.weights("value_head"), again.weights("value_head"))
        and _same(straight.reference(), again.reference()),
        "global step": straight.summary["updates_done"] == again.summary["updates_done"],
        "policy version": straight.source.version == again.source.version,
    }
    return {"parameters_equal": _same(straight.weights(""), again.weights("")), "also_equal": equal}


def _parts(given: Given) -> tuple[str, str, str]:
    first, _, rest = given["run_b"].partition(",")
    return given["run_a"], first, rest.rpartition(",")[2]


class _Played:
    """A run of the real loop with the real source, sampler and environment, on a model of 16 dimensions."""

    def __init__(self, config: TrainConfig, seed: int = 0) -> None:
        self.config, self.learner = config, learner_of(config, seed)
        tokenizer = vocabulary_tokenizer({0: "\ue100pad"})
        tokenizer.pad_token = "\ue100pad"
        self.source = SyncSource(
            make_env(8),
            HFEngine(self.learner.raw_policy.lm, tokenizer),
            Renderer(tokenizer),
            QUESTIONS,
            questions_per_update=config.questions_per_update,
            group_size=config.group_size,
            sampling=Sampling(max_tokens=4),
            seed=3,
        )
        self.questions: list[str] = []

    def go(self) -> None:
        self.summary = train(self.config, self.learner, self, pad_id=0)

    def publish(self, policy: Any, version: int) -> None:
        self.source.publish(policy, version)

    def __next__(self) -> list[Any]:
        trajectories = next(self.source)
        self.questions += [trajectory.question_id for trajectory in trajectories]
        return trajectories

    def rate(self) -> list[float]:
        return [group["lr"] for group in self.learner.policy_optimizer.param_groups]

    def weights(self, part: str) -> dict[str, Tensor]:
        return {name: value for name, value in self.learner.raw_policy.state_dict().items() if part in name}

    def reference(self) -> dict[str, Tensor]:
        assert isinstance(self.learner.reference, nn.Module)
        return self.learner.reference.state_dict()


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- Command line -------------------------------------------------------------------------------------------


def validate_config(given: Given) -> Any:
    """What ``train.py`` prints with exit status 2 before anything starts: the configuration's own error."""
    group = given["group_size"]
    try:
        TrainConfig(
            algorithm="grpo",
            critic="none",
            group_size=group,
            minibatch_sequences=given["train_batch_size"],
            questions_per_update=given["train_batch_size"],
        )
    except ValueError as error:
        return Raised(error).facts() | {"training_started": False}
    return {"exit_code": 0, "message": "", "training_started": True}


@dataclasses.dataclass(frozen=True)
class _Training:
    learning_rate: float = 1.0
    num_epochs: int = 1


@dataclasses.dataclass(frozen=True)
class _Settings:
    training: _Training = _Training()


def load_config(given: Given) -> Any:
    """What `--config` makes of a settings file, here for the case's own schema."""
    try:
        settings = read_settings(given["yaml"], _Settings)
    except ValueError as error:
        suggested = re.findall(r"did you mean '(\w+)'", str(error))
        return Raised(error).facts() | {"training_started": False, "suggests": suggested}
    rate = settings["training"].learning_rate
    return {"learning_rate": rate, "type": type(rate).__name__}


def run_and_extend(given: Given) -> Any:
    """Train to the end, resume with nothing left, raise the total and resume; the real loop on made-up rows."""
    total, _, _, more = map(int, re.findall(r"\d+", given["command"]))
    config = small_config(updates=total, save_every=total, eval_every=total)
    source = ReplaySource([made_up(4, vocabulary=290, turns=(1,))])

    def go(updates: int) -> dict[str, Any]:
        changes: dict[str, Any] = {"updates": updates, "questions_per_update": 2, "save_every": updates}
        settings = config_in(config.run_dir, **changes)
        return train(settings, learner_of(settings), source, pad_id=0)

    go(total)
    second, third = go(total), go(more)
    finished = second["updates_run"] == 0 and second["finished"] and second["updates_done"] == total
    return {"first": finished, "second_steps_run": third["updates_run"]}


SYSTEM_OPS: dict[str, Callable[[Given], Any]] = {
    "search": search,
    "build_ivf": build_ivf,
    "ivf_limits": ivf_limits,
    "encoder_inputs": encoder_inputs,
    "bm25": bm25,
    "open_index": open_out_of_step,
    "kill_build": kill_build,
    "read_corpus": read_rows,
    "client_search": client_search,
    "resume_plan": resume_plan,
    "latest_checkpoint": find_latest,
    "resume_equivalence": resume_equivalence,
    "validate_config": validate_config,
    "load_config": load_config,
    "run": run_and_extend,
}


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sorl-case-") as name:
        yield Path(name)


def _passages(texts: list[str]) -> list[Passage]:
    return [Passage(str(number), "", text) for number, text in enumerate(texts)]


def _write_corpus(folder: Path, rows: int, padding: str = "") -> Path:
    path = folder / "corpus.jsonl"
    lines = (json.dumps({"id": f"doc{n}", "contents": f"text of row {n} {padding}"}) for n in range(rows))
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path
