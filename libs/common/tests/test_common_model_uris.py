"""URIs and roots: what may be read is decided by their text alone, so every odd text must be
refused or mean one thing.
"""

import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.common.errors import SettingsInvalid, SourceMissing, UriNotAllowed
from pilotlight.common.model_roots import ModelRoots, ModelRootsSettings
from pilotlight.common.model_uris import FolderUri, HubUri, S3Uri, parse_uri

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("uri", "meaning", "written"),
    [
        ("s3://bucket", S3Uri("bucket", ()), "s3://bucket"),
        ("s3://bucket/", S3Uri("bucket", ()), "s3://bucket"),
        (
            "S3://my-bucket.2/a/b c/d=1/",
            S3Uri("my-bucket.2", ("a", "b c", "d=1")),
            "s3://my-bucket.2/a/b c/d=1",
        ),
        ("s3://bucket/@home/x:y", S3Uri("bucket", ("@home", "x:y")), "s3://bucket/@home/x:y"),
        ("hf://Org/Name-1.5_b", HubUri("Org", "Name-1.5_b"), "hf://Org/Name-1.5_b"),
        ("Hf://org/name@v1.0", HubUri("org", "name", "v1.0"), "hf://org/name@v1.0"),
        ("hf://org/name@refs/pr/1", HubUri("org", "name", "refs/pr/1"), "hf://org/name@refs/pr/1"),
        (f"hf://org/name@{COMMIT}", HubUri("org", "name", COMMIT), f"hf://org/name@{COMMIT}"),
    ],
)
def test_what_uris_mean(uri: str, meaning: S3Uri | HubUri, written: str) -> None:
    assert parse_uri(uri) == meaning
    assert str(meaning) == written
    assert parse_uri(written) == meaning


def test_only_whole_commits_are_pinned() -> None:
    assert HubUri("org", "name", COMMIT).pinned
    for revision in (None, "main", COMMIT[:-1], COMMIT.upper(), f"{COMMIT}0"):
        assert not HubUri("org", "name", revision).pinned


@pytest.mark.parametrize(
    "uri", ["/a/b", "file:///a/b", "FILE:///a/b", "file://localhost/a/b", "file:///a/%62"]
)
def test_folders(uri: str) -> None:
    assert parse_uri(uri) == FolderUri(Path("/a/b"))


@pytest.mark.parametrize(
    "uri",
    [
        "", "a/b", "s3", "s3:", "s3:/bucket/x", "s3:bucket", "hf:org/name", "file:/a", "file://a/b", "file://", "file:///a?x", "file:///a#x",
        "http://x/y", "https://x/y", "gs://bucket/x", "s3a://bucket/x", " s3://bucket", "s3 ://bucket",
        "s3://", "s3:///x", "s3://b", "s3://Bucket", "s3://bu_cket", "s3://-bucket", "s3://buc..ket", f"s3://{'b' * 64}", "s3://bücket",
        "s3://bucket/..", "s3://bucket/../other", "s3://bucket/a/../b", "s3://bucket/./a", "s3://bucket/a//b", "s3://bucket//a",
        "s3://bucket/a%2e%2e/b", "s3://bucket/%2e%2e", "s3://bucket/a%2fb", "s3://bucket/a%00", "s3://bucket/a\0", "s3://bucket/a\nb",
        "s3://bucket/a?endpoint=x", "s3://bucket/a#b", "s3://key:secret@bucket/a", "s3://bucket:9000/a", "s3://bucket/a\\b", "s3://bucket/ü",
        "s3://bucket/" + "a" * 256, "s3://bucket/" + "a/" * 1100,
        "hf://", "hf://org", "hf://org/", "hf:///name", "hf://org/name/", "hf://org/name/file", "hf://org/name@", "hf://org/name@a@b",
        "hf://../name", "hf://org/..", "hf://org/.name", "hf://org/na%6de", "hf://org/name%00", "hf://org/name@../x", "hf://org/name@a//b",
        "hf://org/name@/a", "hf://org/name@a/", "hf://org/name@a..b", "hf://org/name?x", "hf://org/name@main#x", "hf://user:token@org/name",
        "hf://org/name.git", "hf://org/a--b", "hf://org/" + "n" * 97, "hf://org/name@" + "r" * 201, "hf://org/nämé",
    ],
)  # fmt: skip
def test_odd_uris_are_refused(uri: str) -> None:
    with pytest.raises(UriNotAllowed) as caught:
        parse_uri(uri)
    assert caught.value.param == "uri"
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 600


