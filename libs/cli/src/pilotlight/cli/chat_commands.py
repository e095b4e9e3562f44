"""``pilotlight run``, ``chat`` and ``pull``."""

import os
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from pilotlight.cli.options import Json, Yes, admin_client, home_folder
from pilotlight.common.errors import BadRequest

if TYPE_CHECKING:
    from pilotlight.cli.client import AdminClient
    from pilotlight.cli.obtaining import Obtaining

SourceName = Annotated[
    str | None,
    Parameter(
        name="--name",
        help="What a new model is to be called; else org/name of a hub, or its folder's name.",
    ),
]


def run_model(
    model: Annotated[
        str,
        Parameter(
            help="A name that `pilotlight model list` shows, a folder, hf://org/name[@revision] or s3://bucket/prefix."
        ),
    ],
    /,
    *prompt: Annotated[
        str,
        Parameter(help="Answered once; without it standard input is, or a conversation begins."),
    ],
    system: Annotated[str, Parameter(help="Instructs the model.", show_default=False)] = "",
    temperature: Annotated[
        float | None, Parameter(help="0 always takes the likeliest token; by default 1.")
    ] = None,
    max_tokens: Annotated[
        int | None, Parameter(help="Of an answer.", validator=validators.Number(gte=1))
    ] = None,
    verbose: Annotated[
        bool,
        Parameter(
            name=["--verbose", "-v"],
            help="Say what each answer took.",
            negative="",
            show_default=False,
        ),
    ] = False,
    name: SourceName = None,
    yes: Yes = False,
    json: Json = False,
) -> int:
    """Chat with a model: registered ones by their names, others once they are fetched.

    A model that is loaded nowhere is loaded first; a bar shows how far that is.
    """
    from pilotlight.cli.chat_session import Session, answer_once, piped, read_line
    from pilotlight.cli.conversation import Conversation
    from pilotlight.cli.inference import Access, InferenceClient
    from pilotlight.common.clock import SystemClock

    home = home_folder()
    text = " ".join(prompt) or piped()
    if json and not text:
        raise BadRequest("--json answers one prompt: give it as an argument, or on standard input")
    with InferenceClient(Access.from_environment(os.environ, home)) as inference:
        known = {card["id"] for card in inference.models()}
        if model not in known or name is not None:
            with admin_client() as client:
                model = _obtaining(client, yes=yes, as_json=json).model(model, name)
        sampling = {
            key: value
            for key, value in (("temperature", temperature), ("max_tokens", max_tokens))
            if value is not None
        }
        talk, clock = Conversation(model=model, system=system, sampling=sampling), SystemClock()
        if text:
            return answer_once(inference, talk, text, clock, verbose=verbose, as_json=json)
        return Session(inference, talk, clock, read_line, verbose=verbose).run()


def pull(
    source: Annotated[
        str, Parameter(help="hf://org/name[@revision], s3://bucket/prefix, or a folder.")
    ],
    /,
    *,
    name: SourceName = None,
    revision: Annotated[
        str | None, Parameter(help="Of hf://: branch, tag or commit; by default main.")
    ] = None,
    yes: Yes = False,
    json: Json = False,
) -> int:
    """Fetch a model and register it. What lies outside the system's model roots is copied below
    them, after a question.
    """
    from pilotlight.cli.models import told_model
    from pilotlight.cli.output import console, emit_json

    with admin_client() as client:
        found = _obtaining(client, yes=yes, as_json=json).source(
            source, name=name, revision=revision
        )
    if json:
        emit_json(found)
    else:
        told = f"registered {told_model(found)}; try: pilotlight run {found['name']}"
        console.print(told, soft_wrap=True)
    return 0


def _obtaining(client: "AdminClient", *, yes: bool, as_json: bool) -> "Obtaining":
    from pilotlight.cli.obtaining import Obtaining, asker

    return Obtaining(
        client=client,
        home=home_folder(),
        elsewhere="PILOTLIGHT_URL" in os.environ,
        ask=asker(yes=yes, as_json=as_json),
        quiet=as_json,
    )
