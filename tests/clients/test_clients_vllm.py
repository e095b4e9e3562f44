"""vLLM's own tests of its OpenAI server (Apache-2.0), as far as they apply, against a whole system.

Its names of models are aliases of the demo model here, and what the tests import of vLLM is a
stand-in (``suites/vllm_conftest.py``). Each of its files and tests is run, or named here with the
reason.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_suites import ASYNC_INI, SUITES, passed, run, told
from embedded_system import RunningSystem, running

pytestmark = [pytest.mark.clients, pytest.mark.slow]

ALIASES = "Qwen/Qwen3-0.6B HuggingFaceH4/zephyr-7b-beta zephyr-lora Qwen/Qwen2.5-1.5B-Instruct"

CHOSEN: dict[str, tuple[str, ...]] = {
    "completion/test_completion.py": (
        "test_completion_streaming",
        "test_invalid_grammar",
        "test_invalid_json_schema",
        "test_invalid_regex",
        "test_no_logprobs",
        "test_parallel_no_streaming",
        "test_parallel_streaming",
        "test_prompt_logprobs_completion",
        "test_some_logprobs",
        "test_too_many_completion_logprobs",
        "test_zero_logprobs",
    ),
    "chat_completion/test_chat.py": (
        "test_chat_completion_n_equals_1",
        "test_chat_completion_n_parameter_streaming",
        "test_chat_completion_n_with_seed",
        "test_extra_fields_allowed",
        "test_no_logprobs_chat",
        "test_response_format_text",
        "test_some_logprobs_chat",
        "test_structured_outputs_type_error",
        "test_too_many_chat_logprobs",
        "test_zero_logprobs_chat",
    ),
    "chat_completion/test_chat_logit_bias_validation.py": (
        "test_chat_logit_bias_non_numeric_value",
    ),
}
"""Tests that are run, by file."""
AT_LEAST = 26
"""Of these, each model and parameter counted."""

NOT_HERE: dict[str, str] = {
    "test_single_completion": "compares numbers of tokens of its model",
    "test_single_chat_session": "compares numbers of tokens of its model",
    "test_echo_logprob_completion": "compares texts by its model's tokenizer",
    "test_complex_message_content": "wants an answer that the demo model does not know",
    "test_response_format_json_object": "wants an answer that the demo model does not know",
    "test_response_format_json_schema": "wants an answer that the demo model does not know",
    "test_chat_completion_n_parameter_non_streaming": "wants a model whose answers differ",
    "test_chat_streaming": "wants a last chunk with text; OpenAI's, and ours, has the reason alone",
    "test_completion_stream_options": "continuous_usage_stats, a field of vLLM's own",
    "test_chat_completion_stream_options": "continuous_usage_stats, a field of vLLM's own",
    "test_logprob_token_ids": "a field of vLLM's own",
    "test_logprob_token_ids_stream": "a field of vLLM's own",
    "test_completion_truncation_side_controls_prompt_truncation": "a field of vLLM's own",
    "test_batch_completions": "use_beam_search, refused here by name",
    "test_prompt_logprobs_chat": "prompt_logprobs of chats, refused here by name",
    "test_more_than_one_prompt_logprobs_chat": "prompt_logprobs of chats, refused here by name",
    "test_custom_role": "roles that OpenAI does not have are refused here",
    "test_invocations": "SageMaker's route, asked without a key",
    "test_long_seed": "calculates with torch's limits",
    "test_chat_logit_bias_valid": "needs vLLM's ModelConfig",
    "test_chat_logit_bias_invalid": "needs vLLM's ModelConfig",
    "test_chat_logit_bias_non_integer_key": "compares the words of the refusal",
    "test_chat_logit_bias_multiple_non_integer_keys": "compares the words of the refusal",
}
"""Tests of those files that are not run, and why not."""
FIXTURES = re.compile(r"structured_outputs_(choice|json|regex)_chat")
"""Named by fixtures of vLLM's whole test tree, which is not taken."""
OWN_CLASSES = re.compile(r"request_|null_top_logprobs")
"""Tests of vLLM's own classes in them, without a server."""

