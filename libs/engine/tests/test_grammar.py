"""Structured output in a running engine: grammars, what becomes of them when requests move or
helpers die, and bombs.
"""

import json
import os
import re
import signal

import pytest
from pipelines import cuts, staged
from refused_grammars import BOMBS

from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.errors import BadRequest, Overloaded, UnknownInstance
from pilotlight.engine.grammar import client
from pilotlight.engine.pipeline import lead
from pilotlight.policy.ids import RequestId
from pilotlight.policy.request import FinishReason, Grammar, GrammarKind, RequestKey, Vocabulary
from pilotlight.text.bundle import TextBundle
from pilotlight.text.testing import ascii_json
from pilotlight.text.tokenizer import TextTokenizer

TOKENIZER = TextTokenizer(TextBundle(tokenizer_json=ascii_json()))
END = 1
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json": Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(SCHEMA)),
    "regex": Grammar(kind=GrammarKind.REGEX, text=r"[a-f]{3,5}-[0-9]{2}"),
    "choice": Grammar(
        kind=GrammarKind.CHOICE, text=json.dumps(["yes", "no", 'a "quoted" word', "\\d\n"])
    ),
    "lark": Grammar(
        kind=GrammarKind.LARK, text='start: "<" item ("," item)* ">"\nitem: /[xyz]/ | "(" item ")"'
    ),
}
FORMS = {
    "json": lambda text: json.loads(text)["age"] <= 150,
    "regex": lambda text: re.fullmatch(r"[a-f]{3,5}-[0-9]{2}", text),
    "choice": lambda text: text in {"yes", "no", 'a "quoted" word', "\\d\n"},
    "lark": lambda text: re.fullmatch(r"<\(*[xyz]\)*(,\(*[xyz]\)*)*>", text),
}
SAMPLED = {"max_tokens": 120, "temperature": 1.0, "stop_token_ids": (END,), "seed": 5}


@pytest.fixture(autouse=True)
def no_looking_out(monkeypatch):
    monkeypatch.setattr(lead, "LOOK_OUT_S", 0.0)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """The engine's clock counts looks here, while the helper takes real time."""
    monkeypatch.setattr(client, "OPEN_S", 1e9)
    monkeypatch.setattr(client, "ADVANCE_S", 1e9)


@pytest.fixture
def vocabulary(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(ascii_json())
    return Vocabulary(path=str(path), eos_token_ids=(END,))


@pytest.fixture
def runs(driver, checkpoint):
    made = []

    def load(limits=None, **options):
        made.append(driver(limits))
        made[-1].load(checkpoint("llama"), **options)
        return made[-1]

    yield load
    for one in made:
        assert one.engine._grammars.fileno() is None, "every session is closed"
        one.engine.close()


def whole(runs, vocabulary, prompts, name, **sampling):
    one = runs()
    one.add(
        "x", prompts[1], vocabulary=vocabulary, grammar=GRAMMARS[name], **{**SAMPLED, **sampling}
    )
    one.finish()
    return one.outputs["x"]


@pytest.mark.parametrize("name", GRAMMARS)
def test_outputs_have_the_form_and_end_when_they_must(name, runs, vocabulary, prompts):
    output = whole(runs, vocabulary, prompts, name)
    assert output.finish is FinishReason.STOP
    assert FORMS[name](TOKENIZER.decode(output.token_ids))


BLANKS = {
    "unasked": (None, r"\{\"name\":\"[^\"]*\",\"age\":\d+\}"),
    "inflexible": ({"whitespace_flexible": False}, r"\{\"name\":\"[^\"]*\",\"age\":\d+\}"),
    "separated": ({"item_separator": ", "}, r"\{\"name\":\"[^\"]*\", \"age\":\d+\}"),
    "a pattern": (
        {"whitespace_pattern": "~"},
        r"~?\{~?\"name\"~?:~?\"[^\"]*\"~?,~?\"age\"~?:~?\d+~?\}~?",
    ),
    "flexible": (
        {"whitespace_flexible": True},
        r"\{\s{0,20}\"name\"\s{0,20}:\s{0,20}\"[^\"]*\"\s{0,20},\s{0,20}\"age\"\s{0,20}:\s{0,20}\d+\s{0,20}\}",
    ),
}


@pytest.mark.parametrize("asked", BLANKS)
def test_json_is_compact_unless_blanks_are_asked_for(asked, runs, vocabulary, prompts):
    guidance, form = BLANKS[asked]
    schema = SCHEMA if guidance is None else {**SCHEMA, "x-guidance": guidance}
    one = runs()
    for seed in range(8):
        grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))
        one.add(
            f"x{seed}",
            prompts[1],
            vocabulary=vocabulary,
            grammar=grammar,
            **{**SAMPLED, "seed": seed, "max_tokens": 200},
        )
    one.finish()
    for output in one.outputs.values():
        assert re.fullmatch(form, TOKENIZER.decode(output.token_ids)), TOKENIZER.decode(
            output.token_ids
        )


