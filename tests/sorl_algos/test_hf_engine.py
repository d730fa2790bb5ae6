"""HFEngine against transformers' own generate and the trainer's log-probabilities; stops, budgets, seeds, weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sorl_algos.batch import collate
from sorl_algos.models import Policy, token_logprobs
from sorl_algos.rollout.engine import Completion, Sampling
from sorl_algos.rollout.hf import HFEngine, sample_tokens
from sorl_env.trajectory import Trajectory, Turn
from tests.sorl_algos.proofs import same

PROMPTS = [[7, 8], [9, 10, 11, 12, 13, 14], [15], [16, 17, 18, 19], [20, 21, 22]]


def sharp(make_model: Any, seed: int = 0) -> Any:
    """A model whose next-token distributions are far from uniform and depend on what stands before."""
    model = make_model(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    return model


class FixedTokens(torch.nn.Module):
    """A language model that says given tokens, whatever it reads.

    ends: after how many tokens each row should have left the batch (default: never before the end of the script).
    """

    def __init__(self, model: Any, rows: list[list[int]], prompt_length: int, ends: list[int] | None = None) -> None:
        super().__init__()
        self.config, self.generation_config, self.device = model.config, model.generation_config, model.device
        self.rows, self.prompt_length, self.model = rows, prompt_length, model
        self.ends = ends or [len(row) for row in rows]
        self.widths: list[int] = []

    def forward(self, input_ids: Any, past_key_values: Any, attention_mask: Any, **options: Any) -> Any:
        self.widths.append(len(input_ids))
        step = attention_mask.shape[1] - self.prompt_length
        out = self.model(input_ids=input_ids, past_key_values=past_key_values, attention_mask=attention_mask, **options)
        live = [row for row, end in zip(self.rows, self.ends, strict=True) if step < end]
        assert len(live) == len(input_ids), f"step {step}: {len(input_ids)} rows in the batch, not {len(live)}"
        out.logits = torch.full_like(out.logits, -50.0)
        for place, row in enumerate(live):
            out.logits[place, -1, row[step]] = 50.0
        return out


def say(
    make_model: Any, tokenizer: Any, rows: list[list[int]], ends: list[int] | None = None, **sampling: Any
) -> list[Completion]:
    engine = HFEngine(FixedTokens(make_model(), rows, prompt_length=2, ends=ends), tokenizer)
    return engine.generate([[4, 5]] * len(rows), Sampling(**{"max_tokens": 20, "temperature": 0} | sampling))


def test_greedy_equals_generate_of_transformers_on_ragged_prompts(make_model: Any, tokenizer: Any) -> None:
    model = sharp(make_model)
    completions = HFEngine(model, tokenizer).generate(PROMPTS, Sampling(max_tokens=12, temperature=0))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12, do_sample=False
        )[0, len(prompt) :]
        assert list(completion.token_ids) == expected.tolist()
    assert len({completion.token_ids for completion in completions}) > 1


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_the_trainers(make_model: Any, tokenizer: Any, temperature: float) -> None:
    model = sharp(make_model)
    sampling = Sampling(max_tokens=10, temperature=temperature, seeds=(3, 1, 4, 1, 5))
    completions = HFEngine(model, tokenizer).generate(PROMPTS, sampling)
    batch = collate(
        [
            Trajectory((Turn(prompt, c.token_ids, c.logprobs, 0.0, "", ""),), "q", 0, 0, "answered")
            for prompt, c in zip(PROMPTS, completions, strict=True)
        ],
        0,
    )
    logp = token_logprobs(Policy(model), batch, temperature=temperature or 1.0).logp
    same("engine log-probability = trainer's", batch.rollout_logp, logp, tolerance=1e-4)
    if temperature:
        assert (batch.rollout_logp[batch.loss_mask] < -0.01).any()


def test_a_completion_depends_on_its_seed_alone(make_model: Any, tokenizer: Any) -> None:
    model, seeds = sharp(make_model), (11, 12, 13, 14, 15)
    together = HFEngine(model, tokenizer).generate(PROMPTS, Sampling(max_tokens=8, seeds=seeds))
    pairs = HFEngine(model, tokenizer, max_batch=2).generate(PROMPTS, Sampling(max_tokens=8, seeds=seeds))
    order = [4, 2, 0, 1, 3]
    mixed = HFEngine(model, tokenizer).generate(
        [PROMPTS[row] for row in order], Sampling(max_tokens=8, seeds=tuple(seeds[row] for row in order))
    )
    for row, completion in enumerate(together):
        alone = HFEngine(model, tokenizer).generate([PROMPTS[row]], Sampling(max_tokens=8, seeds=(seeds[row],)))
        for other in (alone[0], pairs[row], mixed[order.index(row)]):
            assert other.token_ids == completion.token_ids
            assert other.logprobs == pytest.approx(completion.logprobs, abs=1e-5)
    others = HFEngine(model, tokenizer).generate(PROMPTS, Sampling(max_tokens=8, seeds=(21, 22, 23, 24, 25)))
    assert [c.token_ids for c in others] != [c.token_ids for c in together]


def test_the_end_token_and_the_length_limit(make_model: Any, tokenizer: Any) -> None:
    end = tokenizer.eos_token_id
    rows = [[30, 31, end, 32], [30, 31, 32, 33, 34], [end, 30]]
    completions = say(make_model, tokenizer, rows, [3, 4, 1], max_tokens=5, budgets=(9, 4, 9))
    assert [c.token_ids for c in completions] == [(30, 31, end), (30, 31, 32, 33), (end,)]
    assert [c.stop for c in completions] == ["eos", "length", "eos"]
    assert all(len(c.token_ids) == len(c.logprobs) for c in completions)
    assert all(logp == pytest.approx(0.0, abs=1e-6) for c in completions for logp in c.logprobs)


def test_finished_rows_leave_the_batch(make_model: Any, tokenizer: Any) -> None:
    end = tokenizer.eos_token_id
    model = FixedTokens(make_model(), [[end], [30, end], [30, 31, 32, end]], prompt_length=2)
    HFEngine(model, tokenizer).generate([[4, 5]] * 3, Sampling(max_tokens=9, temperature=0))
    assert model.widths == [3, 2, 1, 1]


@pytest.mark.parametrize(
    ("pieces", "stop", "kept"),
    [
        # the tag spelt out in characters: it ends with the token of its last character
        (["<", "/", "s", "e", "a", "r", "c", "h", ">", "e"], "</search>", 9),
        # the stop string ends inside a token, which is kept whole
        ([" ca", "pital", " of", " Peru", " is"], "ap", 2),
        ([" capital", " of"], "tal o", 2),
        # one token holds it all
        ([" capital", " of"], "pit", 1),
    ],
)
def test_stop_strings_stay_in_the_completion(
    make_model: Any, tokenizer: Any, pieces: list[str], stop: str, kept: int
) -> None:
    ids = []
    for piece in pieces:
        ids += [i for char in piece for i in tokenizer.encode(char)] if len(piece) == 1 else tokenizer.encode(piece)
    one_each = [tokenizer.decode([i]) for i in ids]
    [completion] = say(make_model, tokenizer, [ids], max_tokens=len(ids), stop=(stop, "never"))
    assert completion.stop == "stop" and completion.token_ids == tuple(ids[: len(completion.token_ids)])
    text, before = "".join(one_each[: len(completion.token_ids)]), "".join(one_each[: len(completion.token_ids) - 1])
    assert stop in text and stop not in before
    if len(one_each) == len(pieces):
        assert len(completion.token_ids) == kept


def test_the_tag_token_stops_and_a_stop_string_in_the_prompt_does_not(make_model: Any, tokenizer: Any) -> None:
    [tag] = tokenizer.encode("</search>")
    [word] = tokenizer.encode(" Lima")
    engine = HFEngine(FixedTokens(make_model(), [[word, word, tag, word]], prompt_length=2), tokenizer)
    [completion] = engine.generate([[word, tag]], Sampling(max_tokens=9, temperature=0, stop=("</search>",)))
    assert completion.token_ids == (word, word, tag) and completion.stop == "stop"


def test_a_stop_string_of_several_bytes_split_over_tokens(make_model: Any, tokenizer: Any) -> None:
    # "→" is three bytes, three tokens here: none of them is a whole character.
    arrow = tokenizer.encode("→")
    assert len(arrow) == 3
    [completion] = say(make_model, tokenizer, [[30, *arrow, 31]], stop=("→",))
    assert completion.token_ids == (30, *arrow) and completion.stop == "stop"


def test_output_cut_inside_a_character_is_kept_as_sampled(make_model: Any, tokenizer: Any) -> None:
    arrow = tokenizer.encode("→")
    [completion] = say(make_model, tokenizer, [arrow], max_tokens=2, stop=("</search>",))
    assert completion.token_ids == tuple(arrow[:2]) and completion.stop == "length"
    assert "\ufffd" in tokenizer.decode(list(completion.token_ids))


def test_a_second_occurrence_is_not_needed_and_an_old_one_does_not_stop_again(make_model: Any, tokenizer: Any) -> None:
    # Without stop strings nothing stops; the engine never looks for what it was not asked for.
    [tag] = tokenizer.encode("</search>")
    [completion] = say(make_model, tokenizer, [[tag, 30, tag]], max_tokens=3)
    assert completion.stop == "length" and completion.token_ids == (tag, 30, tag)


@pytest.mark.parametrize("sampling", [Sampling(top_k=3), Sampling(top_p=0.6), Sampling(top_k=5, top_p=0.5)])
def test_filters_keep_to_their_set_and_report_full_logprobs(sampling: Sampling) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 40, generator=generator) * 2
    probabilities = logits.softmax(-1)[0]
    ranked = probabilities.argsort(descending=True).tolist()
    allowed = set(ranked[: sampling.top_k] if sampling.top_k else ranked)
    if sampling.top_p < 1:
        inside = probabilities * torch.tensor([token in allowed for token in range(40)])
        mass, nucleus = 0.0, set()
        for token in ranked:
            if mass < sampling.top_p:
                nucleus.add(token)
            mass += float(inside[token])
        allowed &= nucleus
    draws = 2000
    uniforms = (torch.arange(draws).double() + 0.5) / draws
    tokens, logp = sample_tokens(logits.expand(draws, -1), uniforms, sampling)
    assert set(tokens.tolist()) <= allowed and len(allowed) < 40
    same("log-probability under filters = full", logp, probabilities.log()[tokens], tolerance=1e-5)


def test_sampling_follows_the_distribution_at_its_temperature() -> None:
    # Evenly spaced uniforms hit token v within 1/n of its share softmax(logits / 0.5).
    logits = torch.tensor([[0.3, -1.0, 1.2, 0.0]])
    draws = 5000
    uniforms = (torch.arange(draws).double() + 0.5) / draws
    tokens, logp = sample_tokens(logits.expand(draws, -1), uniforms, Sampling(temperature=0.5))
    shares = torch.bincount(tokens, minlength=4) / draws
    expected = (logits[0] / 0.5).softmax(-1)
    same("inverse CDF follows softmax(logits / T)", shares, expected, tolerance=1e-3)
    same("log-probability at temperature T", logp, expected.log()[tokens], tolerance=1e-6)


def test_uniforms_at_the_ends_give_tokens_of_positive_probability() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]])
    ends = torch.tensor([0.0, float(np.nextafter(1.0, 0.0))], dtype=torch.float64)
    tokens, logp = sample_tokens(logits.expand(2, -1), ends, Sampling())
    assert tokens.tolist() == [1, 2] and logp.isfinite().all()


def test_greedy_by_hand() -> None:
    # Temperature 0 is argmax; the reported log-probability is that of softmax(logits): 2 - ln(e^2 + e + 1).
    tokens, logp = sample_tokens(torch.tensor([[2.0, 1.0, 0.0]]), torch.zeros(1), Sampling(temperature=0))
    assert tokens.tolist() == [0] and float(logp) == pytest.approx(-0.407606, abs=1e-6)


def test_weights_are_copied_by_name(make_model: Any, tokenizer: Any) -> None:
    new, engine = sharp(make_model, seed=5), HFEngine(sharp(make_model, seed=0), tokenizer)
    sampling = Sampling(max_tokens=6, temperature=0)
    expected = HFEngine(new, tokenizer).generate(PROMPTS, sampling)
    assert [c.token_ids for c in engine.generate(PROMPTS, sampling)] != [c.token_ids for c in expected]
    engine.update_weights(new.named_parameters(), version=3)
    after = engine.generate(PROMPTS, sampling)
    assert [c.token_ids for c in after] == [c.token_ids for c in expected]
    assert {c.policy_version for c in after} == {3}
    own = dict(engine.model.named_parameters())
    assert all(own[name].data_ptr() != parameter.data_ptr() for name, parameter in new.named_parameters())


def test_shared_weights_are_left_where_they_are(make_model: Any, tokenizer: Any) -> None:
    model = make_model()
    engine = HFEngine(model, tokenizer)
    versions = [parameter._version for parameter in model.parameters()]
    engine.update_weights(model.named_parameters(), version=1)
    assert [parameter._version for parameter in model.parameters()] == versions
    assert engine.policy_version == 1


def test_foreign_weights_are_refused(make_model: Any, tokenizer: Any) -> None:
    engine = HFEngine(make_model(), tokenizer)
    with pytest.raises(ValueError, match=r"weight 'model.nothing' is not a parameter of the engine's model"):
        engine.update_weights([("model.nothing", torch.zeros(2))], 1)
    with pytest.raises(ValueError, match=r"weight 'model.norm.weight' has shape \(3,\), the engine's \(32,\)"):
        engine.update_weights([("model.norm.weight", torch.zeros(3))], 1)
    assert engine.policy_version == 0


def test_bad_calls_are_refused(make_model: Any, tokenizer: Any) -> None:
    engine = HFEngine(make_model(), tokenizer)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        engine.generate([[4], []], Sampling())
    with pytest.raises(ValueError, match="1 seeds for 2 prompts"):
        engine.generate([[4], [5]], Sampling(seeds=(1,)))
    with pytest.raises(ValueError, match="3 budgets for 2 prompts"):
        engine.generate([[4], [5]], Sampling(budgets=(1, 2, 3)))
    assert engine.generate([], Sampling()) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0; use 0 for greedy"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -2}, "top_k is -2"),
    ],
)
def test_bad_sampling_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**values)


def test_a_completion_has_one_logprob_a_token() -> None:
    with pytest.raises(ValueError, match="2 tokens but 1 log-probabilities"):
        Completion((1, 2), (-0.5,), "stop", 0)