LEFT_OUT: dict[str, str] = {
    "tests of vLLM's own classes, without a server": """
        chat_completion/test_chat_error.py chat_completion/test_message_assembly.py
        chat_completion/test_non_object_body_validation.py chat_completion/test_stream_processor.py
        chat_completion/test_thinking_token_budget_validation.py chat_completion/test_serving_chat.py
        completion/test_completion_error.py completion/test_completion_text_offset.py
        completion/test_prompt_validation.py parser/test_harmony_render_parity.py
        parser/test_harmony_utils.py responses/test_errors.py responses/test_function_call_parsing.py
        responses/test_harmony_utils.py responses/test_namespace_tool_separator.py
        responses/test_parsable_context_unit.py responses/test_protocol.py
        responses/test_response_input_to_harmony.py responses/test_responses_utils.py
        responses/test_sampling_params.py responses/test_serving_responses.py
        responses/test_streaming_events.py test_penalty_default_resolution.py
        test_reasoning_enable_thinking.py test_render_parity.py test_render_token_offsets.py
        test_session_id.py test_stop_token_ids.py test_tool_calls_serialization.py
        test_tool_choice_content_none.py test_watermarking.py""",
    "routes, fields or settings of vLLM's own": """
        chat_completion/test_batched_chat_completions.py chat_completion/test_chat_echo.py
        chat_completion/test_enable_force_include_usage.py chat_completion/test_logprob_token_ids.py
        chat_completion/test_root_path.py chat_completion/test_extra_content_fields.py
        chat_completion/test_thinking_token_budget.py completion/test_token_in_token_out.py
        decisions/test_decisions_e2e.py test_chunked_prompt.py test_return_token_ids.py
        test_return_tokens_as_ids.py""",
    "embeddings as prompts, adapters, tensorizer": """
        chat_completion/test_chat_completion_with_prompt_embeds.py models/test_models.py
        completion/test_completion_with_prompt_embeds.py completion/test_lora_resolvers.py
        completion/test_tensorizer_entrypoint.py""",
    "models that know, reason or call functions, of a size that a CPU is too slow for": """
        chat_completion/test_chat_completion.py chat_completion/test_include_reasoning.py
        chat_completion/test_completion_with_function_calling.py correctness/test_lmeval.py
        responses/test_basic.py responses/test_function_call.py responses/test_harmony.py
        responses/test_mcp_tools.py responses/test_parsable_context.py responses/test_simple.py
        responses/test_stateful.py responses/test_structured_output.py""",
    "schemathesis over vLLM's document: ours has its own test": "test_openai_schema.py",
}
"""Files that are not run, by the reason."""


@pytest.fixture(scope="module")
def source() -> Path:
    """vLLM's tests of its OpenAI server."""
    folder = Path(os.environ["PILOTLIGHT_CLIENTS_FOLDER"])
    return folder / "vllm" / "tests" / "entrypoints" / "openai"


@pytest.fixture(scope="module")
def system() -> Iterator[RunningSystem]:
    """A whole system with the demo model, by the names of vLLM's."""
    with tempfile.TemporaryDirectory(prefix="pilotlight-clients-") as folder:
        os.chmod(folder, 0o711)
        aliases = ",".join(f"{name}=ember-7m" for name in ALIASES.split())
        environment = {"PILOTLIGHT_MODEL_ALIASES": aliases}
        with running(Path(folder) / "home", "--with-demo-model", environment=environment) as made:
            yield made


def test_every_test_is_run_or_named_with_a_reason(source: Path) -> None:
    files = {str(path.relative_to(source)) for path in source.rglob("test_*.py")}
    left_out = [name for names in LEFT_OUT.values() for name in names.split()]
    assert files == {*CHOSEN, *left_out}
    assert len(files) == len(CHOSEN) + len(left_out)
    for file, chosen in CHOSEN.items():
        found = re.findall(r"^(?:async )?def (test_\w+)", (source / file).read_text(), re.M)
        unnamed = {
            name
            for name in {*found} - {*chosen, *NOT_HERE}
            if FIXTURES.search(name) is None and OWN_CLASSES.search(name) is None
        }
        assert unnamed == set(), file
        assert {*chosen} <= {*found}, file


def test_vllms_tests(system: RunningSystem, source: Path, tmp_path: Path) -> None:
    shutil.copy(SUITES / "vllm_conftest.py", tmp_path / "conftest.py")
    (tmp_path / "pytest.ini").write_text(ASYNC_INI)
    wanted: list[str] = []
    for file, chosen in CHOSEN.items():
        shutil.copy(source / file, tmp_path)
        wanted += [f"{Path(file).name}::{name}" for name in chosen]
    report = tmp_path / "report.xml"
    python = source.parents[3] / "others" / "bin" / "python"
    # What is null is left out of our answers; OpenAI's client knows no default of this field.
    options = [
        "-k",
        "not (prompt_logprobs and None)",
        "--tb=short",
        "-q",
        "--junitxml",
        str(report),
    ]
    run(
        [str(python), "-m", "pytest", "-p", "no:cacheprovider", *options, *wanted],
        tmp_path,
        told(system),
    )
    assert passed(report) >= AT_LEAST