def test_a_batch_of_grammars_and_plain_requests(runs, vocabulary, prompts):
    alone = runs()
    for index, prompt in enumerate(prompts):
        alone.add(f"plain{index}", prompt, temperature=1.0, seed=index)
    plain = alone.finish()
    mixed = runs()
    for index, prompt in enumerate(prompts):
        mixed.add(f"plain{index}", prompt, temperature=1.0, seed=index)
    for name, grammar in GRAMMARS.items():
        mixed.add(name, prompts[1], vocabulary=vocabulary, grammar=grammar, **SAMPLED)
    together = mixed.finish()
    assert {name: together[name] for name in plain} == plain
    for name in GRAMMARS:
        assert together[name] == whole(runs, vocabulary, prompts, name).token_ids


@pytest.mark.parametrize("name", ["json", "lark"])
def test_a_resumed_request_goes_on_as_it_would_have(name, runs, vocabulary, prompts):
    output = whole(runs, vocabulary, prompts, name).token_ids
    one = runs()
    starts = {1, len(output) // 2, len(output) - 1, len(output)}
    for start in starts:
        one.add(
            f"from{start}",
            prompts[1],
            output[:start],
            vocabulary=vocabulary,
            grammar=GRAMMARS[name],
            **SAMPLED,
        )
    assert one.finish() == {f"from{start}": output for start in starts}
    one.add(
        "strange", prompts[1], [5, 5, 5], vocabulary=vocabulary, grammar=GRAMMARS[name], **SAMPLED
    )
    one.finish()
    assert (one.outputs["strange"].finish, one.outputs["strange"].code) == (
        FinishReason.ERROR,
        "invalid_request",
    )


@pytest.mark.parametrize("with_kv", [True, False], ids=["with KV", "with its tokens alone"])
@pytest.mark.parametrize(
    "stages", [cuts(4, 1), cuts(4, 2)], ids=["from a whole model", "from a pipeline"]
)
def test_a_request_that_moves_keeps_its_grammar_and_penalties(
    stages, with_kv, driver, checkpoint, runs, vocabulary, prompts
):
    settings = {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
    expected = {
        name: whole(runs, vocabulary, prompts, name, **settings).token_ids for name in GRAMMARS
    }
    if len(stages) > 1:
        source, step = (pipeline := staged(driver, checkpoint("llama"), stages)).lead, pipeline.step
        drivers = pipeline.drivers
    else:
        source = runs()
        step, drivers = source.step, [source]
    target = runs()
    for name, grammar in GRAMMARS.items():
        source.add(
            name, prompts[1], vocabulary=vocabulary, grammar=grammar, **{**SAMPLED, **settings}
        )
    moved = 0
    while source.outputs:
        step()
        for name, output in list(source.outputs.items()):
            if output.finish is not None:
                source.outputs.pop(name)
                assert output.token_ids == expected[name]
            elif len(output.token_ids) >= len(expected[name]) // 2:
                key = RequestKey(RequestId(name), 1)
                exported = [
                    one.engine.export_kv("i", [key], stage)
                    for one, stage in zip(drivers, stages, strict=True)
                ]
                released = source.engine.release(*key)
                pieces = [piece for each in exported for piece in each] if with_kv else []
                target.outputs[name] = source.outputs.pop(name)
                arguments = (released.prompt_ids, released.output_ids, released.sampling)
                target.engine.add(*key, "i", *arguments, pieces=pieces, vocabulary=vocabulary)
                moved += 1
    assert target.finish() == {name: expected[name] for name in target.outputs}
    assert moved >= 3
    source.engine.close()


def test_preempted_requests_keep_their_grammar(runs, vocabulary, prompts):
    expected = whole(runs, vocabulary, prompts, "json").token_ids
    tight = runs(BatchLimits(step_tokens=64, running=8), kv_tokens=192)
    for index in range(4):
        tight.add(
            f"x{index}", prompts[1], vocabulary=vocabulary, grammar=GRAMMARS["json"], **SAMPLED
        )
    assert list(tight.finish().values()) == [expected] * 4
    assert tight.preemptions


def test_a_helper_that_dies_is_replaced_and_nobody_sees_it(runs, vocabulary, prompts):
    expected = whole(runs, vocabulary, prompts, "json").token_ids
    one = runs()
    one.add("x", prompts[1], vocabulary=vocabulary, grammar=GRAMMARS["json"], **SAMPLED)
    killed_at = set()
    while one.engine.has_work:
        one.step()
        # Once at each place: a step that has to do without a mask leaves the output as it is.
        if (position := len(one.outputs["x"].token_ids)) in {3, 9} - killed_at:
            os.kill(one.engine._grammars._process.pid, signal.SIGKILL)
            killed_at.add(position)
    assert one.outputs["x"].token_ids == expected
    assert killed_at == {3, 9}


@pytest.mark.parametrize("num_stages", [2, 4])
def test_grammars_in_a_pipeline(num_stages, driver, checkpoint, runs, vocabulary, prompts):
    pipeline = staged(driver, checkpoint("llama"), cuts(4, num_stages))
    for name, grammar in GRAMMARS.items():
        pipeline.lead.add(name, prompts[1], vocabulary=vocabulary, grammar=grammar, **SAMPLED)
    pipeline.lead.add(
        "bad",
        prompts[0],
        vocabulary=vocabulary,
        grammar=Grammar(kind=GrammarKind.REGEX, text="("),
        **SAMPLED,
    )
    outputs = pipeline.finish()
    pipeline.lead.engine.close()
    assert pipeline.lead.outputs["bad"].code == "invalid_request"
    for name in GRAMMARS:
        assert outputs[name] == whole(runs, vocabulary, prompts, name).token_ids


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_grammar_that_cannot_be_used_ends_its_own_request_alone(bomb, runs, vocabulary, prompts):
    kind, text, reason = BOMBS[bomb]
    one = runs()
    messages = []
    one.add(
        "bomb", prompts[0], vocabulary=vocabulary, grammar=Grammar(kind=kind, text=text), **SAMPLED
    )
    one.add("other", prompts[1], vocabulary=vocabulary, grammar=GRAMMARS["regex"], **SAMPLED)
    one.add("plain", prompts[0], max_tokens=5)
    while one.engine.has_work:
        messages += [produced.message for produced in one.step().produced if produced.message]
    assert (one.outputs["bomb"].finish, one.outputs["bomb"].code) == (
        FinishReason.ERROR,
        "invalid_request",
    )
    assert reason in messages[0]
    assert FORMS["regex"](TOKENIZER.decode(one.outputs["other"].token_ids))
    assert len(one.outputs["plain"].token_ids) == 5


def test_what_is_refused_at_the_door(runs, vocabulary, prompts, tmp_path, monkeypatch):
    one = runs()
    with pytest.raises(UnknownInstance, match="vocabulary"):
        one.add("x", prompts[0], grammar=GRAMMARS["json"])
    with pytest.raises(BadRequest, match="at most"):
        one.add(
            "x",
            prompts[0],
            vocabulary=vocabulary,
            grammar=Grammar(kind=GrammarKind.REGEX, text="a" * 300_000),
        )
    with monkeypatch.context() as few:
        few.setattr(client, "MAX_OPENING", 1)
        one.add("first", prompts[0], vocabulary=vocabulary, grammar=GRAMMARS["regex"], **SAMPLED)
        with pytest.raises(Overloaded):
            one.add("x", prompts[0], vocabulary=vocabulary, grammar=GRAMMARS["json"])
    (tmp_path / "broken.json").write_text("{}")
    one.finish()
    helper = one.engine._grammars._process.pid
    os.kill(helper, signal.SIGSTOP)
    os.waitid(os.P_PID, helper, os.WSTOPPED | os.WNOWAIT)
    one.add(
        "y",
        prompts[0],
        vocabulary=Vocabulary(path=str(tmp_path / "broken.json")),
        grammar=GRAMMARS["json"],
        **SAMPLED,
    )
    one.add(
        "z",
        prompts[0],
        vocabulary=Vocabulary(path=str(tmp_path / "none.json")),
        grammar=GRAMMARS["json"],
        **SAMPLED,
    )
    one.step()
    one.engine.abort("z", 1)
    os.kill(helper, signal.SIGCONT)
    one.finish()
    assert one.outputs["y"].code == "invalid_request"
    assert one.outputs["z"].finish is FinishReason.CANCELLED


def test_stop_tokens_min_tokens_and_the_end_of_a_grammar(runs, vocabulary, prompts):
    letters = Grammar(kind=GrammarKind.REGEX, text="[ab]{1,40}")
    one = runs()
    a, b = (TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in "ab")
    settings = {**SAMPLED, "vocabulary": vocabulary, "grammar": letters}
    one.add("long", prompts[0], **{**settings, "min_tokens": 20, "logit_bias": ((END, 100.0),)})
    one.add("short", prompts[0], **{**settings, "logit_bias": ((END, 100.0),)})
    one.add("endless", prompts[0], **{**settings, "stop_token_ids": (), "ignore_eos": True})
    one.add("stopped", prompts[0], **{**settings, "stop_token_ids": (END, b)})
    one.add("cut", prompts[0], **{**settings, "max_tokens": 3, "min_tokens": 3})
    one.add("nothing", prompts[0], **{**settings, "stop_token_ids": (END, a, b), "min_tokens": 1})
    outputs = one.finish()
    assert len(outputs["long"]) == 20
    assert len(outputs["short"]) == 1
    assert len(outputs["endless"]) == 40
    assert set(outputs["stopped"]) <= {a}
    assert one.outputs["cut"].finish is FinishReason.LENGTH
    assert one.outputs["nothing"].code == "invalid_request"


def test_a_token_that_takes_too_long_ends_its_request(runs, vocabulary, prompts, monkeypatch):
    one = runs()
    one.add("x", prompts[0], vocabulary=vocabulary, grammar=GRAMMARS["json"], **SAMPLED)
    while not one.outputs["x"].token_ids:
        one.step()
    with monkeypatch.context() as hurried:
        hurried.setattr(client, "ADVANCE_S", 0.05)
        os.kill(one.engine._grammars._process.pid, signal.SIGSTOP)
        one.finish()
    assert (one.outputs["x"].finish, one.outputs["x"].code) == (
        FinishReason.ERROR,
        "invalid_request",
    )
    one.add("y", prompts[0], vocabulary=vocabulary, grammar=GRAMMARS["regex"], **SAMPLED)
    one.finish()
    assert FORMS["regex"](TOKENIZER.decode(one.outputs["y"].token_ids))