@given(
    st.text(max_size=60),
    st.sampled_from(["", "s3://bucket/", "s3://", "hf://org/", "hf://", "file:///", "/"]),
)
def test_any_text_is_refused_or_means_what_it_says(text: str, start: str) -> None:
    try:
        meaning = parse_uri(start + text)
    except UriNotAllowed:
        return
    if isinstance(meaning, FolderUri):
        assert meaning.path.is_absolute()
        return
    assert parse_uri(str(meaning)) == meaning
    segments = (
        meaning.prefix
        if isinstance(meaning, S3Uri)
        else (meaning.org, meaning.name, *(meaning.revision or "x").split("/"))
    )
    for segment in segments:
        assert segment
        assert segment not in (".", "..")
        assert not set(segment) & set("/\\%?#\0\n")


SEGMENT = st.text(string.ascii_lowercase, min_size=1, max_size=3)


@given(st.lists(SEGMENT, max_size=4), st.lists(SEGMENT, max_size=4))
def test_a_root_holds_what_is_below_it_segment_by_segment(
    root: list[str], prefix: list[str]
) -> None:
    roots = ModelRoots.parse("/".join(["s3://bucket", *root]))
    below = prefix[: len(root)] == root
    for bucket, allowed in (("bucket", below), ("bucket2", False)):
        try:
            roots.check("/".join([f"s3://{bucket}", *prefix]))
        except UriNotAllowed:
            assert not allowed
        else:
            assert allowed


@pytest.mark.parametrize(
    ("roots", "allowed", "refused"),
    [
        (
            "s3://bucket/models",
            ["s3://bucket/models", "s3://bucket/models/a"],
            ["s3://bucket/models2", "s3://bucket", "s3://other/models"],
        ),
        ("S3://bucket/", ["s3://bucket", "s3://bucket/x/y"], ["s3://bucket2/x"]),
        ("hf://", ["hf://org/name", "hf://a/b@main"], ["s3://bucket/x"]),
        ("hf://org", ["hf://org/name", "hf://org/other@v1"], ["hf://org2/name", "hf://Org/name"]),
        ("hf://org/name", ["hf://org/name@v1"], ["hf://org/name2", "hf://org/other"]),
        (
            " s3://one/a , hf://org/ ,, s3://two ",
            ["s3://one/a/b", "s3://two/c", "hf://org/x"],
            ["s3://one/b"],
        ),
        ("", [], ["s3://bucket/x", "hf://org/name", "/"]),
    ],
)
def test_roots(roots: str, allowed: list[str], refused: list[str]) -> None:
    parsed = ModelRoots.parse(roots)
    for uri in allowed:
        assert parsed.check(uri) == parse_uri(uri)
    for uri in refused:
        with pytest.raises(UriNotAllowed, match="PILOTLIGHT_MODEL_ROOTS"):
            parsed.check(uri)


@pytest.mark.parametrize(
    "root",
    [
        "s3://",
        "s3://Bucket",
        "s3://bucket/../x",
        "hf://a/b/c",
        "hf://..",
        "http://x",
        "gs://bucket",
        "file://x",
    ],
)
def test_odd_roots_are_refused_at_start(root: str) -> None:
    with pytest.raises(SettingsInvalid, match="PILOTLIGHT_MODEL_ROOTS"):
        ModelRootsSettings(model_roots=f"/models,{root}")


def test_folders_are_resolved_before_they_are_compared(tmp_path: Path) -> None:
    inside, outside = tmp_path / "models" / "tiny", tmp_path / "outside"
    inside.mkdir(parents=True)
    outside.mkdir()
    (tmp_path / "models" / "link").symlink_to(outside)
    (tmp_path / "models" / "loop").symlink_to("loop")
    roots = ModelRoots.parse(f"{tmp_path}/models/../models, s3://bucket")
    assert roots.check(inside.as_uri()) == roots.check(f"{inside}/../tiny/.") == FolderUri(inside)
    for path in (
        outside,
        tmp_path / "models" / "link",
        inside / "../../outside",
        tmp_path / "models2",
    ):
        with pytest.raises(UriNotAllowed, match="s3://bucket"):
            roots.check(str(path))
    with pytest.raises(SourceMissing):
        roots.check(str(inside / "missing"))
    with pytest.raises((SourceMissing, UriNotAllowed)):
        roots.check(str(tmp_path / "models" / "loop"))
